"""The look that all pictures share."""

from itertools import pairwise

import pytest

from tprimat.core.errors import UserError
from tprimat.report.plots import Bar, bars, figure, looks, readable_log_ticks, save


def test_32_groups_look_different_and_neighbors_differ_in_color_and_line():
    made = looks(32)
    assert len({(look.color, look.line) for look in made}) == 32
    assert all(one.color != other.color and one.line != other.line for one, other in pairwise(made))


def test_a_suffix_that_is_no_picture_is_refused(tmp_path):
    with figure(2, 2) as made, pytest.raises(UserError, match="not a picture"):
        save(made, tmp_path / "x.gif")


@pytest.mark.parametrize("ends", [(680, 1700), (650, 1200), (110, 190), (310, 480), (1000, 1010), (90, 40_000), (0.2, 6)])
def test_a_logarithmic_axis_has_at_least_three_marks(ends):
    with figure(6, 4) as picture:
        axes = picture.subplots()
        axes.set_yscale("log")
        axes.set_ylim(*ends)
        readable_log_ticks(axes)
        marks = [mark for mark in axes.get_yticks() if ends[0] <= mark <= ends[1]]
    assert 3 <= len(marks) <= 9


def test_an_interval_that_rounding_puts_beside_its_value_is_drawn():
    with figure(6, 4) as picture:
        bars(picture.subplots(), [Bar(label="equal steps", value=1.0, low=1.0 + 1e-15, high=1.0)], 6)
