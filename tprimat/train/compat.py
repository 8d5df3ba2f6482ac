"""The only private names of Lightning that train/ uses. Where Lightning lacks one, a public name does, with less."""

from collections.abc import Collection
from typing import Any


def last_logged(trainer: Any, names: Collection[str]) -> list[tuple[str, str, Any]]:
    """Return key, name and value of what training logged last under these names, by step.

    The public callback_metrics also holds numbers of whole epochs and of validations. Reading it fetches what the progress bar
    shows from the device, which waits for the whole step.
    """
    try:
        found = [(key, metric.meta.name, metric._forward_cache) for key, metric in (trainer._results or {}).items()]
    except AttributeError:
        found = [(name, name, value) for name, value in trainer.callback_metrics.items()]
    return [(key, name, value) for key, name, value in found if name in names and value is not None]
