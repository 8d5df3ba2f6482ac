"""Composer and llm-foundry: '[batch=12/30]:', then one metric per line. Memory is in GB of 1e9 bytes.

Rates are means over the window of the speed monitor, so step times derived from them are smoothed.
"""

import re

from tprimat.logs.fields import GIGABYTE, LAUNCHER_PREFIX, LineFields, count, in_bytes, number, plain, whole

NAME = "composer"
SIGNS = (("Train throughput/",), ("[batch=", "]:"))

BATCH = re.compile(r"(?<!Eval )\[batch=(\d+)(?:/(\d+))?\]")
METRIC = re.compile(r"Train ([\w/\-]+): (\S+)")
SETTING = re.compile(
    LAUNCHER_PREFIX + r"\s*(max_seq_len|global_train_batch_size|n_gpus|precision|activation_checkpointing|peft_type): (\S+)\s*$"
)
SETTING_MARKS = ("max_seq_len:", "global_train_batch_size:", "n_gpus:", "precision:", "activation_checkpointing:", "peft_type:")
SETTINGS = {"max_seq_len": "sequence_tokens", "global_train_batch_size": "global_batch_sequences", "n_gpus": "world_size"}
DTYPES = {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "fp8", "fp32": "fp32"}
MARKS = ("[batch=", "Train ", *SETTING_MARKS)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none. They belong to the batch named last."""
    if "[batch=" in text and (match := BATCH.search(plain(text))):
        return LineFields(step=count(match[1]), total_steps=whole(match[2]))
    if "Train " in text and (match := METRIC.search(plain(text))):
        return read_metric(match[1], match[2])
    if any(mark in text for mark in SETTING_MARKS) and (match := SETTING.match(plain(text))):
        return read_setting(match[1], match[2])
    return None


def read_metric(name: str, text: str) -> LineFields | None:
    """Return one metric of the current batch."""
    value = number(text)
    if name == "throughput/device/tokens_per_sec":
        return LineFields(tokens_per_second_per_gpu=value)
    if name == "loss/train/total":
        return LineFields(loss=value)
    if name == "l2_norm/grad/global":
        return LineFields(grad_norm=value)
    if name.startswith("lr-"):
        return LineFields(learning_rate=value)
    if name == "memory/peak_allocated_mem":
        return LineFields(peak_allocated_bytes=in_bytes(value, GIGABYTE))
    if name == "memory/peak_reserved_mem":
        return LineFields(peak_reserved_bytes=in_bytes(value, GIGABYTE))
    return None


def read_setting(name: str, value: str) -> LineFields | None:
    """Return one row of the configuration, which is printed as YAML."""
    if name == "precision":
        return LineFields(evidence={"matmul_dtype": DTYPES[value]}) if value in DTYPES else None
    if name == "activation_checkpointing":
        return LineFields(evidence={"recompute": "full" if value == "true" else "none"})
    if name == "peft_type":
        return LineFields(arguments={"peft": value})
    setting = whole(value)
    return None if setting is None else LineFields(evidence={SETTINGS[name]: setting})
