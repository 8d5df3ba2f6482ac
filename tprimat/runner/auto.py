"""`--parallel auto`: take the layout that is predicted to be fastest, or measure the first few and keep the best."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import prod

from tprimat.analyze.compare import Question, rankings, verdict
from tprimat.analyze.groups import Group
from tprimat.config.options import DEGREES, option_of
from tprimat.core import units
from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import ConfigError, LaunchError, LayoutError, UserError
from tprimat.core.statistics import CONFIDENCE
from tprimat.predict.search import Candidate
from tprimat.report.plan import layout_name
from tprimat.report.words import headline, proven
from tprimat.runner.combine import groups_of
from tprimat.runner.planning import answer_for
from tprimat.runner.prediction import ways_out
from tprimat.runner.request import RunRequest
from tprimat.runner.run import TrainingRun
from tprimat.runner.session import Session, models_of, prepare
from tprimat.runner.sweep import Cell, CellResult

BRIEF_STEPS = 12
"""Of a run that is only to rank layouts."""
ROUNDS = 3
"""Runs of each layout at most; one that can no longer win gets fewer."""
MOST_MEASURED = 8
FIRST_DEGREES = sorted(product((1, 2, 4, 8), repeat=2), key=prod)
"""Tensor and pipeline degrees of the plan that the search starts from, which chooses its own."""
RACE = Question(even_if_different=True, confidence=1 - (1 - CONFIDENCE) / ROUNDS)
"""Other layouts and batches are the point; each round looks once, and all looks together are as sure as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of the layouts that are measured."""

    session: Session
    """Holds a plan for each round."""
    candidate: Candidate

    @property
    def name(self) -> str:
        """Its layout."""
        return layout_name(self.candidate.workload)


def layouts_to_measure(request: RunRequest) -> int | None:
    """Return how many layouts `--parallel auto:N` measures; None for auto alone, which takes the first.

    Raises:
        ConfigError: the request leaves nothing to choose, or too much to measure.
    """
    refuse_degrees(request, "--parallel auto")
    _, named, text = str(request.strategy).partition(":")
    if not named:
        return None
    if not text.isdecimal() or not 2 <= int(text[:9]) <= MOST_MEASURED:
        what = f"--parallel is {request.strategy!r:.40}."
        raise ConfigError(what, where="--parallel", why=f"It measures 2 to {MOST_MEASURED} layouts.", fix="--parallel auto:3")
    if request.runs != RunRequest().runs:
        what = f"--parallel {request.strategy} runs each layout {ROUNDS} times at most."
        raise ConfigError(what, where="--runs", fix="leave out --runs")
    if "," in (request.routing or ""):
        what = f"--parallel {request.strategy} ranks layouts under one routing."
        raise ConfigError(what, where="--set routing", fix="natural, or balanced")
    return int(text)


def refuse_degrees(request: RunRequest, chooser: str) -> None:
    """Refuse what a ranking of all layouts chooses, which would have no effect.

    Raises:
        ConfigError: names the flag.
    """
    fields = [*(degree.name for degree in DEGREES), "micro_batch_size"]
    given = [option_of(name).flag for name in fields if getattr(request, name) is not None]
    if given:
        where, _, _ = chooser.partition(" ")
        raise ConfigError(f"{chooser} chooses {given[0]} itself.", where=where, fix=f"leave out {given[0]}")


def auto_sessions(request: RunRequest, measured: int | None) -> list[Contender]:
    """Return the layouts that are predicted to be fastest, of each model: the first, or as many as are to be measured.

    Raises:
        UserError: the accelerator is not known, or nothing fits.
    """
    alone = replace(request, strategy=None, runs=1, dry_run=True)
    first = first_look(alone)
    machine = first.machine_of(first.plans[0])
    if find_accelerator(machine.accelerator) is None:
        why = "There is no GPU here to predict for."
        if machine.accelerator:
            why = f"The accelerator ({machine.accelerator}) is not in the table, so that nothing can be predicted for it."
        fix = "a strategy of config.yaml; for a machine that is not here: python3 -m tprimat plan --accelerator 'H100 SXM'"
        raise LaunchError("--parallel auto cannot choose here.", where="--parallel", why=why, fix=fix)
    contenders: list[Contender] = []
    for model in models_of(first.loaded, request):
        plan = first_look(replace(alone, model=model)).plans[0]
        answer, _ = answer_for(plan, machine.accelerator, [first.output, *first.probes])
        asked = replace(request, model=model, platform=first.platform)
        found = list(islice(_contenders(asked, answer.layouts(), measured), measured or 1))
        if not found:
            fix = (
                ways_out(plan, find_accelerator(machine.accelerator)) or "more GPUs; python3 -m tprimat plan says what is missing"
            )
            raise LaunchError(f"No layout of {model} fits.", where="--gpus", fix=fix)
        contenders += found
    return contenders


def first_look(request: RunRequest) -> Session:
    """Plan a request under the smallest degrees that can share its batch."""
    try:
        return prepare(replace(request, tp=1, micro_batch_size=1))
    except LayoutError:
        for tensor, pipeline in FIRST_DEGREES[1:]:
            with suppress(UserError):
                return prepare(replace(request, tp=tensor, pp=pipeline, micro_batch_size=1))
        raise


def _contenders(request: RunRequest, layouts: Sequence[Candidate], measured: int | None) -> Iterator[Contender]:
    """Yield the layouts that the engine accepts, fastest first."""
    for candidate in layouts:
        with suppress(UserError):  # the engine cannot run this one
            yield Contender(session=prepare(_requested(request, candidate, measured)), candidate=candidate)


def _requested(request: RunRequest, candidate: Candidate, measured: int | None) -> RunRequest:
    work, layout = candidate.workload, candidate.workload.layout
    own = f"platform_optimizations.{request.platform}.recompute"
    layers = work.recompute_layers or "null"
    recompute = (f"{own}={work.recompute}", f"{own}_modules=null", f"{own}_layers={layers}")
    return replace(
        request,
        strategy=None,
        tp=layout.tensor,
        pp=layout.pipeline,
        vpp=layout.virtual_pipeline,
        cp=layout.context,
        ep=layout.expert,
        micro_batch_size=work.micro_batch,
        settings=(*request.settings, *recompute),
        runs=request.runs if measured is None else ROUNDS,
        steps=request.steps if measured is None or request.steps is not None else BRIEF_STEPS,
    )


class Race:
    """Contenders that run in rounds until all but one can no longer win: their intervals lie below the best's."""

    question = RACE

    def __init__(self, contenders: Sequence[Contender], notify: Callable[[str], None]) -> None:
        """Let contenders race, each against the others of its model; `notify` is told which were dropped."""
        self._contenders = contenders
        self._racing = list(contenders)
        self._notify = notify

    def cells(self) -> list[Cell]:
        """Return the runs of all rounds; those that no longer decide anything will turn out to be needless."""
        return [
            Cell(session=one.session, plan=plan, is_needless=partial(self._is_over_for, one))
            for one in self._contenders
            for plan in one.session.plans
        ]

    def _is_over_for(self, one: Contender, results: Sequence[CellResult]) -> bool:
        """Return whether a contender needs no more runs: it can no longer win, or has won."""
        self._look(results)
        return one not in self._racing

    def _look(self, results: Sequence[CellResult]) -> None:
        """Drop those that can no longer win, at the end of a round."""
        if not results or len(results) % len(self._contenders):
            return
        runs, racing = _runs(results), []
        for model, rivals in _by_model(self._racing):
            left, dropped = still_in(rivals, _groups(model, runs))
            for one, why in dropped:
                self._notify(f"{model}: {one.name} can no longer win: {why}")
            racing += left if len(left) > 1 else []
        self._racing = racing

    def conclusion(self, results: Sequence[CellResult]) -> str:
        """Say which layout of each model was fastest, and how far its prediction was off."""
        self._look(results)
        models = _by_model(self._contenders)
        return "\n".join(_conclusion(model, rivals, _groups(model, _runs(results))) for model, rivals in models)


