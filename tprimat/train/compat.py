"""Private names of other packages: how each is required, and those of Lightning that train/ uses.

Where Lightning lacks one, a public name replaces it and does less.
"""

import inspect
import logging
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tprimat.core.errors import LaunchError
from tprimat.core.rows import DATA, document
from tprimat.records.environment import package_version

KNOWN_VERSIONS: dict[str, list[str]] = document(DATA / "known_versions.yaml")


def changed(package: str, name: str, how: str) -> LaunchError:
    """Return the error for a name that is not as known."""
    installed = package_version(package) or "of unknown version"
    *others, last = KNOWN_VERSIONS[package]
    known = f"{', '.join(others)} and {last}" if others else last
    return LaunchError(
        f"{package} {installed} {how}: {name}.",
        why=f"This engine relies on {name}, which is known from {package} {known}.",
        fix=f"pip install {package}=={KNOWN_VERSIONS[package][-1]}",
    )


def require(package: str, owner: Any, name: str, parameters: tuple[str, ...] | None = None) -> Any:
    """Return an attribute of a module or class of a package, as pip names it; a LaunchError where it is missing or another.

    `parameters`: the first parameters of a function, by name; None does not look at them.
    """
    place = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    attribute = getattr(owner, name, None)
    if attribute is None:
        raise changed(package, place, "lacks a name")
    if parameters is not None and tuple(inspect.signature(attribute).parameters)[: len(parameters)] != parameters:
        raise changed(package, place, "has a function with other parameters")
    return attribute


# Lightning.

LIGHTNING = "pytorch_lightning" if find_spec("pytorch_lightning") is not None else "lightning.pytorch"
"""Either of its names; NeMo's is `lightning.pytorch`."""
lightning: Any = import_module(LIGHTNING)


def callback_bases() -> tuple[type[Any], ...]:
    """Return the Callback class of each installed Lightning: a Trainer accepts only callbacks of its own package."""
    bases: list[type[Any]] = [lightning.Callback]
    if LIGHTNING == "pytorch_lightning" and find_spec("lightning") is not None:
        from lightning.pytorch import Callback

        bases.append(Callback)
    return tuple(bases)


def quieten() -> None:
    """Keep Lightning's advice out of the training log. Importing Lightning sets the levels, so call this afterwards."""
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def let_host_go_ahead(trainer: Any) -> None:
    """Leave out what Lightning does since 2.6 before each batch: a broadcast of whether to stop, for which the host waits.

    The device would idle while the host makes the next batch. Each rank stops by its own SIGTERM, without the broadcast of its
    handler, in which a rank that alone is stopped would hang.
    """
    loop = trainer.fit_loop.epoch_loop
    signals: Any = getattr(trainer, "_signal_connector", None)
    if hasattr(loop, "_broadcast_sigterm_tensor") and hasattr(signals, "_sigterm_notifier_fn"):
        loop._broadcast_sigterm_tensor = lambda: None
        signals._sigterm_notifier_fn = lambda *_: setattr(signals, "received_sigterm", True)


def last_logged(trainer: Any, names: Collection[str]) -> list[tuple[str, str, Any]]:
    """Return key, name and value of what training logged last under these names, by step.

    The public callback_metrics also holds numbers of whole epochs and of validations. Reading it fetches what the progress bar
    shows from the device, which waits for the whole step.
    """
    try:
        logged = [(key, metric.meta.name, metric._forward_cache) for key, metric in (trainer._results or {}).items()]
    except AttributeError:
        logged = [(name, name, value) for name, value in trainer.callback_metrics.items()]
    return [(key, name, value) for key, name, value in logged if name in names and value is not None]
