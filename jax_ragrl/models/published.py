"""Configs of published decoders by name, for planning and benchmarks; nothing is downloaded."""

from __future__ import annotations

import functools

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.rope import RopeScaling

# The fields that all sizes of a family share.
_QWEN25 = functools.partial(DecoderConfig, qkv_bias=True, qk_norm=False)
_QWEN3 = functools.partial(DecoderConfig, max_positions=40960)
_LLAMA3 = functools.partial(
    DecoderConfig, rope_theta=5e5, rms_norm_eps=1e-5, qk_norm=False, max_positions=131072
)
_BY_8, _BY_32 = (
    RopeScaling("llama3", factor=factor, original_max_positions=8192) for factor in (8.0, 32.0)
)
# Vocabulary, width, width of the MLP, layers, heads, key-value heads, width of a head.
MODEL_CONFIGS: dict[str, DecoderConfig] = {
    "qwen2.5-0.5b": _QWEN25(151936, 896, 4864, 24, 14, 2, 64),
    "qwen2.5-1.5b": _QWEN25(151936, 1536, 8960, 28, 12, 2, 128),
    "qwen2.5-3b": _QWEN25(151936, 2048, 11008, 36, 16, 2, 128),
    "qwen2.5-7b": _QWEN25(152064, 3584, 18944, 28, 28, 4, 128, tie_embeddings=False),
    "qwen2.5-14b": _QWEN25(152064, 5120, 13824, 48, 40, 8, 128, tie_embeddings=False),
    "qwen3-0.6b": _QWEN3(151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": _QWEN3(151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": _QWEN3(151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": _QWEN3(151936, 4096, 12288, 36, 32, 8, 128, tie_embeddings=False),
    "llama-3.2-1b": _LLAMA3(128256, 2048, 8192, 16, 32, 8, 64, rope_scaling=_BY_32),
    "llama-3.2-3b": _LLAMA3(128256, 3072, 8192, 28, 24, 8, 128, rope_scaling=_BY_32),
    "llama-3-8b": _LLAMA3(
        128256, 4096, 14336, 32, 32, 8, 128, max_positions=8192, tie_embeddings=False
    ),
    "llama-3.1-8b": _LLAMA3(
        128256, 4096, 14336, 32, 32, 8, 128, tie_embeddings=False, rope_scaling=_BY_8
    ),
    "smollm2-135m": _LLAMA3(49152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5, max_positions=8192),
    "tiny": DecoderConfig(1024, 128, 256, 6, 4, 4, 32),  # the policy that ships with the package
}
# Qwen2 has the shapes of Qwen2.5.
MODEL_CONFIGS |= {f"qwen2-{n}b": MODEL_CONFIGS[f"qwen2.5-{n}b"] for n in ("0.5", "1.5", "7")}
SHORT_NAMES = {"smollm2": "smollm2-135m"}  # the name by which `models/by_name.py` loads it


def published_config(name: str) -> DecoderConfig:
    """Returns the config of a published model, or of `tiny` or `smollm2`.

    Organization, suffix and `Meta-` of a published name are ignored, as in
    `Qwen/Qwen2.5-3B-Instruct` and `meta-llama/Meta-Llama-3-8B`.
    """
    short = name.lower().rpartition("/")[-1].removeprefix("meta-")
    short = SHORT_NAMES.get(short, short)
    for size, config in MODEL_CONFIGS.items():
        if short == size or (short.startswith(f"{size}-") and size != "tiny"):
            return config
    raise UserError(f"no model size named {name!r}: use one of {', '.join(MODEL_CONFIGS)}")
