"""How a framework's layers are implemented, as far as memory and time depend on it.

A framework is described by traits, each with a mechanism that can be read in its code, so that nothing here knows the name of
an engine.
"""

from dataclasses import dataclass, replace
from typing import Literal

Attention = Literal["flash", "unfused"]
Optimizer = Literal["one_pass", "fused", "eager"]
Loss = Literal["chunked", "in_place", "compiled_away", "native", "compiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """How a framework keeps what its backward pass needs. Each trait names the code that decides it."""

    name: str
    """For reports."""
    keeps_gathered_inputs: bool = False
    """Column-parallel layers keep their input as gathered over sequence-parallel ranks, instead of gathering it again."""
    keeps_joint_projection: bool = False
    """Values are a view of the joint projection, which therefore stays whole until the backward pass."""
    attention: Attention = "flash"
    """flash: queries, keys, values, output and one number a row; unfused: the scores as well."""
    loss: Loss = "native"
    """chunked: never whole logits; in_place: Transformer Engine writes the gradient over bf16 logits; compiled_away: the gradient
    beside them, in bf16 too; native: a copy in fp32;
    compiled: two copies in fp32, because a compiled function does not change its argument."""
    loss_chunk_tokens: int = 2048
    """Tokens whose logits exist at once, for chunked."""
    loss_over_tensor_ranks: Loss | None = None
    """Where it differs over several tensor ranks."""
    eager_loss: bool = False
    """The chunks' element-wise parts are not compiled, so that each operation has its own result in fp32."""
    eager_layers: bool = False
    """Norms, residual sums and rotation are not compiled: each operation reads and writes memory (_eager_elements in time.py)."""
    optimizer: Optimizer = "fused"
    """one_pass: Adam scales gradients while it updates; fused: another pass scales them before; eager: Adam is a chain of
    operations, as torch's default is."""
    zeroes_gradients: bool = True
    """Each step sets all gradients to zero first; False: its first products overwrite them, or they are new tensors."""
    fused_activation: bool = True
    """SwiGLU is one function that keeps its argument; False: torch keeps both factors of the product as well."""
    reuses_dummy_gradients: bool = False
    """Transformer Engine hands autograd one dummy gradient a weight shape and keeps it; others allocate one for each product."""
    captures_layers: bool = False
    """A CUDA graph runs each layer and holds dummy gradients of its own."""
    reduces_in_fp32: bool = True
    """Gradients are kept and reduced in fp32; False: in the dtype of the weights."""
    widens_gradients: bool = True
    """The update of fp32 weights first copies all gradients in bf16 to fp32; False: it reads them as they are."""
    accumulates_weight_gradients: bool = True
    """Products add to the fp32 gradients directly."""
    overlaps_tensor_parallel: bool = False
    """A product starts on the piece that is here while the next travels between tensor ranks."""
    overlaps_in_fp8: bool = False
    """Products in fp8 do so, too."""
    balanced_stages: bool = False
    """The last pipeline stage has fewer layers, because its output layer costs as much as several."""
    gathers_keys_values: bool = False
    """Under context parallelism each rank keeps all ranks' keys and values; False: they travel around a ring in both passes."""
    dispatches_once_a_node: bool = False
    """A token travels to a node once, however many of its experts are there (DeepEP and HybridEP, Megatron-Core's dispatcher
    "flex"); False: once for each of its experts ("alltoall")."""
    keeps_returned_rows: bool = False
    """The results of experts are kept as they came back, because the weights of a token's experts are applied there."""
    weighs_experts_in_fp32: bool = False
    """The results of experts are kept in fp32, in which their weights are applied."""
    keeps_fp8_weights_alone: bool = False
    """Under fp8 the layers' matrices are in 8 bits, as they are and transposed, without bf16 beside them (fp8_param_gather)."""
    fp8_output_layer: bool = False
    """Under fp8 the output layer multiplies in 8 bits, too."""
    expert_wgrad_in_bf16: bool = False
    """Under fp8 the experts' weight gradients stay in bf16, and so do the rows that are kept for them."""
    received_rows_step: float = 0.0
    """Buffers of rows for experts are multiples of this part of the rows that a rank sends (LENGTHS in megatron/experts.py)."""
    shards_weights: bool = False
    """FSDP: weights, gradients and states are spread over data-parallel ranks and gathered layer by layer."""
    selects_operations: bool = False
    """Selective recomputation that names no module keeps the result of every second product, of attention and of the layer
    before, and computes everything else again (torchtitan's per-op selective activation checkpointing)."""
    attention_speed: float = 1.0
    """Of its attention, over the fastest kernel's."""
    expert_call_seconds: float = 0.0
    """What the host takes for a product of one expert, where each is a call of its own that the device waits for; 0: one kernel
    multiplies all experts, or a CUDA graph launches them."""
    overlaps_backward: bool = True
    """Exchanges between tensor ranks in the backward pass run beside the products of weights' gradients."""
    overlaps_experts: bool = False
    """Tokens travel to experts while another micro-batch multiplies (overlap_moe_expert_parallel_comm)."""
    graphs_balanced_steps: bool = False
    """In MXFP8 and with a forced balance, it does so, and one CUDA graph holds the step, so that the host launches nothing."""
    divides_over_replicas_alone: bool = False
    """It does so with dense models on one pipeline stage and one tensor rank only."""
    buffers_bytes: int = 0
    """Workspaces of the matrix libraries, which torch allocates once for each thread that multiplies."""


# The implementations that TPrimat starts, and those whose logs it reads.

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""torch's default on Hopper and newer (at::cuda::getChosenWorkspaceSize), for each handle."""
THREADS_THAT_MULTIPLY = 2
"""The forward pass's thread and autograd's."""
WORKSPACES = CUBLAS_WORKSPACE_BYTES * THREADS_THAT_MULTIPLY

EMBEDDED = Implementation(
    name="embedded",
    keeps_gathered_inputs=True,
    loss="chunked",
    optimizer="one_pass",
    zeroes_gradients=False,
    overlaps_tensor_parallel=True,
    balanced_stages=True,
    gathers_keys_values=True,
    keeps_returned_rows=True,
    widens_gradients=False,
    expert_wgrad_in_bf16=True,
    received_rows_step=1 / 16,
    buffers_bytes=WORKSPACES,
)
"""tprimat/megatron with its own layers, all switches on."""
TRANSFORMER_ENGINE = Implementation(
    name="Megatron-Core with Transformer Engine",
    loss="native",
    reuses_dummy_gradients=True,
    expert_call_seconds=75e-6,
    buffers_bytes=2 * WORKSPACES,
)
"""Megatron-LM and Primus with Transformer Engine's layers; Transformer Engine has workspaces of its own. The library chooses an
algorithm for each new number of rows: 94 us a call in benchmarks/records/h200/moe/grouped-splits.json, 75 in our steps."""
MEGATRON_LOCAL = Implementation(
    name="Megatron-Core without Transformer Engine",
    loss="native",
    attention="unfused",
    keeps_joint_projection=True,
    buffers_bytes=WORKSPACES,
)
"""Megatron-LM's local layers."""
MEGATRON_TUNED = replace(
    TRANSFORMER_ENGINE,
    name="Megatron-Core as NVIDIA tunes it",
    loss="in_place",
    reduces_in_fp32=False,
    keeps_fp8_weights_alone=True,
    dispatches_once_a_node=True,
    overlaps_tensor_parallel=True,
    overlaps_in_fp8=True,
    expert_call_seconds=16e-6,
)
"""Megatron-LM as NVIDIA trains large models with it: a fused loss, tp_comm_overlap, and DeepEP or HybridEP between the experts'
ranks; gradients in bf16, and weights in 8 bits alone (grad_reduce_in_fp32 and fp8_param_gather in perf_recipes/_common.py and
training/mixed_precision.py of Megatron-Bridge 0.6). A call with as many rows as before takes 16 us (the same record)."""
MEGATRON_GRAPHED = replace(MEGATRON_TUNED, graphs_balanced_steps=True)
"""Since Megatron-Bridge 26.06 (_enable_hybridep_full_iteration_mxfp8 in perf_recipes)."""
MEGATRON_FSDP = replace(MEGATRON_TUNED, name="Megatron-FSDP", shards_weights=True, zeroes_gradients=False)
"""Megatron-Bridge's use_megatron_fsdp with data_parallel_sharding_strategy optim_grads_params."""
NEMO = replace(TRANSFORMER_ENGINE, name="NeMo with Transformer Engine", keeps_fp8_weights_alone=True)
"""NeMo's recipes."""
BRIDGE = replace(NEMO, name="Megatron-Bridge with Transformer Engine", loss="in_place")
"""Bridge's recipes, with the loss of Llama's and Qwen3's (cross_entropy_fusion_impl "te" in 0.6.2's recipes/*/h100)."""
NEMO_ON_TORCH = replace(
    MEGATRON_LOCAL,
    name="NeMo without Transformer Engine",
    attention="flash",
    loss="compiled",
    eager_layers=True,
    optimizer="eager",
    accumulates_weight_gradients=False,
)
"""NeMo's recipes on torch alone."""
FSDP = Implementation(
    name="FSDP2",
    loss="compiled_away",
    loss_over_tensor_ranks="compiled",
    shards_weights=True,
    zeroes_gradients=False,
    weighs_experts_in_fp32=True,
    accumulates_weight_gradients=False,
    keeps_gathered_inputs=True,
    overlaps_backward=False,
    selects_operations=True,
    attention_speed=0.6,
    buffers_bytes=WORKSPACES,
)
"""torchtitan, compiled, with FlashAttention 2, which does 337 of cuDNN's 574 TFLOP/s on H200 (8,192 tokens, forward).
Over tensor ranks its loss is computed on DTensors in fp32, which compilation does not fuse."""
