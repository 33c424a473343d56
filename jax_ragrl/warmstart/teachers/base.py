"""What a teacher is: a script that plays the roles of a system, and its place in a rollout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.context import context_ids, written_ids
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.rollout.tree import Action
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message


class Writer(Protocol):
    """A script that writes a role's next action in a context; see `rollout.effects.Generate`."""

    def write(
        self,
        role: str,
        messages: Sequence[Message],
        after: Sequence[Segment],
        rng: random.Random,
    ) -> str: ...


class TeacherSampler:
    """A teacher behind the sampler's interface."""

    def __init__(self, teacher: Writer, tokenizer: ChatTokenizer):
        self._teacher, self._tokenizer = teacher, tokenizer

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Forced texts first, then the teacher's; a request's seed decides its chance."""
        return [self._actions(request) for request in requests]

    def _actions(self, request: ActionRequest) -> list[Action]:
        rng, context = random.Random(request.seed), (request.messages, request.after)
        texts = [f.text for f in request.branching.forced if f.complete]
        drawn = request.branching.samples + len(request.branching.forced) - len(texts)
        texts += [self._teacher.write(request.role.name, *context, rng) for _ in range(drawn)]
        chat = request.role.chat
        ids = context_ids(self._tokenizer, request.messages, request.after, chat)
        return [Action(ids, written_ids(self._tokenizer, text, chat), text) for text in texts]
