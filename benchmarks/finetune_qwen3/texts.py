"""Instructions of made-up words and a tokenizer for them, so that fine-tuning can be timed without downloads.

    python3 -m benchmarks.finetune_qwen3.texts FILE --tokens 100000 --seed 1

The cost of a step depends on the number of tokens and on the length of the texts that are packed into a sequence (attention stays
inside a text), not on their meaning. Losses are meaningless.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
WORDS = tuple(first + second for first in SYLLABLES for second in SYLLABLES)
"""4,900 words of two syllables."""
FREQUENCIES = tuple(accumulate(1 / rank for rank in range(1, len(WORDS) + 1)))
"""Cumulative weights after Zipf's law."""
INSTRUCTION_WORDS = (5, 20)
ANSWER_WORDS = (10, 120)
"""Fewest and most. With its prompt a text has about 240 tokens."""
PROMPT_TOKENS = 30
"""The least that the prompt of torchtune's Alpaca data set adds to a text."""
SPACE = "\u0120"
"""The space before a word in a byte-level vocabulary."""
PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
"""Bytes that a byte-level vocabulary writes as themselves (GPT-2's, on which Qwen3's is modeled)."""


def instructions(tokens: int, seed: int) -> Iterator[dict[str, str]]:
    """Make texts of at least so many tokens in total with any tokenizer, since a word is one token or more.

    Args:
        tokens: total.
        seed: equal seeds give equal texts.
    """
    draw = random.Random(seed)

    def text(fewest: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, cum_weights=FREQUENCIES, k=draw.randint(fewest, most)))

    while tokens > 0:
        entry = {"instruction": text(*INSTRUCTION_WORDS), "input": "", "output": text(*ANSWER_WORDS)}
        tokens -= PROMPT_TOKENS + sum(len(part.split()) for part in entry.values())
        yield entry


def write_instructions(path: Path, tokens: int, seed: int) -> None:
    """Write one JSON object a line, as Hugging Face's `json` loader reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in instructions(tokens, seed))


def byte_symbols() -> list[str]:
    """Return the symbol of each of the 256 bytes: itself where it is printable, else the next character from U+0100 on."""
    printable = [byte for part in PRINTABLE for byte in part]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]


def merges() -> list[tuple[str, str]]:
    """Merge letters to syllables, syllables to words, and a space with a word; in this order no other pair can form."""
    syllables = [(text[0], text[1]) for text in SYLLABLES]
    words = [(text[:2], text[2:]) for text in WORDS]
    return [*syllables, *words, *((SPACE, text) for text in WORDS)]


def write_tokenizer(folder: Path) -> None:
    """Write vocab.json and merges.txt for Qwen3's tokenizer, which adds its special tokens itself."""
    pairs = merges()
    symbols = [*byte_symbols(), *(first + second for first, second in pairs)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf8")
    lines = ["#version: 0.2", *(f"{first} {second}" for first, second in pairs)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf8")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where the file cannot be written."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.finetune_qwen3.texts", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="least number of tokens in total")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    options = parser.parse_args(argv)
    try:
        write_instructions(options.file, options.tokens, options.seed)
    except OSError as error:
        print(f"error: {options.file} cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
