"""Changes of rate over time: seen where they are, rarely where they are not, and with what changed at that moment."""

import dataclasses

import numpy as np
import pytest

from tprimat.analyze.history import Entry, change_points, changed_facts, changes_of, courses, labels


def entries(rates, **facts):
    return [
        Entry(
            path=f"/r/{number}",
            run_id=f"r{number}",
            started_at=f"2026-01-{number + 1:02d}T00:00:00.000+00:00",
            configuration="llama · H200 · 8 GPUs",
            rate=rate,
            facts=facts.get(f"at{number}", {"torch": "2.12", "driver": "570"}),
        )
        for number, rate in enumerate(rates)
    ]


@pytest.mark.parametrize("size", [4, 6, 10, 30, 200])
def test_a_history_without_a_change_rarely_shows_one(size):
    random = np.random.default_rng(size)
    shown = sum(bool(change_points(np.exp(random.normal(0, 0.03, size)))) for _ in range(300))
    assert shown <= 15 + 8, "5 % of 300, with room for chance"


def test_changes_are_found_at_their_place():
    random = np.random.default_rng(7)
    levels = [100.0] * 12 + [93.0] * 10 + [101.0] * 8
    noise = np.exp(random.normal(0, 0.004, len(levels)))
    assert change_points(np.array(levels) * noise) == [12, 22]
    assert change_points([100.0] * 20) == []
    assert change_points([100, 100, 100.5, 100.4, 100.6, 100.5]) == [], "under one percent nobody acts"
    assert change_points([100, 101]) == []


def test_one_outlier_is_no_change():
    rates = [100.0, 100.2, 99.9, 60.0, 100.1, 100.0, 99.8, 100.2, 100.1, 99.9]
    assert change_points(rates) == []


def test_a_change_comes_with_what_changed_then():
    runs = entries([100, 100.1, 99.9, 100, 90, 90.1, 89.9, 90], at4={"torch": "2.13", "driver": "570", "hosts": "b"})
    (change,) = changes_of(runs)
    assert (change.place, round(change.ratio, 3)) == (4, 0.9)
    assert change.facts == (("torch", "2.12", "2.13"), ("hosts", "unknown", "b"))
    assert changed_facts(runs[0], runs[1]) == ()


def test_runs_are_ordered_by_time_and_those_that_do_not_count_are_left_out():
    runs = entries([3.0, 2.0, 1.0])
    bad = dataclasses.replace(runs[0], run_id="x", started_at="2026-02-01", rate=9.0, not_counted="failed")
    (course,) = courses([runs[2], bad, runs[0], runs[1]])
    assert [entry.rate for entry in course.entries] == [3.0, 2.0, 1.0]


def test_a_label_names_what_tells_a_configuration_from_its_likes():
    common = " · ".join("abcdefgh")
    assert labels([f"{common} · x · y", f"{common} · x · z", "q · r"]) == [f"{common} · y", f"{common} · z", "q · r"]
    assert labels([f"{common} · a=1, b=2, c=3", f"{common} · a=1, b=3, c=3"]) == [f"{common} · b=2", f"{common} · b=3"]
    assert labels([f"{common} · a=1", f"{common} · a=1, b=2"]) == [common, f"{common} · b=2"]
