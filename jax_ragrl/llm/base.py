"""The frozen language model as part of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.types import LLMRequest


class MeteredReply(str):
    """A reply of a model that says what it cost: the tokens read and written, by its own count."""

    prompt_tokens: int
    completion_tokens: int

    def __new__(cls, text: str, prompt_tokens: int, completion_tokens: int) -> MeteredReply:
        reply = super().__new__(cls, text)
        reply.prompt_tokens, reply.completion_tokens = prompt_tokens, completion_tokens
        return reply

    def __getnewargs__(self) -> tuple[str, int, int]:  # type: ignore[override]
        return str(self), self.prompt_tokens, self.completion_tokens


class FrozenLLM(Protocol):
    """A language model that is asked and never trained.

    `complete` returns one reply a request, in order; equal requests get equal replies. In place of
    the reply to a request that could not be served, after retries, stands an `EffectError`. Of one
    that is no `MeteredReply`, the tokens are counted with the policy's tokenizer.

    One that computes on the devices of the run has an attribute `on_device`, which is True: it is
    asked after the sampler, from the same thread, and not beside it.
    """

    name: str

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]: ...


class NoLLM:
    """What stands in for a language model in systems that have none."""

    name = "none"

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Raises `UserError` where something is asked after all."""
        if requests:
            purpose = requests[0].purpose
            raise UserError(f"{purpose!r} asks a language model, but llm.kind is none: set it")
        return []
