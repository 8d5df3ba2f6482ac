"""Repeat configurations in turn, A B B A, until their comparison is decided or a number of runs is reached.

Looking after each block of runs and stopping when a verdict shows would find differences that are not there: each look gets an
equal share of the 5 % of false alarms instead (Bonferroni), which the confidence of the comparison's intervals says.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tprimat.analyze.compare import Question, Verdict
from tprimat.analyze.groups import Group
from tprimat.analyze.traits import accelerator_name, differing_traits
from tprimat.config.load import environment_choices, read_config
from tprimat.core.accelerators import BACKEND_OF, find_accelerator
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.core.statistics import FALSE_ALARM, FEWEST_RUNS
from tprimat.engines.base import engine_named
from tprimat.hardware.nodes import this_machine
from tprimat.plan.build import new_run_id
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.records.environment import changed_variable, variables_of_run
from tprimat.records.redaction import UNKNOWN
from tprimat.report.comparison import Comparison
from tprimat.report.winner import lines_of_sides
from tprimat.runner.session import Session
from tprimat.runner.sweep import Cell, run_cells

BLOCK = 2
"""Runs of each side between two looks: A B B A."""


def looks_between(runs: int, most: int) -> list[int]:
    """Return the numbers of runs per side at which a comparison is tested, starting from those of the smaller side."""
    later = [*range(FEWEST_RUNS, most, BLOCK), most]
    return [runs, *(count for count in later if count > runs)]


def question_when_sure(
    compare: Callable[[Question], Comparison], question: Question, most: int, margin: float | None
) -> Question:
    """Repeat undecided configurations, and return the question with the confidence at which the answer must be read.

    Args:
        compare: reads all runs, and compares them.
        question: of the comparison.
        most: runs of a configuration.
        margin: of a gate, which then decides; None: until a configuration is shown to be faster or slower.

    Raises:
        ConfigError: `most` is too small to name a winner.
        LaunchError: a run cannot be repeated here, failed, or is another configuration than the one it repeats.
    """
    if most < FEWEST_RUNS:
        what = f"--until-sure is {most}."
        why = f"Fewer than {FEWEST_RUNS} runs per side name no winner."
        raise ConfigError(what, where="--until-sure", why=why, fix=f"--until-sure {FEWEST_RUNS}")

    def decided(found: Verdict) -> bool:
        if found.outcome == "refused" or found.other_loss is not None:
            return True
        return found.outcome in {"faster", "slower"} if margin is None else found.no_slower_than(margin) is not None

    fewest = min((found.fewest_runs for found in compare(question).verdicts if found.outcome != "refused"), default=most)
    asked = replace(question, confidence=confidence_of(looks_between(fewest, most)))
    repeat(lambda: compare(asked), run_again, decided, most)
    return asked


def confidence_of(looks: Sequence[int]) -> float:
    """Return the confidence of each look that leaves 5 % of false alarms to all of them."""
    return 1 - FALSE_ALARM / len(looks)


def repeat(
    read: Callable[[], Comparison], start: Callable[[Sequence[Group]], None], decided: Callable[[Verdict], bool], most: int
) -> Comparison:
    """Repeat the configurations of every undecided verdict, and return the comparison that decides or has all runs.

    Args:
        read: compares all runs that there are, at the confidence of one look.
        start: runs configurations once more each, in this order.
        decided: whether a verdict needs no more runs.
        most: runs of a configuration.

    Raises:
        LaunchError: a run cannot be repeated here, failed, or is another configuration than the one it repeats.
    """
    while lacking := undecided(comparison := read(), decided, most):
        target = looks_between(min(len(group.runs) for group in lacking), most)[1]
        for order in in_turn([target - len(group.runs) for group in lacking]):
            before, repeated = comparison, [lacking[place] for place in order]
            start(repeated)
            comparison = read()
            check_repeated(repeated, before, comparison)
    return comparison


def undecided(comparison: Comparison, decided: Callable[[Verdict], bool], most: int) -> list[Group]:
    """Return the configurations that need more runs, in order of the comparison."""
    open_ones = [found for found in comparison.verdicts if not decided(found)]
    labels = {label for found in open_ones for label in (found.baseline, found.candidate)}
    by_label = {group.label: group for group in comparison.groups}
    return [group for label, group in by_label.items() if label in labels and len(group.runs) < most]


def in_turn(missing: Sequence[int]) -> list[list[int]]:
    """Return which configurations run in each pass, each as often as it lacks runs; every second pass runs backwards.

    Drift then falls on all alike.
    """
    passes = []
    for number in range(max(missing, default=0)):
        places = [place for place, count in enumerate(missing) if count > number]
        passes.append(places[::-1] if number % 2 else places)
    return passes


def check_repeated(repeated: Sequence[Group], before: Comparison, after: Comparison) -> None:
    """Check that each repetition counts and joined its configuration."""
    known = {item.result.run.run_id for group in before.groups for item in group.runs}
    known |= {item.result.run.run_id for item in before.not_counted}
    for group in repeated:
        ids = {item.result.run.run_id for item in group.runs}
        now = next((other for other in after.groups if ids & {item.result.run.run_id for item in other.runs}), None)
        if now is not None and {item.result.run.run_id for item in now.runs} - known:
            continue
        new = [other for other in after.groups if not {item.result.run.run_id for item in other.runs} & known]
        alike = [other for other in new if other.run.strategy == group.run.strategy]
        lines = lines_of_sides(differing_traits(group.run, alike[0].run), (1, 0)) if alike else []
        failed = [item.not_counted for item in after.not_counted if item.result.run.run_id not in known]
        raise LaunchError(
            f"A repetition of {group.label} does not belong to it.",
            where="--until-sure",
            why=" ".join(lines) or "; ".join(filter(None, failed)) or "It is not among the results that are compared.",
            fix="repeat where the first runs were made, with the same versions, and name their output folder in --results-dir",
        )


def run_again(groups: Sequence[Group]) -> None:
    """Run configurations once more each, from the plans in their folders, into their output folders.

    Raises:
        LaunchError: a plan is missing or was made for another machine.
    """
    cells = [cell_of(group) for group in groups]
    results = run_cells(cells, quiet=True, resume=False, messages=sys.stderr)
    if len(results) < len(cells) or any(result.stop_signal for result in results):
        raise LaunchError("The repetitions were stopped.", where="--until-sure", fix="the same command continues")


def cell_of(group: Group) -> Cell:
    """Return one more run of a configuration.

    Raises:
        LaunchError: there is no plan of it here, or this is another machine.
    """
    folders = [item.result.path for item in group.runs if (item.result.path / "plan.json").is_file()]
    if not folders:
        raise LaunchError(
            f"No plan of {group.label} is here.",
            where="--until-sure",
            why="A run is repeated from the plan.json in its folder.",
            fix="--results-dir with folders that ./benchmark.py wrote on this machine",
        )
    folder = folders[-1].resolve()
    output = folder.parent.parent
    plan = read_plan(folder / "plan.json")
    run_id = new_run_id(plan.model, plan.strategy)
    plan = replace(plan, run_id=run_id, run_directory=str(output / "runs" / run_id), output_directory=str(output))
    return Cell(session=session_of(plan, group, output), plan=plan)


def session_of(plan: RunPlan, group: Group, output: Path) -> Session:
    """Return the session of a repeated plan.

    Raises:
        LaunchError: this is another machine, or one of several, or the plan's environment is not in its file.
    """
    if plan.nodes > 1 and not engine_named(plan.engine).starts_nodes:
        what = f"{group.label} ran on {plan.nodes} nodes, and only one is here."
        why = "Every node of a run needs a launcher, which compare.py does not start."
        raise LaunchError(what, where="--until-sure", why=why, fix="./benchmark.py with --runs on all nodes, then compare again")
    machine = this_machine()
    here = machine.accelerator if machine is not None else None
    same = plan.platform == "cpu" or (
        machine is not None
        and BACKEND_OF[plan.platform] == machine.platform
        and find_accelerator(here) is find_accelerator(group.run.machine.accelerator)
    )
    if not same:
        what = f"{group.label} ran on {accelerator_name(group.run)}, and this machine has {here or 'no GPU'}."
        raise LaunchError(what, where="--until-sure", fix="repeat it there")
    hidden = [name for name, value in plan.environment.items() if value.startswith(UNKNOWN[:-1])]
    if hidden:
        raise LaunchError(
            f"The plan of {group.label} does not keep the values of {', '.join(hidden)}.",
            where="--until-sure",
            why="Values of unknown environment variables are not written.",
            fix="./benchmark.py with --runs",
        )
    if changed := changed_variable(group.run.environment, variables_of_run(plan.environment)):
        what = f"{group.label} ran with other environment variables: {changed}."
        raise LaunchError(what, where="--until-sure", fix="set them as then")
    return Session(
        loaded=read_config(size=plan.size),
        platform=plan.platform,
        size=plan.size,
        machine=machine,
        choices=environment_choices(),
        output=output,
        plans=(plan,),
    )
