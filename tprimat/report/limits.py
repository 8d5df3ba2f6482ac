"""How far a configuration is from the limits of its GPUs, and which of them binds, in sentences."""

from tprimat import units
from tprimat.analyze.groups import Group
from tprimat.analyze.roofline import Limit, limits

REST = "communication, memory traffic, gaps between kernels and matrix products below their peak rate"
PROBE_COMMAND = "./benchmark.py --probe gemm"
PROBE = f" {PROBE_COMMAND} measures the rate of a bare product on this machine."
BINDING = {
    "peak": "The peak of the matrix units limits it.",
    "measured matmul": "The matrix products themselves limit it: they run as fast as measured by themselves on this machine.",
    "power": "The power limit holds the clocks down: to be faster, it would have to use less energy per token.",
    "memory": "Memory limits the batch: a larger micro-batch does not fit.",
}


def distance_from_limits(group: Group) -> list[str]:
    """Return the shares of the machine's limits, and what they mean as a separate paragraph for several cards."""
    found = limits(group)
    *others, last = map(_share, found) if found else ("",)
    shares = f"It {', '.join(others)}{' and ' if others else ''}{last}." if found else ""
    binding = [BINDING[limit.kind] for limit in found if limit.binds]
    if all(limit.kind in {"power", "memory"} for limit in found):
        reason = next((item.metrics.mfu_absent_because for item in group.runs if item.metrics), None)
        known = f"How far it is from the machine's limit is not known: {reason}." if reason else ""
        return [known, shares, *binding]
    if binding:
        return [shares, *binding]
    hint = "" if any(limit.kind == "measured matmul" for limit in found) else PROBE
    return [shares, f"Neither compute nor memory is used up: the rest of the step goes to {REST}.{hint}"]


def _share(limit: Limit) -> str:
    if limit.kind == "peak":
        return f"reaches {units.percent(limit.share)} of the GPU's dense peak of {units.teraflops(limit.size)}"
    if limit.kind == "measured matmul":
        return f"reaches {units.percent(limit.share)} of the fastest product measured on this machine"
    if limit.kind == "power":
        return f"draws {units.percent(limit.share, 0)} of its limit of {limit.size:,.0f} W"
    return f"fills {units.percent(limit.share, 0)} of {units.gibibytes(limit.size)} of memory"
