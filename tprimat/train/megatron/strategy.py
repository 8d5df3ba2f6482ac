"""Lightning's side of the embedded engine: it starts the process group and leaves the parallelism to Megatron-Core."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from tprimat.plan.schema import RunPlan
from tprimat.train import start_up
from tprimat.train.lightning_api import lightning
from tprimat.train.megatron.module import initialize_parallel_state


class MegatronStrategy(lightning.strategies.DDPStrategy):  # type: ignore[misc]
    """DDPStrategy without torch's DDP: no wrapping, no sampler, no broadcast of parameters."""

    strategy_name = "megatron"

    def __init__(self, plan: RunPlan, **options: Any) -> None:
        super().__init__(**options)
        self.plan = plan

    def setup_environment(self) -> None:
        """Join the process group, then split it as the plan says."""
        super().setup_environment()
        initialize_parallel_state(self.plan)
        start_up.reached("process_group")

    def setup_distributed(self) -> None:
        """Join the process group before Lightning would, which ties it to a device.

        NCCL then connects each of Megatron's groups at once, also the many that no layout uses, and takes each down again at
        the end, one after the other.
        """
        if not dist.is_initialized():
            dist.init_process_group(self._get_process_group_backend(), timeout=self._timeout)
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Nothing: Megatron's DistributedDataParallel is already around each chunk."""

    def _register_ddp_hooks(self) -> None:
        pass

    def pre_backward(self, closure_loss: Any) -> None:
        """Nothing: Megatron's schedule runs the backward pass."""

    def post_backward(self, closure_loss: Any) -> None:
        """Nothing, likewise."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Replicas, for anything that samples by itself."""
        return {
            "num_replicas": parallel_state.get_data_parallel_world_size(),
            "rank": parallel_state.get_data_parallel_rank(),
        }

    def teardown(self) -> None:
        """Forget the split."""
        super().teardown()
        parallel_state.destroy_model_parallel()
