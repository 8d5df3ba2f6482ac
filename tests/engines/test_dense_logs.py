"""Logs of hundreds of thousands of steps: read many lines at once, kept as rows, with the result of the slow way."""

import random

import numpy as np
import pytest

from tprimat.logs import steps as collecting
from tprimat.logs.bulk import line_pattern
from tprimat.logs.extract import assemble
from tprimat.logs.parse import LogReading, find_dialect
from tprimat.logs.steps import Collection, Workload
from tprimat.records import table

STEPS = 6000
SHORT = " iteration {:8d}/  900000 | elapsed time per iteration (ms): {:.1f} | learning rate: {:.6E} | lm loss: {:.6E} |"
FULL = (
    " [2026-08-22 07:39:11] iteration {0:8d}/  900000 | consumed samples: 256 | elapsed time per iteration (ms): {1:.1f} | "
    "throughput per GPU (TFLOP/s/GPU): 355.4 | learning rate: {2:.6E} | global batch size:   128 | lm loss: {3:.6E} | "
    "loss scale: 1.0 | grad norm: 7.499 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
AVERAGED = (
    " iteration {0:8d}/  900000 | elapsed time per iteration (ms): {1:.1f}/{1:.1f} | learning rate: {2:.6E} | lm loss: {3:.6E} |"
)


def log_of(shape, first=1, count=STEPS, seed=0):
    draw = random.Random(seed)
    return [
        shape.format(step, 3000 + 50 * draw.random(), 1e-5 / step, 11 - 8 * step / count) for step in range(first, first + count)
    ]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a short log fills several."""
    monkeypatch.setattr(table, "BLOCK", 512)
    monkeypatch.setattr(table, "KEPT_BYTES", 8192)


def swapped(lines, **changes):
    made = list(lines)
    for place, text in changes.items():
        made[int(place[1:])] = text
    return made


def slowly(lines):
    said = Collection()
    for number, line in enumerate(lines, 1):
        if fields := find_dialect("megatron-lm").read_line(line):
            said.add(fields, number)
    return said


def quickly(lines, batch=1500):
    reading = LogReading(name="x")
    for start in range(0, len(lines), batch):
        reading.add(lines[start : start + batch])
    return reading.said


def line(step, text="lm loss: 2.0 |"):
    return f" iteration {step}/  900000 | elapsed time per iteration (ms): 3000.0 | learning rate: 1.0E-05 | {text}"


LOGS = {
    "short": log_of(SHORT),
    "full": log_of(FULL),
    "averaged": log_of(AVERAGED),
    "noise": [text for step in log_of(SHORT) for text in (step, *(("saving checkpoint",) if "00/" in step else ()))],
    "doubled": [text for step in log_of(FULL) for text in (step, step)],
    "repeated": log_of(FULL) * 2,
    "restarted": log_of(FULL) + log_of(FULL, first=3000, seed=1),
    "begun again": log_of(FULL) + log_of(FULL, seed=1),
    "nan": swapped(log_of(SHORT), x4000=line(4001, "lm loss: nan |")),
    "torn": swapped(log_of(SHORT), x4000=" iteration 4001/  900000 | elapsed time per iter", x4200=line("9" * 30)),
    "another batch": swapped(log_of(FULL), x4000=log_of(FULL)[4000].replace("size:   128", "size:   256")),
    "skipped": swapped(log_of(FULL), x4000=log_of(FULL)[4000].replace("skipped iterations:   0", "skipped iterations:   1")),
    "gap": log_of(SHORT, count=2000) + log_of(SHORT, first=4000, count=2000),
    "a late report": [*log_of(SHORT), "[Rank 0] (after 2 iterations) memory (MB) | allocated: 5.0 | max allocated: 40970.5"],
    "a report": [
        *log_of(SHORT)[:2],
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 5.0 | max allocated: 40970.5 | max reserved: 45056.0",
        *log_of(SHORT)[2:],
    ],
}


@pytest.mark.parametrize("name", LOGS)
def test_many_lines_at_once_say_what_single_lines_say(name, monkeypatch):
    fast = quickly(LOGS[name])
    monkeypatch.setattr(collecting, "OPEN_STEPS", 1 << 40)
    slow = slowly(LOGS[name])
    workload = Workload(gpus=8, global_batch_sequences=128, sequence_tokens=4096)
    made, wanted = assemble(fast, workload), assemble(slow, workload)
    assert list(made.steps) == list(wanted.steps)
    assert made.notes == wanted.notes
    assert made.evidence == wanted.evidence
    assert (fast.restarts, fast.total_steps, fast.newest, len(fast)) == (slow.restarts, slow.total_steps, slow.newest, len(slow))
    assert fast.first_line == slow.first_line


def test_dense_logs_really_go_the_fast_way(monkeypatch):
    fast = quickly(LOGS["short"])
    assert len(fast.rows) > 0.9 * STEPS
    said = []
    monkeypatch.setattr(
        Collection, "add", lambda self, fields, line, add=Collection.add: (said.append(line), add(self, fields, line))
    )
    quickly(LOGS["full"])
    assert len(said) < 0.1 * STEPS


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        " iteration 1/ 2 | lm loss: 1.0 |",
        AVERAGED.format(1, 1.0, 1.0, 1.0),
        "\x1b[32m iteration 1/ 2 | elapsed time per iteration (ms): 1.0 |",
        " iteration 1/ 2 | elapsed time per iteration (ms): 1.0 | tokens per GPU (tokens/s/GPU): 4 |",
        " iteration 1/ 2 | elapsed time per iteration (ms): 1.0 | lm loss: 1.0 | lm loss: 2.0 |",
    ],
)
def test_other_lines_are_left_to_the_slow_way(text):
    assert line_pattern(text) is None


def test_what_is_kept_of_a_long_log_is_small():
    said = quickly(LOGS["full"])
    assert len(said.steps) < 300
    assert np.concatenate([rows["step"] for rows in said.blocks()]).tolist() == list(range(1, STEPS + 1))
