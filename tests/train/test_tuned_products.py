"""Which algorithm wins a race, and that all of them compute the same product: on a GPU, and on a CPU by a small cuBLASLt."""

import ctypes
import random
import shutil
import subprocess
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tprimat.megatron import cublaslt, fp8
from tprimat.megatron.tuned_products import PLAIN, TRANSPOSED_ROWS, TRANSPOSED_WEIGHT, Race, Tuner, tunes_on

ON_GPU = pytest.mark.skipif(not tunes_on(torch.device("cuda")), reason="needs an NVIDIA GPU")
HAS_FP8_GPU = torch.cuda.is_available() and fp8.multiplies_fp8(torch.device("cuda"))


def raced(true_seconds, noise, seed, late=0):
    """Run a race whose timings scatter, and arrive some calls late; return it and the number of calls it took."""
    generator, race, under_way = random.Random(seed), Race(len(true_seconds)), deque()
    for calls in range(1, 1000):
        runner = race.start()
        under_way.append((runner, true_seconds[runner] * generator.gauss(1, noise)))
        if len(under_way) > late:
            race.finish(*under_way.popleft())
        if race.winner is not None:
            return race, calls
    raise AssertionError("the race did not end")


@pytest.mark.parametrize("late", [0, 7, 60])
def test_the_fastest_wins_although_timings_scatter_and_come_late(late):
    seconds = [1.0, 1.1, 1.01, 0.96, 1.3, 1.02, 1.05, 1.0]
    winners = [raced(seconds, 0.01, seed, late)[0].winner for seed in range(40)]
    assert winners == [3] * 40


def test_the_first_choice_stays_where_no_other_is_clearly_faster():
    winners = [raced([1.0, 1.002, 0.998, 1.2], 0.003, seed)[0].winner for seed in range(40)]
    assert winners == [0] * 40


def test_slow_ones_cost_few_calls():
    race, calls = raced([1.0, *[1.2] * 7], 0.005, 1)
    assert race.winner == 0
    assert calls < 60


def test_a_slow_first_call_of_an_algorithm_does_not_count():
    race, seconds = Race(2), [1.0, 0.9]
    seen = set()
    while race.winner is None:
        runner = race.start()
        race.finish(runner, seconds[runner] if runner in seen else 50.0)
        seen.add(runner)
    assert race.winner == 1


def test_one_algorithm_needs_no_race():
    assert Race(1).winner == 0


def test_a_cpu_computes_by_torch():
    tuner = Tuner()
    tuner.on = True
    assert not tunes_on(torch.device("cpu"))
    assert tuner.run(torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)) is None


def operands(form, m=256, n=512, k=1024, device="cuda"):
    torch.manual_seed(0)
    a = torch.randn(m, k, device=device).bfloat16()
    b = torch.randn(k, n, device=device).bfloat16()
    stored = (a.t().contiguous() if form.a_transposed else a, b.t().contiguous() if form.b_transposed else b)
    return stored, a.float() @ b.float()


def until_decided(tuner, call):
    """Call until every race is over, and once more; return all results that came from cuBLASLt."""
    results = []
    for _ in range(600):
        results.append(call())
        torch.cuda.synchronize()
        if results[-1] is None:
            break
    return [result for result in results if result is not None]


@ON_GPU
@pytest.mark.parametrize("form", [PLAIN, TRANSPOSED_WEIGHT, TRANSPOSED_ROWS])
def test_every_algorithm_of_the_race_computes_the_product(form):
    (a, b), expected = operands(form)
    tuner = Tuner()
    tuner.on = True
    for result in until_decided(tuner, lambda: tuner.run(a, b, form=form)):
        assert torch.allclose(result.float(), expected, rtol=0.02, atol=0.3)


@ON_GPU
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_every_algorithm_adds_to_what_is_there(beta):
    (a, b), expected = operands(TRANSPOSED_ROWS)
    tuner = Tuner()
    tuner.on = True

    def call():
        total = torch.full_like(expected, 3.0 if beta else torch.nan)
        return tuner.run(a, b, total, form=TRANSPOSED_ROWS, alpha=0.5, beta=beta)

    for result in until_decided(tuner, call):
        assert torch.allclose(result, 0.5 * expected + 3.0 * beta, rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(not HAS_FP8_GPU, reason="needs a GPU that multiplies 8-bit numbers")
@pytest.mark.parametrize("fast", [False, True])
def test_every_algorithm_multiplies_8_bit_numbers(fast):
    x, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((256, 1024), (512, 1024)))
    (a, _, a_scale), (b, _, b_scale) = (fp8.convert(one, fp8.FORWARD_DTYPE) for one in (x, w))
    expected = (a.float() * a_scale) @ (b.float() * b_scale).t()
    tuner = Tuner()
    tuner.on = True
    form = fp8.FAST if fast else TRANSPOSED_WEIGHT
    for result in until_decided(tuner, lambda: tuner.run(a, b, form=form, scales=(a_scale, b_scale))):
        assert torch.allclose(result.float(), expected, rtol=0.02, atol=0.5)


@ON_GPU
def test_odd_addresses_gaps_and_other_dtypes_are_left_to_torch():
    (a, b), expected = operands(TRANSPOSED_WEIGHT)
    tuner = Tuner()
    tuner.on = True
    room = torch.empty(a.numel() + 8, device="cuda", dtype=torch.bfloat16)
    for offset, tuned in ((8, True), (3, False)):
        moved = room[offset : offset + a.numel()].view_as(a).copy_(a)
        result = tuner.run(moved, b)
        assert (result is not None) == tuned
        assert result is None or torch.allclose(result.float(), expected, rtol=0.02, atol=0.3)
    assert tuner.run(a[:, ::2], b[:, ::2]) is None
    assert tuner.run(a.float(), b.float()) is None


