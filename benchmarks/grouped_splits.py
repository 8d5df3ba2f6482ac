#!/usr/bin/env python3
"""Time Transformer Engine's grouped product with numbers of rows that it has multiplied before, and with new ones. One GPU.

python3 benchmarks/grouped_splits.py --output output/grouped-splits.json

Natural routing sends new numbers of rows to the experts in every layer and micro-batch. A call is one linear layer of all
experts, forward and backward: of each kind of numbers, CALLS of them after two to warm up. "host" is the time until a call
returns, which is before the device is done unless the host is what takes so long.
"""

import argparse
import json
import time
from pathlib import Path

import torch

EXPERTS, ROWS, CALLS = 64, 65536, 10
LAYERS = {"up": (2048, 1536), "down": (768, 2048)}
"""Inputs and outputs of Qwen3-30B-A3B's experts; 64 of them, and 8 choices of each of 8,192 tokens, on one of two ranks."""
SKEW = 3
"""The shares of experts are powers of uniform numbers."""
KINDS = {"even, always the same": (0, False), "even, new each time": (0, True), "skewed, always the same": (SKEW, False)}
KINDS |= {"skewed, new each time": (SKEW, True), "skewed, these once more": (SKEW, True)}
"""Name -> the skew, and whether each call has its own numbers. The last has those of the one before."""


def splits(skew: int, seed: int, *, jitter: bool) -> list[int]:
    """Return how many rows each expert gets."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(EXPERTS, generator=generator).pow(skew) if skew else torch.ones(EXPERTS)
    if jitter:
        shares = shares * (1 + 0.05 * torch.rand(EXPERTS, generator=generator))
    counts = (shares / shares.sum() * ROWS).long()
    counts[0] += ROWS - counts.sum()
    return [int(count) for count in counts]


def measure(inputs: int, outputs: int) -> dict[str, dict[str, float]]:
    """Return the seconds of a call, and those that the host takes, by kind."""
    from transformer_engine.pytorch import GroupedLinear

    layer = GroupedLinear(EXPERTS, inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(ROWS, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(ROWS, outputs, device="cuda", dtype=torch.bfloat16)
    found = {}
    for name, (skew, new) in KINDS.items():
        chosen = [splits(skew, number if new else 0, jitter=new) for number in range(CALLS + 2)]
        for counts in chosen[:2]:
            layer(rows, counts).backward(gradient)
        torch.cuda.synchronize()
        began, host = time.perf_counter(), 0.0
        for counts in chosen[2:]:
            start = time.perf_counter()
            layer(rows, counts).backward(gradient)
            host += time.perf_counter() - start
        torch.cuda.synchronize()
        found[name] = {"seconds": (time.perf_counter() - began) / CALLS, "host_seconds": host / CALLS}
    return found


def main() -> None:
    """Measure both layers and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/grouped-splits.json"))
    options = parser.parse_args()
    found = {name: measure(*sides) for name, sides in LAYERS.items()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"accelerator": torch.cuda.get_device_name(), "torch": torch.__version__, "calls": CALLS, "layers": found}
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf8")
    for name, kinds in found.items():
        for kind, times in kinds.items():
            call, host = (f"{value * 1e3:.2f} ms" for value in times.values())
            print(f"{name}, {kind}: {call} a call, {host} of it on the host")


if __name__ == "__main__":
    main()
