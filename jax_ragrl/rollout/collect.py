r"""The rollout loop, the only code that performs effects: questions in, a forest out.

Every live branch of every question is asked for its effects. They are performed in one batched call
per kind, and the branches advance:

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

The three calls run concurrently, from one queue per kind of effect:

    Generate    one batched call at a time, in this thread
    Search      one batched call at a time, in a worker
    CallLLM     with lockstep one batched call; otherwise one call per effect, each in a worker
    CallTool    one call per effect, each in a worker

In lockstep all branches wait for each other in every round. Without it a slow reply of the language
model delays its own branch alone. The forest is the same, since the result of a branch does not
depend on the other branches in the batch. But the speed of servers then decides which actions share
a batch, and programs of other shapes round differently: a resumed run equals an undisturbed one up
to rounding errors.

`rollout.branches` has the other half of the story: the nodes and branches that replies lead to.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import FrozenLLM, ask
from jax_ragrl.llm.judge import judge_answers
from jax_ragrl.retrieval.base import Retriever, search_pages
from jax_ragrl.rollout.branches import Branch, EffectReply, Nodes
from jax_ragrl.rollout.effects import CallLLM, CallTool, Done, Effect, Generate, Search, Segment
from jax_ragrl.rollout.expand import Branching, Expander, Growth
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.system import Execution, State, System
from jax_ragrl.rollout.tools import ToolResult, Tools
from jax_ragrl.rollout.tree import Action, Forest, build_forest
from jax_ragrl.rollout.waiting import DEVICE, LLM, RETRIEVER, WaitingTimes
from jax_ragrl.runtime import progress
from jax_ragrl.runtime.dispatch import is_on_device
from jax_ragrl.types import Hits, Message, Question

# Threads that call the language model; further calls wait. Clients of servers have lower limits.
WORKERS = 512


class ActionRequest(NamedTuple):
    """A request for actions of one role in one state.

    Fields:
      seed: the seed of the state, see `Branch.seed`.
      history: the conversation after the prompt `messages`, see `effects.Generate`.
      question, state: for writers of labels; a policy sees its prompt alone.
    """

    role: Role
    messages: tuple[Message, ...]
    branching: Branching
    seed: int
    history: tuple[Segment, ...] = ()
    question: Question | None = None
    state: State | None = None


class ActionSampler(Protocol):
    """Writes actions: for each request the forced ones first, in order, then the sampled ones."""

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]: ...


class Environment(NamedTuple):
    """The models and the retriever that the effects of a system call.

    Fields:
      count: the number of tokens of a text, for a language model whose replies are not
        `MeteredReply`.
      judge: a language model that grades the answers of leaves; None: answers are not graded.
      tools: the tools that a system may call.
      times: measures the calls; None: they are not measured.
    """

    sampler: ActionSampler
    retriever: Retriever
    llm: FrozenLLM
    count: Callable[[str], int] = lambda text: len(text.split())
    judge: FrozenLLM | None = None
    tools: Tools = Tools({})
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
    growth: Growth | None = None,
) -> Forest:
    """Rolls out every question until all branches have ended; `Recipe.reward` computes the rewards.

    Args:
      expander: how many actions are tried in each state.
      questions: the batch. Seeds derive from the ids of questions; a repeated id gets other seeds.
      seed: names the run and the step; equal seeds repeat the rollout.
      rollouts: independent copies of every question's rollout, which are never merged (groups).
      copies: per question the numbers of the copies to roll out; None: all.
      lockstep: whether all branches wait for each other in every round, see the top of this file.
      growth: further actions in decisions of rollouts that have ended.
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
    nodes = Nodes(system, expander, tuple(questions), functools.cache(environment.count), growth)
    return finish(nodes, live, environment, seed, lockstep=lockstep)


def finish(
    nodes: Nodes, live: Sequence[Branch], environment: Environment, seed: int, *, lockstep: bool
) -> Forest:
    """Rolls out the branches `live`, which follow `nodes`, to their ends; see `collect`."""
    Scheduler(nodes, environment, seed, lockstep=lockstep).run(live)
    nodes.sort()
    if environment.judge is not None:
        _grade(nodes, environment, environment.judge)
    return build_forest(nodes.questions, nodes.records, nodes.failures)


