#!/usr/bin/env python3
"""Train shrunk models by the code of a Megatron-LM clone on a CPU, as ./benchmark.py --engine megatron-lm starts it on GPUs.

pip install pybind11
tools/check_megatron_lm.py /path/to/Megatron-LM

The folder may hold only its three scripts, where megatron-core 0.17 or newer is installed.

Its CUDA calls go to the CPU, its layers are those without Transformer Engine, and its ranks talk over gloo. So sequence and
context parallelism, fp8 and the fused kernels of experts are left out. As any start of Megatron-LM, it leaves compiled helpers
in the clone. A layout takes about half a minute.

Exit status: 0 if every layout trains as planned, 1 if not, 2 if there is no clone.
"""

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "bridge_recipes" / "site")]

LAYERS = 4
KEY = "parallelism.minimal_communication.{model}.nvidia.{key}"
TENSOR, PIPELINE, EXPERT = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, one rank": ("llama", 1, {}),
    "llama, recomputed": ("llama", 1, {"platform_optimizations.nvidia.recompute": "full"}),
    "llama, DP2": ("llama", 2, {}),
    "llama, TP2": ("llama", 2, {TENSOR: 2, "sequence_parallel": "false"}),
    "llama, PP2": ("llama", 2, {PIPELINE: 2}),
    "llama, PP2 VPP2": ("llama", 2, {PIPELINE: 2, "virtual_pipeline_model_parallel_size": 2}),
    "qwen, one rank": ("qwen", 1, {}),
    "qwen3_moe, one rank": ("qwen3_moe", 1, {EXPERT: 1}),
    "qwen3_moe, EP2": ("qwen3_moe", 2, {EXPERT: 2}),
    "qwen3_moe, EP2, forced balance": ("qwen3_moe", 2, {EXPERT: 2, "training.routing": "balanced"}),
    "mixtral, EP2, tokens dropped": ("mixtral", 2, {EXPERT: 2, "training.moe_expert_capacity_factor": 1.25}),
}
"""Name -> model of config.yaml, ranks, and settings: keys of its layout, and whole keys."""
LOCAL = ("--distributed-backend", "gloo", "--transformer-impl", "local", "--use-cpu-initialization")
NO_KERNELS = ("persist-layer-norm", "masked-softmax-fusion", "bias-swiglu-fusion", "bias-dropout-fusion", "rope-fusion")
KERNELS = ("--moe-permute-fusion", "--moe-grouped-gemm")


def main() -> int:
    """Print a row for each layout."""
    parser = argparse.ArgumentParser(description="Train shrunk models by a clone of Megatron-LM on a CPU.")
    parser.add_argument("clone", type=Path)
    clone = parser.parse_args().clone.resolve()
    if not (clone / "pretrain_gpt.py").is_file():
        print(f"error: There is no pretrain_gpt.py in {clone}.", file=sys.stderr)
        return 2
    wrong, first_losses = 0, {}
    with tempfile.TemporaryDirectory(prefix="megatron-lm-") as name:
        folder = Path(name)
        environment = environment_of(folder, clone)
        for layout, (model, ranks, settings) in LAYOUTS.items():
            outcome, losses = train(folder, environment, model, ranks, settings)
            wrong += outcome != "as planned"
            first_losses[layout] = losses[:1]
            print(f"{layout:<34}{outcome:<14}{' '.join(f'{loss:.6f}' for loss in losses)}", flush=True)
    if first_losses["llama, DP2"] != first_losses["llama, one rank"]:
        print("The first loss of two replicas is not that of one rank.", file=sys.stderr)
        wrong += 1
    return 1 if wrong else 0


