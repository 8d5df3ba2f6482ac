"""tprimat trace as a user starts it."""

import json

from commands import run_command

STEP = {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 50000, "pid": 0, "tid": 7}
GEMM = {"ph": "X", "cat": "kernel", "name": "nvjet_tst_192x192", "ts": 0, "dur": 30000, "pid": 0, "tid": 7}
NCCL = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 25000, "dur": 15000, "pid": 0, "tid": 13}
ORIGIN = {"model": "llama", "platform": "cuda", "strategy": "balanced", "rank": 0, "step_of_profiler_step_0": 1}


def command(*arguments):
    return run_command("trace", *arguments)


def write_trace(path):
    path.write_text(json.dumps({"tprimat": ORIGIN, "traceEvents": [STEP, GEMM, NCCL]}))
    return path


def test_the_tables_say_what_a_step_is_spent_on(tmp_path):
    done = command(write_trace(tmp_path / "trace.json"))
    assert done.returncode == 0, done.stderr
    assert "cuda, llama, balanced, rank 0: step 2 (n = 1, 50.0 ms)" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["matmul", "30.0", "ms", "60.0", "%", "30.0", "ms", "1"] in rows
    assert ["communication,", "exposed", "10.0", "ms", "20.0", "%", "15.0", "ms", "1"] in rows
    assert ["idle", "10.0", "ms", "20.0", "%", "–", "–"] in rows
    assert "communication runs for 15.0 ms, waiting for other ranks included; 10.0 ms of it (66.7 %) exposed" in done.stdout
    assert "nvjet_tst_192x192" in done.stdout


def test_json_holds_every_number_in_seconds(tmp_path):
    document = json.loads(command(write_trace(tmp_path / "trace.json"), "--json").stdout)
    assert document["step_seconds"] == 0.05
    assert abs(document["exposed_communication_seconds"] - 0.01) < 1e-12
    assert [row["kind"] for row in document["top"]] == ["matmul", "communication"]


def test_a_folder_stands_for_its_traces(tmp_path):
    (tmp_path / "empty").mkdir()
    write_trace(tmp_path / "profile_cuda_llama_1.json")
    write_trace(tmp_path / "profile_cuda_llama_2.json")
    assert command(tmp_path).stdout.count("nvjet_tst_192x192") == 2
    done = command(tmp_path / "empty", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: There is no trace in {tmp_path / 'empty'}.")
    assert "try   --set profiling.enabled=true" in done.stderr
