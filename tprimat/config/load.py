"""Read config.yaml, settings and environment into a Config. Every mistake is reported with its line and a fix."""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tprimat.config.options import assignment, removed
from tprimat.config.schema import Config, ModelConfig, Name, Size, TrainingConfig
from tprimat.config.tree import KeyPath, Tree, leaves, parse_scalar, put, read_tree
from tprimat.core.errors import ConfigError
from tprimat.core.models import ModelShape, model_shape
from tprimat.core.rows import DATA, adapter, document

OURS = "the tiny workload"
"""Place of the keys that no file has."""
DEFAULT_FILE = (Path(__file__).parent.parent / "data" / "config.yaml").resolve()
"""In a checkout a link to the config.yaml at the top; in a wheel a copy of it."""
DEFAULT_STRATEGY = "minimal_communication"
DEFAULT_OUTPUT = "./output"
LONGEST_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration and the place of each key."""

    config: Config
    tree: Tree

    def where(self, *path: str) -> str:
        """Return the place of a key, such as "config.yaml:84 parallelism.balanced"."""
        return self.tree.where(path)


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that a flag overrides."""

    path: KeyPath
    value: Any
    origin: str


def parse_setting(text: str) -> Setting:
    """Parse the "dotted.key=value" of --set."""
    key, value = assignment(text, "training.duration.max_steps=30")
    return Setting(tuple(key.split(".")), parse_scalar(value), "--set")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentChoices:
    """Choices from the environment, for use where no flag is given."""

    strategy: str
    output_directory: str
    primus_path: str | None
    model_logs: Mapping[str, str]
    """Model key -> path for its log, from LLAMA_LOG and QWEN_LOG."""


def environment_choices(environment: Mapping[str, str] | None = None) -> EnvironmentChoices:
    """Read PARALLEL, OUTPUT_DIR, PRIMUS_PATH, LLAMA_LOG and QWEN_LOG. Empty means unset."""
    env = os.environ if environment is None else environment
    logs = {model: path for model in ("llama", "qwen") if (path := env.get(f"{model.upper()}_LOG"))}
    return EnvironmentChoices(
        strategy=env.get("PARALLEL") or DEFAULT_STRATEGY,
        output_directory=env.get("OUTPUT_DIR") or DEFAULT_OUTPUT,
        primus_path=env.get("PRIMUS_PATH") or None,
        model_logs=logs,
    )


def load_config(path: str | Path = DEFAULT_FILE) -> Config:
    """Read and check a configuration file; a ConfigError names the file, the line, the key, the rule and the fix."""
    return read_config(Path(path)).config


