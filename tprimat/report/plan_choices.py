"""The answer to "what fits on these GPUs" and "which GPUs to rent": a row for each model, accelerator and number of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tprimat.core import units
from tprimat.core.models import ModelShape
from tprimat.predict.rates import Rates
from tprimat.predict.search import Answer, Candidate
from tprimat.report.plan import (
    TIGHT,
    document,
    host_may_be_late,
    is_tight,
    marked_layout,
    mfu,
    published_of_model,
    time_error,
)
from tprimat.report.screen import PLAIN, Screen
from tprimat.report.tables import columns, plural

BILLION = 1e9
OTHER_ENGINE = "§ By {}, which TPrimat does not start: the embedded engine cannot, or does not fit."
LATE = "‡ Slower with a host as slow at launching kernels as that of two H100 (docs/planning.md)."
HOURS = "GPU-hours: for a billion tokens. Times the price of a GPU-hour, that is what they cost."


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One model on some GPUs of one kind."""

    shape: ModelShape
    accelerator: str
    gpus: int
    found: tuple[Answer, Rates] | None = None
    """None: it cannot be asked so, which `refused` explains."""
    refused: str = ""
    enough: Candidate | None = None
    """Where nothing fits: a layout on the fewest GPUs that are enough."""
    narrower: str | None = None
    """Where nothing fits: the option of the engine that fits as bf16."""

    @property
    def best(self) -> Candidate | None:
        """Return the fastest layout that fits."""
        return self.found[0].fitting[0] if self.found and self.found[0].fitting else None

    @property
    def tight(self) -> bool:
        """Return whether the fastest layout leaves less memory than its prediction may be off by."""
        return self.best is not None and self.found is not None and is_tight(self.best, self.found[0].question)

    @property
    def gpu_hours(self) -> float:
        """Return the GPU-hours that a billion tokens take; infinite where nothing fits."""
        return BILLION / 3600 / self.best.time.tokens_per_second_per_gpu if self.best and self.best.time else float("inf")


def choices_text(choices: Sequence[Choice], precision: str, screen: Screen = PLAIN) -> str:
    """Format the choices in their order; what is the same in all of them is in the heading."""
    models = list(dict.fromkeys(choice.shape.name for choice in choices))
    accelerators = list(dict.fromkeys(choice.accelerator for choice in choices))
    counts = list(dict.fromkeys(choice.gpus for choice in choices))
    what = models[0] if len(models) == 1 else plural(len(models), "model")
    kind = accelerators[0] if len(accelerators) == 1 else plural(len(accelerators), "accelerator")
    where = plural(counts[0], "GPU") if len(counts) == 1 else f"{', '.join(f'{count:,}' for count in counts)} GPUs"
    varying = [len(models) > 1, len(accelerators) > 1, len(counts) > 1]
    rows = [_row(choice, varying) for choice in choices]
    names = [name for name, varies in zip(("model", "accelerator", "GPUs"), varying, strict=True) if varies]
    header = [*names, "fastest layout", "tokens/s/GPU", "MFU", "memory", "GPU-hours", "sequence"]
    shown = columns(header, rows, left=len(names) + 1, screen=screen, drop=["sequence", "MFU", "memory"])
    notes = [_proof(choices), *([TIGHT] if any(choice.tight for choice in choices) else [])]
    notes += [LATE] if any(_late(choice) for choice in choices) else []
    others = dict.fromkeys(choice.found[0].question.work.code.name for choice in choices if choice.found and _not_ours(choice))
    notes += [OTHER_ENGINE.format(" or ".join(others))] if others else []
    notes += _published(choices)
    notes += [HOURS] if any(choice.best for choice in choices) else []
    title = screen.prose(f"{what} on {where} ({kind}), {precision}", meaning="heading")
    return "\n\n".join([title, shown, "\n".join(screen.prose(note) for note in notes)])


def _published(choices: Sequence[Choice]) -> list[str]:
    """Return what others published of each model on each accelerator, the nearest of each."""
    found: dict[tuple[str, str], str] = {}
    for choice in choices:
        if choice.best is not None and choice.found is not None:
            said = published_of_model(choice.found[0].question, choice.found[1])
            found.setdefault((choice.shape.name, choice.accelerator), said)
    return [f"Others published of {model} on {device}: {said}." for (model, device), said in found.items() if said]


def _error(choice: Choice) -> float | None:
    """Return the relative error of the fastest layout's rate; None where it is not known."""
    if choice.best is None or choice.found is None:
        return None
    return time_error(choice.best.workload, choice.found[1])


def _proof(choices: Sequence[Choice]) -> str:
    errors = [error for choice in choices if (error := _error(choice)) is not None]
    known = (
        f"On up to 4 H200 and on H100, nine in ten steps of such models whose host kept up were within "
        f"{units.percent(max(errors), 0)}."
        if errors
        else ""
    )
    unknown = "* No such step was measured, or steps took longer." if any(_unsure(choice) for choice in choices) else ""
    return " ".join(filter(None, ["Predicted, not measured.", known, unknown, "More: docs/planning.md."]))


def _unsure(choice: Choice) -> bool:
    return choice.best is not None and _error(choice) is None


def _rate_mark(choice: Choice) -> str:
    return " *" if _unsure(choice) else " ‡" if _late(choice) else ""


def _late(choice: Choice) -> bool:
    return choice.best is not None and choice.found is not None and host_may_be_late(choice.best, choice.found[1])


def _row(choice: Choice, varying: Sequence[bool]) -> list[str]:
    names = [choice.shape.name, choice.accelerator, f"{choice.gpus:,}"]
    cells = [name for name, varies in zip(names, varying, strict=True) if varies]
    if choice.best is None or choice.found is None:
        return [*cells, _nothing(choice), *[units.ABSENT] * 5]
    best, (answer, rates) = choice.best, choice.found
    return [
        *cells,
        marked_layout(best, answer.question) + (" §" if _not_ours(choice) else ""),
        units.count(best.time.tokens_per_second_per_gpu if best.time else None) + _rate_mark(choice),
        units.percent(mfu(best, rates), 0),
        units.gibibytes(best.memory.device_bytes),
        units.significant(choice.gpu_hours, 3),
        f"{answer.question.work.sequence_tokens:,}",
    ]


def _nothing(choice: Choice) -> str:
    if choice.refused:
        return choice.refused
    ways = [f"{choice.enough.workload.layout.world_size:,} GPUs do"] if choice.enough else []
    ways += [f"bf16 {choice.narrower.replace('_', ' ')}"] if choice.narrower else []
    return "; ".join(["nothing fits", *([", or ".join(ways)] if ways else [])])


def _not_ours(choice: Choice) -> bool:
    """Whether the layout is for an engine that is predicted alone."""
    return choice.best is not None and choice.found is not None and choice.found[0].question.engine is None


def choices_document(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return everything in SI units."""
    rows = []
    for choice in choices:
        asked = {"model": choice.shape.name, "accelerator": choice.accelerator, "gpus": choice.gpus}
        gpus = choice.enough.workload.layout.world_size if choice.enough else None
        found = document(*choice.found) if choice.found else {"refused": choice.refused}
        hours = choice.gpu_hours if choice.best else None
        ways = {"enough_gpus": gpus, "fits_with_bf16": choice.narrower}
        rows.append({**asked, **found, "gpu_hours_per_billion_tokens": hours, **ways})
    return {"choices": rows}
