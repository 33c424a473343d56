r"""The rollout loop, the only code that performs effects: questions in, a forest out.

A round asks every live branch of every question for its effects, performs them in one batched
call per kind, and advances the branches:

    branches            a                    b                    c                   d
    effects          Generate             Search              CallLLM               Done
                        |                    |                    |                   |
    batched call     sampler             retriever         language model             |
                        |                    |                    |                   |
    replies         two actions            hits                 text                  |
                     /       \               |                    |                   |
    advance        a.0       a.1             b                    c                 leaf
                    \         \              |                   /
                     ------------- branches of the next round --

The three calls run concurrently, see `rollout.scheduler`. The result of a branch never depends on
the other branches in the batch.

A branch that waits for several effects gets all replies together, in the order of its effects. Its
actions become a chain of nodes: the first action is the parent of the second.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM, MeteredReply, without_thoughts
from jax_ragrl.llm.judge import judge_answers
from jax_ragrl.retrieval.base import Retriever, search_pages
from jax_ragrl.rollout.branches import (
    BatchedCall,
    Branch,
    EffectReply,
    PendingEffect,
)
from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Generate, Search, Segment
from jax_ragrl.rollout.expand import Branching, Expander
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action, parse_action
from jax_ragrl.rollout.scheduler import run_branches
from jax_ragrl.rollout.system import Execution, Reply, State, System
from jax_ragrl.rollout.tree import (
    LEAF,
    SEARCH,
    Action,
    Call,
    Forest,
    Record,
    build_forest,
    reorder,
)
from jax_ragrl.rollout.waiting import DEVICE, LLM, RETRIEVER, WaitingTimes
from jax_ragrl.runtime.dispatch import is_on_device
from jax_ragrl.types import Hits, LLMRequest, Message, Question


def count_words(text: str) -> int:
    """Returns the number of words of a text."""
    return len(text.split())


class ActionRequest(NamedTuple):
    """A request for actions of one role in one state.

    Fields:
      role: the role that acts.
      messages: the prompt.
      branching: which actions to force, and how many to sample.
      seed: the seed of the state, see `Branch.seed`.
      history: the conversation after the prompt, see `effects.Generate`.
      question, state: the question and the state that wait for the action. Only writers of labels
        read them: a policy sees its prompt alone.
    """

    role: Role
    messages: tuple[Message, ...]
    branching: Branching
    seed: int
    history: tuple[Segment, ...] = ()
    question: Question | None = None
    state: State | None = None


class ActionSampler(Protocol):
    """Writes actions: for each request the forced ones first, in order, then the sampled ones.

    A sampler that can begin a request while others are sampled also has `PolicySampler.stream`.
    """

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]: ...


class Environment(NamedTuple):
    """The models and the retriever that the effects of a system call.

    Fields:
      sampler: writes the actions of the roles.
      retriever: performs searches.
      llm: the frozen language model.
      count: the number of tokens of a text. It measures the calls of a language model whose replies
        are not `MeteredReply`.
      judge: a language model that grades the answers of leaves; None: answers are not graded.
      times: measures the calls; None: they are not measured.
    """

    sampler: ActionSampler
    retriever: Retriever
    llm: FrozenLLM
    count: Callable[[str], int] = count_words
    judge: FrozenLLM | None = None
    times: WaitingTimes | None = None

    def call(self, model: Any, cause: str) -> AbstractContextManager[None]:
        """Measures a call of a model, whose cause of waiting is the devices if it is on them."""
        if self.times is None:
            return contextlib.nullcontext()
        return self.times.call(DEVICE if is_on_device(model) else cause)


def collect(
    system: System,
    expander: Expander,
    questions: Sequence[Question],
    environment: Environment,
    *,
    seed: int = 0,
    rollouts: int = 1,
    copies: Sequence[Sequence[int]] | None = None,
    lockstep: bool = True,
) -> Forest:
    """Rolls out every question until all branches have ended; rewards are still 0.

    Args:
      system: the system.
      expander: how many actions are tried in each state.
      questions: the batch. Seeds derive from the ids of questions; a repeated id gets other seeds.
      environment: sampler, retriever and frozen language model.
      seed: names the run and the step; equal seeds repeat the rollout.
      rollouts: independent copies of every question's rollout, which are never merged (groups).
      copies: per question the numbers of the copies to roll out; None: all.
      lockstep: whether all branches wait for each other in every round, see `rollout.scheduler`.

    Returns:
      The forest. `Recipe.reward` computes its rewards.
    """
    copies = [range(rollouts)] * len(questions) if copies is None else copies
    live, repeats = [], collections.Counter[str]()
    for i, (question, own) in enumerate(zip(questions, copies, strict=True)):
        # Negative, so that the path of a repeated question equals no path of its first copy.
        prefix = (-repeats[question.id],) if repeats[question.id] else ()
        paths = [prefix + ((number,) if rollouts > 1 else ()) for number in own]
        live += [Branch(Execution(system, question), i, path=path) for path in paths]
        repeats[question.id] += 1
    live = [branch._replace(place=(i,)) for i, branch in enumerate(live)]
    rollout = BatchRollout(system, expander, tuple(questions), environment, seed)
    run_branches(rollout, live, lockstep=lockstep)
    rollout.sort_records()
    if environment.judge is not None:
        rollout.grade(environment.judge)
    return build_forest(questions, rollout.records, rollout.failures)


@dataclasses.dataclass
class BatchRollout:
    """The rollout of a batch in progress.

    Fields:
      system, expander, questions, environment, seed: the arguments of `collect`.
      records: the nodes so far.
      places: the place of the branch of each node.
      failures: error messages by the index of the question whose environment failed.
      token_counts: the token counts of texts that `environment.count` has measured.
    """

    system: System
    expander: Expander
    questions: tuple[Question, ...]
    environment: Environment
    seed: int
    records: list[Record] = dataclasses.field(default_factory=list)
    places: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    failures: dict[int, str] = dataclasses.field(default_factory=dict)
    token_counts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def calls(self) -> dict[type, BatchedCall]:
        """The batched call of each kind of effect."""
        return {Generate: self._sample, Search: self._search, CallLLM: self._call_llm}

    def stream_actions(
        self,
        pending: Sequence[PendingEffect],
        arrivals: Callable[[], Sequence[PendingEffect]],
    ) -> Generator[tuple[int, Sequence[Action]]]:
        """Samples actions, and further ones that arrive meanwhile if the sampler can.

        Args:
          pending: the effects that ask for actions.
          arrivals: returns the effects that have come since its last call.

        Yields:
          The number of an effect, from 0 in the order of arrival, and its actions.
        """
        sampler = self.environment.sampler
        if not hasattr(sampler, "stream"):
            yield from enumerate(self._sample(pending))
            return
        requests = [self._action_request(p) for p in pending]
        with self.environment.call(sampler, DEVICE):
            yield from sampler.stream(
                requests, lambda: [self._action_request(p) for p in arrivals()]
            )

    def sort_records(self) -> None:
        """Sorts the nodes by round and by place, in whatever order their branches advanced."""
        order = sorted(
            range(len(self.records)), key=lambda n: (self.records[n].round, self.places[n])
        )
        self.records = reorder(self.records, order)

    def grade(self, judge: FrozenLLM) -> None:
        """Sets the verdict of every answer; without one, its question has failed."""
        leaves = [r for r in self.records if r.answer is not None]
        # An early answer of a question may exist although a later call of the question failed.
        leaves = [r for r in leaves if r.question not in self.failures]
        questions = [self.questions[r.question] for r in leaves]
        with self.environment.call(judge, LLM):
            verdicts = judge_answers(judge, questions, [r.answer for r in leaves])
        for record, verdict in zip(leaves, verdicts, strict=True):
            if isinstance(verdict, EffectError):
                message = f"{judge.name} failed to judge an answer: {verdict}"
                self.failures[record.question] = message
            else:
                record.verdict = verdict

    def _sample(self, pending: Sequence[PendingEffect]) -> Sequence[Sequence[Action]]:
        """Samples the actions of some `Generate` in one batched call."""
        requests = [self._action_request(p) for p in pending]
        with self.environment.call(self.environment.sampler, DEVICE):
            return self.environment.sampler.sample(requests)

    def _search(self, pending: Sequence[PendingEffect]) -> Sequence[Hits | EffectError]:
        """Makes some searches in one batched call; an `EffectError` replaces hits that failed."""
        searches, retriever = [cast(Search, p.effect) for p in pending], self.environment.retriever
        try:
            with self.environment.call(retriever, RETRIEVER):
                return search_pages(retriever, [(s.query, s.k, s.page) for s in searches])
        except EffectError as error:
            return [error] * len(searches)

    def _seed(self, pending: PendingEffect) -> int:
        question = self.questions[pending.branch.question]
        return pending.branch.seed(self.seed, question, pending.slot)

    def _action_request(self, pending: PendingEffect) -> ActionRequest:
        branch, effect = pending.branch, cast(Generate, pending.effect)
        question = self.questions[branch.question]
        return ActionRequest(
            role=self.system.roles[effect.role],
            messages=effect.messages,
            branching=self.expander(effect, question.text),
            seed=self._seed(pending),
            history=effect.history,
            question=question,
            state=branch.execution.state,
        )

    def _call_llm(self, pending: Sequence[PendingEffect]) -> list[Sequence[str | EffectError]]:
        """Makes all samples of some `CallLLM`, each with its seed, in one batched call.

        An `EffectError` takes the place of a reply that failed.
        """
        calls = [(cast(CallLLM, p.effect), self._seed(p)) for p in pending]
        requests = [
            effect.request._replace(seed=seed + i)
            for effect, seed in calls
            for i in range(effect.samples)
        ]
        try:
            with self.environment.call(self.environment.llm, LLM):
                completions = self.environment.llm.complete(requests)
            replies: Sequence[str | EffectError] = without_thoughts(completions)
        # An error of the whole call is the error of each of its requests.
        except EffectError as error:
            replies = [error] * len(requests)
        rest = iter(replies)
        return [[next(rest) for _ in range(effect.samples)] for effect, _ in calls]

    def advance(
        self, branch: Branch, effects: tuple[Effect, ...], replies: list[EffectReply]
    ) -> list[Branch]:
        """Returns the branches that follow a branch.

        Args:
          branch: the branch.
          effects: all effects that it waits for.
          replies: one per effect.
        """
        following = self._advance(branch, effects, replies)
        self.places += [branch.place] * (len(self.records) - len(self.places))
        return [b._replace(place=(*branch.place, i)) for i, b in enumerate(following)]

    def _advance(
        self, branch: Branch, effects: tuple[Effect, ...], replies: list[EffectReply]
    ) -> list[Branch]:
        if errors := _errors(replies):
            self.failures[branch.question] = str(errors[-1])
            return []
        # Calls count for all branches that follow, also if the samples of a call branch the state.
        branch = branch._replace(calls=branch.calls + self._calls(branch, effects, replies))
        self._record_passages(branch, replies)
        if not branch.is_followed:
            return []
        if len(effects) > 1:
            return [self._advance_jointly(branch, effects, replies)]
        match effects[0]:
            case Done() as done:
                self.records.append(self._leaf(branch, done))
                return []
            case Generate() as generate:
                return self._expand(branch, generate, cast(Sequence[Action], replies[0]))
            case Search():
                return [branch._replace(execution=branch.execution.advance(cast(Hits, replies[0])))]
            case CallLLM():
                return self._branch_on_texts(branch, cast(Sequence[str], replies[0]))

    def _expand(self, branch: Branch, effect: Generate, actions: Sequence[Action]) -> list[Branch]:
        """Adds one node per distinct action and returns the branches to continue with."""
        # 1. One node per action; identical siblings are one node with a multiplicity.
        own: dict[tuple[int, ...], Branch] = {}
        for i, action in enumerate(actions):
            if action.ids in own:
                self.records[own[action.ids].parent].multiplicity += 1
                continue
            child = branch._replace(path=(*branch.path, i))
            child, parsed = self._add_node(child, effect, action)
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
        searching = [
            b
            for b in rest
            if branching.peek and all(isinstance(e, Search) for e in b.execution.effects)
        ]
        return [b for ids, b in own.items() if ids in first_ids] + searching

    def _record_passages(self, branch: Branch, replies: Sequence[EffectReply]) -> None:
        """Stores the passages of a search at the action before it."""
        hits = [reply for reply in replies if isinstance(reply, Hits)]
        if hits and branch.nodes:
            self.records[branch.parent].passages = tuple(p for h in hits for p in h.passages)

    def _add_node(
        self, branch: Branch, effect: Generate, action: Action
    ) -> tuple[Branch, ParsedAction]:
        """Records an action; returns the branch that ends with its node, and its parse."""
        role = self.system.roles[effect.role]
        # An action that could not be sampled has no text to parse.
        if action.error:
            parsed = invalid_action(action.error)._replace(text=action.text)
        else:
            parsed = parse_action(role, action.text)
        parsed = parsed._replace(ids=action.ids)
        self.records.append(
            Record(
                parent=branch.parent,
                question=branch.question,
                role=effect.role,
                depth=effect.depth,
                path=branch.path,
                action=action,
                is_forced=action.logps is None,  # only sampled actions have log-probabilities
                parsed=parsed,
                round=branch.round,
            )
        )
        node = len(self.records) - 1
        return branch._replace(parent=node, nodes=(*branch.nodes, node)), parsed

    def _advance_jointly(
        self, branch: Branch, effects: tuple[Effect, ...], replies: Sequence[EffectReply]
    ) -> Branch:
        """Returns the branch after several concurrent effects; their actions form a chain."""
        chain, nodes, values = branch, list[int](), list[Reply]()
        for effect, reply in zip(effects, replies, strict=True):
            if isinstance(effect, Generate):
                chain, parsed = self._add_node(chain, effect, _single(reply))
                nodes.append(chain.parent)
                values.append(parsed)
            else:
                is_search = isinstance(effect, Search)
                values.append(cast(Hits, reply) if is_search else str(_single(reply)))
        execution = branch.execution.advance(tuple(values))
        for node in nodes:
            self.records[node].state = execution.state
        # The path grows by one level, as after a single action, so that later seeds differ.
        return chain._replace(execution=execution, path=(*branch.path, 0) if nodes else branch.path)

    def _branch_on_texts(self, branch: Branch, texts: Sequence[str]) -> list[Branch]:
        """Returns one branch per distinct text of the language model."""
        # Equal texts lead to equal states, so they are one branch.
        distinct = list(dict.fromkeys(texts))
        return [
            branch._replace(
                execution=branch.execution.advance(str(text)),  # without its costs
                path=(*branch.path, i) if len(texts) > 1 else branch.path,
            )
            for i, text in enumerate(distinct)
        ]

    def _calls(
        self, branch: Branch, effects: tuple[Effect, ...], replies: Sequence[EffectReply]
    ) -> tuple[Call, ...]:
        """Returns the calls to the environment that the effects of one round made."""
        latest, calls = len(branch.nodes) - 1, []
        for effect, reply in zip(effects, replies, strict=True):
            # A negative index is the latest action, so that most systems need not count turns.
            if isinstance(effect, Search):
                turn = latest if effect.turn < 0 else effect.turn
                passages = cast(Hits, reply).passages
                calls.append(Call(SEARCH, turn, branch.round, effect.query, passages=passages))
            elif isinstance(effect, CallLLM):
                turn = latest if effect.turn < 0 else effect.turn
                texts, request = cast(Sequence[str], reply), effect.request
                calls += [self._llm_call(request, turn, branch.round, text) for text in texts]
        return tuple(calls)

    def _llm_call(self, request: LLMRequest, turn: int, round_: int, reply: str) -> Call:
        # A server bills by its own counts; for other models the policy's tokenizer counts.
        if isinstance(reply, MeteredReply):
            prompt_tokens, completion_tokens = reply.prompt_tokens, reply.completion_tokens
        else:
            prompt_tokens = sum(self._count_tokens(m.content) for m in request.messages)
            completion_tokens = self._count_tokens(reply)
        return Call(
            purpose=request.purpose,
            turn=turn,
            round=round_,
            request=request.messages[-1].content,
            reply=str(reply),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )

    def _count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text; each distinct text is counted once."""
        if text not in self.token_counts:
            self.token_counts[text] = self.environment.count(text)
        return self.token_counts[text]

    def _leaf(self, branch: Branch, done: Done) -> Record:
        return Record(
            parent=branch.parent,
            question=branch.question,
            role=LEAF,
            depth=done.depth,
            path=branch.path,
            round=branch.round,
            calls=branch.calls,
            answer=done.answer,
            finish_reason=done.finish_reason,
            state=branch.execution.state,
        )


def _single(replies: Any) -> Any:
    """Returns the single reply of an effect that is concurrent with others."""
    if len(replies) != 1:
        raise ValueError(f"{len(replies)} replies to one of several effects: only one can be used")
    return replies[0]


def _errors(replies: Sequence[EffectReply]) -> list[EffectError]:
    """Returns the errors among the replies and, of replies that are lists, among their elements."""
    flat = [r for reply in replies for r in (reply if isinstance(reply, list) else [reply])]
    return [reply for reply in flat if isinstance(reply, EffectError)]
