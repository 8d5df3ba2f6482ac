"""What each part of a training step would take alone, at the rates that probes of the same machine reached.

Parts that overlap do not add up; what a step takes beyond the largest of them is what is left to gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tprimat.analyze.probes import bandwidth, bus_bandwidth
from tprimat.analyze.roofline import gemm_ceiling
from tprimat.facts.flops import parameters
from tprimat.records.metrics import RunMetrics
from tprimat.records.schema import ProbeRecord, RunRecord

OPTIMIZER_BYTES = {"fp32": 30, "bf16": 14}
"""A weight in Adam's update. With fp32 states: gradient read (4), master weight and both moments read and written (24), bf16
weight written (2); with bf16 states: gradient read (2), weight and both moments read and written (12)."""
GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
"""fp32 gradients are summed over the replicas, bf16 weights gathered from them."""
TENSOR_EXCHANGES = 10
"""A layer's, with sequence parallelism: two gathers and two sums forward, the same backward, and two inputs gathered once more
for the gradients of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneSeconds:
    """Seconds of one step on one GPU. None: no probe tells, or 0 where there is no such part."""

    model_flops: float | None
    """All of the model's arithmetic, at the rate of the fastest matrix product."""
    optimizer: float | None
    """The update of this rank's share, at the rate of a copy."""
    replicas: float | None
    """Gradients and weights exchanged between the replicas."""
    tensor_ranks: float | None
    """Activations exchanged between the ranks that share each matrix."""
    bubble: float | None
    """Pipeline stages waiting at both ends of a step, of the arithmetic."""


def alone(run: RunRecord, metrics: RunMetrics, probes: Sequence[ProbeRecord]) -> AloneSeconds | None:
    """The parts of a run's step; None where the record does not tell its shape, split and batch."""
    tensor, pipeline, data = run.tensor_parallel, run.pipeline_parallel, run.data_parallel
    batch, sequence, shape, gpus = run.global_batch_sequences, run.sequence_tokens, run.shape, run.machine.gpus
    if not (tensor and pipeline and data and batch and sequence and shape and gpus and metrics.flop_per_token):
        return None
    ceiling = gemm_ceiling(run, probes).flop_per_second
    flops = None if ceiling is None else metrics.flop_per_token * batch * sequence / gpus / ceiling
    copy = max((rate.value for probe in probes if probe.kind == "copy" and (rate := bandwidth(probe))), default=None)
    states = OPTIMIZER_BYTES.get(str(run.engine_options.get("optimizer_states", "fp32")))
    own = parameters(shape).total / (tensor * pipeline)
    others = (data - 1) / data
    exchanged = 2 * shape.hidden * batch * sequence / data * (tensor - 1) / tensor * shape.layers / pipeline
    rounds = run.accumulation_steps
    return AloneSeconds(
        model_flops=flops,
        optimizer=None if copy is None or states is None else states * own / data / copy,
        replicas=_sum(
            over(GRADIENT_BYTES * own * others, fastest_bus(probes, "reduce_scatter", data)),
            over(WEIGHT_BYTES * own * others, fastest_bus(probes, "all_gather", data)),
        ),
        tensor_ranks=over(TENSOR_EXCHANGES * exchanged, fastest_bus(probes, "all_gather", tensor)),
        bubble=None if flops is None or not rounds else flops * (pipeline - 1) / (rounds * (run.virtual_pipeline or 1)),
    )


def fastest_bus(probes: Sequence[ProbeRecord], kind: str, ranks: int) -> float | None:
    """The highest bus bandwidth of a collective, bytes/s, whatever the message; over as many ranks, if any probe was."""
    found = [(probe.shape["ranks"], rate) for probe in probes if probe.kind == kind and (rate := bus_bandwidth(probe))]
    alike = [rate for size, rate in found if size == ranks]
    return max(alike or [rate for _, rate in found], default=None)


def over(size: float, rate: float | None) -> float | None:
    """Seconds; none at all for nothing, and unknown without a rate."""
    if not size:
        return 0.0
    return None if rate is None else size / rate


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
