"""The layouts that engine_speed.py measures, and what is asked of each."""

from dataclasses import dataclass, replace
from typing import Any

MEANT_FOR = 4
"""GPUs that share a global batch."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One workload, split in one way."""

    name: str
    model: str = "llama"
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    virtual: int | None = None
    gpus: int | None = None
    """None: all that are there."""
    micro_batch: int = 4
    global_batch: int = 64
    sequence: int = 2048
    precision: str = "bf16"
    optimizer_states: str = "fp32"
    fully_sharded: bool = False
    recompute: str = "none"
    architecture: str | None = None
    """A row of models.yaml instead of the model's own."""
    layers: int | None = None
    """Of a model that is cut to fewer than it has."""
    routing: str = "natural"
    target_tokens_per_second_per_gpu: int | None = None
    """What the embedded engine should reach on 4 H200, or on as many as the layout is for."""
    target_mfu: float | None = None
    """The same as a share 0..1 of the dense peak."""

    def ranks(self, here: int) -> int | None:
        """GPUs that it takes of those that are here; None where it cannot run on them."""
        ranks = self.gpus or here
        replica = self.tensor * self.pipeline * self.context
        fits = 0 < ranks <= here and ranks % replica == 0 and self.global_batch % (self.micro_batch * ranks // replica) == 0
        fits = fits and ranks % (self.expert * self.pipeline) == 0
        return ranks if fits else None

    def with_equal_work(self, here: int) -> "Layout":
        """With the work for each of the GPUs here that each of four would have."""
        return self if self.gpus else replace(self, global_batch=self.global_batch * here // MEANT_FOR)


def _mixture(name: str, **changes: Any) -> Layout:
    """Return a layout of Qwen3-30B-A3B cut to 12 layers, on two GPUs."""
    common = {"model": "qwen3_moe", "gpus": 2, "micro_batch": 2, "global_batch": 64, "sequence": 4096, "layers": 12}
    return Layout(name=name, **{**common, **changes})


def _short(name: str, **changes: Any) -> Layout:
    """Return a layout of two GPUs with small batches: what it takes and how long is predicted before it runs."""
    return Layout(name=f"short_{name}", **{"gpus": 2, "global_batch": 16, **changes})


def _cut(name: str, layers: int = 20, **changes: Any) -> Layout:
    """Return a layout of Llama 3.1 8B cut to so many layers that one H200 holds them with all of their training state."""
    return Layout(name=f"cut_{name}", **{"gpus": 1, "layers": layers, "global_batch": 16, **changes})


CUT = (
    _cut("mbs2_fp8", micro_batch=2, precision="fp8"),
    _cut("s8192_mbs1_fp8", micro_batch=1, global_batch=4, sequence=8192, precision="fp8"),
    _cut("s8192_mbs1", micro_batch=1, global_batch=4, sequence=8192),
    _cut("mbs4"),
    _cut("mbs1", micro_batch=1),
    _cut("mbs4_fp8", precision="fp8"),
    _cut("10_mbs4", layers=10),
    _cut("10_mbs1", layers=10, micro_batch=1),
    _cut("10_mbs4_fp8", layers=10, precision="fp8"),
)
"""The micro-batches of data parallelism, without its communication: 20 layers for a GPU of 141 GB, 10 for one of 80 GB."""

SHORT = (
    _short("dp_mbs1", micro_batch=1),
    _short("dp_mbs2", micro_batch=2),
    _short("dp_mbs4"),
    _short("qwen_bf16_states", model="qwen", gpus=1, optimizer_states="bf16"),
    _short("dp_mbs4_selective", recompute="selective"),
    _short("dp_mbs8_full", micro_batch=8, recompute="full"),
    _short("tp2_mbs8", tensor=2, micro_batch=8),
    _short("tp2_mbs4_fp8", tensor=2, precision="fp8"),
    _short("qwen_tp2_mbs4", model="qwen", tensor=2),
    _short("cp2_s8192", context=2, micro_batch=1, global_batch=4, sequence=8192),
    _short("cp2_s32768_full", context=2, micro_batch=1, global_batch=2, sequence=32768, recompute="full"),
    _short("pp2_vpp2_mbs2", pipeline=2, virtual=2, micro_batch=2),
    _short("pp2_vpp4_mbs2", pipeline=2, virtual=4, micro_batch=2),
    _short("1b_dp_mbs4", architecture="llama-3.2-1b"),
    _short("3b_dp_mbs4", architecture="llama-3.2-3b"),
)
"""Each varies one thing that memory or time depend on."""

LAYOUTS = (
    Layout(name="dp_mbs4", target_tokens_per_second_per_gpu=12_400),
    Layout(name="dp_mbs1", micro_batch=1, target_tokens_per_second_per_gpu=10_600),
    Layout(name="tp2_mbs4", tensor=2, target_tokens_per_second_per_gpu=11_000),
    Layout(name="tp4_mbs4", tensor=4, target_tokens_per_second_per_gpu=10_300),
    Layout(name="tp2_mbs1", tensor=2, micro_batch=1),
    Layout(name="tp4_mbs1", tensor=4, micro_batch=1),
    Layout(name="tp2_pp2_mbs4", tensor=2, pipeline=2, target_tokens_per_second_per_gpu=10_300),
    Layout(name="tp2_pp2_vpp2_mbs4", tensor=2, pipeline=2, virtual=2, target_tokens_per_second_per_gpu=10_300),
    Layout(name="pp2_mbs4", pipeline=2),
    Layout(name="pp2_vpp2_mbs4", pipeline=2, virtual=2),
    Layout(name="dp_s8192_mbs1", micro_batch=1, global_batch=32, sequence=8192, target_tokens_per_second_per_gpu=10_800),
    Layout(name="dp_mbs4_fp8", precision="fp8", target_tokens_per_second_per_gpu=15_500),
    Layout(name="dp_mbs2_fp8", micro_batch=2, precision="fp8"),
    Layout(name="dp_s8192_mbs1_fp8", micro_batch=1, global_batch=32, sequence=8192, precision="fp8"),
    Layout(name="qwen_one_gpu", model="qwen", gpus=1, global_batch=32, optimizer_states="bf16", target_mfu=0.58),
    Layout(name="llama_one_gpu", gpus=1, micro_batch=1, global_batch=16, optimizer_states="bf16"),
    Layout(name="qwen_dp_mbs4", model="qwen"),
    Layout(name="dp_mbs2", micro_batch=2),
    Layout(name="dp_mbs4_full", recompute="full"),
    Layout(name="tp2_mbs2", tensor=2, micro_batch=2),
    Layout(name="qwen_dp_mbs2", model="qwen", micro_batch=2),
    Layout(name="qwen_tp2_pp2_mbs4", model="qwen", tensor=2, pipeline=2),
    Layout(name="qwen_tp2_pp2_mbs1", model="qwen", tensor=2, pipeline=2, micro_batch=1),
    Layout(name="qwen_tp2_mbs4", model="qwen", tensor=2),
    Layout(name="qwen_tp2_mbs2", model="qwen", tensor=2, micro_batch=2),
    Layout(name="tp2_mbs4_fp8", tensor=2, precision="fp8"),
    Layout(name="tp4_mbs4_fp8", tensor=4, precision="fp8"),
    Layout(name="tp4_s8192_mbs1", tensor=4, micro_batch=1, global_batch=16, sequence=8192),
    Layout(name="dp_mbs2_full", micro_batch=2, recompute="full"),
    Layout(name="dp_mbs2_sharded", micro_batch=2, fully_sharded=True),
    Layout(name="qwen_dp_mbs2_sharded", model="qwen", micro_batch=2, fully_sharded=True),
    _mixture("moe_ep4", gpus=4, expert=4, global_batch=128),
    _mixture("moe_ep4_balanced", gpus=4, expert=4, global_batch=128, routing="balanced"),
    _mixture("moe_ep2", expert=2, target_tokens_per_second_per_gpu=29_500),
    _mixture("moe_ep2_balanced", expert=2, routing="balanced", target_tokens_per_second_per_gpu=30_400),
    _mixture("moe_ep2_fp8", expert=2, precision="fp8"),
    _mixture("moe_ep1_one_gpu", gpus=1, layers=4, global_batch=32),
    _mixture("moe_olmoe_ep1", architecture="olmoe-1b-7b", layers=None),
    _mixture("moe_olmoe_ep2", architecture="olmoe-1b-7b", layers=None, expert=2),
    *CUT,
    *SHORT,
)
