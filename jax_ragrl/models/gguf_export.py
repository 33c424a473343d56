"""Writes an exported folder as one GGUF file, for llama.cpp and programs on it such as Ollama.

The inverse of `gguf_file.py`, which reads the file back. Matrices keep the dtype of the
folder; vectors become float32, as llama.cpp needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import read_object
from jax_ragrl.models import gguf_file, gguf_tokenizer, hf, hf_config, safetensors_io
from jax_ragrl.models.rope import RopeScaling, frequencies
from jax_ragrl.models.safetensors_io import Entry
from jax_ragrl.text.tokenizer import ChatTokenizer

FILE = "model.gguf"
# GGUF's name of a dtype, and its number for a file most of whose tensors have it.
TYPES = {"float32": ("F32", 0), "float16": ("F16", 1), "bfloat16": ("BF16", 32)}
# Text that rules of splitting divide differently. It is in NFC: llama.cpp composes no Unicode.
PROBE = "It's WE'LL, camelCase 12345 a1  x=3.14;\n\n \t{ naïve हिन 你好!\r\n end "


def write_gguf(folder: Path) -> Path:
    """Writes `model.gguf` into an exported folder, reads it back and returns its path.

    Raises:
      UserError: GGUF has no name for the tokenizer or the positions of this model, or the file
        reads back with other values.
    """
    raw = hf.read_config(folder)
    config = hf_config.from_hf(raw)
    files = safetensors_io.locate(folder)
    scaling = config.rope_scaling
    # Of Llama 3's numbers, a file is read back with the usual ones only.
    if config.sliding_layers or (scaling and scaling != RopeScaling("llama3", scaling.factor)):
        raise _unsupported("its sliding layers, or the scaling of its positions,")

    def stored(name: str) -> np.ndarray:
        return safetensors_io.read(files[name], name, (slice(None),))

    def entry_of(stored_name: str, name: str, layer: int | None, layout: hf.Layout) -> Entry:
        def fetch() -> np.ndarray:
            value = stored(stored_name)
            # llama.cpp reorders these rows for Llama, but not for Qwen.
            if raw["model_type"] == "llama" and name in ("q_proj", "k_proj"):
                return gguf_file.join_halves(value, config.head_dim)
            return value

        shape = layout.stored_shape
        dtype = raw["torch_dtype"] if len(shape) > 1 else "float32"
        return Entry(gguf_file.gguf_name(name, layer), shape, dtype, fetch)

    rows = [*hf.stored_tensors(config)]
    entries = [entry_of(*row) for row in rows]
    if config.rope_scaling is not None:
        plain, _ = frequencies(config.head_dim, config.rope_theta, None)
        factors = plain / frequencies(config.head_dim, config.rope_theta, config.rope_scaling)[0]
        entries.append(Entry(gguf_file.ROPE_FACTORS, factors.shape, "float32", lambda: factors))
    partial = folder / f"{FILE}.partial"
    _write(partial, raw["model_type"], _fields(folder, raw), entries)
    copy = gguf_file.GGUF(partial)
    if copy.decoder_config != config or not all(
        np.array_equal(copy.value(name, layer), np.asarray(stored(stored_name), np.float32))
        for stored_name, name, layer, _ in rows
    ):
        raise UserError(
            f"{FILE} reads back with other values than the weights: the disk may be full or "
            "failing; delete the folder and export again"
        )
    return partial.rename(folder / FILE)


def _write(path: Path, kind: str, fields: dict[str, Any], entries: Sequence[Entry]) -> None:
    """Writes a file tensor by tensor; `kind` is the architecture."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, kind)
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in fields.items():
        adders[type(value)](name, value)
    for entry in entries:
        # The writer only asks whether the dtype is that of bytes.
        of_type = {"raw_dtype": GGMLQuantizationType[TYPES[entry.dtype][0]]}
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, **of_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        value = np.ascontiguousarray(entry.fetch(), dtype=np.dtype(entry.dtype))
        writer.write_tensor_data(value.view(np.uint8))
    writer.close()


def _fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The metadata, by name; the architecture is written by the writer itself."""
    config = hf_config.from_hf(raw)
    model = {theirs: raw[ours] for ours, theirs in gguf_file.REQUIRED.items()} | {
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
    }
    return {
        "general.name": folder.name,
        "general.file_type": TYPES[raw["torch_dtype"]][1],
        **{f"{raw['model_type']}.{name}": value for name, value in model.items()},
        **{f"tokenizer.ggml.{name}": value for name, value in _tokenizer(folder, raw).items()},
        "tokenizer.chat_template": ChatTokenizer.load(folder).template,
    }


def _tokenizer(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of byte-level BPE, with which `gguf_tokenizer` builds the same tokenizer again."""
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    original.no_truncation()  # the file may keep the lengths that training cut and padded texts to
    original.no_padding()
    model = read_object(folder / "tokenizer.json", "copy it again")["model"]
    added = original.get_added_tokens_decoder()
    # Rows of the embedding without a token are padding.
    tokens = [f"[PAD{n}]" for n in range(raw["vocab_size"])]
    types = [gguf_tokenizer.UNUSED] * len(tokens)
    for text, number in original.get_vocab().items():
        tokens[number], types[number] = text, gguf_tokenizer.NORMAL
    for number, token in added.items():
        types[number] = gguf_tokenizer.CONTROL if token.special else gguf_tokenizer.USER_DEFINED
    ends = raw["eos_token_id"] if isinstance(raw["eos_token_id"], list) else [raw["eos_token_id"]]
    named = {"bos_token_id": raw.get("bos_token_id"), "padding_token_id": raw.get("pad_token_id")}
    if len(ends) > len(gguf_file.ENDS):
        raise _unsupported(f"a turn that ends with any of {len(ends)} tokens")
    named |= dict(zip(gguf_file.ENDS, ends, strict=False))
    fields = {
        "model": gguf_tokenizer.BYTE_LEVEL,
        "tokens": tokens,
        "token_type": types,
        # Older files have each merge as one text.
        "merges": [x if isinstance(x, str) else " ".join(x) for x in model.get("merges", ())],
        "add_bos_token": original.encode("").ids[:1] == [named["bos_token_id"]],
        **{name: number for name, number in named.items() if number is not None},
    }
    for rule in gguf_tokenizer.SPLITS if model["type"] == "BPE" else ():
        again = gguf_tokenizer.build_tokenizer(fields | {"pre": rule})
        if _behavior(again) == _behavior(original):
            return fields | {"pre": rule}
    raise _unsupported("its tokenizer")


def _behavior(tokenizer: Tokenizer) -> tuple[object, ...]:
    pieces = tokenizer.pre_tokenizer and tokenizer.pre_tokenizer.pre_tokenize_str(PROBE)
    texts = [text for text, _ in pieces or ()]
    # Added tokens that take spaces with them, or are found between spaces only.
    added = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values())
    ids = tokenizer.encode(PROBE + "".join(f"a{text}a {text} \n" for text in added)).ids
    return texts, ids, getattr(tokenizer.model, "ignore_merges", None)


def _unsupported(what: str) -> UserError:
    return UserError(
        f"the export is complete but for {FILE}: {what} cannot be written as GGUF here; convert "
        "the folder with llama.cpp's convert_hf_to_gguf.py"
    )
