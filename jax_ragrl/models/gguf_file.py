"""GGUF files: read for their config, and converted once to a Hugging Face folder in a cache.

Each tensor keeps its exact values: float16 and bfloat16 tensors keep their dtype, and a quantized
tensor becomes float32, because bfloat16 would round it to 8 bits. The folder is written under
another name and renamed, so that it is complete whenever it exists.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.models import gguf_tokenizer, hf, hf_config, safetensors_io
from jax_ragrl.models.rope import RopeScaling, frequencies
from jax_ragrl.runtime.caches import VARIABLE, cache_folder, draft_folder
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.progress import Task, progress

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSION = 2  # of the conversion: another one makes another folder
SHARD_BYTES = 5_000_000_000
ARRAY = 9  # the type of an array in the metadata
MAX_READS = 1 << 23  # values in the header; a vocabulary of 262,000 tokens takes 2 million
SAMPLE = 1 << 20  # bytes at either end of a file that its key depends on

DTYPES = {"F16": "float16", "BF16": "bfloat16"}  # any other becomes float32
TYPES = (
    *DTYPES,
    *("F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
TOP_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # what rotary frequencies are divided by, in Llama 3.1 and later
REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
TOKEN_IDS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # llama.cpp ends a turn at any of them
ROPE_SCALING = "rope.scaling."


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and not path.is_dir()


def convert(path: Path) -> Path:
    """The Hugging Face folder of a GGUF file, converted on the first call.

    Raises:
      UserError: the package `gguf` is missing, the file is not whole, its architecture,
        quantization or tokenizer is not supported, or the disk is full.
    """
    folder = cache_folder() / "gguf" / _key(path)
    if folder.is_dir():
        return folder
    file = GGUF(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with draft_folder(folder.parent, "partial-") as draft:
            whole = draft / folder.name  # the mode of a draft is for its owner alone
            whole.mkdir()
            file.write(whole)
            try:
                whole.rename(folder)
            except OSError:
                # A folder with files in it is not replaced: another process has finished first.
                if not folder.is_dir():
                    raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"no space left to convert {path} in {folder.parent}: free some, or set {VARIABLE} to "
            "another folder"
        ) from error
    return folder


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a `config.json` for the model in a GGUF file; no weights are read."""
    return GGUF(path).config


