#!/usr/bin/env python3
"""Time the algorithms that cuBLASLt offers for each product of a layer, under load, beside the one that torch runs. One GPU.

python3 benchmarks/product_algorithms.py --output output/product-algorithms.json
python3 benchmarks/product_algorithms.py --time-limit 580    where a command may take ten minutes: repeat it

In training a GPU is often at its power limit, and its clock falls with the energy that a product needs. cuBLASLt's first choice
may then not be the fastest. Each product runs back to back for a moment before it is timed: every algorithm briefly; then torch's
call, cuBLASLt's first choice and the fastest few for longer, in turn. Each result is compared with torch's. Energy is the GPU's
own counter over the longer timings. Training with `tuned_products: false` runs torch's call, and the first choice for fp8 weight
gradients.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from tprimat.core.flops import gemm_shapes  # noqa: E402
from tprimat.core.models import model_shape  # noqa: E402
from tprimat.hardware.gpus import open_nvml  # noqa: E402
from tprimat.megatron import cublaslt  # noqa: E402
from tprimat.records.store import json_document, write_atomically  # noqa: E402
from tprimat.report.tables import table  # noqa: E402

Call = Callable[[], object]
MOST_ALGORITHMS = 16
FIRST = "0"
"""cuBLASLt's own first choice."""
FINALISTS = 3
BRIEF, LONG = (0.1, 0.2), (0.2, 0.6)
"""Seconds to settle, and to measure."""
LONG_ROUNDS = 3
OUTPUT_ROWS = 4096
"""Of the output layer: a piece of the streamed loss."""


@dataclass(frozen=True)
class Candidate:
    """One product of a layer: what cuBLASLt is asked, and torch's call for the same."""

    name: str
    product: cublaslt.Product
    torch_call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    """Of total, a and b, both as they are stored; it writes or adds to the total."""
    adds: bool = False


def candidates(model: str, rows: int, *, fp8: bool) -> list[Candidate]:
    """Return forward product, dgrad and wgrad of each matrix, as the embedded engine runs them."""
    shape, found = model_shape(model), []
    for matrix in gemm_shapes(shape, 1, rows):
        if matrix.name == "output" and fp8:
            continue
        m, k, n = (min(matrix.m, OUTPUT_ROWS) if matrix.name == "output" else matrix.m), matrix.k, matrix.n
        found += fp8_products(matrix.name, m, k, n) if fp8 else bf16_products(matrix.name, m, k, n)
    return found


