"""The parts of a step: against a replay of the schedule, against each other, and against what must hold anywhere."""

import json
from pathlib import Path

import pytest
from changes import replace
from plans import workload

from tprimat.core.accelerators import accelerators, find_accelerator
from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.implementations import EMBEDDED, FSDP, TRANSFORMER_ENGINE
from tprimat.core.models import model_shape
from tprimat.core.workload import Layout
from tprimat.predict.rates import probed_rates, published_rates, sustained_shares
from tprimat.predict.time import predict_time
from tprimat.records.discover import load_results, probes_in
from tprimat.runner.explain import recorded_workload

H200 = Path(__file__).parents[2] / "benchmarks" / "records" / "h200"
RATES = published_rates(find_accelerator("NVIDIA H200"), 8)


def replayed(forward, backward, stages, micro_batches):
    """Seconds of Megatron-Core's 1F1B schedule, operation by operation, on stages of equal work."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        order = [("f", number) for number in range(ahead)]
        for number in range(micro_batches - ahead):
            order += [("f", ahead + number), ("b", number)]
        orders.append(order + [("b", number) for number in range(micro_batches - ahead, micro_batches)])
    done, free, place = {}, [0.0] * stages, [0] * stages
    while any(place[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                kind, number = orders[stage][place[stage]]
                first = stage == 0 if kind == "f" else stage == stages - 1
                before = (kind, stage + (-1 if kind == "f" else 1), number)
                needed = 0.0 if first and kind == "f" else done.get(("f", stage, number) if first else before)
                if needed is None:
                    break
                free[stage] = max(free[stage], needed) + (forward if kind == "f" else backward)
                done[kind, stage, number] = free[stage]
                place[stage] += 1
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 8), (4, 32)])
def test_the_bubble_is_that_of_the_replayed_schedule(stages, micro_batches):
    busy = 3.0 * micro_batches
    whole = replayed(1.0, 2.0, stages, micro_batches)
    deep = replace(model_shape("llama-3.1-8b"), layers=512 * stages)  # beside which embedding and output are nothing
    parts = predict_time(workload(shape=deep, layout=Layout(pipeline=stages), accumulation_steps=micro_batches), RATES).parts
    work = sum(parts[part] for part in ("products", "attention", "memory", "host"))
    assert parts["bubble"] / work == pytest.approx((whole - busy) / busy, rel=0.01)


def test_interleaving_divides_the_bubble():
    plain, virtual = (
        predict_time(workload(layout=Layout(pipeline=4, virtual_pipeline=chunks), implementation=TRANSFORMER_ENGINE), RATES)
        for chunks in (None, 2)
    )
    assert virtual.parts["bubble"] == pytest.approx(plain.parts["bubble"] / 2, rel=1e-6)


WITH_BF16 = [accelerator for accelerator in accelerators() if "bf16" in accelerator.dense_flops]


@pytest.mark.parametrize("accelerator", WITH_BF16, ids=lambda accelerator: accelerator.name)
def test_no_step_is_faster_than_the_dense_peak(accelerator):
    work = workload()
    time = predict_time(work, published_rates(accelerator, 8))
    rate = time.tokens_per_second_per_gpu * flop_per_token(work.shape, work.sequence_tokens)
    assert 0.05 < rate / accelerator.dense_flops["bf16"] < 0.85


@pytest.mark.parametrize("stages", [{}, {"pipeline": 4, "virtual_pipeline": 2, "data": 2}], ids=str)
def test_recomputing_the_first_layers_takes_their_share_of_the_time(stages):
    layout = Layout(**{"data": 8, **stages})
    chunks = layout.pipeline * (layout.virtual_pipeline or 1)

    def seconds(**recompute):
        time = predict_time(workload(layout=layout, **recompute), RATES)
        return {part: time.parts[part] for part in ("products", "attention", "memory")}

    none, full = seconds(), seconds(recompute="full")
    for part, value in seconds(recompute="full", recompute_layers=2).items():
        assert value == pytest.approx(none[part] + 2 * chunks / 32 * (full[part] - none[part])), part
    assert seconds(recompute="full", recompute_layers=32) == pytest.approx(full)


def test_switches_join_the_nodes_of_a_rack():
    """GB200 NVL72: 64 expert ranks exchange over NVLink, whatever the number of GPUs in a node; 128 do not."""
    size = 2.0**28
    rack, nodes = (published_rates(find_accelerator(name), 4) for name in ("GB200", "B200"))
    assert rack.exchange_seconds("all_to_all", size, 64) == pytest.approx(size * 63 / 64 / rack.link, rel=0.2)
    assert rack.exchange_seconds("all_to_all", size, 128) > 5 * rack.exchange_seconds("all_to_all", size, 64)
    assert nodes.exchange_seconds("all_to_all", size, 64) > 5 * rack.exchange_seconds("all_to_all", size, 64)
    assert rack.exchange_seconds("send_recv", size, 2, 32) < rack.exchange_seconds("send_recv", size, 2, 64)
    assert rack.slowdown_seconds("all_gather", size, 64, 1, size) < rack.exchange_seconds("all_gather", size, 64)


def test_a_token_that_travels_to_a_node_once_takes_less_of_the_network():
    """Eight experts of 8 nodes are on 8 (1 - (7/8)^8) = 5.25 of them; those of 4 groups on 4 (1 - (3/4)^8) = 3.60.

    On 32 nodes a group has four: 16 (1 - (15/16)^8) = 6.45.
    """
    rates = replace(published_rates(find_accelerator("H100 SXM"), 8), link=1e15)
    shape = replace(model_shape("deepseek-v3"), router_groups=None, router_best_groups=None)
    once = replace(TRANSFORMER_ENGINE, dispatches_once_a_node=True)

    def seconds(expert=64, **changes):
        work = workload(**{"shape": shape, "layout": Layout(expert=expert, data=256), "expert_tensor_parallel": 1, **changes})
        return predict_time(work, rates).parts["experts"]

    each = seconds(implementation=TRANSFORMER_ENGINE)
    assert seconds(implementation=once) / each == pytest.approx(5.25 / 8, abs=0.01)
    assert seconds(implementation=once, shape=model_shape("deepseek-v3")) / each == pytest.approx(3.60 / 8, abs=0.01)
    wide = seconds(256, implementation=once, shape=model_shape("deepseek-v3")) / seconds(256, implementation=TRANSFORMER_ENGINE)
    assert wide == pytest.approx(6.45 / 8, abs=0.01)
    assert seconds(8, implementation=once) == seconds(8, implementation=TRANSFORMER_ENGINE), "in one node"


def test_experts_of_our_own_multiply_two_of_three_products_in_fp8():
    shape = replace(model_shape("mixtral-8x7b"), vocabulary=512)
    common = {"shape": shape, "layout": Layout(expert=8, data=8), "expert_tensor_parallel": 1}
    wide, ours, all_of_them = (
        predict_time(workload(**common, matmul_dtype=precision, implementation=code), RATES)
        for precision, code in (("bf16", EMBEDDED), ("fp8", EMBEDDED), ("fp8", TRANSFORMER_ENGINE))
    )
    assert wide.parts["products"] > ours.parts["products"] > all_of_them.parts["products"]
    assert all_of_them.parts["memory"] > ours.parts["memory"] > wide.parts["memory"]
    saved, more = (wide.parts["products"] - of.parts["products"] for of in (ours, all_of_them))
    assert saved / more == pytest.approx(2 / 3, abs=0.05)  # attention has all three


@pytest.mark.parametrize(
    ("profile", "changes"),
    [
        ("cut_fp8", {"layout": Layout(), "shape": replace(model_shape("llama-3.1-8b"), layers=20)}),
        ("dp2", {"layout": Layout(data=2)}),
        # The gradients of the next step are set to zero outside the optimizer.
        ("nemo_dp2", {"layout": Layout(data=2), "implementation": replace(TRANSFORMER_ENGINE, zeroes_gradients=False)}),
    ],
)
def test_the_optimizer_takes_about_as_long_as_in_a_profile(profile, changes):
    classes = json.loads((H200 / "profiles" / f"{profile}.json").read_text())["classes"]
    (measured,) = (one["seconds"] for one in classes if one["kind"] == "optimizer")
    rates = probed_rates(probes_in([H200 / "probes-1gpu"])[0], find_accelerator("NVIDIA H200"), 8)
    assert predict_time(workload(**changes), rates).parts["optimizer"] == pytest.approx(measured, rel=0.1)


def test_replicas_share_the_update_and_each_sets_all_its_gradients_to_zero():
    seconds = {
        (replicas, zeroes): predict_time(
            workload(layout=Layout(data=replicas), implementation=replace(TRANSFORMER_ENGINE, zeroes_gradients=zeroes)), RATES
        ).parts["optimizer"]
        for replicas in (1, 8)
        for zeroes in (True, False)
    }
    zeroing = parameters(workload().shape).total * 4 / RATES.bandwidth
    assert seconds[1, False] == pytest.approx(8 * seconds[8, False])
    assert seconds[1, True] - seconds[1, False] == pytest.approx(zeroing, rel=0.001)
    assert seconds[8, True] - seconds[8, False] == pytest.approx(zeroing, rel=0.001)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_an_exchange_beside_products_lengthens_them(sequence_parallel):
    work = workload(layout=Layout(tensor=2, sequence_parallel=sequence_parallel), implementation=TRANSFORMER_ENGINE)
    none, half, whole = (
        predict_time(work, replace(RATES, overlapped=((2**26, share),))).parts["tensor"] for share in (0.0, 0.5, 1.0)
    )
    assert half - none == pytest.approx(whole - half)
    # By data sheet all exchanges of a message take as long: six of ten are waited for, or two sums of four.
    assert whole / none == pytest.approx(10 / 6 if sequence_parallel else 4 / 2)


@pytest.mark.parametrize("place", ["h100/cuda-graphs", "h100/in-turn-four-gpus-later/megatron-graphs", "h200/strategies"])
def test_steps_without_graphs_took_as_long_as_the_host_is_predicted_to_launch_their_layers(place):
    runs = [one for one in load_results([H200.parent / place])[0] if one.run.ran.tensor_parallel > 1]
    assert runs
    for result in runs:
        work, rates = recorded_workload(result.run), published_rates(find_accelerator(result.run.machine.accelerator), 8)
        late, by_graphs = (
            predict_time(replace(work, implementation=replace(work.code, launches_own_layers=by_host)), rates)
            for by_host in (True, False)
        )
        assert 0.9 * late.step_seconds < result.steps[1].step_seconds < late.slow_host_seconds
        assert late.parts["host"] > by_graphs.parts["host"] == 0


def test_a_late_host_takes_as_long_for_half_the_micro_batch_and_longer_to_launch_a_layer_again():
    one, two, again = (
        predict_time(workload(layout=Layout(tensor=4), micro_batch=size, accumulation_steps=32 // size, recompute=kind), RATES)
        for size, kind in ((1, "none"), (2, "none"), (1, "full"))
    )
    assert one.step_seconds / two.step_seconds == pytest.approx(2, rel=0.02)
    assert again.step_seconds / one.step_seconds == pytest.approx(1.33, rel=0.02)


def test_probes_replace_published_rates():
    probes, _ = probes_in([H200 / "probes-1gpu", H200 / "probes-4gpu"])
    accelerator = find_accelerator("NVIDIA H200")
    measured = probed_rates(probes, accelerator, 8)
    assert measured.measured
    assert measured.source.startswith("probes")
    # Probed itself, at the clock of sustained work, and between probed shapes.
    sustained = sustained_shares(probes)["bf16"]
    assert 0.9 < sustained < 1
    assert measured.product_seconds(16384, 16384, 16384, "bf16") == pytest.approx(12.8e-3 / sustained, rel=0.02)
    assert 500e12 < 2.0 * 6000 * 5000 * 4500 / measured.product_seconds(6000, 5000, 4500, "bf16") < 800e12
    assert measured.exchange_seconds("all_gather", 2**28, 4) == pytest.approx(662.9e-6, rel=0.01)
    assert measured.exchange_seconds("all_gather", 2**31, 4) > measured.exchange_seconds("all_gather", 2**30, 4)
    assert probed_rates([], accelerator, 8).flops == published_rates(accelerator, 8).flops
    assert replace(measured, products={}).product_seconds(4096, 4096, 4096, "bf16") > 0


def test_torch_on_amd_attends_a_third_as_fast_as_the_fastest_kernel():
    """AMD's own profile of torchtitan on MI325X: 27 % of a step of Llama 3.1 70B in attention, 67 % in products."""
    shape = model_shape("llama-3.1-70b")
    work = workload(shape=shape, layout=Layout(data=64), sequence_tokens=8192, recompute="full", implementation=FSDP)
    parts = predict_time(work, published_rates(find_accelerator("MI325X"), 8)).parts
    assert parts["products"] / parts["attention"] == pytest.approx(67.4 / 27.0, rel=0.1)


def test_two_gpus_of_a_mesh_have_one_of_its_links():
    mesh, switch = (published_rates(find_accelerator(name), 8) for name in ("MI300X", "H100 SXM"))
    size = 2.0**32
    for ranks, links in ((2, 1), (4, 3), (8, 7)):
        seconds = mesh.exchange_seconds("all_gather", size, ranks)
        assert size * (ranks - 1) / ranks / seconds == pytest.approx(links * 48e9, rel=0.01), "AMD: 48 of 64 GB/s a link"
        seconds = switch.exchange_seconds("all_gather", size, ranks)
        assert size * (ranks - 1) / ranks / seconds == pytest.approx(360e9, rel=0.01)
    assert size / mesh.exchange_seconds("send_recv", size, 2) == pytest.approx(48e9, rel=0.01)
    assert mesh.exchange_seconds("all_gather", size, 16) == pytest.approx(
        size * 15 / 16 / min(mesh.link, 8 * mesh.network), rel=0.01
    )
    slowdown = mesh.slowdown_seconds("all_gather", size, 2, 1, size)
    assert slowdown < mesh.overlapped_share(size) * mesh.exchange_seconds("all_gather", size, 2), "it takes less of the memory"
