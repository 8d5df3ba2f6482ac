"""Ctrl-C, SIGTERM and SIGHUP to the launcher, turned into something that a loop can ask about."""

import signal
import threading
from types import FrameType, TracebackType

WANTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the signals that ask for an end while it is entered; puts the former handlers back afterwards.

    SIGHUP stays ignored where it was, which is how nohup works. Outside the main thread Python allows no handlers: there it
    counts nothing, and whoever started the thread has to stop the run.
    """

    def __init__(self) -> None:
        self.count = 0
        self.name: str | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in WANTED:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._former[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave us

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.name = self.name or signal.Signals(number).name