def environment_of(folder: Path, clone: Path) -> dict[str, str]:
    """Write what makes a start believe in GPUs, and return its variables."""
    from tprimat.engines.megatron_lm import SCRIPTS

    (folder / "site").mkdir()
    start = (
        f"import sys; sys.path.append({str(ROOT / 'tools')!r}); import check_megatron_lm; check_megatron_lm.redirect_imports()\n"
    )
    (folder / "site" / "sitecustomize.py").write_text(start, encoding="utf8")
    (folder / "clone").mkdir()  # without pyproject.toml, which may ask for a newer Python than trains here
    for part in (*SCRIPTS, "megatron"):
        if (clone / part).exists():
            (folder / "clone" / part).symlink_to(clone / part)
    paths = (folder / "site", ROOT / "tests" / "fake_packages", os.environ.get("PYTHONPATH"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "MEGATRON_PATH": str(folder / "clone"),
        "OMP_NUM_THREADS": "1",
    }


def train(folder: Path, environment: dict[str, str], model: str, ranks: int, settings: dict[str, Any]) -> tuple[str, list[float]]:
    """Return whether a layout trains as planned, and its losses."""
    from shallow import write_shallow_config

    from tprimat.records.store import RunDirectory

    config = folder / f"{model}.yaml"
    write_shallow_config(config, LAYERS, model)
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}
    output = Path(tempfile.mkdtemp(dir=folder))
    words = ["--config", str(config), "--model", model, "--gpus", str(ranks), "--output-dir", str(output), "--steps", "4"]
    words += ["--engine", "megatron-lm", "--platform", "nvidia", "--set", "size=tiny", "--force", "--json"]
    for key, value in settings.items():
        words += ["--set", f"{key if '.' in key else KEY.format(model=model, key=key)}={value}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmark.py"), *words],
        env={**environment, "FAKE_GPUS": json.dumps([gpu] * ranks)},
        capture_output=True,
        text=True,
        check=False,
    )
    runs = list((output / "runs").glob("*"))
    if not runs:
        return done.stderr.strip(), []
    directory = RunDirectory(runs[0])
    run = directory.read_run()
    if run.outcome != "completed":
        return f"{run.outcome}: {run.cause}", []
    losses = [step.loss for step in directory.read_steps() if step.loss is not None]
    return "; ".join(run.mismatches) or "as planned", losses


# In the ranks, where sitecustomize.py calls it.


def redirect_imports() -> None:
    """Say that Transformer Engine is installed, and redirect CUDA before pretrain_gpt.py imports Megatron-Core."""
    if not hasattr(typing, "override"):  # Python 3.12's, which Megatron-LM imports
        typing.override = lambda function: function  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Finder())


class Finder(importlib.abc.MetaPathFinder):
    """Looks at what is imported, and by whom."""

    redirected = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find Transformer Engine for the engine alone."""
        del path, target
        if name == "transformer_engine" and self._is_asked_by("tprimat.engines"):
            return importlib.machinery.ModuleSpec(name, None)
        if name == "gpt_builders" and sys.argv[0].endswith("pretrain_gpt.py") and not Finder.redirected:
            Finder.redirected = True
            redirect_megatron()
        return None

    def _is_asked_by(self, package: str) -> bool:
        frame = sys._getframe(1)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith(package):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def redirect_megatron() -> None:
    """Replace CUDA's functions, and arguments that ask for its kernels."""
    import torch

    from tprimat.megatron import bootstrap

    bootstrap.redirect_to_cpu()
    import on_a_cpu  # type: ignore[import-not-found]

    on_a_cpu.replace_cuda()
    torch.cuda.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    nobody = SimpleNamespace(major=8, minor=0, name="none", total_memory=1)
    torch.cuda.get_device_properties = lambda *_: nobody
    torch.cuda.get_device_name = lambda *_: nobody.name
    torch.cuda.memory_allocated = lambda *_: 0
    torch.cuda.memory_reserved = lambda *_: 0
    torch.cuda.max_memory_reserved = lambda *_: 0
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.training import initialize, training

    token_dispatcher.maybe_move_tensor_to_cpu = on_a_cpu.on_the_host
    genuine = initialize.initialize_megatron

    def initialize_megatron(*arguments: Any, **named: Any) -> Any:
        return genuine(*arguments, **{**named, "allow_no_cuda": True})

    initialize.initialize_megatron = training.initialize_megatron = initialize_megatron
    sys.argv = [word for word in sys.argv if word not in KERNELS] + [*LOCAL, *(f"--no-{name}" for name in NO_KERNELS)]


if __name__ == "__main__":
    sys.exit(main())
