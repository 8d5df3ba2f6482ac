"""Megatron-LM's command-line options -> a workload. What a row leaves out has Megatron-LM's default."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tprimat.core.errors import ConfigError
from tprimat.core.implementations import MEGATRON_LOCAL, TRANSFORMER_ENGINE, Implementation
from tprimat.core.models import ModelShape, model_shape
from tprimat.core.workload import MOMENTS_IN_BF16, FullWorkload, Layout

CASES = Path(__file__).parent / "records" / "megatron-goldens" / "cases.yaml"
GPT2_VOCABULARY = 50257
VOCABULARIES = {
    "GPT2BPETokenizer": GPT2_VOCABULARY,
    "BertWordPieceLowerCase": 30522,
    "SentencePieceTokenizer": 32000,
    "GPTSentencePieceTokenizer": 32000,
    "Llama2Tokenizer": 32000,
    "TikTokenizer": 131072,
}
"""Tokenizer of Megatron-LM -> words, where neither vocab-size nor a model says them; of sentence pieces, Llama 2's."""
HYBRIDS = ("is-hybrid-model", "hybrid-override-pattern", "hybrid-layer-pattern", "hybrid-attention-ratio", "mamba-num-heads")
"""Options of models with state-space layers."""
LEAST_GPUS = 8
DEFAULT_DROPOUT = 0.1
VOCABULARY_MULTIPLE = 128
MLA_DEFAULTS = {"kv-lora-rank": 32, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128}


@cache
def _cases() -> dict[str, Any]:
    return dict(yaml.safe_load(CASES.read_text(encoding="utf8")))


def options_left_out(case: str) -> dict[str, Any]:
    """Return what the test of a case passes besides the options of its rows; nothing for an unknown case."""
    options = dict(_cases()["cases"].get(case, {}))
    if case in _cases()["without_gradient_accumulation_fusion"]:
        options["no-gradient-accumulation-fusion"] = True
    return options


