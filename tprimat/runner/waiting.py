"""Say what a run waits for until its first step, and after a minute what may be wrong."""

from collections.abc import Mapping

from tprimat.engines.base import engine_named
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import StartUp
from tprimat.train.startup import stage_of_line

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
        "The text of --data text:PATH is tokenised once and then kept. A network file system makes it slow.",
    ),
    "training": (
        "the first step",
        "Kernels are compiled in it, on a new machine for minutes. Otherwise a collective may hang: NCCL_DEBUG=INFO shows more.",
    ),
}
"""Last stage that rank 0 has reached -> what comes next, and why that may take long. None: no rank runs yet."""


class Wait:
    """The time before the first step of one run."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._reports_stages = engine_named(plan.engine).runs_worker
        self._stage: StartUp | None = None
        self._last_line = ""

    def saw_line(self, text: str) -> None:
        """Take a line of the log, which may name a stage."""
        self._stage = stage_of_line(text) or self._stage
        self._last_line = text.strip() or self._last_line

    def text(self, seconds: float) -> str:
        """Return what is awaited.

        Args:
            seconds: since the start.
        """
        return f"  {self._plan.model} waits for {self._awaited()}, {seconds:.0f} s since the start"

    def suspicion(self, log: str) -> str:
        """Return what may be wrong.

        Args:
            log: path of the log, to look further.
        """
        hint = AWAITED[self._stage][1] if self._reports_stages else "The framework may compile, download or tokenise."
        return f"  No step for {SUSPICIOUS_SECONDS:.0f} s. {hint} Log: {log}"

    def _awaited(self) -> str:
        if self._reports_stages:
            return AWAITED[self._stage][0]
        said = f" ({self._last_line[:MAX_LOG_CHARACTERS]})" if self._last_line else ""
        return f"{self._plan.engine}'s first step{said}"
