"""Matrix products: what is multiplied, what is counted, what is recorded, and that settings do not leak."""

from dataclasses import replace

import pytest
import torch

from tprimat.config.load import load_config
from tprimat.core.flops import parameters
from tprimat.probe import catalogue, gemm
from tprimat.probe.case import Case, ProbeLog, measure, open_bench, run
from tprimat.records.store import read_probes
from tprimat.runner.probes import models_of

CPU = torch.device("cpu")
PRODUCT = gemm.Product(m=32, k=64, n=16)


@pytest.fixture(scope="module")
def bench():
    return open_bench(device=CPU)


def test_a_product_has_the_shape_that_its_name_says_and_normal_operands():
    for dtype in ("fp32", "fp16", "bf16"):
        for call in gemm.CALLS:
            result = gemm.prepare(PRODUCT, dtype, call, CPU)()
            assert (tuple(result.shape), result.dtype) == ((32, 16), gemm.TORCH_DTYPES[dtype])
    for operand in gemm.prepare(gemm.Product(m=256, k=256, n=256), "fp32", "torch.matmul", CPU).args:
        assert operand.mean().abs() < 0.05
        assert 0.9 < operand.std() < 1.1, "zeros draw less power"
    assert gemm.Product(m=8192, k=8192, n=8192).flop == 1_099_511_627_776, "the published 1100 billion"


def test_an_fp8_product_is_close_to_the_product_of_its_rounded_operands():
    product = gemm.prepare(PRODUCT, "fp8", gemm.FP8_CALL, CPU)
    a, b = (operand.float() for operand in product.args[:2])
    assert torch.allclose(product().float(), a @ b, rtol=0.02, atol=0.05)


def test_a_refusal_is_recorded_with_its_reason(bench, tmp_path):
    refused = measure(gemm.case_of(PRODUCT, "tf32", "torch.matmul"), bench)
    assert (refused.seconds, refused.error) == ((), "ValueError: a processor has no tf32")

    def refuse(_device):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    good = gemm.case_of(PRODUCT, "fp32", "torch.matmul")
    case = Case(kind="gemm", variant="absent", shape={}, dtype="fp32", prepare=refuse)
    messages = []
    log = ProbeLog(tmp_path / "probes.jsonl", resume=False, tell=messages.append)
    refused, measured = run([case, good], bench, log)
    assert [message.split()[0] for message in messages] == ["1/2", "2/2"]
    assert refused.error == "RuntimeError: No available kernel. Aborting execution."
    assert (bool(measured.seconds), measured.error) == (True, None)
    assert read_probes(tmp_path / "probes.jsonl") == (refused, measured)


def test_a_second_run_measures_only_what_is_new(bench, tmp_path):
    messages = []
    file = tmp_path / "probes.jsonl"
    first, second = (gemm.case_of(PRODUCT, "fp32", call) for call in gemm.CALLS)
    (kept,) = run([first], bench, ProbeLog(file, resume=True, tell=messages.append))
    again, added = run([first, second], bench, ProbeLog(file, resume=True, tell=messages.append))
    assert again == kept
    assert read_probes(file) == (kept, added)
    assert [message.partition(" fp32 ")[0] for message in messages] == ["1/1 gemm torch.matmul", "2/2 gemm F.linear"]


def test_the_configurations_models_are_measured_under_every_split_and_micro_batch_of_their_strategies():
    config = load_config()
    models = [(one.model, one.micro_batch, one.tensor_parallel, one.sequence) for one in models_of(config, "nvidia")]
    assert models == [(model, 1, ranks, 2048) for model in ("llama", "qwen") for ranks in (1, 2, 4)]
    strategy = dict(config.parallelism["balanced"])
    layout = replace(strategy["llama"]["nvidia"], micro_batch_size=3)
    strategy["llama"] = strategy["llama"] | {"nvidia": layout}
    changed = replace(config, parallelism=config.parallelism | {"balanced": strategy})
    llama = [one for one in models_of(changed, "nvidia") if one.model == "llama"]
    assert [(one.micro_batch, one.tensor_parallel) for one in llama] == [(1, 1), (1, 4), (3, 2)]
    for one in llama:
        cases = gemm.model_cases([one], ("bf16",), small=False)
        *layer, output = [case.shape["k"] * case.shape["n"] for case in cases]
        whole = sum(layer) * one.shape.layers + output
        assert whole * one.tensor_parallel == parameters(one.shape).matmul, "all products add up to the weights"


def test_triad_adds_three_times_one_array_to_another():
    call = catalogue.prepare_array("triad", 1024, CPU)
    b, c = call.args
    assert torch.equal(call(), torch.add(b, c, alpha=3.0))
    moved = {case.kind: case.bytes // case.shape["array_bytes"] for case in catalogue.memory_cases(small=True)}
    assert moved == {"copy": 2, "triad": 3, "fill": 1}
