"""Read YAML into a plain tree of values, with the file and line of each key."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tprimat.core.errors import ConfigError

VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
KeyPath = tuple[str, ...]
Entry = tuple[yaml.ScalarNode, yaml.Node]
LARGEST_FILE = 256 * 1024
"""Bytes; the one that is shipped has 8 KiB."""
DEEPEST = 32
MOST_VALUES = 20_000
MOST_BITS = 1000
MERGE = "tag:yaml.org,2002:merge"
"""The tag of an unquoted << key."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A configuration as nested dictionaries, with the place of each key."""

    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Key path -> "config.yaml:84" or "--set"."""

    def where(self, path: Sequence[str]) -> str:
        """Return place and dotted key."""
        return f"{self.origin(path)} {'.'.join(path)}".lstrip()

    def origin(self, path: Sequence[str]) -> str:
        """Return the place of a key. One that is not in the file has the place of its nearest ancestor there."""
        ancestors = (self.origins.get(tuple(path[:length])) for length in range(len(path), -1, -1))
        return next(filter(None, ancestors), "")


def read_tree(path: Path, environment: Mapping[str, str] | None = None, name: str | None = None) -> Tree:
    """Parse a YAML file; errors place its keys in `name`, or in the path as it was given.

    Raises:
        ConfigError: missing, unreadable, not YAML, duplicate keys, or not a mapping.
    """
    text, name = _text(path), name or str(path)
    try:
        root = _composed(text, name)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path} is not valid YAML.", where=f"{path}{line}", why=error.problem) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML.", where=str(path), why=str(error).splitlines()[0]) from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} holds no configuration.", where=str(path), why="Its top level must be keys with values.")
    reader = _Reader(name, os.environ if environment is None else environment)
    return Tree(reader.mapping(root, ()), reader.origins)


@lru_cache(maxsize=4)
def _composed(text: str, name: str) -> yaml.Node | None:
    """Parse a text, which takes three quarters of the time: a sweep reads the same file for each of its runs."""
    root: yaml.Node | None = yaml.compose(text, Loader=_loader(name))
    return root


def _text(path: Path) -> str:
    try:
        if not path.is_file() and path.exists() and Path("/dev") not in path.absolute().parents:
            # A pipe without a writer would wait for ever; /dev/stdin and /dev/fd/N have one.
            raise ConfigError(f"{path} is not a file.", where=str(path), fix="--config FILE names another one")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        text = content[:LARGEST_FILE].decode("utf8") if len(content) > LARGEST_FILE else content.decode("utf8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}.", where=str(path), fix="--config FILE names another one") from error
    if len(content) > LARGEST_FILE:
        why = f"It has at most {LARGEST_FILE:,} bytes."
        raise ConfigError(f"{path} is too large for a configuration.", where=str(path), why=why, fix="--config FILE")
    return text


def _loader(name: str) -> type[yaml.SafeLoader]:
    """Return a loader that refuses deep nesting before Python's stack ends."""

    class Bounded(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            self.depth += 1
            if self.depth > DEEPEST:
                where = f"{name}:{self.peek_event().start_mark.line + 1}"  # type: ignore[no-untyped-call]
                raise ConfigError(f"{name} is nested too deeply.", where=where, why=f"It has at most {DEEPEST} levels.")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Bounded


def is_text(value: str) -> bool:
    """Whether a file, a path or a terminal can hold a text: no NUL, and nothing that is not Unicode."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


class _Reader:
    """Walks YAML nodes and records the line of each key. A merged key (<<) has the line where it is written, at the anchor."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.environment = environment
        self.origins: dict[KeyPath, str] = {(): name}
        self.open: set[int] = set()
        """Nodes that are being read, to detect one that contains itself."""
        self.read = 0
        """Keys and values so far; an alias counts each time."""

    def count(self, node: yaml.Node) -> None:
        """Refuse aliases of aliases that grow without end."""
        self.read += 1
        if self.read > MOST_VALUES:
            why = f"Its aliases make more than {MOST_VALUES:,} keys and values."
            raise ConfigError(f"{self.name} is too large for a configuration.", where=self.line_of(node), why=why)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, (key_node, value_node) in self.entries(node, path).items():
            here = (*path, key)
            self.origins[here] = self.line_of(key_node)
            values[key] = self.value(value_node, here)
        return values

    def entries(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Entry]:
        """Return key -> nodes. Keys of the mapping itself override merged ones, and of two merged mappings the first wins."""
        own: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        lines: dict[str, str] = {}
        for key_node, value_node in node.value:
            self.count(key_node)
            origin = self.line_of(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    "A key is not a word.", where=f"{origin} {'.'.join(path)}".rstrip(), why="Keys are text before a colon."
                )
            key = key_node.value
            if key in lines:
                where = f"{origin} {'.'.join((*path, key))}"
                raise ConfigError(f"{key} is given twice.", where=where, why=f"First at {lines[key]}.")
            lines[key] = origin
            if key_node.tag == MERGE:
                merged = self.merged(value_node, path, origin)
            else:
                own[key] = (key_node, value_node)
        return {**{key: entry for key, entry in merged.items() if key not in own}, **own}

    def merged(self, node: yaml.Node, path: KeyPath, origin: str) -> dict[str, Entry]:
        """Return the entries behind a merge key: one mapping, or a list of them."""
        where = f"{origin} {'.'.join((*path, '<<'))}"
        found: dict[str, Entry] = {}
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                why = "It must be an alias of keys with values, such as *name, or a list of them."
                raise ConfigError("<< has nothing to merge.", where=where, why=why)
            if id(source) in self.open:
                raise ConfigError("<< contains itself.", where=where, why="Its alias names a key that contains it.")
            self.open.add(id(source))
            found = {**self.entries(source, path), **found}
            self.open.remove(id(source))
        return found

    def line_of(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count(node)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open:
            known = next(path[:end] for end in range(len(path), -1, -1) if path[:end] in self.origins)  # items have no line
            where = f"{self.origins[known]} {'.'.join(path)}"
            raise ConfigError(f"{'.'.join(path)} contains itself.", where=where, why="Its alias names a key that contains it.")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        finally:
            self.open.remove(id(node))

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        expanded = self.expand(node.value, path)
        try:
            if not is_text(expanded):
                raise ValueError("It holds a character that no path and no terminal can show.")
            if VARIABLE.search(node.value):
                return parse_scalar(expanded)
            value = yaml.SafeLoader("").construct_object(node)
            if isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise ValueError("It is a number of more than 300 digits.")
            return value
        except (yaml.YAMLError, ValueError) as error:  # an unknown tag, or an impossible date
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
    """Parse text from a flag or a variable as YAML does: '4' -> 4, 'true' -> True, '1e-4' -> 0.0001.

    What no configuration can hold stays text: other YAML, huge numbers, NUL, aliases that grow or contain themselves.
    """
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if not _is_plain(value):
        return text
    if isinstance(value, str):
        try:  # YAML 1.1 reads 1e-4, without a dot, as text
            return float(value) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value
        except ValueError:
            return value
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value is as limited as those of a file; one that contains itself never ends."""
    waiting = [value]
    for _ in range(MOST_VALUES):
        if not waiting:
            return True
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item
        elif (isinstance(item, str) and not is_text(item)) or (isinstance(item, int) and item.bit_length() > MOST_BITS):
            return False
    return False


def put(tree: Tree, path: Sequence[str], value: Any, origin: str) -> None:
    """Set one key and create the mappings above it that are missing."""
    here = tree.values
    for depth, key in enumerate(path[:-1], 1):
        if key not in here:
            here[key] = {}
            tree.origins[tuple(path[:depth])] = origin  # so that a mistyped key has the place where it was typed
        child = here[key]
        if not isinstance(child, dict):
            place = ".".join(path[:depth])
            raise ConfigError(f"{place} is a value and has no keys below it.", where=f"{origin} {'.'.join(path)}")
        here = child
    here[path[-1]] = value
    tree.origins[tuple(path)] = origin


def lay_over(tree: Tree, source: KeyPath, target: KeyPath) -> None:
    """Set each leaf under `source` at the same key under `target`, with its own place."""
    overlay: Any = tree.values
    for key in source:
        overlay = overlay.get(key, {}) if isinstance(overlay, dict) else {}
    for path, value in _leaves(overlay):
        put(tree, (*target, *path), value, tree.origins.get((*source, *path), ".".join(source)))


def _leaves(values: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    if not isinstance(values, dict):
        return [(path, values)] if path else []
    return [leaf for key, value in values.items() for leaf in _leaves(value, (*path, key))]
