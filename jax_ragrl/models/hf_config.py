"""`config.json` to `DecoderConfig` and back, for the families `qwen2`, `qwen3` and `llama`.

A field is read, known to leave the forward pass as it is, or refused if it changes the arithmetic
in a way that is not implemented. A field that is none of these is ignored with a warning: published
checkpoints carry many notes of the tools that wrote them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
    """Properties of a family; `head_dim` is its default, 0 meaning width / heads."""

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

MAX_LAYERS, MAX_SIZE = 10_000, 1 << 24  # more is a damaged file, and would be built for hours

# Read by name below.
READ = set(REQUIRED) | set(
    "model_type num_key_value_heads head_dim max_position_embeddings "
    "original_max_position_embeddings rms_norm_eps rope_parameters rope_scaling rope_theta "
    "tie_word_embeddings use_sliding_window sliding_window max_window_layers layer_types".split()
)

# Values that are implemented, the first being the usual one; any other changes the arithmetic.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "auto_map": (None, {}),  # code of the checkpoint's own
    "hidden_act": ("silu", None),
    "pruned_heads": ({}, None),
    **dict.fromkeys(("causal_attn", "is_causal"), (True, None)),
    **dict.fromkeys(("cross_attention_layers", "no_rope_layers"), (None, [])),
    **dict.fromkeys(
        "attention_bias add_cross_attention is_encoder_decoder mlp_bias qk_layernorm "
        "qk_layer_norms rope_interleaved use_mrope use_qk_norm".split(),
        (False, None),
    ),
    **dict.fromkeys(
        "attention_multiplier attn_logit_softcapping clip_qkv final_logit_softcapping "
        "moe_intermediate_size query_pre_attn_scalar rope_local_base_freq".split(),
        (None,),
    ),
    **dict.fromkeys(
        "embedding_multiplier logit_scale logits_scaling partial_rotary_factor pretraining_tp "
        "residual_multiplier".split(),
        (1, None),
    ),
    **dict.fromkeys(
        "n_routed_experts no_rope_layer_interval num_experts num_local_experts".split(),
        (None, 0),
    ),
}

# How a model was trained, saved, generated from or printed; none touches the forward pass.
HARMLESS = set(
    "_attn_implementation _attn_implementation_autoset _commit_hash _model_name_or_path "
    "_name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label "
    "initializer_range is_llama_config label2id neftune_noise_alpha output_attentions "
    "output_hidden_states pad_token_id problem_type return_dict tokenizer_class torch_dtype "
    "transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version "
    "use_cache".split()
)

# Settings of text generation, which older versions of Transformers saved with the rest.
HARMLESS |= set(
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size is_decoder "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams "
    "num_return_sequences output_scores remove_invalid_values repetition_penalty "
    "return_dict_in_generate temperature tf_legacy_loss tie_encoder_decoder top_k top_p "
    "torchscript typical_p use_bfloat16".split()
)

# Models that are often asked for and are not implemented, by model_type.
OTHER_MODELS = {
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma3_text": "Gemma 3",
    "gpt_oss": "gpt-oss",
    "granite": "Granite",
    "llama4": "Llama 4",
    "llama4_text": "Llama 4",
    "mistral": "Mistral",
    "mistral3": "Mistral 3",
    "mixtral": "Mixtral",
    "mllama": "Llama 3.2 Vision",
    "olmo2": "OLMo 2",
    "phi3": "Phi-3",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_moe": "Qwen2-MoE",
    "qwen2_vl": "Qwen2-VL",
    "qwen3_5": "Qwen3.5",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_vl": "Qwen3-VL",
    "smollm3": "SmolLM3",
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
_ROPE_COMMON = set(
    "rope_type type rope_theta factor original_max_position_embeddings "
    "partial_rotary_factor".split()
)


def from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a parsed `config.json`; `UserError` names the field that is not supported."""
    try:
        return _from_hf(raw)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"config.json holds a value of another type ({error}): copy the original file"
        ) from error


def _from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    family = _family(raw)
    _check_fields(raw)
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
        name = f"of {OTHER_MODELS[kind]} (" if kind in OTHER_MODELS else "("
        raise UserError(
            f"config.json is {name}model_type {kind!r}), which is not supported: use a model of "
            f"type {', '.join(FAMILIES)} (Qwen2, Qwen2.5, Qwen3, Llama 3, SmolLM2)"
        )
    return FAMILIES[kind]


