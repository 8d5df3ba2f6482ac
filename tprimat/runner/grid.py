"""A sweep: the combinations of some settings' values, from --sweep KEY=a,b, --sweep 'tp*pp<=8' or a file."""

import ast
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tprimat.config.options import DEGREES, OPTIONS
from tprimat.config.tree import parse_scalar, read_tree
from tprimat.core.errors import ConfigError, UserError
from tprimat.runner.matrix import MatrixEntry
from tprimat.runner.request import RunRequest, layout_name, with_values
from tprimat.runner.session import prepare
from tprimat.runner.sweep import Cell

ASSIGNMENT = re.compile(r"([A-Za-z_][\w.-]*)=(?!=)(.*)", re.DOTALL)
MOST_CELLS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to vary."""

    grid: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Key -> values; every combination of them."""
    cells: tuple[Mapping[str, str], ...] = ()
    """Combinations that are spelled out, each of which meets all of the grid."""
    where: tuple[str, ...] = ()
    """Constraints that a combination must meet, such as tp*pp<=8."""


def parse_sweep(words: Sequence[str]) -> Sweep:
    """Read the values of --sweep.

    Raises:
        ConfigError: a word is none of KEY=a,b, a constraint and a file; or a key is none.
    """
    found = Sweep()
    for word in words:
        if (match := ASSIGNMENT.fullmatch(word)) is not None:
            values = tuple(value.strip() for value in match[2].split(",") if value.strip())
            found = _joined(found, Sweep(grid={_key(match[1]): values}))
        elif re.search(r"[<>%]|[=!]=", word):
            found = _joined(found, Sweep(where=(word,)))
        else:
            found = _joined(found, read_sweep(Path(word)))
    for key, values in found.grid.items():
        if not values:
            raise ConfigError(f"--sweep {key} has no values.", where="--sweep", fix=f"--sweep {key}=1,2")
    return found


def _joined(one: Sweep, other: Sweep) -> Sweep:
    return Sweep(grid={**one.grid, **other.grid}, cells=one.cells + other.cells, where=one.where + other.where)


def read_sweep(path: Path) -> Sweep:
    """Read a file with any of `grid: {KEY: [a, b]}`, `list: [{KEY: a, ...}, ...]` and `where: ["tp*pp<=8"]`.

    Raises:
        ConfigError: no such file, or it holds something else.
    """
    try:
        document = read_tree(path, {}).values
    except ConfigError as error:  # which advises another --config
        fix = "--sweep KEY=VALUE,VALUE, a condition such as --sweep 'tp*pp<=8', or another file"
        raise ConfigError(error.what, where=error.where, why=error.why, fix=fix) from error
    if not set(document) <= {"grid", "list", "where"}:
        raise ConfigError(f"{path} is not a sweep file.", where=str(path), why="It has the keys grid, list and where.")
    grid, cells, where = document.get("grid") or {}, document.get("list") or [], document.get("where") or []
    lists = isinstance(cells, list) and isinstance(where, list) and all(isinstance(cell, dict) for cell in cells)
    if not (isinstance(grid, dict) and lists):
        why = "grid is a mapping, list a list of mappings, where a list of texts."
        raise ConfigError(f"{path} is not a sweep file.", where=str(path), why=why)
    return Sweep(
        grid={_key(str(key)): tuple(map(str, values if isinstance(values, list) else [values])) for key, values in grid.items()},
        cells=tuple({_key(str(key)): str(value) for key, value in cell.items()} for cell in cells),
        where=tuple(map(str, where)),
    )


def _key(key: str) -> str:
    if "." in key:
        return key
    name, known = key.replace("-", "_"), [option.name for option in OPTIONS if option.swept]
    if name not in known:
        fix = f"one of: {', '.join(known)}; or a key of the configuration such as training.optimizer.learning_rate"
        raise ConfigError(f"--sweep cannot vary {key!r}.", where="--sweep", fix=fix)
    return name


def combinations(sweep: Sweep, fixed: Mapping[str, Any] | None = None) -> list[dict[str, str]]:
    """Return the combinations that meet all constraints, in the order of the values, each once.

    Constraints may also name `fixed` values, besides those of the sweep.

    Raises:
        ConfigError: a constraint is not arithmetic over known names, or there are no combinations, or too many.
    """
    found: dict[frozenset[tuple[str, str]], dict[str, str]] = {}
    if max(1, len(sweep.cells)) * prod(map(len, sweep.grid.values())) > MOST_CELLS:
        raise ConfigError(f"--sweep has more than {MOST_CELLS:,} combinations.", where="--sweep", fix="fewer values")
    unsplit = {degree.name: 1 for degree in DEGREES}
    for chosen in _products(sweep):
        names = {**unsplit, **(fixed or {}), **{key: parse_scalar(value) for key, value in chosen.items()}}
        same = frozenset(chosen.items())
        if same not in found and all(holds(text, names) for text in sweep.where):
            found[same] = chosen
    if not found:
        raise ConfigError("--sweep has no combination that meets its constraints.", where="--sweep", fix="weaker constraints")
    return list(found.values())


def _products(sweep: Sweep) -> Iterable[dict[str, str]]:
    for cell in sweep.cells or ({},):
        for values in itertools.product(*sweep.grid.values()):
            yield {**cell, **dict(zip(sweep.grid, values, strict=True))}


OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def holds(text: str, names: Mapping[str, Any]) -> bool:
    """Return whether a constraint holds: arithmetic, comparisons, `and` and `or` over names and values. Nothing else runs.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return bool(_value(ast.parse(text.strip(), mode="eval").body, names))
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError, LookupError) as error:
        what = f"The constraint {text!r} cannot be evaluated."
        raise ConfigError(what, where="--sweep", why=str(error), fix=f"for example tp*pp<=8, over {', '.join(names)}") from error


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise LookupError(f"{node.id} is not varied here")
        return names[node.id]
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.BoolOp):
        return (all if isinstance(node.op, ast.And) else any)(_value(value, names) for value in node.values)
    if isinstance(node, ast.Compare):
        values = [_value(side, names) for side in (node.left, *node.comparators)]
        return all(OPERATORS[type(how)](a, b) for how, a, b in zip(node.ops, values, values[1:], strict=False))
    raise ValueError(f"{type(node).__name__} has no place in a constraint")


def plan_sweep(request: RunRequest, sweep: Sweep) -> list[MatrixEntry]:
    """Plan every combination as far as it can be planned here, model by model.

    Raises:
        ConfigError: the sweep itself is wrong.
    """
    swept = [option for option in OPTIONS if option.swept]
    fixed = {option.name: value for option in swept if (value := getattr(request, option.field or option.name)) is not None}
    entries = []
    for chosen in combinations(sweep, fixed):
        one = with_values(request, chosen.items(), "--sweep")
        label = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        try:
            session = prepare(one)
        except UserError as error:
            name = one.strategy or layout_name(one) or label
            entries.append(MatrixEntry(folder=label, model=one.model, strategy=name, refusal=error))
            continue
        for model in dict.fromkeys(plan.model for plan in session.plans):
            plans = [plan for plan in session.plans if plan.model == model]
            cells = tuple(Cell(session=session, plan=plan, label=label) for plan in plans)
            entries.append(MatrixEntry(folder=label, model=model, strategy=plans[0].strategy, cells=cells))
    return entries
