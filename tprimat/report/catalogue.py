"""Every metric that a report shows: name, unit, how it sums up several runs, and how it prints.

Tables, CSV, JSON, pictures and the HTML page pick rows of this catalogue, so that a metric has the same value, the same sort key
and the same format wherever it appears.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from tprimat.analyze.groups import Group, group_estimate, on_cpu
from tprimat.core import units
from tprimat.core.units import GIBIBYTE, TERA
from tprimat.records.schema import Estimate, RunMetrics
from tprimat.report.tables import with_interval

Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a run, or of a group of repeated runs."""

    key: str
    """Its field in RunMetrics, which is also its name in CSV and JSON."""
    heading: str
    """Of a column."""
    over_runs: Literal["estimate", "mean", "mean of equal steps", "worst", "sum", "count"]
    """What a group of runs has: an estimate (a single run's own interval, else the mean with the spread between runs), the mean,
    the mean unless the runs end at different steps, the largest value, the sum, or the number of runs."""
    show: Show
    """Value to text, in columns."""
    show_in_full: Show | None = None
    """Value to text where a single run is described; None: as in columns."""
    interval: bool = False
    """Whether a column shows the 95 % interval; once a row is enough, since those of other rates repeat it."""
    stands_in_for: "Metric | None" = None
    """A column is shown only beside a configuration without this one's value; None: beside any."""
    unit: str = ""
    """Of an axis."""
    scale: float = 1
    """SI units in one unit of an axis."""

    def of_run(self, metrics: RunMetrics) -> Estimate | None:
        """Return the metric of one run; a plain value has no interval."""
        value = attrgetter(self.key)(metrics)
        if value is None or isinstance(value, Estimate):
            return value
        return Estimate(value=value, low=None, high=None, samples=1)

    def of_group(self, group: Group) -> Estimate | None:
        """Return the metric of a group; None where it is not known."""
        if self.over_runs == "estimate":
            return group_estimate(group, self.of_run)
        if self.over_runs == "count":
            return Estimate(value=len(group.runs), low=None, high=None, samples=len(group.runs))
        measured = [item for item in group.runs if item.metrics is not None]
        values = [value for item in measured if (value := attrgetter(self.key)(item.metrics)) is not None]
        ends = {item.result.steps[-1].step for item in group.runs if item.result.steps}
        unlike = self.over_runs == "mean of equal steps" and len(ends) > 1
        if self.over_runs in {"worst", "sum"}:
            value = max(filter(None, values), default=None) if self.over_runs == "worst" else sum(values)
        else:  # a mean, which all of them must have
            value = sum(values) / len(values) if values and len(values) == len(measured) and not unlike else None
        return None if value is None else Estimate(value=value, low=None, high=None, samples=len(group.runs))

    def value(self, group: Group) -> float | None:
        """Return the number that a group sorts by; None where it is not known."""
        estimate = self.of_group(group)
        return None if estimate is None else estimate.value

    def fills(self, group: Group) -> bool:
        """Whether a group has something for a column."""
        stood_for = self.stands_in_for is not None and self.stands_in_for.fills(group)
        value = self.value(group)
        nothing = value is None or (value == 0 and self.key == DROPPED.key)  # no choice dropped is no news
        return not stood_for and not nothing

    def text(self, group: Group) -> str:
        """Return a group's cell in a table."""
        estimate = self.of_group(group)
        if estimate is None:
            return units.ABSENT
        return with_interval(estimate, self.show) if self.interval else self.show(estimate.value)

    def in_full(self, metrics: RunMetrics | Group) -> str:
        """Describe one run or group: more digits than a column has room for, and always the interval of an estimate."""
        value = self.of_group(metrics) if isinstance(metrics, Group) else self.of_run(metrics)
        show = self.show_in_full or self.show
        if value is None:
            return units.ABSENT
        return with_interval(value, show) if self.over_runs == "estimate" else show(value.value)


def tera(flop_per_second: float | None) -> str:
    """Format a rate in TFLOP/s without the unit, for columns and sentences that name it."""
    return units.teraflops(flop_per_second).removesuffix(" TFLOP/s")


