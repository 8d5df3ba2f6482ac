"""Fine-tuning of Qwen3 8B for the accelerator suite, through torchtune where it is installed."""

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli.ranks import environment, supervise
from tprimat.engines.base import Command

MODEL = "qwen3-8b"
INSTALL = "pip install torchtune torchao"
DOWNLOAD = "tune download Qwen/Qwen3-8B --output-dir CHECKPOINT"
COMMON = (
    "batch_size=14",
    "gradient_accumulation_steps=1",
    "tokenizer.max_seq_len=8192",
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


def installed() -> bool:
    """Whether torchtune is here."""
    return importlib.util.find_spec("torchtune") is not None


def folder_of(mode: str, output: Path) -> Path:
    """Where torchtune writes one run's logs."""
    return output / f"torchtune-{MODEL}-{mode}"


def command_of(mode: str, output: Path, checkpoint: Path, ranks: int) -> Command:
    """The exact process of one run."""
    recipe, configuration, extra = MODES[mode]
    places = (
        f"output_dir={folder_of(mode, output)}",
        f"checkpointer.checkpoint_dir={checkpoint}",
        f"tokenizer.path={checkpoint / 'vocab.json'}",
        f"tokenizer.merges_file={checkpoint / 'merges.txt'}",
    )
    launcher = (sys.executable, "-m", "torchtune._cli.tune", "run", "--nnodes", "1", "--nproc_per_node", str(ranks))
    return Command(argv=(*launcher, recipe, "--config", configuration, *COMMON, *extra, *places), environment=environment(ranks))


def logs_of(mode: str, output: Path) -> list[Path]:
    """What its DiskLogger wrote."""
    return sorted((folder_of(mode, output) / "logs").glob("log_*.txt"))


def why_not(checkpoint: Path | None) -> str | None:
    """Why fine-tuning cannot run here, with the command that mends it; None where it can."""
    if not installed():
        return f"torchtune is not installed. `{INSTALL}`, `{DOWNLOAD}`, then this command with `--checkpoint CHECKPOINT`."
    if checkpoint is None:
        return f"no checkpoint was named. Get one with `{DOWNLOAD}` and name its folder: `--checkpoint CHECKPOINT`."
    if not (checkpoint / "vocab.json").is_file():
        return f"{checkpoint} holds no checkpoint of Qwen3 8B. Get one with `{DOWNLOAD}`."
    return None


def run(modes: Sequence[str], output: Path, checkpoint: Path, ranks: int) -> list[str]:
    """Fine-tune in each mode that has left no log yet.

    Returns:
        A line about each that did not end well.
    """
    problems = []
    for mode in modes:
        if not logs_of(mode, output):
            ending = supervise(command_of(mode, output, checkpoint, ranks), lambda line: print(line, file=sys.stderr))
            if ending.exit_code:
                problems.append(f"{mode} ended with status {ending.exit_code}")
    return problems


def read_logs(output: Path, ranks: int, accelerator: str | None) -> list[str]:
    """A benchmark file of each log, through the extractor of foreign logs, so that the page is made from records alone.

    Returns:
        A line about each that says nothing.
    """
    from tprimat.cli import extract

    problems = []
    for mode in MODES:
        for log in logs_of(mode, output)[-1:]:
            flags = ["--num-gpus", str(ranks), "--sequence-length", "8192", "--global-batch-size", str(14 * ranks)]
            flags += ["--gpu", accelerator] if accelerator else []
            target = output / f"benchmark_{MODEL}_{mode}.json"
            names = ["--log-file", str(log), "--model-name", MODEL, "--dialect", "torchtune", "--output", str(target)]
            with contextlib.redirect_stdout(sys.stderr):
                if extract.main([*names, *flags]) == 2:
                    problems.append(f"{log} cannot be read")
    return problems


def section(output: Path, reason: str | None, problems: Sequence[str] = ()) -> str:
    """The page's section, from records; or why there are none."""
    from tprimat.record.collect import load_results
    from tprimat.report.finetune import finetune_table

    results, _ = load_results([output])
    made = finetune_table([(result.path.stem, result) for result in results if result.run.model == MODEL])
    parts = ["## Fine-tuning Qwen3 8B", "Batch 14, packed sequences of 8,192 tokens, compiled, activations recomputed."]
    parts += [made] if made else []
    parts += [f"- {problem}" for problem in problems]
    parts += [f"Not run: {reason}"] if reason and not made else []
    return "\n\n".join(parts)
