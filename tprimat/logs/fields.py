"""What a line of a log says: its fields, and its numbers, units and switches as values."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tprimat.records.limits import LARGEST_WHOLE
from tprimat.records.schema import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFields:
    """What one line of a training log states. None: not on this line. Units are SI, whatever the log prints."""

    step: int | None = None
    total_steps: int | None = None
    step_seconds: float | None = None
    mean_since_reset: bool = False
    """The time is a mean over all steps since the framework last reset its timer, as Megatron-LM prints."""
    dispatched: bool = False
    """The time is that of the host, which in JAX runs ahead of the device: the first ones may cover the dispatch only."""
    tokens_per_second_per_gpu: float | None = None
    sequences_per_second: float | None = None
    """All ranks together."""
    tflops_per_gpu: float | None = None
    """Model TFLOP/s as the framework counts them, without recomputation."""
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    global_batch_sequences: int | None = None
    consumed_sequences: int | None = None
    """Of all steps so far."""
    consumed_tokens: int | None = None
    """Of all steps so far, where each counts with the length that its sequences had."""
    target_tokens: int | None = None
    """Tokens of the step that have a loss, without padding."""
    skipped_steps: int | None = None
    nan_steps: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """All memory in use on the device, including that of other processes. Not a peak of this run."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """Field of records.schema.Evidence -> value, where the line shows what the framework runs."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Megatron's arguments that describe the model and how it is computed, as printed."""
    dump: Literal["begins", "ends"] | None = None
    """The line opens or closes Megatron's dump of its resolved arguments, which outranks settings printed elsewhere."""
    accelerator: str | None = None
    finished: bool = False
    """The line states that training is done."""
    run: RunRecord | None = None
    """The line begins a run of TPrimat, whose record this is."""


GIGABYTE = 10**9
GIBIBYTE = 2**30
MEBIBYTE = 2**20

ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]])?|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)
"""Colours, titles, cursor moves and other control characters (ECMA-48)."""
LAUNCHER_PREFIX = (
    r"^(?:\[[\w./-]+\] |\([^()]*\bpid=[^()]*\) |[\w.-]+/\d+ | *[\w.-]+: |[\w.-]+ +\| |\[\d+,\d+\]<std(?:out|err)>: ?)?"
    r"(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?)?(?:\[[a-z]+\d+\]:)?"
)
"""What stands before a line: of kubectl, SkyPilot or Ray, NeMo-Run, srun (padded from ten tasks on) or pdsh, docker compose,
mpirun; then a time, as a node of Kubernetes keeps it with the stream, then torchrun."""
LEADING_NUMBER = re.compile(r"\s*([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))", re.IGNORECASE)
HUMAN_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
MOST_DIGITS = 18


def plain(text: str) -> str:
    """Return the line without terminal colours and other control sequences."""
    return ESCAPES.sub("", text) if "\x1b" in text else text


def number(text: str | None) -> float | None:
    """Return the leading number of '9836.3/21761.7', ' 4,376', '1.0E-05', 'nan' or '119.02GiB'; None for 'N/A' and torn text."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        match = LEADING_NUMBER.match(text)
        return float(match[1].replace(",", "")) if match else None


def whole(text: str | None) -> int | None:
    """Return the leading number where it is whole. Larger ones than a record's counts are torn text."""
    value = number(text)
    return int(value) if value is not None and abs(value) <= LARGEST_WHOLE and value == int(value) else None


def count(digits: str) -> int:
    """Return digits as a number. Longer ones than any count are torn text; their first 18 are enough to see that."""
    return int(digits[:MOST_DIGITS])


def human(text: str | None) -> float | None:
    """Return 7790.0 for '7.79K', as nanotron's human_format writes; plain numbers as they are."""
    value = number(text)
    if value is None or text is None:
        return None
    return value * HUMAN_SUFFIXES.get(text.strip()[-1:].upper(), 1.0)


def scaled(value: float | None, factor: float) -> float | None:
    """Convert a unit; what is absent stays absent."""
    return None if value is None else value * factor


