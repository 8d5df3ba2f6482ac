"""From a request to plans: read the configuration and the machine, and decide which runs to make."""

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from tprimat.config.load import (
    DEFAULT_STRATEGY,
    EnvironmentChoices,
    LoadedConfig,
    Setting,
    absolute_path,
    environment_choices,
    read_config,
)
from tprimat.config.schema import PlatformOptimizations, Routing, Size
from tprimat.core import units
from tprimat.core.accelerators import BACKEND_OF, PLATFORM_OF, PlatformName
from tprimat.core.errors import ConfigError, LaunchError, MissingLayoutError, UserError
from tprimat.engines import AUTO
from tprimat.engines.base import Choice, Here, choose, engine_named, fallback_from
from tprimat.hardware.nodes import (
    PROCESS_BYTES,
    SET_BY_HAND,
    Nodes,
    array_task,
    cpu_cores,
    find_nodes,
    main_memory_bytes,
    most_cpu_ranks,
    refuse_hidden_gpus,
    refuse_idle_nodes,
    this_machine,
    told_nodes,
)
from tprimat.plan.build import STANDARD_LIBRARY, WORDS, PlanRequest, build_plan, count_ranks, new_run_id, shape_at
from tprimat.plan.figures import doubtful_figures
from tprimat.plan.schema import RunPlan
from tprimat.records.discover import check_probes, probes_in
from tprimat.records.environment import processor_name
from tprimat.records.schema import Machine
from tprimat.report.tables import plural
from tprimat.runner.prediction import predicted, refuse_too_large
from tprimat.runner.request import ALL_MODELS, RunRequest, in_flags, layout_name, layout_settings, settings_of

MOST_RUNS = 1000
"""Of one model in one call; a wider question needs no more for its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A request with everything decided: the configuration, the machine, and a plan for each run."""

    loaded: LoadedConfig
    platform: PlatformName
    size: Size
    machine: Machine | None
    """The GPUs of this machine; None where there are none."""
    choices: EnvironmentChoices
    output: Path
    plans: tuple[RunPlan, ...]
    place: Nodes = field(default_factory=Nodes)
    """This machine's place among those whose launchers work together."""
    probes: tuple[Path, ...] = ()
    """Further probes of this machine, besides those in `output`."""
    notices: tuple[str, ...] = ()
    """What the user should know of the configuration before the runs start."""

    @property
    def is_here(self) -> bool:
        """Whether this machine is of the kind that the plans are for."""
        return self.platform == "cpu" or (self.machine is not None and BACKEND_OF[self.platform] == self.machine.platform)

    def machine_of(self, plan: RunPlan) -> Machine:
        """Return the machine as a record names it before a worker has looked closer."""
        if self.machine is not None and BACKEND_OF[plan.platform] == self.machine.platform:
            return replace(self.machine, nodes=plan.nodes, gpus_per_node=plan.gpus_per_node)
        name = processor_name() if plan.platform == "cpu" else None
        return Machine(platform=BACKEND_OF[plan.platform], accelerator=name, gpus_per_node=plan.gpus_per_node, nodes=plan.nodes)


def prepare(request: RunRequest) -> Session:
    """Read the configuration and the machine, and plan every run.

    Raises:
        UserError: the request cannot be met; nothing has been written yet.
    """
    choices = environment_choices()
    machine = this_machine()
    platform: PlatformName = request.platform or PLATFORM_OF[machine.platform if machine else "cpu"]
    size: Size = request.size or ("tiny" if platform == "cpu" else "full")
    settings = list(settings_of(request, platform))
    loaded = read_config(request.config, size=size, settings=settings)
    if request.nodes is None and (told := started_on(loaded, platform)) is not None:
        settings.append(told)
        loaded = read_config(request.config, size=size, settings=settings)
    else:
        told = None
    if (name := layout_name(request)) is not None:
        layout = layout_settings(request, name, models_of(loaded, request), platform)
        loaded = read_config(request.config, size=size, settings=[*settings, *layout])
    planned = request if name is None else replace(request, strategy=name)
    output = absolute_path(
        request.output or choices.output_directory, "--output-dir" if request.output else "the variable OUTPUT_DIR"
    )
    output = folder_of_task(output, array_task())
    session = Session(loaded=loaded, platform=platform, size=size, machine=machine, choices=choices, output=output, plans=())
    plans, left_out = _plans_on(told, session, planned)
    notices = (*left_out, *(f"warning: {text}" for text in doubtful_figures(loaded)))
    session = replace(session, probes=check_probes(request.probes), notices=notices)
    session = replace(session, plans=tuple(with_prediction(session, plan) for plan in plans))
    if not request.dry_run:
        session = replace(session, place=_place(session, request))
        _check_gpus(session)
        for plan in () if request.force else session.plans:
            if error := engine_named(plan.engine).untried():
                raise error
            refuse_too_large(plan, session.machine_of(plan))
    if not request.dry_run or session.is_here:
        _check_data(session)
    return session


