"""Show the progress of a run on stderr: one live line on a terminal, plain lines otherwise."""

import shutil
import sys
import time
from collections.abc import Callable

from tprimat import units
from tprimat.analyze.metrics import StepRates, step_rates
from tprimat.launch.run import LaunchResult
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import RunRecord, StepRecord

SECONDS_BETWEEN_PLAIN_LINES = 5.0


class Progress:
    """Shows steps as they end."""

    def __init__(self, plan: RunPlan, record: RunRecord, *, quiet: bool) -> None:
        self.plan = plan
        self.record = record
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self._last_plain = 0.0
        self._line_open = False

    def on_line(self, text: str) -> None:
        """Ignore the framework's own output, which goes to the log."""

    def on_step(self, step: StepRecord) -> None:
        """Show a step."""
        if self.quiet:
            return
        text = step_line(self.plan, step, step_rates(self.record, step))
        if self.terminal:
            width = shutil.get_terminal_size().columns
            sys.stderr.write("\r\x1b[2K" + text[: width - 1])
            sys.stderr.flush()
            self._line_open = True
        elif self._is_due(step):
            print(text, file=sys.stderr, flush=True)

    def on_notice(self, text: str) -> None:
        """Print a notice."""
        self._close_line()
        print(text, file=sys.stderr, flush=True)

    def on_end(self, result: LaunchResult) -> None:
        """End the live line."""
        del result
        self._close_line()

    def _is_due(self, step: StepRecord) -> bool:
        now = time.monotonic()
        due = step.step in {1, self.plan.steps} or now - self._last_plain >= SECONDS_BETWEEN_PLAIN_LINES
        if due:
            self._last_plain = now
        return due

    def _close_line(self) -> None:
        if self._line_open:
            sys.stderr.write("\n")
            self._line_open = False


def step_line(plan: RunPlan, step: StepRecord, rates: StepRates) -> str:
    """Format step, step time, throughput, loss, memory and time left, as far as they are known."""
    show: list[tuple[float | None, Callable[[float], str]]] = [
        (step.step_seconds, units.seconds),
        (rates.tokens_per_second, lambda value: f"{units.count(value)} tokens/s"),
        (rates.model_flops_per_second_per_gpu, lambda value: f"{units.teraflops(value)}/GPU"),
        (step.loss, lambda value: f"loss {value:.3f}"),
        (step.peak_allocated_bytes, units.gibibytes),
        ((plan.steps - step.step) * step.step_seconds, lambda value: f"{units.seconds(value)} left"),
    ]
    parts = [text(value) for value, text in show if value]
    return " · ".join([f"  {plan.model} step {step.step}/{plan.steps}", *parts])
