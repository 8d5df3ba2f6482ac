"""YAML with its line numbers: a plain tree of values, and for each key the place that it came from."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tprimat.errors import ConfigError

VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """A configuration as read: nested dictionaries, and where each key stands."""

    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Key path -> "config.yaml:84" or "--set"."""

    def where(self, path: Sequence[str]) -> str:
        """Place and dotted key, of the nearest ancestor that stands in the file where the key itself does not."""
        for length in range(len(path), -1, -1):
            origin = self.origins.get(tuple(path[:length]))
            if origin:
                return f"{origin} {'.'.join(path)}"
        return ".".join(path)


def read_tree(path: Path, environment: Mapping[str, str] | None = None) -> Tree:
    """Parse a YAML file.

    Raises:
        ConfigError: missing, unreadable, not YAML, duplicate keys, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}.", where=str(path), fix="--config FILE names another one") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path} is not valid YAML.", where=f"{path}{line}", why=error.problem) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML.", where=str(path), why=str(error).splitlines()[0]) from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} holds no configuration.", where=str(path), why="Its top level must be keys with values.")
    reader = _Reader(path.name, os.environ if environment is None else environment)
    return Tree(reader.mapping(root, ()), reader.origins)


class _Reader:
    """Walks YAML nodes and notes the line of each key."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.environment = environment
        self.origins: dict[KeyPath, str] = {(): name}
        self.open: set[int] = set()
        """Nodes that are being read, to notice one that holds itself."""

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            origin = f"{self.name}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    "A key is not a word.", where=f"{origin} {'.'.join(path)}".rstrip(), why="Keys are text before a colon."
                )
            key = key_node.value
            here = (*path, key)
            if key in values:
                first = self.origins[here]
                raise ConfigError(f"{key} is given twice.", where=f"{origin} {'.'.join(here)}", why=f"First at {first}.")
            self.origins[here] = origin
            values[key] = self.value(value_node, here)
        return values

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open:
            where = f"{self.origins[path]} {'.'.join(path)}"
            raise ConfigError(
                f"{'.'.join(path)} contains itself.", where=where, why="Its alias names a key that it stands under."
            )
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        finally:
            self.open.remove(id(node))

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if VARIABLE.search(node.value):
            return parse_scalar(self.expand(node.value, path))
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError) as error:  # a tag of some program, or a date that no calendar has
            why = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            where = f"{self.name}:{node.start_mark.line + 1} {'.'.join(path)}"
            raise ConfigError(f"{'.'.join(path)} is {node.value!r}.", where=where, why=why) from error

    def expand(self, text: str, path: KeyPath) -> str:
        def replacement(match: re.Match[str]) -> str:
            name, default = match.groups()
            if name in self.environment:
                return self.environment[name]
            if default is None:
                raise ConfigError(
                    f"The environment has no {name}.",
                    where=f"{self.origins[path]} {'.'.join(path)}",
                    fix=f"export {name}=..., or write ${{{name}:-default}}",
                )
            return default

        return VARIABLE.sub(replacement, text)


def parse_scalar(text: str) -> Any:
    """Text from a flag or a variable as YAML would read it: '4' -> 4, 'true' -> True, '1e-4' -> 0.0001."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    if isinstance(value, str):
        try:  # YAML 1.1 reads 1e-4, without a dot, as text
            return float(value) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value
        except ValueError:
            return value
    return value


def put(tree: Tree, path: Sequence[str], value: Any, origin: str) -> None:
    """Set one key; mappings on the way are made where they are missing."""
    here = tree.values
    for depth, key in enumerate(path[:-1], 1):
        child = here.setdefault(key, {})
        if not isinstance(child, dict):
            place = ".".join(path[:depth])
            raise ConfigError(f"{place} is a value and has no keys below it.", where=f"{origin} {'.'.join(path)}")
        here = child
    here[path[-1]] = value
    tree.origins[tuple(path)] = origin


def lay_over(tree: Tree, source: KeyPath, target: KeyPath) -> None:
    """Put every leaf under `source` over the same key under `target`, with the place that it came from."""
    overlay: Any = tree.values
    for key in source:
        overlay = overlay.get(key, {}) if isinstance(overlay, dict) else {}
    for path, value in _leaves(overlay):
        put(tree, (*target, *path), value, tree.origins.get((*source, *path), ".".join(source)))


def _leaves(values: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    if not isinstance(values, dict):
        return [(path, values)] if path else []
    return [leaf for key, value in values.items() for leaf in _leaves(value, (*path, key))]
