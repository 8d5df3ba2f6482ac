import ast
from pathlib import Path

import pytest

from tprimat.core import units

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.count(1234567.4), "1,234,567"),
        (units.si(8030261248), "8.03 G"),
        (units.message_size(65536), "64 KiB"),
        (units.message_size(3 * 2**30), "3 GiB"),
        (units.message_size(1500), "1,500 B"),
        (units.si(0.0042, "s"), "4.20 ms"),
        (units.si(9990, "tokens/s"), "9.99 ktokens/s"),
        (units.si(0, "s"), "0 s"),
        (units.significant(1e90), "1.00e+90"),
        (units.teraflops(501.2e12), "501.2 TFLOP/s"),
        (units.teraflops(3.2e9), "3.20 GFLOP/s"),
        (units.teraflops(141e9), "141 GFLOP/s"),
        (units.gibibytes(54 * 2**30), "54.0 GiB"),
        (units.gibibytes(3 * 2**20), "3.0 MiB"),
        (units.percent(0.3834), "38.3 %"),
        (units.percent(266.134), "26,613.4 %"),
        (units.signed_percent(266.134), "+26,613.4 %"),
        (units.signed_percent(-0.5), "-50.0 %"),
        (units.signed_percent(-0.0004), "0.0 %"),
        (units.seconds(0.0591), "59.1 ms"),
        (units.seconds(250), "4 min 10 s"),
        (units.seconds(7500), "2 h 05 min"),
    ],
)
def test_numbers_print_with_their_units(text, expected):
    assert text == expected


@pytest.mark.parametrize("format_", [units.count, units.si, units.teraflops, units.gibibytes, units.percent, units.seconds])
def test_absent_prints_as_a_dash(format_):
    assert format_(None) == units.signed_percent(None) == "–"


def by_hand(source: str) -> list[int]:
    """Lines that write a percentage with a format of Python's own, such as 0.5 -> '50%'."""
    if "%}" not in source:  # which takes no tree
        return []
    fields = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FormattedValue) and node.format_spec]
    return [field.lineno for field in fields if ast.unparse(field.format_spec).rstrip("'\"").endswith("%")]


def test_every_percentage_has_the_form_of_this_module():
    assert by_hand('f"{share:.0%}"') == [1]
    paths = [path for folder in ("tprimat", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert ROOT / "tprimat" / "analyze" / "metrics.py" in paths
    assert {str(path): lines for path in paths if (lines := by_hand(path.read_text(encoding="utf8")))} == {}
