"""What each part of a training step would take alone, at the rates that probes of the same machine reached."""

from collections.abc import Sequence
from dataclasses import dataclass

from tprimat.analyze.probes import bandwidth, bus_bandwidth, gemm_ceiling
from tprimat.core.flops import parameters
from tprimat.records.schema import ProbeRecord, RunMetrics, RunRecord

OPTIMIZER_BYTES = {"fp32": 30, "bf16": 14}
"""Bytes that Adam's update moves per weight. With fp32 states: gradient read (4), master weight and both moments read and
written (24), bf16 weight written (2); with bf16 states: gradient read (2), weight and both moments read and written (12)."""
GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
"""Bytes per weight: fp32 gradients are summed over the replicas, bf16 weights gathered from them."""
TENSOR_EXCHANGES = 10
"""Exchanges of a layer with sequence parallelism: two gathers and two sums forward, the same backward, and two inputs gathered
once more for the gradients of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Seconds that each part of a step would take by itself on one GPU, at the rates that probes reached.

    None where no probe measured the rate, 0 where the step has no such part. Parts that overlap do not add up; what a step takes
    beyond the largest of them is left to gain.
    """

    model_flops: float | None
    """The model's arithmetic at the rate of the fastest matrix product."""
    optimizer: float | None
    """The update of the rank's own weights at the rate of a copy."""
    replicas: float | None
    """Exchange of gradients and weights between replicas."""
    tensor_ranks: float | None
    """Exchange of activations between tensor-parallel ranks."""
    bubble: float | None
    """Arithmetic time that pipeline stages wait at both ends of a step."""


def step_breakdown(run: RunRecord, metrics: RunMetrics, probes: Sequence[ProbeRecord]) -> StepBreakdown | None:
    """Compute the parts of a run's step; None where shape, layout or batch is not recorded."""
    tensor, pipeline, data = run.ran.tensor_parallel, run.ran.pipeline_parallel, run.ran.data_parallel
    batch, sequence, shape, gpus = run.ran.global_batch_sequences, run.ran.sequence_tokens, run.ran.shape, run.machine.gpus
    if not (tensor and pipeline and data and batch and sequence and shape and gpus and metrics.flop_per_token):
        return None
    ceiling = gemm_ceiling(run, probes)
    flops = None if ceiling is None else metrics.flop_per_token * batch * sequence / gpus / ceiling
    copy = max((rate for probe in probes if probe.kind == "copy" and (rate := bandwidth(probe))), default=None)
    states = OPTIMIZER_BYTES.get(run.ran.optimizer_states or "fp32")
    own = parameters(shape).total / (tensor * pipeline)
    others = (data - 1) / data
    exchanged = 2 * shape.hidden * batch * sequence / data * (tensor - 1) / tensor * shape.layers / pipeline
    rounds = run.ran.accumulation_steps
    return StepBreakdown(
        model_flops=flops,
        optimizer=None if copy is None or states is None else states * own / data / copy,
        replicas=_sum_or_none(
            _seconds(GRADIENT_BYTES * own * others, fastest_bus(probes, "reduce_scatter", data)),
            _seconds(WEIGHT_BYTES * own * others, fastest_bus(probes, "all_gather", data)),
        ),
        tensor_ranks=_seconds(TENSOR_EXCHANGES * exchanged, fastest_bus(probes, "all_gather", tensor)),
        bubble=None if flops is None or not rounds else flops * (pipeline - 1) / (rounds * (run.ran.virtual_pipeline or 1)),
    )


def fastest_bus(probes: Sequence[ProbeRecord], kind: str, ranks: int) -> float | None:
    """Return the highest bus bandwidth of a collective in bytes/s over all messages, on as many ranks if a probe has them."""
    rates = [(probe.shape["ranks"], rate) for probe in probes if probe.kind == kind and (rate := bus_bandwidth(probe))]
    alike = [rate for size, rate in rates if size == ranks]
    return max(alike or [rate for _, rate in rates], default=None)


def _seconds(size: float, rate: float | None) -> float | None:
    """Return the seconds for a number of bytes: 0 for none, None without a rate."""
    if not size:
        return 0.0
    return None if rate is None else size / rate


def _sum_or_none(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
