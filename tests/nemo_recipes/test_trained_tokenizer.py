"""Text through a tokenizer.json, here where the package tokenizers is installed."""

import sys
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the package comes with NeMo: make test-nemo")

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from planning import make_plan  # noqa: E402

from tprimat.train.data import open_text  # noqa: E402

WORDS = ["<unk>", "red", "green", "blue", "<|end_of_text|>"]


def test_each_file_ends_with_the_tokenizers_own_token(tmp_path):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("red green blue pink")
    (tmp_path / "texts" / "b.txt").write_text("blue red")
    settings = {
        "training.data.dataset": f"text:{tmp_path / 'texts'}",
        "training.data.tokenizer": str(tmp_path / "tokenizer.json"),
        "training.data.sequence_length": 7,
    }
    data = open_text(make_plan(tmp_path / "run", "llama", settings), 512)
    assert data.sequence(0).tolist() == [1, 2, 3, 0, 4, 3, 1, 4]
    assert data.description.endswith("(tokenizer.json)")
