"""SentencePiece's space before a text: when a tokenizer adds it, and a tokenizer that adds none.

always   before each part of a text between control tokens (the files of Llama 2 and TinyLlama)
first    before a whole text alone (Transformers' `legacy=False`)
never    byte-level tokenizers, and SentencePiece without `add_space_prefix`
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

ALWAYS, NEVER = "always", "never"


def prefix_scheme(tokenizer: tokenizers.Tokenizer) -> str:
    """Returns when a tokenizer adds a space: `always`, `first` or `never`."""
    # Not from the JSON of the whole tokenizer: that of a large vocabulary is slow to parse.
    normalizer, pre_tokenizer = map(_state, (tokenizer.normalizer, tokenizer.pre_tokenizer))
    if any(step["type"] == "Prepend" for step in _steps(normalizer)):
        return ALWAYS
    steps = (step for step in _steps(pre_tokenizer) if step["type"] == "Metaspace")
    return next((str(step["prepend_scheme"]) for step in steps), NEVER)


def without_prefix(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer that adds no space before a text: the same one, or a changed copy."""
    if prefix_scheme(tokenizer) == NEVER:
        return tokenizer
    state = json.loads(tokenizer.to_str())
    steps = [step for step in _steps(state["normalizer"]) if step["type"] != "Prepend"]
    state["normalizer"] = {"type": "Sequence", "normalizers": steps}
    for step in _steps(state["pre_tokenizer"]):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = NEVER
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _state(part: Any) -> dict[str, Any]:
    """The JSON of a normalizer or pre-tokenizer, which pickle uses too; empty for None."""
    return {} if part is None else json.loads(part.__getstate__())


def _steps(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not state:
        return []
    parts = state.get("normalizers", state.get("pretokenizers"))
    return [state] if parts is None else [step for part in parts for step in _steps(part)]