def bf16_products(name: str, m: int, k: int, n: int) -> list[Candidate]:
    """Return the three products of rows (m, k) and a weight (n, k)."""
    low, high = torch.bfloat16, torch.float32

    def forward(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> object:
        return torch.mm(a, b.t(), out=total)

    def dgrad(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> object:
        return torch.mm(a, b, out=total)

    def wgrad(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> object:
        return torch.addmm(total, a.t(), b, out_dtype=high, out=total)

    return [
        Candidate(f"{name} fprop", cublaslt.Product(m, n, k, low, low, low), forward),
        Candidate(f"{name} dgrad", cublaslt.Product(m, k, n, low, low, low, b_transposed=False), dgrad),
        Candidate(
            f"{name} wgrad",
            cublaslt.Product(n, k, m, low, low, high, a_transposed=True, b_transposed=False),
            wgrad,
            adds=True,
        ),
    ]


def fp8_products(name: str, m: int, k: int, n: int) -> list[Candidate]:
    """Return the same in 8 bits, where both operands have the summed dimension contiguous.

    torch cannot add to fp32: its weight gradient is rounded to bf16, and a second kernel adds it.
    """
    rows, gradient, low = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16

    def multiply(fast: bool, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> object:
        one = unit(a.device)
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=low, use_fast_accum=fast, out=total)

    def multiply_and_add(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> object:
        one = unit(a.device)
        return total.add_(torch._scaled_mm(a, b.t(), one, one, out_dtype=low, use_fast_accum=False))

    scaled = partial(cublaslt.Product, scaled=True)
    return [
        Candidate(f"{name} fprop", scaled(m, n, k, rows, rows, low, fast=True), partial(multiply, True)),
        Candidate(f"{name} dgrad", scaled(m, k, n, gradient, rows, low), partial(multiply, False)),
        Candidate(f"{name} wgrad", scaled(n, k, m, gradient, rows, torch.float32), multiply_and_add, adds=True),
    ]


@cache
def unit(device: torch.device) -> torch.Tensor:
    """Return the factor of unscaled numbers, made once: a kernel that fills it would be timed with each product."""
    return torch.ones((), device=device)


def operands_of(product: cublaslt.Product, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normal numbers in the layout that a product wants."""

    def make(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(dtype)

    m, n, k = product.m, product.n, product.k
    a = make(*((k, m) if product.a_transposed else (m, k)), product.a)
    b = make(*((n, k) if product.b_transposed else (k, n)), product.b)
    return a, b


def timed(call: Call, settle: float, seconds: float, energy: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds and joules of a call, one of many in a row that take about `seconds`."""
    torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < settle:
        for _ in range(8):
            call()
        count += 8
        torch.cuda.synchronize()
    times = max(8, round(count / (time.perf_counter() - began) * seconds))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = energy()
    start.record()
    for _ in range(times):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / times, (energy() - before) / times


def measure(candidate: Candidate, energy: Callable[[], float]) -> dict[str, Any]:
    """Return what each algorithm of a product takes."""
    device, product = torch.device("cuda", 0), candidate.product
    a, b = operands_of(product, device)
    total = torch.zeros(product.m, product.n, device=device, dtype=product.total)
    prepared = cublaslt.prepare(0, product, MOST_ALGORITHMS)
    if product.scaled:
        cublaslt.set_scales(prepared, unit(device), unit(device))
    candidate.torch_call(total, a, b)
    expected = total.clone()
    beta = 1.0 if candidate.adds else 0.0
    calls: dict[str, Call] = {"torch": partial(candidate.torch_call, total, a, b)}
    for choice in range(len(prepared.algorithms)):
        total.zero_()
        cublaslt.run(prepared, total, (a, b), choice=choice)
        if not torch.allclose(total.float(), expected.float(), rtol=2e-2, atol=2e-2 * expected.float().abs().max().item()):
            raise SystemExit(f"{candidate.name}: algorithm {choice} computes something else")
        calls[str(choice)] = partial(cublaslt.run, prepared, total, (a, b), choice=choice, beta=beta)
    brief = {name: timed(call, *BRIEF, energy)[0] for name, call in calls.items()}
    best = sorted((name for name in brief if name != "torch"), key=lambda name: brief[name])[:FINALISTS]
    long: dict[str, list[tuple[float, float]]] = {name: [] for name in ("torch", FIRST, *best)}
    for _ in range(LONG_ROUNDS):
        for name, timings in long.items():
            timings.append(timed(calls[name], *LONG, energy))
    return {
        "m": product.m,
        "n": product.n,
        "k": product.k,
        "brief_seconds": brief,
        "algorithms": {
            name: {"seconds": [one for one, _ in timings], "joules": [other for _, other in timings]}
            for name, timings in long.items()
        },
    }


def energy_counter() -> Callable[[], float]:
    """Return a function that reads the joules which the first GPU has used since its driver was loaded."""
    nvml = open_nvml()
    device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3


def line(name: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table: median times of torch, the first choice and the best, and how many times as fast the best is."""
    middle = {key: statistics.median(one["seconds"]) for key, one in found["algorithms"].items()}
    best = min((key for key in middle if key != "torch"), key=lambda key: middle[key])
    times = [f"{middle[key] * 1e3:.3f} ms" for key in ("torch", FIRST, best)]
    return [name, *times, f"{middle['torch'] / middle[best]:.3f}", f"{middle[FIRST] / middle[best]:.3f}", best]


def begun(output: Path, here: dict[str, str]) -> dict[str, Any]:
    """Return what an earlier call measured with the same GPU and torch, or an empty document; others' figures are not mixed."""
    document = json_document(output.read_bytes(), output) if output.exists() else {**here, "products": {}}
    theirs = {key: document.get(key) for key in here} if isinstance(document, dict) else {}
    if theirs != here or not isinstance(document.get("products"), dict):
        raise SystemExit(f"error: {output} is of {theirs or 'something else'}, and here is {here}: choose another --output")
    return document


HEADER = ["product", "torch", "first choice", "best", "torch / best", "first / best", "rank of the best, from 0"]


def main() -> None:
    """Measure what is missing in the output file, write it after each product, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/product-algorithms.json"))
    parser.add_argument("--model", default="llama-3.1-8b", metavar="NAME")
    parser.add_argument("--rows", type=int, default=8192, metavar="N", help="tokens of a micro-batch (8192)")
    parser.add_argument("--fp8", action="store_true", help="8-bit products")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="begin no product after it")
    options = parser.parse_args()
    began = time.monotonic()
    if not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU here")
    document = begun(options.output, {"accelerator": torch.cuda.get_device_name(), "torch": torch.__version__})
    energy, longest = energy_counter(), 0.0
    for candidate in candidates(options.model, options.rows, fp8=options.fp8):
        name = f"{options.model} {candidate.name}, {options.rows} rows, {'fp8' if options.fp8 else 'bf16'}"
        if name in document["products"] or time.monotonic() - began + longest > options.time_limit:
            continue
        start = time.monotonic()
        document["products"][name] = measure(candidate, energy)
        torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - start)
        write_atomically(options.output, json.dumps(document, indent=1) + "\n")
    print(table(HEADER, [line(name, found) for name, found in document["products"].items()], left=1))


if __name__ == "__main__":
    main()
