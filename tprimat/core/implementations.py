"""How a framework's layers are implemented, as far as memory and time depend on it.

A framework is described by traits, each with a mechanism that can be read in its code, so that nothing here knows the name of
an engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tprimat.core.rows import DATA, document

Attention = Literal["flash", "unfused"]
Optimizer = Literal["one_pass", "fused", "eager"]
LossKind = Literal["chunked", "in_place", "copied", "compiled_away", "native", "compiled"]
Options = Mapping[str, Any]
Version = bool | str | None
"""Of Transformer Engine, or whether its layers run; None: not known yet."""
DISPATCHERS = {"alltoall": False, "deepep": True, "hybridep": True}
"""What carries tokens to experts -> whether a token travels to a node once, however many of its experts are there. Megatron-Core
calls the last two "flex"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """How a framework keeps what its backward pass needs. Each trait names the code that decides it."""

    name: str
    keeps_gathered_inputs: bool = False
    """Column-parallel layers keep their input as gathered over sequence-parallel ranks, instead of gathering it again."""
    keeps_joint_projection: bool = False
    """Values are a view of the joint projection, which therefore stays whole until the backward pass."""
    attention: Attention = "flash"
    """flash: queries, keys, values, output and one number a row; unfused: the scores as well."""
    loss: LossKind = "native"
    """chunked: never whole logits; in_place: Transformer Engine writes the gradient over bf16 logits; copied: over their copy;
    compiled_away: the gradient beside them, in bf16 too; native: a copy in fp32; compiled: two copies in fp32, because a compiled
    function does not change its argument."""
    loss_chunk_tokens: int = 2048
    loss_over_tensor_ranks: LossKind | None = None
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
    balanced_stages: bool = False
    """The last pipeline stage has fewer layers, because its output layer costs as much as several."""
    gathers_keys_values: bool = False
    """Under context parallelism each rank keeps all ranks' keys and values; False: they travel around a ring in both passes."""
    dispatches_once_a_node: bool = False
    """Its dispatcher is DeepEP or HybridEP, not alltoall (DISPATCHERS)."""
    keeps_returned_rows: bool = False
    """The results of experts are kept as they came back, because the weights of a token's experts are applied there."""
    weighs_experts_in_fp32: bool = False
    """The results of experts are kept in fp32, in which their weights are applied."""
    keeps_fp8_weights_alone: bool = False
    """Under fp8 the layers' matrices are in 8 bits, as they are and transposed, without bf16 beside them (fp8_param_gather)."""
    fp8_output_layer: bool = False
    expert_wgrad_in_bf16: bool = False
    """Under fp8 the experts' weight gradients stay in bf16, and so do the rows that are kept for them."""
    received_rows_step: float = 0.0
    """Buffers of rows for experts are multiples of this part of the rows that a rank sends (LENGTHS in megatron/experts.py)."""
    shards_weights: bool = False
    """FSDP: weights, gradients and states are spread over data-parallel ranks and gathered layer by layer."""
    selects_operations: bool = False
    """Selective recomputation that names no module keeps the result of every second product, of attention and of the layer
    before, and computes everything else again (torchtitan's per-op selective activation checkpointing)."""
    attends_by_torch: bool = False
    """Its attention is torch's flash kernel, which is not the fastest (torch_attention in data/prediction.yaml)."""
    expert_call_seconds: float = 0.0
    """What the host takes for a product of one expert, where each is a call of its own that the device waits for; 0: one kernel
    multiplies all experts, or a CUDA graph launches them."""
    call_seconds: float = 0.0
    """What the host takes for a kernel of a layer, module around it included, where that is more than a launch."""
    launches_own_layers: bool = False
    """The host launches its dense layers kernel by kernel, which takes as long as measured (launches in data/prediction.yaml)."""
    exchanges_dtensors: bool = False
    """Tensor ranks exchange torch's DTensors: nothing runs beside it, tokens are copied to be gathered and scattered, inputs are
    gathered in fp8 where they are multiplied so, and operations that are selected for recomputation gather again."""
    overlaps_experts: bool = False
    """Tokens travel to experts while another micro-batch multiplies (overlap_moe_expert_parallel_comm)."""
    graphs_balanced_steps: bool = False
    """In MXFP8 and with a forced balance, it does so, and one CUDA graph holds the step, so that the host launches nothing."""
    divides_over_replicas_alone: bool = False
    """It does so with dense models on one pipeline stage and one tensor rank only."""
    buffers_bytes: int = 0
    """Workspaces of the matrix libraries, which torch allocates once for each thread that multiplies."""


def _rows() -> Iterator[Implementation]:
    read: dict[str, Implementation] = {}
    for name, row in document(DATA / "implementations.yaml")["implementations"].items():
        like = row.pop("like", None)
        read[name] = replace(read[like], **row) if like else Implementation(**row)
    yield from read.values()


# The implementations that TPrimat starts, and those whose logs it reads.
(
    EMBEDDED,
    TRANSFORMER_ENGINE,
    MEGATRON_LOCAL,
    MEGATRON_TUNED,
    MEGATRON_GRAPHED,
    MEGATRON_FSDP,
    NEMO,
    BRIDGE,
    NEMO_ON_TORCH,
    FSDP,
) = _rows()
