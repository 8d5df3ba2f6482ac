"""Show how a run goes, on stderr: one live line on a terminal, plain lines otherwise."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tprimat.analyze.metrics import StepRates, step_rates
from tprimat.core import units
from tprimat.engines.base import engine_named
from tprimat.launch.run import LaunchResult
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import captures_layers
from tprimat.records.schema import RunMetrics, RunRecord, StartUp, StepRecord
from tprimat.records.store import RunDirectory
from tprimat.report.catalogue import STEP_TIME, TOKENS_OF_ALL
from tprimat.report.screen import PLAIN, Screen, screen_of
from tprimat.train.startup import stage_of_line

SECONDS_BETWEEN_PLAIN_LINES = 5.0
BAR_CHARACTERS = 16
SILENT_SECONDS = 10.0
"""Without a terminal, longest time without a line."""
SUSPICIOUS_SECONDS = 60.0
"""When to say what may be wrong; without a terminal also the time between lines."""
MAX_LOG_CHARACTERS = 60

AWAITED: Mapping[StartUp | None, tuple[str, str]] = {
    None: (
        "torchrun to start the ranks",
        "torchrun imports torch first, which takes long on a network file system or a busy machine.",
    ),
    "rank_started": (
        "the imports of torch and Megatron-Core",
        "A network file system makes them slow. The first start also compiles bytecode; the next one is faster.",
    ),
    "imported": (
        "the ranks to connect",
        "They wait for the slowest one to import. If one has failed, its traceback is in the log. NCCL_DEBUG=INFO shows more.",
    ),
    "process_group": (
        "the model to be built",
        "Large models take a while. A machine that swaps takes very long: free -h shows it.",
    ),
    "model_built": (
        "the data",
        "The text of data=text:PATH is tokenised once and then kept. A network file system makes it slow.",
    ),
    "training": (
        "the first step",
        "Kernels are compiled in it, on a new machine for minutes. Otherwise a collective may hang: NCCL_DEBUG=INFO shows more.",
    ),
}
"""Last stage that rank 0 has reached -> what comes next, and why that may take long. None: no rank runs yet."""

WHY_SLOW_ON_CPU: Mapping[StartUp | None, str] = {
    "imported": "They wait for the slowest one to import. If one has failed, its traceback is in the log.",
    "training": "All processes share this machine's cores. Fewer of them start sooner: --gpus 2, or as many as the layout needs.",
}
"""The same for a CPU, where no GPU kernel is compiled and NCCL does not run."""


class Progress:
    """Shows steps as they end."""

    def __init__(self, plan: RunPlan, record: RunRecord, *, quiet: bool = False) -> None:
        self.plan = plan
        self.record = record
        self.quiet = quiet
        self._screen = screen_of(sys.stderr)
        self.terminal = self._screen.width is not None
        self._last_plain = 0.0
        self._line_open = False
        self._reports_stages = engine_named(plan.engine).runs_worker
        self._stage: StartUp | None = None
        self._last_line = ""
        self._suspected = False
        self._next_wait = 1.0 if self.terminal else SILENT_SECONDS

    def on_line(self, text: str) -> None:
        """Note how far the start has come. The framework's own output goes to the log."""
        self._stage = stage_of_line(text) or self._stage
        self._last_line = text.strip() or self._last_line

    def on_wait(self, seconds: float) -> None:
        """Show what is awaited: each second on a terminal, else once and then each minute; after a minute what may be wrong."""
        if self.quiet or seconds < self._next_wait:
            return
        minutes, _ = divmod(seconds, SUSPICIOUS_SECONDS)
        self._next_wait = seconds + 1.0 if self.terminal else (minutes + 1) * SUSPICIOUS_SECONDS
        if minutes and not self._suspected:
            self._suspected = True
            hint = self._why_slow() if self._reports_stages else "The framework may compile, download or tokenise."
            log = RunDirectory(Path(self.plan.run_directory)).log_file
            self.on_notice(f"  No step for {SUSPICIOUS_SECONDS:.0f} s. {hint} Log: {log}")
        text = f"  {self.plan.model} waits for {self._awaited()}, {seconds:.0f} s since the start"
        if self.terminal:
            self._show(text[: (self._screen.width or 0) - 1])
        else:
            print(text, file=sys.stderr, flush=True)

    def _why_slow(self) -> str:
        on_cpu = WHY_SLOW_ON_CPU.get(self._stage) if self.plan.platform == "cpu" else None
        return on_cpu or AWAITED[self._stage][1]

    def _awaited(self) -> str:
        if self._reports_stages:
            return AWAITED[self._stage][0]
        said = f" ({self._last_line[:MAX_LOG_CHARACTERS]})" if self._last_line else ""
        return f"{self.plan.engine}'s first step{said}"

    def on_step(self, step: StepRecord) -> None:
        """Show a step."""
        if self.quiet:
            return
        text = step_line(self.plan, step, step_rates(self.record, step), self._screen)
        if self.terminal:
            self._show(text)
        elif self._is_due(step):
            print(text, file=sys.stderr, flush=True)

    def on_notice(self, text: str) -> None:
        """Print a notice."""
        self._close_line()
        print(self._screen.prose(text, 2), file=sys.stderr, flush=True)

    def on_end(self, result: LaunchResult) -> None:
        """End the live line."""
        self._close_line()

    def _is_due(self, step: StepRecord) -> bool:
        now = time.monotonic()
        due = step.step in {1, self.plan.steps} or now - self._last_plain >= SECONDS_BETWEEN_PLAIN_LINES
        if due:
            self._last_plain = now
        return due

    def _show(self, text: str) -> None:
        sys.stderr.write("\r\x1b[2K" + text)
        sys.stderr.flush()
        self._line_open = True

    def _close_line(self) -> None:
        if self._line_open:
            sys.stderr.write("\n")
            self._line_open = False


