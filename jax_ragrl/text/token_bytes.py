"""The bytes that each token of a Hugging Face tokenizer adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import tokenizers

from jax_ragrl.errors import UserError

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # stands for a space in SentencePiece


def token_bytes(
    tokenizer: tokenizers.Tokenizer, size: int, control_ids: Collection[int]
) -> list[bytes | None]:
    """Returns the bytes of each of `size` tokens; None for control tokens and ids without a token.

    The tokenizer is byte-level BPE (GPT-2, Llama 3, Qwen) or SentencePiece (Llama 2, Gemma).

    Raises:
      UserError: the tokenizer is of another kind, such as WordPiece.
    """
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        spell = _byte_level
    elif _SPACE in json.dumps(decoder, ensure_ascii=False):
        spell = _sentencepiece
    else:
        raise UserError(
            f"a strict grammar needs the bytes of each token, but the tokenizer's decoder is "
            f"{'+'.join(kinds) or 'missing'}: use a byte-level or SentencePiece tokenizer, or set "
            "grammar to 'loose'"
        )
    pieces: list[bytes | None] = [None] * size
    added = tokenizer.get_added_tokens_decoder()
    for text, i in tokenizer.get_vocab(with_added_tokens=True).items():
        if i < size and i not in added:
            pieces[i] = spell(text)
    for i, token in added.items():
        if i < size and i not in control_ids:
            pieces[i] = token.content.encode()  # written as it is, in every kind of tokenizer
    return pieces


def _kinds(decoder: Any) -> list[str]:
    if not decoder:
        return []
    return [decoder["type"], *(kind for d in decoder.get("decoders", ()) for kind in _kinds(d))]


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable character per byte (`bytes_to_unicode` in its code)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_LETTERS = _byte_letters()


def _byte_level(text: str) -> bytes | None:
    # A token outside of the alphabet has no bytes that a text could contain.
    letters = [_LETTERS.get(letter, -1) for letter in text]
    return None if -1 in letters else bytes(letters)


def _sentencepiece(text: str) -> bytes:
    if match := _BYTE.fullmatch(text):
        return bytes.fromhex(match[1])
    return text.replace(_SPACE, " ").encode()
