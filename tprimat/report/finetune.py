"""Training runs of Qwen3 8B in the suite, from their records."""

from collections.abc import Mapping

from tprimat import units
from tprimat.analyze.groups import Measured
from tprimat.records.metrics import RunMetrics
from tprimat.records.schema import RunRecord
from tprimat.report.tables import table

TITLE = "## Training Qwen3 8B"
TEXT = """Sequences of 8,192 tokens, 14 for each device and step on a GPU, activations recomputed. `embedded` trains in full with
fp32 master weights and AdamW on tokens of our own; `torchtune` fine-tunes with bf16 states, compiled, on short invented texts
that are packed into sequences. Rates are model FLOP (causal), without what recomputation repeats; torchtune's runs have none,
since their attention stays inside a text and LoRA leaves the weights' gradients out. Its tokens are those that carry loss. So a
token asks more of `embedded`, whose attention spans the whole sequence and whose weights have fp32 masters: the token rates of
both say nothing about which is faster."""
RANDOM = "weights: random"
"""In the evidence of a run that trained no checkpoint of anybody's."""
LONGER = " (what timed out needs a larger `--time-budget`, or fewer `--train-steps`)"
HEADER = (
    "run",
    "dtype",
    "devices",
    "tokens/s of one",
    "tokens/s in all",
    "rate of one",
    "of dense peak",
    "of measured matmul",
    "memory of each",
    "n",
)


def finetune_section(runs: Mapping[str, Measured], reason: str | None) -> str:
    """What completed as a table, what did not with its cause.

    Args:
        runs: the deciding run of each job, under the job's name.
        reason: why torchtune was not tried.
    """
    parts = [TITLE, TEXT]
    rows = [row_of(name, run.result.run, run.metrics) for name, run in runs.items() if run.metrics and not run.not_counted]
    parts += [table(HEADER, rows, left=2)] if rows else []
    random = [name for name, run in runs.items() if (proof := run.result.run.evidence) and RANDOM in proof.notes]
    parts += [f"From random weights, which cost what trained ones do: {', '.join(random)}."] if random else []
    failed = [f"- {name}: {run.not_counted}" for name, run in runs.items() if run.not_counted]
    cut = any(run.not_counted and run.result.run.outcome == "timed_out" for run in runs.values())
    parts += [f"Did not complete{LONGER if cut else ''}:\n\n" + "\n".join(failed)] if failed else []
    if reason and not any(name.startswith("torchtune") for name in runs):
        parts.append(f"torchtune was not run: {reason}")
    return "\n\n".join(parts if len(parts) > 2 else [*parts, "Not measured yet."])


def row_of(name: str, run: RunRecord, metrics: RunMetrics) -> list[str]:
    """One run."""
    each, rate = metrics.tokens_per_second_per_gpu, metrics.model_flops_per_second_per_gpu
    no_rate = run.machine.platform == "cpu"
    return [
        name,
        run.matmul_dtype or units.ABSENT,
        units.count(run.machine.gpus),
        units.count(each.value if each else None),
        units.count(metrics.tokens_per_second),
        units.teraflops(rate.value if rate and not no_rate else None),
        units.percent(metrics.mfu.value if metrics.mfu and not no_rate else None),
        units.percent(None if no_rate else metrics.share_of_measured_gemm),
        units.gibibytes(metrics.peak_memory_bytes),
        units.count(metrics.window.steps),
    ]
