"""When this rank reached the stages of its start: what a user waits for before the first step."""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from typing import Any

from tprimat.records.schema import StartUp

_reached: dict[StartUp, datetime] = {}


def reached(stage: StartUp) -> None:
    """Note that a stage is reached; only its first time counts."""
    _reached.setdefault(stage, datetime.now(timezone.utc))


def seconds_since(started_at: str) -> dict[StartUp, float]:
    """Each stage reached so far -> seconds from a moment (ISO 8601) to it, by the wall clock, which launcher and ranks share."""
    start = datetime.fromisoformat(started_at)
    return {stage: round((moment - start).total_seconds(), 3) for stage, moment in _reached.items()}


# A shorter start of a rank: what waits for the driver or for files, and not for Python, begins early, on threads of its own.

CUDA_DRIVER = "libcuda.so.1"


def begin_imports() -> None:
    """Stop collecting garbage: an import makes next to none, and looking for it again and again lengthens every start."""
    gc.disable()


def end_imports() -> None:
    """Collect again, without ever looking through what was imported."""
    reached("imported")
    gc.freeze()
    gc.enable()


def open_gpu(device: int) -> Thread | None:
    """Have the CUDA driver open one of the visible GPUs while this process imports its libraries.

    torch uses the context that it finds.

    Args:
        device: its number among those that CUDA_VISIBLE_DEVICES leaves.

    Returns:
        The thread; None where there is no CUDA driver.
    """
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return None
    return _begin(lambda: _retain_context(driver, device))


def read_compiler() -> Thread:
    """Have Triton take the checksum of its own files, which is part of the key of everything that its cache holds."""

    def take() -> None:
        with suppress(ImportError, AttributeError, OSError, RuntimeError):  # the last is torch's word for no Triton
            import_module("torch._inductor.runtime.triton_compat").triton_key()

    return _begin(take)


def _begin(work: Callable[[], None]) -> Thread:
    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


def _retain_context(driver: ctypes.CDLL, device: int) -> None:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), device) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


# Imports torchmetrics, which Lightning brings along, without the large packages that some of its metrics use.
#
# It imports transformers, torchvision, scipy and matplotlib wherever they are installed, as they are in most container images:
# two or three seconds of every rank's start, for metrics that the embedded engine does not have.

LARGE = ("transformers", "torchvision", "torchaudio", "scipy", "matplotlib", "sklearn", "pandas")
"""Optional for torchmetrics."""


def import_torchmetrics() -> None:
    """Import it so, once, and before Lightning does; where that cannot be, Lightning imports it as it is."""
    with contextlib.suppress(ImportError, AttributeError), _not_installed(LARGE):
        import_module("torchmetrics")


@contextlib.contextmanager
def _not_installed(names: tuple[str, ...]) -> Any:
    """While it lasts, whoever asks Lightning's utilities for one of these packages hears that it is not there."""
    if find_spec("torchmetrics") is None or find_spec("lightning_utilities") is None:
        yield
        return
    imports: Any = import_module("lightning_utilities.core.imports")
    genuine = imports.RequirementCache

    class Answer(genuine):  # type: ignore[misc, valid-type]
        """A RequirementCache that knows its answer for some packages."""

        def __init__(self, requirement: str | None = None, *arguments: Any, **named: Any) -> None:
            super().__init__(requirement, *arguments, **named)
            if requirement and imports.Requirement(requirement).name in names:
                self.available, self.message = False, f"{requirement} is left alone"

    there = imports.package_available
    imports.RequirementCache, imports.package_available = Answer, lambda name: name not in names and there(name)
    try:
        yield
    finally:
        imports.RequirementCache, imports.package_available = genuine, there
