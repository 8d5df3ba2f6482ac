"""Requests that make several configurations of one: --sweep and the five strategies."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from tprimat.config.options import OPTIONS
from tprimat.core.errors import ConfigError
from tprimat.runner.request import RunRequest, with_values

MOST_CELLS = 10_000
STRATEGIES = ("maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced")
"""In the order of output-00 to output-04. Other strategies run by ./benchmark.py --parallel."""


def sweep_requests(request: RunRequest, words: Sequence[str]) -> Iterator[tuple[str, RunRequest]]:
    """Yield a request for each combination of the values of --sweep KEY=a,b, in their order.

    Raises:
        ConfigError: a word is not KEY=a,b, a key is none, or there are too many.
    """
    values = dict(map(_varied, words))
    if prod(map(len, values.values())) > MOST_CELLS:
        raise ConfigError(f"--sweep has more than {MOST_CELLS:,} combinations.", where="--sweep", fix="fewer values")
    for one in itertools.product(*values.values()):
        chosen = dict(zip(values, one, strict=True))
        label = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        yield label, with_values(request, chosen.items(), "--sweep")


def _varied(word: str) -> tuple[str, list[str]]:
    key, equals, text = word.partition("=")
    name = key if "." in key else key.replace("-", "_")
    known = [option.name for option in OPTIONS if option.swept]
    values = list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))
    if not equals or not values:
        raise ConfigError(f"--sweep {word} is not KEY=VALUE,VALUE.", where="--sweep", fix="--sweep tp=1,2")
    if "." not in name and name not in known:
        fix = f"one of: {', '.join(known)}; or a key of the configuration such as training.optimizer.learning_rate"
        raise ConfigError(f"--sweep cannot vary {key!r}.", where="--sweep", fix=fix)
    return name, values


def strategy_requests(request: RunRequest, models: Sequence[str]) -> Iterator[tuple[str, RunRequest]]:
    """Yield a request for each of the five strategies and some models, folder by folder."""
    for number, strategy in enumerate(STRATEGIES):
        folder = f"output-{number:02d}"
        for model in models:
            yield folder, replace(request, model=model, strategy=strategy, output=Path(folder))
