"""How far a configuration is from the limits of its GPUs, and which of them binds, in sentences."""

from tprimat.analyze.groups import Group, group_mean
from tprimat.analyze.roofline import NEAR_A_LIMIT, Limit, limits, watts_per_gpu
from tprimat.core import units
from tprimat.core.workload import graph_obstacle
from tprimat.records.schema import RunMetrics, RunRecord

BUSY = 0.95
"""Share of time in which any kernel runs, from which a GPU does not wait: in benchmarks/records/h100, 0.99 and more in runs near
the power limit, 0.81 and less in runs that were slower than predicted."""
AS_GRAPHS = "platform_optimizations.nvidia.engine_options.cuda_graphs=true"
PROBE_COMMAND = "python3 -m tprimat probe gemm"
REST = (
    "The rest of the step goes to communication, memory traffic, gaps between kernels and matrix products below their peak rate."
)
BINDING = {
    "peak": "The peak of the matrix units limits it.",
    "measured matmul": "The matrix products themselves limit it: they run as fast as measured by themselves on this machine.",
    "power": "The power limit holds the clocks down: to be faster, it would have to use less energy per token.",
    "memory": "Memory limits the batch: a larger micro-batch does not fit.",
}


def distance_from_limits(group: Group, name: str = "It") -> list[str]:
    """Return the shares of the machine's limits that a configuration reaches, and what they mean as a separate paragraph."""
    reached = limits(group)
    *others, last = map(_share, reached) if reached else ("",)
    shares = f"{name} {', '.join(others)}{' and ' if others else ''}{last}." if reached else ""
    binding = [BINDING[limit.kind] for limit in reached if limit.binds]
    if not {"peak", "measured matmul"} & {limit.kind for limit in reached}:
        reason = next((item.metrics.mfu_absent_because for item in group.runs if item.metrics), None)
        return [f"How far it is from the machine's limit is not known: {reason}." if reason else "", shares, *binding]
    if binding:
        return [shares, *binding]
    if waits := idle(group.run, group_mean(group, lambda one: one.gpu_busy)):
        return [shares, waits]
    probed = any(limit.kind == "measured matmul" for limit in reached)
    return [shares, REST if probed else f"{REST} {PROBE_COMMAND} measures the rate of a bare product on this machine."]


def idle(run: RunRecord, busy: float | None) -> str:
    """Say how long GPUs ran no kernel at all, and what may help; empty where they hardly waited, or where nothing was read."""
    if busy is None or busy >= BUSY:
        return ""
    waits = (
        f"Its GPUs ran no kernel in {units.percent(1 - busy, 0)} of the time, most likely waiting for the host to launch some."
    )
    return f"{waits} One call can launch each micro-batch: --set {AS_GRAPHS}" if _could_launch_graphs(run) else waits


def idle_of_run(run: RunRecord, metrics: RunMetrics) -> str:
    """Say it of one run; empty also where power limits it."""
    power, most = watts_per_gpu(run, metrics), run.machine.power_limit_watts
    return "" if power and most and power / most >= NEAR_A_LIMIT else idle(run, metrics.gpu_busy)


def _could_launch_graphs(run: RunRecord) -> bool:
    """Whether the embedded engine could launch a run's micro-batches as CUDA graphs, and did not."""
    options, machine = run.engine_options, run.machine
    is_ours = "compiled_regions" in options  # a switch of that engine alone
    if not is_ours or options.get("cuda_graphs") or (machine.platform, machine.nodes) != ("cuda", 1) or run.ran.shape is None:
        return False
    own_layers = options.get("layers") == "local"
    return graph_obstacle(run.ran, fully_shard=options.get("fully_shard") is True, own_layers=own_layers) is None


def _share(limit: Limit) -> str:
    if limit.kind == "peak":
        return f"reaches {units.percent(limit.share)} of the GPU's dense peak of {units.teraflops(limit.size)}"
    if limit.kind == "measured matmul":
        return f"reaches {units.percent(limit.share)} of the fastest product measured on this machine"
    if limit.kind == "power":
        return f"draws {units.percent(limit.share, 0)} of its limit of {limit.size:,.0f} W"
    verb = "fills" if limit.kind == "memory" else "reserves"
    return f"{verb} {units.percent(limit.share, 0)} of {units.gibibytes(limit.size)} of memory"
