"""`config.json` to `DecoderConfig` and back, for the families `qwen2`, `qwen3` and `llama`.

Every field is understood, known to be harmless, required to have the one value that is supported,
or refused by name. None is silently ignored: a field that changes the arithmetic and is skipped
gives a model that is only slightly wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
    """What tells a family apart; `head_dim` is its default, 0 meaning width / heads."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int = 0
    slides: bool = False


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, slides=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128, slides=True),
    "llama": Family("LlamaForCausalLM"),
}

REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}

# Read by name below.
UNDERSTOOD = {
    *REQUIRED,
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
}

# Other values would change the arithmetic, and are not implemented.
ONLY = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
}

# They say how a model was made, is generated from or is printed; none touches the forward pass.
HARMLESS = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
}

ROPE_FIELDS = {
    "linear": {},
    "llama3": {"low_freq_factor": "low_freq", "high_freq_factor": "high_freq"},
    "yarn": {
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
    },
}
_ROPE_COMMON = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


def from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a parsed `config.json`; `UserError` names the field that is not supported."""
    family = _family(raw)
    _refuse_unknown(raw)
    fields = {ours: raw[theirs] for theirs, ours in REQUIRED.items()}
    heads = raw["num_attention_heads"]
    theta, scaling = _rope(raw)
    window, sliding = _sliding(raw, family)
    return DecoderConfig(
        **fields,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or family.head_dim or raw["hidden_size"] // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding,
        max_positions=int(raw.get("max_position_embeddings", 32768)),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"config.json has model_type {kind!r}, which is not supported: "
            f"use a model of type {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    for name in REQUIRED:
        if not isinstance(raw.get(name), int):
            raise UserError(f"config.json gives {name} as {raw.get(name)!r}: it must be an integer")
    for name, value in raw.items():
        if name in ONLY and value not in ONLY[name]:
            raise UserError(
                f"config.json sets {name} = {value!r}, but only {ONLY[name][0]!r} is implemented: "
                "use another checkpoint"
            )
        if name not in UNDERSTOOD | HARMLESS | set(ONLY):
            raise UserError(
                f"config.json sets {name!r}, which is not understood and may change the model: "
                "remove it if it does not, or use another checkpoint"
            )


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UserError("config.json rotates only part of each head: this is not implemented")
    if kind == "default":
        return theta, None
    if kind not in ROPE_FIELDS:
        raise UserError(
            f"config.json asks for rope scaling {kind!r}, but only {', '.join(ROPE_FIELDS)} are "
            "implemented: use another checkpoint"
        )
    return theta, _scaling(kind, rope, raw)


def _scaling(kind: str, rope: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling:
    known = ROPE_FIELDS[kind]
    given = {name: value for name, value in rope.items() if value is not None}
    unknown = sorted(set(given) - set(known) - _ROPE_COMMON)
    if unknown or "factor" not in given:
        what = f"has {unknown[0]!r}, which is not understood" if unknown else "has no factor"
        raise UserError(f"{kind} rope scaling in config.json {what}: use another checkpoint")
    original = (
        raw.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or raw.get("max_position_embeddings", 8192)
    )
    return RopeScaling(
        kind,
        factor=float(given["factor"]),
        original_max_positions=int(original),
        **{ours: given[theirs] for theirs, ours in known.items() if theirs in given},
    )


def _sliding(raw: Mapping[str, Any], family: Family) -> tuple[int | None, tuple[int, ...]]:
    """Transformers' rule: layers from `max_window_layers` on, unless `layer_types` lists them."""
    num_layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    types = raw.get("layer_types") or []
    strange = sorted(set(types) - {"full_attention", "sliding_attention"})
    if strange or (types and len(types) != num_layers):
        raise UserError(
            f"config.json lists layer_types {strange or len(types)} for {num_layers} layers: "
            "only full_attention and sliding_attention, one a layer, are implemented"
        )
    if not family.slides or not raw.get("use_sliding_window") or window is None:
        if "sliding_attention" in types:
            raise UserError("config.json has sliding layers but no use_sliding_window: correct it")
        return None, ()
    first = raw.get("max_window_layers", 28)
    slides = [t == "sliding_attention" for t in types] or [i >= first for i in range(num_layers)]
    layers = tuple(i for i, s in enumerate(slides) if s)
    return (int(window), layers) if layers else (None, ())


def to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """A `config.json` that Transformers 4 and 5 read; `UserError` where no family fits."""
    kind = _kind(config)
    family = FAMILIES[kind]
    raw = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(config, ours) for theirs, ours in REQUIRED.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if family.slides:
        raw |= _sliding_to_hf(config)
    return raw


def _kind(config: DecoderConfig) -> str:
    for kind, family in FAMILIES.items():
        same = (family.qkv_bias, family.qk_norm) == (config.qkv_bias, config.qk_norm)
        if same and (family.slides or not config.sliding_layers):
            return kind
    raise UserError(
        f"no family in Transformers has qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm} and "
        f"{len(config.sliding_layers)} sliding layers: it can be trained but not exported"
    )


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = {theirs: getattr(scaling, ours) for theirs, ours in ROPE_FIELDS[scaling.kind].items()}
    raw = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        raw["original_max_position_embeddings"] = scaling.original_max_positions
    return raw | {name: value for name, value in fields.items() if value is not None}


def _sliding_to_hf(config: DecoderConfig) -> dict[str, Any]:
    if not config.sliding_layers:
        return {"use_sliding_window": False, "sliding_window": None}
    kinds = ("full_attention", "sliding_attention")
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": min(config.sliding_layers),
        "layer_types": [kinds[i in config.sliding_layers] for i in range(config.num_layers)],
    }
