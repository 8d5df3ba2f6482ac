"""The analysis of peak throughput as data, unrounded, in SI units."""

from typing import Any

from tprimat.analyze.peak import Entry
from tprimat.report.peak import PeakAnalysis, name_of
from tprimat.report.table import sentence


def as_document(analysis: PeakAnalysis) -> dict[str, Any]:
    """One JSON document."""
    return {
        "counted_as": analysis.counted_as,
        "overall_peak": _entry(analysis.peaks[0]) if analysis.peaks else None,
        "peaks": [_entry(made) for made in analysis.peaks],
        "configurations": [_entry(made) for made in analysis.entries],
        "projections": [
            {
                "nodes": row.nodes,
                "gpus": row.gpus,
                "linear_tokens_per_second": row.linear_tokens_per_second,
                "tokens_per_second": row.tokens_per_second,
                "linear_flops_per_second": row.linear_flops,
                "efficiency": analysis.efficiency,
            }
            for row in analysis.projections
        ],
        "by_convention": [
            {"platform": made.platform, "model": made.model, "counted_as": name, **_figures(row)}
            for made, counted in analysis.by_yardstick
            for name, row in counted.items()
        ],
        "remarks": [*map(sentence, analysis.verdicts), *analysis.notes],
        "not_counted": [{"run": name_of(item), "because": item.not_counted} for item in analysis.not_counted],
        "without_throughput": list(analysis.without_rate),
    }


def _entry(made: Entry) -> dict[str, Any]:
    run = made.run
    return {
        "platform": made.platform,
        "accelerator": run.machine.accelerator,
        "gpus": made.gpus,
        "model": made.model,
        "strategy": run.strategy,
        "configuration": made.configuration,
        "engine": run.engine,
        "matmul_dtype": run.matmul_dtype,
        "global_batch_sequences": run.global_batch_sequences,
        "sequence_tokens": run.sequence_tokens,
        **_figures(made),
        "step_seconds": made.mean_step_seconds,
        "tokens_per_day": made.tokens_per_day,
        "samples_per_day": made.samples_per_day,
        "peak_memory_bytes": made.peak_memory_bytes,
        "cost_per_million_tokens": made.cost_per_million_tokens,
        "joules_per_token": made.joules_per_token,
        "runs": [item.result.run.run_id for item in made.group.runs],
        "steady_steps": made.steps,
    }


def _figures(made: Entry) -> dict[str, Any]:
    flops, share = made.flops_per_gpu, made.utilization
    return {
        "tokens_per_second": made.tokens_per_second,
        "tokens_per_second_per_gpu": made.per_gpu.value,
        "tokens_per_second_per_gpu_low": made.per_gpu.low,
        "tokens_per_second_per_gpu_high": made.per_gpu.high,
        "flops_per_second": made.flops,
        "flops_per_second_per_gpu": flops.value if flops else None,
        "peak_flops_per_gpu": made.peak_flops,
        "utilization": share.value if share else None,
        "utilization_absent_because": made.utilization_absent_because,
        "share_of_measured_gemm": made.share_of_measured_gemm,
        "measured_gemm_flops": made.measured_gemm_flops,
    }