def with_prediction(session: Session, plan: RunPlan) -> RunPlan:
    """Return the plan with what is predicted for it on this machine."""
    probes, _ = probes_in([session.output, *session.probes])
    return predicted(plan, session.machine_of(plan), probes)


def folder_of_task(output: Path, task: str | None) -> Path:
    """Return the output folder of one task of an array job: its own, unless the user gave each task one, such as out-$TASK."""
    if task is None or re.search(rf"(?:^|\D)0*{re.escape(task)}$", output.name):
        return output
    return output / f"array-{task}"


def started_on(loaded: LoadedConfig, platform: PlatformName) -> Setting | None:
    """Return the number of nodes on which the scheduler started this command, where the configuration leaves it at one."""
    hardware, told = loaded.config.hardware.platforms.get(platform), told_nodes()
    if told is None or told[0] <= 1 or (hardware is not None and hardware.nodes != 1):
        return None
    return Setting(("hardware", "platforms", platform, "nodes"), told[0], told[1])


def _place(session: Session, request: RunRequest) -> Nodes:
    """Return this machine's place among the launchers of a run."""
    plan = session.plans[0]
    if request.nodes is None and plan.nodes == 1:
        refuse_idle_nodes()
    return find_nodes(plan.nodes)


def _check_gpus(session: Session) -> None:
    """Find out before training that there are GPUs."""
    if not session.is_here:
        fix = "--dry-run to see the plan, or --platform cpu"
        raise LaunchError(f"This machine shows no {session.platform} GPU.", where="--platform", fix=fix)


def _refuse_crowd(session: Session) -> None:
    """Refuse more processes than this machine's CPU can run, before advice on their batch."""
    if session.platform != "cpu":
        return
    wanted, most = count_ranks(session.loaded, "cpu", _gpus_found(session))[1], most_cpu_ranks()
    if wanted > most:
        memory = units.gibibytes(main_memory_bytes())
        raise LaunchError(
            f"{wanted:,} processes are requested, but this machine has {cpu_cores()} cores and {memory} of memory.",
            where=session.loaded.where("hardware", "platforms", "cpu", "gpus_per_node"),
            why=f"Each process takes {units.gibibytes(PROCESS_BYTES)} before the model, and all of them share the cores.",
            fix=f"--gpus {2 ** (most.bit_length() - 1)}; --dry-run shows the plan; --force starts them anyway",
        )


def _check_data(session: Session) -> None:
    """Find out before training that the data is there."""
    plan, data = session.plans[0], session.loaded.config.training.data
    if plan.dataset.startswith("text:") and plan.dataset != STANDARD_LIBRARY:
        _must_exist(session, plan.dataset.removeprefix("text:"), ("dataset", data.dataset))
        _refuse_too_little_text(session, Path(plan.dataset.removeprefix("text:")))
    if plan.tokenizer not in {None, WORDS}:
        _must_exist(session, str(plan.tokenizer), ("tokenizer", data.tokenizer))


def _must_exist(session: Session, path: str, asked: tuple[str, str | None]) -> None:
    if not Path(path).exists():
        key, value = asked
        raise ConfigError(f"{key} is {value!r}.", where=session.loaded.where("training", "data", key), why=f"There is no {path}.")


