"""The linear schedule for NeMo, whose own PolynomialDecayAnnealingScheduler takes no warm-up."""

from typing import Any

from nemo.core.optim.lr_scheduler import PolynomialDecayAnnealing
from nemo.lightning.pytorch.optim.base import LRSchedulerModule


class LinearScheduler(LRSchedulerModule):  # type: ignore[misc]
    """Warm-up, then a straight line down to `min_lr` at `max_steps`."""

    def __init__(self, warmup_steps: int, max_steps: int, min_lr: float) -> None:
        super().__init__()
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.min_lr = min_lr

    def scheduler(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """What Lightning wants of configure_optimizers."""
        del model
        made = PolynomialDecayAnnealing(
            optimizer, max_steps=self.max_steps, warmup_steps=self.warmup_steps, min_lr=self.min_lr, power=1.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": made, "interval": "step", "frequency": 1},
            "monitor": "val_loss",
        }