def workload_of_options(options: Mapping[str, Any], gpus: int | None) -> FullWorkload:
    """Return the workload of a Megatron-LM command line; numbers may be written as text.

    Args:
        options: without leading dashes.
        gpus: their number; None: as the options say, else a node, or as many as the degrees need.

    Raises:
        ValueError: it is a hybrid, whose state-space layers are not predicted.
    """
    options = {name: _value(given) for name, given in options.items()}
    if hybrid := next((name for name in HYBRIDS if options.get(name)), None):
        raise ValueError(f"--{hybrid} makes it a hybrid, whose state-space layers are not predicted")
    tensor, pipeline = options.get("tensor-model-parallel-size", 1), options.get("pipeline-model-parallel-size", 1)
    context, expert = options.get("context-parallel-size", 1), options.get("expert-model-parallel-size", 1)
    micro, whole = options["micro-batch-size"], _global_batch(options)
    gpus = gpus or _gpus(
        options, pipeline * math.lcm(tensor * context, expert * (options.get("expert-tensor-parallel-size") or 1))
    )
    data = max(1, min(gpus // (tensor * pipeline * context), whole // micro))
    chunks = _chunks(options, pipeline)
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=len(chunks) // pipeline if len(chunks) > pipeline else None,
        context=context,
        expert=expert,
        data=data,
        sequence_parallel=bool(options.get("sequence-parallel")) and tensor > 1,
    )
    return FullWorkload.of(
        layout,
        micro_batch=micro,
        accumulation_steps=max(1, whole // (micro * data)),
        shape=_shape(options),
        sequence_tokens=options["seq-length"],
        implementation=_implementation(options),
        matmul_dtype=_precision(options),
        **_recompute(options),
        distributed_optimizer=bool(options.get("use-distributed-optimizer")),
        sums_in_fp32=options.get("ddp-reduce-scatter-with-fp32-accumulation"),
        expert_tensor_parallel=options.get("expert-tensor-parallel-size"),
        vocabulary_rows=_vocabulary_rows(options, tensor),
        hidden_dropout=options.get("hidden-dropout", DEFAULT_DROPOUT) > 0,
        attention_dropout=options.get("attention-dropout", DEFAULT_DROPOUT) > 0,
        mtp_layers=options.get("mtp-num-layers") or 0,
        chunk_layers=chunks,
        interleaved_group=options.get("microbatch-group-size-per-virtual-pipeline-stage"),
        offloaded=_words(options.get("offload-modules")) if options.get("fine-grained-activation-offloading") else (),
        **_kept(options),
    )


def _global_batch(options: Mapping[str, Any]) -> int:
    """Return the sequences of the first steps, with which a schedule of batches starts."""
    schedule = options.get("rampup-batch-size") or options.get("step-batch-size-schedule")
    numbers = [int(number) for number in re.findall(r"\d+", str(schedule or ""))]
    if options.get("rampup-batch-size") and numbers:
        return numbers[0]
    if len(numbers) > 1:  # "0:32 1000:64": the batch from a step, or a number of samples, on
        return numbers[1]
    return int(options["global-batch-size"])


def _gpus(options: Mapping[str, Any], needed: int) -> int:
    """Return the ranks that options state, else a node's, or as many as the degrees need."""
    stated = options.get("world-size") or options.get("nnodes", 0) * options.get("nproc-per-node", LEAST_GPUS)
    return int(stated) or max(LEAST_GPUS, needed)


def _kept(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of gradients, optimizer and weights that options change."""
    facts: dict[str, Any] = {"fp8_scaling": {"mxfp8": "mxfp8", "blockwise": "blockwise"}.get(str(options.get("fp8-recipe")))}
    if options.get("fp4-format"):
        facts["fp8_scaling"] = "nvfp4"
    if options.get("grad-reduce-in-bf16"):
        facts["gradient_dtype"] = "bf16"
    if options.get("use-precision-aware-optimizer") and "bf16" in str(options.get("exp-avg-dtype")):
        facts["optimizer_states"] = MOMENTS_IN_BF16
    if options.get("fp8-param-gather") or options.get("fp4-param-gather"):
        facts["narrow_weights_alone"] = True
    if options.get("num-experts"):
        facts["routing"] = "balanced" if options.get("moe-router-force-load-balancing") else "natural"
    return facts


def _value(given: Any) -> Any:
    """Return the number or truth value that a text is."""
    if not isinstance(given, str):
        return given
    if given.lower() in {"true", "false"}:
        return given.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(given)
    return given


def _chunks(options: Mapping[str, Any], pipeline: int) -> tuple[int, ...]:
    """Return the layers of each model chunk, in the model's order."""
    layers = options["num-layers"]
    if layout := options.get("pipeline-model-parallel-layout"):
        return _written_out(layout)
    at_ends = [bool(options.get(f"account-for-{what}-in-pipeline-split")) for what in ("embedding", "loss")]
    stage = (layers + sum(at_ends)) // pipeline
    if per_chunk := options.get("num-layers-per-virtual-pipeline-stage"):
        virtual = stage // per_chunk
    else:
        virtual = options.get("num-virtual-stages-per-pipeline-rank", 1)
    first, last = options.get("decoder-first-pipeline-num-layers"), options.get("decoder-last-pipeline-num-layers")
    if first is not None or last is not None:
        given = [count for count in (first, last) if count is not None]
        inner = (layers - sum(given)) // max(1, pipeline - len(given))
        stages = [inner] * pipeline
        stages[0], stages[-1] = first or inner, last or inner
        return tuple(count // virtual for _ in range(virtual) for count in stages)
    counts = [(layers + sum(at_ends)) // (pipeline * virtual)] * (pipeline * virtual)
    counts[0] -= at_ends[0]
    counts[-1] -= at_ends[1]
    return tuple(counts)


def _written_out(layout: str) -> tuple[int, ...]:
    """Return the layers of each chunk of a layout such as "Et*3|(tt|)*6tmL": E embedding, t layer, m MTP, L loss, | between."""
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
    text = re.sub(r"([A-Za-z|])\*(\d+)", lambda match: match[1] * int(match[2]), text)
    return tuple(chunk.count("t") for chunk in text.split("|"))


def _words(value: Any) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", value if isinstance(value, str) else " ".join(value or ())))


def _shape(options: Mapping[str, Any]) -> ModelShape:
    hidden, heads = options["hidden-size"], options["num-attention-heads"]
    latent = bool(options.get("multi-latent-attention"))
    gated = bool(options.get("swiglu"))
    ffn = options.get("ffn-hidden-size") or (_gated_width(hidden) if gated else 4 * hidden)
    groups = options.get("num-query-groups", 1) if options.get("group-query-attention") else heads
    head_dim = options.get("kv-channels", hidden // heads)
    mla: dict[str, Any] = {}
    if latent:
        dims = {key: options.get(key, default) for key, default in MLA_DEFAULTS.items()}
        head_dim, groups = dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"], heads
        mla = {
            "q_lora_rank": options.get("q-lora-rank"),
            "kv_lora_rank": dims["kv-lora-rank"],
            "nope_head_dim": dims["qk-head-dim"],
            "rope_head_dim": dims["qk-pos-emb-head-dim"],
            "value_head_dim": dims["v-head-dim"],
        }
    experts = options.get("num-experts")
    if experts:
        inner = options.get("moe-ffn-hidden-size") or ffn
        shared = options.get("moe-shared-expert-intermediate-size") or 0
        mla |= {
            "experts": experts,
            "experts_per_token": options.get("moe-router-topk", 2),
            "expert_ffn": inner,
            "shared_experts": shared // inner,
            "dense_first_layers": _leading_dense(options.get("moe-layer-freq", 1)),
        }
    return ModelShape(
        name="golden",
        layers=options["num-layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        head_dim=head_dim,
        ffn=ffn,
        vocabulary=_vocabulary(options),
        context_tokens=options.get("max-position-embeddings", options["seq-length"]),
        gated=gated,
        norm="rmsnorm" if options.get("normalization") == "RMSNorm" else "layernorm",
        linear_bias=not options.get("disable-bias-linear"),
        qk_norm=bool(options.get("qk-layernorm")) and not latent,
        tied_embeddings=not options.get("untie-embeddings-and-output-weights"),
        position="rope" if options.get("position-embedding-type") in {"rope", "yarn", "mrope"} else "learned",
        **mla,
    )


def _gated_width(hidden: int) -> int:
    """Megatron-LM's default width under SwiGLU keeps the number of weights: 4 hidden x 2 / 3, in multiples of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64


def _leading_dense(frequency: Any) -> int:
    """Return how many leading layers are dense, from moe-layer-freq: a number, or a list such as ([0]*3+[1]*13)."""
    if isinstance(frequency, int):
        return 0
    leading = re.match(r"\(?\[0\]\*(\d+)", str(frequency).replace(" ", ""))
    return int(leading[1]) if leading else 0


def _vocabulary(options: Mapping[str, Any]) -> int:
    """Return the words of a tokenizer."""
    kind = str(options.get("tokenizer-type"))
    if words := options.get("vocab-size"):
        return int(words) + (kind == "NullTokenizer")  # one more, for the end of a document
    with suppress(ConfigError):
        return model_shape(str(options.get("tokenizer-model"))).vocabulary
    return VOCABULARIES.get(kind, GPT2_VOCABULARY)


def _vocabulary_rows(options: Mapping[str, Any], tensor: int) -> int:
    words = options.get("padded-vocab-size") or _vocabulary(options)
    multiple = options.get("make-vocab-size-divisible-by", VOCABULARY_MULTIPLE) * tensor
    return int(math.ceil(words / multiple) * multiple)


def _precision(options: Mapping[str, Any]) -> Any:
    if options.get("fp4-format"):
        return "fp4"
    if options.get("fp8-format"):
        return "fp8"
    return "bf16" if options.get("bf16") else "fp16" if options.get("fp16") else "fp32"


def _implementation(options: Mapping[str, Any]) -> Implementation:
    local = options.get("transformer-impl") == "local"
    code = MEGATRON_LOCAL if local else TRANSFORMER_ENGINE
    if options.get("use-torch-fsdp2"):
        code = replace(code, shards_weights=True, zeroes_gradients=False, reuses_dummy_gradients=False)
    if not local and options.get("attention-backend") == "unfused":
        code = replace(code, attention="unfused")
    if options.get("no-gradient-accumulation-fusion"):
        code = replace(code, reuses_dummy_gradients=False, accumulates_weight_gradients=False)
    if options.get("cross-entropy-loss-fusion"):
        code = replace(code, loss="in_place" if options.get("cross-entropy-fusion-impl") == "te" else "compiled")
    return code


def _recompute(options: Mapping[str, Any]) -> dict[str, Any]:
    layers = options.get("recompute-num-layers") or 1
    block = options.get("recompute-method") == "block"
    return {
        "recompute": options.get("recompute-granularity") or "none",
        "recompute_layers" if block else "recompute_every": layers,
        "recompute_modules": _words(options.get("recompute-modules")) or None,
    }
