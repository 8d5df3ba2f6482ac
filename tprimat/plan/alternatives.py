"""What to try where a strategy needs more memory than there is."""

from tprimat.config.load import LoadedConfig
from tprimat.errors import UserError
from tprimat.plan.build import PlanRequest, layout_of
from tprimat.plan.schema import Batch, Layout, RunPlan


def strategies_with_less_memory(loaded: LoadedConfig, plan: RunPlan) -> tuple[str, ...]:
    """The other strategies that are valid for this plan's model and ranks and hold a smaller part of the model on each rank.

    Only the model's split is looked at: the batch of a step is the same, and a micro-batch may not be larger.

    Returns:
        names, those that split the model least further first, in the configuration's order where they are alike.
    """
    found = []
    for name in loaded.config.parallelism:
        try:
            layout, batch = layout_of(loaded, _request(plan, name), plan.shape, plan.layout.world_size)
        except UserError:  # not for this model, platform or number of ranks
            continue
        if _model_ranks(layout) > _model_ranks(plan.layout) and not _larger(batch, plan.batch):
            found.append((_model_ranks(layout), name))
    return tuple(name for _, name in sorted(found, key=lambda pair: pair[0]))


def _request(plan: RunPlan, strategy: str) -> PlanRequest:
    return PlanRequest(
        model=plan.model,
        strategy=strategy,
        platform=plan.platform,
        size=plan.size,
        engine=plan.engine,
        engine_reason=plan.engine_reason,
        gpus_found=plan.gpus_per_node,
        run_id=plan.run_id,
        run_directory=plan.run_directory,
        output_directory=plan.output_directory,
    )


def _model_ranks(layout: Layout) -> int:
    """Ranks that one copy of the model is spread over."""
    return layout.tensor * layout.pipeline


def _larger(batch: Batch, other: Batch) -> bool:
    micro, most = batch.micro_batch_sequences, other.micro_batch_sequences
    return isinstance(micro, int) and isinstance(most, int) and micro > most
