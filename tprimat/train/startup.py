"""The start of a rank: when it reached each stage, and what shortens it. Imports no heavy package."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from typing import Any

from tprimat.records.schema import StartUp

_reached: dict[StartUp, datetime] = {}


def reached(stage: StartUp) -> None:
    """Record that a stage is reached; only the first call for a stage counts. The first rank of our worker prints it."""
    if stage not in _reached:
        _reached[stage] = datetime.now(timezone.utc)
        if "rank_started" in _reached and os.environ.get("RANK", "0") == "0":  # our worker's first stage
            sys.stdout.write(f"tprimat start-up: {stage}\n")  # the launcher shows it while the run starts
            sys.stdout.flush()


def seconds_since(started_at: str) -> dict[StartUp, float]:
    """Return stage -> seconds from a moment (ISO 8601) to it, by the wall clock, which launcher and ranks share."""
    start = datetime.fromisoformat(started_at)
    return {stage: round((moment - start).total_seconds(), 3) for stage, moment in _reached.items()}


def pause_garbage_collection() -> None:
    """Stop collecting garbage while libraries are imported: they create almost none, and searching for it takes time."""
    gc.disable()


def resume_garbage_collection() -> None:
    """Collect garbage again, without ever searching what was imported."""
    reached("imported")
    gc.freeze()
    gc.enable()


# torchmetrics, which Lightning imports, in turn imports large packages wherever they are installed, as they are in most container
# images: two or three seconds of every rank's start, for metrics that are not used.

OPTIONAL_PACKAGES = ("transformers", "torchvision", "torchaudio", "scipy", "matplotlib", "sklearn", "pandas")


def import_torchmetrics() -> None:
    """Import torchmetrics without OPTIONAL_PACKAGES, before Lightning does; if this fails, Lightning imports it as usual."""
    with contextlib.suppress(ImportError, AttributeError), _not_installed(OPTIONAL_PACKAGES):
        import_module("torchmetrics")


@contextlib.contextmanager
def _not_installed(names: tuple[str, ...]) -> Iterator[None]:
    """Within this context, Lightning's utilities answer that none of these packages is installed."""
    imports: Any = import_module("lightning_utilities.core.imports")
    genuine, available = imports.RequirementCache, imports.package_available

    class HidingCache(imports.RequirementCache):  # type: ignore[misc]
        """A RequirementCache in which some packages are not installed."""

        def __init__(self, requirement: str | None = None, *arguments: Any, **named: Any) -> None:
            super().__init__(requirement, *arguments, **named)
            if requirement and imports.Requirement(requirement).name in names:
                self.available, self.message = False, f"{requirement} is not imported"

    imports.RequirementCache, imports.package_available = HidingCache, lambda name: name not in names and available(name)
    try:
        yield
    finally:
        imports.RequirementCache, imports.package_available = genuine, available


# Transformer Engine, of which Megatron-Core makes its layers where it finds the package.

TRANSFORMER_ENGINE = "transformer_engine"


@cache
def transformer_engine_is_usable() -> bool:
    """Whether Transformer Engine can be imported. Call it before megatron.core, which fails beside one that does not load."""
    try:
        import_module(f"{TRANSFORMER_ENGINE}.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        sys.stderr.write(f"Transformer Engine cannot be imported: {error}\n")
        hide_transformer_engine()
        return False
    return True


def hide_transformer_engine() -> None:
    """Make further imports of Transformer Engine fail, as if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == TRANSFORMER_ENGINE]:
        del sys.modules[name]
    sys.modules[TRANSFORMER_ENGINE] = None  # type: ignore[assignment]  # Python's way to do it
