"""Read results, analyze them, and pack them for others: what the commands on results have in common."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tprimat.analyze import compare
from tprimat.analyze.compare import QUESTION, Question
from tprimat.analyze.groups import FILES, Kind, Measured, group_runs, kind_of, measure, without_copies, without_far_losses
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.probes import under_ceiling
from tprimat.analyze.scaling import Series, series_of
from tprimat.config.load import load_config
from tprimat.core.errors import ConfigError, MetricError, RecordError
from tprimat.core.statistics import FEWEST_RUNS
from tprimat.core.units import printable
from tprimat.records.benchmark_file import RunResult, benchmark_text
from tprimat.records.discover import (
    PROBES_FILE,
    WHAT_A_RESULT_IS,
    check_probes,
    find_results,
    is_archive,
    is_result_file,
    load_results,
    probes_in,
)
from tprimat.records.schema import ProbeRecord, RunRecord
from tprimat.records.sharing import masked_texts, shareable, shareable_text
from tprimat.records.store import as_document, cannot_write, checked, to_json
from tprimat.report.catalogue import per_rank
from tprimat.report.comparison import Comparison
from tprimat.report.export import Row
from tprimat.report.names import shortest_ends
from tprimat.report.words import held_words, lost_words, not_counted_words, run_name, runs_to_decide, sentence
from tprimat.runner.explain import fastest_explained

RESULT_FOLDERS = ("output", "output-*", "all_outputs/*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Runs with their metrics, and what could not be read."""

    measured: list[Measured]
    problems: list[RecordError] = field(default_factory=list)
    probes: Sequence[ProbeRecord] = ()


def result_folders() -> list[Path]:
    """Return the folders in which ./benchmark.py and ./run_all_configs.sh leave results, as far as they exist here."""
    folders = [path for pattern in RESULT_FOLDERS for path in sorted(Path().glob(pattern)) if path.is_dir()]
    if not folders:
        raise RecordError(
            "There is no folder of results here.",
            where=", ".join(RESULT_FOLDERS),
            fix="./benchmark.py writes to ./output; or --results-dir with folders of results",
        )
    return folders


def read_results(
    paths: Sequence[Path],
    options: MetricOptions,
    prices: Mapping[str, float],
    probes: Sequence[Path] = (),
    *,
    to_share: bool = False,
) -> Results:
    """Read all runs under some paths (folders, files, archives), and derive their metrics; `prices` are of a GPU hour.

    Probes among the results are used, and those in further places. To share: records hold only what may leave this machine.
    """
    results, unreadable = load_results(paths)
    results = [_masked(one, shareable if to_share else masked_texts) for one in results]
    records, damaged = probes_in([*paths, *check_probes(probes)])
    measured = [measure(result, under_ceiling(options, result.run, records), prices) for result in results]
    return Results(measured=without_far_losses(without_copies(measured)), problems=[*unreadable, *damaged], probes=records)


def _masked(result: RunResult, mask: Callable[[dict[str, Any]], dict[str, Any]]) -> RunResult:
    document = as_document(result.run)
    masked = mask(document)
    return result if masked == document else replace(result, run=checked(RunRecord, masked, result.path))


def by_folder(results: Results, paths: Sequence[Path]) -> Results:
    """Return runs that know in which of several places that the user named they are, with a problem for each that adds none."""
    places = [item.result.path for item in results.measured]
    places += [Path(problem.where) for problem in results.problems if problem.where]
    silent = [path for path in paths if not any(path in (place, *place.parents) for place in places)]
    silent = [path for path in silent if not (path.is_dir() and any(path.rglob(PROBES_FILE)))]
    problems = [*results.problems, *(map(_without_runs, silent) if results.measured else ())]
    return replace(results, measured=in_folders(results.measured, paths), problems=problems)


REPETITION = re.compile(r"(?<!\d{4}-\d\d)(?:^|[-_]|(?<!\d)\.)\d{1,2}$")
"""End of the name of a folder that repeats another: 1, 2, with-2; no day of a month, nor a part of a version."""


def in_folders(measured: Sequence[Measured], paths: Sequence[Path]) -> list[Measured]:
    """Return runs with the first of some places that holds them, by the end that tells it apart, where there are several.

    Inside a place, a folder is told where runs of two would be one configuration, unless their names differ in a number.
    """
    places = list(dict.fromkeys(map(_folder, paths)))
    rows: list[tuple[Measured, Path]] = []
    kinds: dict[Kind, set[Path]] = {}
    for one in measured:
        own = one.result.path
        renamed = len(places) == 1 and own.suffix not in FILES and own.name != one.result.run.run_id
        above = own if renamed else own.parent
        place = next((place for place in places if _is_in(place, one)), own.parent)
        inside = (above.parent if above.name == "runs" and above != place else above).relative_to(place).parts
        inner = place.joinpath(*filter(None, (REPETITION.sub("", part) for part in inside)))
        shown = inner if any(place in other.parents for other in places) else place  # beside a part of it
        item = replace(one, folder=printable(str(shown)) if len(places) > 1 else "")
        rows.append((item, inner if len(places) > 1 or inner == place else inner.relative_to(place)))
        kinds.setdefault(kind_of(item), set()).add(rows[-1][1])
    folders = [printable(str(inner)) if len(kinds[kind_of(item)]) > 1 else item.folder for item, inner in rows]
    ends = shortest_ends(folders if len(places) > 1 else ())
    return [replace(item, folder=ends.get(folder, folder)) for (item, _), folder in zip(rows, folders, strict=True)]


