"""The answer to "what fits on these GPUs" and "which GPUs to rent": a row for each model, accelerator and number of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tprimat.core import units
from tprimat.core.models import ModelShape
from tprimat.predict.rates import Rates
from tprimat.predict.search import Answer, Candidate, Question
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
MORE = "More: docs/planning.md."
OTHER_ENGINE = "§ By {}, which TPrimat does not start: the embedded engine cannot, or does not fit."
LATE = "‡ Slower with a host as slow at launching kernels as that of two H100 (docs/planning.md)."
HOURS = "GPU-hours: for a billion tokens. Times the price of a GPU-hour, that is what they cost."
Fit: TypeAlias = tuple[Candidate, Question, Rates]
"""The fastest layout that fits, what it answers, and the rates it was predicted from."""


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
    def fit(self) -> Fit | None:
        """Return the fastest layout that fits, what it answers, and the rates it was predicted from."""
        return (self.best, self.found[0].question, self.found[1]) if self.found and self.best else None

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
    fits = [fit for choice in choices if (fit := choice.fit)]
    others = dict.fromkeys(question.work.code.name for _, question, _ in fits if question.engine is None)
    notes = [_proof(fits), *([TIGHT] if any(is_tight(best, question) for best, question, _ in fits) else [])]
    notes += [LATE] if any(host_may_be_late(best, rates) for best, _, rates in fits) else []
    notes += [OTHER_ENGINE.format(" or ".join(others))] if others else []
    notes += _published(fits)
    notes += [HOURS] if fits else []
    title = screen.prose(f"{what} on {where} ({kind}), {precision}", meaning="heading")
    return "\n\n".join([title, shown, "\n".join(screen.prose(note) for note in notes)])


def _published(fits: Sequence[Fit]) -> list[str]:
    """Return what others published of each model on each accelerator, the nearest of each."""
    said: dict[tuple[str, str], str] = {}
    for _, question, rates in fits:
        said.setdefault((question.work.shape.name, rates.accelerator), published_of_model(question, rates))
    return [f"Others published of {model} on {device}: {words}." for (model, device), words in said.items() if words]


def _proof(fits: Sequence[Fit]) -> str:
    errors = [time_error(best.workload, rates) for best, _, rates in fits]
    known = [error for error in errors if error is not None]
    within = units.percent(max(known, default=None), 0)
    proven = f"On up to 4 H200 and on H100, nine in ten steps of such models whose host kept up were within {within}."
    unknown = "* No such step was measured, or steps took longer."
    said = ["Predicted, not measured.", proven if known else "", unknown if None in errors else "", MORE]
    return " ".join(filter(None, said))


def _row(choice: Choice, varying: Sequence[bool]) -> list[str]:
    names = [choice.shape.name, choice.accelerator, f"{choice.gpus:,}"]
    cells = [name for name, varies in zip(names, varying, strict=True) if varies]
    if choice.fit is None:
        return [*cells, _nothing(choice), *[units.ABSENT] * 5]
    best, question, rates = choice.fit
    mark = " *" if time_error(best.workload, rates) is None else " ‡" if host_may_be_late(best, rates) else ""
    return [
        *cells,
        marked_layout(best, question) + (" §" if question.engine is None else ""),
        units.count(best.time.tokens_per_second_per_gpu if best.time else None) + mark,
        units.percent(mfu(best, rates), 0),
        units.gibibytes(best.memory.device_bytes),
        units.significant(choice.gpu_hours, 3),
        f"{question.work.sequence_tokens:,}",
    ]


def _nothing(choice: Choice) -> str:
    if choice.refused:
        return choice.refused
    ways = [f"{choice.enough.workload.layout.world_size:,} GPUs do"] if choice.enough else []
    ways += [f"bf16 {choice.narrower.replace('_', ' ')}"] if choice.narrower else []
    return "; ".join(["nothing fits", *([", or ".join(ways)] if ways else [])])


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
