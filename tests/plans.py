"""Requests for plans, and workloads, of which a test says only what it is about."""

from tprimat.config.load import parse_setting
from tprimat.config.schema import DataConfig, LayoutConfig
from tprimat.core.implementations import EMBEDDED
from tprimat.core.models import model_shape
from tprimat.core.workload import FullWorkload, Layout
from tprimat.plan.build import PlanRequest
from tprimat.plan.layout import LayoutRequest, resolve

DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""Short names of the keys of a layout."""


def divide(shape, ranks=8, *, data=None, **layout):
    """Return what plan/layout.py makes of degrees by their short names; raises LayoutError."""
    names = {**DEGREES, "dp": "data_parallel_size"}
    return resolve(
        LayoutRequest(
            shape=shape,
            layout=LayoutConfig(**{names.get(key, key): value for key, value in layout.items()}),
            data=DataConfig(**{"global_batch_size": 128, "sequence_length": 2048, **(data or {})}),
            world_size=ranks,
            where_layout=lambda key: f"layout {key}",
            where_data=lambda key: f"data {key}",
        )
    )


def workload(**changes):
    """Return the work of Llama 3.1 8B on eight replicas by the embedded engine, unless `changes` say otherwise."""
    usual = {"shape": model_shape("llama-3.1-8b"), "layout": Layout(data=8), "micro_batch": 4, "accumulation_steps": 4}
    return FullWorkload.of(**{**usual, "sequence_tokens": 2048, "implementation": EMBEDDED, **changes})


def request_of(model, strategy, **fields):
    """Return a request for the embedded engine on a node of eight NVIDIA GPUs, unless `fields` say otherwise."""
    usual = {
        "platform": "nvidia",
        "size": "full",
        "engine": "megatron",
        "engine_reason": "test",
        "gpus_found": 8,
        "run_id": "run",
        "run_directory": "/nowhere/runs/run",
        "output_directory": "/nowhere",
    }
    return PlanRequest(model=model, strategy=strategy, **{**usual, **fields})


def short_settings(changes, model, strategy, platform):
    """Return settings in short: o. for a switch of the engine, p. for what else the platform has, l. for a key of the layout."""
    below = f"platform_optimizations.{platform}"
    long = {"o.": f"{below}.engine_options.", "p.": f"{below}.", "l.": f"parallelism.{strategy}.{model}.{platform}."}
    return [parse_setting(long.get(change[:2], change[:2]) + change[2:]) for change in changes]
