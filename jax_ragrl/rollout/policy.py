"""The action sampler of a run: policies as writers of actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jax_ragrl.errors import UserError
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.pending import PendingActions, pending_actions
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.engine import SizedJob
from jax_ragrl.sampling.jobs import JobGrammar
from jax_ragrl.sampling.sampler import JobSampler, Shapes
from jax_ragrl.text.tokenizer import ChatTokenizer

SamplerModels = Mapping[str, SplitModel]
# The number of a request, and the key of one of its jobs.
JobKey = tuple[int, int]
# What jobs of one program have in common: the policy and the grammar.
JobKind = tuple[str, JobGrammar]


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

    def stream(
        self, requests: Sequence[ActionRequest], arrivals: Callable[[], Sequence[ActionRequest]]
    ) -> Iterator[tuple[int, list[Action]]]:
        """Samples requests, and further ones that arrive meanwhile.

        With slots a request that arrives takes the next free ones; without, it waits for the batch.

        Args:
          requests: as in `sample`.
          arrivals: returns the requests that have come since its last call.

        Yields:
          As soon as a request has all of its actions, its number, from 0 in the order of arrival,
          and the actions as `sample` returns them.
        """
        if self.shapes.decode_rows:
            yield from _ActionStream(self, arrivals).run(requests)
            return
        first = 0
        while requests:
            yield from enumerate(self.sample(requests), first)
            first += len(requests)
            requests = arrivals()

    def pending(self, requests: Sequence[ActionRequest]) -> list[PendingActions]:
        """Returns the actions of requests, before they are sampled."""
        return pending_actions(requests, self.tokenizer, self.shapes, greedy=self.greedy)

    def sampler(self, policy: str) -> JobSampler:
        """Returns the sampler of a policy, which keeps its contexts."""
        if policy not in self._samplers:
            of_model = (self.models[policy], self.tokenizer, self.shapes, self.counters)
            self._samplers[policy] = JobSampler(*of_model)
        return self._samplers[policy]

    def _start(
        self, policy: str, pending: Sequence[PendingActions], keys: Sequence[JobKey], width: int
    ) -> Callable[[], None]:
        """Dispatches jobs of one policy and width; returns a function that puts their rows."""
        jobs = [pending[i].jobs[number][0] for i, number in keys]
        wait = self.sampler(policy).start(jobs, width)

        def finish() -> None:
            for (i, number), rows in zip(keys, wait(), strict=True):
                pending[i].put(number, rows, self.tokenizer)

        return finish


class _ActionStream:
    """The requests of one call of `PolicySampler.stream`.

    The jobs of one policy and grammar share the slots at a time. While jobs of another kind wait,
    no more are added to those in the slots, so that each kind has its turn.

    Args:
      sampler: the sampler.
      arrivals: as in `PolicySampler.stream`.

    Attributes:
      pending: all requests until now.
      queues: the jobs that wait, by kind; the kind that waits longest comes first.
    """

    def __init__(
        self, sampler: PolicySampler, arrivals: Callable[[], Sequence[ActionRequest]]
    ) -> None:
        self.sampler, self.arrivals = sampler, arrivals
        self.pending: list[PendingActions] = []
        self.queues: dict[JobKind, list[JobKey]] = {}

    def run(self, requests: Sequence[ActionRequest]) -> Iterator[tuple[int, list[Action]]]:
        """Samples all requests; yields as `PolicySampler.stream`."""
        while requests:
            yield from self._add(requests)
            while self.queues:
                yield from self._sample_kind(next(iter(self.queues)))
            requests = self.arrivals()

    def _add(self, requests: Sequence[ActionRequest]) -> Iterator[tuple[int, list[Action]]]:
        """Queues the jobs of requests; yields the requests without jobs."""
        first = len(self.pending)
        self.pending += self.sampler.pending(requests)
        for i, actions in enumerate(self.pending[first:], first):
            for number, (job, _) in actions.jobs.items():
                kind = (actions.request.role.policy, job.grammar)
                self.queues.setdefault(kind, []).append((i, number))
            if actions.is_complete:
                yield i, actions.in_order()

    def _sample_kind(self, kind: JobKind) -> Iterator[tuple[int, list[Action]]]:
        """Samples the jobs of a kind that wait, and those that arrive before another kind waits."""
        keys: list[JobKey] = []
        complete: list[tuple[int, list[Action]]] = []

        def take() -> list[SizedJob]:
            own = self.queues.pop(kind)
            keys.extend(own)
            return [self.pending[i].jobs[number] for i, number in own]

        def arrivals() -> list[SizedJob]:
            complete.extend(self._add(self.arrivals()))
            return take() if [*self.queues] == [kind] else []

        for n, rows in self.sampler.sampler(kind[0]).stream(take(), arrivals):
            i, number = keys[n]
            self.pending[i].put(number, rows, self.sampler.tokenizer)
            if self.pending[i].is_complete:
                complete.append((i, self.pending[i].in_order()))
            yield from complete
            complete.clear()
        yield from complete


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
