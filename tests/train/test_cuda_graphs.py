"""Steps launched as CUDA graphs: which passes are recorded, that losses stay, and what is refused."""

import weakref
from pathlib import Path

import pytest
import torch
from changes import replace
from planning import make_plan, split_settings, train_together
from repeating import RepeatingRecorder

from tprimat.analyze.metrics import MetricOptions, run_metrics
from tprimat.core.errors import MetricError
from tprimat.megatron import fp8
from tprimat.megatron.graphs import MicroBatch, StepGraphs
from tprimat.records.discover import load_results
from tprimat.records.evidence import cautions
from tprimat.records.schema import StepRecord
from tprimat.train.profiler import slowed_steps

ROOT = Path(__file__).resolve().parents[2]
FIVE_STEPS = {"training.duration.max_steps": 5, "training.data.global_batch_size": 8, "training.data.dataset": "mock"}


class CountingRecorder(RepeatingRecorder):
    def __init__(self):
        self.recorded = 0

        self.results = []

    def record(self, work, slot=0):
        self.recorded += 1
        replay, result = super().record(work, slot)
        self.results.append(weakref.ref(result))
        return replay, result


@pytest.mark.parametrize(("micro_batches", "graphs"), [(1, 1), (2, 2), (3, 3), (6, 3)])
def test_first_last_and_all_others_are_recorded_once_in_the_third_step(micro_batches, graphs):
    recorder, seen = CountingRecorder(), []

    def passes(tokens, at):
        seen.append(at)
        return tokens.float().sum()

    steps = StepGraphs(passes, recorder)
    for step in range(1, 6):
        batch = [torch.full((1, 3), 100 * step + number) for number in range(micro_batches)]
        losses, by_python = steps.step(batch, torch.device("cpu"))
        assert [loss.item() for loss in losses] == [3.0 * (100 * step + number) for number in range(micro_batches)]
        assert by_python == (step <= 3)
        assert steps.recorded == (step >= 3)
        assert recorder.recorded == (graphs if step >= 3 else 0)
        assert seen[-micro_batches:] == [MicroBatch(number == 0, number == micro_batches - 1) for number in range(micro_batches)]


VARIANTS = {
    "1 rank": {"accumulate_weight_gradients": True},
    "dp2": {"accumulate_weight_gradients": True},
    "tp2 in pieces": {"overlap_tensor_parallel": True},
    "pp2": {"accumulate_weight_gradients": True},
    "pp2 dp2": {},
    "pp2 tp2": {"overlap_tensor_parallel": True},
    "pp2 fp8": {
        "platform_optimizations.cpu.precision": "bf16",
        "training.data.global_batch_size": 2,
        "training.duration.max_steps": 4,
    },
    "pp4 of 2 micro-batches": {"training.data.global_batch_size": 2},
}


def variant_plan(folder, name, **split):
    tensor, data = (2 if part in name.split() else 1 for part in ("tp2", "dp2"))
    pipeline = 2 if "pp2" in name else 4 if "pp4" in name else 1
    degrees = {"tp": tensor, "pp": pipeline}
    settings = split_settings("llama", tensor * pipeline * data, {**FIVE_STEPS, **degrees, **split})
    plan = make_plan(folder, "llama", settings)
    if "fp8" in name:  # refused on a CPU, where it is slow
        narrow = replace(plan.workload.shape, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=64)
        plan = replace(plan, matmul_dtype="fp8", shape=narrow)
    return plan, replace(plan, engine_options=replace(plan.engine_options, cuda_graphs=True))


def test_losses_and_norms_are_those_of_megatrons_schedule(tmp_path):
    plans = []
    for name, options in VARIANTS.items():
        usual, recorded = variant_plan(tmp_path / name, name, **options)
        folder = str(tmp_path / f"{name} recorded")
        plans += [usual, replace(recorded, run_id=f"{usual.run_id} recorded", run_directory=folder, output_directory=folder)]
    plans.append(variant_plan(tmp_path / "short", "1 rank", **{"training.duration.max_steps": 2})[1])
    *results, (short, _) = train_together(plans)
    assert short.engine_options["cuda_graphs"] is False, "it ended before anything was recorded"
    for (run, usual), (recorded_run, recorded) in zip(results[::2], results[1::2], strict=True):
        assert not cautions(recorded_run.evidence)
        assert [step.loss for step in recorded] == pytest.approx([step.loss for step in usual], rel=1e-6)
        assert [step.grad_norm for step in recorded] == pytest.approx([step.grad_norm for step in usual], rel=1e-5)
        assert recorded_run.engine_options["cuda_graphs"] is True
        assert run.engine_options["cuda_graphs"] is False


def test_a_profile_begins_once_the_graphs_are_recorded(tmp_path):
    settings = {"training.duration.max_steps": 12, "profiling.enabled": True, "profiling.schedule": {"wait": 1, "active": 2}}
    plan, _ = variant_plan(tmp_path, "1 rank", **settings)
    assert (slowed_steps(plan, graphs=False), slowed_steps(plan, graphs=True)) == ((2, 3, 4, 5), (5, 6, 7, 8))


def test_the_steps_before_the_graphs_are_no_measure_of_them():
    ((recorded, *_), _) = load_results([ROOT / "benchmarks" / "records" / "h100" / "cuda-graphs"])
    run = recorded.run
    steps = [StepRecord(step=number, step_seconds=1.0 if number < 4 else 2.0) for number in range(1, 20)]
    window = run_metrics(run, steps).window
    assert (window.first_step, window.rule) == (4, {"before the CUDA graphs": "1-3"})
    slow = [replace(step, step_seconds=4.0) if step.step == 4 else step for step in steps]
    window = run_metrics(run, slow).window
    assert (window.first_step, window.rule) == (5, {"warm-up": "4", "before the CUDA graphs": "1-3"})
    assert run_metrics(run, steps, options=MetricOptions(warmup=1)).window.first_step == 2
    with pytest.raises(MetricError, match="No steady step is left: 3 measured, 3 of them warm-up"):
        run_metrics(run, steps[:3])


def test_weights_in_8_bits_from_before_the_recording_take_no_memory_beside_those_of_the_graphs(monkeypatch):
    kept, alive = [], []

    def converted(weight, _):
        small = weight.clone()
        kept.append(weakref.ref(small))
        return small, small, torch.ones(())

    monkeypatch.setattr(fp8, "convert", converted)
    products = fp8.Fp8Products()

    def passes(tokens, _):
        alive.append([one() is not None for one in kept])
        products._weight(tokens)
        return tokens.sum()

    steps = StepGraphs(passes, RepeatingRecorder())
    for _ in range(3):
        fp8.next_step()
        steps.step([torch.ones(1, 3)] * 2, torch.device("cpu"))
    assert alive[2] == [True]
    assert alive[4][:2] == [False, False]
    assert len(kept) == 3