def _refuse_too_little_text(session: Session, source: Path) -> None:
    """Refuse text that cannot fill a sequence: a byte makes one token at most, and the end of each file another one.

    A tokenizer from a file may add more, so that with it, only text without a byte is refused.
    """
    plan = session.plans[0]
    most = files = 0
    with contextlib.suppress(OSError):  # what cannot be read here, the worker names
        if not (source.is_file() or source.is_dir()):
            return
        for file in [source] if source.is_file() else source.glob("**/*"):
            if file.is_file():
                most, files = most + file.stat().st_size + 1, files + 1
            if most > plan.workload.sequence_tokens or (most > files and plan.tokenizer not in {None, WORDS}):
                return
    tokens = f"{'at most ' if plan.tokenizer == WORDS else ''}{plural(most, 'token')}"
    why = f"It holds {tokens}, fewer than one sequence of {plan.workload.sequence_tokens} and the token after it."
    raise ConfigError(
        f"{plan.dataset} is {'too short' if most > files else 'empty'}.",
        where=session.loaded.where("training", "data", "dataset"),
        why=why if most > files else None,
        fix="more text, or a shorter --sequence-length" if most > files else "a file with text, or --set data=mock",
    )


def _plans_on(told: Setting | None, session: Session, request: RunRequest) -> tuple[list[RunPlan], list[str]]:
    """Return what `_plans` does; its errors and notes say by what variable the run is on several nodes."""
    try:
        plans, left_out = _plans(session, request)
    except ConfigError as error:
        if told is None:
            raise
        why = f"{error.why or ''} The run is on {told.value} nodes by {told.origin}.".strip()
        raise type(error)(error.what, where=error.where, why=why, fix=error.fix) from error
    if told is not None and told.origin in SET_BY_HAND:
        left_out.append(f"{told.value} nodes, by the variable {told.origin}; unset it if it is left over in this shell")
    return plans, left_out


def _plans(session: Session, request: RunRequest) -> tuple[list[RunPlan], list[str]]:
    """Return the plans, and for each model that is left out of `all` what its strategy is missing."""
    if request.runs > MOST_RUNS:
        what, why = f"--runs is {request.runs:,}.", f"There are at most {MOST_RUNS:,} runs of a model in one call."
        raise ConfigError(what, where="--runs", why=why, fix="--runs 1")
    models = models_of(session.loaded, request)
    if not (request.dry_run or request.force):
        _refuse_crowd(session)
    here = _here(session)
    choice = choose(request.engine, here, elsewhere=request.elsewhere)
    start = choice.engine.prepare(None if request.elsewhere else here)
    if start is not None and not request.elsewhere:
        refuse_hidden_gpus(count_ranks(session.loaded, session.platform, _gpus_found(session))[1])
    plans: list[RunPlan] = []
    missing: list[MissingLayoutError] = []
    for strategy, (model, routing) in itertools.product(_strategies(session, request), _routings(session, request, models)):
        planned = PlanRequest(
            model=model,
            routing=routing,
            strategy=strategy,
            platform=session.platform,
            size=session.size,
            engine=choice.engine.name,
            engine_reason=choice.reason,
            gpus_found=_gpus_found(session),
            output_directory=str(session.output),
            primus=start,
            command=request.command,
        )
        if request.engine == AUTO and choice.engine.automatic_if_it_fits:
            planned = _fitting(session.loaded, planned, choice)
        try:
            for number in range(1, request.runs + 1):
                run_id = new_run_id(model, strategy) + (f"-{routing}" if routing else "")
                run_id += f"-{number}" if request.runs > 1 else ""
                folder = str(session.output / "runs" / run_id)
                one = replace(planned, run_id=run_id, run_directory=folder)
                plans.append(plan_run(session.loaded, one, elsewhere=request.elsewhere))
        except MissingLayoutError as error:
            missing.append(error)
    if not plans:
        raise missing[0]
    return plans, [f"left out: {error}" for error in missing]


