"""torchtune's metric log: 'Step 10 | loss:1.7 lr:2e-05 tokens_per_second_per_gpu:… peak_memory_alloc:…' (GiB).

Its rate counts unmasked tokens only, so a step time can be derived only where every sequence is full (packed data).
"""

import re

from tprimat.logs.fields import GIBIBYTE, LineFields, count, in_bytes, number, plain

NAME = "torchtune"
SIGNS = (("Step ", "| loss:", "tokens_per_second_per_gpu:"),)

UNMASKED_RATE = True

STEP = re.compile(r"Step (\d+) \|")
FIELD = re.compile(r"\b(\w+):(\S+)")
MARKS = ("Step ",)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "Step " not in text or "loss:" not in text:
        return None
    text = plain(text)
    match = STEP.search(text)
    if match is None:
        return None
    fields = dict(FIELD.findall(text[match.end() :]))
    return LineFields(
        step=count(match[1]),
        tokens_per_second_per_gpu=number(fields.get("tokens_per_second_per_gpu")),
        loss=number(fields.get("loss")),
        grad_norm=number(fields.get("grad_norm")),
        learning_rate=number(fields.get("lr")),
        peak_allocated_bytes=in_bytes(number(fields.get("peak_memory_alloc")), GIBIBYTE),
        peak_reserved_bytes=in_bytes(number(fields.get("peak_memory_reserved")), GIBIBYTE),
    )
