"""The action sampler of a run: policies as writers of actions, with token ids in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax_ragrl.errors import UserError
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.context import action_ids, context_ids, context_texts, reply_ids
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.sampler import JobSampler, Row, SamplingJob, Shapes
from jax_ragrl.text.thoughts import CLOSE
from jax_ragrl.text.tokenizer import ChatTokenizer

TOO_LONG = "Prompt Too Long"  # the error of an action whose prompt fits no static shape
NO_PREFIX = -1  # the prefix number of actions without a forced prefix
SamplerModels = Mapping[str, SplitModel]
# Which request, and which of its forced prefixes (or `NO_PREFIX`), a sampling job belongs to.
JobKey = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class PolicySampler:
    """Samples the actions of each role with the policy of the role.

    Fields:
      models: split decoders by the name of their policy.
      tokenizer: the tokenizer of all policies.
      shapes: the static shapes of sampling. No action is longer than `shapes.max_new_tokens`,
        whatever its role allows.
      greedy: whether temperature 0 replaces the temperature of every role.
      counters: counts the work of sampling.
    """

    models: SamplerModels
    tokenizer: ChatTokenizer
    shapes: Shapes = Shapes()
    greedy: bool = False
    counters: SamplingCounters = dataclasses.field(default_factory=SamplingCounters)
    # By policy; with slots they keep contexts from round to round.
    _samplers: dict[str, JobSampler] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def separate(self) -> PolicySampler:
        """Returns an equal sampler that shares no contexts with this one.

        Groups of questions take turns in any order. If they shared contexts, rounding errors would
        depend on this order, and a resumed run would differ.
        """
        return dataclasses.replace(self)

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Returns for each request the forced actions in order, then the sampled ones.

        A prompt longer than the longest static shape yields one action with no tokens and an error.
        """
        # 1. Encode all texts in one call, then assemble the prompts from the encoded texts.
        self.tokenizer.encode_ahead(
            text for r in requests for text in context_texts(r.messages, r.history)
        )
        prompts = [
            context_ids(
                self.tokenizer, r.messages, r.history, r.role.as_chat_turns, r.role.thinking
            )
            for r in requests
        ]
        # 2. Start all jobs before waiting for one, so that the device is busy while rows are read.
        finishes = [
            self._start(name, requests, prompts, width, keys)
            for (name, width), keys in sorted(_keys_by_batch(requests).items())
        ]
        # 3. Wait, and put the actions of each request in order.
        samples: dict[JobKey, list[Action]] = {}
        for finish in finishes:
            samples |= finish()
        return [self._in_order(i, r, prompts[i], samples) for i, r in enumerate(requests)]

    def _start(
        self,
        name: str,
        requests: Sequence[ActionRequest],
        prompts: Sequence[tuple[int, ...]],
        width: int,
        keys: Sequence[JobKey],
    ) -> Callable[[], dict[JobKey, list[Action]]]:
        """Dispatches the jobs of one policy and width; returns a function that waits for them."""
        openings = {i: self._opening(requests[i], prompts[i]) for i, _ in keys}
        prefixes = {key: self._prefix(requests[key[0]], key[1], openings[key[0]]) for key in keys}
        longest = self.shapes.prompt_lengths[-1]
        # Requests that fit no shape get an error instead of stopping the batch.
        fitting = [k for k in keys if len(prompts[k[0]]) + len(prefixes[k]) <= longest]
        jobs = [self._job(requests[i], prompts[i], prefixes[i, f], f) for i, f in fitting]
        if name not in self._samplers:
            model = self.models[name]
            self._samplers[name] = JobSampler(model, self.tokenizer, self.shapes, self.counters)
        wait = self._samplers[name].start(jobs, width)

        def finish() -> dict[JobKey, list[Action]]:
            actions = dict.fromkeys(keys, [Action((), (), "", (), TOO_LONG)])
            for (i, f), rows in zip(fitting, wait(), strict=True):
                place = (prompts[i], prefixes[i, f], openings[i])
                actions[i, f] = [self._action(*place, row) for row in rows]
            return actions

        return finish

    def _opening(self, request: ActionRequest, prompt: tuple[int, ...]) -> str:
        """The think block that the prompt opens, if the role thinks: it belongs to the action."""
        return self.tokenizer.opened_thought(prompt) if request.role.thinking else ""

    def _prefix(self, request: ActionRequest, number: int, opening: str) -> tuple[int, ...]:
        if number == NO_PREFIX:
            return ()
        text = _after_thought(opening, request.branching.forced_actions[number].text)
        return reply_ids(self.tokenizer, text, request.role.as_chat_turns)

    def _job(
        self,
        request: ActionRequest,
        prompt: tuple[int, ...],
        prefix: tuple[int, ...],
        number: int,
    ) -> SamplingJob:
        job = job_of_role(request.role, self.shapes)
        return job._replace(
            ids=prompt + prefix,
            # Each forced prefix has its own random stream (a Weyl sequence of the state's seed).
            seed=(request.seed + 0x9E3779B9 * (number + 1)) % 2**32,
            # The compiled programs take the temperature as an argument; 0 selects the argmax.
            temperature=0.0 if self.greedy else job.temperature,
            prefix_length=len(prefix),
        )

    def _action(
        self, prompt: tuple[int, ...], prefix: tuple[int, ...], opening: str, row: Row
    ) -> Action:
        ids = prefix + row.ids
        # A forced prefix was not sampled, so the whole action is scored like a forced one.
        logps = None if prefix else row.logps
        text = opening + self.tokenizer.decode(ids)
        return Action(prompt, ids, text, logps, removed=row.removed)

    def _in_order(
        self,
        i: int,
        request: ActionRequest,
        prompt: tuple[int, ...],
        samples: Mapping[JobKey, list[Action]],
    ) -> list[Action]:
        """Returns the actions of request `i`: forced ones in order, then sampled ones."""
        actions = []
        for f, forced_action in enumerate(request.branching.forced_actions):
            if forced_action.complete:
                # A complete text is encoded, not sampled.
                opening = self._opening(request, prompt)
                text = _after_thought(opening, forced_action.text)
                ids = action_ids(self.tokenizer, text, request.role.as_chat_turns)
                actions.append(Action(prompt, ids, opening + text))
            else:
                actions += samples[i, f]
        return actions + (samples[i, NO_PREFIX] if request.branching.samples else [])


