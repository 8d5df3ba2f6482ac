"""How far a configuration is from the limits of its GPUs, and which of them binds, in sentences."""

from collections.abc import Sequence

from tprimat.analyze.groups import Group, group_mean
from tprimat.analyze.roofline import NEAR_A_LIMIT, Limit, limits, watts_per_gpu
from tprimat.analyze.traits import processors
from tprimat.core import units
from tprimat.core.cuda_graphs import obstacle
from tprimat.records.schema import RunMetrics, RunRecord

BUSY = 0.95
"""Share of time in which any kernel runs, from which a GPU does not wait: in benchmarks/records/h100, 0.99 and more in runs near
the power limit, 0.81 and less in runs that were slower than predicted."""
AS_GRAPHS = "platform_optimizations.nvidia.engine_options.cuda_graphs=true"
ONE_CALL = f"to launch each micro-batch with one call: --set {AS_GRAPHS}"
REST = "communication, memory traffic, gaps between kernels and matrix products below their peak rate"
PROBE_COMMAND = "python3 -m tprimat probe gemm"
PROBE = f" {PROBE_COMMAND} measures the rate of a bare product on this machine."
BINDING = {
    "peak": "The peak of the matrix units limits it.",
    "measured matmul": "The matrix products themselves limit it: they run as fast as measured by themselves on this machine.",
    "power": "The power limit holds the clocks down: to be faster, it would have to use less energy per token.",
    "memory": "Memory limits the batch: a larger micro-batch does not fit.",
}


def distance_from_limits(group: Group, name: str = "It") -> list[str]:
    """Return the shares of the machine's limits that a configuration reaches, and what they mean as a separate paragraph."""
    found = limits(group)
    *others, last = map(_share, found) if found else ("",)
    shares = f"{name} {', '.join(others)}{' and ' if others else ''}{last}." if found else ""
    binding = [BINDING[limit.kind] for limit in found if limit.binds]
    if all(limit.kind in {"power", "memory", "reserved memory"} for limit in found):
        reason = next((item.metrics.mfu_absent_because for item in group.runs if item.metrics), None)
        known = f"How far it is from the machine's limit is not known: {reason}." if reason else ""
        return [known, shares, *binding]
    if binding:
        return [shares, *binding]
    if (busy := group_mean(group, lambda one: one.gpu_busy)) is not None and busy < BUSY:
        return [shares, _idle(group.run, busy)]
    hint = "" if any(limit.kind == "measured matmul" for limit in found) else PROBE
    return [shares, f"{_unused(group, found)}: the rest of the step goes to {REST}.{hint}"]


def _unused(group: Group, found: Sequence[Limit]) -> str:
    """Say what does not bound a configuration, and of what nothing is recorded."""
    kinds = {limit.kind for limit in found}
    power = group.run.machine.platform == "cpu" or group_mean(group, lambda one: watts_per_gpu(group.run, one)) is not None
    memory = bool(kinds & {"memory", "reserved memory"})
    unknown = [name for name, is_known in (("power", power), ("memory", memory)) if not is_known]
    what = "Neither compute nor memory is used up" if "memory" in kinds else "Compute is not used up"
    be = "is" if len(unknown) == 1 else "are"
    return f"{what}, and its {' and '.join(unknown)} {be} not recorded" if unknown else what


def _idle(run: RunRecord, busy: float) -> str:
    """Say how long GPUs ran no kernel at all, and what may help."""
    idle = units.percent(1 - busy, 0)
    host = f"the host ({known})" if (known := processors(run)) else "the host"
    waits = f"Its GPUs ran no kernel in {idle} of the time: they waited, most likely for {host} to launch some."
    return f"{waits} {ONE_CALL[0].upper()}{ONE_CALL[1:]}" if _could_launch_graphs(run) else waits


def idle_of_run(run: RunRecord, metrics: RunMetrics) -> str | None:
    """Return how long the GPUs of a run ran no kernel, and what may help; None where they hardly waited, or power limits them."""
    power, most = watts_per_gpu(run, metrics), run.machine.power_limit_watts
    at_its_limit = power is not None and most is not None and power / most >= NEAR_A_LIMIT
    if metrics.gpu_busy is None or metrics.gpu_busy >= BUSY or at_its_limit:
        return None
    text = f"{units.percent(1 - metrics.gpu_busy, 0)} of the time, most likely waiting for the host to launch kernels"
    return f"{text}; {ONE_CALL}" if _could_launch_graphs(run) else text


def _could_launch_graphs(run: RunRecord) -> bool:
    """Whether the embedded engine could launch a run's micro-batches as CUDA graphs, and did not."""
    options = run.engine_options
    is_ours = "compiled_regions" in options  # a switch of that engine alone
    if (
        not is_ours
        or options.get("cuda_graphs")
        or run.machine.platform != "cuda"
        or run.machine.nodes != 1
        or run.ran.shape is None
    ):
        return False
    own_layers = options.get("layers") == "local"
    return obstacle(run.ran, fully_shard=options.get("fully_shard") is True, own_layers=own_layers) is None


def _share(limit: Limit) -> str:
    if limit.kind == "peak":
        return f"reaches {units.percent(limit.share)} of the GPU's dense peak of {units.teraflops(limit.size)}"
    if limit.kind == "measured matmul":
        return f"reaches {units.percent(limit.share)} of the fastest product measured on this machine"
    if limit.kind == "power":
        return f"draws {units.percent(limit.share, 0)} of its limit of {limit.size:,.0f} W"
    verb = "fills" if limit.kind == "memory" else "reserves"
    return f"{verb} {units.percent(limit.share, 0)} of {units.gibibytes(limit.size)} of memory"
