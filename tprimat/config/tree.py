"""Read YAML into a plain tree of values, with the file and line of each key."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tprimat.core.errors import ConfigError

VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
KeyPath = tuple[str, ...]
MOST_FOR_LIBYAML = 5000
"""Characters that may begin a nested value: libyaml's binding crashes on 30,000 levels, where PyYAML raises RecursionError."""
MOST_VALUES = 20_000
"""With those of aliases, which a few lines can multiply without end."""
OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[\d_]+:[\d:_.]+)")
"""What YAML 1.1 takes for a number of base 8 or 60, and a person does not: text."""
MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Tree:
    """A configuration as nested dictionaries, with the place of each key."""

    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Key path -> "config.yaml:84" or "--set"."""

    def where(self, path: Sequence[str]) -> str:
        """Return place and dotted key. One that is not in the file has the place of its nearest ancestor there."""
        ancestors = (self.origins.get(tuple(path[:length])) for length in range(len(path), -1, -1))
        return f"{next(filter(None, ancestors), '')} {'.'.join(path)}".strip()


def read_tree(path: Path, environment: Mapping[str, str] | None = None, name: str | None = None) -> Tree:
    """Parse a YAML file; errors place its keys in `name`, or in the path as it was given."""
    reader = _Reader(name or str(path), os.environ if environment is None else environment)
    try:
        root = _compose(path.read_text(encoding="utf8"))
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path} holds no configuration.", where=str(path), why="Its top level must be keys with values.")
        return Tree(reader.mapping(root, ()), reader.origins)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        fix = "spaces instead of the tab" if "'\\t'" in str(error.problem) else None
        raise ConfigError(f"{path} is not valid YAML.", where=f"{path}{line}", why=error.problem, fix=fix) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML.", where=str(path), why=str(error).splitlines()[0]) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply, or contains itself.", where=str(path)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}.", where=str(path), fix="--config FILE names another one") from error


def _compose(text: str) -> yaml.Node | None:
    """Parse by libyaml, which takes a tenth of the time, where PyYAML has it; PyYAML's own parser judges what that refuses."""
    if sum(map(text.count, "[{:-")) < MOST_FOR_LIBYAML:
        with suppress(yaml.YAMLError, AttributeError):
            return yaml.compose(text, Loader=yaml.CSafeLoader)
    return yaml.compose(text, Loader=yaml.SafeLoader)


class _Reader:
    """Walks YAML nodes and records the line of each key. A merged key (<<) has the line where it is written, at the anchor."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.environment = environment
        self.origins: dict[KeyPath, str] = {(): name}
        self.loader = yaml.SafeLoader("")
        self.read = 0
        """Values so far."""
        self.checked: set[int] = set()
        """Mappings whose own keys were checked, and whose merged ones stand among them since."""

    def line_of(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self.check(node, path)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:  # merged ones come first, so that own ones replace them
            here = (*path, key_node.value)
            self.origins[here] = self.line_of(key_node)
            values[key_node.value] = self.value(value_node, here)
        return values

    def check(self, node: yaml.MappingNode, path: KeyPath) -> None:
        """Refuse keys that are no words or are given twice, and put merged keys in their place."""
        if id(node) in self.checked:
            return
        self.checked.add(id(node))
        lines: dict[str, str] = {}
        for key_node, value_node in node.value:
            origin = self.line_of(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                where = f"{origin} {'.'.join(path)}".rstrip()
                raise ConfigError("A key is not a word.", where=where, why="Keys are text before a colon.")
            if key_node.value in lines:
                where, first = f"{origin} {'.'.join((*path, key_node.value))}", lines[key_node.value]
                raise ConfigError(f"{key_node.value} is given twice.", where=where, why=f"First at {first}.")
            lines[key_node.value] = origin
            if key_node.tag == MERGE:
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in (source for source in sources if isinstance(source, yaml.MappingNode)):
                    self.check(source, path)
        self.loader.flatten_mapping(node)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.read += 1
        if self.read > MOST_VALUES:
            what = f"{self.name} holds more than {MOST_VALUES:,} values, with those of aliases."
            raise ConfigError(what, where=self.line_of(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        expanded = VARIABLE.sub(lambda match: self.variable(match, path), node.value)
        try:
            own = expanded != node.value or OTHER_BASE.fullmatch(expanded)
            value = parse_scalar(expanded) if own else self.loader.construct_object(node)
            if isinstance(value, str) and ("\0" in value or any("\ud800" <= character <= "\udfff" for character in value)):
                raise ValueError("It holds a character that no path and no terminal can show.")
            return value
        except (yaml.YAMLError, ValueError) as error:  # an unknown tag, an impossible date, a number without end
            key, why = ".".join(path), error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            raise ConfigError(f"{key} is {node.value[:100]!r}.", where=f"{self.line_of(node)} {key}", why=why) from error

    def variable(self, match: re.Match[str], path: KeyPath) -> str:
        name, default = match.groups()
        value = self.environment.get(name, default)
        if value is None:
            where = f"{self.origins.get(path, self.name)} {'.'.join(path)}"
            fix = f"export {name}=..., or write ${{{name}:-default}}"
            raise ConfigError(f"The environment has no {name}.", where=where, fix=fix)
        return str(value)


def parse_scalar(text: str) -> Any:
    """Parse text from a flag or a variable as YAML does: '4' -> 4, 'true' -> True, '1e-4' -> 0.0001. Anything else stays text."""
    text = text.strip()
    try:
        if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text):  # YAML 1.1 reads 1e-4, without a dot, as text
            return float(text)
        return text if OTHER_BASE.fullmatch(text) else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


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


def leaves(values: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Return each key path below a mapping with its value."""
    if not isinstance(values, dict):
        return [(path, values)] if path else []
    return [leaf for key, value in values.items() for leaf in leaves(value, (*path, key))]
