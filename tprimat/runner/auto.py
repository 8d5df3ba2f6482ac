"""`--parallel auto`: the layout that is predicted to be fastest, or with auto:N the first N, to be measured briefly."""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod

from tprimat.analyze.compare import Question
from tprimat.config.options import DEGREES, option_of
from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import ConfigError, LaunchError, LayoutError, UserError
from tprimat.core.workload import SHORT_NAMES, FullWorkload
from tprimat.runner.planning import answer_for
from tprimat.runner.prediction import ways_out
from tprimat.runner.request import RunRequest, models_of
from tprimat.runner.session import Session, prepare

BRIEF_STEPS = 12
ROUNDS = 3
"""Runs of each layout, the fewest that may name a winner."""
MOST_MEASURED = 8
FIRST_DEGREES = sorted(product((1, 2, 4, 8), repeat=2), key=prod)
"""Tensor and pipeline degrees of the plan that the search starts from, which chooses its own."""
RACE = Question(even_if_different=True)


def layouts_to_measure(request: RunRequest) -> int | None:
    """Return how many layouts `--parallel auto:N` measures; None for auto alone, which takes the first."""
    fields = [*(degree.name for degree in DEGREES), "micro_batch_size"]
    if given := [option_of(name).flag for name in fields if getattr(request, name) is not None]:
        what = f"--parallel auto chooses {given[0]} itself."
        raise ConfigError(what, where="--parallel", fix=f"leave out {given[0]}")
    _, named, text = str(request.strategy).partition(":")
    if not named:
        return None
    if not text.isdecimal() or not 2 <= int(text[:9]) <= MOST_MEASURED:
        what = f"--parallel is {request.strategy!r:.40}."
        raise ConfigError(what, where="--parallel", why=f"It measures 2 to {MOST_MEASURED} layouts.", fix="--parallel auto:3")
    if request.runs != RunRequest().runs:
        what = f"--parallel {request.strategy} runs each layout {ROUNDS} times."
        raise ConfigError(what, where="--runs", fix="leave out --runs")
    return int(text)


def auto_sessions(request: RunRequest) -> list[Session]:
    """Return a session for each layout that is predicted to be fastest, of each model: the first, or as many as are measured."""
    measured = layouts_to_measure(request)
    alone = replace(request, strategy=None, runs=1, dry_run=True)
    first = _first_look(alone)
    machine = first.machine_of(first.plans[0])
    if find_accelerator(machine.accelerator) is None:
        unknown = f"The accelerator ({machine.accelerator}) is not in the table, so nothing can be predicted for it."
        why = unknown if machine.accelerator and machine.platform != "cpu" else "There is no GPU here to predict for."
        fix = "a strategy of config.yaml; for a machine that is not here: --dry-run --gpu 'H100 SXM'"
        raise LaunchError("--parallel auto cannot choose here.", where="--parallel", why=why, fix=fix)
    sessions: list[Session] = []
    for model in models_of(first.loaded, request):
        plan = _first_look(replace(alone, model=model)).plans[0]
        answer, _ = answer_for(plan, machine.accelerator, [first.output, *first.probes])
        chosen: list[Session] = []
        for candidate in answer.layouts():
            with suppress(UserError):  # the engine cannot run this one
                chosen.append(prepare(_requested(replace(request, model=model, platform=first.platform), candidate.workload)))
            if len(chosen) == (measured or 1):
                break
        if not chosen:
            ways = ways_out(plan, find_accelerator(machine.accelerator))
            fix = ways or "more GPUs; python3 -m tprimat plan says what is missing"
            raise LaunchError(f"No layout of {model} fits.", where="--gpus", fix=fix)
        sessions += chosen
    return sessions


def _first_look(request: RunRequest) -> Session:
    try:
        return prepare(replace(request, tp=1, micro_batch_size=1))
    except LayoutError:
        for tensor, pipeline in FIRST_DEGREES[1:]:
            with suppress(UserError):
                return prepare(replace(request, tp=tensor, pp=pipeline, micro_batch_size=1))
        raise


def _requested(request: RunRequest, work: FullWorkload) -> RunRequest:
    measured = layouts_to_measure(request)
    own = f"platform_optimizations.{request.platform}.recompute"
    layers = work.recompute_layers or "null"
    recompute = (f"{own}={work.recompute}", f"{own}_modules=null", f"{own}_layers={layers}")
    return replace(
        request,
        strategy=None,
        **{name: getattr(work, field) for name, field in SHORT_NAMES.items()},
        micro_batch_size=work.micro_batch,
        settings=(*request.settings, *recompute),
        runs=request.runs if measured is None else ROUNDS,
        steps=request.steps if measured is None or request.steps is not None else BRIEF_STEPS,
    )
