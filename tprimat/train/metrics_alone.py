"""Imports torchmetrics, which Lightning brings along, without the large packages that some of its metrics use.

It imports transformers, torchvision, scipy and matplotlib wherever they are installed, as they are in most container images:
two or three seconds of every rank's start, for metrics that the embedded engine does not have.
"""

import contextlib
from importlib import import_module
from importlib.util import find_spec
from typing import Any

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
