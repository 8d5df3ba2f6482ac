"""Power, clock, temperature and throttling of the GPUs while a run is under way, about once a second.

It never disturbs a run: whatever goes wrong ends the readings, and is said in one notice when the run has ended.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType

from tprimat.errors import RecordError
from tprimat.launch.gpus import Gpu
from tprimat.launch.nvml import Nvml
from tprimat.launch.readings import NVIDIA_FIELDS, Reading, amd_smi_readings, nvidia_row, rocm_smi_readings
from tprimat.launch.tool import SECONDS_TO_DIE, Tool
from tprimat.record.schema import TelemetrySample
from tprimat.record.store import RunDirectory

PERIOD_SECONDS = 1.0
POLL_SECONDS = 2.0
"""Between two starts of AMD's tools, which are Python programs and take a good part of a second of one core each."""
NVIDIA_REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", None)
"""The same mask: its name since driver 535, its old name, and without it."""
AMD_COMMANDS: tuple[tuple[str, Callable[[str], Iterator[Reading]]], ...] = (
    ("amd-smi metric --power --clock --temperature --usage --throttle --json", amd_smi_readings),
    ("amd-smi metric --power --clock --temperature --usage --json", amd_smi_readings),
    ("rocm-smi --showpower --showgpuclocks --showtemp --showuse --json", rocm_smi_readings),
)


class Telemetry:
    """Readings of a run's GPUs, between entering and leaving it.

    Args:
        directory: where telemetry.jsonl is appended to.
        started_at: of the run's record, ISO 8601.
        gpus: in the order of the local ranks; none: nothing is done at all.
        on_notice: told once, by the thread that leaves, why readings are missing.
    """

    def __init__(
        self, directory: RunDirectory, started_at: str | None, gpus: Sequence[Gpu], on_notice: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._gpus = gpus
        self._ranks = {name_of(gpu): rank for rank, gpu in enumerate(gpus)}
        self._on_notice = on_notice
        self._tool = Tool()
        self._trouble: str | None = None
        began = None if started_at is None else datetime.fromisoformat(started_at).timestamp()
        self._offset = None if began is None else time.time() - began - time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Telemetry":
        if self._gpus and self._offset is not None:
            self._thread = threading.Thread(target=self._work, args=(self._offset,), name="telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._tool.stop()
        if self._thread is None:
            return
        self._thread.join(2 * SECONDS_TO_DIE)  # a driver that does not answer keeps it; it ends with the launcher then
        if self._trouble is not None:
            self._on_notice(f"no telemetry of the GPUs: {self._trouble}")

    def _work(self, offset: float) -> None:
        try:
            for reading in self._readings():
                rank = self._ranks.get(reading.device)
                if rank is not None and reading.says_something:
                    self._directory.append_telemetry(sample(reading, rank, offset + time.monotonic()))
                    self._trouble = None  # one way of asking failed, this one works
        except RecordError as error:
            self._trouble = error.what
            self._tool.stop()
            return
        if not self._tool.stopping.is_set():
            self._trouble = self._trouble or "the tool that reads them has ended."

    def _readings(self) -> Iterator[Reading]:
        return self._of_amd() if self._gpus[0].platform == "rocm" else self._of_nvidia()

    def _of_nvidia(self) -> Iterator[Reading]:
        try:
            library = Nvml(self._gpus)
        except (ImportError, LookupError):  # its tool may still answer
            yield from self._of_nvidia_smi()
            return
        while not self._tool.stopping.is_set():
            yield from library.read()
            self._tool.stopping.wait(PERIOD_SECONDS)

    def _of_nvidia_smi(self) -> Iterator[Reading]:
        for reason in NVIDIA_REASON_FIELDS:
            fields = ",".join((*NVIDIA_FIELDS, *((reason,) if reason else ())))
            period = f"--loop-ms={round(PERIOD_SECONDS * 1000)}"
            command = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", period)
            answered, said = False, ""
            for line in self._lines(command, errors_too=True):
                reading = nvidia_row(line)
                if reading is None:
                    said = line.strip() or said
                else:
                    answered = True
                    yield reading
            self._trouble = f"nvidia-smi ended, saying: {said}" if said else self._trouble
            if answered or "not a valid field" not in said:
                return

    def _of_amd(self) -> Iterator[Reading]:
        for command, read in AMD_COMMANDS:
            answered = self._ask_amd(command, read)
            while answered:
                yield from answered
                if self._tool.stopping.wait(POLL_SECONDS):
                    return
                answered = self._ask_amd(command, read)
            if self._tool.stopping.is_set():  # the end of the run cut this answer off: no reason to ask in another way
                return

    def _ask_amd(self, command: str, read: Callable[[str], Iterable[Reading]]) -> list[Reading]:
        return list(read("\n".join(self._lines(command.split()))))

    def _lines(self, command: Sequence[str], *, errors_too: bool = False) -> Iterator[str]:
        try:
            yield from self._tool.lines(command, errors_too=errors_too)
        except OSError as error:
            self._trouble = f"{command[0]}: {error.strerror or error}."


def name_of(gpu: Gpu) -> str:
    """What a reading calls a GPU."""
    return (gpu.uuid if gpu.platform == "cuda" else None) or str(gpu.index)


def sample(reading: Reading, rank: int, at_seconds: float) -> TelemetrySample:
    """A reading as the record keeps it."""
    return TelemetrySample(
        at_seconds=round(at_seconds, 3),
        gpu=rank,
        power_watts=reading.power_watts,
        clock_hertz=reading.clock_hertz,
        temperature_celsius=reading.temperature_celsius,
        utilization=reading.utilization,
        throttle_reasons=reading.throttle_reasons,
    )
