"""What TPrimat answers to fixed questions, as documents of numbers and keys: each function makes the documents of one kind.

Only public commands are asked, in this process. `plain` removes what is volatile (paths, versions, times) or is worded (captions,
hints, labels), so that a document holds facts alone.
"""

import json
import re
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from commands import ROOT, run_command

HERE = Path(__file__).parent
RECORDS = ROOT / "benchmarks" / "records"
RUNS = ROOT / "tests" / "runs"

VOLATILE = {
    "path",
    "run_directory",
    "output_directory",
    "started_at",
    "ended_at",
    "engine_reason",
    "plan_version",
    "schema_version",
    "sha256",
}
"""Keys of where, when, and by which version."""
WORDED = {
    "words",
    "workload",
    "rule",
    "warnings",
    "remarks",
    "counted_as",
    "hint",
    "notes",
    "why_not",
    "label",
    "configuration",
    "sides",
    "source",
    "fix",
    "finding",
    "why",
    "reason",
    "name",
}
"""Keys whose values are sentences or names for readers. `PATHS` keeps some of them where they are facts."""
COUNTED = {"mismatches", "differences", "not_counted", "without_throughput", "left_out"}
"""Lists of sentences, of which only the number stays."""
YES_OR_NO = {"mfu_absent_because", "utilization_absent_because", "other_loss", "losses_open"}
"""Sentences, of which only stays whether there is one."""


def plain(value, keep=()):
    """A document without what is volatile, worded or absent.

    Args:
        value: what json.loads returned.
        keep: keys that stay although they are in VOLATILE or WORDED.
    """
    if isinstance(value, dict):
        clean = {}
        for key, inner in value.items():
            if key in COUNTED and isinstance(inner, list):
                clean[key] = len(inner) or None
            elif key in YES_OR_NO:
                clean[key] = bool(inner) or None
            elif key not in VOLATILE | WORDED or key in keep:
                clean[key] = plain(inner, keep)
        return {key: inner for key, inner in clean.items() if inner not in (None, [], {}, "")}
    if isinstance(value, list):
        return [plain(inner, keep) for inner in value]
    return without_places(value) if isinstance(value, str) else value


def without_places(text):
    """A text without folders, run ids of this call, Python's version and ports."""
    text = re.sub(r"(/[\w.+-]+)*/python[\d.]*", "PYTHON", text)
    text = text.replace(str(ROOT), "ROOT").replace(tempfile.gettempdir(), "TMP")
    return re.sub(r"TMP/\w+", "TMP", text)


# logs: a log of a framework, as ./extract_primus_metrics.py reads it.

H100, H200, MI300X = ("--gpu", "H100 SXM"), ("--gpu", "H200"), ("--gpu", "MI300X")
LLAMA, AUTO = ("--model-name", "llama"), ("--model-name", "auto")
EIGHT = ("--num-gpus", 8)
LOGS = {
    "deepspeed": (*LLAMA, *H200, "--sequence-length", 2048),
    "maxtext": (*LLAMA, *H100),
    "megatron_bridge": (*LLAMA, *H100),
    "megatron_bridge_2025": (*LLAMA, *H100),
    "megatron_bridge_nemo_run": (*LLAMA, *H100),
    "megatron_lm": (*LLAMA, *H200),
    "megatron_lm_2021": (*LLAMA, "--gpu", "A100 SXM 80GB", "--num-nodes", 8),
    "megatron_lm_bloom": (*LLAMA, "--gpu", "A100 SXM 80GB", "--num-gpus", 384, "--num-nodes", 48),
    "megatron_lm_interval10": (*LLAMA, *H200),
    "megatron_lm_mixtral": (*AUTO, *H100, "--num-nodes", 2),
    "nemo": (*LLAMA, *H100),
    "nemo_1": (*LLAMA, *H100, "--sequence-length", 4096),
    "primus_core_head": LLAMA,
    "primus_core_v26_2": LLAMA,
    "primus_core_v26_4_0": LLAMA,
    "primus_core_v26_5_0": LLAMA,
    "primus_core_v26_5_1": LLAMA,
    "primus_deepseek_v2_lite": AUTO,
    "primus_legacy_gb": LLAMA,
    "primus_legacy_gib": LLAMA,
    "primus_legacy_ratio": LLAMA,
    "primus_qwen3_30b_a3b": AUTO,
    "torchtitan": AUTO,
    "torchtitan_0_2": AUTO,
    "torchtitan_2026_08": AUTO,
    "torchtitan_primus": AUTO,
    "torchtitan_wps": (*LLAMA, *H200, "--global-batch-size", 64, "--sequence-length", 8192),
    "tprimat": LLAMA,
}
"""A log of tests/logs: the flags it is read with."""
ENDS = ("outcome", "cause")
"""What is not asked of a log whose end is misread: the steps before it are read well."""
WILD = {
    "earlier_attempt_out_of_memory": (ENDS, (*LLAMA, *H100)),
    "earlier_attempt_torchtitan": (ENDS, AUTO),
    "earlier_ignored_exception": (ENDS, (*LLAMA, *H100)),
    "earlier_node_failure_requeued": (ENDS, (*LLAMA, *H100)),
    "earlier_out_of_memory_then_time_limit": (ENDS, (*LLAMA, *H100)),
    "earlier_port_warning": (ENDS, (*LLAMA, *H100)),
    "ecc_root_cause_block": (ENDS, (*LLAMA, *H100, "--num-nodes", 2)),
    "maxtext_llama2_7b_2024": ((), ("--model-name", "llama-2-7b", *H100)),
    "nemo_memory_in_bytes": (
        ("peak_*", "raw_memory_values", "memory_*"),
        ("--model-name", "llama-3.1-8b", *H100, *EIGHT, "--sequence-length", 8192),
    ),
}
"""A log of the field: the keys that are read wrongly today and so are not asked for, and the flags it is read with."""


