"""The accelerator page is made from records alone."""

import re
from dataclasses import replace

import pytest

from tprimat.core.flops import seed_shapes
from tprimat.records.schema import Machine, ProbeRecord
from tprimat.report.probes import SECTIONS, SMALL_SIZES, on_a_screen, page
from tprimat.report.tables import Screen

H200 = {"platform": "cuda", "accelerator": "NVIDIA H200", "nodes": 1, "driver": "580.1", "power_limit_watts": 700.0}


def probe(kind, shape, median, *, ranks=1, **changes):
    fields = {
        "kind": kind,
        "shape": shape,
        "dtype": "bf16",
        "seconds": (median,) * 8,
        "machine": Machine(**H200, gpus_per_node=ranks, memory_bytes=140 * 2**30),
        "software": {"torch": "2.11.0"},
        "started_at": "2026-01-02T10:00:00+00:00",
    }
    return ProbeRecord(**fields | changes)


def product(m, k, n, rate, *, variant="torch.matmul", **changes):
    flop = 2 * m * k * n
    return probe("gemm", {"m": m, "k": k, "n": n}, flop / rate, flop=flop, variant=variant, **changes)


def step(kind, ranks, tokens_a_second):
    shape = {"layers": 32, "heads": 32, "hidden": 4096, "ffn": 11008, "parameters": 5_243_000_000, "batch": 8, "sequence": 1024}
    return probe(
        kind,
        shape | {"ranks": ranks},
        8 * 1024 * ranks / tokens_a_second,
        ranks=ranks,
        variant="7B",
        flop=6 * 5_243_000_000 * 8 * 1024 * ranks,
        peak_allocated_bytes=100 * 2**30,
    )


RECORDS = [
    *(product(*shape, 700e12 + number * 1e12) for number, shape in enumerate(seed_shapes().values())),
    product(8192, 8192, 8192, 800e12, variant="F.linear"),
    product(8192, 8192, 8192, 1400e12, variant="scaled_mm tensor-wise", dtype="fp8"),
    product(12288, 8192, 8192, 790e12, variant="torch.matmul searched"),
    probe("gemm_search", {"m": 64, "k": 64, "n": 64}, 1.0, variant="torch.matmul", flop=1),
    *(
        probe(
            kind, {"m": 8192, "k": 8192, "n": 8192, "round": number}, 1.5e-3 + number * 1e-5, variant="torch.matmul", flop=10**12
        )
        for number in (1, 2, 3)
        for kind in ("gemm_warm", "gemm_sustained")
    ),
    probe("model_gemm", {"m": 8192, "k": 4096, "n": 6144, "tensor_parallel": 1}, 1e-3, variant="llama qkv", flop=4 * 10**11),
    probe("attention_forward", {"batch": 4, "sequence": 8192}, 1e-3, variant="cudnn", flop=5 * 10**11),
    probe(
        "attention_forward", {"batch": 4, "sequence": 8192}, 1e-3, variant="math", seconds=(), error="OutOfMemoryError: 64 GiB"
    ),
    probe("copy", {"array_bytes": 2**32}, 2e-3, bytes=2**33),
    probe("all_reduce", {"message_bytes": 2**30, "ranks": 4}, 4e-3, ranks=4, bytes=2**30, variant="NCCL"),
    probe("mlp_step", {"batch": 256, "weights": 134217728}, 2.06e-3, flop=6 * 256 * 134217728),
    step("transformer_step", 1, 18381),
    step("ddp_step", 1, 18324),
    step("ddp_step", 4, 62813),
]


@pytest.fixture(scope="module")
def text():
    return page(RECORDS)


FIGURES = """\
| bf16 | (16384, 3584, 8192) | feed-forward 2 | 1.36 ms ± 0.0 % | 8 | 706.0 TFLOP/s | 71.4 % |
| gemm | bf16 | F.linear | – | 800.0 TFLOP/s | 80.9 % |
| (8192, 8192, 8192) | 701.0 TFLOP/s | 800.0 TFLOP/s |
| forward | 8,192 | 500.0 TFLOP/s |
- math bf16 at 8,192: OutOfMemoryError: 64 GiB
| copy | 4 GiB | 2.00 ms ± 0.0 % | 4.29 TB/s | 89.5 % |
| all_reduce | NCCL | 4 | 1 GiB | 4.00 ms ± 0.0 % | 268 GB/s | 403 GB/s |
| 134,217,728 | 256 | 8 | 124,272 |
| 7B | 5,243,000,000 | 8 | 1,024 | 18,381 | 578.2 TFLOP/s |
| 7B | 4 | 8 | 62,813 | 1,976.0 TFLOP/s | 100.0 GiB | 85.7 % |
578.2 TFLOP/s | 578.2 TFLOP/s | 58.4 % | 72.3 % | 100.0 GiB |
| all_reduce | bf16 | NCCL | 4 | 403 GB/s | – |
| power limit | 700 W |
| devices used (maximum) | 4 |"""


def test_every_section_and_figure_is_there_in_whole_tables(text):
    for section in SECTIONS:
        assert (f"\n## {section['title']}\n" in text) == (section["title"] != "Parts of a training step")
    assert [figure for figure in FIGURES.splitlines() if figure not in text] == []
    widths = [[line.count("|") for line in block.splitlines()] for block in text.split("\n\n") if block.startswith("|")]
    assert len(widths) >= 10
    assert all(len(set(counts)) == 1 for counts in widths)


def test_what_was_not_measured_has_no_section():
    assert "## Attention" not in page(RECORDS[:1])


def test_on_a_screen_the_tables_are_aligned_text_that_fits():
    out = on_a_screen(RECORDS, Screen())
    assert re.search(r"^dtype +\(m, k, n\) +description +median time +n +rate +of dense peak$", out, re.MULTILINE)
    assert not re.search(r"^\||\*\*|^#|`", out, re.MULTILINE)
    narrow = on_a_screen(RECORDS, Screen(width=80))
    assert max(map(len, narrow.splitlines())) <= 80
    assert "of dense peak" in narrow


def test_a_page_of_a_processor_names_its_clock_and_cautions_of_small_sizes():
    cpu = replace(RECORDS[0], machine=Machine(platform="cpu", accelerator=None, nodes=1, gpus_per_node=1))
    assert "device events, and peaks are the dense peaks" in page(RECORDS)
    assert "the host's clock" in page([cpu])
    assert SMALL_SIZES in page([cpu])
    assert SMALL_SIZES not in page([replace(cpu, small=False)])
    assert "## Summary" not in page([cpu])
