"""Draw layouts: memory by part against what the accelerator has, and the step by part."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.core import units
from tprimat.core.units import GIBIBYTE
from tprimat.predict.memory import PARTS
from tprimat.predict.rates import Rates
from tprimat.predict.search import Answer, Candidate
from tprimat.predict.time import TIME_PARTS
from tprimat.report.plan import MEMORY_NAMES, TIME_NAMES, engine_name, error_of, layout_name, steps_measured
from tprimat.report.plots.style import PALETTE, SMALL, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_FITTING, MOST_TOO_LARGE = 10, 4
REST = "#b9c0c8"
COLOURS = (*PALETTE, "#3f4650", "#7f8790", "#5b3a1e")
"""More than the palette has: a step has up to eleven parts."""


def draw_plan(answer: Answer, rates: Rates, path: Path) -> None:
    """Draw the fastest layouts, and those that nearly fit.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    fitting, missing = answer.layouts()[:MOST_FITTING], answer.nearly()[:MOST_TOO_LARGE]
    rows = [*fitting, *missing]
    question = answer.question
    with figure(14, 2.2 + 0.36 * len(rows)) as picture:
        memory, *steps = picture.subplots(
            1, 2 if fitting else 1, sharey=True, width_ratios=[1.05, 1][: 1 + bool(fitting)], squeeze=False
        )[0]
        limit = question.memory_bytes / GIBIBYTE
        used = [{MEMORY_NAMES[part]: candidate.memory.parts[part] / GIBIBYTE for part in PARTS} for candidate in rows]
        outside = [(candidate.memory.device_bytes - candidate.memory.allocated_bytes) / GIBIBYTE for candidate in rows]
        for row, more in zip(used, outside, strict=True):
            row["fragments, driver, NCCL"] = more
        _stack(memory, used)
        memory.axvline(limit, color="#D55E00", linestyle="--", linewidth=1.2)
        memory.text(limit, -0.75, f"{limit:.0f} GiB ", ha="right", size=SMALL, color="#D55E00")
        memory.set(title="Memory of the fullest rank, by part", xlabel="GiB")
        for time in steps:
            _draw_steps(time, rows)
        memory.set_yticks(range(len(rows)), [_label(candidate) for candidate in rows], size=SMALL)
        memory.set_ylim(len(rows) - 0.4, -1.1)
        headline = picture.suptitle(_headline(answer, rates) + "\n", x=0.01, ha="left", weight="bold", size=12)
        y = headline.get_position()[1] - 1.35 * 12 / 72 / picture.get_figheight()
        picture.text(0.01, y, _workload(answer, rates), ha="left", va="top", size=SMALL + 1, in_layout=False)
        save(picture, path)


def _draw_steps(axes: "Axes", rows: Sequence[Candidate]) -> None:
    """Draw the step of each layout that fits by part, and beside it the rate."""
    _stack(axes, [_step(candidate) for candidate in rows])
    axes.set(title="One step, by part", xlabel="seconds")
    for place, candidate in enumerate(rows):
        known = candidate.time
        note = "does not fit" if known is None else f"{units.count(known.tokens_per_second_per_gpu)} tokens/s/GPU"
        axes.text(0.0 if known is None else known.step_seconds, place, f" {note}", va="center", size=SMALL)
    axes.set_xlim(0, 1.3 * max(candidate.time.step_seconds for candidate in rows if candidate.time))


def _headline(answer: Answer, rates: Rates) -> str:
    question, layouts = answer.question, answer.layouts()
    where = f"{question.work.shape.name} on {units.count(question.gpus)} x {rates.accelerator}"
    if not layouts:
        return f"{where}: nothing fits"
    return f"{where}: {layout_name(layouts[0].workload)} is predicted to be fastest"


def _workload(answer: Answer, rates: Rates) -> str:
    question = answer.question
    work = f"{units.count(question.work.global_batch_sequences)} x {units.count(question.work.sequence_tokens)} tokens a step"
    known = error_of(question, rates)
    unknown = "such steps took longer" if steps_measured(rates, question.gpus) else "no such step was measured"
    error = unknown if known is None else f"nine in ten steps whose host kept up were within {units.percent(known, 0)}"
    return f"{work} · {question.work.matmul_dtype} · {engine_name(question.work.code)} · predicted, not measured: {error}"


def _label(candidate: Candidate) -> str:
    work = candidate.workload
    again = "" if work.recompute == "none" else f", recompute {work.recompute_words}"
    return f"{layout_name(work)}, MBS{work.micro_batch}{again}"


def _step(candidate: Candidate) -> Mapping[str, float]:
    if candidate.time is None:
        return {TIME_NAMES[part]: 0.0 for part in TIME_PARTS}
    return {TIME_NAMES[part]: candidate.time.parts[part] for part in TIME_PARTS}


def _stack(axes: "Axes", rows: Sequence[Mapping[str, float]]) -> None:
    """Draw horizontal bars of parts; parts under 1 % of the longest bar are drawn as one."""
    whole = max((sum(row.values()) for row in rows), default=1.0) or 1.0
    names = [name for name in rows[0] if max(row[name] for row in rows) >= 0.01 * whole]
    left = [0.0] * len(rows)
    for number, name in enumerate(names):
        lengths = [row[name] for row in rows]
        colour = COLOURS[number] if number < len(COLOURS) else REST
        axes.barh(range(len(rows)), lengths, left=left, height=0.62, color=colour, label=name)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    rest = [sum(row.values()) - start for row, start in zip(rows, left, strict=True)]
    if max(rest) > 0.002 * whole:
        axes.barh(range(len(rows)), rest, left=left, height=0.62, color=REST, label="rest")
    axes.grid(visible=False, axis="y")
    # Below the axis and its label, by multiples of the letters' size: the axes' height differs.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.5, ncols=3, fontsize=SMALL)
