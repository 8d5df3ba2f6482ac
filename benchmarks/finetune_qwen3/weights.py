"""A checkpoint of random weights in Hugging Face's layout, to time a model whose weights cannot be downloaded.

python3 -m benchmarks.finetune_qwen3.weights FOLDER
python3 -m benchmarks.finetune_qwen3.weights FOLDER --model qwen3-8b
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from benchmarks.finetune_qwen3.texts import write_tokenizer
from benchmarks.finetune_qwen3.torchtune_recipes import COMPLETE
from tprimat.core.errors import LaunchError, UserError
from tprimat.core.models import ModelShape, model_shape, tiny

SHARDS = 5
"""The number that torchtune's configuration of Qwen3 8B names."""
DEVIATION = 0.02
"""Standard deviation of a weight, as in Qwen3's config.json; norms are 1."""
SEED = 1234


def tensor_shapes(shape: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names, as in Qwen3's checkpoints, and sizes of all weights in the order of the forward pass."""
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
    """Return what readers of checkpoints look up in config.json."""
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


def random_tensor(size: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Return a bf16 tensor on the CPU, drawn on the generator's device."""
    tensor = torch.empty(size, dtype=torch.bfloat16, device=random.device)
    return (tensor.fill_(1.0) if len(size) == 1 else tensor.normal_(std=DEVIATION, generator=random)).cpu()


def shards_of(tensors: Sequence[tuple[str, tuple[int, ...]]], shards: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Divide the tensors, in their order, into shards of about equal length."""
    left = iter(tensors)
    for place in range(shards):
        yield list(islice(left, len(tensors) * (place + 1) // shards - len(tensors) * place // shards))


def write_checkpoint(folder: Path, shape: ModelShape) -> None:
    """Write tokenizer, weights and configuration of a dense Qwen3, with one shard in memory at a time.

    Raises:
        LaunchError: the folder cannot be written.
    """
    random = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(SEED)
    shard_of = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(configuration(shape), indent=2), encoding="utf8")
        for place, tensors in enumerate(shards_of(tensor_shapes(shape), SHARDS), 1):
            name = f"model-{place:05}-of-{SHARDS:05}.safetensors"
            save_file({tensor: random_tensor(size, random) for tensor, size in tensors}, folder / name, {"format": "pt"})
            shard_of.update({tensor: name for tensor, _ in tensors})
            print(f"wrote {folder / name}", file=sys.stderr, flush=True)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}), encoding="utf8")
        (folder / COMPLETE).write_text(json.dumps({"model": shape.name, "seed": SEED}), encoding="utf8")
    except (OSError, SafetensorError) as error:
        raise LaunchError("The random checkpoint cannot be written.", where=str(folder), why=str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where the folder cannot be written."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.finetune_qwen3.weights", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="qwen3-8b", metavar="NAME", help="a dense Qwen3 (qwen3-8b)")
    parser.add_argument("--tiny", action="store_true", help="a few of its layers")
    options = parser.parse_args(argv)
    try:
        shape = model_shape(options.model)
        write_checkpoint(options.folder, tiny(shape) if options.tiny else shape)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
