"""The table of what steps spend their time on, from summaries of traces (`trace` in the JSON of tprimat explain)."""

import json
from collections.abc import Mapping
from pathlib import Path

from tprimat.analyze.trace import ProfileSummary
from tprimat.core import units
from tprimat.records.store import from_json
from tprimat.report.tables import table

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


def read_summary(path: Path) -> ProfileSummary:
    """Read a summary that a trace was replaced with, because it is a thousand times smaller."""
    document = json.loads(path.read_text(encoding="utf8"))
    document.pop("trace", None)  # where the trace was
    return from_json(ProfileSummary, json.dumps(document), where=str(path))


def markdown(summaries: Mapping[str, ProfileSummary]) -> str:
    """Format the share of each class of work in a mean step, one column per profile; the rows down to idle add up to the step."""
    every = list(summaries.values())
    shown = {part.kind for summary in every for part in summary.classes if part.seconds or part.kind not in RARE}
    rows = [[name, *(_part(kind, summary) for summary in every)] for kind, name in WORDS.items() if kind in shown]
    rows.append(["idle", *(_of_step(summary.idle_seconds, summary) for summary in every)])
    rows.append(["step", *(f"{units.seconds(summary.step_seconds)} (n = {len(summary.steps)})" for summary in every)])
    hidden = [_busy(summary) - summary.exposed_communication_seconds for summary in every]
    rows.append(["communication behind computation", *(_of_step(*pair) for pair in zip(hidden, every, strict=True))])
    return table(["of a step", *summaries], rows)


def _busy(summary: ProfileSummary) -> float:
    return next((part.busy_seconds for part in summary.classes if part.kind == "communication"), 0.0)


def _part(kind: str, summary: ProfileSummary) -> str:
    return _of_step(next((part.seconds for part in summary.classes if part.kind == kind), 0.0), summary)


def _of_step(seconds: float, summary: ProfileSummary) -> str:
    return f"{units.percent(seconds / summary.step_seconds)} ({units.seconds(seconds)})"
