"""Recorded scripts for a policy, a retriever and a language model, with a log of effects."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.credit.returns import monte_carlo
from jax_ragrl.errors import EffectError
from jax_ragrl.rollout.collect import ActionRequest, Environment, collect
from jax_ragrl.rollout.effects import ModelOutput
from jax_ragrl.rollout.expand import Expander, ForcedAction, Growth, Tree, single_chain
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Action, Forest
from jax_ragrl.runtime import records
from jax_ragrl.systems.c3po import C3PO
from jax_ragrl.types import Hits, LLMRequest, Passage, Question

FULL = "a context that no longer fits the sampler"
ANN = Question("q-ann", "Where was Ann born?", ("Ulm",), hops=1)
BOB = Question("q-bob", "Where was Bob born?", ("Rom",), hops=1)

# The paper's tree: three forced strategies, then two samples down to depth 4.
PAPER = Tree(
    forced_actions={
        "router": (
            ForcedAction("[No Retrieval]"),
            ForcedAction("[Retrieval] $question"),
            ForcedAction("[Planning]"),
        )
    }
)


def passage(number: int) -> Passage:
    return Passage(f"p{number}", f"title {number}", f"text {number}")


def system(**changes: Any) -> C3PO:
    return dataclasses.replace(C3PO(style="c3po_tiny", top_k=2, max_depth=13), **changes)


def action(text: str, prompt: str, *, sampled: bool = True) -> Action:
    """Ids are bytes, so that equal texts have equal ids; `FULL` has none."""
    if text == FULL:
        return Action((), (), "", (), "Prompt Too Long")
    ids = tuple(text.encode("utf-8", "surrogatepass"))
    return Action(tuple(prompt.encode()), ids, text, (-0.5,) * len(ids) if sampled else None)


@dataclasses.dataclass
class Tape:
    """An environment that plays recorded replies and logs its requests, in order.

    Fields:
      texts: each role's actions in the order of the requests for them; or a function from (role,
        prompt, random generator of the state) to an action.
      hits: from a query to ranked passages. Any other query returns the passages 1 to 9.
      replies: from a purpose to the reply of the language model, or to a function of the request.
      log: the effects.
      prompts: the prompts of actions and of calls to the language model.
      contexts: (role, first prompt, later actions and observations) of every turn.
      seeds: the seeds of action requests.
    """

    texts: Mapping[str, list[str]] | Callable[[str, str, random.Random], str]
    hits: Mapping[str, Sequence[Passage]] = dataclasses.field(default_factory=dict)
    replies: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    log: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    prompts: list[str] = dataclasses.field(default_factory=list)
    contexts: list[tuple[str, str, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)
    name: str = "tape"
    fingerprint: str = "tape"

    def environment(self) -> Environment:
        return Environment(self, self, self)

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        return [self._actions(request) for request in requests]

    def _actions(self, request: ActionRequest) -> list[Action]:
        prompt = request.messages[-1].content
        after = tuple(
            bytes(s.ids).decode() if isinstance(s, ModelOutput) else f"told {s.text}"
            for s in request.history
        )
        self.log.append((request.role.name,))
        self.prompts.append(prompt)
        self.contexts.append((request.role.name, prompt, after))
        self.seeds.append(request.seed)
        branching = request.branching
        forced = [action(f.text, prompt, sampled=False) for f in branching.forced_actions]
        rng, name = random.Random(request.seed), request.role.name
        texts = [self._write(name, prompt, rng) for _ in range(branching.samples)]
        return forced + [action(text, prompt) for text in texts]

    def _write(self, role: str, prompt: str, rng: random.Random) -> str:
        return self.texts(role, prompt, rng) if callable(self.texts) else self.texts[role].pop(0)

    def search(self, queries: Sequence[str], k: int) -> list[Any]:
        self.log += [("search", query, k) for query in queries]
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> Hits | EffectError:
        ranked = self.hits.get(query, [passage(i) for i in range(1, 10)])
        if isinstance(ranked, EffectError):
            return ranked
        return Hits(tuple(ranked[:k]), (1.0,) * len(ranked[:k]))

    def complete(self, requests: Sequence[LLMRequest]) -> list[Any]:
        self.log += [(request.purpose,) for request in requests]
        self.prompts += [request.messages[-1].content for request in requests]
        return [self._reply(request) for request in requests]

    def _reply(self, request: LLMRequest) -> Any:
        reply = self.replies.get(request.purpose, "Ulm")
        return reply(request) if callable(reply) else reply


def play(
    tape: Tape, *questions: Question, expander: Expander = single_chain, **changes: Any
) -> Forest:
    """Returns the forest of a recorded rollout; a leaf's reward is 1 if its answer is gold."""
    seed = changes.pop("seed", 0)
    forest = collect(
        system(**changes), expander, questions or (ANN,), tape.environment(), seed=seed
    )
    assert_readable(forest)
    reward_N = answer_rewards(forest, lambda answer, gold: float(answer in gold))
    return forest._replace(reward_N=reward_N)


def talk(
    system: Any,
    texts: Any,
    *questions: Question,
    expander: Expander = single_chain,
    rollouts: int = 1,
    growth: Growth | None = None,
    lockstep: bool = True,
    **tape: Any,
) -> tuple[Forest, Tape]:
    """The forest of a recorded rollout of any system, and its tape."""
    tape = Tape(texts, **tape)
    settings = {"rollouts": rollouts, "growth": growth, "lockstep": lockstep}
    forest = collect(system, expander, questions or (ANN,), tape.environment(), **settings)
    assert_readable(forest)
    return forest, tape


def assert_readable(forest: Forest) -> None:
    """Hosts exchange their rollouts, so the records of every system must be readable there."""
    assert records.loads(records.dumps(forest.records)) == forest.records


def improvise(role: str, prompt: str, rng: random.Random) -> str:
    """Returns a random action, often invalid or repeated, from the state's own generator alone."""
    word = rng.choice("abcdef")
    choices = {
        "router": ["[No Retrieval]", f"[Retrieval] {word}", "[Planning]", "no bracket"],
        "filter": [f"Thought: {word}\nAction: [1]", f"Thought: {word}\nAction: []", "Action: [7]"],
        "decision": [
            f"Thought: {word}\nAction: [Retrieval] {word}",
            f"Thought: {word}\nAction: [LLM]",
            "Thought: t\nAction: [Sing]",
        ],
    }
    return rng.choice(choices[role])


def leaves_of(forest: Forest) -> list[tuple[str | None, str]]:
    """Returns the answer and the finish reason of each leaf."""
    leaves = [r for r in forest.records if r.role == "leaf"]
    return [(record.answer, record.finish_reason) for record in leaves]


def credit_of(forest: Forest) -> np.ndarray:
    """Returns unweighted Monte Carlo credit; leaves without an answer count 0."""
    ones_N = np.ones(len(forest.records), np.float32)
    arrays = (forest.parent_N, forest.leaf_N, forest.reward_N, ones_N)
    return jax.device_get(jax.jit(monte_carlo)(*jax.device_put(arrays))[0])
