#!/usr/bin/env python3
"""Train torchtitan's tiny model on a CPU, as ./benchmark.py --engine torchtitan starts Llama 3.1 8B on GPUs.

pip install torchtitan==0.3.0    beside torch 2.14 or newer
python3 tools/check_torchtitan.py

The mesh, batch, optimizer, schedule and recomputation are the plan's. Ranks talk over gloo, which adds gradients and divides
them after; attention is torch's, since FlexAttention has no backward pass on a CPU. A layout takes about half a minute.

Exit status: 0 if every layout trains as planned, 1 if not, 2 if torchtitan 0.3 cannot start here.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TENSOR = "parallelism.minimal_communication.llama.nvidia.tensor_model_parallel_size=2"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "DP2": (2, ()),
    "DP2, recomputed": (2, ("platform_optimizations.nvidia.recompute=full",)),
    "TP2 DP2": (4, (TENSOR,)),
}
"""Name -> ranks, and settings."""
WORDS = ("--model", "llama", "--engine", "torchtitan", "--platform", "nvidia", "--steps", "4", "--force", "--json")
BATCH = ("--sequence-length", "64", "--micro-batch-size", "1", "--global-batch-size", "4")
VOCABULARY = 32_768
"""Of the tiny model, for the words of our tokenizer."""
GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}
OTHER_MODEL = "parameters"
"""In the one mismatch that is meant."""


def main() -> int:
    """Print a row for each layout."""
    wrong = 0
    for layout, (ranks, settings) in LAYOUTS.items():
        with tempfile.TemporaryDirectory(prefix="torchtitan-") as name:
            outcome, losses = train(Path(name), ranks, settings)
        if outcome.startswith("error"):
            print(outcome, file=sys.stderr)
            return 2
        wrong += outcome != "as planned"
        print(f"{layout:<20}{outcome:<14}{' '.join(f'{loss:.5f}' for loss in losses)}", flush=True)
    return 1 if wrong else 0


def train(folder: Path, ranks: int, settings: tuple[str, ...]) -> tuple[str, list[float]]:
    """Return whether a layout trains as planned, and its losses."""
    from tprimat.records.store import RunDirectory

    start = f"import os, sys\nif 'TPRIMAT_PLAN' in os.environ:\n    sys.path.append({str(ROOT / 'tools')!r})\n"
    (folder / "sitecustomize.py").write_text(
        f"{start}    import check_torchtitan\n    check_torchtitan.on_a_cpu()\n", encoding="utf8"
    )
    (folder / "pynvml.py").symlink_to(ROOT / "tests" / "fake_packages" / "pynvml.py")
    paths = (str(folder), os.environ.get("PYTHONPATH"))
    environment = {"FAKE_GPUS": json.dumps([GPU] * ranks), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = [*WORDS, *BATCH, "--gpus", str(ranks), "--output-dir", str(folder / "output")]
    words += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmark.py"), *words],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    runs = list((folder / "output" / "runs").glob("*"))
    if not runs:
        return done.stderr.strip(), []
    run, steps = RunDirectory(runs[0]).read_run(), RunDirectory(runs[0]).read_steps()
    if run.outcome != "completed":
        return f"{run.outcome}: {run.cause}", []
    meant = [one for one in run.mismatches if OTHER_MODEL not in one]
    return "; ".join(meant) or "as planned", [step.loss for step in steps if step.loss is not None]


def on_a_cpu() -> None:
    """In a rank: make torchtitan's device the CPU, and its 8B its tiny model."""
    import torch
    import torch._utils

    nobody = type("Nobody", (), {"name": "CPU", "total_memory": 1 << 34})
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, answer in {
        "get_device_properties": nobody,
        "get_device_name": "CPU",
        "set_device": None,
        "empty_cache": None,
    }.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    torch.cpu.reset_peak_memory_stats = lambda *_: None
    peaks = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    torch.cpu.memory_stats = lambda *_: dict.fromkeys(peaks, 0)
    import tprimat.engines.torchtitan as ours

    genuine = ours.titan_config
    ours.titan_config = lambda: tiny(genuine())


def tiny(config: Any) -> Any:
    """Replace the model, and what a CPU cannot do."""
    import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
    import torch.nn.functional as F
    import torchtitan.trainer
    from torch.nn.attention.flex_attention import AuxOutput
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3.config_registry import model_registry

    config.model_spec = model_registry("debugmodel")
    model = config.model_spec.model
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    config.loss.loss_fn.global_vocab_size = VOCABULARY

    def attend(queries: Any, keys: Any, values: Any, **_: Any) -> tuple[Any, Any]:
        shared = queries.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=shared), AuxOutput()

    factors = collectives._get_gradient_divide_factors

    def summed(*arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(factors).bind(*arguments, **named)
        return factors(**{**bound.arguments, "force_sum_reduction_for_comms": True})

    FlexAttention._compiled_flex_attn = staticmethod(attend)
    collectives._get_gradient_divide_factors = summed
    torchtitan.trainer.dist_utils.set_pg_timeouts = lambda *_, **__: None  # its barrier names a device's number
    return config


if __name__ == "__main__":
    sys.exit(main())
