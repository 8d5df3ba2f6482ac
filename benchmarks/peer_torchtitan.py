"""torchtitan on a plan of ours, started, followed and recorded by the launcher that starts our own runs."""

import dataclasses
import json
import random
from importlib.util import find_spec
from pathlib import Path

from tprimat.engines.base import Command
from tprimat.engines.follow import FollowedLog
from tprimat.hardware.nodes import Nodes
from tprimat.launch.run import run
from tprimat.launch.torchrun import torchrun
from tprimat.logs.formats import torchtitan
from tprimat.plan.evidence import first_record, mismatches
from tprimat.plan.schema import RunPlan
from tprimat.records.benchmark_file import RunResult
from tprimat.records.environment import software_versions
from tprimat.runner.progress import Progress
from tprimat.runner.run import TrainingRun, finish, launch_of, now
from tprimat.runner.session import Session

NAME = torchtitan.NAME
FLAVORS = {"full": "8B", "tiny": "debugmodel"}
"""torchtitan's names for the sizes of Llama 3.1; its smallest one is another shape than ours, and good for trying out only."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
WORDS, TEXTS, LENGTH = 30_000, 800, 700


def refusal(plan: RunPlan) -> str | None:
    """Why torchtitan cannot run the same here; None where it can."""
    layout = plan.layout
    reasons = {
        f"{NAME} is not installed": find_spec(NAME) is None,
        f"{NAME} has no {plan.shape.name}": plan.model != "llama",
        f"{NAME}'s pipeline cuts a step into micro-batches of another size": layout.pipeline > 1,
        f"{NAME} computes in fp32 where there is a single replica": layout.tensor > 1 and layout.data == 1,
        f"{NAME} needs torchao for fp8": plan.precision == "fp8" and find_spec("torchao") is None,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def is_run_of(plan: RunPlan, made: RunResult) -> bool:
    """Whether a result is a whole run of this plan, and not of another batch or of other GPUs."""
    evidence = made.run.evidence
    if not made.run.counts or evidence is None or len(made.steps) != plan.steps:
        return False
    return not mismatches(plan, evidence)


def flags(plan: RunPlan) -> list[str]:
    """The workload of a plan as torchtitan's command line: compiled, no recomputation, a line for every step."""
    batch = plan.batch
    given = {
        "--model.name": "llama3",
        "--model.flavor": FLAVORS[plan.size],
        "--model.hf_assets_path": "tokenizer",
        "--training.dataset": "c4_test",
        "--training.steps": plan.steps,
        "--training.seq_len": batch.sequence_tokens,
        "--training.local_batch_size": batch.micro_batch_sequences,
        "--training.global_batch_size": batch.global_batch_sequences,
        "--training.mixed_precision_param": DTYPES[plan.precision],
        "--parallelism.tensor_parallel_degree": plan.layout.tensor,
        "--activation_checkpoint.mode": "none",
        "--lr_scheduler.warmup_steps": 2,
        "--metrics.log_freq": 1,
    }
    words = [str(word) for pair in given.items() for word in pair]
    if plan.precision == "fp8":
        words += ["--model.converters", "float8"]
    return [*words, "--compile.enable", "--job.print_config"]


def write_inputs(folder: Path) -> None:
    """Noise to train on, where torchtitan looks for its test data, and a tokenizer that has one token a word."""
    noise = random.Random(0)
    words = [f"w{number}" for number in range(WORDS)]
    texts = folder / "tests" / "assets" / "c4_test" / "data.json"
    texts.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": " ".join(noise.choices(words, k=LENGTH))}) for _ in range(TEXTS)]
    texts.write_text("\n".join(lines) + "\n", encoding="utf8")
    special = ["<unk>", "<|begin_of_text|>", "<|end_of_text|>"]
    vocabulary = {word: number for number, word in enumerate([*words, *special])}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    settings = {"bos_token": special[1], "eos_token": special[2], "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf8")
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf8")


def train(session: Session, asked: RunPlan) -> TrainingRun:
    """Run torchtitan on a plan and leave the records that a run of ours leaves."""
    plan = dataclasses.replace(asked, engine=NAME, engine_reason="to compare with")
    inputs = session.output / "inputs"
    write_inputs(inputs)
    prefix = torchrun(Nodes(), plan.gpus_per_node)
    command = Command(
        argv=(*prefix, "--local-ranks-filter=0", "-m", "torchtitan.train", *flags(plan)),
        environment={"HF_HUB_OFFLINE": "1", "HF_HOME": str(inputs / "huggingface")},
        directory=str(inputs),
    )
    record = first_record(plan, session.machine_of(plan), now())
    record = dataclasses.replace(record, clock="framework", software=software_versions())
    log = FollowedLog(plan, torchtitan.read_line)
    launch = dataclasses.replace(
        launch_of(session, asked, record),
        command=command,
        logs=(session.output / f"training_{plan.model}.log",),
        step_of_line=log.step_of_line,
        complete=log.complete,
    )
    record, result = run(launch, Progress(plan, record, quiet=False))
    return finish(session, record, result.steps, launch.logs[0])