def job_of_role(role: Role, shapes: Shapes) -> SamplingJob:
    """Returns the sampling job of a role, without a prompt and a seed."""
    sampling = role.sampling
    return SamplingJob(
        ids=(),
        seed=0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        # A longer action would not fit the caches.
        limit=min(sampling.max_tokens, shapes.max_new_tokens),
        allowed_token_regex="" if role.strict else role.allowed_token_regex,
        stop_strings=role.stop_strings,
        action_regex=role.action_regex if role.strict else "",
    )


def _after_thought(opening: str, text: str) -> str:
    """The text of a forced action, which does not think: it closes a block that is open."""
    return f"{CLOSE}\n\n{text}" if opening else text


def _keys_by_batch(requests: Sequence[ActionRequest]) -> dict[tuple[str, int], list[JobKey]]:
    """Groups the sampling jobs of all requests by policy and by samples per job."""
    keys: dict[tuple[str, int], list[JobKey]] = {}
    for i, request in enumerate(requests):
        policy, width = request.role.policy, request.branching.samples
        if width:
            keys.setdefault((policy, width), []).append((i, NO_PREFIX))
        for f, forced_action in enumerate(request.branching.forced_actions):
            if not forced_action.complete:
                keys.setdefault((policy, 1), []).append((i, f))
    return keys


def check_grammars(roles: Iterable[Role], tokenizer: ChatTokenizer) -> None:
    """Compiles the grammars of the strict roles among `roles`; the tokenizer caches them.

    Raises:
      UserError: a regular expression cannot be compiled, the tokenizer cannot write it, or even
        the shortest action has more tokens than the role may write.
    """
    for role in roles:
        if not role.strict:
            continue
        shortest = tokenizer.automaton(role.action_regex).tokens_left()
        limit = role.sampling.max_tokens
        if shortest > limit:
            raise UserError(
                f"role {role.name} may write {limit} tokens, but the shortest action of its strict "
                f"grammar has {shortest}: raise the role's maximum of tokens in recipe.system, or "
                "set grammar to 'loose'"
            )
