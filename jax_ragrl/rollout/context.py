"""Conversations as token ids: sampled ids are reused, each observation is encoded once."""

from __future__ import annotations

from collections.abc import Sequence

from jax_ragrl.rollout.effects import ModelOutput, Observation, Segment
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message


def context_texts(messages: Sequence[Message], history: Sequence[Segment]) -> list[str]:
    """Returns the texts of a context that have to be encoded: messages and observations."""
    observations = [segment.text for segment in history if isinstance(segment, Observation)]
    return [message.content for message in messages] + observations


def context_ids(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    history: Sequence[Segment],
    as_chat_turns: bool,
    thinking: bool = False,
) -> tuple[int, ...]:
    """Returns the ids that a role reads before its next action; see `effects.Generate`.

    With `as_chat_turns`, an observation is a user turn of the chat template, which also closes an
    action that was cut before its stop token; otherwise it is plain text. Control tokens in its
    text are encoded as ordinary text either way. With `thinking`, the next action may begin with a
    think block; blocks of earlier actions stay in the context, because the policy was sampled in
    it.
    """
    ids = list(tokenizer.chat(messages, thinking=thinking))
    for segment in history:
        if isinstance(segment, ModelOutput):
            ids += segment.ids
        elif as_chat_turns:
            # After any other stop token, the template's own end follows.
            has_end = ids[-1] == tokenizer.end_ids[-1]
            ids += tokenizer.user_reply(segment.text, ended=has_end, thinking=thinking)
        else:
            # Plain text continues the turn of the assistant.
            ids += tokenizer.encode(segment.text)
    return tuple(ids)


def action_ids(tokenizer: ChatTokenizer, text: str, as_chat_turns: bool) -> tuple[int, ...]:
    """Returns the ids of an action that was not sampled, such as a forced one.

    It ends as the template ends an assistant's turn. In plain text (without `as_chat_turns`) the
    turn continues after the observation, so it has no end, and an action may follow an observation
    instead of the end of a prompt.
    """
    end = tokenizer.end_ids if as_chat_turns else ()
    return (*tokenizer.encode_action(text, after_prompt=as_chat_turns), *end)
