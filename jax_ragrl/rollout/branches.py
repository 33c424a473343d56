"""Branches of a rollout in progress, and the nodes that they add to the forest."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.rollout.effects import CallLLM, CallTool, Done, Generate, Search
from jax_ragrl.rollout.expand import Expander, Growth, Tree
from jax_ragrl.rollout.roles import ParsedAction, invalid_action, parse_action
from jax_ragrl.rollout.system import Execution, Reply, System, before_last_reply
from jax_ragrl.rollout.tools import ToolResult
from jax_ragrl.rollout.tree import (
    LEAF,
    NO_PARENT,
    SEARCH,
    TOOL_PREFIX,
    Action,
    Call,
    Record,
    reorder,
)
from jax_ragrl.types import Hits, Question

# The reply to one effect: `Generate`, `CallLLM`, `Search`, `CallTool`, one that failed, `Done`.
EffectReply = Sequence[Action] | str | Hits | ToolResult | EffectError | None


class Branch(NamedTuple):
    """A live branch of the rollouts of one question, with its system suspended at its effects.

    Fields:
      path, nodes: the indices of the siblings chosen from the root, and the actions themselves.
      calls: the calls to the environment on the way.
      is_followed: whether the rollout continues after the pending search (see `Branching.peek`).
      place: its number at the root, then for each round its number among the branches that follow
        the same branch. The nodes of a round are in the order of the places.
      tried: the number of actions that were sampled in this state before, see `expand.Growth`.
    """

    execution: Execution
    question: int
    parent: int = NO_PARENT
    path: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()
    is_followed: bool = True
    place: tuple[int, ...] = ()
    tried: int = 0

    @property
    def round(self) -> int:
        """The number of rounds before this one."""
        return len(self.place) - 1

    def seed(self, run: int, question: Question, slot: int = 0) -> int:
        """Returns a 32-bit seed of the branch, which no other question in the batch can change.

        `run` is the seed of the rollout, `slot` the index of the effect among those of the branch.
        """
        # Resumed runs must draw the same numbers, so this tuple never changes its form.
        last = (0, self.tried) if self.tried else (slot,) if slot else ()
        name = (run, question.id, self.path, *last)
        return zlib.crc32(repr(name).encode())


@dataclasses.dataclass
class Nodes:
    """The nodes of the rollouts of a batch, in progress.

    Fields:
      count: the number of tokens of a text.
      growth: how the trees grow when all rollouts have ended; None: they do not.
      places: the place of the branch of each node.
      failures: error messages by the index of the question whose environment failed.
    """

    system: System
    expander: Expander
    questions: tuple[Question, ...]
    count: Callable[[str], int]
    growth: Growth | None = None
    records: list[Record] = dataclasses.field(default_factory=list)
    places: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    failures: dict[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        forced = self.expander.forced_actions if isinstance(self.expander, Tree) else ()
        if unknown := [role for role in forced if role not in self.system.roles]:
            raise UserError(
                f"the expander forces actions of role {unknown[0]!r}, which this system does not "
                f"have: use some of {', '.join(self.system.roles) or 'none'}"
            )

    def sort(self) -> None:
        """Sorts the nodes by round and by place, in whatever order their branches advanced."""
        order = sorted(
            range(len(self.records)), key=lambda n: (self.records[n].round, self.places[n])
        )
        self.records = reorder(self.records, order)
        self.places = [self.places[n] for n in order]

    def advance(self, branch: Branch, replies: Sequence[EffectReply]) -> list[Branch]:
        """Adds the nodes of the replies to all effects of a branch; returns what follows it."""
        if errors := [reply for reply in replies if isinstance(reply, EffectError)]:
            self.failures[branch.question] = str(errors[-1])
            return []
        branch = branch._replace(calls=branch.calls + self._calls(branch, replies))
        hits = [reply for reply in replies if isinstance(reply, Hits)]
        if hits and branch.nodes:
            self.records[branch.parent].passages = tuple(p for h in hits for p in h.passages)
        if not branch.is_followed:
            return []
        match branch.execution.effects:
            case (Done() as done,):
                self._add(
                    branch,
                    role=LEAF,
                    depth=done.depth,
                    calls=branch.calls,
                    answer=done.answer,
                    finish_reason=done.finish_reason,
                    state=branch.execution.state,
                )
                following = []
            case (Generate() as generate,):
                following = self._expand(branch, generate, cast(Sequence[Action], replies[0]))
            case _:
                following = [self._advance_jointly(branch, replies)]
        return [
            b._replace(place=(*branch.place, i), tried=0)
            for i, b in enumerate(following, branch.tried)
        ]

    def grown(self, seed: int) -> Iterator[list[Branch]]:
        """Yields the branches of each round of growth, when those of the round before have ended.

        `seed` is that of the rollout: what a tree draws depends on no other question of the batch.
        """
        growth = self.growth or Growth(0, 0)
        for number in range(growth.rounds):
            self.sort()
            # 1. The actions of each decision of a tree, and the calls on the way to their leaves.
            trees: dict[int, dict[int, list[int]]] = {}
            calls: dict[int, tuple[Call, ...]] = {}
            for n, record in enumerate(self.records):
                if record.role == LEAF:
                    node = record.parent
                    while node != NO_PARENT:
                        calls.setdefault(node, record.calls)
                        node = self.records[node].parent
                # The replies to concurrent effects are a plain tuple: none can be repeated alone.
                elif isinstance(record.state.replies[-1], ParsedAction):
                    decisions = trees.setdefault(self.places[n][0], {})
                    decisions.setdefault(record.parent, []).append(n)
            # 2. Draw decisions of each tree, and wait in each for one more action.
            live = []
            for decisions in trees.values():
                groups = [group for group in decisions.values() if group[0] in calls]
                if not groups:
                    continue
                first = self.records[groups[0][0]]
                question = self.questions[first.question]
                rng = random.Random(f"{seed} {question.id} {first.path} {number}")
                tried = [[self.records[n] for n in group] for group in groups]
                chances = growth.weigh(tried) if growth.weigh else None
                drawn = rng.choices(range(len(groups)), chances, k=growth.actions)
                for i, count in sorted(Counter(drawn).items()):
                    n, record = groups[i][0], tried[i][0]
                    nodes, node = list[int](), record.parent
                    while node != NO_PARENT:
                        nodes.insert(0, node)
                        node = self.records[node].parent
                    branch = Branch(
                        before_last_reply(self.system, record.state),
                        record.question,
                        record.parent,
                        record.path[:-1],
                        tuple(nodes),
                        tuple(call for call in calls[n] if call.round < record.round),
                        place=self.places[n],
                    )
                    before = sum(r.multiplicity for r in tried[i])
                    live += [branch._replace(tried=before + k) for k in range(count)]
            yield live

    def _expand(self, branch: Branch, effect: Generate, actions: Sequence[Action]) -> list[Branch]:
        """Adds one node per distinct action and returns the branches to continue with."""
        # 1. One node per action; identical siblings are one node with a multiplicity.
        own: dict[tuple[int, ...], Branch] = {}
        # Those of a decision that is tried again have been followed.
        former = {
            r.action.ids: r
            for r in (self.records if branch.tried else ())
            if r.action and r.question == branch.question and r.path[:-1] == branch.path
        }
        for i, action in enumerate(actions, branch.tried):
            if action.ids in own:
                self.records[own[action.ids].parent].multiplicity += 1
                continue
            if action.ids in former:
                former[action.ids].multiplicity += 1
                continue
            child, parsed = self._add_action(
                branch._replace(path=(*branch.path, i)), effect, action
            )
            execution = branch.execution.advance(parsed)
            self.records[child.parent].state = execution.state
            own[action.ids] = child._replace(execution=execution)
        # 2. The rollout continues with all of them, or with the first `follow` after `skip`.
        branching = self.expander(effect, self.questions[branch.question].text)
        if branching.follow is None:
            return [*own.values()]
        distinct = dict.fromkeys(action.ids for action in actions[branching.skip :])
        first_ids = {*list(distinct)[: branching.follow]}
        # 3. The searches of the others may still be made, for rewards that read the passages.
        rest = [b._replace(is_followed=False) for ids, b in own.items() if ids not in first_ids]
        peeks = [b for b in rest if all(isinstance(e, Search) for e in b.execution.effects)]
        followed = [b for ids, b in own.items() if ids in first_ids]
        return followed + (peeks if branching.peek else [])

    def _advance_jointly(self, branch: Branch, replies: Sequence[EffectReply]) -> Branch:
        """Returns the branch after a call, or several effects; their actions form a chain."""
        chain, nodes, values = branch, list[int](), list[Reply]()
        for effect, reply in zip(branch.execution.effects, replies, strict=True):
            if not isinstance(effect, Generate):
                # A text loses its costs, which are in the calls.
                value = str(reply) if isinstance(reply, str) else cast(Hits | ToolResult, reply)
                values.append(value)
                continue
            actions = cast(Sequence[Action], reply)
            if len(actions) != 1:
                raise ValueError(
                    f"{len(actions)} replies to one of several effects: only one can be used"
                )
            chain, parsed = self._add_action(chain, effect, actions[0])
            nodes.append(chain.parent)
            values.append(parsed)
        # A lone reply comes without a tuple around it.
        execution = branch.execution.advance(tuple(values) if len(values) > 1 else values[0])
        for node in nodes:
            self.records[node].state = execution.state
        # The path grows by one level, as after a single action, so that later seeds differ.
        return chain._replace(execution=execution, path=(*branch.path, 0) if nodes else branch.path)

    def _add_action(
        self, branch: Branch, effect: Generate, action: Action
    ) -> tuple[Branch, ParsedAction]:
        """Adds an action; returns the branch that ends with its node, and its parse."""
        # An action that could not be sampled has no text to parse.
        if action.error:
            parsed = invalid_action(action.error)._replace(text=action.text)
        else:
            parsed = parse_action(self.system.roles[effect.role], action.text)
        parsed = parsed._replace(ids=action.ids)
        node = self._add(
            branch,
            role=effect.role,
            depth=effect.depth,
            action=action,
            is_forced=action.logps is None,  # only sampled actions have log-probabilities
            parsed=parsed,
        )
        return branch._replace(parent=node, nodes=(*branch.nodes, node)), parsed

    def _add(self, branch: Branch, **fields: Any) -> int:
        """Adds a node after the latest one of a branch; returns its number."""
        record = Record(branch.parent, branch.question, path=branch.path, **fields)
        record.round = branch.round
        self.records.append(record)
        self.places.append(branch.place)
        return len(self.records) - 1

    def _calls(self, branch: Branch, replies: Sequence[EffectReply]) -> tuple[Call, ...]:
        """Returns the calls to the environment that the effects of a branch made."""
        calls = []
        for effect, reply in zip(branch.execution.effects, replies, strict=True):
            if not isinstance(effect, Search | CallLLM | CallTool):
                continue
            # A negative index is the latest action, so that most systems need not count turns.
            turn = len(branch.nodes) - 1 if effect.turn < 0 else effect.turn
            if isinstance(reply, Hits):
                query = cast(Search, effect).query
                calls.append(Call(SEARCH, turn, branch.round, query, passages=reply.passages))
                continue
            if isinstance(effect, CallTool):
                text = json.dumps(effect.arguments, sort_keys=True)
                name, result = TOOL_PREFIX + effect.tool, cast(ToolResult, reply).json
                calls.append(Call(name, turn, branch.round, text, result))
                continue
            request = cast(CallLLM, effect).request
            # A server bills by its own counts; for other models `count` does.
            if isinstance(reply, MeteredReply):
                counts = reply.prompt_tokens, reply.completion_tokens
            else:
                prompt_tokens = sum(self.count(m.content) for m in request.messages)
                counts = prompt_tokens, self.count(cast(str, reply))
            last = request.messages[-1].content
            calls.append(Call(request.purpose, turn, branch.round, last, str(reply), *counts))
        return tuple(calls)
