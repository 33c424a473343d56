"""Chat tokenization in which only the chat template can write control tokens.

Instructions, questions, passages and replies of a language model are *content*: they are encoded
with special tokens disabled, so that no passage can close a turn. The pieces of the chat template
are encoded with special tokens enabled. Ids are concatenated, never decoded and encoded again.

*Control tokens* are those that the template writes and those that the tokenizer names (begin, end,
padding). They have no text. Every other added token is a *tag*, such as `<search>` or `</think>`,
whether the tokenizer calls it special or not: it is text when it is decoded, and in content it is
spelled with ordinary tokens. Only an action of the policy contains tags as tokens.

A SentencePiece tokenizer adds a space before each text that it encodes. Contents and pieces get the
spaces of the rendered template in place of it: a space that ends a piece is part of the first token
of the content after it.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import transformers

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import HALF, read_object
from jax_ragrl.text.automaton import TokenAutomaton, compile_regex
from jax_ragrl.text.chat_template import render
from jax_ragrl.text.prefix_space import ALWAYS, NEVER, prefix_scheme, without_prefix
from jax_ragrl.text.stops import stop_table
from jax_ragrl.text.thoughts import CLOSE, EMPTY_BLOCK, OPEN, opened_block
from jax_ragrl.text.token_bytes import token_bytes
from jax_ragrl.types import Message

CACHE_SIZE = 1 << 22  # cached tokens of contents: 16 MB, and their texts
DATE = "26 Jul 2024"  # the default of Llama 3.2's template, without a clock
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Stands for the content while a template is rendered: a private-use character, in no template.
_HOLE = "\ue000"


class Piece(NamedTuple):
    """A part of the chat template."""

    ids: tuple[int, ...]
    space: str = ""  # if there is one, that belongs to the first token of the next content


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template, read from a local folder.

    The argument `special_ids`, the ids of begin, end (one or several) and padding that a
    `generation_config.json` has, comes before those of the tokenizer.

    Attributes:
      end_ids: what the template writes after the content of an assistant's turn, up to the token
        that ends it.
      stop_ids: the ids that end an action, first the last one of `end_ids`.
      special_ids: the ids that a `generation_config.json` for this tokenizer has to hold.
      added_texts: the texts of all added tokens: control tokens and tags.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        special_ids: Mapping[str, Any] | None = None,
    ):
        if tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template: add chat_template.jinja")
        self._hf = tokenizer
        try:
            self.template: str = tokenizer.get_chat_template()
        except ValueError as error:  # several templates, none of which is the default
            raise UserError(f"no chat template is the default: {error}") from error
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self._prefix, self._added = prefix_scheme(backend), {*added}
        self._size = max(self.vocabulary().values()) + 1
        # Two backends instead of one with a mode: several threads of a rollout encode at once.
        self._content = _backend(without_prefix(backend), split_special=True)
        # Special, so that `encode_special_tokens` splits them into ordinary ones.
        self._content.add_special_tokens(
            [
                tokenizers.AddedToken(t.content, special=True, normalized=t.normalized)
                for t in added.values()
            ]
        )
        self._template = _backend(backend, split_special=False)
        # Caches per instance, because a decorator on a method would keep every tokenizer alive.
        self._render = functools.lru_cache(maxsize=256)(self._render_roles)
        self._cache: dict[str, np.ndarray] = {}
        self._allow = functools.cache(self._matching)
        self._stop = functools.cache(lambda stops: stop_table(stops, self._pieces()))
        self._opening = functools.cache(self._render_opening)
        self._reply_space = functools.cache(self._render_reply_space)
        self._compile = functools.cache(self._compiled)
        self.end_ids, self.stop_ids = self._ends(special_ids or {})
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else self.stop_ids[0]
        named = {key: getattr(tokenizer, key) for key in SPECIAL_IDS}
        self.special_ids = {key: i for key, i in named.items() if i is not None}
        self.special_ids |= special_ids or {}
        ends = list(self.stop_ids)
        self.special_ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        self.control_ids = self._control_ids(added)
        self.added_texts = [token.content for token in added.values()]
        self._tags = {t.content: i for i, t in added.items() if i not in self.control_ids}

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> ChatTokenizer:
        """Loads the tokenizer of a folder in Hugging Face layout, and executes no code of it.

        The ids of begin, end and padding are also read from `generation_config.json` and
        `config.json`: that of Llama 3 lists end tokens that its tokenizer does not name.

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
        try:
            return cls(tokenizer, _special_ids(pathlib.Path(folder)))
        except UserError as error:
            raise UserError(f"{folder}: {error}") from error

    def __len__(self) -> int:
        return self._size

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the tokenizer's files, chat template and ids of end tokens included."""
        self._hf.save_pretrained(str(folder))
        file = pathlib.Path(folder) / "generation_config.json"
        file.write_text(json.dumps(self.special_ids, indent=2) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Encodes content; text that looks like an added token becomes ordinary tokens."""
        cached = self._cache.get(text)
        return self._encode([text])[0].ids if cached is None else cached.tolist()

    def encode_action(self, text: str, *, after_prompt: bool) -> list[int]:
        """Encodes the text of an action, in which tags are tokens.

        `after_prompt` says whether it follows the end of a prompt.
        """
        space = self._reply_space() if after_prompt else ""
        if not any(tag in text for tag in self._tags):
            return self.encode(space + text)
        # The longest tag first, because one may begin with another.
        tags = "|".join(re.escape(tag) for tag in sorted(self._tags, key=len, reverse=True))
        parts = re.split(f"({tags})", text)
        parts[0] = space + parts[0]
        ids = [[self._tags[part]] if n % 2 else self.encode(part) for n, part in enumerate(parts)]
        return [*itertools.chain(*ids)]

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
        try:
            return self._content.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # half a surrogate pair, which code of a user may return
            whole = [HALF.sub("\ufffd", text) for text in texts]
            return self._content.encode_batch_fast(whole, add_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        return self._hf.get_vocab()

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, without control tokens."""
        text = [i for i in ids if i not in self.control_ids]
        return str(self._content.decode(text, skip_special_tokens=False))

    def chat(self, messages: Sequence[Message], *, thinking: bool = False) -> list[int]:
        """Encodes a conversation, up to the beginning of the assistant's next turn.

        With `thinking` the turn may begin with a think block. Otherwise a template that knows
        thinking ends the prompt with an empty block.
        """
        pieces = self._render(tuple(message.role for message in messages), thinking)
        ids = list(pieces[0].ids)
        for message, (before, after) in zip(messages, itertools.pairwise(pieces), strict=True):
            ids += [*self.encode(before.space + message.content), *after.ids]
        return ids

    def template_ids(self, messages: Sequence[Message], *, thinking: bool = False) -> list[int]:
        """Encodes the template's rendering of a conversation as a server does, tags included."""
        text = self.prompt_text(messages, thinking=thinking)
        return list(self._template.encode(text, add_special_tokens=False).ids)

    def prompt_text(self, messages: Sequence[Message], *, thinking: bool = False) -> str:
        """Returns the text of the prompt that `chat` encodes, contents as the template has them."""
        text = self.rendered(messages, prompt=True, enable_thinking=thinking)
        return _closed(text, thinking)

    def allowed_tokens(self, pattern: str) -> np.ndarray | None:
        """Returns bool `[V]`: tokens that match as a whole, or stop; None for an empty pattern."""
        return self._allow(pattern) if pattern else None

    def _matching(self, pattern: str) -> np.ndarray:
        try:
            token = re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"allowed_token_regex of a role is {pattern!r}, which is no regular expression "
                f"({error}): correct it"
            ) from error
        texts = [self.decode([i]) for i in range(len(self))]
        matches = np.array([token.fullmatch(text) is not None for text in texts])
        matches &= np.array([text != "" for text in texts])  # control tokens have no text
        matches[list(self.stop_ids)] = True
        return matches

    def automaton(self, regex: str) -> TokenAutomaton:
        """Returns the automaton of a regular expression that a whole action has to match."""
        return self._compile(regex)

    def _compiled(self, regex: str) -> TokenAutomaton:
        pieces = token_bytes(self._content, len(self), self.control_ids)
        words = (i for i, piece in enumerate(pieces) if piece and re.match(b" [a-z]", piece))
        first = next(words, None)
        if first is not None and not self.decode([first]).startswith(" "):
            regex = f" ?(?:{regex})"  # the decoder drops a space at the beginning of a text
        return compile_regex(regex, pieces, self.stop_ids)

    def stop_transitions(self, strings: tuple[str, ...]) -> np.ndarray | None:
        """Returns the transition table of stop strings (see `stop_table`); None without strings."""
        return self._stop(strings) if strings else None

    def _pieces(self) -> list[str]:
        # Decoded after another token: some tokenizers drop a space at the beginning of a text.
        (first,) = self._content.encode("a", add_special_tokens=False).ids[:1]
        pairs = [[first, *({i} - self.control_ids)] for i in range(len(self))]
        start = len(self.decode([first]))
        texts = self._content.decode_batch(pairs, skip_special_tokens=False)
        return [text[start:] for text in texts]

    def user_reply(self, text: str, *, ended: bool, thinking: bool = False) -> list[int]:
        """Encodes a user's turn after an assistant's, up to the beginning of the assistant's next.

        `ended` says whether the ids of the assistant's turn already contain `end_ids`, or the last
        of them; `thinking` is as in `chat`.
        """
        # A template may render a first turn differently, for example with a system message before
        # it.
        *_, close, open_ = self._render(("user", "assistant", "user"), thinking)
        is_written = ended and close.ids[: len(self.end_ids)] == self.end_ids
        end = close.ids[len(self.end_ids) :] if is_written else close.ids
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
        pieces = self._template_pieces(roles, thinking)
        pieces[-1] = _closed(pieces[-1], thinking)
        *before, last = pieces
        first = [self._piece(text, n == 0) for n, text in enumerate(before)]
        return (*first, Piece(self._piece_ids(last, not before)))

    def _piece(self, text: str, is_first: bool) -> Piece:
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

    def _template_pieces(
        self, roles: tuple[str, ...], thinking: bool, *, prompt: bool = True
    ) -> list[str]:
        """The template's text around contents; `prompt`: the assistant's next turn begins after."""
        messages = [Message(role, _HOLE) for role in roles]
        pieces = self.rendered(messages, prompt=prompt, enable_thinking=thinking).split(_HOLE)
        if len(pieces) != len(roles) + 1:
            raise UserError(
                f"the chat template does not show each message once (roles {roles}): use another "
                "tokenizer"
            )
        return pieces

    def rendered(self, messages: Sequence[Message], *, prompt: bool, **variables: Any) -> str:
        """Returns the template's text of a conversation; unknown `variables` change nothing."""
        return render(
            self.template,
            {
                **self._hf.special_tokens_map,
                "messages": [message._asdict() for message in messages],
                "add_generation_prompt": prompt,
                "tools": None,
                "documents": None,
                # Llama 3.2 shows today's date otherwise: a resumed run would have other prompts.
                "date_string": DATE,
                **variables,
            },
        )

    def _ends(self, special_ids: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        named = special_ids.get("eos_token_id")
        eos = named if isinstance(named, list) else [named]
        markers = map(self.vocabulary().get, ("<|im_end|>", "<|eot_id|>", "<|endoftext|>"))
        stops = [int(i) for i in (self._hf.eos_token_id, *eos, *markers) if i is not None]
        # 1. The first added token that follows a reply at the end of a conversation.
        *_, last = self._template_pieces(("user", "assistant"), False, prompt=False)
        after = self._piece_ids(last, False)
        end = next((i for i in after if i in self._added), None)
        # 2. Otherwise a stop token that follows a reply before the next message.
        *_, close, _ = self._render(("user", "assistant", "user"), False)
        end = next((i for i in close.ids if i in stops), None) if end is None else end
        if end is None:
            if not stops:
                raise UserError(
                    "the chat template writes no token after a reply and the tokenizer names no "
                    "end-of-sequence token: set eos_token in tokenizer_config.json"
                )
            return (stops[0],), tuple(dict.fromkeys(stops))
        ids = close.ids if end in close.ids else tuple(after)
        return ids[: ids.index(end) + 1], tuple(dict.fromkeys((end, *stops)))

    def _control_ids(self, added: Mapping[int, tokenizers.AddedToken]) -> frozenset[int]:
        """The control tokens: those that the tokenizer names, and special ones of the template."""
        named = self._hf.special_tokens_map.values()  # additional ones, a list, are left out
        ids = {i for i, token in added.items() if token.content in named}
        pieces = self._render(("user", "assistant", "user"), False)
        written = {i for piece in pieces for i in piece.ids}
        ids |= {
            i for i, token in added.items()
            if token.special and (i in written or token.content in self.template)
            and token.content not in (OPEN, CLOSE)
        }  # fmt: skip
        return frozenset(ids.union(self.stop_ids))


def _closed(prompt: str, thinking: bool) -> str:
    """A prompt without a think block that is open, unless the turn may think."""
    block = "" if thinking else opened_block(prompt)
    # The model always thinks; an empty block makes it answer at once.
    return prompt.removesuffix(block) + EMPTY_BLOCK if block else prompt


def tokenizer_checksum(folder: pathlib.Path) -> str:
    """Returns a checksum of the files of a folder that decide on token ids and chat templates."""
    crc = 0
    for file in sorted(folder.iterdir()):
        # `generation_config.json` has the ids of end tokens.
        words = ("token", "vocab", "merges", "template", "generation_config")
        if file.is_file() and any(word in file.name for word in words):
            crc = zlib.crc32(file.read_bytes(), crc)
    return f"{crc:08x}"


def _special_ids(folder: pathlib.Path) -> dict[str, Any]:
    """The ends of both files, one or a list each; a negative id, as Llama files have, is none."""
    ids: dict[str, Any] = {}
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        raw = read_object(file, "copy it again") if file.is_file() else {}
        numbers = {key: raw.get(key) for key in SPECIAL_IDS}
        ids = {key: i for key, i in numbers.items() if isinstance(i, int) and i >= 0} | ids
        end = numbers["eos_token_id"]
        ends += [i for i in (end if isinstance(end, list) else [end]) if i is not None and i >= 0]
    return ids | {"eos_token_id": [*dict.fromkeys(ends)]}


def _backend(tokenizer: tokenizers.Tokenizer, *, split_special: bool) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = split_special
    # A file keeps the lengths that training cut and padded texts to; Transformers resets them too.
    copy.no_truncation()
    copy.no_padding()
    return copy