def in_bytes(value: float | None, unit: int) -> int | None:
    """Convert memory to bytes; None where it is absent or no finite number."""
    return None if value is None or not math.isfinite(value * unit) else round(value * unit)


def capacity(text: str) -> float | str:
    """Return the capacity of an expert that Megatron's argument states; None and negative ones are none."""
    value = number(text)
    return value if value is not None and math.isfinite(value) and value > 0 else "unlimited"


def truth(text: str) -> bool | None:
    """Return the value of 'True' or 'false', as Python and YAML print them."""
    return {"true": True, "false": False}.get(text.strip().lower())


PLAIN_ARGUMENTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "params_dtype": ("parameter_dtype", lambda value: value.removeprefix("torch.")),
    "transformer_impl": ("transformer_engine", lambda value: value == "transformer_engine"),
    "moe_expert_capacity_factor": ("expert_capacity", capacity),
    "optimizer": ("optimizer", str),
}
"""Argument -> field of the evidence, and what its text says of it."""
WHOLE_ARGUMENTS = {
    "world_size": "world_size",
    "global_num_gpus": "world_size",
    "tensor_model_parallel_size": "tensor_parallel",
    "model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "data_parallel_size": "data_parallel",
    "micro_batch_size": "micro_batch_sequences",
    "global_batch_size": "global_batch_sequences",
    "train_batch_size": "global_batch_sequences",
    "train_micro_batch_size_per_gpu": "micro_batch_sequences",
    "seq_length": "sequence_tokens",
}
"""Argument of Megatron, or of GPT-NeoX and Megatron before 2021 -> field of records.schema.Evidence."""
SHAPE_ARGUMENTS = {
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "glu_activation",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "max_position_embeddings",
    "vocab_size",
    "padded_vocab_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "mtp_num_layers",
    "checkpoint_activations",
    "window_size",
    "decoder_seq_length",
    "peft",
    "moe_expert_capacity_factor",
    "reset_attention_mask",
    "sft",
    "packed_sequence_size",
    "experimental_attention_variant",
    "use_sink_attention",
    "attention_output_gate",
    "head_wise_attn_gate",
    "heterogeneous_layers_config_path",
    "retro_add_retriever",
    "perform_rl_step",
    "pld_enabled",
    "use_packed_attention",
    "stage",
}
"""Megatron's arguments that describe the model and its sequences, which logs/shape.py reads; the last two are of Primus."""
ARITHMETIC_ARGUMENTS = {
    "fp4_recipe",
    "fp8_recipe",
    "fp8_wgrad",
    "fp8_linears",
    "fp8_experts",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "enable_turbo_attention_float8",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "te_precision_config_file",
    "accumulate_allreduce_grads_in_fp32",
    "grad_reduce_in_bf16",
    "grad_reduce_in_fp32",
    "main_grads_dtype",
    "use_precision_aware_optimizer",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "moe_router_force_biased",
    "moe_expert_rank_capacity_factor",
    "profile",
    "profile_step_start",
    "profile_step_end",
}
"""Megatron's arguments that decide how a step computes, which logs/arithmetic.py reads. One is of Primus, and fp8_linears and
fp8_experts say which layers torchtitan converted."""
OPTION_ARGUMENTS = {
    "fp8",
    "fp8_param_gather",
    "fp8_amax_history_len",
    "attention_backend",
    "use_flash_attn",
    "attention_dropout",
    "hidden_dropout",
    "fp32_residual_connection",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "deterministic_mode",
    "check_for_nan_in_loss_and_grad",
    "timing_log_level",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "use_distributed_optimizer",
    "use_torch_fsdp2",
    "use_custom_fsdp",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tp_comm_overlap",
    "cp_comm_type",
    "expert_tensor_parallel_size",
    "enable_cuda_graph",
    "external_cuda_graph",
    "cuda_graph_impl",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "overlap_moe_expert_parallel_comm",
    "enable_primus_turbo",
    "use_turbo_attention",
    "use_turbo_gemm",
    "use_turbo_parallel_linear",
    "use_turbo_grouped_gemm",
    "use_turbo_grouped_mlp",
    "use_turbo_deepep",
    "turbo_sync_free_moe_stage",
    "compile",
    "compile_loss",
    "cpu_offload",
    "async_tensor_parallel",
}
"""Megatron's arguments, Primus's and torchtitan's, that change the speed of the same work: the options of a run."""
MAXTEXT_OPTIONS = {
    "quantization",
    "remat_policy",
    "dropout_rate",
    "scan_layers",
    "gradient_accumulation_steps",
    "optimizer_memory_host_offload",
    "parameter_memory_host_offload",
    "logits_dot_in_fp32",
    "megablox",
    "sparse_matmul",
}
"""MaxText's settings that do."""
DEEPSPEED_OPTIONS = {
    "zero_optimization_stage",
    "offload_optimizer",
    "offload_param",
    "communication_data_type",
    "grad_accum_dtype",
    "wall_clock_breakdown",
}
"""DeepSpeed's, of which wall_clock_breakdown waits for the device at each part of a step."""
OPTIONS = OPTION_ARGUMENTS | MAXTEXT_OPTIONS | DEEPSPEED_OPTIONS
KEPT_ARGUMENTS = SHAPE_ARGUMENTS | ARITHMETIC_ARGUMENTS | OPTION_ARGUMENTS | DEEPSPEED_OPTIONS
BEFORE_SWIGLU = {
    "swiglu": "False",
    "normalization": "LayerNorm",
    "add_bias_linear": "True",
    "untie_embeddings_and_output_weights": "False",
    "position_embedding_type": "learned_absolute",
}
"""What every model of Megatron-LM had before it got the arguments that choose, in 2022."""
NARROW_DTYPES = {"fp8", "fp4", "int8", "int4"}
"""Of products, in a program whose other dtype is bf16 or the like."""
KNOWN_LATER = {"vocab_size", "padded_vocab_size"}
"""None in the dump where the tokenizer tells them after it."""
NEOX_DTYPES = {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}
"""Of its argument `precision`, which it prints as 'bfloat16.......updated'."""
RECOMPUTE = {"none": "none", "selective": "selective", "full": "full"}


