"""Matrix products: what is multiplied, what is counted, and that settings do not leak."""

from types import SimpleNamespace

import pytest
import torch

from tprimat.probe import gemm, memory
from tprimat.probe.case import Case, measure, open_bench, open_log, run
from tprimat.records.store import read_probes

CPU = torch.device("cpu")
PRODUCT = gemm.Product(m=32, k=64, n=16)


@pytest.fixture(scope="module")
def bench():
    return open_bench(device=CPU)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("call", gemm.CALLS)
def test_a_product_has_the_shape_that_its_name_says(dtype, call):
    result = gemm.prepare(PRODUCT, dtype, call, CPU)()
    assert (tuple(result.shape), result.dtype) == ((32, 16), gemm.TORCH_DTYPES[dtype])


@pytest.mark.parametrize("call", gemm.FP8_CALLS)
def test_an_fp8_product_is_close_to_the_product_of_its_rounded_operands(call):
    product = gemm.fp8_call(PRODUCT, call, CPU)
    a, b = (operand.float() for operand in product.args[:2])
    assert torch.allclose(product().float(), a @ b, rtol=0.02, atol=0.05)


def test_operands_are_random_normal_numbers_and_never_zeros():
    a, b = gemm.prepare(gemm.Product(m=256, k=256, n=256), "fp32", "torch.matmul", CPU).args
    for operand in (a, b):
        assert operand.mean().abs() < 0.05
        assert 0.9 < operand.std() < 1.1


def test_flop_of_the_8k_square_are_the_published_1100_billion():
    assert gemm.Product(m=8192, k=8192, n=8192).flop == 2 * 8192**3 == 1_099_511_627_776


def test_the_seven_shapes_keep_llama_70bs_widths():
    assert gemm.SEED_SHAPES["fused QKV projection"][1:] == (8192, (64 + 2 * 8) * 128 // 8)
    assert gemm.SEED_SHAPES["attention output"][1:] == (64 * 128 // 8, 8192)
    assert gemm.SEED_SHAPES["feed-forward 2"][1:] == (28672 // 8, 8192)
    assert gemm.SEED_SHAPES["feed-forward 1"][1:] == (8192, 2 * 28672 // 8)


def test_the_precision_setting_is_restored_even_after_an_error():
    before = torch.get_float32_matmul_precision()

    def fail_inside():
        with gemm.settings("tf32"):
            assert torch.get_float32_matmul_precision() == "high"
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        fail_inside()
    assert torch.get_float32_matmul_precision() == before


def test_tf32_on_a_processor_is_refused_and_the_record_says_so(bench):
    record = measure(gemm.case_of(PRODUCT, "tf32", "torch.matmul"), bench)
    assert record.seconds == ()
    assert record.error == "ValueError: a processor has no tf32"


def test_a_refused_case_is_followed_by_its_alternative(bench, tmp_path):
    def refuse(_device):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    good = gemm.case_of(PRODUCT, "fp32", "torch.matmul")
    case = Case(kind="gemm", variant="absent", shape={}, dtype="fp32", prepare=refuse, fallback=good)
    messages = []
    log = open_log(tmp_path / "probes.jsonl", resume=False, seconds=None, tell=messages.append)
    refused, measured, last = run([case, good], bench, log)
    assert [message.split()[0] for message in messages] == ["1/2", "1/2", "2/2"], "an alternative is no further case"
    assert refused.error == "RuntimeError: No available kernel. Aborting execution."
    assert measured.seconds
    assert measured.error is None
    assert read_probes(tmp_path / "probes.jsonl") == (refused, measured, last)


def test_a_second_run_measures_only_what_is_new(bench, tmp_path):
    messages = []
    file = tmp_path / "probes.jsonl"
    first = gemm.case_of(PRODUCT, "fp32", "torch.matmul")
    second = gemm.case_of(PRODUCT, "fp32", "F.linear")
    (kept,) = run([first], bench, open_log(file, resume=True, seconds=None, tell=messages.append))
    again, added = run([first, second], bench, open_log(file, resume=True, seconds=None, tell=messages.append))
    assert again == kept
    assert read_probes(file) == (kept, added)
    assert len(messages) == 2
    assert messages[0].startswith("1/1 gemm torch.matmul fp32 ")
    assert messages[1].startswith("2/2 gemm F.linear fp32 ")


def test_progress_says_how_long_the_rest_takes(bench, monkeypatch):
    messages = []
    ticks = iter(range(0, 1000, 30))
    monkeypatch.setattr("tprimat.probe.case.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    cases = [gemm.case_of(PRODUCT, "fp32", variant) for variant in ("torch.matmul", "F.linear", "torch.matmul")]
    log = open_log(None, resume=False, seconds=None, tell=messages.append)
    list(run(cases, bench, log))
    assert messages[0].endswith(", about 60 s left")
    assert "left" not in messages[2]


def test_a_spent_time_budget_leaves_cases_and_says_how_many(bench, tmp_path):
    messages = []
    cases = gemm.seed_cases(("bf16",), small=True)
    log = open_log(tmp_path / "probes.jsonl", resume=True, seconds=-1.0, tell=messages.append)
    assert list(run(cases, bench, log)) == []
    assert messages == ["The time budget is spent: 14 cases are left; the same command continues."]


def test_the_search_measures_its_winner_anew(bench, tmp_path):
    log = open_log(tmp_path / "probes.jsonl", resume=False, seconds=None, tell=lambda _: None)
    *candidates, winner = gemm.search("bf16", bench, log)
    assert {record.kind for record in candidates} == {"gemm_search"}
    assert winner.kind == "gemm"
    assert winner.variant == "torch.matmul searched"
    fastest = max(candidates, key=gemm.rate)
    assert fastest.shape == winner.shape
    assert fastest.seconds != winner.seconds
    later = open_log(tmp_path / "probes.jsonl", resume=True, seconds=None, tell=lambda _: None)
    assert list(gemm.search("bf16", bench, later)) == [winner]


def test_triad_adds_three_times_one_array_to_another():
    call = memory.prepare("triad", 1024, CPU)
    b, c = call.args
    assert torch.equal(call(), torch.add(b, c, alpha=3.0))
    assert [(case.kind, case.bytes // case.shape["array_bytes"]) for case in memory.cases(small=True)] == [
        ("copy", 2),
        ("triad", 3),
        ("fill", 1),
    ]


@pytest.mark.parametrize(("ranks", "ending"), [(1, "over 1 rank"), (2, "over 2 ranks")])
def test_the_title_of_a_case_counts_its_ranks(ranks, ending):
    assert Case(kind="ddp_step", shape={"ranks": ranks}, dtype="bf16", prepare=lambda _: None).title.endswith(ending)
