"""What TPrimat answers to fixed questions, as documents of numbers and keys: each function makes the documents of one kind.

Public commands are asked, in this process, and of an export its rows. `plain` removes what is volatile (paths, versions, times)
or is worded (captions, hints, labels), so that a document holds facts alone.
"""

import base64
import gzip
import itertools
import json
import re
import shlex
import tempfile
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path

import yaml
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
"""Keys of sentences, or of names for readers, where the value is text."""
COUNTED = {"mismatches", "differences", "not_counted", "without_throughput", "left_out"}
"""Lists of sentences, of which only the number stays."""
YES_OR_NO = {"mfu_absent_because", "utilization_absent_because", "other_loss", "losses_open"}
"""Sentences, of which only stays whether there is one."""


def plain(value, keep=()):
    """A document without what is volatile, worded or absent.

    Args:
        value: what json.loads returned.
        keep: keys that stay all the same.
    """
    if isinstance(value, dict):
        clean = {}
        for key, inner in value.items():
            if key in COUNTED and isinstance(inner, list):
                clean[key] = len(inner) or None
            elif key in YES_OR_NO:
                clean[key] = bool(inner) or None
            elif key in keep or not (key in VOLATILE or (key in WORDED and is_text(inner))):
                clean[key] = plain(inner, keep)
        return {key: inner for key, inner in clean.items() if inner not in (None, [], {}, "")}
    if isinstance(value, list):
        return [plain(inner, keep) for inner in value]
    return without_places(value) if isinstance(value, str) else value


def is_text(value):
    """Whether a value is a text, or a list of them."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def without_places(text):
    """A text without folders, run ids of this call, Python's version and ports."""
    text = re.sub(r"(/[\w.+-]+)*/python[\d.]*", "PYTHON", text)
    text = text.replace(str(ROOT), "ROOT")
    return re.sub(re.escape(tempfile.gettempdir()) + r"/\w+", "TMP", text)


# logs: a log of a framework, as ./extract_primus_metrics.py reads it.

H100, H200, MI300X = ("--gpu", "H100 SXM"), ("--gpu", "H200"), ("--gpu", "MI300X")
LLAMA, AUTO = ("--model-name", "llama"), ("--model-name", "auto")
LOGS = {
    "deepspeed": (*LLAMA, *H200, "--sequence-length", 2048),
    "megatron_bridge_non_default": ("--model-name", "qwen3-30b-a3b", "--gpu", "B200", "--num-gpus", 8),
    "megatron_lm": (*LLAMA, *H200),
    "megatron_lm_interval10": (*LLAMA, *H200),
    "megatron_lm_mixtral": (*AUTO, *H100, "--num-nodes", 2),
    "torchtitan_wps": (*LLAMA, "--gpu", "NVIDIA H100 96GB", "--global-batch-size", 64, "--sequence-length", 8192),
}
ON_H100 = ("maxtext", "megatron_bridge", "megatron_bridge_2025", "megatron_bridge_nemo_run", "nemo")
SAY_ALL = ("primus_core_head", "primus_legacy_gb", "primus_legacy_gib", "primus_legacy_ratio", "tprimat")
SAY_ALL += tuple(f"primus_core_v26_{version}" for version in ("2", "4_0", "5_0", "5_1"))
SHOW_THE_MODEL = ("primus_deepseek_v2_lite", "primus_qwen3_30b_a3b", "torchtitan_primus")
SHOW_THE_MODEL += ("torchtitan", "torchtitan_0_2", "torchtitan_2026_08")
LOGS |= dict.fromkeys(ON_H100, (*LLAMA, *H100)) | dict.fromkeys(SAY_ALL, LLAMA) | dict.fromkeys(SHOW_THE_MODEL, AUTO)
"""A log of tests/logs: the flags it is read with."""
WILD = {
    answer["log"]: tuple(shlex.split(answer["flags"]))
    for answer in yaml.safe_load((ROOT / "tests" / "logs" / "wild" / "answers.yaml").read_text(encoding="utf8"))
    if (HERE / "wild" / f"{answer['log']}.log").exists()
}
"""A log of the field: the flags it is read with."""


