"""Logs of the field get their right answers: how the last attempt ended and why, of which device, with which numbers.

Reduced from public logs and reports, which docs/engines.md lists; some have a public wording between lines that are made up.
"""

import re
from pathlib import Path

from commands import run_command

from tprimat.logs.parse import LogReading

HERE = Path(__file__).parent
FOLDERS = (HERE / "wild", HERE.parent / "goldens" / "wild")
LLAMA, H100 = ("--model-name", "llama"), ("--gpu", "H100 SXM")
BOTH, EIGHT = (*LLAMA, *H100), ("--num-gpus", 8)
GOES_ON = (0, "interrupted: The log ends after step 12 of 100", "8,488 tokens/s/GPU")
FULL, MAIN = (1, "out of memory: The ", "lower --micro-batch-size"), (1, "out of memory: The machine ran out of main memory.")
REJECTS = (1, "failed: The framework rejects the configuration: ", "./validate_config.py lists what is valid")
ATTEMPT = "attempt 1 of 2: "
ANSWERS = (
    (
        "earlier_attempt_torchtitan",
        ("--model-name", "auto"),
        0,
        "ends after step 80",
        "40,928 tokens/s/GPU",
        ATTEMPT,
        "on node01",
    ),
    ("earlier_port_warning", BOTH, *GOES_ON),
    ("earlier_attempt_out_of_memory", BOTH, *GOES_ON, f"{ATTEMPT}out of memory before its first step"),
    ("earlier_out_of_memory_then_time_limit", BOTH, 1, "timed out: The scheduler ended the job at its time limit.", ATTEMPT),
    ("earlier_ignored_exception", BOTH, *GOES_ON),
    ("earlier_microbatch_warning", BOTH, 2, "interrupted: The log ends after step 12 of 30", "a log of Composer"),
    ("earlier_microbatch_warning_then_time_limit", BOTH, 1, "timed out: The scheduler ended", "a log of Composer"),
    ("earlier_node_failure_requeued", BOTH, *GOES_ON, f"{ATTEMPT}failed after step 4: The scheduler lost a node", "node01"),
    ("oom_triton", (*BOTH, "--num-gpus", 64, "--num-nodes", 8), *FULL),
    ("oom_nccl_calloc", (*BOTH, *EIGHT), *FULL),
    ("oom_xla", BOTH, *FULL),
    ("oom_npu", (*BOTH, *EIGHT), *FULL, "it tried to allocate 26.44 GiB on NPU 2, where 25.36 GiB of 60.96 GiB were free"),
    ("oom_async_allocator", BOTH, *FULL),
    ("oom_xpu", BOTH, *FULL),
    ("oom_transformer_engine", BOTH, *FULL),
    ("oom_ray_host", BOTH, *MAIN),
    ("layout_expert_world_size", (*BOTH, "--num-gpus", 4), *REJECTS),
    ("layout_distopt_shards", (*BOTH, *EIGHT), *REJECTS),
    (
        "deepep_timeout_then_watchdog",
        (*BOTH, "--num-gpus", 512, "--num-nodes", 64),
        1,
        "(DeepEP) timed out, first on rank 428, 390.",
    ),
    ("deepep_timeout_check", (*BOTH, *EIGHT), 1, "(DeepEP) timed out, first on rank 6, 2.", "look at the network"),
    ("torchtitan_t4", (*LLAMA, "--gpu", "RTX 4090"), 2, "--gpu RTX 4090 contradicts the log: it shows 14.56 GiB on a device"),
    (
        "torchtitan_rate_only",
        ("--model-name", "qwen3_moe", "--gpu", "H200 SXM", *EIGHT),
        0,
        "ends after step 10",
        "6,566 tokens/s/GPU",
    ),
    ("maxtext_tpu_v5", ("--model-name", "deepseek-v2-lite", *H100, "--global-batch-size", 96), 2, "it shows tpu", "train.log:2"),
    ("hip_251_gib", BOTH, 2, "--gpu H100 SXM contradicts the log: it shows 252 GiB on a device", "train.log:1"),
    ("torchtitan_xpu", LLAMA, 2, "llama-3.1-8b has 8,030,261,248 parameters, the log counts 1,703,462,912"),
    ("megatron_tokens_per_second", (*BOTH, "--num-gpus", 16, "--num-nodes", 4), 0, "2,646 tokens/s/GPU", "4,096 tokens"),
    (
        "primus_escape_bytes_lost",
        ("--model-name", "llama-3.1-8b", "--gpu", "MI325X"),
        0,
        "8 GPUs (MI325X)",
        "10,002 tokens/s/GPU",
    ),
    ("primus_escape_bytes_lost", ("--model-name", "llama-3.1-70b", "--gpu", "MI325X"), 2, "are those of 57.9 GFLOP a token"),
    (
        "megatron_6_44_billion",
        ("--model-name", "llama-2-7b", *H100, *EIGHT, "--sequence-length", 2048),
        *(2, "parameters_in_billions is 6.44 in the log and 6.74 in the model"),
    ),
    ("deepspeed_minimum_loss_scale", (*LLAMA, "--gpu", "V100 SXM2 32GB", "--num-gpus", 4), 1, "diverged: "),
    ("automodel_out_of_memory", (*BOTH, *EIGHT), 1, "out of memory: The GPU", "on GPU 3", "a log of NeMo Automodel"),
    ("ecc_root_cause_block", (*BOTH, "--num-nodes", 2), 1, "uncorrectable ECC", "rank 11 (local_rank: 3) on node07 failed first"),
    ("exception_line_alone", BOTH, *REJECTS, "Invalid parallel dims"),
    ("maxtext_llama2_7b_2024", ("--model-name", "auto", *H100), 0, "llama-2-7b", "8 GPUs (H100 SXM)"),
)
"""A log, the flags it is read with, the exit status, and what is said."""


def test_every_log_gets_its_right_answer(tmp_path):
    wrong = []
    for name, flags, status, *says in ANSWERS:
        text = next(folder / f"{name}.log" for folder in FOLDERS if (folder / f"{name}.log").exists()).read_text(encoding="utf8")
        (tmp_path / "train.log").write_text(text, encoding="utf8")
        done = run_command("extract_primus_metrics.py", "--log-file", tmp_path / "train.log", *flags)
        said = re.sub(r"outcome (.+?) cause ", r"\1: ", " ".join(f"{done.stdout} {done.stderr}".split()))
        said = re.sub(r" (?:\[[^]]*\]|\(n = \d+\)) tokens/s/GPU", " tokens/s/GPU", said)
        wrong += [] if done.returncode == status and all(words in said for words in says) else [f"{name}: {said}"]
        assert "exit code" not in said, name
    assert not wrong, "\n".join(wrong)


def test_every_log_has_an_answer():
    assert {path.stem for path in FOLDERS[0].glob("*.log")} <= {name for name, *_ in ANSWERS}


def test_the_docs_have_a_row_for_every_log_under_the_framework_that_wrote_it():
    page = (HERE.parents[1] / "docs" / "engines.md").read_text(encoding="utf8").partition("## Logs that prove the readers")[2]
    rows = {log: name for name, log in re.findall(r"^\| ([^|]+) \| (\w+) \|", page, re.M)}
    logs = {path.stem: path for folder in (HERE, *FOLDERS) for path in folder.glob("*.log")}
    assert rows.keys() - {"log"} == logs.keys()
    for name, path in logs.items():
        reading = LogReading(name=name)
        reading.add(path.read_text(encoding="utf8").splitlines())
        wrote = reading.dialect.name if reading.dialect else "any"
        assert rows[name].lower().startswith((wrote, "composer", "nemo automodel")), name
