"""Draw two sides' losses, and their relative difference with the margin and the interval of each look."""

import math
from pathlib import Path

import numpy as np

from tprimat.analyze.parity import FEWEST_SEEDS
from tprimat.core import units
from tprimat.report.parity import ParityReport, verdict
from tprimat.report.plots.style import SMALL, figure, looks, save
from tprimat.report.tables import plural

LOOKS = "mean, interval (95 % for all looks together)"
CENTRAL = 0.9
"""Share of the differences that the axis shows for sure: early ones may be so large that nothing else could be seen."""


def draw_parity(report: ParityReport, path: Path) -> None:
    """Draw the losses on the left and their difference on the right.

    Raises:
        UserError: the suffix names no picture format.
        RecordError: the file cannot be written.
    """
    parity = report.parity
    first, second = looks(2)
    with figure(13, 5) as picture:
        losses, differences = picture.subplots(1, 2)
        for pair, (reference, candidate) in enumerate(report.curves):
            for curve, look, name in ((reference, first, report.reference), (candidate, second, report.candidate)):
                label = name if pair == 0 else None
                losses.plot(list(curve), list(curve.values()), color=look.colour, linestyle=look.line, label=label)
        losses.set(title="Training loss", xlabel="optimizer step", ylabel="nats per token")
        losses.legend(fontsize=SMALL)
        steps = [step for step, _ in parity.differences]
        for seed in range(parity.seeds):
            values = [each[seed] * 100 for _, each in parity.differences]
            differences.plot(steps, values, color="#999999", linewidth=1, label="one seed" if seed == 0 else None)
        margin = parity.within * 100
        differences.axhspan(-margin, margin, color=first.colour, alpha=0.15, label=f"within {units.percent(parity.within)}")
        shown = [look for look in parity.looks if look.difference.low is not None and math.isfinite(look.difference.value)]
        centres = [look.difference.value * 100 for look in shown]
        arms = [
            [(look.difference.value - (look.difference.low or 0)) * 100 for look in shown],
            [((look.difference.high or 0) - look.difference.value) * 100 for look in shown],
        ]
        differences.errorbar(
            [look.step for look in shown],
            centres,
            yerr=arms,
            fmt="o",
            color=second.colour,
            capsize=3,
            label=LOOKS,
        )
        sizes = [abs(value) * 100 for _, each in parity.differences for value in each if math.isfinite(value)]
        reach = max(4 * margin, 1.2 * float(np.quantile(sizes, CENTRAL)) if sizes else 0.0)
        differences.set_ylim(-reach, reach)
        differences.set(title="Difference of the losses", xlabel="optimizer step", ylabel="% of the reference's loss")
        differences.legend(fontsize=SMALL)
        picture.suptitle(_headline(report), x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        sides = f"{report.candidate} against {report.reference} · {plural(report.pairs, 'pair')}, {plural(parity.seeds, 'seed')}"
        few = parity.seeds < FEWEST_SEEDS
        spread = "intervals of the steps: for these runs only" if few else "intervals between seeds"
        picture.supxlabel(f"{sides} · same data, batch and learning rates · {spread}", x=0.01, ha="left", fontsize=SMALL)
        save(picture, path)


LONGEST_NAME = 40
"""Letters of a side in the headline; longer ones are in the caption."""


def _headline(report: ParityReport) -> str:
    words, names = verdict(report).rstrip("."), (report.candidate, report.reference)
    if max(map(len, names)) > LONGEST_NAME:
        return f"{words} ({plural(report.parity.seeds, 'seed')})"
    return f"{names[0]} against {names[1]}: {words[0].lower()}{words[1:]} ({plural(report.parity.seeds, 'seed')})"
