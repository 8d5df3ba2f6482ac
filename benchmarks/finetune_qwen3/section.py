"""The section about the trainings of Qwen3 8B, from their records: for its page and benchmarks/results/h200.md."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.finetune_qwen3.embedded import MODEL
from benchmarks.finetune_qwen3.jobs import newest_result
from tprimat.analyze.groups import Measured, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.probes import under_ceiling
from tprimat.core import units
from tprimat.records.discover import probes_in
from tprimat.records.schema import RunMetrics, RunRecord
from tprimat.report.tables import table
from tprimat.report.words import not_counted_words

TITLE = "## Training Qwen3 8B"
TEXT = """Sequences of 8,192 tokens, 14 per device and step on a GPU, with full recomputation of activations. `embedded` trains
all weights, with fp32 master weights and AdamW, on generated tokens. `torchtune` fine-tunes with bf16 states, compiled, on short
made-up texts packed into sequences; its token counts include only tokens that carry loss. Rates are model FLOP (causal), without
recomputation. torchtune's runs have no rate: attention stays inside a text, and LoRA leaves out the weights' gradients.

Token rates do not show which engine is faster. A token costs more on `embedded`, where attention spans the whole sequence and
the weights have fp32 masters."""
RANDOM_WEIGHTS = "weights: random"
"""Evidence note of a run without a trained checkpoint."""
LONGER = " (a run that timed out needs a larger `--time-budget` or fewer `--train-steps`)"
HEADER = (
    "run",
    "dtype",
    "devices",
    "tokens/s/device",
    "tokens/s",
    "rate per device",
    "of dense peak",
    "of measured matmul",
    "memory per device",
    "n",
)


def section(output: Path, refusal: str | None = None) -> str:
    """Write the section from the records of an output folder.

    Args:
        output: results folder; probes in it give the rate of measured matrix products.
        refusal: why torchtune cannot run here; left out once there are runs of torchtune.
    """
    probes, _ = probes_in([output])
    runs = {}
    for folder in sorted(path for path in (output / MODEL).glob("*") if path.is_dir()):
        result = newest_result(folder)
        if result is not None:
            runs[folder.name] = measure(result, under_ceiling(MetricOptions(), result.run, probes))
    return section_of(runs, refusal)


def section_of(runs: Mapping[str, Measured], refusal: str | None) -> str:
    """Write completed runs as a table, and failed ones with their causes.

    Args:
        runs: job -> the run that stands for it.
        refusal: why torchtune cannot run here.
    """
    parts = []
    rows = [row(name, run.result.run, run.metrics) for name, run in runs.items() if run.metrics and not run.not_counted]
    parts += [table(HEADER, rows, left=2)] if rows else []
    random = [name for name, run in runs.items() if (seen := run.result.run.evidence) and RANDOM_WEIGHTS in seen.notes]
    parts += [f"With random weights, which cost the same as trained ones: {', '.join(random)}."] if random else []
    failed = [f"- {name}: {not_counted_words(run)}" for name, run in runs.items() if run.not_counted]
    timed_out = any(run.result.run.outcome == "timed_out" for run in runs.values())
    parts += [f"Did not complete{LONGER if timed_out else ''}:\n\n" + "\n".join(failed)] if failed else []
    if refusal and not any(name.startswith("torchtune") for name in runs):
        parts.append(f"torchtune was not run: {refusal}")
    return "\n\n".join([TITLE, TEXT, *(parts or ["Not measured yet."])])


def row(name: str, run: RunRecord, metrics: RunMetrics) -> list[str]:
    """Describe one run; a CPU has no meaningful FLOP rate."""
    per_device, rate = metrics.tokens_per_second_per_gpu, metrics.model_flops_per_second_per_gpu
    no_rate = run.machine.platform == "cpu"
    return [
        name,
        run.ran.matmul_dtype or units.ABSENT,
        units.count(run.machine.gpus),
        units.count(per_device.value if per_device else None),
        units.count(metrics.tokens_per_second),
        units.teraflops(rate.value if rate and not no_rate else None),
        units.percent(metrics.mfu.value if metrics.mfu and not no_rate else None),
        units.percent(None if no_rate else metrics.share_of_measured_gemm),
        units.gibibytes(metrics.peak_memory_bytes),
        units.count(metrics.window.steps),
    ]
