"""Fine-tuning of Qwen3 8B through torchtune, for the accelerator suite: its command lines, and its logs as records."""

import contextlib
import importlib.util
import sys
from pathlib import Path

from tprimat.cli.qwen3 import MODEL, SEQUENCE_TOKENS, SEQUENCES_OF_A_DEVICE, Training
from tprimat.cli.ranks import environment
from tprimat.engines.base import Command

INSTALL = "pip install torchvision torchao 'torchtune @ git+https://github.com/pytorch/torchtune'"
"""Its last release, 0.6.1, knows neither Qwen3 nor fp8, and imports parts of torchao that current ones have moved."""
DOWNLOAD = "tune download Qwen/Qwen3-8B --output-dir CHECKPOINT"
COMMON = (
    f"batch_size={SEQUENCES_OF_A_DEVICE}",
    "gradient_accumulation_steps=1",
    f"tokenizer.max_seq_len={SEQUENCE_TOKENS}",
    "dataset.packed=True",
    "compile=True",
    "enable_activation_checkpointing=True",
    "max_steps_per_epoch=30",
    "log_peak_memory_stats=True",
)
"""The published runs' batch, sequence and settings, as overrides of torchtune's own configurations (recipes/configs/qwen3)."""
MODES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "full-bf16": ("full_finetune_distributed", "qwen3/8B_full", ()),
    "full-fp8": ("full_finetune_distributed", "qwen3/8B_full", ("enable_fp8_training=True", "fp8_recipe_name=tensorwise")),
    "lora-bf16": ("lora_finetune_distributed", "qwen3/8B_lora", ()),
}


def command_of(mode: str, folder: Path, checkpoint: Path, training: Training) -> Command:
    """The exact process of one run."""
    recipe, configuration, extra = MODES[mode]
    places = (
        f"output_dir={folder}",
        f"checkpointer.checkpoint_dir={checkpoint}",
        f"tokenizer.path={checkpoint / 'vocab.json'}",
        f"tokenizer.merges_file={checkpoint / 'merges.txt'}",
    )
    launcher = (sys.executable, "-m", "torchtune._cli.tune", "run", "--nnodes", "1", "--nproc_per_node", str(training.ranks))
    words = (recipe, "--config", configuration, *COMMON, *extra, *places)
    return Command(argv=(*launcher, *words), environment=environment(training.ranks))


def why_not(checkpoint: Path | None) -> str | None:
    """Why fine-tuning cannot run here, with the command that mends it; None where it can."""
    found = importlib.util.find_spec("torchtune")
    if found is None or found.origin is None:
        return f"torchtune is not installed. `{INSTALL}`, `{DOWNLOAD}`, then this command with `--checkpoint CHECKPOINT`."
    if not (Path(found.origin).parent / "models" / "qwen3").is_dir():
        return f"this torchtune knows no Qwen3. `{INSTALL}`."
    if checkpoint is None:
        return f"no checkpoint was named. Get one with `{DOWNLOAD}` and name its folder: `--checkpoint CHECKPOINT`."
    if not (checkpoint / "vocab.json").is_file():
        return f"{checkpoint} holds no checkpoint of Qwen3 8B. Get one with `{DOWNLOAD}`."
    return None


def read_log(folder: Path, ranks: int, accelerator: str | None) -> str | None:
    """A benchmark file of the newest log that DiskLogger wrote, through the extractor of foreign logs.

    Returns:
        Why there is none.
    """
    from tprimat.cli import extract

    logs = sorted((folder / "logs").glob("log_*.txt"), key=lambda log: log.stat().st_mtime)
    if not logs:
        return f"torchtune left no log in {folder / 'logs'}"
    flags = ["--num-gpus", str(ranks), "--sequence-length", str(SEQUENCE_TOKENS)]
    flags += ["--global-batch-size", str(SEQUENCES_OF_A_DEVICE * ranks), *(["--gpu", accelerator] if accelerator else [])]
    names = ["--log-file", str(logs[-1]), "--model-name", MODEL, "--dialect", "torchtune"]
    with contextlib.redirect_stdout(sys.stderr):
        status = extract.main([*names, "--output", str(folder / f"benchmark_{MODEL}.json"), *flags])
    return f"{logs[-1]} cannot be read" if status else None
