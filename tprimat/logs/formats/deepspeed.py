"""DeepSpeed: its throughput timer, and the iteration lines of Megatron-DeepSpeed around it.

The timer prints '…/global_step=10, RunningAvgSamplesPerSec=…, CurrSamplesPerSec=…, MaxMemAllocated=…GB'. Only the current rate is
read: the running one is an average since the second step. GB in the log are GiB (deepspeed/utils/timer.py). The timer covers
forward and backward passes of some layouts in part only, so an iteration line's time counts where the log has both.
"""

import re

from tprimat.logs.arguments import argument
from tprimat.logs.fields import Dialect, LineFields, count, matching, rules_of, stated
from tprimat.logs.formats import megatron

FIELD = re.compile(r"\b(\w+)=([^,\s]+)")


def _read_argument(match: re.Match[str]) -> LineFields | None:
    name, value = match.groups()
    if name == "optimizer_name" and value != "None":
        return LineFields(evidence={"optimizer": value})
    return argument(name, value)


DIALECT = Dialect(
    name="deepspeed",
    signs=(("global_step=", "CurrSamplesPerSec="), ("iter time (s):",), ("iteration=", "elapsed_time_per_iteration_ms=")),
    rules={
        "CurrSamplesPerSec": matching(
            r"global_step=(\d+)", lambda match: LineFields(step=count(match[1]), **stated(dict(FIELD.findall(match.string))))
        ),
        # 'iteration=  1/ 317892 | … elapsed_time_per_iteration_ms=108893.2 | … lm loss=11.13 |' of Megatron-DeepSpeed
        "elapsed_time_per_iteration_ms=": lambda text: megatron.read_iteration(text, "=", mean_since_reset=True),
        **{words: megatron.RULES[words] for words in ("elapsed time per iteration", "using world size", " --num-layers ")},
        " ..": matching(r"\b(\w+) \.{2,} (\S+)", _read_argument),
        **rules_of("deepspeed"),
    },
    marks_its_end=False,
)