def _key(path: Path) -> str:
    """A folder's name for a file, by its size, time of change and both ends.

    The header holds every setting, and training changes the last tensor too. To read 30 GB at each
    start would take a minute.
    """
    status = path.stat()
    digest = hashlib.sha256(f"{VERSION} {status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE))
        file.seek(max(0, status.st_size - SAMPLE))
        digest.update(file.read())
    return f"{path.stem}-{digest.hexdigest()[:16]}"


class GGUF:
    """A GGUF file of a supported decoder."""

    def __init__(self, path: Path):
        """Reads the header; raises `UserError` if something in it is not supported."""
        reader = _open(path)
        self.path = path
        self.fields = _Fields(path, reader.fields)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._config()
        self.decoder_config = hf_config.from_hf(self.config)
        self._check_tensors()

    def write(self, folder: Path) -> None:
        names = hf.stored_tensors(self.decoder_config)
        with progress(f"convert {self.path.name}", "tensor", len(self.tensors)) as bar:
            entries = [self._entry(*row, bar=bar) for row in names]
            safetensors_io.write_shards(folder, entries, SHARD_BYTES)
        write_json(folder / "config.json", self.config)
        ids = {name: self.config[name] for name in hf.SPECIAL_IDS if name in self.config}
        write_json(folder / "generation_config.json", ids)
        tokens = self.fields.below("tokenizer.ggml.")
        gguf_tokenizer.build_tokenizer(tokens).save(str(folder / "tokenizer.json"))
        template = self.fields.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise UserError(f"{self.path} has a chat template that is no text: download it again")
        length = self.config["max_position_embeddings"]
        settings = gguf_tokenizer.tokenizer_config(tokens, template, length)
        write_json(folder / "tokenizer_config.json", settings)

    def _entry(
        self, stored: str, name: str, layer: int | None, layout: hf.Layout, bar: Task
    ) -> safetensors_io.Entry:
        tensor = self.tensors[gguf_name(name, layer)]

        def fetch() -> np.ndarray:
            bar.update(1)
            return self.value(name, layer).reshape(layout.stored_shape)

        dtype = DTYPES.get(tensor.tensor_type.name, "float32")
        return safetensors_io.Entry(stored, layout.stored_shape, dtype, fetch)

    def value(self, name: str, layer: int | None) -> np.ndarray:
        """A tensor's values, rows in Transformers' order."""
        from gguf import dequantize

        tensor = self.tensors[gguf_name(name, layer)]
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type))
        # llama.cpp reorders these rows for Llama, but not for Qwen.
        if self.fields.get("general.architecture") == "llama" and name in ("q_proj", "k_proj"):
            return split_halves(value, self.decoder_config.head_dim)
        return value

    def _config(self) -> dict[str, Any]:
        kind = self._family()
        values = self.fields.below(f"{kind}.")
        heads = self._number(values, "attention.head_count")
        sizes = {ours: self._number(values, theirs) for ours, theirs in REQUIRED.items()}
        default = sizes["hidden_size"] // heads
        head_dim = self._number(values, "attention.key_length", default)
        if values.get("attention.causal", True) is not True:
            raise UserError(f"{self.path} attends to later tokens too: this is not implemented")
        if values.get("rope.dimension_count", head_dim) != head_dim:
            raise UserError(f"{self.path} rotates only part of each head: this is not implemented")
        theta = self._float(values, "rope.freq_base", 10000.0)
        tokens = self.fields.below("tokenizer.ggml.")
        named = [self._number(tokens, name, least=0) for name in ENDS if name in tokens]
        ends = [*dict.fromkeys(named)]
        return {
            "architectures": [hf_config.FAMILIES[kind].architecture],
            "model_type": kind,
            **sizes,
            "num_key_value_heads": self._number(values, "attention.head_count_kv", heads),
            "head_dim": head_dim,
            # The outermost axis; 0 if there is none.
            "vocab_size": int(next(reversed(self._tensor(TOP_NAMES["embed"]).shape), 0)),
            "rms_norm_eps": self._float(values, "attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(values, head_dim, theta),
            "tie_word_embeddings": TOP_NAMES["lm_head"] not in self.tensors,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            **{
                ours: self._number(tokens, theirs, least=0)
                for ours, theirs in TOKEN_IDS.items()
                if theirs in tokens
            },
            **({"eos_token_id": ends if ends[1:] else ends[0]} if ends else {}),
        }

    def _family(self) -> str:
        kind = str(self.fields.get("general.architecture"))
        if kind not in hf_config.FAMILIES:
            raise UserError(
                f"{self.path} has the architecture {kind!r}, which is not supported: use one of "
                f"{', '.join(hf_config.FAMILIES)}"
            )
        if self.fields.get(f"{kind}.expert_count"):
            raise UserError(f"{self.path} is a mixture of experts, which is not implemented")
        if self._number(self.fields.below("split."), "count", 1) > 1:
            raise UserError(
                f"{self.path} is one part of several: merge them with llama.cpp's "
                "'llama-gguf-split --merge' and give the result"
            )
        return kind

    def _number(
        self, values: Mapping[str, Any], name: str, default: int | None = None, least: int = 1
    ) -> int:
        value = values.get(name, default)
        if type(value) is not int or value < least:
            raise UserError(
                f"{self.path} gives {name} as {value!r}, but one integer from {least} for all "
                "layers is implemented: use another model"
            )
        return value

    def _float(self, values: Mapping[str, Any], name: str, default: float | None = None) -> float:
        value = values.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UserError(
                f"{self.path} gives {name} as {value!r}, but it has to be a number above 0: "
                "download it again"
            )
        # Stored as float32: 1e-5 reads as 9.999999747378752e-06.
        return float(f"{value:.6g}")

    def _tensor(self, name: str) -> Any:
        if name not in self.tensors:
            raise UserError(f"{self.path} lacks the tensor {name}: download it again")
        return self.tensors[name]

    def _rope_scaling(
        self, values: Mapping[str, Any], head_dim: int, theta: float
    ) -> dict[str, Any] | None:
        if ROPE_FACTORS in self.tensors:
            factors = np.asarray(self.tensors[ROPE_FACTORS].data, np.float64)
            return llama3_scaling(factors, head_dim, theta)
        names = [name for name in values if name.startswith(ROPE_SCALING)]
        scaling = {name.removeprefix(ROPE_SCALING): values[name] for name in names}
        if "rope.scale_linear" in values:  # the factor's name of 2023
            scaling.setdefault("factor", values["rope.scale_linear"])
        # As in llama.cpp, a factor alone is linear.
        kind = scaling.pop("type", "linear" if "factor" in scaling else "none")
        scaling.pop("finetuned", None)
        if kind == "none":
            return None
        original = scaling.pop("original_context_length", None)
        # Names that hf_config does not know stay, and are refused there.
        return {"rope_type": kind, "original_max_position_embeddings": original} | scaling

    def _check_tensors(self) -> None:
        """Raises `UserError` unless every tensor is expected, and of its shape and a known type."""
        known_names = {ROPE_FACTORS}
        for _, name, layer, layout in hf.stored_tensors(self.decoder_config):
            tensor = self._tensor(gguf_name(name, layer))
            known_names.add(tensor.name)
            # A GGUF file lists the innermost axis first.
            shape = tuple(int(n) for n in reversed(tensor.shape))
            if shape != layout.stored_shape:
                raise UserError(
                    f"{self.path} has {tensor.name} of shape {list(shape)}, but its metadata asks "
                    f"for {list(layout.stored_shape)}: download it again"
                )
            if tensor.tensor_type.name not in TYPES:
                raise UserError(
                    f"{self.path} has {tensor.name} in {tensor.tensor_type.name}, but only "
                    f"{', '.join(TYPES)} are supported: use another quantization"
                )
        if extra := sorted(set(self.tensors) - known_names):
            raise UserError(
                f"{self.path} has {extra[0]} and {len(extra) - 1} more tensors that a model of "
                f"type {self.config['model_type']} has no place for: use another model"
            )


class _Fields:
    """Metadata by name; a value is decoded when it is read."""

    def __init__(self, path: Path, fields: Mapping[str, Any]):
        self._path = path
        self._fields = fields
        self._read = functools.cache(self._contents)

    def _contents(self, name: str) -> Any:
        try:
            return self._fields[name].contents()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._path} has {name} in another encoding than UTF-8: download it again"
            ) from error

    def get(self, name: str, default: Any = None) -> Any:
        return self._read(name) if name in self._fields else default

    def below(self, prefix: str) -> dict[str, Any]:
        """All values whose names begin with `prefix`, by the rest of the name."""
        names = [name for name in self._fields if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._read(name) for name in names}


