"""The plan's seed where NeMo has constants: 1234 for the weights (megatron_init), 0 or 1 for mock data."""

from typing import Any

import lightning.pytorch
from nemo.collections.llm.gpt.data.mock import MockDataModule, _MockGPTDataset
from nemo.lightning import megatron_init


class Seeds(lightning.pytorch.Callback):  # type: ignore[misc]
    """Seeds Python, numpy, torch and Megatron's generators from the plan, on each pipeline stage its own.

    NeMo seeds them with 1234 when it has set up the ranks, with no way to say another number. Lightning calls `setup` after
    that and before the model is built.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before the weights are drawn."""
        del trainer, pl_module, stage
        megatron_init._set_random_seed(self.seed)


class SeededMockData(MockDataModule):  # type: ignore[misc]
    """NeMo's mock data, each seed with sequences of its own.

    NeMo's module hands its datasets `create_attention_mask` in the place of the seed: every run has the same data.

    Args:
        seed: of the plan.
        settings: of MockDataModule.
    """

    def __init__(self, *, seed: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.seed = seed

    def setup(self, stage: str = "") -> None:
        """The training data; a benchmark neither validates nor tests."""
        del stage
        # Item i is drawn from seed + i: seeds a data set apart share none.
        first = self.seed * self.num_train_samples
        self._train_ds = _MockGPTDataset(self.tokenizer, "train", self.num_train_samples, self.seq_length, seed=first)
        self._validation_ds = self._test_ds = self._train_ds
