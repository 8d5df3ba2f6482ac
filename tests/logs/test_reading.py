"""Properties of log reading: values come back as printed, no text raises, and the cuts between batches do not matter."""

import dataclasses
import gzip
import math
import time

import pytest
from a_log import iterations, reading_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tprimat.core import limits
from tprimat.core.errors import RecordError
from tprimat.logs import lines as log_lines
from tprimat.logs.contents import Claims
from tprimat.logs.failures import classify
from tprimat.logs.lines import LogLines
from tprimat.logs.parse import DIALECTS, NAMES, LogReading, dialect_of
from tprimat.logs.read import parsed_log, sequence_from_rates
from tprimat.records.store import to_json

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_all(path):
    reading = LogReading(name="train.log")
    for batch in LogLines(path=str(path)).batches():
        reading.add(batch)
    return reading.contents.steps


def test_a_flipped_bit_of_a_gzip_file_changes_no_step_unsaid(tmp_path):
    lines = iterations(1, [2.0 + number / 7 for number in range(12)])
    good, path = gzip.compress("\n".join([*lines, ""]).encode(), mtime=0), tmp_path / "train.log"
    path.write_bytes(good)
    whole, refused = read_all(path), 0
    for bit in range(80, 8 * len(good), 7):  # the header holds nothing that counts
        path.write_bytes(bytes(byte ^ (1 << bit % 8) * (place == bit // 8) for place, byte in enumerate(good)))
        log = LogLines(path=str(path))
        try:
            for _ in log.batches():
                pass
            assert log.why_truncated or read_all(path) == whole, bit
        except RecordError as error:
            refused += "is a damaged gzip file" in error.what
    assert refused > len(good) // 2


def test_a_gzip_file_that_unpacks_to_far_more_than_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "FREE_OF_RATIO", 0)
    path = tmp_path / "train.log"
    path.write_bytes(gzip.compress(b" " * 10**6))
    with pytest.raises(RecordError, match="unpacks to far more than text does"):
        read_all(path)


def decimals(low, high, places):
    return st.decimals(low, high, places=places).map(str)


VALUES = st.fixed_dictionaries(
    {
        "step": st.integers(1, 10**7),
        "more": st.integers(0, 10**6),
        "ms": decimals(1, 10**6, 1),
        "loss": decimals(0, 20, 5),
        "norm": decimals(0, 100, 3),
        "rate": decimals(0, 1, 6),
        "batch": st.integers(1, 999),
        "tokens": st.integers(1, 10**6),
        "samples": decimals("0.1", 10**4, 2),
        "memory": decimals(0, 200, 2),
    }
)
MEGATRON = (
    " iteration {step:8d}/ {total:8d} | consumed samples: 256 | elapsed time per iteration (ms): {ms} | "
    "throughput per GPU (TFLOP/s/GPU): 355.4 | learning rate: {rate} | global batch size: {batch:5d} | lm loss: {loss} | "
    "loss scale: 1.0 | grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
LINES = {
    "primus": (
        "[\x1b[32m20260822 07:39:10\x1b[0m][\x1b[36mrank-7/8\x1b[0m][INFO ] [--trainer.py:429] :"
        + MEGATRON.replace("{ms} |", "{ms}/1.0 | hip mem usage/free/total/usage_ratio: {memory}GB/1.0GB/191.98GB/1% |")
        + "\x1b[0m"
    ),
    "megatron-bridge": MEGATRON.replace("throughput per GPU (TFLOP/s/GPU)", "MODEL_TFLOP/s/GPU"),
    "megatron-lm": " [2026-08-22 07:39:11]" + MEGATRON,
    "tprimat": " [tprimat 2026-08-22 07:39:11]" + MEGATRON,
    "nemo": (
        "Training epoch 0, iteration {before}/{last} | lr: {rate} | global_batch_size: {batch} | global_step: {before} | "
        "grad_norm: {norm} | peak_memory_usage: {tokens} | reduced_train_loss: {loss} | train_step_timing in s: {ms}"
    ),
    "torchtitan": (
        "[titan] 2025-01-01 00:00:00,000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss}  "
        "\x1b[38mgrad_norm: {norm}  \x1b[34mmemory: {memory}GiB(61.90%)  \x1b[36mtps: {tokens:,}  "
        "tflops: 1,000.00  mfu: 25.00%\x1b[39m"
    ),
    "maxtext": (
        "completed step: {before}, seconds: {ms}, TFLOP/s/device: 100.1, Tokens/s/device: {tokens}.0, total_weights: 65536, "
        "loss: {loss}"
    ),
    "deepspeed": (
        "[2025-01-01 00:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step={step}/global_step={step}, "
        "RunningAvgSamplesPerSec=1.0, CurrSamplesPerSec={samples}, MemAllocated=1.0GB, MaxMemAllocated={memory}GB"
    ),
}
SECONDS = {"step_seconds": ("ms", 1e-3)}
COMMON = {"loss": ("loss", 1), "grad_norm": ("norm", 1), "learning_rate": ("rate", 1)}
BATCH = {"global_batch_sequences": ("batch", 1)}
TOKENS = {"tokens_per_second_per_gpu": ("tokens", 1)}
READ = {
    "primus": SECONDS | COMMON | BATCH,
    "megatron-bridge": SECONDS | COMMON | BATCH,
    "megatron-lm": SECONDS | COMMON | BATCH,
    "tprimat": SECONDS | COMMON | BATCH,
    "nemo": {"step_seconds": ("ms", 1), "peak_allocated_bytes": ("tokens", 1)} | COMMON | BATCH,
    "torchtitan": {"loss": ("loss", 1), "grad_norm": ("norm", 1), "peak_reserved_bytes": ("memory", 2**30)} | TOKENS,
    "maxtext": {"step_seconds": ("ms", 1), "loss": ("loss", 1)} | TOKENS,
    "deepspeed": {"sequences_per_second": ("samples", 1), "peak_allocated_bytes": ("memory", 2**30)},
}
"""Field of a logged step -> the value that was printed, and the printed unit in SI units."""


def printed(dialect, values):
    total = values["step"] + values["more"]
    return LINES[dialect].format(**values, total=total, before=values["step"] - 1, last=total - 1).split("\n")


def read_batches(dialect, batches):
    reading = reading_of(batches[0] if batches else [], dialect)
    for batch in batches[1:]:
        reading.add(batch)
    return reading


@pytest.mark.parametrize("dialect", NAMES)
@quick
@given(values=VALUES)
def test_a_step_reads_back_as_printed(dialect, values):
    if dialect == "maxtext":  # whose second and third step have no time
        values |= {"step": values["step"] + 3}
    lines = printed(dialect, values)
    assert dialect_of(lines[0]).name == dialect
    step = read_batches(None, [lines]).contents.steps[values["step"]]
    read = {name: getattr(step, name) for name in READ[dialect]}
    expected = {name: float(values[key]) * unit for name, (key, unit) in READ[dialect].items()}
    assert read == {name: round(value) if name.startswith("peak") else pytest.approx(value) for name, value in expected.items()}
    others = {"tokens_per_second_per_gpu", "sequences_per_second", "peak_allocated_bytes", "peak_reserved_bytes"} - set(read)
    assert [getattr(step, name) for name in others] == [None] * len(others)
    assert step.finite


WORDS = sorted(
    {word for dialect in DIALECTS for sign in dialect.signs for word in sign}
    | {part for line in LINES.values() for part in line.replace("|", ",|,").split(",")}
    | {mark for dialect in DIALECTS if dialect.name != "megatron-bridge" for mark in dialect.rules}
    | {
        "(after 2 iterations) memory (MB) |",
        "(after 2 iterations) memory (GB) |",
        "data-parallel size: ",
        "  world_size ......... ",
    }
    | {
        "seq_length: ",
        "tp : 1 (int)",
        "Config param steps: ",
        "['dp'], [4 2]",
        "['dp', 'tp'], [",
        "dp_shard=",
        "MEMBER: 1/",
        "[[0",
    }
    | {"nan", "-inf", "1e308", "9" * 5000, "-1", "0", "1", "2/", " | ", "]", "\x1b[0m", "CUDA capacity: H100 with 79.1GiB memory"}
)
TEXT = st.lists(st.sampled_from(WORDS) | st.text(max_size=8) | st.integers().map(str), max_size=12).map("".join)


CLAIMS = st.builds(
    Claims,
    gpus=st.none() | st.integers(1, 10**6),
    global_batch_sequences=st.none() | st.integers(1, 10**6),
    sequence_tokens=st.none() | st.integers(1, 10**7),
)


@settings(quick, max_examples=100)
@given(dialect=st.sampled_from([None, *NAMES]), lines=st.lists(TEXT, max_size=6), claims=CLAIMS)
def test_no_text_raises(dialect, lines, claims):
    contents = read_batches(dialect, [lines]).contents
    sequence_from_rates(contents, claims.gpus)
    for step in parsed_log(contents, claims)[0]:
        to_json(step)
        assert 0 < step.step_seconds < math.inf


LONG = 40_000
FEW_SECONDS = 2.0
"""What a pattern that looks at a long line once per character exceeds many times over."""


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
def test_a_long_line_takes_no_time(dialect):
    long = [piece * LONG for piece in ("a", "1", " ")]
    marks = {read: mark for mark, read in dialect.rules.items()}.values()
    lines = [text for mark in marks for piece in long for text in (piece + mark, f"{mark}{piece} .. memory:")]
    started = time.process_time()
    for line in lines:
        dialect.read_line(line)
    assert time.process_time() - started < FEW_SECONDS


@pytest.mark.parametrize("line", ["[x] " + " " * LONG + "z", "A." * LONG, "[rank0]: " + "ValueError: " * LONG])
def test_the_cause_of_a_failure_is_looked_for_in_long_lines_too(line):
    started = time.process_time()
    classify(1, ["Traceback (most recent call last):", line, "RuntimeError: no"], ())
    assert time.process_time() - started < FEW_SECONDS


EXAMPLE = {
    "more": 0,
    "ms": "3000.5",
    "loss": "2.5",
    "norm": "0.5",
    "rate": "0.1",
    "batch": 64,
    "tokens": 4096,
    "samples": "25.5",
    "memory": "3.0",
}
OTHER_LINES = st.sampled_from(["", "an Error", "saving checkpoint", "Training completed.", "after training is done", *WORDS])
MOVES = st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 2), st.lists(OTHER_LINES, max_size=2)), min_size=1, max_size=12)