def _check_fields(raw: Mapping[str, Any]) -> None:
    """Raises `UserError` for a field that is not implemented; warns of those that are unknown."""
    optional = [name for name in ("num_key_value_heads", "head_dim") if raw.get(name) is not None]
    for name in (*REQUIRED, *optional):
        value, largest = raw.get(name), MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if type(value) is not int or not 0 < value <= largest:
            raise UserError(
                f"config.json gives {name} as {value!r}: it must be an integer from 1 to {largest}"
            )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise UserError(
            f"config.json has a quantization_config (method {method}): its weights are quantized, "
            "which is not implemented; use the same model in bfloat16, or as a .gguf file"
        )
    for name, values in ONLY.items():
        if name in raw and raw[name] not in values:
            raise UserError(
                f"config.json sets {name} = {raw[name]!r}, but only {values[0]!r} is implemented: "
                "use another checkpoint"
            )
    known_fields = READ | HARMLESS | set(ONLY) | {"quantization_config"}
    unknown = sorted(
        name for name, value in raw.items() if name not in known_fields and value is not None
    )
    if unknown:
        warnings.warn(
            f"config.json sets {', '.join(unknown)}, unknown here and ignored: if the forward pass "
            "depends on it, use another checkpoint",
            stacklevel=2,
        )


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    given = [raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    if given[1:] not in ([], given[:1]):
        raise UserError(
            "config.json has rope_parameters and another rope_scaling, of which Transformers reads "
            "the latter alone: move its fields into rope_parameters and remove rope_scaling"
        )
    rope = dict(given[0] if given else {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(
            f"config.json has rope_parameters per kind of layer ({', '.join(rope)}), which is not "
            "implemented: use another checkpoint"
        )
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
    names = ROPE_FIELDS[kind]
    values = {name: value for name, value in rope.items() if value is not None}
    unknown = sorted(set(values) - set(names) - _ROPE_COMMON)
    if unknown or "factor" not in values:
        reason = f"has {unknown[0]!r}, which is not implemented" if unknown else "has no factor"
        raise UserError(f"{kind} rope scaling in config.json {reason}: use another checkpoint")
    original = (
        raw.get("original_max_position_embeddings")
        or values.get("original_max_position_embeddings")
        or raw.get("max_position_embeddings", 8192)
    )
    return RopeScaling(
        kind,
        factor=float(values["factor"]),
        original_max_positions=int(original),
        **{ours: values[theirs] for theirs, ours in names.items() if theirs in values},
    )


def _sliding(raw: Mapping[str, Any], family: Family) -> tuple[int | None, tuple[int, ...]]:
    """Transformers' rule: layers from `max_window_layers` on, unless `layer_types` lists them."""
    num_layers, window = raw["num_hidden_layers"], raw.get("sliding_window", 4096)
    types = raw.get("layer_types") or []
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other or (types and len(types) != num_layers):
        raise UserError(
            f"config.json lists layer_types {other or len(types)} for {num_layers} layers: "
            "only full_attention and sliding_attention, one per layer, are implemented"
        )
    # Qwen2.5 publishes a window that is switched off.
    if not family.slides or not raw.get("use_sliding_window") or window is None:
        if "sliding_attention" in types:
            raise UserError("config.json has sliding layers but no use_sliding_window: correct it")
        return None, ()
    first = raw.get("max_window_layers", 28)
    slides = [t == "sliding_attention" for t in types] or [i >= first for i in range(num_layers)]
    layers = tuple(i for i, s in enumerate(slides) if s)
    return (int(window), layers) if layers else (None, ())


def to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """A `config.json` that Transformers 4 and 5 read; `UserError` if no family fits."""
    kind = _kind(config)
    family = FAMILIES[kind]
    # Version 5 of Transformers still reads these fields of version 4, such as `rope_theta`.
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
        "rope_scaling": scaling_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.sliding_layers:
        kinds = ("full_attention", "sliding_attention")
        return raw | {
            "use_sliding_window": True,
            "sliding_window": config.sliding_window,
            "max_window_layers": min(config.sliding_layers),
            "layer_types": [kinds[i in config.sliding_layers] for i in range(config.num_layers)],
        }
    return raw | ({"use_sliding_window": False, "sliding_window": None} if family.slides else {})


def _kind(config: DecoderConfig) -> str:
    for kind, family in FAMILIES.items():
        # The config of Llama has no fields for sliding layers.
        same = (family.qkv_bias, family.qk_norm) == (config.qkv_bias, config.qk_norm)
        if same and (family.slides or not config.sliding_layers):
            return kind
    raise UserError(
        f"no family in Transformers has qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm} and "
        f"{len(config.sliding_layers)} sliding layers: it can be trained but not exported"
    )


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The field `rope_scaling` of a `config.json`."""
    if scaling is None:
        return None
    fields = {theirs: getattr(scaling, ours) for theirs, ours in ROPE_FIELDS[scaling.kind].items()}
    raw = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        raw["original_max_position_embeddings"] = scaling.original_max_positions
    return raw | {name: value for name, value in fields.items() if value is not None}
