"""How far the losses of runs made in turn are from those of the embedded engine in bf16: a table of results/performance.md."""

from pathlib import Path

from lead_figures import DELAYED, OURS
from record_figures import groups_in
from speed_layouts import LAYOUTS

from tprimat.analyze.groups import Group
from tprimat.core import units
from tprimat.report.tables import table

SAME_STEPS = "in-turn"
"""Folder of runs in both dtypes with as many steps as those of DELAYED, so that the learning rate rises alike."""
PEER = "transformer_engine"
NAMES = {OURS: "embedded engine", PEER: "with Transformer Engine's layers"}
FP8 = "_fp8"
FIRST = 5
"""Steps of the first column; the second has the others."""


def losses(results: Path) -> str:
    """List the largest difference of each program, in both dtypes, for each layout that ran in both."""
    folder, rows = results / SAME_STEPS, []
    for narrow in (layout.name for layout in LAYOUTS if layout.name.endswith(FP8)):
        wide = narrow.removesuffix(FP8)
        groups = {(name, layout): groups_in(folder / name / layout, ()) for layout in (wide, narrow) for name in NAMES}
        if not all(groups.values()):
            continue
        reference = groups.pop((OURS, wide))[0]
        rows += [_row(layout, NAMES[name], group, reference) for (name, layout), (group, *_) in groups.items()]
        delayed = groups_in(results / DELAYED / PEER / narrow, ())
        rows += [_row(narrow, f"{NAMES[PEER]}, delayed scaling", group, reference) for group in delayed]
    header = ("layout", "program", "runs", f"steps 1 to {FIRST}", "later steps")
    return table(header, rows, left=2)


def _row(layout: str, name: str, group: Group, reference: Group) -> list[str]:
    apart = [abs(one / other - 1) for one, other in zip(_mean_losses(group), _mean_losses(reference), strict=True)]
    ends = [units.percent(max(part), 2) for part in (apart[:FIRST], apart[FIRST:])]
    return [f"`{layout}`", name, str(len(group.runs)), *ends]


def _mean_losses(group: Group) -> list[float]:
    """Return the loss of each step, as the mean over the runs."""
    runs = [[step.loss for step in item.result.steps if step.loss is not None] for item in group.runs]
    return [sum(step) / len(step) for step in zip(*runs, strict=True)]
