"""Fine-tuning of Qwen3 8B with torchtune's own recipes: command lines, inputs, and logs as records.

Nothing is downloaded: the texts are made up (texts.py), and so are the weights if the user has none (weights.py).
"""

import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.finetune_qwen3.embedded import MODEL, SEQUENCE_TOKENS, SEQUENCES_PER_DEVICE, Training
from tprimat.analyze.metrics import run_metrics
from tprimat.core.errors import UserError
from tprimat.engines.base import Command
from tprimat.launch.process import python_environment
from tprimat.logs.contents import Claims
from tprimat.logs.fields import GIBIBYTE, Dialect, LineFields, in_bytes, matching, number
from tprimat.logs.read import read_log
from tprimat.records.benchmark_file import write_benchmark_file
from tprimat.records.discover import read_result
from tprimat.records.evidence import CAUTION, with_facts
from tprimat.records.schema import Evidence

INSTALL = "pip install torchvision torchao 'torchtune @ git+https://github.com/pytorch/torchtune'"
"""The latest release, 0.6.1, supports neither Qwen3 nor fp8, and imports parts of torchao that current versions have moved."""
DOWNLOAD = "tune download Qwen/Qwen3-8B --output-dir CHECKPOINT"
TRAINED_WEIGHTS = f"`{DOWNLOAD}` and `--checkpoint CHECKPOINT`"
CONFIGURATION = "torchtune_config.yaml"
"""Written by a recipe into its folder: its configuration with every override."""
RESULT = f"benchmark_{MODEL}.json"
CACHE, TRAINED = "cache", ("epoch_*", "step_*")
"""Deleted after a run: its texts as tables, and weights trained on made-up words."""
COMPLETE = "random-weights.json"
"""Written last into a checkpoint of random weights: marks it as random, and as complete."""
COMMON = (
    f"batch_size={SEQUENCES_PER_DEVICE}",
    "gradient_accumulation_steps=1",
    f"tokenizer.max_seq_len={SEQUENCE_TOKENS}",
    "dataset.packed=True",
    "compile=True",
    "enable_activation_checkpointing=True",
    "log_peak_memory_stats=True",
)
"""Batch, sequence and settings of the published runs, as overrides of torchtune's configurations (recipes/configs/qwen3)."""
FULL = ("full_finetune_distributed", "qwen3/8B_full", ("save_every_n_steps=1000000",))
"""Without the override this recipe writes two checkpoints at the end of an epoch. The LoRA recipe does not, and rejects it."""
MODES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "lora-bf16": ("lora_finetune_distributed", "qwen3/8B_lora", ("save_adapter_weights_only=True",)),
    "full-bf16": FULL,
    "full-fp8": (*FULL[:2], (*FULL[2], "enable_fp8_training=True", "fp8_recipe_name=tensorwise")),
}
TEXTS = "invented instructions, packed"
"""How the records describe the data."""
RANDOM = "random"
"""Replaces a checkpoint's folder, since speed does not depend on the weights. A folder of this name is ./random."""
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files that all runs read."""

    checkpoint: Path
    texts: Path
    random: bool
    """The benchmark writes the checkpoint, with random weights."""


def inputs_in(output: Path, checkpoint: str) -> Inputs:
    """Return the paths of the inputs, which may not exist yet."""
    folder = output / "torchtune"
    random = checkpoint == RANDOM
    return Inputs(
        checkpoint=folder / "random-checkpoint" if random else Path(checkpoint),
        texts=folder / "instructions.jsonl",
        random=random,
    )


def input_commands(inputs: Inputs, training: Training) -> list[Command]:
    """Return the commands that write missing inputs. Texts are always written, since they depend on steps and ranks."""
    tokens = training.steps * training.ranks * SEQUENCES_PER_DEVICE * SEQUENCE_TOKENS
    python, modules = (sys.executable, "-m"), {"PYTHONPATH": python_environment()["PYTHONPATH"]}
    texts = ("benchmarks.finetune_qwen3.texts", str(inputs.texts), "--tokens", str(tokens), "--seed", str(SEED))
    commands = [Command(argv=(*python, *texts), environment=modules)]
    if inputs.random and not (inputs.checkpoint / COMPLETE).is_file():
        weights = ("benchmarks.finetune_qwen3.weights", str(inputs.checkpoint), "--model", MODEL)
        commands.append(Command(argv=(*python, *weights), environment=modules))
    return commands


def torchtune_command(mode: str, folder: Path, inputs: Inputs, training: Training) -> Command:
    """Return the command of one run."""
    recipe, configuration, extra = MODES[mode]
    places = (
        f"max_steps_per_epoch={training.steps}",
        f"output_dir={folder}",
        f"checkpointer.checkpoint_dir={inputs.checkpoint}",
        f"tokenizer.path={inputs.checkpoint / 'vocab.json'}",
        f"tokenizer.merges_file={inputs.checkpoint / 'merges.txt'}",
        "dataset.source=json",
        f"dataset.data_files={inputs.texts}",
        f"dataset.cache_dir={folder / CACHE}",
    )
    launcher = (sys.executable, "-m", "torchtune._cli.tune", "run", "--nnodes", "1", "--nproc_per_node", str(training.ranks))
    words = (recipe, "--config", configuration, *COMMON, *extra, *places)
    return Command(argv=(*launcher, *words), environment=python_environment(training.ranks) | {"HF_HUB_OFFLINE": "1"})


def torchtune_refusal(checkpoint: str | None) -> str | None:
    """Say why torchtune cannot run here, with the command that helps; None where it can.

    Args:
        checkpoint: a folder, or RANDOM.
    """
    spec = importlib.util.find_spec("torchtune")
    if spec is None or spec.origin is None:
        return f"torchtune is not installed. `{INSTALL}`, then this command with `--checkpoint random`, or {TRAINED_WEIGHTS}."
    if not (Path(spec.origin).parent / "models" / "qwen3").is_dir():
        return f"this torchtune does not support Qwen3. `{INSTALL}`."
    if checkpoint is None:
        return f"no checkpoint was given: `--checkpoint random`, or {TRAINED_WEIGHTS}."
    if checkpoint != RANDOM and not (Path(checkpoint) / "vocab.json").is_file():
        return f"{checkpoint} holds no checkpoint of Qwen3 8B. Get one with `{DOWNLOAD}`, or use `--checkpoint random`."
    return None


def read_step(match: re.Match[str]) -> LineFields:
    """Read 'Step 10 | loss:1.7 lr:2e-05 tokens_per_second_per_gpu:… peak_memory_alloc:…', whose memory is in GiB."""
    fields = dict(re.findall(r"\b(\w+):(\S+)", match.string[match.end() :]))
    return LineFields(
        step=int(match[1]),
        tokens_per_second_per_gpu=number(fields.get("tokens_per_second_per_gpu")),
        loss=number(fields.get("loss")),
        grad_norm=number(fields.get("grad_norm")),
        learning_rate=number(fields.get("lr")),
        peak_allocated_bytes=in_bytes(fields.get("peak_memory_alloc"), GIBIBYTE),
        peak_reserved_bytes=in_bytes(fields.get("peak_memory_reserved"), GIBIBYTE),
    )


TORCHTUNE = Dialect(
    name="torchtune", signs=(), rules={"Step ": matching(r"Step (\d+) \|(?= loss:)", read_step)}, marks_its_end=False
)
"""The log of its DiskLogger. Its rate counts unmasked tokens only, which are all where texts are packed."""


def read_steps(folder: Path, ranks: int, accelerator: str | None) -> str | None:
    """Write a benchmark file from the newest log of torchtune's DiskLogger.

    Returns:
        Why there is no file; None where there is one.
    """
    for leftover in (folder / CACHE, *(path for name in TRAINED for path in folder.glob(name))):
        shutil.rmtree(leftover, ignore_errors=True)
    logs = sorted((folder / "logs").glob("log_*.txt"), key=lambda log: log.stat().st_mtime)
    if not logs:
        return f"torchtune left no log in {folder / 'logs'}"
    claims = Claims(
        model=MODEL,
        gpus=ranks,
        sequence_tokens=SEQUENCE_TOKENS,
        global_batch_sequences=SEQUENCES_PER_DEVICE * ranks,
        accelerator=accelerator,
    )
    try:
        run = read_log(logs[-1], claims, dialect=TORCHTUNE)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return f"{logs[-1]} cannot be read"
    if not run.steps:
        return f"{logs[-1]} cannot be read"
    write_benchmark_file(folder / RESULT, run.record, run.steps, run_metrics(run.record, run.steps))
    add_configuration(folder / RESULT, folder / CONFIGURATION)
    return None


def add_configuration(target: Path, configuration: Path) -> None:
    """Add the configuration that torchtune wrote to the record of its log."""
    if not configuration.is_file():
        return
    result = read_result(target)
    logged = result.run.evidence or Evidence(source="log")
    fields = yaml.safe_load(configuration.read_text(encoding="utf8"))
    micro_batch = fields["batch_size"]
    options = {key: fields[key] for key in ("compile", "enable_fp8_training", "fp8_recipe_name") if key in fields}
    masks = f"{CAUTION}torchtune counts unmasked tokens only: step times hold where every sequence is full"
    notes = [masks, *(f"{key}: {value}" for key, value in options.items())]
    if (Path(fields["checkpointer"]["checkpoint_dir"]) / COMPLETE).is_file():
        notes.append("weights: random")
    facts = {
        "parameter_dtype": fields["dtype"],
        "micro_batch_sequences": micro_batch,
        "sequence_tokens": fields["tokenizer"]["max_seq_len"],
        "data": TEXTS,
    }
    evidence = with_facts(replace(logged, notes=(*logged.notes, *notes)), **facts)
    options["model"] = fields["model"]["_component_"].rpartition(".")[2]
    run = replace(result.run, evidence=evidence, engine_options=options)
    write_benchmark_file(target, run, result.steps, run_metrics(run, result.steps))
