"""What a user asks for: from options to a request, and from a request back to the words that make it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from tprimat.config.load import LoadedConfig, Setting, parse_setting
from tprimat.config.options import BY_NAME, DEGREES, OPTIONS, assignment
from tprimat.config.schema import Size
from tprimat.config.tree import parse_scalar
from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import ConfigError
from tprimat.engines import AUTO

ALL_MODELS = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a user asks for, before the configuration and the machine are known. None: as configured, or as the machine is."""

    model: str = ALL_MODELS
    """One model, several separated by commas, or all."""
    strategy: str | None = None
    """One strategy, several separated by commas, auto, or auto:N."""
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    runs: int = 1
    engine: str = AUTO
    platform: PlatformName | None = None
    size: Size | None = None
    gpus: int | None = None
    nodes: int | None = None
    gpu: str | None = None
    """Accelerator of another machine, for a dry run."""
    steps: int | str | None = None
    warmup: int | str | None = None
    micro_batch_size: int | str | None = None
    global_batch_size: int | str | None = None
    sequence_length: int | str | None = None
    precision: str | None = None
    data: str | None = None
    routing: str | None = None
    seed: int | str | None = None
    settings: tuple[str, ...] = ()
    config: Path | None = None
    output: Path | None = None
    probes: tuple[Path, ...] = ()
    force: bool = False
    dry_run: bool = False
    """Plan only: GPUs need not be here, nor data for a machine with other GPUs."""
    command: tuple[str, ...] = ()
    multiple: int = 1
    """Divides the number of processes on a CPU: configurations that are compared take equally many."""

    @property
    def is_auto(self) -> bool:
        """Whether predictions choose the layout."""
        return (self.strategy or "").partition(":")[0] == AUTO


def with_values(request: RunRequest, values: Iterable[tuple[str, str]], origin: str) -> RunRequest:
    """Return a request with the values of options, by their names, and of keys of the configuration.

    `origin` is what is typed before a name: -- for flags of their own, --set or --sweep.
    """
    fields: dict[str, Any] = {}
    settings = list(request.settings)
    for name, text in values:
        option = BY_NAME.get(name.replace("-", "_"))
        if option is None:
            settings.append(f"{name}={text}")
            continue
        value = option.read(text, option.flag if origin == "--" else f"{origin} {option.name}")
        field = option.field or option.name
        fields[field] = (*fields.get(field, getattr(request, field)), value) if option.kind is Path else value
    if origin == "--sweep" and "strategy" not in fields and fields.keys() & {degree.name for degree in DEGREES}:
        fields["strategy"] = None  # a layout of its own instead of the request's strategy
    return replace(request, settings=tuple(settings), **fields)


def with_settings(request: RunRequest, texts: Sequence[str]) -> RunRequest:
    """Return a request with what some --set say. Raises ConfigError: one of them is not NAME=VALUE."""
    return with_values(request, (assignment(text, "training.duration.max_steps=30") for text in texts), "--set")


def settings_of(request: RunRequest, platform: PlatformName) -> Iterator[Setting]:
    """Yield a setting for each key of the configuration that a request sets; options come after --set KEY=VALUE."""
    yield from map(parse_setting, request.settings)
    for option in OPTIONS:
        value = getattr(request, option.field or option.name)
        if option.key is not None and option not in DEGREES and value is not None:
            path = tuple(platform if part == "PLATFORM" else part for part in option.key.split("."))
            yield Setting(path, parse_scalar(str(value)), option.flag)


# A layout of the moment: --tp 2 --pp 2 is the strategy tp2_pp2, which no file holds.


def layout_name(request: RunRequest) -> str | None:
    """Return the name of the request's own layout, such as tp2_pp2; None where it names a strategy instead."""
    given = [degree for degree in DEGREES if getattr(request, degree.name) is not None]
    if given and request.strategy:
        raise ConfigError(
            f"--parallel {request.strategy} already says how models are split.",
            where=", ".join(["--parallel", *(degree.flag for degree in given)]),
            fix="leave out --parallel, or the others",
        )
    return "_".join(f"{degree.name}{getattr(request, degree.name)}" for degree in given) or None


def layout_settings(request: RunRequest, name: str, models: Sequence[str], platform: PlatformName) -> Iterator[Setting]:
    """Yield the settings that describe the request's own layout as a strategy; a degree that is not given is 1."""
    places = {"STRATEGY": name, "PLATFORM": platform}
    for model in models:
        for degree in DEGREES:
            value = getattr(request, degree.name)
            if value is not None or degree.name != "vpp":
                path = tuple({**places, "MODEL": model}.get(part, part) for part in str(degree.key).split("."))
                yield Setting(path, 1 if value is None else value, degree.flag)


def words(text: str) -> list[str]:
    """Split 'a, b' at the commas, each word once."""
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def models_of(loaded: LoadedConfig, request: RunRequest) -> list[str]:
    """Return the models that a request names."""
    known = loaded.config.models
    every = request.model == ALL_MODELS
    models = [name for name, model in known.items() if model.in_all] if every else words(request.model)
    if not models:
        what, where = ("models is empty.", loaded.where("models")) if every else (f"--model is {request.model!r}.", "--model")
        raise ConfigError(what, where=where, fix=f"one of: {', '.join(known)}, all" if known else "describe at least one model")
    return models


# Several requests of one: --sweep, and the five strategies.


BEST = "maximum_performance"
MOST_RUNS = 10_000
"""Of one call: planning more takes hours before the first one starts."""
STRATEGIES = (BEST, "truly_identical", "memory_optimized", "minimal_communication", "balanced")
"""In the order of output-00 to output-04. Other strategies run by ./benchmark.py --parallel."""


def sweep_requests(request: RunRequest, words: Sequence[str]) -> Iterator[tuple[str, RunRequest]]:
    """Yield a request for each combination of the values of --sweep KEY=a,b, in their order."""
    values = dict(map(_varied, words))
    for option in (BY_NAME[name] for name in values if name in BY_NAME):
        if getattr(request, field := option.field or option.name) != getattr(RunRequest(), field):
            what = f"--sweep {option.name} varies what {option.flag} sets."
            raise ConfigError(what, where=f"--sweep, {option.flag}", fix="leave out one of them")
    if (runs := request.runs * prod(map(len, values.values()))) > MOST_RUNS:
        why = f"A call makes at most {MOST_RUNS:,}."
        raise ConfigError(f"--sweep asks for {runs:,} runs.", where="--sweep", why=why, fix="fewer values")
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
