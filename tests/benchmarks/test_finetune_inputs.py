"""The inputs of torchtune, written by the benchmark's own processes: weights, tokenizer, texts."""

import json
import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open

from benchmarks.finetune_qwen3 import texts, weights
from benchmarks.finetune_qwen3.texts import WORDS
from tprimat.core.flops import parameters
from tprimat.core.models import model_shape, tiny

SHAPE = tiny(model_shape("qwen3-8b"))


def run(module, *arguments):
    command = [sys.executable, "-m", f"benchmarks.finetune_qwen3.{module}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def tensors_of(path):
    """Name -> tensor."""
    with safe_open(path, framework="pt") as shard:
        assert shard.metadata() == {"format": "pt"}
        return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "random"
    done = run("weights", folder, "--tiny")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_random_checkpoint_has_every_weight_of_the_model_in_the_shards_that_its_index_names(checkpoint):
    shards = sorted(checkpoint.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{place:05}-of-00005.safetensors" for place in range(1, 6)]
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    weights = {}
    for path in shards:
        found = tensors_of(path)
        assert {index[name] for name in found} == {path.name}
        weights |= found
    assert set(weights) == set(index)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == parameters(SHAPE).total
    assert (weights["model.layers.3.self_attn.k_norm.weight"] == 1).all()
    head, table = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    assert float(head.float().std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(head, table)


def test_its_configuration_describes_the_model_and_its_last_file_marks_the_weights_as_random(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (SHAPE.hidden, SHAPE.layers)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["tie_word_embeddings"]) == (32, 8, False)
    note = checkpoint / "random-weights.json"
    assert json.loads(note.read_text())["model"] == "qwen3-8b-tiny"
    assert note.stat().st_mtime_ns == max(path.stat().st_mtime_ns for path in checkpoint.iterdir())


def pieces(word, ranks):
    """Byte-pair encoding, the slow way: merge the pair of the lowest rank until none is left."""
    parts = list(word)
    while True:
        pairs = [(ranks.get(pair, math.inf), place) for place, pair in enumerate(pairwise(parts))]
        rank, place = min(pairs, default=(math.inf, 0))
        if math.isinf(rank):
            return parts
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_every_word_and_every_byte_is_one_token(checkpoint):
    vocabulary = json.loads((checkpoint / "vocab.json").read_text(encoding="utf8"))
    first, *lines = (checkpoint / "merges.txt").read_text(encoding="utf8").splitlines()
    assert first.startswith("#version:")
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    assert sorted(vocabulary.values()) == list(range(256 + len(lines)))
    assert max(vocabulary.values()) < 151_643, "Qwen3's special tokens begin there"
    assert [len(symbol) for symbol, number in vocabulary.items() if number < 256] == [1] * 256
    for word in (*WORDS[:300], *WORDS[-300:]):
        for text in (word, "\u0120" + word):
            assert pieces(text, ranks) == [text]
            assert text in vocabulary


def test_texts_hold_the_tokens_requested_and_depend_on_the_seed_alone(tmp_path):
    done = run("texts", tmp_path / "a", "--tokens", 20_000, "--seed", 1)
    assert done.returncode == 0, done.stderr
    for name, seed in (("b", "1"), ("c", "2")):
        assert texts.main([str(tmp_path / name), "--tokens", "20000", "--seed", seed]) == 0
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c
    written = [json.loads(line) for line in a.splitlines()]
    assert all(set(text) == {"instruction", "input", "output"} for text in written)
    words = [len(text["instruction"].split()) + len(text["output"].split()) for text in written]
    assert 20_000 <= sum(words) + 30 * len(words) < 20_300
    assert set(a.replace('"', " ").split()) & set(WORDS)


@pytest.mark.parametrize(("module", "rest"), [(weights, ["--tiny"]), (texts, ["--tokens", "9"])])
def test_a_folder_that_cannot_be_written_is_named_in_one_line(tmp_path, capsys, module, rest):
    (tmp_path / "file").write_text("")
    assert module.main([str(tmp_path / "file" / "inside"), *rest]) == 2
    assert capsys.readouterr().err.startswith("error: ")
