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
from tprimat.report.plan import MEMORY_NAMES, TIME_NAMES, engine_name, how_sure, layout_name
from tprimat.report.plots.style import PALETTE, REST, SMALL, figure, save, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_FITTING, MOST_TOO_LARGE = 10, 4
COLOURS = (*PALETTE, "#3f4650", "#7f8790", "#5b3a1e")
"""More than the palette has: a step has up to eleven parts."""


def draw_plan(answer: Answer, rates: Rates, path: Path) -> None:
    """Draw the fastest layouts, and those that nearly fit.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    rows = [*answer.layouts()[:MOST_FITTING], *answer.nearly()[:MOST_TOO_LARGE]]
    question = answer.question
    with figure(14, 2.4 + 0.36 * len(rows)) as picture:
        work = f"{units.count(question.work.global_batch_sequences)} x {units.count(question.work.sequence_tokens)} tokens a step"
        words = f"{work} · {question.work.matmul_dtype} · {engine_name(question.work.code)} · {how_sure(question, rates)}"
        body = titled(picture, _headline(answer, rates), words)
        memory, step = body.subplots(1, 2, sharey=True)
        _stack(memory, [_memory(candidate) for candidate in rows])
        limit = question.memory_bytes / GIBIBYTE
        memory.axvline(limit, color="#D55E00", linestyle="--", linewidth=1.2)
        memory.text(limit, -0.75, f"{limit:.0f} GiB ", ha="right", size=SMALL, color="#D55E00")
        memory.set(title="Memory of the fullest rank, by part", xlabel="GiB")
        memory.set_yticks(range(len(rows)), [_label(candidate) for candidate in rows], size=SMALL)
        memory.set_ylim(len(rows) - 0.4, -1.1)
        _stack(step, [{TIME_NAMES[part]: one.time.parts[part] if one.time else 0.0 for part in TIME_PARTS} for one in rows])
        step.set(title="One step, by part", xlabel="seconds")
        for place, candidate in enumerate(rows):
            time = candidate.time
            note = "does not fit" if time is None else f"{units.count(time.tokens_per_second_per_gpu)} tokens/s/GPU"
            step.text(time.step_seconds if time else 0, place, f" {note}", va="center", size=SMALL)
        step.set_xlim(0, 1.3 * max((one.time.step_seconds for one in rows if one.time), default=1))
        save(picture, path)


def _headline(answer: Answer, rates: Rates) -> str:
    question, layouts = answer.question, answer.layouts()
    where = f"{question.work.shape.name} on {units.count(question.gpus)} x {rates.accelerator}"
    best = f"{layout_name(layouts[0].workload)} is predicted to be fastest" if layouts else "nothing fits"
    return f"{where}: {best}"


def _label(candidate: Candidate) -> str:
    work = candidate.workload
    again = "" if work.recompute == "none" else f", recompute {work.recompute_words}"
    return f"{layout_name(work)}, MBS{work.micro_batch}{again}"


def _memory(candidate: Candidate) -> dict[str, float]:
    need = candidate.memory
    parts = {MEMORY_NAMES[part]: need.parts[part] / GIBIBYTE for part in PARTS}
    return parts | {"fragments, driver, NCCL": (need.device_bytes - need.allocated_bytes) / GIBIBYTE}


def _stack(axes: "Axes", rows: Sequence[Mapping[str, float]]) -> None:
    """Draw horizontal bars of parts; parts under 1 % of the longest bar are drawn as one."""
    least = 0.01 * max(sum(row.values()) for row in rows)
    names = [name for name in rows[0] if max(row[name] for row in rows) > least]
    small = [sum(value for name, value in row.items() if name not in names) for row in rows]
    left = [0.0] * len(rows)
    for name, colour in (*zip(names, COLOURS, strict=False), ("rest", REST)):
        lengths = small if name == "rest" else [row[name] for row in rows]
        if max(lengths) > 0.2 * least:
            axes.barh(range(len(rows)), lengths, left=left, height=0.62, color=colour, label=name)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.5, ncols=3, fontsize=SMALL)  # below the axis label