def log_record(log, flags):
    """The benchmark file that a log becomes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        done = run_command("extract_primus_metrics.py", "--log-file", log, "--output", file, *flags)
        if not file.exists():
            return {"status": done.returncode, "refused": done.stderr.splitlines()[0].replace(f"{log.parent}/", "")}
        document = plain(json.loads(file.read_text(encoding="utf8")), keep=("name",))
    return {"status": done.returncode, **document}


def prune(value, without):
    """A document without the keys of these patterns."""
    if isinstance(value, dict):
        return {key: prune(inner, without) for key, inner in value.items() if not any(fnmatch(key, one) for one in without)}
    return [prune(inner, without) for inner in value] if isinstance(value, list) else value


def logs():
    """The records of all logs."""
    for name, flags in LOGS.items():
        yield name, partial(log_record, ROOT / "tests" / "logs" / f"{name}.log", flags)
    for name, flags in WILD.items():
        yield f"wild_{name}", partial(log_record, HERE / "wild" / f"{name}.log", flags)


def each(answer, questions):
    """The names of questions, each with a call that makes its document."""
    return lambda: ((name, partial(answer, question)) for name, question in questions.items())


# compare, peak, scaling: analyses of recorded runs.

FOLDERS = {
    "h100_earlier": ["h100/earlier/megatron", "h100/earlier/transformer_engine"],
    "h100_in_turn": ["h100/in-turn/megatron", "h100/in-turn/transformer_engine"],
    "h200_engine": ["h200/engine", "h200/torchtitan", "h200/nemo"],
    "h200_fp8": ["h200/fp8", "h200/fp8-current-scaling"],
    "h200_switches": ["h200/switches/one"],
    "h200_whole_model": ["h200/whole-model-on-one-gpu"],
    "machines": ["h100/single", "h200/repeated/dp_mbs1"],
}
for name in ("h100/cuda-graphs", "h100/in-turn-two-gpus", "h100/in-turn-nemo", "h200/in-turn-four-programs", "h200/two-gpus"):
    FOLDERS[name.replace("/", "_").replace("-", "_")] = [name]
for name in ("repeated", "short", "context-parallel", "fully-sharded", "moe"):
    FOLDERS[f"h200_{name.replace('-', '_')}"] = [f"h200/{name}"]
"""What is compared, below benchmarks/records."""
COMPARED = {name: [RECORDS / folder for folder in folders] for name, folders in FOLDERS.items()} | {
    "runs": (RUNS / "h100", RUNS / "mi300x"),
    "runs_even_if_different": (RUNS / "h100", RUNS / "mi300x", "--even-if-different"),
    "runs_with_foreign": (RUNS / "h100", RUNS / "foreign"),
    "published": (RUNS / "h100", RUNS / "published", "--set", "flops=full"),
}
"""The arguments of each comparison; the last ones of the small recorded runs of the tests."""


def split(words):
    """Folders, and flags."""
    return [word for word in words if isinstance(word, Path)], [word for word in words if not isinstance(word, Path)]


def comparison(words):
    """What compare.py finds: metrics of each run, verdicts between groups, and the rankings."""
    folders, flags = split(words)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        done = run_command("compare.py", "--results-dir", *folders, *flags, "--output", file, cwd=folder)
        if not file.exists():
            return {"status": done.returncode, "runs that count": 0}
        document = json.loads(file.read_text(encoding="utf8"))
    first = {group["label"]: group["runs"][0]["run_id"] for group in document["groups"]}
    for verdict in document["verdicts"]:
        verdict.update({side: first[verdict[side]] for side in ("baseline", "candidate")}, evidence=None)
    for ranking in document["rankings"]:
        ranking["fastest_first"] = [first[label] for label in ranking["fastest_first"]]
    return {"status": done.returncode, **plain(document)}


PEAKS = {
    "h200_repeated": [RECORDS / "h200/repeated"],
    "h200_moe": [RECORDS / "h200/moe", "--set", "flops=6n"],
    "h200_and_h100": [RECORDS / "h200/short", RECORDS / "h100/single", RECORDS / "h100/in-turn"],
    "runs": [RUNS / "h100", RUNS / "mi300x", "--set", "cost_per_gpu_hour=2.5"],
    "sparse": [RUNS / "h100", RUNS / "foreign", "--set", "peak=sparse", "--nodes", "1,4"],
}


def peak_document(words):
    """What analyze_peak_throughput.py finds."""
    folders, flags = split(words)
    with tempfile.TemporaryDirectory() as folder:
        done = run_command("analyze_peak_throughput.py", "--results-dir", *folders, *flags, "--json", cwd=folder)
    return {"status": done.returncode, **plain(json.loads(done.stdout), keep=("counted_as",) if flags else ())}


SCALINGS = {"h200": [RECORDS / "h200" / name for name in ("engine", "two-gpus", "one-gpu", "repeated", "torchtitan")]}


def scaling_document(words):
    """What `tprimat scaling` finds."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_command("scaling", *words, "--format", "json", "--output", folder, cwd=folder)
    return {"status": done.returncode, "series": plain(json.loads(done.stdout))}


