"""TPrimat's own log: one line with the record of the run, then Megatron-LM's iteration line for each step (train/step_log.py)."""

from tprimat.core.errors import RecordError
from tprimat.logs.fields import Dialect, LineFields, rules_of, whole
from tprimat.logs.formats import megatron_lm
from tprimat.records.schema import RunRecord
from tprimat.records.store import RUN_LINE, from_json


def read_record(text: str) -> LineFields | None:
    """Read 'tprimat run: {...}', which begins a run; None where it is torn."""
    try:
        return LineFields(run=from_json(RunRecord, text.partition(RUN_LINE)[2], where=RUN_LINE))
    except RecordError:
        return None


def read_iteration(text: str) -> LineFields | None:
    """Read one step. The time is of this step alone; Megatron-LM prints a mean since its last reset."""
    fields = megatron_lm.pairs(text)
    return megatron_lm.read_iteration(
        text,
        mean_since_reset=False,
        peak_allocated_bytes=whole(fields.get("mem-max-allocated-bytes")),
        peak_reserved_bytes=whole(fields.get("mem-max-reserved-bytes")),
    )


DIALECT = Dialect(
    name="tprimat",
    signs=((RUN_LINE + "{",), ("[tprimat ", "elapsed time per iteration")),
    rules={
        RUN_LINE: read_record,
        "elapsed time per iteration": read_iteration,
        **rules_of("tprimat"),
    },
)
