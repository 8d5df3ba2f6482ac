"""Format numbers as text. No other module formats: everything upstream is SI and unrounded.

Absent values print as an en dash, never as 0 or N/A.
"""

import math

ABSENT = "–"

GIBIBYTE = 2**30
TERA = 10**12
LONGEST = 1e15
"""From which a number has an exponent."""

SI_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("µ", 1e-6), ("n", 1e-9))


def count(value: float | None) -> str:
    """Format a count: 1234567 -> '1,234,567'."""
    return ABSENT if value is None else f"{value:,.0f}"


def printable(text: str) -> str:
    """Format a name with an escape in place of each character that moves or colours on a screen, as names of files may hold."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def si(value: float | None, unit: str = "") -> str:
    """Format three significant digits with an SI prefix: 8030261248 -> '8.03 G'; 0.0042, 's' -> '4.20 ms'."""
    if value is None:
        return ABSENT
    if value == 0:
        return f"0 {unit}".rstrip()
    prefix, scale = next((pair for pair in SI_PREFIXES if abs(value) >= pair[1] * 0.9995), SI_PREFIXES[-1])
    return f"{significant(value / scale)} {prefix}{unit}".rstrip()


def billions(value: float | None) -> str:
    """Format a size: 7597433417 -> '7.60 billion'; below a tenth of a billion in millions."""
    if value is None:
        return ABSENT
    scale, word = (1e9, "billion") if value >= 1e8 else (1e6, "million")
    return f"{significant(value / scale)} {word}"


def significant(value: float, digits: int = 3) -> str:
    """Format with at least `digits` significant digits, up to 1e15 without an exponent; the whole part is never rounded."""
    if value == 0:
        return "0"
    if abs(value) >= LONGEST:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, decimals)}f}"


def teraflops(flop_per_second: float | None) -> str:
    """Format FLOP/s: '501.2 TFLOP/s'; rates below 1 TFLOP/s get a smaller prefix."""
    if flop_per_second is None:
        return ABSENT
    if flop_per_second < 1e12:
        return si(flop_per_second, "FLOP/s")
    return f"{flop_per_second / 1e12:,.1f} TFLOP/s"


def gibibytes(size: float | None) -> str:
    """Format bytes: '54.0 GiB'; below a tenth of a GiB in MiB."""
    if size is None:
        return ABSENT
    if size < GIBIBYTE / 10:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / GIBIBYTE:,.1f} GiB"


def message_size(size: int) -> str:
    """Format bytes as a whole number of the largest binary unit: 65536 -> '64 KiB', 2**30 -> '1 GiB', 1500 -> '1,500 B'."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size:,} B"


def percent(fraction: float | None, digits: int = 1) -> str:
    """Format a fraction: 0.383 -> '38.3 %'."""
    return ABSENT if fraction is None else f"{round(fraction * 100, digits) + 0.0:,.{digits}f} %"


def signed_percent(fraction: float | None, digits: int = 1) -> str:
    """Format a difference of fractions: 0.012 -> '+1.2 %'; what rounds to zero has no sign."""
    return ABSENT if fraction is None else f"{signed(fraction * 100, digits)} %"


def signed(value: float, digits: int = 1) -> str:
    """Format a number with its sign; what rounds to zero has none."""
    rounded = round(value, digits)
    return f"{rounded:+,.{digits}f}" if rounded else f"{0:.{digits}f}"


def seconds(value: float | None) -> str:
    """Format a duration: '842 µs', '59.1 ms', '3.10 s', '4 min 10 s', '2 h 05 min'."""
    if value is None:
        return ABSENT
    if abs(value) < 60:
        return si(value, "s")
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
