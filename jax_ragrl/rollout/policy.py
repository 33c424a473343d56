"""The policies being trained (or evaluated) as writers of actions: token in, token out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.context import context_ids, told, written_ids
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.sampler import Job, Shapes, start_jobs
from jax_ragrl.text.tokenizer import ChatTokenizer

TOO_LONG = "Prompt Too Long"
Models = Mapping[str, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class PolicySampler:
    """Samples each role with its policy; `greedy` overrides every role's temperature with 0.

    `models` are split decoders (graph, parameters) by the name of their policy. No action is longer
    than `shapes.steps`, whatever its role allows.
    """

    models: Models
    tokenizer: ChatTokenizer
    shapes: Shapes = Shapes()
    greedy: bool = False

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """For each request the forced actions in order, then the sampled ones.

        A prompt longer than the longest static shape yields one action with no tokens and an error.
        """
        self.tokenizer.foresee(text for r in requests for text in told(r.messages, r.after))
        prompts = [context_ids(self.tokenizer, r.messages, r.after, r.role.chat) for r in requests]
        # By policy and width, the requests and numbers of their forced prefixes (-1: none).
        wanted: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for i, request in enumerate(requests):
            name, width = request.role.policy, request.branching.samples
            if width:
                wanted.setdefault((name, width), []).append((i, -1))
            for f, forced in enumerate(request.branching.forced):
                if not forced.complete:
                    wanted.setdefault((name, 1), []).append((i, f))
        # All are started before one is waited for: a device goes on while its rows are read.
        started = [
            self._start(name, requests, prompts, width, keys)
            for (name, width), keys in sorted(wanted.items())
        ]
        written: dict[tuple[int, int], list[Action]] = {}
        for finish in started:
            written |= finish()
        return [self._in_order(i, r, prompts[i], written) for i, r in enumerate(requests)]

    def _start(
        self,
        name: str,
        requests: Sequence[ActionRequest],
        prompts: Sequence[tuple[int, ...]],
        width: int,
        keys: Sequence[tuple[int, int]],
    ) -> Callable[[], dict[tuple[int, int], list[Action]]]:
        prefixes = {key: self._prefix(requests[key[0]], key[1]) for key in keys}
        longest = self.shapes.lengths[-1]
        fits = [k for k in keys if len(prompts[k[0]]) + len(prefixes[k]) <= longest]
        jobs = [self._job(requests[i], prompts[i] + prefixes[i, f], f) for i, f in fits]
        drawn = start_jobs(*self.models[name], self.tokenizer, jobs, width, self.shapes)

        def finish() -> dict[tuple[int, int], list[Action]]:
            out = dict.fromkeys(keys, [Action((), (), "", (), TOO_LONG)])
            for (i, f), rows in zip(fits, drawn(), strict=True):
                out[i, f] = [self._action(prompts[i], prefixes[i, f], *row) for row in rows]
            return out

        return finish

    def _prefix(self, request: ActionRequest, number: int) -> tuple[int, ...]:
        if number < 0:
            return ()
        return tuple(self.tokenizer.encode(request.branching.forced[number].text))

    def _job(self, request: ActionRequest, ids: tuple[int, ...], number: int) -> Job:
        role, sampling = request.role, request.role.sampling
        temperature = 0.0 if self.greedy else sampling.temperature
        # Each forced prefix is a stream of its own, as each sibling is.
        seed = (request.seed + 0x9E3779B9 * (number + 1)) % 2**32
        limit = min(sampling.max_tokens, self.shapes.steps)
        return Job(ids, seed, temperature, sampling.top_p, limit, role.tokens, role.stops)

    def _action(
        self,
        prompt: tuple[int, ...],
        prefix: tuple[int, ...],
        ids: tuple[int, ...],
        logps: tuple[float, ...],
    ) -> Action:
        text = self.tokenizer.decode(prefix + ids)
        # A forced prefix was not sampled, so the whole action is scored like a forced one.
        return Action(prompt, prefix + ids, text, None if prefix else logps)

    def _in_order(
        self,
        i: int,
        request: ActionRequest,
        prompt: tuple[int, ...],
        written: dict[tuple[int, int], list[Action]],
    ) -> list[Action]:
        actions = []
        for f, forced in enumerate(request.branching.forced):
            if forced.complete:
                ids = written_ids(self.tokenizer, forced.text, request.role.chat)
                actions.append(Action(prompt, ids, forced.text))
            else:
                actions += written[i, f]
        return actions + (written[i, -1] if request.branching.samples else [])