def log_record(log, flags, without=()):
    """The benchmark file that a log becomes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        done = run_command("extract_primus_metrics.py", "--log-file", log, "--output", file, *flags)
        if not file.exists():
            return {"status": done.returncode, "refused": done.stderr.splitlines()[0].replace(f"{log.parent}/", "")}
        document = plain(json.loads(file.read_text(encoding="utf8")), keep=("name",))
    document["run"].get("shape", {}).pop("source", None)
    return prune({"status": done.returncode, **document}, (*without, *(("status",) if without == ENDS else ())))


def prune(value, without):
    """A document without the keys of these patterns."""
    if isinstance(value, dict):
        return {key: prune(inner, without) for key, inner in value.items() if not any(fnmatch(key, one) for one in without)}
    return [prune(inner, without) for inner in value] if isinstance(value, list) else value


def logs():
    """The records of all logs."""
    for name, flags in LOGS.items():
        yield name, lambda name=name, flags=flags: log_record(ROOT / "tests" / "logs" / f"{name}.log", flags)
    for name, (without, flags) in WILD.items():
        path = HERE / "wild" / f"{name}.log"
        yield f"wild_{name}", lambda path=path, flags=flags, without=without: log_record(path, flags, without)


# compare, peak, scaling: analyses of recorded runs.

FOLDERS = {
    "h100_cuda_graphs": ["h100/cuda-graphs"],
    "h100_earlier": ["h100/earlier/megatron", "h100/earlier/transformer_engine"],
    "h100_in_turn": ["h100/in-turn/megatron", "h100/in-turn/transformer_engine"],
    "h100_in_turn_two_gpus": ["h100/in-turn-two-gpus"],
    "h100_in_turn_nemo": ["h100/in-turn-nemo"],
    "h200_repeated": ["h200/repeated"],
    "h200_short": ["h200/short"],
    "h200_context_parallel": ["h200/context-parallel"],
    "h200_engine": ["h200/engine", "h200/torchtitan", "h200/nemo"],
    "h200_fp8": ["h200/fp8", "h200/fp8-current-scaling"],
    "h200_fully_sharded": ["h200/fully-sharded"],
    "h200_in_turn_four_programs": ["h200/in-turn-four-programs"],
    "h200_moe": ["h200/moe"],
    "h200_switches": ["h200/switches/one"],
    "h200_two_gpus": ["h200/two-gpus"],
    "h200_whole_model": ["h200/whole-model-on-one-gpu"],
    "machines": ["h100/single", "h200/repeated/dp_mbs1"],
}
"""What is compared, below benchmarks/records."""
MADE = {
    "runs": (RUNS / "h100", RUNS / "mi300x"),
    "runs_even_if_different": (RUNS / "h100", RUNS / "mi300x", "--even-if-different"),
    "runs_with_foreign": (RUNS / "h100", RUNS / "foreign"),
    "published": (RUNS / "h100", RUNS / "published", "--flops", "full"),
}
"""The same of the small recorded runs of the tests."""


def questions():
    """The name and the arguments of each comparison."""
    named = {name: [RECORDS / folder for folder in folders] for name, folders in FOLDERS.items()}
    return {**named, **MADE}


def split(words):
    """Folders, and flags."""
    return [word for word in words if isinstance(word, Path)], [word for word in words if not isinstance(word, Path)]


def comparison(words):
    """What compare.py finds: metrics of each run, verdicts between groups, and the rankings."""
    folders, flags = split(words)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        done = run_command("compare.py", "--results-dir", *folders, *flags, "--format", "json", "--output", file, cwd=folder)
        if not file.exists():
            return {"status": done.returncode, "runs that count": 0}
        document = json.loads(file.read_text(encoding="utf8"))
    first = {group["label"]: group["runs"][0]["run_id"] for group in document["groups"]}
    for verdict in document["verdicts"]:
        verdict.update({side: first[verdict[side]] for side in ("baseline", "candidate")}, evidence=None)
    for ranking in document["rankings"]:
        ranking["fastest_first"] = [first[label] for label in ranking["fastest_first"]]
    return {"status": done.returncode, **plain(document)}


def compare():
    """All comparisons."""
    for name, words in questions().items():
        yield name, lambda words=words: comparison(words)


PEAKS = {
    "h200_repeated": [RECORDS / "h200/repeated"],
    "h200_moe": [RECORDS / "h200/moe", "--flops", "6n"],
    "h200_and_h100": [RECORDS / "h200/short", RECORDS / "h100/single", RECORDS / "h100/in-turn"],
    "runs": [RUNS / "h100", RUNS / "mi300x", "--cost-per-gpu-hour", "2.5"],
    "seed_conventions": [RUNS / "h100", RUNS / "mi300x", "--seed-conventions"],
    "sparse": [RUNS / "h100", RUNS / "foreign", "--peak", "sparse", "--nodes", "1,4"],
}


def peak_document(words):
    """What analyze_peak_throughput.py finds."""
    folders, flags = split(words)
    with tempfile.TemporaryDirectory() as folder:
        done = run_command("analyze_peak_throughput.py", "--results-dir", *folders, *flags, "--json", cwd=folder)
    return {"status": done.returncode, **plain(json.loads(done.stdout), keep=("counted_as",) if flags else ())}


def peak():
    """All peaks."""
    for name, words in PEAKS.items():
        yield name, lambda words=words: peak_document(words)


SCALINGS = {
    "h200": sorted(path for path in (RECORDS / "h200").iterdir() if path.is_dir()),
    "h200_engine": [RECORDS / "h200/engine", RECORDS / "h200/two-gpus/engine", RECORDS / "h200/one-gpu"],
    "table": ["--table", ROOT / "tests" / "tables" / "throughput_scaling.csv"],
}


def scaling_document(words):
    """What `tprimat scaling` finds."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_command("scaling", *words, "--format", "json", "--output", folder, cwd=folder)
    return {"status": done.returncode, "series": plain(json.loads(done.stdout))}


