"""A language model that plays the roles of a system, in place of a policy of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM, without_thoughts
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.context import action_ids, context_ids
from jax_ragrl.rollout.effects import ModelOutput
from jax_ragrl.rollout.roles import Role, checked_parse
from jax_ragrl.rollout.tree import Action
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest, Message

BEGIN = "\n\nBegin your reply with exactly this text: "


class LLMActionSampler:
    """An action sampler that is a language model instead of a policy.

    Replies are stripped, cut after the first stop string of the role, and encoded. A failed request
    becomes an action without text and with an error message.

    Args:
      temperature: sampling temperature of all roles; None: that of each role.
      examples: by role, messages that precede every prompt of the role: worked examples, as turns
        of the user and the assistant. They are not part of the ids of an action's prompt.
    """

    def __init__(
        self,
        llm: FrozenLLM,
        tokenizer: ChatTokenizer,
        temperature: float | None = None,
        examples: Mapping[str, Sequence[Message]] = MappingProxyType({}),
    ):
        self._llm, self._tokenizer = llm, tokenizer
        self._temperature, self._examples = temperature, examples

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Returns for each request the forced actions in order, then the sampled ones."""
        llm_requests = [
            self._llm_request(r, i, start) for r in requests for i, start in enumerate(_starts(r))
        ]
        replies = iter(self._llm.complete(llm_requests) if llm_requests else [])
        actions = []
        for request in requests:
            role, branching = request.role, request.branching
            texts = [next(replies) for _ in _starts(request)]
            # A writer's reasoning is kept if the grammar has it.
            own = iter(texts if role.reads_thoughts else without_thoughts(texts))
            forced = [
                f.text if f.complete else _with_start(role, f.text, next(own))
                for f in branching.forced_actions
            ]
            sampled = [next(own) for _ in range(branching.samples)]
            actions.append([self._action(request, text) for text in forced + sampled])
        return actions

    def _llm_request(self, request: ActionRequest, number: int, start: str) -> LLMRequest:
        *before, last = conversation(self._tokenizer, request)
        if start:
            last = last._replace(content=last.content + BEGIN + start)
        # Siblings of a request have consecutive seeds; servers take 31-bit numbers.
        role, seed = request.role, (request.seed + number) % 2**31
        sampling = role.sampling
        if self._temperature is not None:
            sampling = sampling._replace(temperature=self._temperature)
        messages = (*before, last)
        # Worked examples come before the conversation, but after its system message.
        first = 1 if messages[0].role == "system" else 0
        examples = self._examples.get(role.name, ())
        messages = (*messages[:first], *examples, *messages[first:])
        return LLMRequest(role.name, messages, sampling, seed)

    def _action(self, request: ActionRequest, reply: str | EffectError) -> Action:
        role = request.role
        prompt = context_ids(self._tokenizer, request.messages, request.history, role.as_chat_turns)
        if isinstance(reply, EffectError):
            return Action(prompt, (), "", None, str(reply))
        text = reply.strip()
        ends = [text.find(stop) + len(stop) for stop in role.stop_strings if stop in text]
        text = text[: min(ends, default=None)]
        return Action(prompt, action_ids(self._tokenizer, text, role.as_chat_turns), text)


def conversation(tokenizer: ChatTokenizer, request: ActionRequest) -> tuple[Message, ...]:
    """Returns the context of an action as messages; earlier actions are assistant messages."""
    later = [
        Message("assistant", tokenizer.decode(segment.ids))
        if isinstance(segment, ModelOutput)
        else Message("user", segment.text)
        for segment in request.history
    ]
    return (*request.messages, *later)


def _starts(request: ActionRequest) -> list[str]:
    """Returns the required start of each reply to a request: forced prefixes, then ''."""
    actions = request.branching.forced_actions
    starts = [action.text for action in actions if not action.complete]
    return starts + [""] * request.branching.samples


def _with_start(role: Role, start: str, reply: str | EffectError) -> str | EffectError:
    """Returns a reply with the required start.

    A reply without it is taken for the continuation, unless it is a valid action on its own.
    """
    if isinstance(reply, EffectError) or reply.strip().startswith(start):
        return reply
    return reply if checked_parse(role, reply.strip()).valid else f"{start} {reply.strip()}"
