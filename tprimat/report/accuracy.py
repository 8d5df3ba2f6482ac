"""How far predictions were from measurements, as tables in Markdown and as a document."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tprimat.core import units
from tprimat.predict.accuracy import Errors, Score, choices, errors, factor
from tprimat.report.tables import table

ERROR_HEADER = ["rows", "mean error", "worst", "bias", "within 5 %", "within 10 %"]


def memory_table(scores: Sequence[Score]) -> str:
    """Return the errors of predicted memory by group, with other estimators' mean errors on the same rows."""
    names = list(dict.fromkeys(name for score in scores for name in score.others or {}))
    rows = []
    for group in _groups(scores):
        mine = _of(scores, group)
        rows.append([group, *_cells(errors(score.error for score in mine)), *(_other(mine, name) for name in names)])
    if len(rows) > 1:
        rows.append(["all", *_cells(errors(score.error for score in scores)), *(_other(scores, name) for name in names)])
    return table(["group", *ERROR_HEADER, *names], rows)


def _other(scores: Sequence[Score], name: str) -> str:
    found = _errors_of_other(scores, name)
    if found is None:
        return units.ABSENT
    covered = "" if found.rows == len(scores) else f" ({found.rows} rows)"
    return f"{units.percent(found.mean_absolute, 1)}{covered}"


def _errors_of_other(scores: Sequence[Score], name: str) -> Errors | None:
    return errors(score.others[name] / score.measured - 1 for score in scores if score.others and name in score.others)


def time_table(scores: Sequence[Score]) -> str:
    """Return the errors of predicted steps by group: raw, and with each group's factor, leaving the configuration out."""
    rows = []
    for group in _groups(scores):
        mine = _of(scores, group)
        scale = factor(mine)
        fitted = errors(score.fitted_error for score in mine if score.fitted_error is not None)
        rows.append([group, "raw", units.ABSENT, *_cells(errors(score.error for score in mine))])
        if fitted is not None and scale is not None:
            rows.append(["", "one factor", f"{scale:.3f}", *_cells(fitted)])
    return table(["group", "prediction", "factor", *ERROR_HEADER], rows, left=2)


def error_table(scores: Sequence[Score]) -> str:
    """Return the errors by group."""
    return table(
        ["group", *ERROR_HEADER], [[group, *_cells(errors(s.error for s in _of(scores, group)))] for group in _groups(scores)]
    )


def memory_rows(scores: Sequence[Score]) -> str:
    """Return each configuration's memory."""
    rows = [[score.name, score.group, *_figures(score, units.gibibytes)] for score in scores]
    return table(["configuration", "group", "measured", "predicted", "error"], rows, left=2)


def time_rows(scores: Sequence[Score]) -> str:
    """Return each configuration's step."""
    rows = [
        [score.name, score.group, *_figures(score, lambda value: units.si(value, "s")), units.signed_percent(score.fitted_error)]
        for score in scores
    ]
    return table(["configuration", "group", "measured", "predicted", "raw error", "with factor"], rows, left=2)


def foretold_rows(scores: Sequence[tuple[Score, Score]]) -> str:
    """Return memory and step of each configuration beside what was predicted before it ran."""
    rows = [
        [
            memory.name,
            memory.group,
            units.gibibytes(memory.measured),
            units.signed_percent(memory.error),
            units.si(time.measured, "s"),
            units.signed_percent(time.error),
            (time.rates or units.ABSENT).split(" of ")[0],
        ]
        for memory, time in scores
    ]
    return table(["configuration", "group", "memory", "error", "step", "error", "step predicted from"], rows, left=2)


def rate_rows(scores: Sequence[Score]) -> str:
    """Return published throughput and what is predicted for it; scores are seconds of a token on one GPU."""
    rows = [[score.name, *_figures(score, lambda seconds: units.count(1 / seconds))] for score in scores]
    return table(["published result", "tokens/s/GPU", "predicted", "error of the step"], rows)


def worst_rows(scores: Sequence[Score], least: float, show: Callable[[float], str] = units.gibibytes) -> str:
    """Return the rows whose error is at least so large, worst first; equal rows of a case once."""
    found = sorted((score for score in scores if abs(score.error) >= least), key=lambda score: -abs(score.error))
    return table(["row", "measured", "predicted", "error"], [[score.name, *_figures(score, show)] for score in found])


def _figures(score: Score, show: Callable[[float], str]) -> list[str]:
    return [show(score.measured), show(score.predicted), units.signed_percent(score.error)]


def choice_table(scores: Sequence[Score]) -> str:
    """Return what the predictions would have chosen in each workload with three or more measured layouts."""
    rows = [
        [choice.workload, str(choice.layouts), _plain(choice.chosen), _plain(choice.best), units.percent(choice.loss, 1)]
        for choice in choices(scores)
    ]
    return table(["workload", "layouts", "predicted fastest", "measured fastest", "slower by"], rows)


def _plain(score: Score) -> str:
    return score.name.partition(" ")[2]


def _groups(scores: Iterable[Score]) -> list[str]:
    return list(dict.fromkeys(score.group for score in scores))


def _of(scores: Iterable[Score], group: str) -> list[Score]:
    return [score for score in scores if score.group == group]


def _cells(found: Errors | None) -> list[str]:
    if found is None:
        return [units.ABSENT] * len(ERROR_HEADER)
    return [
        str(found.rows),
        units.percent(found.mean_absolute, 1),
        units.signed_percent(found.worst),
        units.signed_percent(found.bias),
        units.percent(found.within_5, 0),
        units.percent(found.within_10, 0),
    ]


def summary_document(groups: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """Return the errors of several sets of scores by group, raw and fitted, with other estimators' beside them."""
    return {name: {group: _group_document(_of(scores, group)) for group in _groups(scores)} for name, scores in groups.items()}


def _group_document(scores: Sequence[Score]) -> dict[str, Any]:
    raw = errors(score.error for score in scores)
    fitted = errors(score.fitted_error for score in scores if score.fitted_error is not None)
    found: dict[str, Any] = {"raw": None if raw is None else asdict(raw)}
    if fitted is not None:
        found |= {"factor": factor(scores), "fitted": asdict(fitted)}
    for name in dict.fromkeys(name for score in scores for name in score.others or {}):
        other = _errors_of_other(scores, name)
        found[name] = None if other is None else asdict(other)
    return found


def choices_document(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return what the predictions would have chosen."""
    return [
        {
            "workload": choice.workload,
            "layouts": choice.layouts,
            "chosen": choice.chosen.name,
            "best": choice.best.name,
            "slower_by": choice.loss,
        }
        for choice in choices(scores)
    ]
