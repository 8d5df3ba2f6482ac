"""Evidence of what NeMo runs, read from Megatron's parallel state, the built model and the batches."""

from dataclasses import dataclass, replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from tprimat.megatron.evidence import REDIRECTED, count_parameters, dtype_name, matmul_dtype, parallel_sizes
from tprimat.nemo.recipe import Environment
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Evidence

WITHOUT_TRANSFORMER_ENGINE = (
    "NeMo ran without Transformer Engine: torch's attention and norms, no fused kernels. With it, it is faster."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatch:
    """The first micro-batch that entered the model on this rank."""

    micro_batch_sequences: int
    sequence_tokens: int

    @property
    def global_batch_sequences(self) -> int:
        """With the running schedule's number of micro-batches, over all replicas."""
        replicas: int = parallel_state.get_data_parallel_world_size()
        return self.micro_batch_sequences * int(get_num_microbatches()) * replicas

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.global_batch_sequences * self.sequence_tokens


class FirstBatchHook:
    """Observes the first micro-batch that a model gets. Only the first pipeline stage, and so rank 0, gets tokens."""

    def __init__(self) -> None:
        self.seen: FirstBatch | None = None
        self._hook: Any = None

    def attach(self, strategy: Any) -> None:
        """Hook into the model of a running strategy; the first micro-batch removes the hook."""
        model = _gpt_models(strategy)[0]
        self._hook = model.register_forward_pre_hook(self._observe, with_kwargs=True)

    def _observe(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, Tensor):
            rows, length = tokens.shape
            ranks = parallel_state.get_context_parallel_world_size()
            self.seen = FirstBatch(micro_batch_sequences=rows, sequence_tokens=length * ranks)
        self._hook.remove()


def observe(trainer: Any, watch: FirstBatchHook, plan: RunPlan, here: Environment) -> Evidence:
    """Return evidence of a running trainer. Every rank must call it: the parameter count is summed over all of them."""
    strategy = trainer.strategy
    models = _gpt_models(strategy)
    config = models[0].config
    parameters = [parameter for model in models for parameter in model.parameters()]
    first, seen = parameters[0], watch.seen
    transformer_engine = _runs_transformer_engine(models)
    return replace(
        parallel_sizes(),
        sequence_parallel=config.sequence_parallel,
        micro_batch_sequences=seen.micro_batch_sequences if seen else None,
        global_batch_sequences=seen.global_batch_sequences if seen else None,
        sequence_tokens=seen.sequence_tokens if seen else None,
        tokens_per_step=seen.tokens_per_step if seen else None,
        parameter_dtype=dtype_name(first.dtype),
        matmul_dtype="fp8" if config.fp8 and transformer_engine else matmul_dtype(first.dtype),
        gradient_dtype=dtype_name(first.main_grad.dtype),
        parameters=count_parameters(parameters, strategy.root_device),
        recompute=config.recompute_granularity or "none",
        attention="Transformer Engine" if transformer_engine else "torch scaled_dot_product_attention",
        transformer_engine=transformer_engine,
        optimizer=_optimizer(strategy.optimizers[0]),
        data=f"NeMo MockDataModule (seed {plan.seed})" if plan.dataset == "mock" else trainer.datamodule.description,
        notes=_notes(here),
    )


def _gpt_models(strategy: Any) -> list[Any]:
    """Return Megatron's own model of each chunk, from inside the wrappers for precision and gradients."""
    return [module for chunk in strategy.megatron_parallel for module in chunk.modules() if isinstance(module, GPTModel)]


def _runs_transformer_engine(models: list[Any]) -> bool:
    """Whether the model has layers of it: NeMo uses Megatron's local ones where the package is installed and fails to import."""
    kinds = {type(module) for model in models for module in model.modules()}
    return any(base.__module__.startswith("transformer_engine") for kind in kinds for base in kind.__mro__)


def _optimizer(optimizer: Any) -> str:
    megatron = optimizer.mcore_optimizer
    inner = getattr(megatron, "chained_optimizers", [megatron])[0]
    return f"{type(inner).__name__} over {type(inner.optimizer).__name__}"


def _notes(here: Environment) -> tuple[str, ...]:
    notes = () if here.transformer_engine else (WITHOUT_TRANSFORMER_ENGINE,)
    return notes if here.on_gpu else (*notes, REDIRECTED)
