"""Model folders for tests: the shipped tiny model with a changed tokenizer, template or config."""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jax_ragrl.models.by_name import resolve_model
from jax_ragrl.models.config import TINY

# The tags of Search-R1, as tokens of their own.
TAGS = ("<search>", "</search>", "<answer>", "</answer>")


def change_json(file: pathlib.Path, **fields: Any) -> None:
    """Updates the fields of a JSON file, which may not exist."""
    value = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(value | fields))


def model_folder(folder: pathlib.Path, **files: dict[str, Any] | str) -> pathlib.Path:
    """Copies the tiny model, and changes some of its files.

    Args:
      folder: the copy, which does not exist.
      files: by name without suffix: `template` is a new chat template, and for any other name a
        dictionary updates the fields of `NAME.json`, in which None removes a field.
    """
    shutil.copytree(resolve_model(TINY), folder)
    for name, change in files.items():
        if isinstance(change, str):
            (folder / "chat_template.jinja").write_text(change)
            continue
        file = folder / f"{name}.json"
        raw = json.loads(file.read_text()) | change
        file.write_text(json.dumps({key: x for key, x in raw.items() if x is not None}))
    return folder


def sentence_pieces(merged: list[str], letters: str) -> dict[str, Any]:
    """A GGUF file's fields of a SentencePiece tokenizer: bytes, merges in order, characters."""
    own = [*merged, *sorted(set(letters))]
    return {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *own],
        "scores": [0.0] * 259 + [-float(n) for n in range(len(own))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(own),
        **{"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    }


def base_model(folder: pathlib.Path) -> pathlib.Path:
    """A base model like Qwen2.5's: turns end with `<|im_end|>`, but `eos` is `<|endoftext|>`."""
    eos = {"eos_token_id": 0}
    tokenizer = {"eos_token": "<|endoftext|>"}
    return model_folder(folder, tokenizer_config=tokenizer, config=eos, generation_config=eos)


def with_rows(folder: pathlib.Path, rows: int) -> pathlib.Path:
    """Extends the embeddings of a tiny model to a number of rows; new rows copy that of id 2."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    embed = weights["model.embed_tokens.weight"]
    more = np.tile(embed[2:3], (rows - len(embed), 1))
    save_file(weights | {"model.embed_tokens.weight": np.concatenate([embed, more])}, file)
    change_json(folder / "config.json", vocab_size=rows)
    return folder


def with_tokens(folder: pathlib.Path, *texts: str, special: bool = False) -> pathlib.Path:
    """Appends tokens to the tokenizer of a model; the embeddings keep their 1,024 rows."""
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    raw["added_tokens"] += [
        {"id": 1024 + n, "content": text, "special": special, **flags}
        for n, text in enumerate(texts)
    ]
    file.write_text(json.dumps(raw))
    return folder