# The same calls on a CPU, where a small library in C computes what cuBLASLt is asked for.

STREAM = 4711
FASTEST = 5


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True

    def new_empty(self, shape, dtype):
        return aligned(torch.Size(shape), dtype).as_subclass(OnDevice)


class Clock:
    """An event of a device on which one algorithm takes nine tenths of the others' time."""

    def __init__(self, enable_timing):
        self.library = None

    def record(self):
        self.algorithm = ctypes.c_int.in_dll(cublaslt.library(), "last_algorithm").value

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.9 if end.algorithm == FASTEST else 1.0


@pytest.fixture(scope="module")
def small_library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to make a small cuBLASLt with")
    made = tmp_path_factory.mktemp("cublaslt") / "small.so"
    source = Path(__file__).with_name("small_cublaslt.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, source, "-lm"], check=True)
    return cublaslt.with_types(ctypes.CDLL(str(made)))


@pytest.fixture
def tuner(small_library, monkeypatch):
    workspace = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(cublaslt, "library", lambda: small_library)
    monkeypatch.setattr(cublaslt, "_handle", lambda _: ctypes.c_void_p(1))
    monkeypatch.setattr(cublaslt, "_workspace", lambda _: workspace)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    cublaslt.prepare.cache_clear()
    made = Tuner()
    made.on = True
    yield made
    cublaslt.prepare.cache_clear()


def aligned(shape, dtype):
    """Memory as a GPU's allocator gives it."""
    room = torch.empty(shape.numel() * dtype.itemsize + 256, dtype=torch.uint8)
    begin = -room.data_ptr() % 256
    return room[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def on_device(*tensors):
    return [one.as_subclass(OnDevice) for one in tensors]


@pytest.mark.parametrize("form", [PLAIN, TRANSPOSED_WEIGHT, TRANSPOSED_ROWS])
def test_what_cublaslt_is_asked_is_the_product(tuner, form):
    (a, b), expected = operands(form, 24, 40, 56, device="cpu")
    result = tuner.run(*on_device(a, b), form=form)
    assert torch.allclose(result.as_subclass(torch.Tensor).float(), expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_what_is_there_is_kept_or_overwritten(tuner, beta):
    (a, b), expected = operands(TRANSPOSED_ROWS, 24, 40, 56, device="cpu")
    total = torch.full((24, 40), 3.0 if beta else torch.nan)
    tuner.run(*on_device(a, b, total), form=TRANSPOSED_ROWS, alpha=0.5, beta=beta)
    assert torch.allclose(total, 0.5 * expected + 3.0 * beta, rtol=1e-3, atol=1e-3)


def test_8_bit_products_are_scaled_back(tuner):
    x, gradient = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16() * 1e-6
    (a, _, a_scale), (b, _, b_scale) = fp8.convert(gradient, fp8.GRADIENT_DTYPE), fp8.convert(x, fp8.FORWARD_DTYPE)
    result = tuner.run(*on_device(a, b), scales=(a_scale, b_scale))
    expected = (a.float() * a_scale) @ (b.float() * b_scale).t()
    assert torch.allclose(result.as_subclass(torch.Tensor).float(), expected, rtol=0.01, atol=1e-8)
    total = torch.ones(48, 32)
    cublaslt.accumulate(total, (a, a_scale), (b, b_scale), overwrite=False)
    assert torch.allclose(total, 1 + expected, rtol=1e-4, atol=1e-9)


def test_training_settles_on_the_fastest_algorithm(tuner, small_library):
    (a, b), _ = operands(TRANSPOSED_WEIGHT, 8, 16, 32, device="cpu")
    ran = []
    for _ in range(100):
        assert tuner.run(*on_device(a, b)) is not None
        ran.append(ctypes.c_int.in_dll(small_library, "last_algorithm").value)
    assert set(ran[:8]) == set(range(8)), "each has its turn"
    assert set(ran[-30:]) == {FASTEST}


def test_addresses_and_layouts_that_no_algorithm_was_asked_for_are_left_to_torch(tuner):
    (a, b), expected = operands(TRANSPOSED_WEIGHT, 24, 40, 56, device="cpu")
    room = aligned(torch.Size([a.numel() + 8]), torch.bfloat16)
    for offset, tuned in ((0, True), (8, True), (3, False)):
        moved = room[offset : offset + a.numel()].view_as(a).copy_(a)
        result = tuner.run(*on_device(moved, b))
        assert (result is not None) == tuned
        assert result is None or torch.allclose(result.as_subclass(torch.Tensor).float(), expected, rtol=0.01, atol=0.05)
    assert tuner.run(*on_device(a[:, ::2], b[:, ::2])) is None
    assert tuner.run(*on_device(a.float(), b.float())) is None


def test_shapes_that_never_repeat_are_left_to_torch_in_the_end(tuner):
    weight = torch.randn(16, 16).bfloat16()
    results = [tuner.run(*on_device(torch.ones(rows, 16).bfloat16(), weight)) for rows in range(1, 150)]
    assert sum(result is not None for result in results) == 128
    assert results[-1] is None