def scaling():
    """All scaling series."""
    for name, words in SCALINGS.items():
        yield name, lambda words=words: scaling_document(words)


# plan: layouts of 8 models on 6 machines, with their predicted memory and time.

MODELS = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "qwen-2.5-7b",
    "qwen3-32b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
)
MACHINES = {
    "8 H100": ("H100 SXM", 8),
    "16 H200": ("H200 SXM", 16),
    "8 MI300X": ("MI300X", 8),
    "8 A100": ("A100 SXM 80GB", 8),
    "8 B200 in fp8": ("B200", 8, "--precision", "fp8"),
    "8 GB200": ("GB200", 8, "--sequence-length", 4096),
}
SHOWN = 5
"""Layouts that are kept whole, the fastest; of the others, sums that move with any of them."""


def layouts(rows):
    """The fastest layouts, and of all of them the number, the sums, and a sum that moves with the order."""
    document = {"number": len(rows), "first": plain(rows[:SHOWN])}
    for key in ("device_bytes", "missing_bytes", "step_seconds", "tokens_per_second_per_gpu"):
        values = [row.get(key) or 0 for row in rows]
        document[f"sum of {key}"] = sum(values)
        document[f"sum of place x {key}"] = sum(place * value for place, value in enumerate(values, 1))
    return document


def plan_document(model):
    """The layouts of a model on each machine."""
    document = {}
    for name, (accelerator, gpus, *flags) in MACHINES.items():
        words = ("--architecture", model, "--accelerator", accelerator, "--gpus", gpus, *flags, "--json")
        done = run_command("plan", *words)
        answer = json.loads(done.stdout)
        answer.update({key: layouts(answer[key]) for key in ("fitting", "too_large")})
        document[name] = {"status": done.returncode, **plain(answer)}
    return document


def plan():
    """All plans."""
    for model in MODELS:
        yield model.replace(".", "_"), lambda model=model: plan_document(model)


KINDS = {"logs": logs, "compare": compare, "peak": peak, "scaling": scaling, "plan": plan}
"""In each folder, one file for each document."""
