"""Read the rows of tprimat/data/*.yaml as dataclasses. Every mistake is reported with its file and row."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tprimat.core.errors import ConfigError

if TYPE_CHECKING:  # imported late: a command that only shows its help should start fast
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
Row = dict[str, Any]
Prepare = Callable[[Row], Row]

DATA = Path(__file__).parent.parent / "data"


class RefuseUnknownKeys:
    """Base of dataclasses that refuse keys which they lack when pydantic reads them."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


_adapters: "dict[Any, TypeAdapter[Any]]" = {}


def adapter(kind: type[T]) -> "TypeAdapter[T]":
    """Return pydantic's reader and writer of a type, cached because building one takes milliseconds."""
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def explain(error: "ValidationError | ConfigError", most: int = 3) -> str:
    """Return the findings of pydantic, one per line; or what a model's shape refuses."""
    if isinstance(error, ConfigError):
        return f"{error.what} {error.why}"
    findings = error.errors(include_url=False, include_input=False)
    lines = [f"{'.'.join(map(str, finding['loc'])) or 'document'}: {finding['msg']}" for finding in findings[:most]]
    return "\n".join([*lines, *([f"and {len(findings) - most} more"] if len(findings) > most else [])])


def read_rows(file: str, section: str, kind: type[T], prepare: Prepare = dict) -> tuple[T, ...]:
    """Read one list of rows, at the top-level key `section` of a file in tprimat/data.

    Each row also has a date, which is left out where `kind`, its dataclass, has no such field. Figures are converted to SI by the
    file's `units`, key -> field and factor; then `prepare` turns a row into the fields of `kind`. Unknown or missing keys and
    wrong types are refused.
    """
    import pydantic_core

    read: list[T] = []
    content = document(DATA / file)
    units, dated = content.get("units", {}), "date" in {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for number, row in enumerate(content[section], start=1):
        name, place = str(row.get("name", number)), f"tprimat/data/{file}, {section}, row {number} ({row.get('name')})"
        try:
            known = {key: units.get(key, (key, None)) for key in row if dated or key != "date"}
            in_si = {field: _scaled(row[key], factor) for key, (field, factor) in known.items()}
            read.append(adapter(kind).validate_json(pydantic_core.to_json(prepare(in_si)), strict=True))
        except pydantic_core.ValidationError as error:
            raise ConfigError(f"{name} is not valid.", where=place, why=explain(error)) from error
        except ConfigError as error:
            raise ConfigError(error.what, where=error.where or place, why=error.why, fix=error.fix) from error
    return tuple(read)


@cache
def document(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file."""
    import yaml  # imported late: programs that look up no fact should start fast

    try:
        return dict(yaml.load(path.read_text(encoding="utf8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not valid YAML.", where=f"tprimat/data/{path.name}", why=str(error)) from error


def placed(name: str, **subjects: object) -> dict[str, Any]:
    """Return the values of subjects under the keys of FILE.SECTION in tprimat/data; None where a part on the way is None."""
    file, _, section = name.partition(".")
    return _placed(document(DATA / f"{file}.yaml")[section], subjects)


def _placed(places: Mapping[str, Any], subjects: Mapping[str, object]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, place in places.items():
        subject, *parts = place.split(".") if isinstance(place, str) else [""]
        value = _placed(place, subjects) if isinstance(place, Mapping) else subjects.get(subject)
        for part in parts:
            value = None if value is None else getattr(value, part)
        values[key] = value
    return values


def _scaled(value: Any, factor: float | None) -> Any:
    if factor is not None and isinstance(value, Mapping):
        return {key: _scaled(part, factor) for key, part in value.items()}
    return value * factor if factor is not None and isinstance(value, int | float) else value
