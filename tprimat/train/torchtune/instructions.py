"""An instruction data set of invented words, so that fine-tuning can be timed where none can be downloaded.

    python -m tprimat.train.torchtune.instructions FILE --tokens 100000 --seed 1

What a step costs hangs on how many tokens it has and how long the texts are that are packed into a sequence (attention stays
inside a text), not on what they say. Losses mean nothing.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from tprimat.train.torchtune.words import WORDS

INSTRUCTION_WORDS = (5, 20)
ANSWER_WORDS = (10, 120)
"""Shortest and longest. With the prompt around them a text has some 240 tokens."""
PROMPT_TOKENS = 30
"""At least so many come from the prompt that torchtune's Alpaca data set puts around a text."""
FREQUENCIES = tuple(accumulate(1 / rank for rank in range(1, len(WORDS) + 1)))
"""Zipf's law, summed up."""


def instructions(tokens: int, seed: int) -> Iterator[dict[str, str]]:
    """Texts of at least so many tokens in all, whatever the tokenizer: each word is one token or more.

    Args:
        tokens: to fill.
        seed: the same one gives the same texts.
    """
    draw = random.Random(seed)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, cum_weights=FREQUENCIES, k=draw.randint(least, most)))

    while tokens > 0:
        made = {"instruction": text(*INSTRUCTION_WORDS), "input": "", "output": text(*ANSWER_WORDS)}
        tokens -= PROMPT_TOKENS + sum(len(part.split()) for part in made.values())
        yield made


def write_instructions(path: Path, tokens: int, seed: int) -> None:
    """One JSON object a line, as Hugging Face's `json` loader reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf8") as file:
        file.writelines(json.dumps(made) + "\n" for made in instructions(tokens, seed))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where the file cannot be written."""
    made = argparse.ArgumentParser(prog="python -m tprimat.train.torchtune.instructions", description=__doc__)
    made.add_argument("file", type=Path)
    made.add_argument("--tokens", type=int, required=True, metavar="N", help="at least so many in all")
    made.add_argument("--seed", type=int, default=1, metavar="N")
    options = made.parse_args(argv)
    try:
        write_instructions(options.file, options.tokens, options.seed)
    except OSError as error:
        print(f"error: {options.file} cannot be written: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
