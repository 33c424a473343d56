"""Random decoders of two layers as GGUF files, for tests."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

from jax_ragrl.models import gguf_file, hf, hf_config

Type = gguf.GGMLQuantizationType
# SmolLM2 135M but for depth, vocabulary and MLP: nine heads over three key-value heads.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_weights(raw: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by their names in a Hugging Face checkpoint; every one matters."""
    rng = np.random.default_rng(seed)
    weights = {}
    for stored, name, _, layout in hf.stored_tensors(hf_config.from_hf(raw)):
        noise = rng.standard_normal(layout.stored_shape, np.float32)
        scale = layout.stored_shape[-1] ** -0.5
        weights[stored] = 1 + 0.3 * noise if "norm" in name else 1.5 * scale * noise
    return weights


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: control tokens, bytes, merged pairs, one of the user's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "i n", "Ġ Ġ", "1 2"]
    tokens = [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in merges), "<tool>"]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 1) + [4]
    unused = size - len(tokens)
    return tokens + [f"[PAD{n}]" for n in range(unused)], types + [5] * unused, merges


def to_file_order(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Query or key rows of a Llama model with the two halves of each head interleaved."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def random_q6_k(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Blocks of 256 values in 210 bytes: low bits, high bits, scales, and a scale of the scales."""
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 210), np.uint8)
    blocks[..., 208:] = np.frombuffer(np.float16(3e-5).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def quantized(value: np.ndarray, kind: Type, rng: np.random.Generator) -> tuple[np.ndarray, Type]:
    """Bytes and type of a matrix; a row that does not fit whole blocks becomes Q8_0."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if value.shape[-1] % block:
        kind = Type.Q8_0
    if kind == Type.Q6_K:
        return random_q6_k(value.shape, rng), kind
    return gguf.quantize(value, kind), kind


def write_gguf(
    path: Path,
    kind: Type = Type.F32,
    raw: dict[str, Any] = CONFIG,
    *,
    weights: dict[str, np.ndarray] | None = None,
    pre: str = "smollm",
    extra: dict[str, np.ndarray] | None = None,
    fields: dict[str, Any] | None = None,
    pieces: dict[str, Any] | None = None,
) -> Path:
    """Writes a model as llama.cpp's converter does; `fields` replace those of the header, None
    leaves one out, `extra` are more tensors, `pieces` are the fields of a SentencePiece tokenizer.
    """
    writer, rng = gguf.GGUFWriter(path, raw["model_type"]), np.random.default_rng(1)
    _write_header(writer, raw, pre, pieces)
    for name, value in (fields or {}).items():
        writer.kv_data[-1].pop(name, None)
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    weights = weights if weights is not None else random_weights(raw)
    for stored, name, layer, _ in hf.stored_tensors(hf_config.from_hf(raw)):
        value, target = weights[stored], gguf_file.gguf_name(name, layer)
        if raw["model_type"] == "llama" and name in ("q_proj", "k_proj"):
            value = to_file_order(value, raw["head_dim"])
        if value.ndim == 1:
            writer.add_tensor(target, value)
        else:
            data, actual = quantized(value, kind, rng)
            writer.add_tensor(target, data, raw_dtype=actual)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_header(writer, raw, pre, pieces) -> None:
    writer.add_name("random")
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    if pieces:
        writer.add_token_list(pieces["tokens"])
        writer.add_token_types(pieces["token_type"])
        writer.add_token_scores(pieces["scores"])
    else:
        tokens, types, merges = vocabulary(raw["vocab_size"])
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