def _folder(path: Path) -> Path:
    """Return what stands for a place: of a file, and of the folder of a single run, the folder around, which may repeat it."""
    holds_runs = path.is_dir() and not (path / "run.json").is_file()
    return path if holds_runs or is_archive(path) else path.parent


def _without_runs(path: Path) -> RecordError:
    if any(find_results(path)):
        what, why = f"{path} adds no run.", "All of its runs have the ids of runs in the places named before it: they are copies."
        return RecordError(what, where=str(path), why=why, fix="leave it out")
    return RecordError(f"{path} holds no result.", where=str(path), why=WHAT_A_RESULT_IS, fix="leave it out, or name another")


def configured_prices() -> dict[str, float]:
    """Return the prices of a GPU hour by accelerator of ./config.yaml; none, with a notice, where it is missing or wrong."""
    try:
        return load_config("config.yaml").benchmarking.cloud_costs if Path("config.yaml").is_file() else {}
    except ConfigError as error:
        print(f"no prices: {error}", file=sys.stderr)
        return {}


def compare_runs(
    measured: Sequence[Measured], paths: Sequence[Path], baseline: str | None, question: Question = QUESTION
) -> Comparison:
    """Compare configurations with a baseline (a folder, archive or file of results), or with the fastest of their workload."""
    lost = tuple(item for item in measured if not item.counts)
    if baseline is None:
        groups = group_runs(measured)
        ranked = compare.rankings(groups, question)
        verdicts, candidates = compare.verdicts_of(ranked, question), []
    else:
        place = next((path for path in paths if path.resolve() == Path(baseline).resolve()), Path(baseline))
        groups = group_runs(in_folders(measured, [place, *paths]), folders_first=True)
        baselines = [group for group in groups if all(_is_in(place, item) for item in group.runs)]
        if not baselines:
            why = next((f"{run_name(item)}: {not_counted_words(item)}" for item in lost if _is_in(place, item)), None)
            what = f"No run in {place} counts." if why else f"The results hold no run in {place}."
            raise ConfigError(what, where="--baseline", why=why, fix=None if why else "name it under --results-dir, too")
        ranked = compare.rankings(groups, question)
        others = [group for group in groups if group not in baselines]
        verdicts = [compare.verdict(compare.most_alike(baselines, group), group, question) for group in others]
        candidates = [item for item in lost if not _is_in(place, item)]
    return Comparison(
        groups=tuple(groups),
        rankings=tuple(ranked),
        verdicts=tuple(verdicts),
        not_counted=lost,
        lost_candidates=tuple(item for item in candidates if item.not_counted[0].kind != "copy"),
        asked=baseline is not None or question.even_if_different,
        question=question,
    )


def _is_in(place: Path, item: Measured) -> bool:
    return place in (item.result.path, *item.result.path.parents)


def regression_gate(comparison: Comparison, margin: float) -> tuple[list[str], list[str]]:
    """Open only where every candidate is shown not to be slower than its baseline by more than a fraction (non-inferiority).

    Return what is shown to be slower, and where neither is: not compared, another loss, few runs, a wide interval, a lost run.
    """
    closed: list[str] = []
    undecided = [lost_words(item) for item in comparison.lost_candidates]
    if not comparison.verdicts and not undecided:
        undecided.append("there is nothing to compare: a gate needs a baseline and another configuration that count")
    for one in comparison.verdicts:
        passed = one.no_slower_than(margin)
        favoured = passed is not None and one.handicapped == ("baseline" if passed else "candidate")
        silent = one.losses is not None and one.losses.silent
        words = sentence(one, brief=True)
        if one.outcome == "refused" or one.other_loss is not None or silent:
            undecided.append(f"{words} Only one side recorded its losses." if silent else words)
        elif favoured:
            name = one.baseline if passed else one.candidate
            undecided.append(f"{words} Repeat it on GPUs whose clocks are free: {held_words(one, name)}.")
        elif min(one.runs) < FEWEST_RUNS:
            undecided.append(f"{words} A gate needs {FEWEST_RUNS} runs per side (--runs {FEWEST_RUNS}).")
        elif passed is None:
            undecided.append(f"{words} {runs_to_decide(one, margin)}")
        elif not passed:
            closed.append(words)
    return list(dict.fromkeys(closed)), list(dict.fromkeys(undecided))


