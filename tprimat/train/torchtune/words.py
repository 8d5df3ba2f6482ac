"""Invented words: the vocabulary of made instructions, and a byte-level BPE tokenizer that has each of them as one token."""

import json
from pathlib import Path

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
WORDS = tuple(first + second for first in SYLLABLES for second in SYLLABLES)
"""4,900 of them, each of two syllables."""
SPACE = "\u0120"
"""How a byte-level vocabulary writes the blank before a word."""
PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
"""Bytes that stand for themselves in a byte-level vocabulary (GPT-2's, which Qwen3's is built like)."""


def byte_symbols() -> list[str]:
    """The symbol of each of the 256 bytes: itself where it can be seen, else the next character from U+0100 on."""
    seen = [byte for part in PRINTABLE for byte in part]
    hidden = [byte for byte in range(256) if byte not in seen]
    symbols = {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [symbols[byte] for byte in range(256)]


def merges() -> list[tuple[str, str]]:
    """Letters to syllables, syllables to words, words to words behind a blank: in this order, so that no other pair can form."""
    syllables = [(text[0], text[1]) for text in SYLLABLES]
    words = [(text[:2], text[2:]) for text in WORDS]
    return [*syllables, *words, *((SPACE, text) for text in WORDS)]


def write_tokenizer(folder: Path) -> None:
    """vocab.json and merges.txt, as Qwen3's tokenizer reads them; its special tokens are its own and not listed there."""
    pairs = merges()
    symbols = [*byte_symbols(), *(first + second for first, second in pairs)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf8")
    lines = ["#version: 0.2", *(f"{first} {second}" for first, second in pairs)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf8")