def outcome_line(record: RunRecord, metrics: RunMetrics | None, screen: Screen = PLAIN) -> str:
    """Return how a run of several ended, in one line."""
    name = f"  {record.model} {record.strategy}: "
    if record.counts and metrics is not None:
        speed = f"{TOKENS_OF_ALL.in_full(metrics)} tokens/s, {STEP_TIME.in_full(metrics)} a step"
        return screen.prose(f"{name}completed, {speed}", 4, "winner")
    why = record.cause or "; ".join(record.mismatches) or "no metrics"
    return screen.prose(f"{name}{record.outcome.replace('_', ' ')}: {why}", 4, "refused")


def _memory(plan: RunPlan, step: StepRecord) -> tuple[int | None, Callable[[float], str]]:
    """Return the step's peak; what was reserved where CUDA graphs hold tensors, which do not count as allocated."""
    if captures_layers(engine_named(plan.engine).options(plan)):
        return step.peak_reserved_bytes, lambda value: f"{units.gibibytes(value)} reserved"
    return step.peak_allocated_bytes, units.gibibytes


def step_parts(plan: RunPlan, step: StepRecord, rates: StepRates) -> list[tuple[int, str]]:
    """Return step, step time, throughput, FLOP/s, loss, memory and time left, as far as they are known.

    Each part has a rank: the one with the highest is left out first where the terminal is narrow.
    """
    show: list[tuple[int, float | None, Callable[[float], str]]] = [
        (2, step.step_seconds, units.seconds),
        (3, rates.tokens_per_second, lambda value: f"{units.count(value)} tokens/s"),
        (5, rates.model_flops_per_second_per_gpu, lambda value: f"{units.teraflops(value)}/GPU"),
        (4, step.loss, lambda value: f"loss {value:.3f}"),
        (6, *_memory(plan, step)),
        (1, (plan.steps - step.step) * step.step_seconds, lambda value: f"{units.seconds(value)} left"),
    ]
    return [(0, f"  {plan.model} step {step.step}/{plan.steps}"), *((rank, text(value)) for rank, value, text in show if value)]


def step_line(plan: RunPlan, step: StepRecord, rates: StepRates, screen: Screen = PLAIN) -> str:
    """Format a step; on a terminal with a bar, and without the parts that do not fit."""
    parts = step_parts(plan, step, rates)
    if screen.width is None:
        return JOINT.join(text for _, text in parts)
    room = screen.width - 1 - BAR_CHARACTERS - 1
    while len(parts) > 1 and len(JOINT.join(text for _, text in parts)) > room:
        parts.remove(max(parts))
    done = round(BAR_CHARACTERS * step.step / plan.steps)
    bar = screen.paint("━" * done, "winner") + screen.paint("─" * (BAR_CHARACTERS - done), "quiet")
    head, *rest = (text for _, text in parts)
    return JOINT.join([f"{head} {bar}", *rest])


JOINT = " · "
