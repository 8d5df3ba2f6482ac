"""Requests that make several configurations of one: --sweep, the five strategies, and --scaling."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from tprimat.config.options import OPTIONS
from tprimat.core.errors import ConfigError
from tprimat.records.discover import PROBES_FILE
from tprimat.report.catalogue import per_rank
from tprimat.runner.request import RunRequest, with_values
from tprimat.runner.session import Session, prepare

MOST_CELLS = 10_000
STRATEGIES = ("maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced")
"""In the order of output-00 to output-04. Other strategies run by ./benchmark.py --parallel."""


def sweep_requests(request: RunRequest, words: Sequence[str]) -> Iterator[tuple[str, RunRequest]]:
    """Yield a request for each combination of the values of --sweep KEY=a,b, in their order.

    Raises:
        ConfigError: a word is not KEY=a,b, a key is none, or there are too many.
    """
    values = dict(map(_varied, words))
    if prod(map(len, values.values())) > MOST_CELLS:
        raise ConfigError(f"--sweep has more than {MOST_CELLS:,} combinations.", where="--sweep", fix="fewer values")
    for one in itertools.product(*values.values()):
        chosen = dict(zip(values, one, strict=True))
        label = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        yield label, with_values(request, chosen.items(), "--sweep")


def _varied(word: str) -> tuple[str, list[str]]:
    key, equals, text = word.partition("=")
    name = key if "." in key else key.replace("-", "_")
    known = [option.name for option in OPTIONS if option.swept]
    values = list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))
    if not equals or not values:
        raise ConfigError(f"--sweep {word} is not KEY=VALUE,VALUE.", where="--sweep", fix="--sweep tp=1,2")
    if "." not in name and name not in known:
        fix = f"one of: {', '.join(known)}; or a key of the configuration such as training.optimizer.learning_rate"
        raise ConfigError(f"--sweep cannot vary {key!r}.", where="--sweep", fix=fix)
    return name, values


def strategy_requests(request: RunRequest, models: Sequence[str]) -> Iterator[tuple[str, RunRequest]]:
    """Yield a request for each of the five strategies and some models, folder by folder."""
    for number, strategy in enumerate(STRATEGIES):
        folder = f"output-{number:02d}"
        for model in models:
            yield folder, replace(request, model=model, strategy=strategy, output=Path(folder))


def parse_scaling(text: str) -> tuple[list[int], bool]:
    """Parse '1,2,4,8' or 'strong:1,2,4,8' as rising numbers of GPUs, and whether one batch is divided.

    Raises:
        ConfigError: something else, or a single number.
    """
    mode, _, counts = text.rpartition(":")
    words = [word.strip() for word in counts.split(",")]
    if mode not in {"", "weak", "strong"} or not all(word.isdigit() and int(word) > 0 for word in words) or len(set(words)) < 2:
        why = "It takes two or more numbers of GPUs, after weak: or strong: where the mode is named."
        raise ConfigError(f"--scaling is {text!r}.", where="--scaling", why=why, fix="--scaling 1,2,4,8 or strong:1,2,4,8")
    return sorted({int(word) for word in words}), mode == "strong"


def at_largest(request: RunRequest, text: str) -> RunRequest:
    """Return the request for the largest number of GPUs of --scaling.

    Raises:
        ConfigError: it names a number of GPUs itself.
    """
    if request.gpus is not None:
        raise ConfigError("--gpus and --scaling exclude each other.", where="--gpus", fix="leave --gpus out")
    return replace(request, gpus=parse_scaling(text)[0][-1])


def scaling_sessions(request: RunRequest, text: str) -> list[Session]:
    """Prepare one session for each number of GPUs, with results in gpus-N of the output folder.

    Weak scaling keeps the work of each GPU: the configured global batch is that of the largest number, smaller numbers get their
    share. Strong scaling divides the same batch.

    Raises:
        UserError: the strategy cannot run on one of the numbers; nothing has been started.
    """
    counts, strong = parse_scaling(text)
    largest = prepare(at_largest(request, text))
    whole = largest.plans[0].workload.global_batch_sequences
    probes = (*request.probes, *filter(Path.is_file, [largest.output / PROBES_FILE]))
    requests = [
        replace(
            request,
            gpus=gpus,
            global_batch_size=whole if strong else batch_share(whole, gpus, counts[-1], largest.platform),
            output=largest.output / f"gpus-{gpus}",
            probes=probes,
        )
        for gpus in counts
    ]
    return [prepare(one) for one in requests]


def batch_share(whole: int, gpus: int, largest: int, platform: str) -> int:
    """Return the global batch of a smaller number of GPUs, in sequences.

    Raises:
        ConfigError: it is not a whole number of sequences.
    """
    if whole * gpus % largest:
        raise ConfigError(
            per_rank(f"A global batch of {whole} sequences on {largest} GPUs leaves no whole number for {gpus}.", {platform}),
            where="--scaling",
            why=per_rank("Weak scaling gives every GPU the same work.", {platform}),
            fix=f"--global-batch-size {max(1, whole // largest) * largest}, or --scaling strong:1,2,4,8",
        )
    return whole * gpus // largest
