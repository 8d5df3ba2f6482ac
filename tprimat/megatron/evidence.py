"""Evidence of what the embedded engine runs, read from the weights, the buffers, the layers and the batches."""

from collections.abc import Sequence
from typing import Any

import torch

from tprimat.megatron.fp8 import Fp8OutputProducts, Fp8Products
from tprimat.megatron.fully_shard import own_part, ranks_sharing
from tprimat.megatron.latent_attention import WholeLinear
from tprimat.megatron.layers import SDPACoreAttention
from tprimat.megatron.linear import ChosenProducts, LinearProducts
from tprimat.megatron.loss import ChunkedLossModel
from tprimat.megatron.module import MegatronModule
from tprimat.records.evidence import CAUTION, REDIRECTED
from tprimat.records.schema import Evidence
from tprimat.train.observed import (
    common_evidence,
    dtype_name,
    matmul_dtype,
    over_all_ranks,
    scaling_and_attention,
    te_matmul_dtype,
    te_modules,
)


def observe(module: MegatronModule, redirected: bool) -> Evidence:
    """Return evidence of a running module. Every rank must call it: the parameter count is summed over all of them."""
    parts, modules = [part for chunk in module.chunks for part in chunk.modules()], te_modules(module.chunks)
    parameter = next(module.chunks[0].parameters())
    gradient = getattr(parameter, "main_grad", parameter.grad)
    # The dtype of a part says nothing of the one in which its weight is gathered.
    computed = module.watch.weight_dtype or (parameter.dtype if own_part(parameter) is parameter else None)
    dtype = scaling = attends = None
    if computed is not None and modules:
        dtype = te_matmul_dtype(modules, computed, fp8_asked=module.config.fp8 is not None)
    elif computed is not None:
        dtype = layers_matmul_dtype(_kernels(parts), computed)
    if dtype == "fp8":
        scaling, attends = scaling_and_attention(modules) if modules else ("current", None)
    return common_evidence(
        module.chunks,
        module.config,
        module.observed,
        module.watch,
        parameter_dtype=None if computed is None else dtype_name(computed),
        matmul_dtype=dtype,
        output_layer_dtype="fp8" if _output_layer_in_fp8(module, parts) else None,
        attention_dtype=attends,
        fp8_scaling=scaling,
        gradient_dtype=None if gradient is None else dtype_name(gradient.dtype),
        weights_split_over=ranks_sharing(parameter),
        attention="Transformer Engine" if modules else _attention(parts),
        optimizer=module.megatron_optimizer.description,
        data=None if module.sequences is None else module.sequences.description,
        notes=(*((REDIRECTED,) if redirected else ()), *untested(module)),
    )


def _attention(parts: Sequence[torch.nn.Module]) -> str:
    """Return the attention call, and the kernels behind it once a layer has run."""
    chosen = (part.backend for part in parts if isinstance(part, SDPACoreAttention) and part.backend)
    return ", ".join(("torch scaled_dot_product_attention", *list(chosen)[:1]))


def untested(module: MegatronModule) -> tuple[str, ...]:
    """Return a caution where CUDA graphs run what no GPU has been seen to record."""
    if module.graphs is None or module.plan.workload.matmul_dtype != "fp8" or module.plan.workload.layout.tensor == 1:
        return ()
    return (f"{CAUTION}CUDA graphs in fp8 over tensor ranks are untested: compare the losses with those of a run without.",)


def _output_layer_in_fp8(module: MegatronModule, parts: Sequence[torch.nn.Module]) -> bool:
    """Whether the output layer, which may be on another rank, has multiplied in fp8."""
    if not module.options.fp8_output_layer:
        return False
    products = (part.output_products for part in parts if isinstance(part, ChunkedLossModel))
    times = sum(product.products for product in products if isinstance(product, Fp8OutputProducts))
    return bool(over_all_ranks(times, module.device))


def _kernels(parts: Sequence[Any]) -> list[LinearProducts]:
    """Return what the layers multiply with, routers and experts apart."""
    contexts = [part.tp_context for part in parts if isinstance(part, ChosenProducts)]
    return [context.products for context in (*contexts, *(part.alone for part in parts if isinstance(part, WholeLinear)))]


def layers_matmul_dtype(kernels: Sequence[LinearProducts], weights: torch.dtype) -> str | None:
    """Return the dtype of the layers' products; None for fp8 kernels that have not run yet, before the first step.

    fp8 only if every linear layer has multiplied in it; attention never does, and the output layer has a field of its own.
    """
    products = [kernel.products if isinstance(kernel, Fp8Products) else None for kernel in kernels]
    if products and all(products):
        return "fp8"
    return None if products and all(number == 0 for number in products) else matmul_dtype(weights)
