"""Trains a small RAG system from the parts of the library: the file to read first.

    python examples/minimal.py          # about a minute on two CPU cores

One role is trained: a gate that decides whether a frozen reader answers a question from memory, or
searches first. The reader knows 10 % of the facts, and a search has a price: the mean reward rises
as the gate learns that it is worth it. Its policy is a decoder with random weights; a strict
grammar limits it to the two actions, so that it needs no warm start.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping

import numpy as np
from flax import nnx

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.corpus.world import generate
from jax_ragrl.credit.advantages import group_centred
from jax_ragrl.credit.assign import over_siblings
from jax_ragrl.learner.grammars import role_grammars
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import prepare
from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.retrieval.bm25 import build_bm25
from jax_ragrl.retrieval.kinds import BM25Index
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.effects import CallLLM, Done, Generate, Search
from jax_ragrl.rollout.expand import Tree
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Steps
from jax_ragrl.rollout.tree import SEARCH, Forest
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.base import Recipe
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import train_tokenizer
from jax_ragrl.training.setup import acting_models
from jax_ragrl.training.step import Method, train_step
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

STYLE = "c3po_tiny"  # the prompts of the reader
PRICE = 0.1  # of a search, in answers
ACTIONS = ("recall", "search")


def parse(text: str) -> ParsedAction:
    """Reads an action; never raises."""
    return ParsedAction(text) if text in ACTIONS else invalid_action("Unknown Action")


GATE = Role(
    "gate",
    parse,
    Sampling(temperature=1.0, max_tokens=8),
    action_regex="|".join(ACTIONS),
    strict=True,  # the sampler writes nothing but these actions
)


@dataclasses.dataclass(frozen=True)
class Gate:
    """The system: to search, or not to search."""

    style: str = STYLE
    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: {"gate": GATE})

    def steps(self, question: Question) -> Steps:
        """Yields the effects of a question; a pure function of the question and the replies."""
        choice = yield Generate("gate", (Message("user", question.text),))
        passages: tuple[Passage, ...] = ()
        if choice.action == "search":
            passages = (yield Search(question.text, k=3)).passages
        name = "answer" if passages else "answer_direct"
        values = {"documents": format_passages(STYLE, passages)} if passages else {}
        prompt = user_turn(STYLE, name, question=question.text, **values)
        answer = yield CallLLM(LLMRequest("answer", prompt, Sampling(temperature=0.0)))
        yield Done(answer, "answered")


def reward(forest: Forest) -> np.ndarray:
    """Returns 1 for a right answer minus the price of a search, float32 `[N]`; 0 elsewhere."""
    has_searched_N = [any(call.purpose == SEARCH for call in r.calls) for r in forest.records]
    return answer_rewards(forest, cover_match) - np.float32(PRICE) * np.array(has_searched_N)


def main(steps: int = 20, questions_per_step: int = 32) -> list[float]:
    """Trains the gate; returns the mean reward of each step."""
    world = generate(seed=0, size=80, famous=0.1, hops=(1,))
    retriever = build_bm25(Corpus(world.passages), BM25Index(), tempfile.mkdtemp())
    reader = WorldReader(world, style=STYLE)
    credit = functools.partial(over_siblings, rule=group_centred)  # against the mean of siblings
    recipe = Recipe(Gate(), reward, credit, expander=lambda roles: Tree(width=4))
    method = Method(recipe, credit)

    tokenizer = ChatTokenizer(train_tokenizer([p.text for p in world.passages], 300))
    config = DecoderConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )
    policy = prepare(
        Decoder(config, rngs=nnx.Rngs(0)),
        objective=Objective(critic="none", advantage="group_centred", kl=KL(where="none")),
        optimizer=Optimizer(policy_lr=3e-4, schedule="constant"),
        layout=Layout(row_lengths=(128,), tokens_per_device=2048),
        roles=("gate",),
        temperature=1.0,
        updates=steps,
        grammars=role_grammars([GATE], tokenizer),
    )
    policies, rewards = {"policy": policy}, []
    stream = QuestionStream(world.questions["train"], seed=0)
    shapes = Shapes(prompt_lengths=(96,), batch_sizes=(16,), max_new_tokens=8)
    for step in range(steps):
        sampler = PolicySampler(acting_models(policies), tokenizer, shapes)
        environment = Environment(sampler, retriever, reader, tokenizer.count)
        questions = stream.draw(questions_per_step)
        policies, _, forest = train_step(method, policies, environment, questions, step)
        leaves = np.flatnonzero(forest.leaf_N)
        samples = forest.multiplicity_N[forest.parent_N[leaves]]  # equal actions are one node
        rewards.append(float(np.average(forest.reward_N[leaves], weights=samples)))
        # The answer is a call; a rollout that searched has another one.
        searches = np.average([len(forest.records[n].calls) - 1 for n in leaves], weights=samples)
        print(f"step {step + 1:2}  reward {rewards[-1]:.2f}  searches {searches:.2f}")
    return rewards


if __name__ == "__main__":
    main()
