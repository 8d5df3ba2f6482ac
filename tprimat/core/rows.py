"""Read the rows of tprimat/data/*.yaml as dataclasses. Every mistake is reported with its file and row."""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from tprimat.core.errors import ConfigError

T = TypeVar("T")
Row = dict[str, Any]
Prepare = Callable[[Row], Row]
Units = Mapping[str, tuple[str, float]]

DATA = Path(__file__).parent.parent / "data"
DATE = re.compile(r"\d{4}(-\d{2}(-\d{2})?)?")
_hints = cache(get_type_hints)
KIND_NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


class RefuseUnknownKeys:
    """Base of dataclasses that refuse keys which they lack when pydantic reads them."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


def read_rows(file: str, section: str, kind: type[T], prepare: Prepare = dict) -> tuple[T, ...]:
    """Read one list of rows.

    Args:
        file: name of a file in tprimat/data.
        section: top-level key of the list.
        kind: dataclass of one row. A row must also give `source` and `date`, even where the class has no such field.
        prepare: turns a row as printed into the fields of `kind`.

    Raises:
        ConfigError: not YAML, an unknown or missing key, a value of the wrong type, or two rows of the same name.
    """
    rows = document(DATA / file).get(section)
    if not isinstance(rows, list):
        raise ConfigError(f"{section} is not a list of rows.", where=_place(file))
    read: dict[str, T] = {}
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ConfigError(f"{row!r} is not a row.", where=_place(file, section, number), why="A row is a set of keys.")
        place = _place(file, section, number, row.get("name") or row.get("shape"))
        name = str(row.get("name", number))
        if name in read:
            raise ConfigError(f"There are two rows named {name}.", where=place, why="Names are unique.")
        read[name] = _build(kind, prepare(_with_provenance(row, kind, place)), place)
    return tuple(read.values())


def in_si(row: Row, units: Units) -> Row:
    """Return the row with the figures in the unit of their source converted to SI: key -> (field, factor)."""
    converted = {}
    for key, value in row.items():
        name, factor = units.get(key, (key, None))
        converted[name] = value if factor is None else _scaled(value, factor)
    return converted


@cache
def document(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; empty if it is not a mapping."""
    import yaml  # imported late: programs that look up no fact should start fast

    try:
        found = yaml.load(path.read_text(encoding="utf8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not valid YAML.", where=_place(path.name), why=str(error)) from error
    return found if isinstance(found, dict) else {}


def _place(file: str, section: str | None = None, number: int = 0, name: object = None) -> str:
    row = f", {section}, row {number}" + (f" ({name})" if name else "") if section else ""
    return f"tprimat/data/{file}{row}"


def _with_provenance(row: Row, kind: type, place: str) -> Row:
    """Return the row with its date as text, or without it where the class has no such field."""
    if not row.get("source") or "date" not in row:
        raise ConfigError("A row lacks its source or its date.", where=place, fix="date: null where the source gives none")
    date = None if row["date"] is None else str(row["date"])
    if date is not None and not DATE.fullmatch(date):
        raise ConfigError(f"date is {date!r}.", where=place, fix="YYYY, YYYY-MM or YYYY-MM-DD")
    known = {field.name for field in fields(kind)}
    return {key: value for key, value in row.items() if key != "date"} | ({"date": date} if "date" in known else {})


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return {key: _scaled(part, factor) for key, part in value.items()}
    return value * factor if isinstance(value, int | float) else value


def _build(kind: type[T], row: Mapping[str, Any], place: str) -> T:
    hints = _hints(kind)  # type: ignore[arg-type]
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := [key for key in row if key not in known]:
        raise ConfigError(f"There is no key {unknown[0]!r}.", where=place, fix=f"one of {', '.join(known)}")
    required = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in row]:
        raise ConfigError(f"A row lacks {', '.join(missing)}.", where=place)
    values = {key: _converted(hints[key], value, f"{place}: {key}") for key, value in row.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(error.what, where=place, why=error.why, fix=error.fix) from error


def _converted(hint: Any, value: Any, place: str) -> Any:
    """Return `value` as a field of type `hint` holds it: lists as tuples, mappings as dataclasses where the type is one."""
    origin, arguments = get_origin(hint), get_args(hint)
    if NoneType in arguments:
        (present,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _converted(present, value, place)
    if is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value, place)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_converted(arguments[0], item, place) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {_converted(arguments[0], key, place): _converted(arguments[1], part, place) for key, part in value.items()}
    if origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{value!r} is not a known value.", where=place, fix=f"one of {', '.join(map(str, arguments))}")
    if type(value) is hint or (hint is float and type(value) is int):
        return value
    exponent = "YAML reads 1.5e9 as text; it must be 1.5e+9." if hint is float and isinstance(value, str) else None
    raise ConfigError(f"{value!r} is not {KIND_NAMES.get(hint, 'of the right kind')}.", where=place, why=exponent)
