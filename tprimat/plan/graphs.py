"""Whether the embedded engine launches micro-batches as CUDA graphs: as asked, or where a record shows a gain."""

from dataclasses import dataclass

from tprimat.core.rows import read_rows
from tprimat.core.workload import graph_obstacle
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS

FEWEST_STEPS = STEPS_WITHOUT_GRAPHS + 2
"""The first steps run without graphs, and one more is warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphGain:
    """A row of data/cuda_graphs.yaml, which says what the fields are."""

    name: str
    tensor_parallel: int
    precision: str
    most_tokens: int
    gain: float
    recording_seconds: float
    source: str
    date: str | None


def measured_gain(plan: RunPlan) -> GraphGain | None:
    """Return the record that shows a gain for the layout, precision and micro-batch of a plan; None where none does."""
    work, options = plan.workload, plan.engine_options
    tokens = (work.micro_batch_sequences or 1) * work.sequence_tokens
    # No record shows what graphs of pipeline stages gain.
    suitable = plan.platform == "nvidia" and plan.nodes == 1 and plan.steps >= FEWEST_STEPS and work.layout.pipeline == 1
    measured = options.layers == "local" and options.optimizer_states == "fp32"
    if not suitable or not measured or graph_obstacle(work, fully_shard=options.fully_shard, own_layers=True):
        return None
    rows = [row for row in read_rows("cuda_graphs.yaml", "gains", GraphGain) if row.precision == work.matmul_dtype]
    most = max((row.tensor_parallel for row in rows), default=1)
    # Kernels of more tensor ranks than were measured are shorter still.
    ranks = min(work.layout.tensor, most)
    return next((row for row in rows if row.tensor_parallel == ranks and tokens <= row.most_tokens), None)


def launches_graphs(plan: RunPlan) -> bool:
    """Return whether micro-batches are launched as graphs; true and false of the configuration win over any record."""
    asked = plan.engine_options.cuda_graphs
    return measured_gain(plan) is not None if asked == "auto" else asked is True
