"""What a caller states about the run of a log, which fills in what the log omits and must not contradict it."""

from dataclasses import dataclass

from tprimat.core.errors import ConfigError

AUTO = "auto"
"""Instead of a model's name: take the shape from the log."""
MODEL_FLAG = "--model-name"
"""The only one that cannot be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a caller states about a run. None: nothing."""

    model: str = AUTO
    gpus: int | None = None
    nodes: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None
    tokens_per_step: int | None = None
    """Where batch or sequence length are not known; no flag states it."""
    accelerator: str | None = None


def check_claim(flag: str, claimed: int | str | None, logged: int | str | None, where: str) -> None:
    """Refuse a flag that the log contradicts.

    Raises:
        ConfigError: both state something, and not the same.
    """
    if claimed is None or logged is None or claimed == logged:
        return
    raise ConfigError(
        f"{flag} {claimed} contradicts the log, which says {logged}.",
        where=where,
        why="A record keeps what ran.",
        fix=f"auto, or {logged}" if flag == MODEL_FLAG else f"leave {flag} out, or give {logged}",
    )
