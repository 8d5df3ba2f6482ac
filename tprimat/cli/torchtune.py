"""Fine-tuning of Qwen3 8B through torchtune, for the accelerator suite: its command lines, and its logs as records.

Nothing is downloaded: the texts are invented (train/torchtune/instructions.py), and so are the weights where the user has none.
"""

import contextlib
import importlib.util
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tprimat.cli.qwen3 import MODEL, SEQUENCE_TOKENS, SEQUENCES_OF_A_DEVICE, Training
from tprimat.engines.base import Command
from tprimat.records.schema import Evidence
from tprimat.runner.ranks import environment
from tprimat.train.torchtune import COMPLETE

INSTALL = "pip install torchvision torchao 'torchtune @ git+https://github.com/pytorch/torchtune'"
"""Its last release, 0.6.1, knows neither Qwen3 nor fp8, and imports parts of torchao that current ones have moved."""
DOWNLOAD = "tune download Qwen/Qwen3-8B --output-dir CHECKPOINT"
OWN_WEIGHTS = f"`{DOWNLOAD}` and `--checkpoint CHECKPOINT`"
CONFIGURATION = "torchtune_config.yaml"
"""What a recipe writes into its folder: its configuration with every override."""
RESULT = f"benchmark_{MODEL}.json"
CACHE, TRAINED = "cache", ("epoch_*", "step_*")
"""What a run leaves in its folder and nobody needs: its texts as tables, and weights that were trained on invented words."""
COMMON = (
    f"batch_size={SEQUENCES_OF_A_DEVICE}",
    "gradient_accumulation_steps=1",
    f"tokenizer.max_seq_len={SEQUENCE_TOKENS}",
    "dataset.packed=True",
    "compile=True",
    "enable_activation_checkpointing=True",
    "log_peak_memory_stats=True",
)
"""The published runs' batch, sequence and settings, as overrides of torchtune's own configurations (recipes/configs/qwen3)."""
FULL = ("full_finetune_distributed", "qwen3/8B_full", ("save_every_n_steps=1000000",))
"""It would write its checkpoint twice at the end of an epoch; the LoRA recipe does not, and fails with this setting."""
MODES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "lora-bf16": ("lora_finetune_distributed", "qwen3/8B_lora", ("save_adapter_weights_only=True",)),
    "full-bf16": FULL,
    "full-fp8": (*FULL[:2], (*FULL[2], "enable_fp8_training=True", "fp8_recipe_name=tensorwise")),
}
TEXTS = "invented instructions, packed"
RANDOM = "random"
"""In place of a checkpoint's folder: speed needs no trained weights. A folder of this name is ./random."""
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the runs of one suite read."""

    checkpoint: Path
    texts: Path
    invented: bool
    """The checkpoint is made here, of random weights."""


def inputs_of(output: Path, checkpoint: str) -> Inputs:
    """Where they are, or will be made."""
    folder = output / "torchtune"
    invented = checkpoint == RANDOM
    return Inputs(
        checkpoint=folder / "random-checkpoint" if invented else Path(checkpoint),
        texts=folder / "instructions.jsonl",
        invented=invented,
    )


def preparations(inputs: Inputs, training: Training) -> list[Command]:
    """The processes that make what is missing; texts are written anew, since they hang on the number of steps and ranks."""
    tokens = training.steps * training.ranks * SEQUENCES_OF_A_DEVICE * SEQUENCE_TOKENS
    python, own = (sys.executable, "-m"), {"PYTHONPATH": environment(1)["PYTHONPATH"]}
    texts = ("tprimat.train.torchtune.instructions", str(inputs.texts), "--tokens", str(tokens), "--seed", str(SEED))
    made = [Command(argv=(*python, *texts), environment=own)]
    if inputs.invented and not (inputs.checkpoint / COMPLETE).is_file():
        weights = ("tprimat.train.torchtune.weights", str(inputs.checkpoint), "--model", MODEL)
        made.append(Command(argv=(*python, *weights), environment=own))
    return made


def command_of(mode: str, folder: Path, inputs: Inputs, training: Training) -> Command:
    """The exact process of one run."""
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
    return Command(argv=(*launcher, *words), environment=environment(training.ranks) | {"HF_HUB_OFFLINE": "1"})


def why_not(checkpoint: str | None) -> str | None:
    """Why fine-tuning cannot run here, with the command that mends it; None where it can.

    Args:
        checkpoint: a folder, or RANDOM.
    """
    found = importlib.util.find_spec("torchtune")
    if found is None or found.origin is None:
        return f"torchtune is not installed. `{INSTALL}`, then this command with `--checkpoint random`, or {OWN_WEIGHTS}."
    if not (Path(found.origin).parent / "models" / "qwen3").is_dir():
        return f"this torchtune knows no Qwen3. `{INSTALL}`."
    if checkpoint is None:
        return f"no checkpoint was named: `--checkpoint random`, or {OWN_WEIGHTS}."
    if checkpoint != RANDOM and not (Path(checkpoint) / "vocab.json").is_file():
        return f"{checkpoint} holds no checkpoint of Qwen3 8B. Get one with `{DOWNLOAD}`, or say `--checkpoint random`."
    return None


def read_log(folder: Path, ranks: int, accelerator: str | None) -> str | None:
    """A benchmark file of the newest log that DiskLogger wrote, through the extractor of foreign logs.

    Returns:
        Why there is none.
    """
    from tprimat.cli import extract

    for leftover in (folder / CACHE, *(found for name in TRAINED for found in folder.glob(name))):
        shutil.rmtree(leftover, ignore_errors=True)
    logs = sorted((folder / "logs").glob("log_*.txt"), key=lambda log: log.stat().st_mtime)
    if not logs:
        return f"torchtune left no log in {folder / 'logs'}"
    flags = ["--num-gpus", str(ranks), "--sequence-length", str(SEQUENCE_TOKENS)]
    flags += ["--global-batch-size", str(SEQUENCES_OF_A_DEVICE * ranks), *(["--gpu", accelerator] if accelerator else [])]
    names = ["--log-file", str(logs[-1]), "--model-name", MODEL, "--dialect", "torchtune"]
    target = folder / RESULT
    with contextlib.redirect_stdout(sys.stderr):
        status = extract.main([*names, "--output", str(target), *flags])
    if status:
        return f"{logs[-1]} cannot be read"
    add_configuration(target, folder / CONFIGURATION)
    return None


def add_configuration(target: Path, configuration: Path) -> None:
    """What torchtune says that it was configured as goes into the record, beside what its log says."""
    from tprimat.analyze.metrics import run_metrics
    from tprimat.records.benchmark_file import read_benchmark_file, write_benchmark_file

    if not configuration.is_file():
        return
    result = read_benchmark_file(target)
    proof = result.run.evidence or Evidence(source="log")
    said = yaml.safe_load(configuration.read_text(encoding="utf8"))
    batch, tokens = said["batch_size"], said["tokenizer"]["max_seq_len"]
    options = {key: said[key] for key in ("compile", "enable_fp8_training", "fp8_recipe_name") if key in said}
    notes = [f"{key}: {value}" for key, value in options.items()]
    if (Path(said["checkpointer"]["checkpoint_dir"]) / COMPLETE).is_file():
        notes.append("weights: random")
    evidence = replace(
        proof,
        parameter_dtype=said["dtype"],
        micro_batch_sequences=batch,
        sequence_tokens=tokens,
        data=TEXTS,
        notes=(*proof.notes, *notes),
    )
    options["model"] = said["model"]["_component_"].rpartition(".")[2]
    run = replace(result.run, evidence=evidence, micro_batch_sequences=batch, engine_options=options)
    write_benchmark_file(target, run, result.steps, run_metrics(run, result.steps))
