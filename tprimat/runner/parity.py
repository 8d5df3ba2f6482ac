"""Read two sides of runs and judge whether their losses are the same."""

from collections.abc import Sequence
from pathlib import Path

from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.parity import curve_of, in_words, judge, pairs_of
from tprimat.analyze.traits import TRAITS, differing_traits
from tprimat.core.errors import ConfigError, RecordError, UserError
from tprimat.records.benchmark_file import RunResult
from tprimat.records.discover import load_results
from tprimat.report.parity import ParityReport

OUTCOMES = ("completed", "diverged")
"""Of runs whose losses say something; a diverged one refutes."""


def compare_losses(reference: Path, candidate: Path, within: float) -> ParityReport:
    """Judge whether the losses of a candidate are within a margin, as a fraction, of a reference's.

    Raises:
        RecordError: a file is damaged, or there is no run.
        ConfigError: a side holds several configurations, or no run of one side is a pair with one of the other.
    """
    sides = read_sides(reference, candidate)
    if same := {result.run.run_id for result in sides[0]} & {result.run.run_id for result in sides[1]}:
        raise ConfigError(
            f"{reference} and {candidate} hold the same run: {min(same)}.",
            where="A and B",
            why="A run is always on par with itself.",
        )
    pairs, why = pairs_of(*sides)
    if not pairs:
        differ = "; ".join(f"{one.field} is {in_words(one.reference)} in A and {in_words(one.candidate)} in B" for one in why)
        raise ConfigError(
            f"No run of A ({reference}) is a pair with one of B ({candidate}): {differ or 'they have no step in common'}.",
            where="A and B",
            why="Losses compare on the same seed, model, data, batch and learning rates, which follow the number of steps.",
            fix="./benchmark.py --seed 1 for both sides, with the same --steps and --data",
        )
    one, other = (side[0].run for side in sides)
    return ParityReport(
        reference=str(reference),
        candidate=str(candidate),
        parity=judge(pairs, within),
        curves=tuple(pair for several in pairs.values() for pair in several),
        pairs=sum(map(len, pairs.values())),
        traits=tuple(differing_traits(one, other, TRAITS)),
        same_weights=one.engine == other.engine,
    )


def read_sides(reference: Path, candidate: Path) -> tuple[list[RunResult], list[RunResult]]:
    """Return the runs of both sides.

    Raises:
        UserError: a side cannot be used; where neither can, both say why.
    """
    sides: list[list[RunResult]] = []
    wrong: list[tuple[str, UserError]] = []
    for name, path in (("A", reference), ("B", candidate)):
        try:
            sides.append(read_side(path))
        except UserError as error:
            wrong.append((name, error))
    if not wrong:
        return sides[0], sides[1]
    kind = type(wrong[0][1]) if len(wrong) == 1 else ConfigError
    raise kind(
        " ".join(f"{name}: {error.what}" for name, error in wrong),
        where=", ".join(dict.fromkeys(error.where or name for name, error in wrong)),
        why=" ".join(dict.fromkeys(filter(None, (error.why for _, error in wrong)))) or None,
        fix="\n".join(dict.fromkeys(filter(None, (error.fix for _, error in wrong)))) or None,
    )


def read_side(path: Path) -> list[RunResult]:
    """Return the runs of one configuration under a path.

    Raises:
        RecordError: a file is damaged, or no run has losses.
        ConfigError: the runs are of several configurations.
    """
    results, problems = load_results([path])
    if problems:
        raise problems[0]
    usable = [result for result in results if result.run.outcome in OUTCOMES and not result.run.mismatches and curve_of(result)]
    if not usable:
        raise RecordError(f"No run in {path} has losses.", where=str(path), fix="./benchmark.py writes results to ./output")
    labels = configurations(usable)
    if len(labels) > 1:
        raise ConfigError(
            f"{path} holds {len(labels)} configurations.",
            where=str(path),
            why="One side of a comparison of losses is one configuration, with one seed or several.",
            fix="the folder of one of:\n" + "\n".join(labels),
        )
    return sorted(usable, key=lambda result: result.run.run_id)


def configurations(results: Sequence[RunResult]) -> list[str]:
    """Return the labels of the configurations of some runs, and each of them once where their metrics are not known."""
    groups = group_runs([measure(result, MetricOptions()) for result in results])
    if groups:
        return [group.label for group in groups]
    return sorted({" ".join(trait.label(result.run) for trait in TRAITS.values()) for result in results})
