"""Check the sizes that a configuration states of its models against our own figures."""

from tprimat.config.load import LoadedConfig
from tprimat.core.flops import parameters
from tprimat.plan.build import shape_at

BYTES_PER_PARAMETER = 18
"""bf16 weight 2, fp32 gradient 4, fp32 master weight 4, Adam's two moments 8: Megatron-LM's docs on the distributed optimizer."""
ROUNDED_PARAMETERS = 0.05e9
"""Model cards round to 0.1 billion."""
RANKS = {"model_size_gb": 1, "memory_per_gpu_tp4": 4, "memory_per_gpu_tp4_pp2": 8}
"""Key of a model -> ranks that share one copy."""
GB = 1e9


def doubtful_figures(loaded: LoadedConfig) -> list[str]:
    """Return a sentence for each stated size that differs from ours by more than rounding explains.

    Ours are parameters x 18 bytes / ranks. A stated size may be rounded to its last digit, and its number of parameters to 0.1
    billion. It includes neither activations nor the distributed optimizer, which saves more with each replica.
    """
    found = []
    for name, model in loaded.config.models.items():
        for key, ranks in RANKS.items():
            stated = getattr(model, key)
            if stated is None:
                continue
            count = parameters(shape_at(loaded, name, "full")).total
            ours = count * BYTES_PER_PARAMETER / ranks / GB
            tolerated = _half_of_last_digit(stated) + ROUNDED_PARAMETERS * BYTES_PER_PARAMETER / ranks / GB
            if abs(stated - ours) > tolerated:
                found.append(
                    f"{loaded.where('models', name, key)} is {stated:g} GB; ours is {ours:.1f} GB: {count / 1e9:.2f} billion "
                    f"parameters x {BYTES_PER_PARAMETER} bytes (bf16 weights, fp32 gradients, fp32 Adam) on {ranks} "
                    f"rank{'s' * (ranks > 1)}. The stated figure is used for nothing else."
                )
    return found


def _half_of_last_digit(stated: float) -> float:
    """Return 0.5 for 88, 0.05 for 88.2."""
    decimals = len(f"{stated:.6f}".rstrip("0").partition(".")[2])
    return 0.5 * 10.0**-decimals
