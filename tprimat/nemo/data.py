"""Text as a NeMo data module: the same sequences in the same order as on the embedded engine."""

from typing import Any

import lightning.pytorch
import torch
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tprimat.plan.schema import RunPlan
from tprimat.train.data import Sequences, open_sequences


class SequencesModule(lightning.pytorch.LightningDataModule):  # type: ignore[misc]
    """Sequences of a plan's dataset behind Megatron's sampler, which gives each replica its micro-batches.

    Args:
        plan: names the dataset, the seed and the model's vocabulary.
        tokenizer: NeMo requires one of its data module; the text is already tokenized.
        seq_length: tokens in a sequence.
        micro_batch_size: sequences.
        global_batch_size: sequences.
        pin_memory: whether batches go to a GPU.
    """

    def __init__(  # noqa: PLR0913 - NeMo's recipes set these by name
        self, *, plan: RunPlan, tokenizer: Any, seq_length: int, micro_batch_size: int, global_batch_size: int, pin_memory: bool
    ) -> None:
        super().__init__()
        self.plan = plan
        self.tokenizer = tokenizer
        self.pin_memory = pin_memory
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.seq_length = seq_length
        self.description: str | None = None
        self.data_sampler = MegatronDataSampler(
            seq_len=seq_length, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
        )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return a loader of single sequences; NeMo's strategy adds the sampler."""
        sequences = open_sequences(self.plan, self.plan.shape.vocabulary)
        self.description = sequences.description
        return DataLoader(_Items(sequences, self.plan), pin_memory=self.pin_memory)


class _Items(Dataset[dict[str, Tensor]]):
    """Sequences in the fields that NeMo's GPT models read."""

    def __init__(self, sequences: Sequences, plan: RunPlan) -> None:
        self.sequences = sequences
        self.count = plan.steps * plan.batch.global_batch_sequences
        length = plan.batch.sequence_tokens
        self.loss_mask = torch.ones(length)
        self.position_ids = torch.arange(length)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.sequences.sequence(index))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": self.loss_mask,
            "position_ids": self.position_ids,
        }
