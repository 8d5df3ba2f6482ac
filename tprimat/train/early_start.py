"""A shorter start of a rank: what waits for the driver or for files, and not for Python, begins early, on threads of its own."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Thread

from tprimat.train import start_up

CUDA_DRIVER = "libcuda.so.1"


def begin_imports() -> None:
    """Stop collecting garbage: an import makes next to none, and looking for it again and again lengthens every start."""
    gc.disable()


def end_imports() -> None:
    """Collect again, without ever looking through what was imported."""
    start_up.reached("imported")
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
