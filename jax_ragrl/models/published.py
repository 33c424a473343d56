"""Configs of published decoders by name, for planning and benchmarks; nothing is downloaded."""

from __future__ import annotations

import functools

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.rope import RopeScaling

# The fields that all sizes of a family share.
_QWEN2 = functools.partial(DecoderConfig, qkv_bias=True, qk_norm=False, vocab_size=151936)
_QWEN3 = functools.partial(
    DecoderConfig, vocab_size=151936, num_kv_heads=8, head_dim=128, max_positions=40960
)
_LLAMA3 = functools.partial(
    DecoderConfig,
    vocab_size=128256,
    num_heads=32,
    num_kv_heads=8,
    rope_theta=5e5,
    rms_norm_eps=1e-5,
    qk_norm=False,
    max_positions=131072,
)
_LLAMA3_8B = functools.partial(
    _LLAMA3,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    head_dim=128,
    tie_embeddings=False,
)

MODEL_CONFIGS: dict[str, DecoderConfig] = {
    "qwen2.5-0.5b": _QWEN2(
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
    ),
    "qwen2.5-1.5b": _QWEN2(
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
    ),
    "qwen2.5-3b": _QWEN2(
        hidden_size=2048,
        intermediate_size=11008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
    ),
    "qwen2.5-7b": _QWEN2(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        tie_embeddings=False,
    ),
    "qwen2.5-14b": _QWEN2(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=13824,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        tie_embeddings=False,
    ),
    "qwen3-0.6b": _QWEN3(hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16),
    "qwen3-1.7b": _QWEN3(hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16),
    "qwen3-4b": _QWEN3(hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32),
    "qwen3-8b": _QWEN3(
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        tie_embeddings=False,
    ),
    "llama-3.2-1b": _LLAMA3(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        rope_scaling=RopeScaling("llama3", factor=32.0, original_max_positions=8192),
    ),
    "llama-3.2-3b": _LLAMA3(
        hidden_size=3072,
        intermediate_size=8192,
        num_layers=28,
        num_heads=24,
        head_dim=128,
        rope_scaling=RopeScaling("llama3", factor=32.0, original_max_positions=8192),
    ),
    "llama-3-8b": _LLAMA3_8B(max_positions=8192),
    "llama-3.1-8b": _LLAMA3_8B(
        rope_scaling=RopeScaling("llama3", factor=8.0, original_max_positions=8192)
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        qk_norm=False,
        max_positions=8192,
    ),
    "tiny": DecoderConfig(1024, 128, 256, 6, 4, 4, 32),  # the policy that ships with the package
}
# Qwen2 has the shapes of Qwen2.5.
MODEL_CONFIGS |= {f"qwen2-{n}b": MODEL_CONFIGS[f"qwen2.5-{n}b"] for n in ("0.5", "1.5", "7")}
SHORT_NAMES = {"smollm2": "smollm2-135m"}  # the name by which `models/by_name.py` loads it


def published_config(name: str) -> DecoderConfig:
    """Returns the config of a published model, or of `tiny` or `smollm2`.

    Organization, suffix and `Meta-` of a published name are ignored, as in
    `Qwen/Qwen2.5-3B-Instruct` and `meta-llama/Meta-Llama-3-8B`.

    Raises:
      UserError: no such model; the message lists the valid names.
    """
    short = name.lower().rpartition("/")[-1].removeprefix("meta-")
    short = SHORT_NAMES.get(short, short)
    for size, config in MODEL_CONFIGS.items():
        if short == size or (short.startswith(f"{size}-") and size != "tiny"):
            return config
    raise UserError(f"no model size named {name!r}: use one of {', '.join(MODEL_CONFIGS)}")
