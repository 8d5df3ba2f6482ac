#!/usr/bin/env python3
"""Write the tables of benchmarks/results/statistics.md by simulation and from the records; with --check, only compare.

python3 tools/statistics_page.py
python3 tools/statistics_page.py --check
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page import page_parser, replace_blocks, update_page  # noqa: E402

from tprimat.analyze.compare import run_rates  # noqa: E402
from tprimat.analyze.groups import group_runs, measure  # noqa: E402
from tprimat.analyze.metrics import MetricOptions  # noqa: E402
from tprimat.core import statistics, units  # noqa: E402
from tprimat.records.discover import load_results  # noqa: E402
from tprimat.report.tables import table  # noqa: E402

CASES = 2000
Array = np.ndarray
Draw = Callable[[np.random.Generator, int], Array]


def normal(rng: np.random.Generator, n: int) -> Array:
    """Draw independent step times that vary by 1 %."""
    return 1 + 0.01 * rng.normal(size=n)


def skewed(rng: np.random.Generator, n: int) -> Array:
    """Draw lognormal step times that vary by 5 %."""
    return np.exp(0.05 * rng.normal(size=n)) / math.exp(0.05**2 / 2)


def correlated(rho: float) -> Draw:
    """Return a draw of AR(1) step times that vary by 1 %."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        noise = rng.normal(size=n)
        series = [noise[0]]
        for value in noise[1:]:
            series.append(rho * series[-1] + math.sqrt(1 - rho**2) * value)
        return 1 + 0.01 * np.array(series)

    return draw


def spiked(rng: np.random.Generator, n: int) -> Array:
    """Draw step times of which one in ten takes half as long again."""
    return normal(rng, n) * np.where(rng.random(n) < 0.1, 1.5, 1.0) / 1.05


def rarely_spiked(rng: np.random.Generator, n: int) -> Array:
    """Draw step times of which one in fifty takes three times as long."""
    return normal(rng, n) * np.where(rng.random(n) < 0.02, 3.0, 1.0) / 1.04


def drifting(rng: np.random.Generator, n: int) -> Array:
    """Draw step times that rise by 1 % from first to last."""
    return 1 + 0.005 * rng.normal(size=n) + 0.01 * (np.arange(n) / (n - 1) - 0.5)


def switching(stay: float) -> Draw:
    """Return a draw of step times at two levels 10 % apart, each of which lasts with a probability."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        states = [int(rng.random() < 0.5)]
        while len(states) < n:
            states.append(states[-1] if rng.random() < stay else 1 - states[-1])
        return np.where(states, 1.1, 1.0) / 1.05 * (1 + 0.005 * rng.normal(size=n))

    return draw


STEPS: dict[str, Draw] = {
    "independent, normal, 1 %": normal,
    "independent, lognormal, 5 %": skewed,
    "AR(1) of 0.5": correlated(0.5),
    "AR(1) of 0.9": correlated(0.9),
    "drift of 1 %": drifting,
    "1 in 10 steps takes 1.5 times as long": spiked,
    "1 in 50 steps takes 3 times as long": rarely_spiked,
    "two speeds, at random": switching(0.5),
    "two speeds, each for some 10 steps": switching(0.9),
}
"""Step times whose mean is 1."""


SIZES = (6, 10, 20, 50, 100)
"""Steps after the first, which is start-up."""


def one_run() -> str:
    """List how often the throughput interval of one run covers the truth, after the cut of warm-up, and how often it has none."""
    rows = []
    for name, draw in STEPS.items():
        row = [name]
        for n in SIZES:
            rng, covered, printed = np.random.default_rng(n), 0, 0
            for _ in range(CASES):
                seconds = draw(rng, n)
                seconds = seconds[statistics.unsteady_prefix(seconds)[0] :]
                estimate = statistics.ratio_of_sums(np.ones(len(seconds)), seconds)
                if estimate.low is not None and statistics.two_states(seconds) is None:
                    printed += 1
                    covered += estimate.low <= 1 <= estimate.high
            share = units.percent(covered / printed, 0) if printed > CASES / 20 else units.ABSENT
            row.append(share if printed > 0.995 * CASES else f"{share} ({units.percent(1 - printed / CASES, 0)} not printed)")
        rows.append(row)
    return table(("step times", *(f"n = {n}" for n in SIZES)), rows)


def cut() -> str:
    """List how often steps are cut as warm-up though none of them is slower or faster than the others."""
    rows = []
    for name in ("independent, normal, 1 %", "independent, lognormal, 5 %", "AR(1) of 0.5", "AR(1) of 0.9"):
        row = [name]
        for n in SIZES:
            rng = np.random.default_rng(n)
            wrong = sum(statistics.unsteady_prefix(STEPS[name](rng, n))[0] > 0 for _ in range(CASES))
            row.append(units.percent(wrong / CASES, 0))
        rows.append(row)
    return table(("step times", *(f"n = {n}" for n in SIZES)), rows)


def verdicts() -> str:
    """List how often two equal configurations are called faster or slower."""
    rows = []
    for name, draw in STEPS.items():
        mine = {between: [name, units.percent(between)] for between in (0.0, statistics.BETWEEN_RUNS, 0.02)}
        for runs in (1, 2, 3, 5):
            rng = np.random.default_rng(runs)
            # Each spread between runs shifts the same runs: a factor on a run's seconds leaves the relative error of its rate.
            cases = [
                [[(rng.normal(), statistics.rate_of(np.ones(20), draw(rng, 20))) for _ in range(runs)] for _ in range(2)]
                for _ in range(CASES // 2)
            ]
            for between, row in mine.items():
                wrong, covered = 0, 0
                for sides in cases:
                    first, second = ([replace(rate, log=rate.log - between * away) for away, rate in side] for side in sides)
                    ratio = statistics.ratio_of_rates(first, second)
                    outside = not ratio.low <= 1 <= ratio.high
                    covered += not outside
                    wrong += outside and runs >= statistics.FEWEST_RUNS
                shares = [units.percent(number / len(cases), 0) for number in (covered, wrong)]
                row.append(", ".join(shares if runs >= statistics.FEWEST_RUNS else shares[:1]))
        rows += mine.values()
    header = ("step times, n = 20", "spread between runs", "1 run per side", "2 runs", "3 runs", "5 runs")
    return table(header, rows)


def many() -> str:
    """List how often one of several equal configurations is called fastest, and any other slower."""
    rng = np.random.default_rng(8)
    cases = [[[_a_rate(rng) for _ in range(5)] for _ in range(8)] for _ in range(CASES // 2)]
    rows = []
    for count in (2, 3, 5, 8):
        row = [str(count)]
        for runs in (1, 3, 5):
            fastest, slower = 0, 0
            for case in cases:
                groups = [group[:runs] for group in case[:count]]
                best, *others = sorted(groups, key=lambda group: -sum(rate.log for rate in group))
                shown = [statistics.ratio_of_rates(other, best).low > 1 for other in others]
                fastest += shown[0]
                slower += any(shown)
            shares = [units.percent(number / len(cases), 0) for number in (fastest, slower)]
            row.append(", ".join(shares[runs < statistics.FEWEST_RUNS :]))
        rows.append(row)
    return table(("equal configurations", "1 run each", "3 runs", "5 runs"), rows)


def _a_rate(rng: np.random.Generator) -> statistics.Rate:
    """Draw the rate of a run of 20 independent steps."""
    rate = statistics.rate_of(np.ones(20), normal(rng, 20))
    return replace(rate, log=rate.log - statistics.BETWEEN_RUNS * rng.normal())


ON_TWO_MACHINES = {"short", "dp_s8192_mbs1_fp8"}
"""Folders whose runs of a configuration are of two machines (benchmarks/records/h200/README.md)."""
BY_MACHINE = {"cuda-graphs"}
"""Folders that have one for each machine."""
OF_OTHER_SOURCES = ("unswitched",)
"""Folders whose runs may differ in sources that their records do not tell apart."""
ALL = {
    "all whose steps vary by less than 0.5 %": 0.005,
    "all whose steps vary by 0.5 % to 2 %": 0.02,
    "all whose steps vary by more than 2 %": math.inf,
    "all of two machines": None,
    "all mixtures of experts": None,
}
"""The last rows -> where the spread of a run's steps ends that decides, if it does."""


