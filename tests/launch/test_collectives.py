"""Who is missing from which collective. flight_records.json holds what torch 2.13 with gloo recorded on four ranks that hung."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from a_launch import wait_for

from tprimat.launch.hang import RankRecord, missing_ranks, parse_record, read_record, take_records

RECORDED = json.loads((Path(__file__).parent / "flight_records.json").read_text())


def records(case, silent=()):
    return [RankRecord(rank=d["rank"], places=None) if d["rank"] in silent else parse_record(d) for d in RECORDED[case]]


MISSING = {
    "rank 1 sleeps before an all_gather": "Rank 1 has not entered all_gather number 4 of {}, in which ranks 0, 2 and 3 wait.",
    # in which rank 0 is not, so that 2 and 3 wait too
    "rank 1 sleeps before an all_reduce of ranks 0 and 1": "Rank 1 has not entered all_reduce number 2 of the group of ranks 0 "
    "and 1, in which rank 0 waits.",
    # gloo does not record messages
    "rank 0 waits for a message of rank 1, which sleeps": "Ranks 0 and 1 have not entered all_reduce number 4 of {}, in which "
    "ranks 2 and 3 wait.",
    "rank 1 sleeps, the others have begun three all_reduces": "Rank 1 has not entered all_reduce number 4 of {}, in which ranks "
    "0, 2 and 3 wait.",
    "rank 1 sleeps before a barrier": "Rank 1 has not entered barrier number 4 of {}, in which ranks 0, 2 and 3 wait.",
}


@pytest.mark.parametrize("case", MISSING)
def test_the_rank_that_is_missing_is_named(case):
    assert missing_ranks(records(case)) == MISSING[case].format("group default_pg")


def test_a_rank_that_does_not_answer_is_not_said_to_be_absent():
    sentence = missing_ranks(records("rank 1 sleeps before a barrier", silent=[1]))
    assert sentence == "Rank 1 does not answer, of barrier number 4 of group default_pg, in which ranks 0, 2 and 3 wait."


def nccl(rank, *calls, members=(0, 1, 2, 3), counts=None):
    """A record in the form of torch's NCCL recorder: calls are (group, number, operation, state)."""
    entries = [
        {
            "process_group": [group, description],
            "collective_seq_id": number,
            "is_p2p": operation in {"send", "recv"},
            "profiling_name": f"nccl:{operation}",
            "retired": False,
            "state": state,
            "time_created_ns": 1,
        }
        for (group, description), number, operation, state in calls
    ]
    recorder = {
        "entries": entries,
        "pg_config": {group: {"ranks": json.dumps(members)} for (group, _), *_ in calls},
        "pg_status": {group: {"last_enqueued_collective": str(count)} for group, count in (counts or {}).items()},
    }
    return parse_record({"rank": rank, "taken_ns": 10**10, "groups": {}, "recorders": [recorder]})


DATA, TENSOR = ("1", "DATA"), ("2", "TENSOR")


def test_of_groups_that_wait_for_each_other_the_rank_that_waits_for_nobody_is_named():
    tensor = [
        nccl(0, (DATA, 7, "all_reduce", "completed"), (TENSOR, 3, "all_gather", "started"), members=(0, 1)),
        nccl(1, (DATA, 7, "all_reduce", "completed"), (TENSOR, 2, "all_gather", "completed"), members=(0, 1)),
    ]
    data = [nccl(rank, (DATA, 8, "all_reduce", "scheduled")) for rank in (2, 3)]
    assert missing_ranks(tensor + data) == "Rank 1 has not entered all_gather number 3 of group TENSOR, in which rank 0 waits."


def test_a_deadlock_names_both_sides():
    first = nccl(0, (DATA, 1, "all_reduce", "started"), members=(0, 1))
    second = nccl(1, (TENSOR, 1, "barrier", "started"), members=(0, 1))
    assert missing_ranks([first, second]) == (
        "Rank 1 has not entered all_reduce number 1 of group DATA, in which rank 0 waits. "
        "Rank 0 has not entered barrier number 1 of group TENSOR, in which rank 1 waits."
    )


def test_a_rank_whose_recorder_has_forgotten_a_group_is_known_by_its_count():
    waiting = [nccl(rank, (DATA, 5, "all_reduce", "started"), members=(0, 1, 2)) for rank in (0, 1)]
    ahead = nccl(2, (TENSOR, 9000, "all_gather", "completed"), counts={"1": 5, "2": 9000})
    behind = nccl(2, (TENSOR, 9000, "all_gather", "completed"), counts={"1": 4, "2": 9000})
    assert "Rank 2 has not entered" in missing_ranks([*waiting, behind])
    assert missing_ranks([*waiting, ahead]) is None


UNKNOWN = {"rank": 1, "taken_ns": 5, "groups": {}, "recorders": [{"entries": [{"a field": "of a later version"}]}]}


@pytest.mark.parametrize("text", ["", "[]", '{"rank": 1}', json.dumps(UNKNOWN)])
def test_a_file_that_torch_writes_otherwise_one_day_is_no_answer(tmp_path, text):
    (tmp_path / "rank-1.json").write_text(text)
    assert read_record(tmp_path / "rank-1.json", 1) == RankRecord(rank=1, places=None)


def test_a_process_that_does_not_wait_for_the_signal_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True); import time; time.sleep(60)"]) as process:
        try:
            wait_for(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes())
            assert take_records({0: process.pid}, tmp_path) == []
            assert process.poll() is None
        finally:
            process.kill()