def still_in(left: Sequence[Contender], groups: dict[str | None, Group]) -> tuple[list[Contender], list[tuple[Contender, str]]]:
    """Return which contenders may still win, and the others with the reason."""
    measured = [one for one in left if _strategy(one) in groups]
    failed = [(one, "it has no run that counts") for one in left if one not in measured]
    if not measured:
        return [], failed
    best = max(measured, key=lambda one: _rate(groups[_strategy(one)]))
    stay, dropped = [], failed
    for one in measured:
        ratio = None if one is best else verdict(groups[_strategy(best)], groups[_strategy(one)], RACE).ratio
        if ratio is not None and ratio.high is not None and ratio.high < 1:
            dropped.append((one, f"{units.percent(1 - ratio.value)} slower than {best.name}"))
        else:
            stay.append(one)
    return stay, dropped


def _model(one: Contender) -> str:
    return one.session.plans[0].model


def _strategy(one: Contender) -> str:
    return one.session.plans[0].strategy


def _rate(group: Group) -> float:
    rates = [item.metrics.tokens_per_second for item in group.runs if item.metrics and item.metrics.tokens_per_second]
    return sum(rates) / len(rates) if rates else 0.0


def _conclusion(model: str, contenders: Sequence[Contender], groups: dict[str | None, Group]) -> str:
    known = [one for one in contenders if _strategy(one) in groups]
    if not known:
        return f"auto: no layout of {model} has a run that counts."
    ranking = rankings([groups[_strategy(one)] for one in known], RACE)[0]
    best = next(one for one in known if groups[_strategy(one)] is ranking.best)
    errors = [item.metrics.predicted_step_error for item in ranking.best.runs if item.metrics]
    off = units.signed_percent(errors[0]) if errors and errors[0] is not None else units.ABSENT
    forecast = f"predicted as number {contenders.index(best) + 1}, its step off by {off}."
    if proven(ranking):
        return f"auto: {best.name} is the fastest measured of {model}; it was {forecast}"
    found = "; ".join(headline(ranking)) if ranking.lead else f"{best.name} alone has runs that count"
    return f"auto: {model}: {found.rstrip('.')}. {best.name} was {forecast}"


def _by_model(contenders: Sequence[Contender]) -> Iterator[tuple[str, list[Contender]]]:
    """Yield each model with its contenders: only those race each other."""
    for model in dict.fromkeys(_model(one) for one in contenders):
        yield model, [one for one in contenders if _model(one) == model]


def _runs(results: Sequence[CellResult]) -> list[TrainingRun]:
    return [result.run for result in results if result.run is not None]


def _groups(model: str, runs: Sequence[TrainingRun]) -> dict[str | None, Group]:
    """Return the runs of a model that count, by strategy."""
    return {group.run.strategy: group for group in groups_of([run for run in runs if run.record.model == model])}