def scaling_of(measured: Sequence[Measured]) -> list[Series]:
    """Find every scaling series among some runs."""
    series = series_of(group_runs(measured))
    if not series:
        counted = sum(item.counts for item in measured)
        what = "No configuration ran on two GPU counts with the same work per GPU or in total."
        raise MetricError(
            per_rank(what, {item.result.run.machine.platform for item in measured}),
            why=f"{counted} of {len(measured)} runs count.",
            fix="run the same strategy with --gpus 1, 2, 4 and 8",
        )
    lost = ((run_name(item), item.result.run.machine.gpus, item.not_counted[0]) for item in measured if not item.counts)
    return [replace(series[0], left_out=(*series[0].left_out, *lost)), *series[1:]]


def report_page(results: Results) -> str:
    """Return the HTML page on some runs, which were read to be shared."""
    from tprimat.report.html import html_report  # imported late: of all commands on results one writes a page

    rankings, lost = compare.rankings(group_runs(results.measured)), [item for item in results.measured if not item.counts]
    problems = [error.with_texts(shareable_text) for error in results.problems]
    return html_report(rankings, fastest_explained(rankings, results.probes), lost, problems)


# What leaves this machine: archives, and runs for W&B.


def places_of(runs: Sequence[Measured], folders: Sequence[Path]) -> list[str]:
    """Return the path of each run from the given folder or file on that holds it; a number tells folders of one name apart."""
    names: dict[Path, str] = {}
    for folder in (place.parent if place.name == "run.json" else place for place in folders):
        root = folder.resolve().name.removesuffix(".gz").removesuffix(".tar") or "results"
        numbered = (root, *(f"{root}-{number}" for number in range(2, len(folders) + 1)))
        names.setdefault(folder, next((name for name in numbered if name not in names.values()), root))
    above = [max((one for one in names if item.result.path.is_relative_to(one)), key=lambda one: len(one.parts)) for item in runs]
    places = [Path(names[one], item.result.path.relative_to(one)) for item, one in zip(runs, above, strict=True)]
    return [os.fsencode(place).decode("utf8", "backslashreplace") for place in places]


def packed(runs: Sequence[Measured], probes: Sequence[ProbeRecord], folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the files of an archive of some runs, which were read to be shared: a folder a run, or its benchmark file."""
    if probes:
        lines = (json.dumps(shareable(as_document(probe))) for probe in probes)
        yield "probes.jsonl", "".join(f"{line}\n" for line in lines)
    for place, item in sorted(zip(places_of(runs, folders), runs, strict=True), key=lambda pair: pair[0]):
        result, run = item.result, item.result.run
        if result.path.is_file() or result.path.suffix in FILES:
            if item.not_counted and run.counts:  # the file contradicts itself, and is written anew from its records
                run = replace(run, mismatches=(not_counted_words(item),))
            folder, _, name = place.rpartition("/")
            name = name.removesuffix(".gz")
            name = name if is_result_file(name) else f"benchmark_{name}.json"
            yield f"{folder or 'results'}/{name}", benchmark_text(run, result.steps, item.metrics)
            continue
        yield f"{place}/run.json", to_json(run, indent=2) + "\n"
        yield f"{place}/steps.jsonl", "".join(f"{to_json(step)}\n" for step in result.steps)
        if result.telemetry:
            yield f"{place}/telemetry.jsonl", "".join(f"{to_json(sample)}\n" for sample in result.telemetry)


def to_wandb(runs: Sequence[Measured], rows: Sequence[Row], folder: Path) -> int:
    """Write an offline run for each that has ended and is not there yet, which `wandb sync` uploads, and return their number."""
    os.environ |= {"DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}  # W&B calls nobody: what is written stays here
    try:
        wandb: Any = import_module("wandb")
    except ImportError as error:
        raise ConfigError("--to wandb-offline needs wandb, which is not installed: pip install wandb") from error
    new = [(item.result, row) for item, row in zip(runs, rows, strict=True) if item.result.run.outcome != "running"]
    new = [pair for pair in new if not any(folder.glob(f"wandb/offline-run-*-{pair[0].run.run_id}"))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    for result, row in new:
        name = result.run.run_id
        target = wandb.init(project="tprimat", id=name, name=name, dir=str(folder), mode="offline", config=row, settings=settings)
        for step in result.steps:
            target.log(as_document(step), step=step.step)
        target.summary.update({name: value for name, value in row.items() if isinstance(value, int | float)})
        target.finish(exit_code=0 if result.run.outcome == "completed" else 1)
    return len(new)
