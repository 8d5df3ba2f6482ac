"""The numbers of rows that experts get: all rows are shared out, anew where that is requested."""

import pytest

from benchmarks.grouped_splits import EXPERTS, KINDS, ROWS, splits


@pytest.mark.parametrize("name", KINDS)
def test_every_row_goes_to_an_expert_and_only_new_numbers_differ(name):
    skew, new = KINDS[name]
    first, second = (splits(skew, seed if new else 0, jitter=new) for seed in (0, 1))
    assert sum(first) == sum(second) == ROWS
    assert len(first) == EXPERTS
    assert min(first) >= 0
    assert (first != second) == new
    assert (max(first) > 2 * ROWS / EXPERTS) == bool(skew)
