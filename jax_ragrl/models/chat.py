"""Compares a model's tokenizer, chat template, generation config and weights with each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.models import hf_config, safetensors_io
from jax_ragrl.models.hf import check_tensors, check_tied_head, read_config
from jax_ragrl.text.chat_template import REMEDY, TODAY
from jax_ragrl.text.thoughts import CLOSE, OPEN, opened_block
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message

_MARK = "Ulm."  # a reply that no template contains


class ChatFinding(NamedTuple):
    """Something that does not fit: an error, or what a user should know about the prompts."""

    is_error: bool
    text: str


def compare_chat(
    folder: str | Path,
    tokenizer: ChatTokenizer,
    prompts: Mapping[str, Sequence[Message]] | None = None,
    grammars: Iterable[str] = (),
    *,
    thinking: bool = False,
) -> Iterator[ChatFinding]:
    """Yields what does not fit in a model's folder.

    Args:
      folder: the model's folder; weights are compared if it has any.
      prompts: conversations that the template has to render, by name.
      grammars: regular expressions and stop strings that actions have to match.
      thinking: whether turns may begin with a think block.
    """
    yield from _ids_and_weights(Path(folder), tokenizer)
    try:
        yield from _turns(tokenizer)
        yield from _prompts(tokenizer, prompts or {}, thinking)
    except UserError as error:
        yield ChatFinding(True, str(error))
    texts = {i: text for text, i in tokenizer.vocabulary().items() if i in tokenizer.control_ids}
    for grammar in grammars:
        for i, text in texts.items():
            if text in grammar or re.escape(text) in grammar:
                yield ChatFinding(
                    True,
                    f"actions contain {text!r}, but it is token {i}, with which the tokenizer or "
                    "the template ends or frames turns, so that no text shows it: use other tags, "
                    "or a model that does not",
                )


def _ids_and_weights(folder: Path, tokenizer: ChatTokenizer) -> Iterator[ChatFinding]:
    raw = read_config(folder)
    rows = int(raw.get("vocab_size", 0))
    ids = tokenizer.vocabulary() | {f"id {i}": i for i in tokenizer.stop_ids}
    if beyond := sorted((i, text) for text, i in ids.items() if i >= rows):
        number, text = beyond[0]
        yield ChatFinding(
            True,
            f"the tokenizer has {text!r} as id {number} and {len(beyond) - 1} more beyond the "
            f"{rows} rows of the embeddings (vocab_size in config.json): resize the embeddings of "
            "the model, or remove these tokens",
        )
    if not any((folder / name).is_file() for name in (safetensors_io.SINGLE, safetensors_io.INDEX)):
        return  # the weights of a model on the Hub are read later
    try:
        config, files = hf_config.from_hf(raw), safetensors_io.locate(folder)
        check_tensors(config, files)
        check_tied_head(config, files)
    except UserError as error:
        yield ChatFinding(True, str(error))


def _turns(tokenizer: ChatTokenizer) -> Iterator[ChatFinding]:
    """How the template begins and ends an assistant's turn, and what it does to thoughts."""
    user, reply = Message("user", "Where?"), Message("assistant", _MARK)
    prompt = tokenizer.rendered([user], prompt=True, enable_thinking=False)
    shown = tokenizer.rendered([user, reply], prompt=False).partition(_MARK)[0]
    # Both without a think block at the end, which is reported below.
    block = re.compile(rf"{OPEN}\s*({CLOSE})?\s*\Z")
    start, header = (block.sub("", text).rstrip() for text in (prompt, shown))
    if start != header:
        yield ChatFinding(
            True,
            f"the chat template ends a prompt with {start[-40:]!r}, but begins a reply after "
            f"{header[-40:]!r}, so that it has no generation prompt or another one: make it write "
            f"the beginning of the reply if add_generation_prompt is true; {REMEDY}",
        )
    if tokenizer.user_reply("x", ended=True) == tokenizer.user_reply("x", ended=False):
        end = tokenizer.stop_ids[0]
        yield ChatFinding(
            False,
            "the chat template writes no token after a reply: replies end with the "
            f"end-of-sequence token, id {end}, which contexts of several turns contain although "
            f"the template does not write it; {REMEDY}",
        )
    thought = Message("assistant", f"{OPEN}\n{_MARK}\n{CLOSE}\n\nYes")
    grown = [*tokenizer.chat([user]), *tokenizer.encode_action(_MARK, after_prompt=True)]
    grown += [*tokenizer.end_ids, *tokenizer.user_reply("Where?", ended=True)]
    if _MARK not in tokenizer.rendered([user, thought, user], prompt=True):
        yield ChatFinding(
            False,
            "the chat template removes the thoughts of earlier replies: contexts of several turns "
            "keep what was sampled; a server that renders the template has shorter ones",
        )
    elif start == header and grown != tokenizer.chat([user, reply, user]):
        yield ChatFinding(
            False,
            "the chat template shows an earlier reply in another way than its prompt began, as "
            "without its empty think block: contexts of several turns keep the prompt",
        )
    if OPEN in shown.removeprefix(start) or opened_block(prompt):
        yield ChatFinding(
            False,
            "the chat template writes a think block before a reply: prompts contain it, and with "
            "thinking=off it is closed at once",
        )
    if "strftime_now" in tokenizer.template or "date_string" in tokenizer.template:
        yield ChatFinding(
            False,
            f"the chat template shows a date: it is always {TODAY:%d %b %Y} here; a server that "
            "shows today's has other prompts",
        )


def _prompts(
    tokenizer: ChatTokenizer, prompts: Mapping[str, Sequence[Message]], thinking: bool
) -> Iterator[ChatFinding]:
    differences: dict[str, list[str]] = {}
    for name, messages in prompts.items():
        text = tokenizer.prompt_text(messages, thinking=thinking)
        ids = tokenizer.chat(messages, thinking=thinking)
        expected = tokenizer.template_ids(messages, thinking=thinking)
        if ids == expected:
            continue
        spelled = [t for t in tokenizer.added_texts if any(t in m.content for m in messages)]
        if spelled:
            kind = f"spell the token {spelled[0]!r}, which is ordinary text in a prompt"
        elif not all(message.content in text for message in messages):
            kind = "are changed by the chat template, such as by 'trim', but are used unchanged"
        else:
            kind = f"have other tokens than the template's text ({len(ids)} and {len(expected)})"
        differences.setdefault(kind, []).append(name)
    for kind, names in differences.items():
        yield ChatFinding(False, f"the prompts {', '.join(names)} {kind}")
