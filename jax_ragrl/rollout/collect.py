"""The one loop with effects: live states in, a forest out.

Each round gathers what all branches of all questions wait for and makes one batched call each of
the sampler, the retriever and the frozen language model, side by side. What a branch becomes never
depends on which other branches are in the batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.base import Retriever, search_pages
from jax_ragrl.rollout.effects import Ask, Done, Generate, Search
from jax_ragrl.rollout.expand import Branching, Expander
from jax_ragrl.rollout.roles import Role, malformed
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Action, Forest, Record, plant
from jax_ragrl.types import Message, Question


class ActionRequest(NamedTuple):
    """Actions wanted of one role in one state. `seed` names the state: (run, question, path)."""

    role: Role
    messages: tuple[Message, ...]
    branching: Branching
    seed: int


class ActionSampler(Protocol):
    """Writes actions: for each request the forced ones first, in order, then the sampled ones."""

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]: ...


class Environment(NamedTuple):
    """What a system's effects act on."""

    sampler: ActionSampler
    retriever: Retriever
    llm: FrozenLLM


class Branch(NamedTuple):
    """A live state: the question and action it came from, and the path that led here."""

    state: Any
    question: int
    parent: int = NO_PARENT
    path: tuple[int, ...] = ()

    def seed(self, run: int, question: Question) -> int:
        """A 32-bit number of this state that no other question in the batch can change."""
        return zlib.crc32(repr((run, question.id, self.path)).encode())


def collect(
    system: Any,
    expander: Expander,
    questions: Sequence[Question],
    environment: Environment,
    *,
    seed: int = 0,
    reward: Callable[[Question, str | None], float] | None = None,
) -> Forest:
    """Rolls every question out to its leaves.

    Args:
      system: a `systems.base.System`.
      expander: how many actions each state tries.
      questions: the batch; ids must differ, since sampling keys are folded from them.
      environment: sampler, retriever and frozen language model.
      seed: names the run and the step; equal seeds repeat the rollout.
      reward: a leaf's reward from its question and answer (None: a dead leaf).
    """
    records: list[Record] = []
    failed: set[int] = set()
    live = [Branch(system.start(q), i) for i, q in enumerate(questions)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        while live:
            live = [b for b in live if b.question not in failed]
            live = _round(
                system, expander, questions, environment, seed, live, records, failed, pool
            )
    forest = plant(questions, records, sorted(failed))
    if reward is not None:
        for i in forest.leaf_N.nonzero()[0]:
            record = forest.records[i]
            forest.reward_N[i] = reward(questions[record.question], record.answer)
    return forest


def _round(
    system: Any,
    expander: Expander,
    questions: Sequence[Question],
    environment: Environment,
    seed: int,
    live: Sequence[Branch],
    records: list[Record],
    failed: set[int],
    pool: ThreadPoolExecutor,
) -> list[Branch]:
    """One batched call of each effect, and the branches that follow, in the order of `live`."""
    wants = [(branch, system.wants(branch.state)) for branch in live]
    generate = [(b, e) for b, e in wants if isinstance(e, Generate)]
    search = [(b, e) for b, e in wants if isinstance(e, Search)]
    ask = [(b, e) for b, e in wants if isinstance(e, Ask)]
    found = pool.submit(_search, environment.retriever, [e for _, e in search])
    told = pool.submit(_ask, environment.llm, ask, questions, seed)
    written = environment.sampler.sample(
        [_request(system, expander, b, e, questions[b.question], seed) for b, e in generate]
    )
    after: list[Branch] = []
    for (branch, effect), actions in zip(generate, written, strict=True):
        after += _grow(system, branch, effect, actions, records)
    for branch, reply in [
        *zip([b for b, _ in search], [[hits] for hits in found.result()], strict=True),
        *zip([b for b, _ in ask], told.result(), strict=True),
    ]:
        after += _follow(system, branch, reply, failed)
    for branch, effect in wants:
        if isinstance(effect, Done):
            records.append(_leaf(branch, effect))
    return after


def _request(
    system: Any, expander: Expander, branch: Branch, effect: Generate, question: Question, seed: int
) -> ActionRequest:
    branching = expander(effect, question.text)
    role = system.roles[effect.role]
    return ActionRequest(role, effect.messages, branching, branch.seed(seed, question))


def _search(retriever: Retriever, effects: Sequence[Search]) -> Sequence[Any]:
    if not effects:
        return []
    try:
        return search_pages(retriever, [(e.query, e.k, e.page) for e in effects])
    except EffectError as error:
        return [error] * len(effects)


def _ask(
    llm: FrozenLLM, asks: Sequence[tuple[Branch, Ask]], questions: Sequence[Question], seed: int
) -> list[list[Any]]:
    """Every sample of every request in one call; a failure stands in place of its reply."""
    requests = [
        effect.request._replace(seed=branch.seed(seed, questions[branch.question]) + i)
        for branch, effect in asks
        for i in range(effect.samples)
    ]
    try:
        replies: Sequence[Any] = llm.complete(requests) if requests else []
    except EffectError as error:
        replies = [error] * len(requests)
    rest = iter(replies)
    return [[next(rest) for _ in range(effect.samples)] for _, effect in asks]


def _grow(
    system: Any, branch: Branch, effect: Generate, actions: Sequence[Action], records: list[Record]
) -> list[Branch]:
    """One node an action, identical siblings merged, and the states they lead to."""
    nodes: dict[tuple[int, ...], int] = {}
    after = []
    for i, (action, forced) in enumerate(_marked(actions)):
        if action.ids in nodes:
            records[nodes[action.ids]].multiplicity += 1
            continue
        node = nodes[action.ids] = len(records)
        path = (*branch.path, i)
        records.append(
            Record(branch.parent, branch.question, effect.role, effect.depth, path, action, forced)
        )
        role = system.roles[effect.role]
        parsed = malformed(action.error) if action.error else role.parse(action.text)
        state = system.advance(branch.state, parsed)
        records[node].state = state
        after.append(branch._replace(state=state, parent=node, path=path))
    return after


def _marked(actions: Sequence[Action]) -> list[tuple[Action, bool]]:
    # Only what was sampled has log-probabilities.
    return [(action, action.logps is None) for action in actions]


def _follow(system: Any, branch: Branch, replies: Sequence[Any], failed: set[int]) -> list[Branch]:
    """The states after an environment's replies; equal replies give one state."""
    if any(isinstance(reply, EffectError) for reply in replies):
        failed.add(branch.question)
        return []
    distinct = list(dict.fromkeys(replies))
    many = len(replies) > 1
    return [
        branch._replace(
            state=system.advance(branch.state, reply),
            path=(*branch.path, i) if many else branch.path,
        )
        for i, reply in enumerate(distinct)
    ]


def _leaf(branch: Branch, done: Done) -> Record:
    return Record(
        branch.parent,
        branch.question,
        LEAF,
        getattr(branch.state, "depth", 0),
        branch.path,
        answer=done.answer,
        why=done.why,
        state=branch.state,
    )
