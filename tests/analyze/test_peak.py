"""Peaks and projections, on recorded runs."""

from pathlib import Path

import pytest

from tprimat.analyze.groups import measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.peak import against_the_best, analyze_peaks, peaks, project
from tprimat.records.discover import load_results
from tprimat.report.words import without_mfu

RUNS = Path(__file__).parents[1] / "runs"


def entries(*folders, **options):
    results, problems = load_results([RUNS / folder for folder in folders])
    assert not problems
    return analyze_peaks([measure(result, MetricOptions(**options)) for result in results], MetricOptions()).entries


def test_repetitions_rank_by_their_mean_and_not_by_the_luckiest_run():
    best = peaks(entries("h100"))
    llama = next(made for made in best if made.model == "llama")
    runs = [item.metrics.tokens_per_second_per_gpu.value for item in llama.group.runs]
    assert len(runs) == 3
    assert min(runs) < llama.per_gpu.value < max(runs)
    assert [made.tokens_per_second for made in best] == sorted((made.tokens_per_second for made in best), reverse=True)


def test_winners_are_paired_within_a_model_only_and_refused_where_the_work_differs():
    published = against_the_best(peaks(entries("published")))
    assert len(published) == 2
    assert {verdict.outcome for verdict in published} == {"refused"}
    assert all(verdict.baseline.split()[0] == verdict.candidate.split()[0] for verdict in published)
    alike = against_the_best(peaks(entries("h100", "mi300x")))
    assert [verdict.outcome for verdict in alike] == ["faster"]


def test_honest_conventions_turn_the_published_order_of_utilization_around():
    def of_qwen(**options):
        return [made.utilization.value for made in peaks(entries("published", **options)) if made.model == "qwen"]

    assert of_qwen(flops_convention="6n")[0] > of_qwen(flops_convention="6n", peak="sparse")[1]  # as they were published
    assert of_qwen() == pytest.approx([0.367, 0.435], abs=5e-4)


def test_a_processor_has_tokens_but_neither_flops_nor_utilization():
    (made,) = entries("cpu")
    assert made.tokens_per_second > 0
    assert made.flops is None
    assert made.utilization is None
    assert "CPU" in without_mfu(made.group.runs[0].metrics)


def test_efficiency_counts_only_beyond_the_measured_nodes():
    made = peaks(entries("h100"))[0]
    one, four = project(made, [1, 4], 0.5)
    assert one["tokens_per_second"] == pytest.approx(made.tokens_per_second)
    assert four["tokens_per_second"] == pytest.approx(2 * made.tokens_per_second)
    assert (four["gpus"], four["linear_tokens_per_second"]) == (32, pytest.approx(4 * made.tokens_per_second))
