"""Our results next to published ones, on a common basis."""

from collections.abc import Callable, Sequence

from tprimat import units
from tprimat.analyze.compare import Difference
from tprimat.analyze.published import Neighbour, Neighbourhood
from tprimat.facts.accelerators import Backend
from tprimat.facts.published import PublishedResult
from tprimat.report.catalogue import tera
from tprimat.report.tables import columns, with_interval

HEADER = ("result", "when", "as published", "TFLOP/s/GPU", "of dense peak", "ours is")
CAPTION = "FLOP counted causal throughout, against the dense peak. The ratio is for orientation; the differences are below."
NO_NEIGHBOURS = "No published neighbours: no configuration here has a FLOP/s to compare with them.\n"

Reproduce = Callable[[PublishedResult, Backend], str]


def text(found: Sequence[Neighbourhood], reproduce: Reproduce) -> str:
    """Return, for a terminal, a table and the differences for each configuration of ours, then each source.

    Args:
        found: configurations with their nearest published results.
        reproduce: gives the command that runs a published configuration on a machine of a backend.
    """
    if not found:
        return NO_NEIGHBOURS
    backend = found[0].ours.run.machine.platform
    results = {neighbour.result.name: neighbour.result for one in found for neighbour in one.neighbours}
    sources = "\n".join(line for result in results.values() for line in _source(result, reproduce(result, backend)))
    return "\n\n".join(["Published neighbours. " + CAPTION, *map(_block, found), sources]) + "\n"


def _source(result: PublishedResult, command: str) -> list[str]:
    note = [f"  note    {result.notes}"] if result.notes else []
    return [result.name, f"  source  {result.source}", *note, f"  run it  {command}"]


def _block(found: Neighbourhood) -> str:
    ours = found.ours
    own = [
        ours.group.label,
        units.ABSENT,
        f"{with_interval(ours.per_gpu, units.count, ' .. ')} tokens/s/GPU",
        tera(ours.flops_per_gpu.value if ours.flops_per_gpu else None),
        units.percent(ours.utilization.value if ours.utilization else None),
        units.ABSENT,
    ]
    lines = [columns(HEADER, [own, *map(_row, found.neighbours)], left=3)]
    for neighbour in found.neighbours:
        differing = "; ".join(map(_difference, neighbour.differences)) or "nothing that the source states"
        lines.append(f"{neighbour.result.name} differs: {differing}")
    return "\n".join(lines)


def _row(neighbour: Neighbour) -> list[str]:
    result, rebased = neighbour.result, neighbour.rebased
    return [
        result.name,
        result.date or units.ABSENT,
        _printed(neighbour),
        tera(rebased.flops_per_second_per_gpu),
        units.percent(rebased.mfu),
        f"{neighbour.ratio:.2f} x",
    ]


def _printed(neighbour: Neighbour) -> str:
    result = neighbour.result
    words = []
    if result.tokens_per_second_per_gpu is not None:
        words.append(f"{units.count(result.tokens_per_second_per_gpu)} tokens/s/GPU")
    if result.flops_per_second_per_gpu is not None:
        words.append(f"{tera(result.flops_per_second_per_gpu)} TFLOP/s {result.convention or ''}".rstrip())
    if result.mfu is not None:
        words.append(f"MFU {units.percent(result.mfu)}")
    return ", ".join(words)


def _difference(one: Difference) -> str:
    first, second = (_plain(value) for value in (one.first, one.second))
    return f"{one.what} {first} here, {second} there"


def _plain(value: object) -> str:
    if value is None:
        return "not stated"
    return units.count(value) if isinstance(value, int) else str(value)
