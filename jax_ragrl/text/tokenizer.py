"""Chat tokenization in which only the template may write control tokens.

Instructions, questions, passages and replies of a language model are *content*: they are encoded
with special tokens disabled, so no passage can close a turn. The chat template's own pieces are
encoded with special tokens enabled. Ids are concatenated, never decoded and encoded again.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
import transformers

from jax_ragrl.errors import UserError
from jax_ragrl.text.stops import stop_table
from jax_ragrl.types import Message

REMEMBERED = 1 << 22  # tokens of contents that are kept encoded: 16 MB, and their texts
# Stands for the content while a template is rendered; a private-use character no template emits.
_HOLE = "\ue000"


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template, read from a local folder."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase):
        if tokenizer.chat_template is None:
            raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no chat template")
        self._hf = tokenizer
        # Two backends and no mode to switch: a rollout encodes in several threads at once.
        self._content, self._template = (_backend(tokenizer, split) for split in (True, False))
        self.stop_ids = _stop_ids(tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else self.stop_ids[0]
        self._render = functools.lru_cache(maxsize=256)(self._render_roles)
        self._known: dict[str, np.ndarray] = {}
        self._allow = functools.cache(self._matching)
        self._stop = functools.cache(lambda stops: stop_table(stops, self._pieces()))

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> ChatTokenizer:
        """The tokenizer in `folder` (Hugging Face layout).

        Nothing is downloaded, and code in the folder is not executed.
        """
        if not (pathlib.Path(folder) / "tokenizer_config.json").exists():
            raise UserError(f"{folder}: no tokenizer_config.json; point at a Hugging Face folder")
        try:
            # Never the code of a folder; None, the default, would ask on stdin whether to run it.
            read = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the reader in Rust raises nothing more special
            why = " ".join(str(error).split())[:200]
            raise UserError(f"{folder}: no readable tokenizer ({why}): copy its files") from error
        return cls(read)

    def __len__(self) -> int:
        return len(self._hf)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the tokenizer's files, chat template included."""
        self._hf.save_pretrained(str(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of content: text that looks like a control token becomes ordinary tokens."""
        known = self._known.get(text)
        return self._encode([text])[0].ids if known is None else known.tolist()

    def foresee(self, texts: Iterable[str]) -> None:
        """Encodes contents that will be asked for, side by side on the cores of the host.

        They are remembered for a while: a context that grows turn by turn shows them again.
        """
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        found = {
            text: np.array(encoding.ids, np.int32)
            for text, encoding in zip(new, self._encode(new), strict=True)
        }
        whole = self._known | found
        kept = whole if sum(map(len, whole.values())) <= REMEMBERED else found
        self._known = kept  # in one step: others may be reading

    def _encode(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding]:
        # Several at once need no lock of Python's, and `fast` leaves out where tokens stood.
        return self._content.encode_batch_fast(list(texts), add_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        return self._hf.get_vocab()

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        return self._content.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the assistant's next turn begins."""
        pieces = self._render(tuple(message.role for message in messages))
        ids = list(pieces[0])
        for message, piece in zip(messages, pieces[1:], strict=True):
            ids += self.encode(message.content) + list(piece)
        return ids

    def allowed(self, pattern: str) -> np.ndarray | None:
        """bool `[V]`: tokens whose text matches `pattern` whole, and stop tokens; None: all."""
        return self._allow(pattern) if pattern else None

    def _matching(self, pattern: str) -> np.ndarray:
        texts = [self.decode([i]) for i in range(len(self))]
        matches = np.array([re.fullmatch(pattern, text) is not None for text in texts])
        matches &= np.array([text != "" for text in texts])  # control tokens have no text
        matches[list(self.stop_ids)] = True
        return matches

    def stops(self, strings: tuple[str, ...]) -> np.ndarray | None:
        """Where any of some strings has been written: see `stop_table`; None: no strings."""
        return self._stop(strings) if strings else None

    def _pieces(self) -> list[str]:
        """What every token adds to a text; some tokenizers drop a space where a text begins."""
        (first,) = self._content.encode("a", add_special_tokens=False).ids[:1]
        pairs = [[first, i] for i in range(len(self))]
        start = len(self.decode([first]))
        return [text[start:] for text in self._content.decode_batch(pairs)]

    def reply(self, text: str, *, ended: bool) -> list[int]:
        """Ids of a user's turn after an assistant's, up to the assistant's next.

        `ended` says that the assistant's ids already hold their stop token.
        """
        *_, close, open_ = self._render(("user", "assistant", "user"))
        close = close[1:] if ended and close[0] in self.stop_ids else close
        return [*close, *self.encode(text), *open_]

    def _render_roles(self, roles: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The template's own ids around the contents of messages with these roles."""
        text = self._hf.apply_chat_template(
            [{"role": role, "content": _HOLE} for role in roles],
            tokenize=False,
            add_generation_prompt=True,
        )
        pieces = str(text).split(_HOLE)
        if len(pieces) != len(roles) + 1:
            raise UserError(f"the chat template does not show each message once: roles {roles}")
        return tuple(
            tuple(self._template.encode(piece, add_special_tokens=False).ids) for piece in pieces
        )


def _backend(
    tokenizer: transformers.PreTrainedTokenizerBase, split_special: bool
) -> tokenizers.Tokenizer:
    """A copy of the tokenizer that splits control tokens into ordinary ones, or knows them."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.encode_special_tokens = split_special
    return copy


def _stop_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end an assistant's turn: end of sequence, and the chat end markers it knows."""
    ids = [tokenizer.eos_token_id]
    for marker in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>"):
        known = tokenizer.get_vocab().get(marker)
        ids += [known] if known is not None else []
    stops = tuple(dict.fromkeys(i for i in ids if i is not None))
    if not stops:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token")
    return stops