# plan: layouts of 8 models on 3 of 6 machines each, with their predicted memory and time.

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
    "8 H200 in 2 nodes": ("H200 SXM", 8, "--nodes", 2),
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
    """The layouts of a model on every second machine, beginning with the first or the second in turn."""
    document = {}
    for name, (accelerator, gpus, *flags) in list(MACHINES.items())[MODELS.index(model) % 2 :: 2]:
        words = ("--model", model, "--gpu", accelerator, "--gpus", gpus, *flags, "--json")
        done = run_command("plan", *words)
        answer = json.loads(done.stdout)
        answer.update({key: layouts(answer[key]) for key in ("fitting", "too_large")})
        document[name] = {"status": done.returncode, **plain(answer)}
    return document


# report: the data that the HTML page draws.

REPORTS = {
    "runs": [RUNS / "h100", RUNS / "mi300x", RUNS / "cpu"],
    "older_files": [RUNS / "foreign", RUNS / "published"],
    "h100_in_turn_nemo": [RECORDS / "h100/in-turn-nemo"],
    "h200_fully_sharded": [RECORDS / "h200/fully-sharded", RECORDS / "h200/context-parallel"],
    "h200_repeated": [RECORDS / "h200/repeated"],
}


def report_document(folders):
    """Groups in the order of the page with their curves and bars."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_command("report", *folders, "--output", f"{folder}/page.html", cwd=folder)
        page = Path(folder, "page.html").read_text(encoding="utf8")
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page)[1]
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    series = [{**run, "curves": len(run["curves"])} for group in data["groups"] for run in group["runs"]]
    return {
        "status": done.returncode,
        "groups": [{"work": group["work"], "runs": [run["name"] for run in group["runs"]]} for group in data["groups"]],
        "series": series,
        "curves": [run["curves"] for group in data["groups"] for run in group["runs"][:1]],
        "bars": [[[row["value"], row["low"], row["high"]] for row in bars["rows"]] for bars in data["bars"]],
    }


# export: every recorded run as a row.

FACTS = """
model outcome counted engine accelerator gpus nodes tensor_parallel pipeline_parallel virtual_pipeline context_parallel
expert_parallel data_parallel sequence_parallel micro_batch_sequences global_batch_sequences sequence_tokens matmul_dtype
recompute routing n first_step tokens_per_second_per_gpu tokens_per_second_per_gpu_low tokens_per_second_per_gpu_high mfu
model_flops_per_second_per_gpu step_seconds peak_memory_bytes peak_reserved_bytes predicted_memory_error
predicted_step_error final_loss joules_per_token watts_per_gpu gpu_busy expert_load rank_load dropped
"""
"""The columns that are kept of each record of benchmarks/records."""


def export_document(folders, columns=()):
    """The rows of `tprimat export` by run, as its file gets them, all columns or some as a list."""
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.report.export import rows_of
    from tprimat.runner.analysis import read_results

    results = read_results(folders, MetricOptions(), {}, to_share=True)
    rows, status = rows_of(results.measured), int(bool(results.problems))
    if columns:
        return {"status": status, "columns": columns, **{row["run_id"]: [row[key] for key in columns] for row in rows}}
    return {"status": status, **{row["run_id"]: prune(plain(row), ("not_counted_because",)) for row in rows}}


def export():
    """All exports."""
    yield "runs", lambda: export_document([RUNS / name for name in ("h100", "mi300x", "cpu", "published", "foreign")])
    for machine in ("h100", "h200"):
        yield machine, partial(export_document, [RECORDS / machine], FACTS.split())


# dry_run: what each engine would be started with, for both models and five strategies.

STARTED = (*itertools.product(("megatron", "bridge", "nemo", "primus", "torchtitan"), ("nvidia", "amd")), ("megatron", "cpu"))
STRATEGIES = ("maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced")
OF_THIS_CALL = ("shape", "run_id", "command", "step_seconds", "time", "rates")
"""What a plan holds of this machine and moment, or what other goldens have."""


def command_of(line):
    """The environment and the words of the command in a line of a dry run."""
    words = shlex.split(re.sub(r"\d{8}-\d{6}-\d{6}-", "", without_places(line.partition(": ")[2])))
    start = next(place for place, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    environment = dict(word.split("=", 1) for word in words[:start])
    return {"environment": prune(environment, ("PYTHON*",)), "words": words[start:]}


def dry_run_document(started):
    """What an engine on a platform would be started with, for both models."""
    return {model: started_with(*started, model) for model in ("llama", "qwen")}


def started_with(engine, platform, model):
    """The plan and the command of each strategy, or why the engine refuses."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("--dry-run", "--platform", platform, "--engine", engine, "--model", model, "--gpus", 8, "--output-dir", folder)
        words += ("--parallel", ",".join(STRATEGIES))
        done = run_command("benchmark.py", *words)
        if done.returncode:
            return {"status": done.returncode, "refused": done.stderr.splitlines()[0]}
        plans = json.loads(run_command("benchmark.py", *words, "--json").stdout)["plans"]
        commands = [line for line in done.stdout.splitlines() if line.startswith("Command")]
    return {
        plan["strategy"]: {**prune(plain(plan), OF_THIS_CALL), "command": command_of(line)}
        for plan, line in zip(plans, commands, strict=True)
    }


