"""The interface of scripted teachers, and the sampler that puts a teacher into a rollout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.context import action_ids, context_ids
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.rollout.tree import Action
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message


class TeacherScript(Protocol):
    """A script that writes the next action of a role; see `rollout.effects.Generate`."""

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        """Writes one action; `rng` is the only source of randomness."""
        ...


class TeacherSampler:
    """An action sampler that calls a teacher."""

    def __init__(self, teacher: TeacherScript, tokenizer: ChatTokenizer):
        self._teacher, self._tokenizer = teacher, tokenizer

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Returns forced texts first, then the teacher's actions, seeded by the request."""
        return [self._actions(request) for request in requests]

    def _actions(self, request: ActionRequest) -> list[Action]:
        rng, context = random.Random(request.seed), (request.messages, request.history)
        texts = [f.text for f in request.branching.forced_actions if f.complete]
        count = request.branching.samples + len(request.branching.forced_actions) - len(texts)
        texts += [self._teacher.write(request.role.name, *context, rng) for _ in range(count)]
        chat = request.role.as_chat_turns
        ids = context_ids(self._tokenizer, request.messages, request.history, chat)
        return [Action(ids, action_ids(self._tokenizer, text, chat), text) for text in texts]
