"""The training scripts pretrain_llama.py and pretrain_qwen.py."""

import sys
from functools import partial


def main(model: str, arguments: list[str] | None = None) -> int:
    """Train a plan (`--plan PATH`, as torchrun is told), or run the benchmark of one model with the flags of benchmark.py."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--plan" in given:
        from tprimat.train.worker import main as train

        return train(given)
    from tprimat.cli.benchmark import main as benchmark
    from tprimat.cli.console import outlasting

    return outlasting(partial(benchmark, ["--model", model, *given]))