def megatron_argument(name: str, value: str) -> Mapping[str, Any]:
    """Return one Megatron argument as evidence; empty for arguments that records do not keep.

    `fp8` is a switch over `matmul_dtype`: extract.evidence_of joins the two.
    """
    value = value.strip()
    if name in WHOLE_ARGUMENTS:
        argument = whole(value)
        return {} if argument is None else {WHOLE_ARGUMENTS[name]: argument}
    if name == "pipe_parallel_size":  # of GPT-NeoX, where 0 is no pipeline
        stages = whole(value)
        return {} if stages is None else {"pipeline_parallel": max(stages, 1)}
    if name in {"bf16", "fp16", "precision"}:
        dtype = NEOX_DTYPES.get(value.partition(".")[0]) if name == "precision" else name if truth(value) else None
        return {"matmul_dtype": dtype} if dtype else {}
    if name in {"fp8", "fp8_hybrid", "fp8_e4m3"}:  # two switches until 2023, of which one is False
        asked = value.lower() in {"hybrid", "e4m3", "true"}
        return {"fp8": asked} if asked or name == "fp8" else {}
    if name == "fp4":
        return {"matmul_dtype": "fp4"} if value.lower() in {"e2m1", "nvfp4", "mxfp4"} else {}
    if name == "checkpoint_activations":
        return {"recompute": "full"} if truth(value) else {}
    if name == "recompute_granularity":
        return {"recompute": RECOMPUTE[value.lower()]} if value.lower() in RECOMPUTE else {}
    if name == "sequence_parallel":
        return {"sequence_parallel": flag} if (flag := truth(value)) is not None else {}
    if name == "moe_router_force_load_balancing":
        return {"routing": "balanced" if truth(value) else "natural"}
    if name == "mock_data":
        return {"data": "mock"} if truth(value) else {}
    if name in PLAIN_ARGUMENTS:
        fact, read = PLAIN_ARGUMENTS[name]
        return {fact: read(value)}
    return {}