TOKENS = Metric(
    *("tokens_per_second_per_gpu", "tokens/s/GPU", "estimate", units.significant),
    interval=True,
    unit="tokens per second and GPU",
)
RUNS = Metric("runs", "runs", "count", units.count)
STEPS = Metric("window.steps", "steps", "sum", lambda value: f"{value:.0f}")
TOKENS_OF_ALL = Metric("tokens_per_second", "tokens/s", "mean", units.significant)
FLOPS = Metric(
    *("model_flops_per_second_per_gpu", "model FLOP/s/GPU", "estimate"),
    lambda value: units.teraflops(value).removesuffix("/s").replace("FLOP", ""),
    units.teraflops,
    unit="TFLOP/s per GPU",
    scale=TERA,
)
MFU = Metric("mfu", "MFU", "estimate", units.percent)
MATMUL_SHARE = Metric("share_of_measured_gemm", "of measured matmul", "mean", units.percent)
MATMUL_RATE = Metric("measured_gemm_flops", "measured matmul", "mean", lambda value: units.si(value, "FLOP/s"))
STEP_TIME = Metric("step_seconds", "median step", "estimate", units.seconds)
STEP_ERROR = Metric("predicted_step_error", "step predicted", "mean", units.signed_percent)
PEAK_MEMORY = Metric("peak_memory_bytes", "peak memory", "worst", units.gibibytes, unit="GiB allocated", scale=GIBIBYTE)
RESERVED_MEMORY = Metric(
    *("peak_reserved_bytes", "reserved memory", "worst", units.gibibytes),
    stands_in_for=PEAK_MEMORY,
    unit="GiB reserved",
    scale=GIBIBYTE,
)
MEMORY_ERROR = Metric("predicted_memory_error", "memory predicted", "mean", units.signed_percent)
LOSS = Metric("final_loss", "loss", "mean of equal steps", lambda value: f"{value:.3f}", lambda value: f"{value:.4f}")
ENERGY = Metric("joules_per_token", "energy/token", "mean", lambda value: units.si(value, "J"), lambda value: f"{value:.4g}")
COST = Metric("cost_per_million_tokens", "cost/M tokens", "mean", units.significant, lambda value: f"{value:.4g}")
EXPERT_LOAD = Metric("expert_load", "busiest expert", "mean", lambda value: f"{value:.2f}x")
RANK_LOAD = Metric("rank_load", "busiest rank", "mean", lambda value: f"{value:.2f}x")
DROPPED = Metric("dropped", "choices dropped", "mean", units.percent)

COLUMNS = (
    *(TOKENS, RUNS, STEPS, FLOPS, MFU, MATMUL_SHARE, STEP_TIME, STEP_ERROR, PEAK_MEMORY, RESERVED_MEMORY, MEMORY_ERROR, LOSS),
    *(ENERGY, COST, EXPERT_LOAD, RANK_LOAD, DROPPED),
)
"""Of a comparison and of the page's ranking."""


def memory_metric(groups: Sequence[Group]) -> Metric:
    """Return what was allocated, or what was reserved where more configurations tell that: never both in one picture."""
    return max((PEAK_MEMORY, RESERVED_MEMORY), key=lambda metric: sum(metric.value(group) is not None for group in groups))


def memory_unit(groups: Sequence[Group]) -> str:
    """Return the unit of that memory in pictures; on a CPU it is what the largest process had in main memory."""
    return "GiB resident" if on_cpu(groups) else memory_metric(groups).unit


CPU_CAUTION = "A CPU run shows that a strategy works, never how fast it is."
"""Said wherever rates of a CPU are shown."""


def heading_of(metric: Metric, groups: Sequence[Group]) -> str:
    """Return a column's heading for some configurations."""
    return per_rank(metric.heading, (group.run.machine.platform for group in groups))


def per_rank(words: str, platforms: Iterable[str]) -> str:
    """Return words on GPUs, on processes where everything ran on a CPU: a rank is one of either."""
    return words.replace("GPUs", "processes").replace("GPU", "process") if set(platforms) == {"cpu"} else words


def shown_columns(groups: Sequence[Group]) -> list[Metric]:
    """Return the columns of a table, without those that no group fills."""
    return [metric for metric in COLUMNS if any(map(metric.fills, groups))]