def between_runs() -> str:
    """List how much runs of one configuration differ in our records: on one machine, by how much their steps do, and on two."""
    records = ROOT / "benchmarks" / "records" / "h200"
    folders = (path for path in sorted(records.iterdir()) if path.is_dir() and path.name not in OF_OTHER_SOURCES)
    results, _ = load_results(list(folders))
    days: dict[tuple[str, str], list] = {}
    for result in results:
        parts = result.path.relative_to(records).parts
        folder = "/".join(parts[: 2 if parts[0] in BY_MACHINE else 1])
        days.setdefault((folder, (result.run.started_at or "")[:10]), []).append(result)
    rows: list[list[str]] = []
    squares: dict[str, float] = defaultdict(float)
    freedom, runs = Counter[str](), Counter[str]()
    for (folder, day), several in sorted(days.items()):
        for group in group_runs([measure(result, MetricOptions()) for result in several]):
            rates = run_rates(group)
            if len(rates) < 2:
                continue
            logs, steps = np.array([rate.log for rate in rates]), statistics.spread_between_runs(rates, least=0.0)
            where = next(words for words, end in ALL.items() if end is not None and steps < end)
            where = "all of two machines" if ON_TWO_MACHINES.intersection(group.runs[0].result.path.parts) else where
            where = where if group.run.ran.routing is None else "all mixtures of experts"
            squares[where] += float(logs.var(ddof=1)) * (len(logs) - 1)
            freedom[where] += len(logs) - 1
            runs[where] += len(logs)
            rows.append([folder, day, group.label, str(len(logs)), units.percent(steps, 2), units.percent(logs.std(ddof=1), 2)])
    rows += [[where, "", "", str(runs[where]), "", units.percent(math.sqrt(squares[where] / freedom[where]), 2)] for where in ALL]
    return table(("folder", "day", "configuration", "runs", "between steps of a run", "between runs"), rows)


BLOCKS = {"one_run": one_run, "cut": cut, "verdicts": verdicts, "many": many, "between_runs": between_runs}


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    options = page_parser(__doc__).parse_args()
    page = ROOT / "benchmarks" / "results" / "statistics.md"
    text = replace_blocks(page.read_text(encoding="utf8"), "figures", lambda name: f"\n{BLOCKS[name]()}\n\n")
    return update_page(page, text, check=options.check, command="python3 tools/statistics_page.py")


if __name__ == "__main__":
    sys.exit(main())
