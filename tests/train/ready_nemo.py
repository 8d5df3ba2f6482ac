"""NeMo for a process whose forks are ranks, on a CPU and without Transformer Engine: neither has a place in the product.

Its layers are then the embedded engine's, in torch alone, and what NeMo sends to CUDA goes nowhere.
"""

from contextlib import nullcontext

import torch

from tprimat.megatron import bootstrap
from tprimat.records import environment, schema, store
from tprimat.train import startup

startup.pause_garbage_collection()
startup.hide_transformer_engine()
startup.transformer_engine_is_usable = lambda: True
bootstrap.redirect_to_cpu()

from megatron.core import tensor_parallel  # noqa: E402
from nemo.lightning import megatron_init  # noqa: E402

from tprimat import nemo  # noqa: E402
from tprimat.megatron.experts import ExpertWeights  # noqa: E402
from tprimat.megatron.layers import block_spec, expert_layers  # noqa: E402
from tprimat.megatron.linear import LinearProducts, linear_types  # noqa: E402
from tprimat.nemo import recipe  # noqa: E402


class NoStream:
    def __init__(self, *_, **__):
        pass

    def wait_stream(self, stream):
        pass


def seed_all(seed_, seed_the_rest=megatron_init._set_random_seed):
    """NeMo leaves Megatron's generators out where it counts no CUDA device."""
    seed_the_rest(seed_)
    tensor_parallel.model_parallel_cuda_manual_seed(seed_)


def with_values(weights, config, *shape, make=ExpertWeights.__init__):
    """The embedded engine draws a model's weights once it is built, NeMo while it is."""
    make(weights, config, *shape)
    config.init_method(weights.weight)


ExpertWeights.__init__ = with_values
torch.cuda.stream, torch.cuda.Stream, torch.cuda.current_stream = lambda _: nullcontext(), NoStream, NoStream
megatron_init._set_random_seed = seed_all


class TorchBlockSpec:
    def __init__(self, shape):
        self.shape = shape

    def __call__(self, config, vp_stage=None):
        experts = expert_layers(config, self.shape, vp_stage)
        return block_spec(self.shape, experts, linear_types(LinearProducts, overlapped=False))


def forward_step(model, batch):
    """Causally without a mask, for which NeMo's own step requires Transformer Engine."""
    return model(input_ids=batch["tokens"], position_ids=batch["position_ids"], labels=batch["labels"], attention_mask=None)


def on_a_cpu(plan, callbacks=(), build=recipe.build_recipe):
    made = build(plan, callbacks)
    shape, config, strategy = plan.workload.shape, made.model.config, made.trainer.strategy
    made.trainer.accelerator = "cpu"
    made.data.num_workers, made.data.pin_memory = 0, False
    strategy.expert_tensor_parallel_size = 1 if shape.experts else None
    config.use_cpu_initialization = True
    config.deallocate_pipeline_outputs = False  # gloo reads a tensor in a thread of its own, after Megatron has freed it
    config.transformer_layer_spec, config.forward_step_fn = TorchBlockSpec(shape), forward_step
    fused = ("apply_rope_fusion", "persist_layer_norm", "masked_softmax_fusion", "gradient_accumulation_fusion")
    for name in (*fused, *(("moe_permute_fusion", "moe_grouped_gemm") if shape.experts else ())):
        setattr(config, name, False)
    return made


recipe.build_recipe = on_a_cpu
environment.software_versions()
store.adapter(schema.RunRecord)
startup.resume_garbage_collection()


def train(plan):
    nemo.train(plan)
