"""Report the summary of a profile as text."""

from tprimat.analyze.trace import ProfileSummary
from tprimat.core import units
from tprimat.report.tables import PLAIN, Screen, columns

WORDS = {
    "matmul": "matmul",
    "expert_matmul": "experts' matmul",
    "router": "router",
    "permute": "permutation of tokens",
    "attention": "attention",
    "norm_elementwise": "norm and elementwise",
    "optimizer": "optimizer",
    "other": "other computation",
    "communication": "communication, exposed",
    "memory_copy": "memory copies, exposed",
}
RARE = {"expert_matmul", "router", "permute"}
"""Of models with experts: shown only where there was such work."""
WIDEST_NAME = 90


def text(summary: ProfileSummary, screen: Screen = PLAIN) -> str:
    """Format the tables of classes and of kernels, with notes."""
    return "\n\n".join(
        [_heading(summary, screen), _classes(summary, screen), screen.prose(_communication(summary)), _top(summary, screen)]
    )


def _heading(summary: ProfileSummary, screen: Screen) -> str:
    origin = [str(summary.origin[key]) for key in ("platform", "model", "strategy") if key in summary.origin]
    numbers = [step.number for step in summary.steps]
    seconds = [step.seconds for step in summary.steps]
    span = f"step {numbers[0]}" if len(numbers) == 1 else f"mean of steps {numbers[0]} to {numbers[-1]}"
    spread = units.seconds(seconds[0]) if len(seconds) == 1 else f"{units.seconds(min(seconds))} to {units.seconds(max(seconds))}"
    rank = f"rank {summary.origin['rank']}" if "rank" in summary.origin else "one rank"
    heading = f"{', '.join([*origin, rank])}: {span} (n = {len(numbers)}, {spread})"
    notes = [screen.prose(f"note: {note}", 2, "warning") for note in summary.notes]
    return "\n".join([screen.prose(heading, 2, "heading"), *notes])


def _classes(summary: ProfileSummary, screen: Screen) -> str:
    rows = [
        [
            WORDS[part.kind],
            units.seconds(part.seconds),
            units.percent(part.share),
            units.seconds(part.busy_seconds),
            _calls(part.calls),
        ]
        for part in summary.classes
        if part.calls or part.kind not in RARE
    ]
    rows.append(["idle", units.seconds(summary.idle_seconds), units.percent(summary.idle_share), units.ABSENT, units.ABSENT])
    rows.append(["step", units.seconds(summary.step_seconds), units.percent(1.0), units.ABSENT, units.ABSENT])
    return columns(["class", "of the step", "share", "running", "calls"], rows, screen=screen)


def _communication(summary: ProfileSummary) -> str:
    whole, exposed = summary.communication_seconds, summary.exposed_communication_seconds
    if not whole:
        return "no communication"
    hidden = f"{units.seconds(exposed)} of it ({units.percent(exposed / whole)}) exposed, the rest behind computation"
    return f"communication runs for {units.seconds(whole)}, waiting for other ranks included; {hidden}"


def _top(summary: ProfileSummary, screen: Screen) -> str:
    rows = [
        [_short(row.name), WORDS[row.kind].split(",")[0], units.seconds(row.seconds), units.percent(row.share), _calls(row.calls)]
        for row in summary.top
    ]
    return columns(["kernel", "class", "a step", "share", "calls"], rows, left=2, screen=screen, drop=("calls", "class"))


def _short(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else name[: WIDEST_NAME - 1] + "…"


def _calls(value: float) -> str:
    return units.count(value) if value == round(value) else units.significant(value)
