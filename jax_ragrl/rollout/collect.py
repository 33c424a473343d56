"""The one loop with effects: live states in, a forest out.

Each round gathers what all branches of all questions wait for and makes one batched call each of
the sampler, the retriever and the frozen language model, side by side. (A language model on the
run's own devices comes after the sampler.) What a branch becomes never depends on which other
branches are in the batch.

A state that waits for several effects at once gets all replies together, in the order of its
effects. Its actions become a line of nodes: the parent of the second is the first.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM, MeteredReply
from jax_ragrl.llm.judge import judged
from jax_ragrl.retrieval.base import Retriever, search_pages
from jax_ragrl.rollout.effects import Ask, Done, Effect, Generate, Search, Segment
from jax_ragrl.rollout.expand import Branching, Expander
from jax_ragrl.rollout.roles import Parsed, Role, malformed
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, SEARCH, Action, Call, Forest, Record, plant
from jax_ragrl.types import Hits, LLMRequest, Message, Question


def words(text: str) -> int:
    """How many words a text has."""
    return len(text.split())


class ActionRequest(NamedTuple):
    """Actions wanted of one role in one state. `seed` names the state: (run, question, path)."""

    role: Role
    messages: tuple[Message, ...]
    branching: Branching
    seed: int
    after: tuple[Segment, ...] = ()


class ActionSampler(Protocol):
    """Writes actions: for each request the forced ones first, in order, then the sampled ones."""

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]: ...


class Environment(NamedTuple):
    """What a system's effects act on. `count` measures what a language model that does not say so
    has read and written; a `judge` grades the answers of leaves."""

    sampler: ActionSampler
    retriever: Retriever
    llm: FrozenLLM
    count: Callable[[str], int] = words
    judge: FrozenLLM | None = None


class Branch(NamedTuple):
    """A live state: the question and action it came from, and the path that led here.

    `nodes` are the actions on the way, `calls` what the environment was asked for. A branch that is
    not `followed` ends with its search.
    """

    state: Any
    question: int
    parent: int = NO_PARENT
    path: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()
    followed: bool = True

    def seed(self, run: int, question: Question, slot: int = 0) -> int:
        """A 32-bit number of this state that no other question in the batch can change."""
        name = (run, question.id, self.path) + ((slot,) if slot else ())
        return zlib.crc32(repr(name).encode())


def collect(
    system: Any,
    expander: Expander,
    questions: Sequence[Question],
    environment: Environment,
    *,
    seed: int = 0,
    rollouts: int = 1,
) -> Forest:
    """Rolls every question out to its leaves; rewards are the recipe's and still zero here.

    Args:
      system: a `systems.base.System`.
      expander: how many actions each state tries.
      questions: the batch. Sampling keys are folded from their ids; one that is there again gets
        others.
      environment: sampler, retriever and frozen language model.
      seed: names the run and the step; equal seeds repeat the rollout.
      rollouts: whole copies of every question's rollout, never merged (groups).
    """
    copies: list[tuple[int, ...]] = [(g,) for g in range(rollouts)] if rollouts > 1 else [()]
    live, seen = [], collections.Counter[str]()
    for i, question in enumerate(questions):
        again = (-seen[question.id],) if seen[question.id] else ()
        live += [Branch(system.start(question), i, path=again + path) for path in copies]
        seen[question.id] += 1
    with ThreadPoolExecutor(max_workers=2) as pool:
        run = Rollout(system, expander, tuple(questions), environment, seed, pool)
        while live:
            live = run.round([b for b in live if b.question not in run.failures])
    if environment.judge is not None:
        run.grade(environment.judge)
    return plant(questions, run.records, run.failures)


class Wanted(NamedTuple):
    """One effect of one live branch: which branch, which of its effects."""

    branch: Branch
    slot: int
    effect: Any


@dataclasses.dataclass
class Rollout:
    """The batch while it grows: what is fixed, the records so far, what failed by question, and how
    long the texts are that the language model read and wrote."""

    system: Any
    expander: Expander
    questions: tuple[Question, ...]
    environment: Environment
    seed: int
    pool: Executor
    records: list[Record] = dataclasses.field(default_factory=list)
    failures: dict[int, str] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    number: int = 0

    def round(self, live: Sequence[Branch]) -> list[Branch]:
        """One batched call of each effect, and the branches that follow, in the order of `live`."""
        effects = [_several(self.system.wants(branch.state)) for branch in live]
        wanted = [
            Wanted(branch, slot, effect)
            for branch, several in zip(live, effects, strict=True)
            for slot, effect in enumerate(several)
        ]
        replies = iter(self._perform(wanted))
        after: list[Branch] = []
        for branch, several in zip(live, effects, strict=True):
            after += self._step(branch, several, [next(replies) for _ in several])
        self.number += 1
        return after

    def grade(self, judge: FrozenLLM) -> None:
        """The verdict on every answer; a question about which the judge failed has failed."""
        leaves = [r for r in self.records if r.answer is not None]
        leaves = [r for r in leaves if r.question not in self.failures]
        asked = [self.questions[r.question] for r in leaves]
        verdicts = judged(judge, asked, [r.answer for r in leaves])
        for record, verdict in zip(leaves, verdicts.tolist(), strict=True):
            record.verdict = verdict
            if math.isnan(verdict):
                self.failures[record.question] = f"{judge.name} failed to judge an answer"

    def _perform(self, wanted: Sequence[Wanted]) -> list[Any]:
        """A reply an effect, in order: actions, hits, or samples of the language model."""
        generate, search, ask = (
            [w for w in wanted if isinstance(w.effect, kind)] for kind in (Generate, Search, Ask)
        )
        found = self.pool.submit(_search, self.environment.retriever, [w.effect for w in search])
        told: Callable[[], list[list[Any]]] = functools.partial(self._ask, ask)
        # Programs over a mesh must start in one order: those of a model there keep to this thread.
        if not getattr(self.environment.llm, "on_device", False):
            told = self.pool.submit(told).result
        written = self.environment.sampler.sample([self._request(w) for w in generate])
        by_kind = {Generate: iter(written), Search: iter(found.result()), Ask: iter(told())}
        return [
            None if isinstance(w.effect, Done) else next(by_kind[type(w.effect)]) for w in wanted
        ]

    def _request(self, wanted: Wanted) -> ActionRequest:
        branch, slot, effect = wanted
        question = self.questions[branch.question]
        return ActionRequest(
            self.system.roles[effect.role],
            effect.messages,
            self.expander(effect, question.text),
            branch.seed(self.seed, question, slot),
            effect.after,
        )

    def _ask(self, asks: Sequence[Wanted]) -> list[list[Any]]:
        """Every sample of every request in one call; a failure stands in place of its reply."""
        requests = [
            w.effect.request._replace(
                seed=w.branch.seed(self.seed, self.questions[w.branch.question], w.slot) + i
            )
            for w in asks
            for i in range(w.effect.samples)
        ]
        try:
            replies: Sequence[Any] = self.environment.llm.complete(requests) if requests else []
        except EffectError as error:
            replies = [error] * len(requests)
        rest = iter(replies)
        return [[next(rest) for _ in range(w.effect.samples)] for w in asks]

    def _size(self, text: str) -> int:
        """How long a text is, counted once."""
        if text not in self.sizes:
            self.sizes[text] = self.environment.count(text)
        return self.sizes[text]

    def _step(
        self, branch: Branch, effects: tuple[Effect, ...], replies: list[Any]
    ) -> list[Branch]:
        """What a branch becomes once all that it waited for is there."""
        flat = [r for reply in replies for r in (reply if isinstance(reply, list) else [reply])]
        errors = [reply for reply in flat if isinstance(reply, EffectError)]
        if errors:
            self.failures[branch.question] = str(errors[-1])
            return []
        branch = branch._replace(calls=branch.calls + self._calls(branch, effects, replies))
        self._note(branch, replies)
        if not branch.followed:
            return []
        if len(effects) > 1:
            return [self._together(branch, effects, replies)]
        if isinstance(effects[0], Done):
            self.records.append(self._leaf(branch, effects[0]))
            return []
        if isinstance(effects[0], Generate):
            return self._grow(branch, effects[0], replies[0])
        return self._follow(branch, replies[0])

    def _grow(self, branch: Branch, effect: Generate, actions: Sequence[Action]) -> list[Branch]:
        """One node an action, identical siblings merged, and the states they lead to."""
        nodes: dict[tuple[int, ...], int] = {}
        after = []
        for i, action in enumerate(actions):
            if action.ids in nodes:
                self.records[nodes[action.ids]].multiplicity += 1
                continue
            grown, parsed = self._node(branch._replace(path=(*branch.path, i)), effect, action)
            state = self.system.advance(branch.state, parsed)
            nodes[action.ids] = grown.parent
            self.records[grown.parent].state = state
            after.append(grown._replace(state=state))
        branching = self.expander(effect, self.questions[branch.question].text)
        if branching.follow is None:
            return after
        distinct = dict.fromkeys(action.ids for action in actions[branching.skip :])
        chosen = {nodes[ids] for ids in list(distinct)[: branching.follow]}
        rest = [b._replace(followed=False) for b in after if b.parent not in chosen]
        peeked = [b for b in rest if branching.peek and self._searches(b)]
        return [b for b in after if b.parent in chosen] + peeked

    def _searches(self, branch: Branch) -> bool:
        return all(isinstance(e, Search) for e in _several(self.system.wants(branch.state)))

    def _note(self, branch: Branch, replies: Sequence[Any]) -> None:
        """Keeps what was searched with the action that led to it."""
        hits = [reply for reply in replies if isinstance(reply, Hits)]
        if hits and branch.nodes:
            self.records[branch.parent].found = tuple(p for h in hits for p in h.passages)

    def _node(self, branch: Branch, effect: Generate, action: Action) -> tuple[Branch, Parsed]:
        """Records an action: the branch that it extends, and what it says."""
        role = self.system.roles[effect.role]
        parsed = malformed(action.error) if action.error else role.parse(action.text)
        parsed = parsed._replace(text=action.text, ids=action.ids)
        self.records.append(
            Record(
                branch.parent,
                branch.question,
                effect.role,
                effect.depth,
                branch.path,
                action,
                forced=action.logps is None,  # only what was sampled has log-probabilities
                parsed=parsed,
                round=self.number,
            )
        )
        node = len(self.records) - 1
        return branch._replace(parent=node, nodes=(*branch.nodes, node)), parsed

    def _together(
        self, branch: Branch, effects: tuple[Effect, ...], replies: Sequence[Any]
    ) -> Branch:
        """The state after several effects at once; their actions stand in line."""
        line, values, written = branch, [], []
        for effect, reply in zip(effects, replies, strict=True):
            if isinstance(effect, Generate):
                line, value = self._node(line, effect, _only(reply))
                written.append(line.parent)
            else:
                value = reply if isinstance(effect, Search) else _only(reply)
            values.append(value)
        state = self.system.advance(branch.state, tuple(values))
        for node in written:
            self.records[node].state = state
        # One step down, as after a single action: what comes next has seeds of its own.
        return line._replace(state=state, path=(*branch.path, 0) if written else branch.path)

    def _follow(self, branch: Branch, reply: Any) -> list[Branch]:
        """The states after an environment's replies; equal replies give one state."""
        if isinstance(reply, Hits):
            return [branch._replace(state=self.system.advance(branch.state, reply))]
        distinct = list(dict.fromkeys(reply))
        many = len(reply) > 1
        return [
            branch._replace(
                state=self.system.advance(branch.state, text),
                path=(*branch.path, i) if many else branch.path,
            )
            for i, text in enumerate(distinct)
        ]

    def _calls(
        self, branch: Branch, effects: tuple[Effect, ...], replies: Sequence[Any]
    ) -> tuple[Call, ...]:
        """What the environment was asked for in this round, and how much of it."""
        latest, calls = len(branch.nodes) - 1, []
        for effect, reply in zip(effects, replies, strict=True):
            if isinstance(effect, Search):
                turn = latest if effect.turn < 0 else effect.turn
                found = reply.passages
                calls.append(Call(SEARCH, turn, self.number, effect.query, found=found))
            elif isinstance(effect, Ask):
                turn = latest if effect.turn < 0 else effect.turn
                calls += [self._asked(effect.request, turn, text) for text in reply]
        return tuple(calls)

    def _asked(self, request: LLMRequest, turn: int, reply: str) -> Call:
        if isinstance(reply, MeteredReply):
            size = reply.prompt_tokens, reply.completion_tokens
        else:
            size = sum(self._size(m.content) for m in request.messages), self._size(reply)
        prompt = request.messages[-1].content
        return Call(request.purpose, turn, self.number, prompt, str(reply), *size)

    def _leaf(self, branch: Branch, done: Done) -> Record:
        return Record(
            branch.parent,
            branch.question,
            LEAF,
            getattr(branch.state, "depth", 0),
            branch.path,
            round=self.number,
            calls=branch.calls,
            answer=done.answer,
            why=done.why,
            state=branch.state,
        )


def _several(wants: Any) -> tuple[Effect, ...]:
    return (wants,) if isinstance(wants, Effect) else tuple(wants)


def _only(replies: Sequence[Any]) -> Any:
    """The single reply of an effect that stands beside others."""
    if len(replies) != 1:
        raise ValueError(f"{len(replies)} replies to one of several effects: only one can be used")
    return replies[0]


def _search(retriever: Retriever, effects: Sequence[Search]) -> Sequence[Any]:
    """The hits of every search in one call; a failure stands in place of its hits."""
    if not effects:
        return []
    try:
        return search_pages(retriever, [(e.query, e.k, e.page) for e in effects])
    except EffectError as error:
        return [error] * len(effects)
