"""Frameworks whose steps are not read: what their logs look like, and why, so that a refusal can name them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """A framework whose steps are not read."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    """A line that holds all words of one row is of this framework."""
    why: str
    fix: str | None = None
    """What its user can do instead."""
    beside: bool = False
    """It prints beside another framework, whose failure before the first step counts."""


NO_TIME = "It prints no time of a step, only a progress bar, whose rate is a moving average."
OTHER_WORK = "Its steps also generate text or score it, so FLOP and MFU would not hold."
NOT_YET = "Nothing here reads its lines."

FOREIGN: Sequence[Foreign] = (
    Foreign(
        "the Trainer of Hugging Face (also behind TRL, Axolotl and LLaMA-Factory)",
        (("{'loss':", "'learning_rate':"), ("'train_runtime':", "'train_samples_per_second':")),
        NO_TIME,
    ),
    Foreign("verl", (("timing_s/step:",), ("global_seqlen/mean:", "actor/")), OTHER_WORK),
    Foreign(
        "NeMo 1 without the time of a step",
        (("reduced_train_loss=", "global_step="),),
        NO_TIME,
        "a log of a run with exp_manager.log_step_timing=True",
    ),
    Foreign("PyTorch Lightning", (("v_num=", "it/s"), ("v_num=", "s/it")), NO_TIME),
    Foreign(
        "DeepSpeed before version 0.8",
        (("SamplesPerSec=", "MemAllocated="),),
        "Its timer prints a running average, or counts micro-batches as steps.",
        "a log of a later DeepSpeed, or of Megatron-DeepSpeed with its iteration lines",
    ),
    Foreign(
        "NeMo Automodel",
        (("| tps ", "| num_label_tokens "), ("| tps ", "| grad_norm ", "| mem ")),
        "It prints no times, and a rate without padding whose share of a GPU is that of a data-parallel rank.",
    ),
    Foreign("OLMo", (("train/CrossEntropyLoss=",), ("train/CE loss=",)), NOT_YET),
    Foreign("nanoGPT", (("iter ", ": loss ", ", time ", "ms"),), NOT_YET),
    Foreign("LitGPT", (("iter time: ", "loss train", " ms"), ("iter time: ", "loss: ", " ms")), NOT_YET),
    Foreign("llm.c", (("step ", "| loss ", "| norm ", "tok/s"),), NOT_YET),
    Foreign("Meta Lingua", (("step:", "loss:", "wps:", "iter:"),), "It prints rates of three digits."),
    Foreign(
        "torchtune's progress bar",
        (("|Loss: ", "it/s]"), ("|Loss: ", "s/it]")),
        NO_TIME,
        "the log_*.txt that torchtune's DiskLogger writes into its log_dir",
    ),
    Foreign("MMEngine (XTuner)", (("Iter(train)", "data_time:"),), NOT_YET),
    Foreign("LiBai", (("lb.utils.events", "s/iter"),), NOT_YET),
    Foreign("fairseq", (("train_inner", "wps", "ups"),), NOT_YET),
    Foreign(
        "MLPerf",
        ((":::MLLOG",),),
        "It holds times of blocks of steps, not of steps.",
        "the log of the framework beside it",
        beside=True,
    ),
)
"""Specific ones before general ones."""


def foreign_of(text: str) -> Foreign | None:
    """Return the framework that wrote a line, where it is one whose steps are not read."""
    return next((foreign for foreign in FOREIGN if any(all(word in text for word in sign) for sign in foreign.signs)), None)
