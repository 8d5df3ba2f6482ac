"""Lightning under either of its names: `lightning.pytorch` (NeMo's) or `pytorch_lightning`."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NAME = "pytorch_lightning" if find_spec("pytorch_lightning") is not None else "lightning.pytorch"
lightning: Any = import_module(NAME)


def callback_bases() -> tuple[type[Any], ...]:
    """Return the Callback class of each installed Lightning: a Trainer accepts only callbacks of its own package."""
    bases: list[type[Any]] = [lightning.Callback]
    if NAME == "pytorch_lightning" and find_spec("lightning") is not None:
        from lightning.pytorch import Callback

        bases.append(Callback)
    return tuple(bases)


def quieten() -> None:
    """Keep Lightning's advice out of the training log. Importing Lightning sets the levels, so call this afterwards."""
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
