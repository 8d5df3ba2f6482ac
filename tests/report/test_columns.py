"""Aligned columns."""

import pytest

from tprimat.report.tables import columns


def test_names_stand_left_and_numbers_right():
    assert columns(["model", "n"], [["a", "10"], ["longer", "7"]]).splitlines() == [
        "model    n",
        "------  --",
        "a       10",
        "longer   7",
    ]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="argument"):
        columns(["model", "n"], [["a"]])
