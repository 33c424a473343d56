"""Retrievers and language models by their names on the command line."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jax_ragrl.config.schema import build, kinds_of
from jax_ragrl.errors import UserError
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig, OpenAIConfig
from jax_ragrl.retrieval.kinds import Index, RemoteIndex, ServerIndex
from jax_ragrl.retrieval.web import ENGINES


def parse_index(text: str) -> ServerIndex:
    """Parses a retriever: the address of a server, or `ENGINE[@URL]`."""
    name, _, url = text.partition("@")
    if name not in ENGINES:
        return RemoteIndex(url=text)
    server: ServerIndex = build(kinds_of(Index)[name], {"url": url} if url else {}, "index")
    return server


SERVER = "openai:"


def parse_llm(
    text: str, *, int8: bool = False, replies: pathlib.Path | str = "", replies_only: bool = False
) -> LLM:
    """Parses a frozen language model: `tiny`, a folder, or `openai:MODEL[@URL][#EXTRA]`.

    EXTRA is a JSON object, the value of `llm.extra_body`; the options are those of
    `LocalLLMConfig` and `OpenAIConfig`. `UserError` for another EXTRA, or `int8` for a server.
    """
    if not text.startswith(SERVER):
        return LocalLLMConfig(text, int8=int8)
    if int8:
        raise UserError(
            f"{text} runs on a server: use int8 with a local model only, or leave it out"
        )
    model, url, extra = _split_server(text)
    return OpenAIConfig(
        model,
        url or None,
        extra_body=json_object(extra or "{}"),
        replies=str(replies),
        replies_only=replies_only,
    )


def model_of(text: str) -> str:
    """Removes the address of a server, which may change, from a text for `parse_llm`."""
    if not text.startswith(SERVER):
        return text
    model, _, extra = _split_server(text)
    return f"{SERVER}{model}" + (f"#{extra}" if extra else "")


def _split_server(text: str) -> tuple[str, str, str]:
    """The model, address and extra of `openai:MODEL[@URL][#EXTRA]`; missing ones are empty."""
    # The extra is split off first: its JSON may contain an @.
    place, _, extra = text.removeprefix(SERVER).partition("#")
    model, _, url = place.partition("@")
    return model, url, extra


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object that follows the name of a model; `UserError` for any other text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f'the text after # is {text!r}: use a JSON object, such as {{"top_k": 20}}')
    return value
