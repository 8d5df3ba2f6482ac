"""From a request to plans: read the configuration and the machine, and decide which runs to make."""

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from math import lcm
from pathlib import Path

from tprimat.config.load import (
    EnvironmentChoices,
    LoadedConfig,
    Setting,
    absolute_path,
    added_models,
    environment_choices,
    read_config,
)
from tprimat.config.schema import PlatformOptimizations, Size
from tprimat.core.accelerators import BACKEND_OF, PLATFORM_OF, PlatformName, find_accelerator
from tprimat.core.errors import ConfigError, LaunchError, MissingLayoutError, UserError
from tprimat.engines import AUTO, FALLBACK
from tprimat.engines.base import Here, choose, engine_named
from tprimat.hardware.nodes import Nodes, cpu_cores, find_nodes, most_cpu_ranks, refuse_idle_nodes, this_machine, told_nodes
from tprimat.plan.build import STANDARD_LIBRARY, PlanRequest, build_plan, count_ranks
from tprimat.plan.schema import RunPlan
from tprimat.records.discover import check_probes, probes_in
from tprimat.records.environment import processor_name
from tprimat.records.schema import Machine
from tprimat.runner.planning import named_machine, refuse_precision
from tprimat.runner.prediction import predicted, refuse_too_large
from tprimat.runner.request import RunRequest, layout_name, layout_settings, models_of, settings_of, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A request with everything decided: the configuration, the machine, and a plan for each run."""

    loaded: LoadedConfig
    platform: PlatformName
    size: Size
    machine: Machine | None
    """The GPUs of this machine, or of the one that a dry run names; None where there are none."""
    is_named: bool = False
    """The machine is another one, that a dry run names."""
    choices: EnvironmentChoices
    output: Path
    plans: tuple[RunPlan, ...] = ()
    place: Nodes = field(default_factory=Nodes)
    """This machine's place among those whose launchers work together."""
    probes: tuple[Path, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether this machine is of the kind that the plans are for."""
        like = self.machine is not None and not self.is_named and BACKEND_OF[self.platform] == self.machine.platform
        return self.platform == "cpu" or like

    def machine_of(self, plan: RunPlan) -> Machine:
        """Return the machine as a record names it before a worker has looked closer."""
        if self.machine is not None and BACKEND_OF[plan.platform] == self.machine.platform:
            return replace(self.machine, nodes=plan.nodes, gpus_per_node=plan.gpus_per_node)
        name = processor_name() if plan.platform == "cpu" else None
        return Machine(platform=BACKEND_OF[plan.platform], accelerator=name, gpus_per_node=plan.gpus_per_node, nodes=plan.nodes)


def prepare(request: RunRequest) -> Session:
    """Read the configuration and the machine, and plan every run."""
    choices, machine = environment_choices(), this_machine()
    if request.gpu is not None:
        machine = named_machine(request.gpu, request.precision)
        if not request.dry_run:
            raise ConfigError("--gpu describes another machine.", where="--gpu", fix="--dry-run, or leave out --gpu to run here")
        if request.platform not in {None, PLATFORM_OF[machine.platform]}:
            fix = f"--platform {PLATFORM_OF[machine.platform]}"
            raise ConfigError(f"{machine.accelerator} is not a GPU of {request.platform}.", where="--gpu", fix=fix)
    here: PlatformName = PLATFORM_OF[machine.platform if machine else "cpu"]
    platform = request.platform or here
    size: Size = request.size or ("tiny" if platform == "cpu" else "full")
    told = told_nodes()  # on how many nodes the scheduler started this command; what the user sets comes later, and counts
    started = [Setting(("hardware", "platforms", platform, "nodes"), *told)] if told is not None and told[0] > 1 else []
    settings = [*started, *settings_of(request, platform)]
    loaded = read_config(request.config, size=size, settings=settings)
    models, own = models_of(loaded, request), layout_name(request)
    more = [*added_models(loaded, models), *(layout_settings(request, own, models, platform) if own else ())]
    loaded = read_config(request.config, size=size, settings=[*settings, *more]) if more else loaded
    named = "--output-dir" if request.output else "the variable OUTPUT_DIR"
    output = absolute_path(request.output or choices.output_directory, named)
    session = Session(
        loaded=loaded,
        platform=platform,
        size=size,
        machine=machine,
        is_named=request.gpu is not None,
        choices=choices,
        output=output,
    )
    plans, left_out = _plans(session, request, models, own, elsewhere=request.dry_run and not session.is_here)
    session = replace(session, probes=check_probes(request.probes), notices=tuple(left_out))
    probes, _ = probes_in([output, *session.probes])
    session = replace(session, plans=tuple(predicted(plan, session.machine_of(plan), probes) for plan in plans))
    if not request.dry_run:
        if request.nodes is None and plans[0].nodes == 1:
            refuse_idle_nodes()
        session = replace(session, place=find_nodes(plans[0].nodes))
        _refuse_what_is_not_here(session, request)
    if not request.dry_run or session.is_here:
        path, data = plans[0].dataset.removeprefix("text:"), loaded.config.training.data
        if path not in {plans[0].dataset, STANDARD_LIBRARY.removeprefix("text:")} and not Path(path).exists():
            where = loaded.where("training", "data", "dataset")
            raise ConfigError(f"dataset is {data.dataset!r}.", where=where, why=f"There is no {path}.")
    return session


def _refuse_what_is_not_here(session: Session, request: RunRequest) -> None:
    if not session.is_here:
        fix = "--dry-run to see the plan, or --platform cpu"
        raise LaunchError(f"This machine shows no {session.platform} GPU.", where="--platform", fix=fix)
    for plan in () if request.force else session.plans:
        if error := engine_named(plan.engine).untried():
            raise error
        refuse_precision(find_accelerator(session.machine_of(plan).accelerator), plan.workload.format)
        if warning := refuse_too_large(plan, session.machine_of(plan)):
            print(warning, file=sys.stderr)


def _plans(
    session: Session, request: RunRequest, models: list[str], own: str | None, *, elsewhere: bool
) -> tuple[list[RunPlan], list[str]]:
    """Return the plans, and for each model that is left out of `all` what its strategy is missing."""
    loaded, platform = session.loaded, session.platform
    _, ranks = count_ranks(loaded, platform, None)
    if platform == "cpu" and ranks > most_cpu_ranks() and not (request.dry_run or request.force):
        what = f"{ranks:,} processes are requested, but this machine has {cpu_cores()} cores."
        fix = f"--gpus {most_cpu_ranks()} at most; --force starts them anyway"
        raise LaunchError(what, where=loaded.where("hardware", "platforms", "cpu", "gpus_per_node"), fix=fix)
    optimizations = loaded.config.platform_optimizations.get(platform, PlatformOptimizations())
    here = Here(platform=platform, primus_path=session.choices.primus_path, primus=optimizations.primus)
    strategies = [own] if own else words(request.strategy or session.choices.strategy)
    if not strategies:
        place = "--parallel" if request.strategy else "the variable PARALLEL"
        raise ConfigError(f"{place} names no strategy.", where=place, fix=f"one of: {', '.join(loaded.config.parallelism)}")
    gpus = cpu_cores() if platform == "cpu" else session.machine.gpus_per_node if session.machine else None
    engine, reason = choose(request.engine, here, elsewhere=elsewhere)
    start = engine.prepare(None if elsewhere else here)
    plans: list[RunPlan] = []
    missing: list[MissingLayoutError] = []
    for strategy, model in itertools.product(strategies, models):
        planned = PlanRequest(
            model=model,
            strategy=strategy,
            platform=platform,
            size=session.size,
            engine=engine.name,
            engine_reason=reason,
            gpus_found=gpus,
            multiple=request.multiple,
            output_directory=str(session.output),
            primus=start,
            command=request.command,
        )
        if request.engine == AUTO and engine.automatic_if_it_fits:
            planned = _fitting(loaded, planned)
        try:
            for number in range(1, request.runs + 1):
                run_id = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}-{model}-{strategy}"  # sorts by time
                run_id += f"-{number}" if request.runs > 1 else ""
                one = replace(planned, run_id=run_id, run_directory=str(session.output / "runs" / run_id))
                plans.append(plan_run(loaded, one))
        except MissingLayoutError as error:
            missing.append(error)
    if not plans:
        raise missing[0]
    if len(strategies) > 1 and (shared := shared_ranks(plans)) > 1:
        return _plans(session, replace(request, multiple=shared), models, own, elsewhere=elsewhere)
    return plans, [f"left out: {error}" for error in missing]


def shared_ranks(plans: Iterable[RunPlan]) -> int:
    """Return how many processes plans take that are compared on a CPU; 1 where they take equally many, or none does."""
    counts = {plan.gpus_per_node for plan in plans if plan.platform == "cpu"}
    return lcm(*counts) if len(counts) > 1 else 1


def plan_run(loaded: LoadedConfig, request: PlanRequest) -> RunPlan:
    """Build a plan that its engine can run, here or on another machine that has what it needs."""
    engine = engine_named(request.engine)
    plan = build_plan(loaded, replace(request, trainer=engine.trainer))
    if (refusal := engine.refusal(plan, loaded.where)) is not None:
        raise refusal
    return plan


def _fitting(loaded: LoadedConfig, request: PlanRequest) -> PlanRequest:
    """Return the request, with the embedded engine and the reason if the chosen engine cannot run the plan."""
    try:
        plan_run(loaded, request)
    except UserError as refusal:  # a mistake in the plan itself is reported again with the embedded engine
        why = f" {refusal.why}" if refusal.why and isinstance(refusal, ConfigError) else ""
        return replace(request, engine=FALLBACK, engine_reason=f"{request.engine_reason}, but does not fit: {refusal.what}{why}")
    return request
