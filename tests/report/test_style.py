"""The look that all pictures share."""

from itertools import pairwise

import pytest

from tprimat.errors import UserError
from tprimat.report.plots.style import figure, looks, save


def test_32_groups_look_different_and_neighbours_differ_in_colour_and_line():
    made = looks(32)
    assert len({(look.colour, look.line) for look in made}) == 32
    assert len({(look.colour, look.hatch) for look in made}) == 32
    assert all(one.colour != other.colour and one.line != other.line for one, other in pairwise(made))


def test_more_groups_than_looks_still_get_one():
    assert len(looks(100)) == 100


def test_a_suffix_that_is_no_picture_is_refused(tmp_path):
    with figure(2, 2) as made, pytest.raises(UserError, match="not a picture"):
        save(made, tmp_path / "x.gif")