def _grade(nodes: Nodes, environment: Environment, judge: FrozenLLM) -> None:
    """Sets the verdict of every answer; without one, its question has failed."""
    # An early answer of a question may exist although a later call of the question failed.
    leaves = [r for r in nodes.records if r.answer is not None and r.question not in nodes.failures]
    questions = [nodes.questions[r.question] for r in leaves]
    with environment.call(judge, LLM):
        verdicts = judge_answers(judge, questions, [r.answer for r in leaves])
    for record, verdict in zip(leaves, verdicts, strict=True):
        if isinstance(verdict, EffectError):
            message = f"{judge.name} failed to judge an answer: {verdict}"
            nodes.failures[record.question] = message
        else:
            record.verdict = verdict


@dataclasses.dataclass
class WaitingBranch:
    """A branch, the replies to its effects until now, and the number of those that are missing."""

    branch: Branch
    replies: list[EffectReply]
    missing: int


class PendingEffect(NamedTuple):
    """An effect that a branch waits for; `slot` is its index among the effects of the branch."""

    waiting: WaitingBranch
    slot: int
    effect: Effect


class Scheduler:
    """Performs the effects of branches until all branches have ended.

    Attributes:
      queues: the effects that wait for a batched call, by kind.
      in_workers: the number of calls of each kind that are in a worker.
      arrivals: the effects of each call that a worker has ended, and its result.
      ready: the branches that have all their replies.
      live, unfinished: the branches of each question that have not ended, and such questions.
    """

    def __init__(
        self, nodes: Nodes, environment: Environment, seed: int, *, lockstep: bool
    ) -> None:
        self.nodes, self.environment, self.seed = nodes, environment, seed
        self.lockstep = lockstep
        self.calls: dict[type, Callable[[list[PendingEffect]], Sequence[EffectReply]]] = {
            Generate: self._sample,
            Search: self._search,
            CallLLM: self._call_llm,
            CallTool: self._call_tool,
        }
        # A model on the devices runs in the thread of the sampler, after it: devices of a mesh must
        # start their programs in one order on every host.
        models = {Search: environment.retriever, CallLLM: environment.llm}
        self.on_device = [kind for kind, model in models.items() if is_on_device(model)]
        self.queues: dict[type, list[PendingEffect]] = {kind: [] for kind in self.calls}
        self.pools: dict[type, ThreadPoolExecutor] = {}
        self.in_workers = collections.Counter[type]()
        self.arrivals = queue.SimpleQueue[tuple[list[PendingEffect], Future[Any]]]()
        self.ready: list[WaitingBranch] = []
        self.live = collections.Counter[int]()
        self.unfinished = 0

    def run(self, live: Sequence[Branch]) -> None:
        """Rolls out the branches `live`, at the root, and all that follow; adds their nodes."""
        # Searches have their own thread: they would wait for all calls that came before them.
        with ThreadPoolExecutor(WORKERS) as callers, ThreadPoolExecutor(1) as searcher:
            self.pools = {CallLLM: callers, CallTool: callers, Search: searcher}
            try:
                self.unfinished = len({branch.question for branch in live})
                for branches in itertools.chain((live,), self.nodes.grown(self.seed)):
                    self._ask(branches)
                    while self.ready or self._is_waiting():
                        self._start_workers()
                        runs = False
                        for kind in (Generate, *self.on_device):
                            if batch := self._take(kind):
                                runs = True
                                self._reply(batch, self.calls[kind](batch))
                        self._take_arrivals(wait=not runs and (self.lockstep or not self.ready))
                        if not self.lockstep or not self._is_waiting():
                            self._advance()
            except BaseException:
                # Calls that have not begun would delay the error.
                callers.shutdown(wait=False, cancel_futures=True)
                raise

    # --- Queues -------------------------------------------------------------------------------

    def _is_waiting(self) -> bool:
        return any(self.queues.values()) or any(self.in_workers.values())

    def _ask(self, branches: Iterable[Branch]) -> None:
        """Queues the effects of branches; a failed question costs nothing more."""
        for branch in branches:
            if branch.question in self.nodes.failures:
                continue
            self.live[branch.question] += 1
            effects = branch.execution.effects
            waiting = WaitingBranch(branch, [None] * len(effects), len(effects))
            if isinstance(effects[0], Done):
                self.ready.append(waiting)
                continue
            for slot, effect in enumerate(effects):
                self.queues[type(effect)].append(PendingEffect(waiting, slot, effect))

    def _take(self, kind: type) -> list[PendingEffect]:
        """Takes the effects of a kind that wait; effects of failed questions are dropped."""
        batch, self.queues[kind] = self.queues[kind], []
        return [p for p in batch if p.waiting.branch.question not in self.nodes.failures]

    def _start_workers(self) -> None:
        """Starts the calls that the devices do not perform."""

        def submit(kind: type, batch: list[PendingEffect]) -> None:
            if batch:
                self.in_workers[kind] += 1
                call = self.pools[kind].submit(self.calls[kind], batch)
                call.add_done_callback(lambda done: self.arrivals.put((batch, done)))

        if CallLLM not in self.on_device:
            batch = self._take(CallLLM)
            for part in [batch] if self.lockstep else [[pending] for pending in batch]:
                submit(CallLLM, part)
        for pending in self._take(CallTool):
            submit(CallTool, [pending])
        # A retriever need not accept concurrent calls.
        if Search not in self.on_device and not self.in_workers[Search]:
            submit(Search, self._take(Search))

    def _take_arrivals(self, *, wait: bool) -> None:
        """Takes the replies that have arrived; with `wait`, of at least one call."""
        while any(self.in_workers.values()) and (wait or not self.arrivals.empty()):
            batch, call = self.arrivals.get()
            self.in_workers[type(batch[0].effect)] -= 1
            self._reply(batch, call.result())
            wait = False

    def _reply(self, batch: Sequence[PendingEffect], replies: Sequence[EffectReply]) -> None:
        for (waiting, slot, _), reply in zip(batch, replies, strict=True):
            waiting.replies[slot] = reply
            waiting.missing -= 1
            if not waiting.missing:
                self.ready.append(waiting)
        if not self.lockstep:
            self._advance()

    def _advance(self) -> None:
        """Advances the branches that are ready, and without lockstep those that they lead to."""
        while self.ready:
            batch = sorted(self.ready, key=lambda waiting: waiting.branch.place)
            self.ready.clear()
            for waiting in batch:
                self._ask(self.nodes.advance(waiting.branch, waiting.replies))
                self.live[waiting.branch.question] -= 1
            live = {n for n, count in self.live.items() if count}
            unfinished = len(live - self.nodes.failures.keys())
            progress.advance("question", self.unfinished - unfinished)
            self.unfinished = unfinished
            if self.lockstep:
                return

    # --- Calls: each makes the effects of a batch in one call ----------------------------------

    def _seed(self, pending: PendingEffect) -> int:
        branch = pending.waiting.branch
        return branch.seed(self.seed, self.nodes.questions[branch.question], pending.slot)

    def _sample(self, batch: Sequence[PendingEffect]) -> Sequence[Sequence[Action]]:
        requests = []
        for pending in batch:
            branch, effect = pending.waiting.branch, cast(Generate, pending.effect)
            question = self.nodes.questions[branch.question]
            if effect.role not in (roles := self.nodes.system.roles):
                raise UserError(
                    f"the system yielded Generate of role {effect.role!r}, but has the roles "
                    f"{', '.join(roles) or 'none'}: add it to the property roles of the system"
                )
            request = ActionRequest(
                role=roles[effect.role],
                messages=effect.messages,
                branching=self.nodes.expander(effect, question.text),
                seed=self._seed(pending),
                history=effect.history,
                question=question,
                state=branch.execution.state,
            )
            requests.append(request)
        with self.environment.call(self.environment.sampler, DEVICE):
            return self.environment.sampler.sample(requests)

    def _search(self, batch: Sequence[PendingEffect]) -> Sequence[Hits | EffectError]:
        searches, retriever = [cast(Search, p.effect) for p in batch], self.environment.retriever
        try:
            with self.environment.call(retriever, RETRIEVER):
                return search_pages(retriever, [(s.query, s.k, s.page) for s in searches])
        except EffectError as error:
            return [error] * len(searches)

    def _call_llm(self, batch: Sequence[PendingEffect]) -> Sequence[str | EffectError]:
        calls = [(cast(CallLLM, pending.effect), self._seed(pending)) for pending in batch]
        requests = [effect.request._replace(seed=seed) for effect, seed in calls]
        try:
            with self.environment.call(llm := self.environment.llm, LLM):
                return ask(llm, requests)
        except EffectError as error:
            return [error] * len(requests)

    def _call_tool(self, batch: Sequence[PendingEffect]) -> Sequence[ToolResult | EffectError]:
        with self.environment.call(self.environment.tools, LLM):
            calls = [cast(CallTool, pending.effect) for pending in batch]
            return [self.environment.tools.call(call.tool, call.arguments) for call in calls]
