"""The action sampler of a run: policies as writers of actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax_ragrl.errors import UserError
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.pending import PendingActions, pending_actions
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.sampler import JobSampler, Shapes
from jax_ragrl.text.tokenizer import ChatTokenizer

SamplerModels = Mapping[str, SplitModel]
# The number of a request, and the key of one of its jobs.
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
    # By policy; they keep contexts from round to round.
    _samplers: dict[str, JobSampler] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Returns for each request the forced actions in order, then the sampled ones.

        A prompt longer than the longest static shape yields one action with no tokens and an error.
        """
        pending = self.pending(requests)
        batches: dict[tuple[str, int], list[JobKey]] = {}  # by policy and number of rows
        for i, actions in enumerate(pending):
            for number, (_, width) in actions.jobs.items():
                batches.setdefault((actions.request.role.policy, width), []).append((i, number))
        # Start all jobs before waiting for one, so that the device is busy while rows are read.
        finishes = [
            self._start(policy, pending, keys, width)
            for (policy, width), keys in sorted(batches.items())
        ]
        for finish in finishes:
            finish()
        return [actions.in_order() for actions in pending]

    def pending(self, requests: Sequence[ActionRequest]) -> list[PendingActions]:
        """Returns the actions of requests, before they are sampled."""
        return pending_actions(requests, self.tokenizer, self.shapes, greedy=self.greedy)

    def _start(
        self, policy: str, pending: Sequence[PendingActions], keys: Sequence[JobKey], width: int
    ) -> Callable[[], None]:
        """Dispatches jobs of one policy and width; returns a function that puts their rows."""
        jobs = [pending[i].jobs[number][0] for i, number in keys]
        if policy not in self._samplers:
            of_model = self.models[policy], self.tokenizer, self.shapes, self.counters
            self._samplers[policy] = JobSampler(*of_model)
        wait = self._samplers[policy].start(jobs, width)

        def finish() -> None:
            for (i, number), rows in zip(keys, wait(), strict=True):
                pending[i].put(number, rows, self.tokenizer)

        return finish


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
