"""A checkpoint of random weights in Hugging Face's layout, for a model's speed where its weights cannot be downloaded.

python -m tprimat.train.torchtune.weights FOLDER
python -m tprimat.train.torchtune.weights FOLDER --model qwen3-8b
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from tprimat.errors import LaunchError, UserError
from tprimat.facts.models import ModelShape, model_shape, tiny
from tprimat.train.torchtune import COMPLETE
from tprimat.train.torchtune.words import write_tokenizer

SHARDS = 5
"""As many as torchtune's configuration of Qwen3 8B names."""
DEVIATION = 0.02
"""Of a weight, as Qwen3's config.json initialises; norms are 1."""
SEED = 1234


def tensor_shapes(shape: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    """Names and sizes of a Qwen3's weights, as its checkpoints name them, in the order of the forward pass."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "self_attn.o_proj": (shape.hidden, queries),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    layers = [(f"model.layers.{i}.{name}.weight", size) for i in range(shape.layers) for name, size in layer.items()]
    table = (shape.vocabulary, shape.hidden)
    return [("model.embed_tokens.weight", table), *layers, ("model.norm.weight", (shape.hidden,)), ("lm_head.weight", table)]


def configuration(shape: ModelShape) -> dict[str, object]:
    """What readers of checkpoints look up in config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_base,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
    }


def write_shard(path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], random: torch.Generator) -> None:
    """One file of https://github.com/huggingface/safetensors#format; no more than one tensor is in memory at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors:
        start, end = end, end + 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (start, end)}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for _, size in tensors:
            file.write(random_tensor(size, random).cpu().view(torch.uint8).numpy().data)


def random_tensor(size: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Bf16, made on the generator's device."""
    made = torch.empty(size, dtype=torch.bfloat16, device=random.device)
    return made.fill_(1.0) if len(size) == 1 else made.normal_(std=DEVIATION, generator=random)


def shards_of(tensors: Sequence[tuple[str, tuple[int, ...]]], shards: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Runs of tensors, none empty."""
    left = iter(tensors)
    for place in range(shards):
        yield list(islice(left, len(tensors) * (place + 1) // shards - len(tensors) * place // shards))


def write_checkpoint(folder: Path, shape: ModelShape) -> None:
    """Tokenizer, weights and configuration of a dense Qwen3.

    Raises:
        LaunchError: the folder cannot be written.
    """
    random = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(SEED)
    files = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(configuration(shape), indent=2), encoding="utf8")
        for place, tensors in enumerate(shards_of(tensor_shapes(shape), SHARDS), 1):
            name = f"model-{place:05}-of-{SHARDS:05}.safetensors"
            write_shard(folder / name, tensors, random)
            files.update({tensor: name for tensor, _ in tensors})
            print(f"wrote {folder / name}", file=sys.stderr, flush=True)  # noqa: T201
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf8")
        (folder / COMPLETE).write_text(json.dumps({"model": shape.name, "seed": SEED}), encoding="utf8")
    except OSError as error:
        raise LaunchError("The random checkpoint cannot be written.", where=str(folder), why=str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where the folder cannot be written."""
    made = argparse.ArgumentParser(prog="python -m tprimat.train.torchtune.weights", description=__doc__)
    made.add_argument("folder", type=Path)
    made.add_argument("--model", default="qwen3-8b", metavar="NAME", help="a dense Qwen3 (qwen3-8b)")
    made.add_argument("--tiny", action="store_true", help="a few layers of it")
    options = made.parse_args(argv)
    try:
        shape = model_shape(options.model)
        write_checkpoint(options.folder, tiny(shape) if options.tiny else shape)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