# losses: tiny trainings in fp32 on a CPU, in twelve layouts.

LAYOUTS = {
    "llama_1": ("llama", 1, {}),
    "llama_1_recomputed": ("llama", 1, {"recompute": "full"}),
    "llama_tp2": ("llama", 2, {"tp": 2}),
    "llama_pp2_vpp2": ("llama", 2, {"pp": 2, "vpp": 2}),
    "llama_cp2": ("llama", 2, {"cp": 2}),
    "llama_dp2_sharded": ("llama", 2, {"fully_shard": True}),
    "llama_tp2_pp2": ("llama", 4, {"tp": 2, "pp": 2}),
    "llama_tp2_overlapped": ("llama", 2, {"tp": 2, "overlap_tensor_parallel": True, "accumulate_weight_gradients": True}),
    "llama_tp2_cp2": ("llama", 4, {"tp": 2, "cp": 2}),
    "qwen_pp2": ("qwen", 2, {"pp": 2}),
    "qwen_tp2_dp2": ("qwen", 4, {"tp": 2}),
    "mixtral_ep2": ("mixtral", 2, {"ep": 2}),
    "qwen3_moe_tp2_ep2": ("qwen3_moe", 4, {"tp": 2, "ep": 2}),
    "latent_tp2_ep2": ("mixtral", 2, {"models.mixtral.architecture": "deepseek-v2-lite", "tp": 2, "ep": 2}),
}
FEW = ("llama_1", "llama_tp2", "llama_pp2_vpp2", "mixtral_ep2")
"""Those that are trained whenever tests are."""


def trained_losses(names):
    """Losses, gradient norms and parameters of layouts, which train in one start of torchrun."""
    from planning import make_plan, split_settings, train_together

    text = {"training.data.dataset": f"text:{ROOT / 'LICENSE'}"}
    with tempfile.TemporaryDirectory() as folder:
        asked = [(Path(folder, name), *LAYOUTS[name]) for name in names]
        trained = train_together(
            [make_plan(at, model, split_settings(model, ranks, text | split)) for at, model, ranks, split in asked]
        )
    return {
        name: {
            "losses": [step.loss for step in steps],
            "gradient_norms": [step.grad_norm for step in steps],
            "parameters": run.evidence.parameters,
            "outcome": run.outcome,
        }
        for name, (run, steps) in zip(names, trained, strict=True)
    }


@cache
def all_losses():
    """Those of all layouts."""
    return trained_losses(list(LAYOUTS))


KINDS = {
    "logs": logs,
    "compare": each(comparison, COMPARED),
    "peak": each(peak_document, PEAKS),
    "scaling": each(scaling_document, SCALINGS),
    "plan": each(plan_document, {model.replace(".", "_"): model for model in MODELS}),
    "report": each(report_document, REPORTS),
    "export": export,
    "dry_run": each(dry_run_document, {"_".join(one): one for one in STARTED}),
    "losses": each(lambda name: all_losses()[name], {name: name for name in LAYOUTS}),
}
"""In each folder, one file for each document."""


def dumped(value, indent=""):
    """JSON with what fits on one line on one line."""
    line = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if not isinstance(value, dict | list) or len(line) < 120 or (isinstance(value, list) and not any(map(nested, value))):
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        inner = [f"{json.dumps(key)}: {dumped(one, deeper)}" for key, one in sorted(value.items())]
    else:
        inner = [dumped(one, deeper) for one in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{deeper}" + f",\n{deeper}".join(inner) + f"\n{indent}{end}"


def nested(value):
    """Whether a value holds others."""
    return isinstance(value, dict | list)
