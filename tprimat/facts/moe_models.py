"""Mixtures of experts. Figures are those of each published config.json."""

from tprimat.facts.shape import ModelShape

MIXTRAL = (
    ModelShape(
        name="mixtral-8x7b",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocabulary=32000,
        context_tokens=32768,
        rope_base=1000000.0,
        experts=8,
        experts_per_token=2,
        expert_ffn=14336,
        source="https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json; arXiv 2401.04088, table 1",
    ),
    ModelShape(
        name="mixtral-8x22b",
        layers=56,
        hidden=6144,
        heads=48,
        kv_heads=8,
        head_dim=128,
        ffn=16384,
        vocabulary=32000,
        context_tokens=65536,
        rope_base=1000000.0,
        experts=8,
        experts_per_token=2,
        expert_ffn=16384,
        source="https://huggingface.co/mistralai/Mixtral-8x22B-v0.1 config.json",
    ),
)

QWEN3_MOE = (
    ModelShape(
        name="qwen3-30b-a3b",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        vocabulary=151936,
        context_tokens=40960,
        norm_epsilon=1e-6,
        qk_norm=True,
        rope_base=1000000.0,
        experts=128,
        experts_per_token=8,
        expert_ffn=768,
        source="https://huggingface.co/Qwen/Qwen3-30B-A3B config.json; arXiv 2505.09388, table 2",
    ),
)

DEEPSEEK = (
    # Without the multi-token-prediction layer, as its authors count 671 billion. Rotary scaling (YaRN) serves contexts beyond the
    # 4,096 tokens of pre-training; it changes no count and no speed.
    ModelShape(
        name="deepseek-v3",
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        head_dim=192,
        ffn=18432,
        vocabulary=129280,
        context_tokens=163840,
        norm_epsilon=1e-6,
        experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        shared_experts=1,
        dense_first_layers=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_head_dim=128,
        rope_head_dim=64,
        value_head_dim=128,
        source="https://huggingface.co/deepseek-ai/DeepSeek-V3 config.json; arXiv 2412.19437, section 4.2",
    ),
)
