"""Frameworks whose steps are not read: what their logs look like, and why, so that a refusal can name them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

NO_TIME = "It prints no time of a step, only a progress bar, whose rate is a moving average."
OTHER_WORK = "Its steps also generate text or score it, so FLOP and MFU would not hold."
NOT_YET = "Nothing here reads its lines."


@dataclass(frozen=True, slots=True)
class Foreign:
    """A framework whose steps are not read."""

    name: str
    pattern: str
    """Of its lines."""
    why: str = NOT_YET
    fix: str | None = None
    """What its user can do instead."""
    beside: bool = False
    """It prints beside another framework, whose failure before the first step counts."""
    outranks: bool = False
    """Its lines look like those of a framework that is read."""


FOREIGN: Sequence[Foreign] = (
    Foreign(
        "the Trainer of Hugging Face (also behind TRL, Axolotl and LLaMA-Factory)",
        r"\{'loss':.*'learning_rate':|'train_runtime':.*'train_samples_per_second':",
        NO_TIME,
    ),
    Foreign("verl", r"timing_s/step:|global_seqlen/mean:.*actor/", OTHER_WORK),
    Foreign(
        "NeMo 1 without the time of a step",
        "reduced_train_loss=.*global_step=",
        NO_TIME,
        "a log of a run with exp_manager.log_step_timing=True",
    ),
    Foreign("PyTorch Lightning", r"(?:it/s|s/it).*v_num=|v_num=.*(?:it/s|s/it)", NO_TIME),
    Foreign(
        "DeepSpeed before version 0.8",
        "SamplesPerSec=.*MemAllocated=",
        "Its timer prints a running average, or counts micro-batches as steps.",
        "a log of a later DeepSpeed, or of Megatron-DeepSpeed with its iteration lines",
    ),
    Foreign(
        "NeMo Automodel",
        r"\| grad_norm .*\| mem .*\| tps |\| tps .*\| num_label_tokens ",
        "It prints no times, and a rate without padding whose share of a GPU is that of a data-parallel rank.",
    ),
    Foreign("OLMo", "train/(?:CrossEntropy|CE )[Ll]oss="),
    Foreign("nanoGPT", r"iter .*: loss .*, time .*ms"),
    Foreign("LitGPT", r"loss train.*iter time: .* ms|iter time: .*loss: .* ms|loss: .*iter time: .* ms"),
    Foreign("llm.c", r"step .*\| loss .*\| norm .*tok/s"),
    Foreign("Meta Lingua", "step:.*loss:.*wps:.*iter:", "It prints rates of three digits."),
    Foreign("torchtune", r"Step \d+ \| loss:|\|Loss: .*(?:it/s|s/it)\]", "Its rate counts unmasked tokens only."),
    Foreign("Composer (llm-foundry)", r"\[batch=\d+/|Train throughput/", "Its rates are means over a window of steps."),
    Foreign("nanotron", "iteration: .*time_per_iteration_ms:", "It prints times of three digits."),
    Foreign(
        "GPT-NeoX",
        r"samples/sec: .*elapsed time per iteration|approx flops per GPU:",
        "Its TFLOP/s may count recomputation, and its arguments are its own.",
        outranks=True,
    ),
    Foreign(
        "Megatron-LM before 2021, or BLOOM's",
        r"elapsed time per iteration \(s\):|\| (?:learning rate|lm loss) \d|\| lm-loss:",
        "Its lines and arguments have other names.",
        outranks=True,
    ),
    Foreign("MMEngine (XTuner)", r"Iter\(train\).*data_time:"),
    Foreign("LiBai", "lb.utils.events.*s/iter"),
    Foreign("fairseq", "train_inner.*wps.*ups"),
    Foreign(
        "MLPerf",
        ":::MLLOG",
        "It holds times of blocks of steps, not of steps.",
        "the log of the framework beside it",
        beside=True,
    ),
)
"""Specific ones before general ones."""
_COMPILED = [(foreign, re.compile(foreign.pattern)) for foreign in FOREIGN]


def foreign_of(text: str, *, outranks: bool = False) -> Foreign | None:
    """Return the framework that wrote a line, where it is one whose steps are not read; of those that `outranks` alone."""
    return next((foreign for foreign, pattern in _COMPILED if foreign.outranks >= outranks and pattern.search(text)), None)