def read_config(
    path: Path | None = None,
    *,
    size: Size = "full",
    settings: Iterable[Setting] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read a configuration, with the tiny workload under it if the size is tiny, then the user's settings, later ones last.

    `environment` is for ${NAME:-default}. A ConfigError names the file, the line, the key, the rule and the fix.
    """
    file = DEFAULT_FILE if path is None else path
    tree = read_tree(file, environment, file.name if file == DEFAULT_FILE else None)
    if size == "tiny" and isinstance(tree.values.setdefault("training", {}), dict):
        _apply_tiny(tree)
    for setting in settings:
        put(tree, setting.path, setting.value, setting.origin)
    config, lowest = _checked(tree), ("training", "optimizer", "min_learning_rate")
    rates = config.training.optimizer
    if rates.min_learning_rate > rates.learning_rate and tree.origins.get(lowest) == OURS:  # a flag sets the other alone
        put(tree, lowest, rates.learning_rate / 10, OURS)
        config = _checked(tree)
    elif rates.min_learning_rate > rates.learning_rate:
        what = f"min_learning_rate ({rates.min_learning_rate:g}) is above learning_rate ({rates.learning_rate:g})."
        why = "The schedule falls from learning_rate to min_learning_rate."
        raise ConfigError(what, where=tree.where(lowest), why=why, fix=f"min_learning_rate: {rates.learning_rate / 10:g}")
    return LoadedConfig(config=config, tree=tree)


def plain_name(name: str, where: str) -> str:
    """Return a name that can be part of a file name; refuse any other."""
    try:
        return str(adapter(Name).validate_python(name))
    except ValidationError as error:
        raise ConfigError(f"{name!r} is not a name.", where=where, why=error.errors()[0]["msg"]) from error


def absolute_path(path: str | Path, where: str) -> Path:
    """Return a path that the user gave as an absolute one, with ~ expanded; it must be UTF-8, which a record can hold."""
    shown = str(path).encode("utf8", "backslashreplace").decode()[:100]
    try:
        absolute = Path(path).expanduser().resolve()
        str(absolute).encode()
        absolute.exists()  # a name may be too long for a file system
    except (RuntimeError, OSError, ValueError) as error:
        why = "It is not UTF-8 text." if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown} is not a path here.", where=where, why=why, fix="write out the whole path") from error
    return absolute


def _apply_tiny(tree: Tree) -> None:
    given, usual = dict(leaves(tree.values["training"])), dict(leaves(dataclasses.asdict(TrainingConfig())))
    for group in document(DATA / "options.yaml")["tiny"]:
        values = {tuple(key.split(".")): value for key, value in group.items()}
        if all(given.get(path, usual[path]) == usual[path] for path in values):
            for path, value in values.items():
                put(tree, ("training", *path), value, OURS)


def added_models(loaded: LoadedConfig, names: Iterable[str]) -> Iterator[Setting]:
    """Yield settings for models that no strategy names, such as rows of models.yaml: split like the first one of their kind."""
    config = loaded.config
    for name in names:
        model = config.models.get(name)
        try:
            shape = model_shape(name) if model is None else full_shape(model)
        except ConfigError:  # what plans it says so
            continue
        if model is None:
            section = {"name": name, "architecture": name, "in_all": False, **presets_of(config, shape.name)}
            yield Setting(("models", name), section, "--model")
        if any(name in layouts for layouts in config.parallelism.values()):
            continue
        alike = [other for other, one in config.models.items() if bool(full_shape(one).experts) == bool(shape.experts)]
        for strategy, layouts in loaded.tree.values["parallelism"].items():
            if (like := next((other for other in alike if other in layouts), None)) is not None:
                yield Setting(("parallelism", strategy, name), layouts[like], "--model")


def presets_of(config: Config, shape: str) -> dict[str, str | None]:
    """Return what frameworks call a shape, by the configured model that has it."""
    model = next((one for one in config.models.values() if full_shape(one).name == shape), None)
    return {name: getattr(model, name, None) for name in ("nemo_recipe", "primus_config")}


def full_shape(model: ModelConfig) -> ModelShape:
    """Return the shape of a configured model."""
    return model.architecture if isinstance(model.architecture, ModelShape) else model_shape(model.architecture)


def _checked(tree: Tree) -> Config:
    try:
        checked: Config = adapter(Config).validate_python(tree.values)
    except ValidationError as error:
        # The first mistake in the order of the file, as an error that a user can act on.
        wrong: dict[KeyPath, list[ErrorDetails]] = {}
        details = error.errors(include_url=False)
        # An architecture with keys is no name: its author did not mean one.
        meant = [one for one in details if not (one["loc"][-1] == "str" and isinstance(one["input"], dict))]
        for detail in meant or details:
            wrong.setdefault(_key_path(detail["loc"], tree.values), []).append(detail)
        path, details = next(iter(wrong.items()))
        what, why, fix = _sentences(path, details)
        raise ConfigError(what, where=tree.where(path), why=why, fix=fix) from error
    except ConfigError as error:
        raise ConfigError(error.what, where=error.where or _place_of_shape(tree), why=error.why, fix=error.fix) from error
    return checked


def _place_of_shape(tree: Tree) -> str | None:
    """Return the place of the first spelled-out architecture whose figures contradict each other."""
    for model, values in tree.values["models"].items():
        shape = values.get("architecture") if isinstance(values, dict) else None
        if isinstance(shape, dict):
            try:
                adapter(ModelShape).validate_python(shape)
            except ConfigError:
                return tree.where(("models", model, "architecture"))
            except ValidationError:
                continue
    return None


def _key_path(location: Sequence[int | str], values: Any) -> KeyPath:
    """Return the keys of a pydantic location, without the names of union branches that it contains."""
    path: list[str] = []
    for part in location:
        if isinstance(values, dict) and part in values:
            values = values[part]
            path.append(str(part))
        elif isinstance(values, dict) and part == location[-1] and part != "[key]":
            path.append(str(part))
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
            path.append(str(part))
    return tuple(path)


def _sentences(path: KeyPath, details: Sequence[ErrorDetails]) -> tuple[str, str | None, str | None]:
    key, detail = ".".join(path), details[0]
    if detail["loc"][-1:] == ("[key]",) and detail["type"] != "name":
        return f"{path[-1]} is not a key of {'.'.join(path[:-1])}.", None, f"one of: {_wanted(detail)}"
    if detail["type"] == "name":
        return f"{path[-1]!r} is not a name.", detail["msg"], None
    if (instead := removed().get(".".join(path[-2:]))) is not None:
        return f"The option {path[-1]} is gone.", None, instead
    if detail["type"] == "unexpected_keyword_argument":
        known = _known_keys(path[:-1])
        places = {place[-1]: ".".join(place) for place in _keys_below(path[:-1])} | {name: name for name in known}
        close = difflib.get_close_matches(path[-1], known, n=1) or difflib.get_close_matches(path[-1], places, n=1)
        fix = places[close[0]] if close else f"one of: {', '.join(known)}"
        return f"{path[-1]} is not a key of {'.'.join(path[:-1]) or 'the configuration'}.", None, fix
    if detail["type"] in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return f"{key} is missing.", "It has no default.", f"add {path[-1]}: ..."
    wanted = " or ".join(dict.fromkeys(_wanted(item) for item in details))
    number = wanted == "text" and isinstance(detail["input"], int | float) and not isinstance(detail["input"], bool)
    quoted = f"""{path[-1]}: "...", in quotes; after --set, in two kinds of quotes""" if number else None
    return f"{key} is {_shown(detail['input'])}.", f"It must be {wanted}.", quoted


def _wanted(detail: ErrorDetails) -> str:
    context = detail.get("ctx") or {}
    if detail["type"] == "literal_error":
        return str(context["expected"]).replace("'", "")
    if detail["type"] in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        return detail["msg"].removeprefix("Input should be ")
    if detail["type"] == "string_pattern_mismatch":  # bridge.recipe alone has a pattern
        return "MODULE:FUNCTION, of Megatron-Bridge's recipes or perf_recipes"
    kinds = document(DATA / "options.yaml")["kinds"]
    return str(kinds.get(detail["type"].split("_")[0], detail["msg"][0].lower() + detail["msg"][1:]))


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def _keys_below(path: KeyPath) -> Iterator[KeyPath]:
    for key in _known_keys(path):
        yield (*path, key)
        yield from _keys_below((*path, key))


def _known_keys(path: KeyPath) -> list[str]:
    kind: Any = Config
    for key in path:  # of a mapping, what its values are; of a choice, the one with keys
        kind = get_type_hints(kind).get(key) if dataclasses.is_dataclass(kind) else get_args(kind)[-1]
        if get_origin(kind) is not dict:
            kind = next(filter(dataclasses.is_dataclass, get_args(kind)), kind)
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
