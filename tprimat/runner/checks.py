"""Check plans without starting or writing anything: those of a session, and every cell of a configuration."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tprimat.config.load import Setting, read_config
from tprimat.config.schema import Size
from tprimat.core import units
from tprimat.core.accelerators import BACKEND_OF, PlatformName, find_accelerator
from tprimat.core.errors import LaunchError, UserError
from tprimat.engines import FALLBACK
from tprimat.engines.base import Command, Here, engine_named
from tprimat.hardware.nodes import DEFAULT_PORT, Nodes, cpu_cores, find_nodes, most_cpu_ranks, this_machine
from tprimat.launch.process import command_on
from tprimat.plan.build import PlanRequest
from tprimat.plan.schema import RunPlan
from tprimat.predict.memory import predict_memory
from tprimat.records.schema import Machine
from tprimat.runner.doctor import Check, check_disk
from tprimat.runner.planning import named_machine
from tprimat.runner.prediction import gate, memory_words, need_words, planned_workload, predicted, ways_out
from tprimat.runner.request import BEST, RunRequest
from tprimat.runner.session import Session, plan_run, prepare

FIRST_NODE = Nodes(rank=0, master_address="FIRST_NODE", master_port=DEFAULT_PORT)
"""What a plan shows where MASTER_ADDR is not set."""


def command_shown(plan: RunPlan) -> Command:
    """Return the command of this node; without MASTER_ADDR that of the first node, under a name in place of its address."""
    try:
        nodes = find_nodes(plan.nodes)
    except LaunchError:
        nodes = replace(FIRST_NODE, count=plan.nodes)
    return command_on(plan, nodes)


def predicted_lead(session: Session, request: RunRequest) -> Iterator[str]:
    """Yield what is predicted to be faster than maximum_performance, for a dry run that plans this strategy."""
    if any(plan.strategy == BEST for plan in session.plans):
        models, plans = ",".join(dict.fromkeys(plan.model for plan in session.plans)), list(session.plans)
        for strategy in (one for one in session.loaded.config.parallelism if one != BEST):
            with suppress(UserError):  # one that this machine cannot run is no faster
                plans += prepare(replace(request, model=models, strategy=strategy, runs=1)).plans
        yield from faster_than_best(plans, session.machine)


def check_session(session: Session, *, several: bool) -> Iterator[Check]:
    """Look at what a run of these plans needs here: GPUs, nodes, data, memory (of which, of several), and a place for results."""
    plan = session.plans[0]
    yield _gpus(session, plan)
    here = engine_named(plan.engine).available(Here(platform=plan.platform))
    if not session.is_here and isinstance(here, UserError):
        yield Check("engine", "absent", f"{here.what} The machine that runs this needs it.")
    if plan.nodes > 1:
        yield _nodes(plan)
    yield Check("data", "ok", plan.dataset)
    for one in {(plan.model, plan.strategy): plan for plan in session.plans}.values():
        yield _memory(session, one, several=several)
    yield check_disk(session.output)


def _gpus(session: Session, plan: RunPlan) -> Check:
    machine, wanted = session.machine, plan.gpus_per_node
    if session.is_named and machine is not None:
        finding = f"{wanted} x {machine.accelerator}, from --gpu; predictions assume them"
        return Check("GPUs", "absent", finding)
    if plan.platform == "cpu":
        finding = f"{wanted:,} on this CPU, which has {cpu_cores()} cores"
        if wanted > (most := most_cpu_ranks()):
            return Check("processes", "problem", finding, f"--gpus {most} at most")
        return Check("processes", "ok", finding)
    if machine is None or BACKEND_OF[plan.platform] != machine.platform:
        finding = f"{wanted} {plan.platform} GPUs are planned, but this machine shows none"
        return Check("GPUs", "absent", finding, "start the run on a machine with GPUs")
    return Check("GPUs", "ok", f"{wanted} of {machine.gpus_per_node} x {machine.accelerator}")


def _nodes(plan: RunPlan) -> Check:
    try:
        nodes = find_nodes(plan.nodes)
    except LaunchError as error:
        finding = f"{plan.nodes}; the command is for the first one, with FIRST_NODE as its address"
        return Check("nodes", "absent", finding, error.fix)
    return Check("nodes", "ok", f"this is node {nodes.rank} of {nodes.count}, the first is {nodes.master_address}")


def _memory(session: Session, plan: RunPlan, *, several: bool) -> Check:
    name, whose = "memory", f"{plan.model} {plan.strategy}: " if several else ""
    workload, machine = planned_workload(plan), session.machine_of(plan)
    unless = " if no token is dropped" if plan.workload.expert_capacity_factor is not None else ""
    if workload is None:
        why = "on a CPU" if plan.platform == "cpu" else f"for the engine {plan.engine}"
        return Check(name, "absent", f"{whose}not predicted {why}")
    if (gated := gate(plan, machine)) is None:
        what = f"{whose}{need_words(predict_memory(workload))}".replace("rank", f"rank{unless}", 1)
        return Check(name, "absent", f"{what}; the memory of a GPU is not known here", "--gpu 'H100 SXM'")
    finding = whose + memory_words(*gated, machine.memory_bytes).replace("rank", f"rank{unless}", 1)
    if gated[0] == "fits":
        return Check(name, "ok", finding)
    fix = ways_out(plan, find_accelerator(machine.accelerator)) or "python3 -m tprimat plan lists what fits"
    return Check(name, "problem" if gated[0] == "does not fit" else "absent", finding, fix)


PLATFORM_ORDER: tuple[PlatformName, ...] = ("nvidia", "amd", "cpu")
USUAL: Mapping[PlatformName, str] = {"nvidia": "H100 SXM", "amd": "MI300X"}
"""What a configuration is checked for where no such GPU is here."""
LEAST_LEAD = 0.02
"""By which a layout is predicted to be faster before anybody is told."""


ConfiguredRun = tuple[PlanRequest, RunPlan | UserError, Machine | None]
"""A cell of a configuration, its plan, and the machine that it is predicted for; None on a CPU."""


def check_configuration(config: Path | None, gpus: int | None, gpu: str | None = None) -> Iterator[ConfiguredRun]:
    """Plan each cell of a configuration, by default TPrimat's own and with the number of GPUs that it states.

    `gpus` says how many GPUs a node has instead; on a CPU the processes stay those of the configuration. `gpu` names the
    accelerator that NVIDIA's or AMD's cells are predicted for instead of this machine's.
    """
    here = named_machine(gpu, None) if gpu else this_machine()
    for platform in PLATFORM_ORDER:
        size: Size = "tiny" if platform == "cpu" else "full"
        settings = []
        if gpus and platform != "cpu":
            settings.append(Setting(("hardware", "platforms", platform, "gpus_per_node"), gpus, "--gpus"))
        loaded = read_config(config, size=size, settings=settings)
        machine = here if here is not None and here.platform == BACKEND_OF[platform] else None
        if machine is None and platform in USUAL:
            machine = named_machine(USUAL[platform], None)
        if platform in loaded.config.hardware.platforms:
            for strategy in loaded.config.parallelism:
                for model in loaded.config.models:
                    asked = PlanRequest(model=model, strategy=strategy, platform=platform, size=size, engine=FALLBACK)
                    plan: RunPlan | UserError
                    try:
                        plan = plan_run(loaded, asked)
                        plan = predicted(plan, machine, ()) if machine is not None else plan
                    except UserError as error:
                        plan = error
                    yield asked, plan, machine


def faster_than_best(plans: Iterable[RunPlan], machine: Machine | None) -> Iterator[str]:
    """Yield a sentence for each model for which another strategy that fits is predicted to be faster than maximum_performance."""
    fitting: dict[str, dict[str, float]] = {}
    for plan in plans:
        seconds, gated = plan.prediction and plan.prediction.step_seconds, gate(plan, machine)
        if seconds and gated is not None and gated[0] == "fits":
            fitting.setdefault(plan.model, {})[plan.strategy] = seconds
    for model, times in fitting.items():
        fastest = min(times, key=lambda strategy: times[strategy])
        if BEST in times and (lead := times[BEST] / times[fastest] - 1) > LEAST_LEAD and machine is not None:
            faster = f"{units.percent(lead)} faster than" if lead < 1 else f"{units.significant(lead + 1)} times as fast as"
            said = f"{model} on {machine.accelerator}: {fastest} is predicted {faster} {BEST}"
            yield f"{said}; ./run_all_configs.sh {model} measures both"
