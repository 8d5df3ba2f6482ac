"""GPT-style dense models: learned positions, layernorm, a two-matrix feed-forward."""

from dataclasses import replace

from tprimat.facts.shape import ModelShape

GPT3 = (
    ModelShape(
        name="gpt-3-175b",
        layers=96,
        hidden=12288,
        heads=96,
        kv_heads=96,
        head_dim=128,
        ffn=49152,
        vocabulary=50257,
        context_tokens=2048,
        gated=False,
        norm="layernorm",
        linear_bias=True,
        tied_embeddings=True,
        position="learned",
        source="Brown et al., arXiv 2005.14165, table 2.1",
    ),
    # Megatron-LM's scaling table gives a row's size, heads, hidden size and layers, and one vocabulary for all rows. Its sizes
    # (1.7, 7.1, ... 462 billion) come out only with an output layer of its own, so embeddings are not tied.
    ModelShape(
        name="gpt-462b",
        layers=112,
        hidden=18432,
        heads=144,
        kv_heads=144,
        head_dim=128,
        ffn=73728,
        vocabulary=131072,
        context_tokens=4096,
        gated=False,
        norm="layernorm",
        linear_bias=True,
        position="learned",
        source="https://github.com/NVIDIA/Megatron-LM README.md and images/model_table.png, July 2024",
    ),
)

MI350X_SUITE = "AMD MI350X Training Benchmark Results, 2026-01-08, benchmark 3, table of model configurations"


def _suite(size: str, *, layers: int, hidden: int, heads: int) -> ModelShape:
    """One size of the MI350X suite.

    The page prints widths and rounded counts. Its tokens/s and TFLOPS (6 x parameters x tokens/s) give the counts to four or
    five digits, and those are met by: the GPT-2 vocabulary, shared by input and output; as many learned positions as the
    run's sequence has tokens (512, or 1,024 for the two largest); layernorms with a shift; no biases on linear layers. The
    page's "Params" is that total, positions and embedding included. Its names are not: "7B" has 5.24 and "13B" 10.12 billion.
    """
    return ModelShape(
        name=f"gpt-{size}",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocabulary=50257,
        context_tokens=512,
        gated=False,
        norm="layernorm",
        tied_embeddings=True,
        position="learned",
        source=MI350X_SUITE,
    )


SUITE = (
    _suite("30m", layers=6, hidden=384, heads=6),
    _suite("124m", layers=12, hidden=768, heads=12),
    _suite("354m", layers=24, hidden=1024, heads=16),
    _suite("773m", layers=36, hidden=1280, heads=20),
    _suite("1.5b", layers=48, hidden=1536, heads=24),
    _suite("3b", layers=32, hidden=2560, heads=32),
    replace(_suite("7b", layers=32, hidden=4096, heads=32), context_tokens=1024, ffn=11008),
    replace(_suite("13b", layers=40, hidden=5120, heads=40), context_tokens=1024, ffn=13824),
)
