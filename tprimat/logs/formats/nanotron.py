"""nanotron: 'iteration: 5 / 20 | … time_per_iteration_ms: 4.21K | …', numbers of three digits with a decimal suffix."""

import re

from tprimat.logs.fields import LineFields, count, human, in_bytes, plain, scaled
from tprimat.logs.formats.megatron_lm import pairs

NAME = "nanotron"
SIGNS = (("iteration: ", "time_per_iteration_ms:"),)

ITERATION = re.compile(r"iteration: (\d+) / (\d+)")
SETTING = re.compile(r"\b(dp|pp|tp|expert_parallel_size|context_parallel_size|sequence_length|micro_batch_size)=(\d+)\b")
SETTINGS = {
    "dp": "data_parallel",
    "pp": "pipeline_parallel",
    "tp": "tensor_parallel",
    "expert_parallel_size": "expert_parallel",
    "context_parallel_size": "context_parallel",
    "sequence_length": "sequence_tokens",
    "micro_batch_size": "micro_batch_sequences",
}
SETTING_MARKS = ("dp=", "pp=", "tp=", "parallel_size=", "sequence_length=", "micro_batch_size=")
MARKS = ("time_per_iteration_ms:", *SETTING_MARKS)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "time_per_iteration_ms:" in text:
        return read_iteration(plain(text))
    if any(mark in text for mark in SETTING_MARKS):
        evidence = {SETTINGS[name]: count(digits) for name, digits in SETTING.findall(text)}
        return LineFields(evidence=evidence) if evidence else None
    return None


def read_iteration(text: str) -> LineFields | None:
    """Return one iteration."""
    match = ITERATION.search(text)
    if match is None:
        return None
    fields = pairs(text[match.end() :])
    batch = human(fields.get("global_batch_size"))
    return LineFields(
        step=count(match[1]),
        total_steps=count(match[2]),
        step_seconds=scaled(human(fields.get("time_per_iteration_ms") or fields.get("elapsed_time_per_iteration_ms")), 1e-3),
        tokens_per_second_per_gpu=human(fields.get("tokens_per_sec_per_gpu")),
        tflops_per_gpu=human(fields.get("model_tflops_per_gpu")),
        loss=human(fields.get("lm_loss")),
        grad_norm=human(fields.get("grad_norm")),
        learning_rate=human(fields.get("lr")),
        global_batch_sequences=int(batch) if batch is not None and 0 < batch < 1000 else None,
        peak_reserved_bytes=in_bytes(human(fields.get("cuda_max_memory_reserved")), 1),
    )