def log_of(dialect, moves):
    """Lines of a log that repeats lines and goes back, with other lines in between."""
    step, lines = 1, []
    for move, repeats, others in moves:
        step = max(1, step + move)
        lines += printed(dialect, {**EXAMPLE, "step": step, "loss": f"{len(lines)}.5"}) * repeats + others
    return lines


@pytest.mark.parametrize("dialect", NAMES)
@quick
@given(moves=MOVES, places=st.lists(st.floats(0, 1), max_size=5))
def test_the_cuts_between_batches_do_not_matter(dialect, moves, places):
    lines = log_of(dialect, moves)
    cuts = sorted(int(place * len(lines)) for place in places)
    batches = [lines[start:end] for start, end in zip([0, *cuts], [*cuts, len(lines)], strict=True)]
    whole, cut = read_batches(None, [lines]), read_batches(None, batches)
    for field in dataclasses.fields(LogReading):
        assert repr(getattr(cut, field.name)) == repr(getattr(whole, field.name)), field.name


@quick
@example(content="", size=1, packed=True)
@given(content=st.lists(TEXT | st.text(max_size=4), max_size=20).map("\n".join), size=st.integers(1, 40), packed=st.booleans())
def test_the_size_of_chunks_does_not_matter(content, size, packed, tmp_path, monkeypatch):
    path = tmp_path / "train.log"
    data = (content.replace("\0", " ") + "\n").encode("utf8", "replace")
    path.write_bytes(gzip.compress(data) if packed else data)
    whole = LogLines(path=str(path))
    expected = [line for batch in whole.batches() for line in batch]
    with monkeypatch.context() as patch:
        patch.setattr(log_lines, "CHUNK_BYTES", size)
        cut = LogLines(path=str(path))
        assert [line for batch in cut.batches() for line in batch] == expected
    assert (cut.sha256, cut.why_truncated) == (whole.sha256, whole.why_truncated)
