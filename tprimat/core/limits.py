"""Limits on what a file holds: bytes, levels and numbers. What exceeds them is refused where it is read.

Whatever a file holds, arithmetic on a record stays finite and loops over its steps end.
"""

import math
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

LARGEST_DOCUMENT = 256 * 2**20
"""Bytes of a JSON document, which is read as a whole: ten times those of a run of a hundred thousand steps."""
LARGEST_UNPACKED = 4 * 2**30
"""Bytes of an archive, a trace or a file of lines, packed or unpacked."""
LARGEST_RATIO = 500
"""Times its size that a packed file may unpack to, which text of records and logs never does."""
FREE_OF_RATIO = 64 * 2**20
"""Bytes that may be unpacked whatever the ratio."""
LARGEST_WHOLE = 2**53
"""The largest whole number up to which floating point is exact."""
LARGEST_REAL = 1e100
"""Sums of squares of such numbers are still finite."""
LARGEST_STEP = 10**9
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e9
"""31 years."""
DEEPEST = 8


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise PydanticCustomError("depth", "Input should have at most 8 levels")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _plain(inner, depth + 1)
    if isinstance(value, int | float) and not (abs(value) <= LARGEST_REAL and math.isfinite(value)):
        raise PydanticCustomError("size", "Input should be a finite number up to 1e100")
    return value


def _a_time(text: str) -> str:
    datetime.fromisoformat(text.replace("Z", "+00:00"))
    return text


def most_unpacked(packed: int) -> int:
    """Return the bytes that so many packed ones may unpack to."""
    return min(LARGEST_UNPACKED, max(FREE_OF_RATIO, LARGEST_RATIO * packed))


def finite_or_none(value: float | None) -> float | None:
    """Return a finite number up to LARGEST_REAL; records keep no other, and their field `finite` says so."""
    return value if value is not None and abs(value) <= LARGEST_REAL else None


WholeNumber = Annotated[int, Field(ge=0, le=LARGEST_WHOLE)]
Count = Annotated[int, Field(ge=1, le=LARGEST_WHOLE)]
Name = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""Text of tables and pictures: one line, which a terminal shows as it is."""
FileName = Annotated[str, Field(max_length=300, pattern=r"^\.*[^./\\\x00-\x1f\x7f-\x9f][^/\\\x00-\x1f\x7f-\x9f]*$")]
"""A name that becomes part of a path: without separators, and neither `.` nor `..`."""
StepNumber = Annotated[int, Field(ge=1, le=LARGEST_STEP)]
Real = Annotated[float, Field(ge=-LARGEST_REAL, le=LARGEST_REAL, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST_REAL, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=SHORTEST_SECONDS, le=LONGEST_SECONDS, allow_inf_nan=False)]
"""Seconds that something took."""
Instant = Annotated[str, AfterValidator(_a_time)]
"""ISO 8601, UTC."""
Moment = Annotated[float, Field(ge=-LONGEST_SECONDS, le=LONGEST_SECONDS, allow_inf_nan=False)]
"""Seconds since a start."""
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
FreeForm = Annotated[dict[str, Any], AfterValidator(_plain)]
