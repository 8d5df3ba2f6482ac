"""Report whether the losses of two ways to train are the same, as text and as a document."""

from dataclasses import asdict, dataclass
from typing import Any

from tprimat.analyze.parity import FEWEST_SEEDS, Curve, Look, Parity
from tprimat.analyze.traits import DifferingTrait
from tprimat.core import units
from tprimat.report.screen import PLAIN, Meaning, Screen
from tprimat.report.tables import columns, plural
from tprimat.report.winner import lines_of_sides

MEANINGS: dict[str, Meaning] = {"parity": "winner", "refuted": "refused", "undecided": "warning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """The result of comparing the losses of two sides."""

    reference: str
    """Where its runs were read."""
    candidate: str
    parity: Parity
    curves: tuple[tuple[Curve, Curve], ...]
    """Of each pair: reference and candidate."""
    pairs: int
    traits: tuple[DifferingTrait, ...]
    """In which the sides differ; first is the reference."""
    same_weights: bool
    """Whether one engine drew the initial weights of both, so that a seed stands for the same ones."""


def verdict(report: ParityReport) -> str:
    """Put the verdict into words."""
    parity = report.parity
    margin = units.percent(parity.within)
    if parity.outcome == "parity":
        return f"Parity within {margin} by step {parity.step}."
    if parity.outcome == "refuted":
        return f"Parity within {margin} is refuted at step {parity.step}."
    return f"Undecided: {parity.step} steps show neither parity within {margin} nor a difference beyond it."


def text(report: ParityReport, screen: Screen = PLAIN) -> str:
    """Format the verdict, what differs, and the difference at each look."""
    parity = report.parity
    seeds = plural(parity.seeds, "seed")
    lines = [
        f"{report.candidate} against {report.reference}: {plural(report.pairs, 'pair')} on the same data, {seeds}",
        screen.prose(verdict(report), 2, MEANINGS[parity.outcome]),
        *(screen.prose(line, 2) for line in lines_of_sides(report.traits, (1, 0))),
        "",
        columns(["after step", "mean over", "difference of losses", "interval"], [_row(look) for look in parity.looks], left=2),
        "",
    ]
    return "\n".join(lines + [screen.prose(line, 2, "quiet") for line in _caveats(report)]) + "\n"


def _row(look: Look) -> list[str]:
    found = look.difference
    ends = "none" if found.low is None or found.high is None else f"[{_signed(found.low)}, {_signed(found.high)}]"
    return [str(look.step), f"steps {look.first_step} to {look.step}", _signed(found.value), ends]


def _signed(value: float) -> str:
    """Format a small difference with the digits that it needs; a loss that is not a number has none."""
    return "not a number" if value == float("inf") else units.signed_percent(value, 2)


def _caveats(report: ParityReport) -> list[str]:
    lines = ["Intervals share 5 % of false alarms among all looks."]
    if report.parity.seeds < FEWEST_SEEDS:
        lines.append(f"With fewer than {FEWEST_SEEDS} seeds the interval covers the steps: it holds for these runs only.")
    if not report.same_weights:
        lines.append("Two engines draw different initial weights from the same seed, so early losses may differ.")
    return lines


def as_document(report: ParityReport) -> dict[str, Any]:
    """Return the verdict and its looks as one JSON document; what is not a number is null."""
    parity = report.parity
    return {
        "reference": report.reference,
        "candidate": report.candidate,
        "outcome": parity.outcome,
        "step": parity.step,
        "within": parity.within,
        "words": verdict(report),
        "seeds": parity.seeds,
        "pairs": report.pairs,
        "traits": [{"trait": one.name, "sides": one.words} for one in report.traits],
        "looks": [
            {
                "step": look.step,
                "first_step": look.first_step,
                "difference": {name: None if value == float("inf") else value for name, value in asdict(look.difference).items()},
            }
            for look in parity.looks
        ],
    }
