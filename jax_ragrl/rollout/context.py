"""Conversations as ids: what was sampled stays as it is, what was told is encoded once."""

from __future__ import annotations

from collections.abc import Sequence

from jax_ragrl.rollout.effects import Said, Segment, Told
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message


def told(messages: Sequence[Message], after: Sequence[Segment]) -> list[str]:
    """The texts of a context: what of it has to be encoded."""
    return [m.content for m in messages] + [s.text for s in after if isinstance(s, Told)]


def context_ids(
    tokenizer: ChatTokenizer, messages: Sequence[Message], after: Sequence[Segment], chat: bool
) -> tuple[int, ...]:
    """The ids that a role reads before its next action; see `effects.Generate`.

    With `chat` an observation is a user turn of the template, which also closes an action that was
    cut before its stop token; without, it is plain text. Control tokens in it mean nothing.
    """
    ids = list(tokenizer.chat(messages))
    for segment in after:
        if isinstance(segment, Said):
            ids += segment.ids
        elif chat:
            ids += tokenizer.reply(segment.text, ended=ids[-1] in tokenizer.stop_ids)
        else:
            ids += tokenizer.encode(segment.text)
    return tuple(ids)


def written_ids(tokenizer: ChatTokenizer, text: str, chat: bool) -> tuple[int, ...]:
    """The ids of an action that nobody sampled. With `chat` the stop token ends it; in plain text
    the assistant's turn goes on behind what it is told."""
    return (*tokenizer.encode(text), *(tokenizer.stop_ids[:1] if chat else ()))