def _strategies(session: Session, request: RunRequest) -> list[str]:
    """Return the strategies that a request or the variable PARALLEL names."""
    strategies, known = _words(request.strategy or session.choices.strategy), session.loaded.config.parallelism
    fix = f"one of: {', '.join(known)}"
    if not strategies:
        place = "--parallel" if request.strategy else "the variable PARALLEL"
        raise ConfigError(f"{place} names no strategy.", where=place, fix=fix)
    unknown = [] if request.strategy else [name for name in strategies if name not in {*known, DEFAULT_STRATEGY}]
    if unknown:
        raise ConfigError(f"There is no strategy {unknown[0]!r}.", where="the variable PARALLEL", fix=fix)
    return strategies


def _routings(session: Session, request: RunRequest, models: Sequence[str]) -> list[tuple[str, Routing | None]]:
    """Return each model with each routing that is asked for; a dense model once, and with None what the configuration says."""
    if request.routing is None:
        return [(model, None) for model in models]
    known: tuple[Routing, ...] = get_args(Routing)
    asked = _words(request.routing)
    if unknown := [word for word in asked if word not in known]:
        what = f"There is no routing {unknown[0]!r:.40}."
        raise ConfigError(what, where="--set routing", fix=f"one of: {', '.join(known)}, or both with a comma")
    found: list[tuple[str, Routing | None]] = []
    for model in models:
        mixture = model in session.loaded.config.models and shape_at(session.loaded, model, session.size).experts is not None
        found += [(model, word) for word in known if word in asked] if mixture else [(model, None)]
    if all(routing is None for _, routing in found):
        why = (
            f"Only tokens of models with experts are routed; {' and '.join(models)} {'has' if len(models) == 1 else 'have'} none."
        )
        raise ConfigError(
            "routing has nothing to route.", where="--set routing", why=why, fix="leave it out, or --model qwen3_moe"
        )
    return found


def _words(text: str) -> list[str]:
    """Split 'a, b' at the commas, each word once."""
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def models_of(loaded: LoadedConfig, request: RunRequest) -> list[str]:
    """Return the models that a request names.

    Raises:
        ConfigError: there is none.
    """
    every = [name for name, model in loaded.config.models.items() if model.in_all]
    models = every if request.model == ALL_MODELS else _words(request.model)
    if not models and request.model != ALL_MODELS:
        raise ConfigError(
            f"--model is {request.model!r}.", where="--model", fix=f"one of: {', '.join(loaded.config.models)}, all"
        )
    if not models:
        raise ConfigError("models is empty.", where=loaded.where("models"), fix="describe at least one model")
    return models


def plan_run(loaded: LoadedConfig, request: PlanRequest, *, elsewhere: bool = False) -> RunPlan:
    """Build a plan that its engine can run, here or on another machine that has what it needs.

    Raises:
        UserError: the configuration cannot be planned, or the engine refuses the plan.
    """
    engine = engine_named(request.engine)
    try:
        plan = build_plan(loaded, replace(request, trainer=engine.trainer))
    except UserError as error:
        raise in_flags(error, loaded, request.strategy) from error
    if (refusal := engine.refusal(plan, loaded.where)) is not None:
        raise in_flags(refusal, loaded, request.strategy)
    return plan


def _fitting(loaded: LoadedConfig, request: PlanRequest, choice: Choice) -> PlanRequest:
    """Return the request, with the embedded engine and the reason if the chosen engine cannot run the plan."""
    try:
        plan_run(loaded, request)
    except UserError as refusal:  # a mistake in the plan itself is reported again with the embedded engine
        other = fallback_from(choice, refusal)
        return replace(request, engine=other.engine.name, engine_reason=other.reason)
    return request


def _gpus_found(session: Session) -> int | None:
    return session.machine.gpus_per_node if session.machine else None


def _here(session: Session) -> Here:
    """Return what an engine needs to know before there is a plan."""
    loaded, platform = session.loaded, session.platform
    return Here(
        platform=platform,
        primus_path=session.choices.primus_path,
        primus=loaded.config.platform_optimizations.get(platform, PlatformOptimizations()).primus,
    )
