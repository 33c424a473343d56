"""Chat tokenization in which only the chat template can write control tokens.

Instructions, questions, passages and replies of a language model are *content*: they are encoded
with special tokens disabled, so that no passage can close a turn. The pieces of the chat template
are encoded with special tokens enabled. Ids are concatenated, never decoded and encoded again.

A SentencePiece tokenizer adds a space before each text that it encodes. Contents and pieces get the
spaces of the rendered template in place of it: a space that ends a piece is part of the first token
of the content after it.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
import transformers

from jax_ragrl.errors import UserError
from jax_ragrl.text.automaton import TokenAutomaton, compile_regex
from jax_ragrl.text.prefix_space import ALWAYS, NEVER, prefix_scheme, without_prefix
from jax_ragrl.text.stops import stop_table
from jax_ragrl.text.thoughts import EMPTY_BLOCK, opened_block
from jax_ragrl.text.token_bytes import token_bytes
from jax_ragrl.types import Message

CACHE_SIZE = 1 << 22  # cached tokens of contents: 16 MB, and their texts
DATE = "26 Jul 2024"  # the default of Llama 3.2's template, without a clock
# Stands for the content while a template is rendered: a private-use character, in no template.
_HOLE = "\ue000"


class Piece(NamedTuple):
    """A part of the chat template.

    Fields:
      ids: its ids.
      space: the space, if there is one, that belongs to the first token of the next content.
    """

    ids: tuple[int, ...]
    space: str = ""


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template, read from a local folder."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase):
        if tokenizer.chat_template is None:
            raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no chat template")
        self._hf = tokenizer
        backend = tokenizer.backend_tokenizer
        self._prefix, self._added = prefix_scheme(backend), {*backend.get_added_tokens_decoder()}
        # Two backends instead of one with a mode: several threads of a rollout encode at once.
        self._content = _backend(without_prefix(backend), split_special=True)
        self._template = _backend(backend, split_special=False)
        self.stop_ids = _stop_ids(tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else self.stop_ids[0]
        # Caches per instance, because a decorator on a method would keep every tokenizer alive.
        self._render = functools.lru_cache(maxsize=256)(self._render_roles)
        self._cache: dict[str, np.ndarray] = {}
        self._allow = functools.cache(self._matching)
        self._stop = functools.cache(lambda stops: stop_table(stops, self._pieces()))
        self._opening = functools.cache(self._render_opening)
        self._reply_space = functools.cache(self._render_reply_space)
        self._compile = functools.cache(self._compiled)

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> ChatTokenizer:
        """Loads the tokenizer of a folder in Hugging Face layout.

        Nothing is downloaded, and code in the folder is not executed.

        Raises:
          UserError: the folder has no readable tokenizer with a chat template.
        """
        if not (pathlib.Path(folder) / "tokenizer_config.json").exists():
            raise UserError(f"{folder}: no tokenizer_config.json: give a Hugging Face folder")
        try:
            # Never run the code of a folder; None, the default, would ask on stdin whether to.
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the parser in Rust raises no more specific class
            why = " ".join(str(error).split())[:200]
            raise UserError(f"{folder}: no readable tokenizer ({why}): copy its files") from error
        return cls(tokenizer)

    def __len__(self) -> int:
        return len(self._hf)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the tokenizer's files, chat template included."""
        self._hf.save_pretrained(str(folder))

    def encode(self, text: str) -> list[int]:
        """Encodes content; text that looks like a control token becomes ordinary tokens."""
        cached = self._cache.get(text)
        return self._encode([text])[0].ids if cached is None else cached.tolist()

    def encode_reply(self, text: str) -> list[int]:
        """Encodes the content of an assistant's turn, which follows the end of a prompt."""
        return self.encode(self._reply_space() + text)

    def encode_ahead(self, texts: Iterable[str]) -> None:
        """Encodes contents in parallel on the cores of the host, and caches their ids.

        A context that grows turn by turn contains the same contents again.
        """
        # The template decides whether a content begins with a space.
        spaces = ("",) if self._prefix == NEVER else ("", " ")
        variants = dict.fromkeys(space + text for text in texts for space in spaces)
        new = [text for text in variants if text not in self._cache]
        encoded = {
            text: np.array(encoding.ids, np.int32)
            for text, encoding in zip(new, self._encode(new), strict=True)
        }
        merged = self._cache | encoded
        fits = sum(map(len, merged.values())) <= CACHE_SIZE
        self._cache = merged if fits else encoded  # one assignment: other threads may be reading

    def _encode(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding]:
        # A batch runs without Python's lock, and the `fast` variant skips the offsets of tokens.
        return self._content.encode_batch_fast(list(texts), add_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token."""
        return self._hf.get_vocab()

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, without control tokens."""
        return self._content.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Message], *, thinking: bool = False) -> list[int]:
        """Encodes a conversation, up to the beginning of the assistant's next turn.

        Args:
          messages: the conversation.
          thinking: whether the turn may begin with a think block. If not, a template that knows
            thinking ends the prompt with an empty block.
        """
        pieces = self._render(tuple(message.role for message in messages), thinking)
        ids = list(pieces[0].ids)
        for message, (before, after) in zip(messages, itertools.pairwise(pieces), strict=True):
            ids += [*self.encode(before.space + message.content), *after.ids]
        return ids

    def allowed_tokens(self, pattern: str) -> np.ndarray | None:
        """Returns a mask of the tokens that an action may contain.

        Args:
          pattern: a regular expression that the whole text of a token has to match.

        Returns:
          bool `[V]`, True also for stop tokens; None, which allows all, for an empty pattern.
        """
        return self._allow(pattern) if pattern else None

    def _matching(self, pattern: str) -> np.ndarray:
        texts = [self.decode([i]) for i in range(len(self))]
        matches = np.array([re.fullmatch(pattern, text) is not None for text in texts])
        matches &= np.array([text != "" for text in texts])  # control tokens have no text
        matches[list(self.stop_ids)] = True
        return matches

    def automaton(self, regex: str) -> TokenAutomaton:
        """Returns the automaton of a regular expression that a whole action has to match.

        Raises:
          UserError: the expression cannot be compiled, or the tokenizer cannot write it.
        """
        return self._compile(regex)

    def _compiled(self, regex: str) -> TokenAutomaton:
        pieces = token_bytes(self._content, len(self))
        words = (i for i, piece in enumerate(pieces) if piece and re.match(b" [a-z]", piece))
        first = next(words, None)
        if first is not None and not self.decode([first]).startswith(" "):
            regex = f" ?(?:{regex})"  # the decoder drops a space at the beginning of a text
        return compile_regex(regex, pieces, self.stop_ids)

    def stop_transitions(self, strings: tuple[str, ...]) -> np.ndarray | None:
        """Returns the transition table of stop strings (see `stop_table`); None without strings."""
        return self._stop(strings) if strings else None

    def _pieces(self) -> list[str]:
        """The text that each token adds to a text."""
        # Decoded after another token: some tokenizers drop a space at the beginning of a text.
        (first,) = self._content.encode("a", add_special_tokens=False).ids[:1]
        pairs = [[first, i] for i in range(len(self))]
        start = len(self.decode([first]))
        return [text[start:] for text in self._content.decode_batch(pairs)]

    def user_reply(self, text: str, *, ended: bool, thinking: bool = False) -> list[int]:
        """Encodes a user's turn after an assistant's, up to the beginning of the assistant's next.

        Args:
          text: the content of the user's turn.
          ended: whether the ids of the assistant's turn already contain its stop token.
          thinking: as in `chat`.
        """
        # A template may render a first turn differently, for example with a system message before
        # it.
        *_, close, open_ = self._render(("user", "assistant", "user"), thinking)
        end = close.ids[1:] if ended and close.ids[0] in self.stop_ids else close.ids
        return [*end, *self.encode(close.space + text), *open_.ids]

    def opened_thought(self, prompt: Sequence[int]) -> str:
        """Returns the text of the think block that the template opens at the end of a prompt.

        Templates of models that always think write the opening tag themselves, so that a sampled
        turn begins within the block. Empty for any other template or prompt.
        """
        ids, text = self._opening()
        return text if text and tuple(prompt[-len(ids) :]) == ids else ""

    def _render_opening(self) -> tuple[tuple[int, ...], str]:
        """The end of every prompt of a turn that may think: ids, and the block it leaves open."""
        *_, tail = self._template_pieces(("user",), True)
        *_, last = self._render(("user",), True)
        return last.ids, opened_block(tail)

    def _render_reply_space(self) -> str:
        """The space between the end of a prompt and an assistant's content, see `Piece`."""
        if self._prefix == NEVER:
            return ""
        *_, end = self._render(("user",), False)
        _, turn, _ = self._render(("user", "assistant"), False)
        return turn.space if turn.ids == end.ids else ""

    def _render_roles(self, roles: tuple[str, ...], thinking: bool) -> tuple[Piece, ...]:
        """The template around the contents of messages with these roles."""
        pieces = self._template_pieces(roles, thinking)
        if not thinking and (block := opened_block(pieces[-1])):
            # The model always thinks; an empty block makes it answer at once.
            pieces[-1] = pieces[-1].removesuffix(block) + EMPTY_BLOCK
        *before, last = pieces
        first = [self._piece(text, n == 0) for n, text in enumerate(before)]
        return (*first, Piece(self._piece_ids(last, not before)))

    def _piece(self, text: str, is_first: bool) -> Piece:
        """A piece of the template with a content after it."""
        stem = text if self._prefix == NEVER else text.removesuffix(" ")
        ids = self._piece_ids(stem, is_first)
        # The tokenizer adds a space at the start of a prompt, and perhaps after a control token.
        is_start = is_first and not ids and self._prefix != NEVER
        is_after_control = bool(ids) and ids[-1] in self._added and self._prefix == ALWAYS
        return Piece(ids, " " if is_start or is_after_control or stem != text else "")

    def _piece_ids(self, text: str, is_first: bool) -> tuple[int, ...]:
        """The ids of a piece, without a space before it unless it begins the prompt."""
        encoding = self._template.encode(text, add_special_tokens=False)
        if is_first or self._prefix == NEVER:
            return tuple(encoding.ids)
        # The part before the first control token continues a content.
        marks = (n for n, token in enumerate(encoding.ids) if token in self._added)
        if (mark := next(marks, None)) is None:
            return tuple(self._encode([text])[0].ids)
        (part,) = self._encode([text[: encoding.offsets[mark][0]]])
        return (*part.ids, *encoding.ids[mark:])

    def _template_pieces(self, roles: tuple[str, ...], thinking: bool) -> list[str]:
        """The text of the template around the contents of messages with these roles."""
        text = self._hf.apply_chat_template(
            [{"role": role, "content": _HOLE} for role in roles],
            tokenize=False,
            add_generation_prompt=True,
            # A template that does not know a variable ignores it.
            enable_thinking=thinking,
            # Llama 3.2 shows today's date otherwise: a resumed run would have other prompts.
            date_string=DATE,
        )
        pieces = str(text).split(_HOLE)
        if len(pieces) != len(roles) + 1:
            raise UserError(
                f"the chat template does not show each message once (roles {roles}): use another "
                "tokenizer"
            )
        return pieces


def _backend(tokenizer: tokenizers.Tokenizer, *, split_special: bool) -> tokenizers.Tokenizer:
    """A copy of the tokenizer that splits control tokens into ordinary ones, or keeps them."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = split_special
    return copy


def _stop_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end an assistant's turn: end of sequence, and the chat end markers it has."""
    ids = [tokenizer.eos_token_id]
    for marker in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>"):
        marker_id = tokenizer.get_vocab().get(marker)
        ids += [marker_id] if marker_id is not None else []
    stops = tuple(dict.fromkeys(i for i in ids if i is not None))
    if not stops:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token")
    return stops
