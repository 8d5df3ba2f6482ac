"""Every weight matrix that one token meets: the list that parameter counts, FLOP counts and matmul probes are made from."""

from dataclasses import dataclass

from tprimat.facts.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMatrix:
    """A linear layer: out = in @ weight, weight of shape (inputs, outputs)."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    """Of this matrix in one layer: experts."""
    active_copies: int = 1
    """Of these, how many one token passes."""
    split: str = "none"
    """What tensor parallelism divides: "outputs" (column parallel), "inputs" (row parallel) or "none" (each rank has all)."""
    experts: bool = False
    """One of the routed experts: a token meets some of them only."""

    @property
    def parameters(self) -> int:
        """Weights of all copies, biases left out."""
        return self.inputs * self.outputs * self.copies

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with."""
        return self.inputs * self.outputs * self.active_copies


def attention_matrices(shape: ModelShape) -> list[WeightMatrix]:
    """Projections of one layer's attention; queries, keys and values are one matmul as Megatron-LM runs them."""
    if shape.kv_lora_rank is not None:
        return latent_attention_matrices(shape)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return [
        WeightMatrix(name="qkv", inputs=shape.hidden, outputs=qkv, split="outputs"),
        WeightMatrix(name="attention_output", inputs=shape.heads * shape.head_dim, outputs=shape.hidden, split="inputs"),
    ]


def latent_attention_matrices(shape: ModelShape) -> list[WeightMatrix]:
    """Multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1; keys' rotary part is shared by all heads."""
    q_rank, kv_rank = shape.q_lora_rank or 0, shape.kv_lora_rank or 0
    nope, rope, heads = shape.nope_head_dim or 0, shape.rope_head_dim or 0, shape.heads
    return [
        WeightMatrix(name="q_down", inputs=shape.hidden, outputs=q_rank),
        WeightMatrix(name="q_up", inputs=q_rank, outputs=heads * (nope + rope), split="outputs"),
        WeightMatrix(name="kv_down", inputs=shape.hidden, outputs=kv_rank + rope),
        WeightMatrix(name="kv_up", inputs=kv_rank, outputs=heads * (nope + shape.value_dim), split="outputs"),
        WeightMatrix(name="attention_output", inputs=heads * shape.value_dim, outputs=shape.hidden, split="inputs"),
    ]


def feed_forward_matrices(shape: ModelShape) -> list[WeightMatrix]:
    """One dense feed-forward block; gate and up projection are one matmul as Megatron-LM runs them."""
    return _block(shape, "mlp", shape.ffn, copies=1, active_copies=1)


def moe_matrices(shape: ModelShape) -> list[WeightMatrix]:
    """Router, routed experts and shared experts of one layer; nothing for a dense model."""
    if shape.experts is None or shape.experts_per_token is None or shape.expert_ffn is None:
        return []
    matrices = [WeightMatrix(name="router", inputs=shape.hidden, outputs=shape.experts)]
    matrices += _block(shape, "expert", shape.expert_ffn, copies=shape.experts, active_copies=shape.experts_per_token)
    if shape.shared_experts:
        matrices += _block(shape, "shared_expert", shape.shared_experts * shape.expert_ffn, copies=1, active_copies=1)
    return matrices


def _block(shape: ModelShape, name: str, width: int, *, copies: int, active_copies: int) -> list[WeightMatrix]:
    up = (2 if shape.gated else 1) * width
    routed = copies > 1
    return [
        WeightMatrix(
            name=f"{name}_up",
            inputs=shape.hidden,
            outputs=up,
            copies=copies,
            active_copies=active_copies,
            split="outputs",
            experts=routed,
        ),
        WeightMatrix(
            name=f"{name}_down",
            inputs=width,
            outputs=shape.hidden,
            copies=copies,
            active_copies=active_copies,
            split="inputs",
            experts=routed,
        ),
    ]


def output_matrix(shape: ModelShape) -> WeightMatrix:
    """From the last hidden state to logits; a matmul also when its weight is the input embedding's."""
    return WeightMatrix(name="output", inputs=shape.hidden, outputs=shape.vocabulary, split="outputs")
