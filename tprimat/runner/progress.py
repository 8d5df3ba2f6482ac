"""Show how a run goes, on stderr: one live line on a terminal, plain lines otherwise."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tprimat.analyze.metrics import step_rates
from tprimat.core import units
from tprimat.engines.base import engine_named
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import captures_layers
from tprimat.records.schema import RunMetrics, RunRecord, StepRecord
from tprimat.records.store import RunDirectory
from tprimat.report.catalogue import STEP_TIME, TOKENS_OF_ALL
from tprimat.report.tables import PLAIN, Screen, screen_of

SECONDS_BETWEEN_PLAIN_LINES = 5.0
SILENT_SECONDS = 10.0
SUSPICIOUS_SECONDS = 60.0
"""When to say where the log is; without a terminal also the time between lines."""
MAX_LOG_CHARACTERS = 60


def say(text: str) -> None:
    """Print a line on stderr, apart from results."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Shows steps as they end."""

    def __init__(self, plan: RunPlan, record: RunRecord) -> None:
        self.plan = plan
        self.record = record
        self._screen = screen_of(sys.stderr)
        self.terminal = self._screen.width is not None
        self._last_plain = 0.0
        self._line_open = False
        self._stage = self._last_line = ""
        self._next_wait = 1.0 if self.terminal else SILENT_SECONDS

    def on_line(self, text: str) -> None:
        """Note how far the start has come: our worker prints each stage. Of the rest, only the profiler's lines are shown."""
        line, (_, ours, stage) = text.strip(), text.partition("tprimat start-up: ")
        if line.startswith("profiling: "):
            self.on_notice(f"  {line}")
        elif ours or not self._stage:
            self._stage, self._last_line = ours, stage.strip().replace("_", " ") or line or self._last_line

    def on_wait(self, seconds: float) -> None:
        """Show the last line of the log: each second on a terminal, else once and then each minute; after a minute its path."""
        if seconds < self._next_wait:
            return
        minutes, _ = divmod(seconds, SUSPICIOUS_SECONDS)
        self._next_wait = seconds + 1.0 if self.terminal else (minutes + 1) * SUSPICIOUS_SECONDS
        said = f" ({self._last_line[:MAX_LOG_CHARACTERS]})" if self._last_line else ""
        text = f"  {self.plan.model} waits for its first step{said}, {seconds:.0f} s since the start"
        text += f"; its log: {RunDirectory(Path(self.plan.run_directory)).log_file}" if minutes else ""
        if self.terminal:
            self._show(text[: (self._screen.width or 0) - 1])
        else:
            say(text)

    def on_step(self, step: StepRecord) -> None:
        """Show a step."""
        text, now = step_line(self.plan, step, step_rates(self.record, step), self._screen), time.monotonic()
        if self.terminal:
            self._show(text)
        elif step.step in {1, self.plan.steps} or now - self._last_plain >= SECONDS_BETWEEN_PLAIN_LINES:
            self._last_plain = now
            say(text)

    def on_notice(self, text: str) -> None:
        """Print a notice."""
        self.close()
        say(self._screen.prose(text, 2))

    def _show(self, text: str) -> None:
        sys.stderr.write("\r\x1b[2K" + text)
        sys.stderr.flush()
        self._line_open = True

    def close(self) -> None:
        """End the live line."""
        if self._line_open:
            sys.stderr.write("\n")
            self._line_open = False


def outcome_line(record: RunRecord, metrics: RunMetrics | None, screen: Screen = PLAIN) -> str:
    """Return how a run of several ended, in one line."""
    name = f"  {record.model} {record.strategy}: "
    if record.counts and metrics is not None:
        speed = f"{TOKENS_OF_ALL.in_full(metrics)} tokens/s, {STEP_TIME.in_full(metrics)} a step"
        return screen.prose(f"{name}completed, {speed}", 4)
    why = record.cause or "; ".join(record.mismatches) or "no metrics"
    return screen.prose(f"{name}{record.outcome.replace('_', ' ')}: {why}", 4)


def step_line(plan: RunPlan, step: StepRecord, rates: tuple[float | None, float | None], screen: Screen = PLAIN) -> str:
    """Format a step with what is known of it, the most important first: a terminal shows as much as fits."""
    # CUDA graphs hold tensors that do not count as allocated.
    graphs = captures_layers(engine_named(plan.engine).options(plan))
    memory, (tokens_rate, flops_rate) = step.peak_reserved_bytes if graphs else step.peak_allocated_bytes, rates
    show: list[tuple[float | None, Callable[[float], str]]] = [
        (step.step_seconds, units.seconds),
        # The first step compiles, and says little of the others.
        ((plan.steps - step.step) * step.step_seconds * (step.step > 1), lambda value: f"{units.seconds(value)} left"),
        (tokens_rate, lambda value: f"{units.count(value)} tokens/s"),
        (step.loss, lambda value: f"loss {value:.3f}"),
        (flops_rate, lambda value: f"{units.teraflops(value)}/GPU"),
        (memory, lambda value: units.gibibytes(value) + " reserved" * graphs),
    ]
    parts = [f"  {plan.model} step {step.step}/{plan.steps}", *(text(value) for value, text in show if value)]
    while screen.width is not None and len(parts) > 1 and len(" · ".join(parts)) >= screen.width:
        parts.pop()
    return " · ".join(parts)