def check_package(purpose: str) -> None:
    """Raises `UserError`, which begins with `purpose`, unless the package `gguf` is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{purpose} needs the package gguf: 'pip install \"jax_ragrl[gguf]\"', or "
            "'pip install gguf'"
        )


def _open(path: Path) -> Any:
    """The reader of the package `gguf` on a whole file."""
    check_package(f"reading {path}")
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{path} is not a GGUF file: download it again")

    class Reader(GGUFReader):
        """Raises where `GGUFReader` takes bytes behind the end of the file for empty values."""

        reads = 0

        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> np.ndarray:
            self.reads += 1
            if self.reads > MAX_READS:
                raise ValueError("its metadata are too large")
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too early")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            # Each level of arrays of arrays would copy all that is in it.
            if raw_type == ARRAY and self._get(orig_offs, np.uint32)[0] == ARRAY:
                raise ValueError("it has an array of arrays")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        # Numbers that overflow give offsets behind the end of the file.
        with np.errstate(all="ignore"):
            return Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{path} is not a whole GGUF file ({error}): download it again") from error


def gguf_name(name: str, layer: int | None) -> str:
    """The name in a GGUF file of a parameter of a layer, or of the model if `layer` is None."""
    return TOP_NAMES[name] if layer is None else f"blk.{layer}.{LAYER_NAMES[name]}"


def split_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Query or key rows of a Llama file in Transformers' order, `[heads * head_dim, inputs]`.

    The file rotates neighbouring pairs of rows (0, 1), (2, 3), ...; Transformers, and this package,
    rotate row i with row i + head_dim / 2.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def join_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Query or key rows in the order of a Llama file: the inverse of `split_halves`."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama3_scaling(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
    """The `rope_scaling` of Llama 3.1 and later whose frequencies are divided by `factors`.

    The file holds the result, float32 `[head_dim / 2]`, and not the four numbers it comes from. All
    published models share three of them; the fourth is the largest of the factors. `UserError` if
    these numbers do not give the factors of the file.
    """
    scaling = RopeScaling("llama3", factor=float(factors.max(initial=1.0)))
    plain, _ = frequencies(head_dim, theta, None)
    llama3, _ = frequencies(head_dim, theta, scaling)
    if factors.shape != plain.shape or not np.allclose(plain / llama3, factors, rtol=1e-3):
        raise UserError(
            f"{ROPE_FACTORS} of this GGUF file is not the scaling of Llama 3.1 or later: give the "
            "original folder"
        )
    return hf_config.scaling_to_hf(scaling) or {}
