"""The interface of the frozen language model, which is part of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jax_ragrl.errors import EffectError, UserError, one_each
from jax_ragrl.json_text import HALF
from jax_ragrl.runtime.records import declare
from jax_ragrl.text.thoughts import spoken_text
from jax_ragrl.types import LLMRequest


@declare
class MeteredReply(str):
    """A reply with the numbers of tokens that the model itself reports: prompt and completion."""

    _fields = ("text", "prompt_tokens", "completion_tokens")  # of `runtime.records`
    prompt_tokens: int
    completion_tokens: int

    # A string, so that only the code that counts tokens has to distinguish metered replies.
    def __new__(cls, text: str, prompt_tokens: int, completion_tokens: int) -> MeteredReply:
        reply = super().__new__(cls, text)
        reply.prompt_tokens, reply.completion_tokens = prompt_tokens, completion_tokens
        return reply

    # Copies pass these to `__new__`; a plain string would pass the text alone.
    def __getnewargs__(self) -> tuple[str, int, int]:  # type: ignore[override]
        return str(self), self.prompt_tokens, self.completion_tokens


def without_thoughts(replies: Sequence[str | EffectError]) -> list[str | EffectError]:
    """Removes the reasoning of models that think from their replies, not from their counts.

    Half a surrogate pair, as of a text that was cut within a character, becomes U+FFFD.
    """
    return [
        reply if isinstance(reply, EffectError) else _without_thought(reply) for reply in replies
    ]


def ask(llm: FrozenLLM, requests: Sequence[LLMRequest]) -> list[str | EffectError]:
    """Returns the reply of a model to each request, `without_thoughts`; `UserError` for others."""
    if not requests:  # a model of a user need not accept an empty batch
        return []
    return without_thoughts(one_each(llm, llm.complete(requests), requests, str))


def _without_thought(reply: str) -> str:
    text = HALF.sub("\ufffd", spoken_text(reply))
    if text == reply:
        return reply
    if isinstance(reply, MeteredReply):
        return MeteredReply(text, reply.prompt_tokens, reply.completion_tokens)
    return text


def seed_of(seed: int, temperature: float | None) -> int:
    """Returns the seed of a request; 0 at temperature 0, where it has no effect on the reply.

    Rollouts of one question often send equal greedy requests: so they need one reply. A temperature
    of None is the server's own.
    """
    return 0 if temperature == 0 else seed


class FrozenLLM(Protocol):
    """A language model that is queried but never trained.

    `complete` returns one reply per request, in order; equal requests get equal replies. A request
    that failed after all retries has an `EffectError` instead. If a reply is not a `MeteredReply`,
    its tokens are counted with the policy's tokenizer. A reply may begin with a think block, which
    `without_thoughts` removes.

    A model that computes on the devices of the run has the attribute `on_device = True`. It is
    called after the sampler and from the same thread, never concurrently with it, because programs
    on a mesh must start in one order. Any other model may be called from several threads at once,
    one per group of questions, and without `run.lockstep` one per request.
    """

    name: str

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]: ...


class NoLLM:
    """A placeholder for systems that use no frozen language model."""

    name = "none"

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Raises `UserError` for any request."""
        # An empty list is valid: the rollouts of such a system only search.
        if requests:
            purpose = requests[0].purpose
            raise UserError(
                f"the request {purpose!r} needs a language model, but llm.kind is none: set it"
            )
        return []


class FixedLLM:
    """Gives one reply to every request, in place of a language model."""

    name = "fixed"

    def __init__(self, reply: str):
        self._reply = reply

    def complete(self, requests: Sequence[LLMRequest]) -> list[str]:
        return [self._reply] * len(requests)
