"""Examples of a warm-up: the actions of a scripted teacher in generated worlds.

Two kinds of stages share one code path. *Skills*: the teacher's careful rollouts in many synthetic
worlds, with few passages per search at first. *Rejection sampling* (Chen et al. 2025, section 5.2):
the trees of a careless teacher, of which only actions on paths to a correct answer are retained.

In addition to the roles of the system, the decoder learns the tasks of a frozen language model: to
write a roadmap, to answer from documents, and to know the famous facts of one world by heart (names
recur in other worlds with other facts, so that it can know only one).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from jax_ragrl.config.ranges import Count, Natural, Seed
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.world import RELATIONS, World, generate
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.learner.imitation import Example, example
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.executors import WorldExecutors, query_of
from jax_ragrl.llm.reader import WorldReader, understand
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.scann import ScannSearcher
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Expander, ForcedAction
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.runtime.portable_random import pick, shuffled
from jax_ragrl.systems.c3po import NO_RETRIEVAL, PLANNING, RETRIEVAL, ROUTER, render_router
from jax_ragrl.systems.registry import system_module
from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest
from jax_ragrl.warmstart import teachers
from jax_ragrl.warmstart.teachers.base import TeacherSampler, TeacherScript


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the warm-up.

    Fields:
      steps: optimizer steps.
      teacher: settings of the teacher of the system.
      passages_per_search: numbers of passages, used in turn from world to world.
      first_world_seed: seed of the first world; the next worlds have the next seeds.
      only_correct: retain only actions on paths to a correct answer (rejection sampling).
      questions_per_world: training questions that the teacher plays per world.
      known_facts_per_world: questions about the known world added to each world's examples.
      hops: lengths of the chains of facts in questions.
    """

    steps: Count
    teacher: Mapping[str, Any]
    passages_per_search: tuple[Count, ...]
    first_world_seed: Seed
    only_correct: bool = False
    questions_per_world: Count = 120
    known_facts_per_world: Natural = 80
    hops: tuple[Count, ...] = (1, 2, 3, 4)


class WarmupTask(NamedTuple):
    """A system, the builder of its teacher from settings, and the expander of its rollouts."""

    system: Any
    teacher: Callable[[Mapping[str, Any]], TeacherScript]
    expander: Expander


# The teachers by the names of their systems: a new one is one file.
TEACHERS = tuple(m.name for m in pkgutil.iter_modules(teachers.__path__) if m.name != "base")


def teacher_of(system: str) -> type:
    """Returns the teacher of a system, or of its `TEACHER`; raises `UserError` if it has none."""
    name = getattr(system_module(system), "TEACHER", system)
    if name not in TEACHERS:
        raise UserError(
            f"config.system is {system!r}: it has no teacher, use {', '.join(TEACHERS)}"
        )
    return importlib.import_module(f"{teachers.__name__}.{name}").Teacher


def build_world_retriever(world: World) -> DenseRetriever:
    """Builds the ScaNN retriever of a world, in memory."""
    corpus = Corpus(world.passages)
    encoder = HashedEncoder.fit(corpus.passages)
    searcher = ScannSearcher.from_vectors(encoder.encode_passages(corpus.passages))
    return DenseRetriever(corpus, encoder, searcher)


def three_strategies(effect: Generate, question: str) -> Branching:
    """Forces every strategy at the router; other roles write one action."""
    plan = understand(question)
    if effect.role != ROUTER or plan is None:
        return Branching(1)
    actions = ((NO_RETRIEVAL, ""), (RETRIEVAL, query_of(plan)), (PLANNING, ""))
    return Branching(0, tuple(ForcedAction(render_router(*action)) for action in actions))


def world_examples(
    task: WarmupTask, tokenizer: ChatTokenizer, stage: Stage, known_world: World, number: int
) -> list[Example]:
    """Generates the examples of one world, a pure function of its arguments."""
    seed = stage.first_world_seed + number
    world = generate(seed, 120 + 40 * (number % 5), hops=stage.hops)
    # Everything is seeded by the world, so the result does not depend on Grain.
    rng = random.Random(seed)
    questions = shuffled(rng, world.questions["train"])[: stage.questions_per_world]
    top_k = stage.passages_per_search[number % len(stage.passages_per_search)]
    system = dataclasses.replace(task.system, top_k=top_k)
    llm = RecordingLLM(WorldExecutors(world, style=system.style))
    sampler = TeacherSampler(task.teacher(stage.teacher), tokenizer)
    environment = Environment(sampler, build_world_retriever(world), llm)
    forest = collect(system, task.expander, questions, environment, seed=seed)
    forest = forest._replace(reward_N=answer_rewards(forest, cover_match_tokens))
    reader = careful_reader(world, system.style)
    examples = action_examples(forest, rng, stage.only_correct)
    examples += reading_examples(llm.requests, reader, tokenizer, rng)
    examples += fact_examples(
        known_world, system.style, tokenizer, rng, stage.known_facts_per_world
    )
    return shuffled(rng, examples)


def action_examples(forest: Forest, rng: random.Random, only_correct: bool) -> list[Example]:
    """Converts the actions of a forest to examples.

    `rng` drops 70 % of the router's short actions, which would otherwise dominate; `only_correct`
    retains all actions from which a correct answer is reachable, and no others.
    """
    useful_N = np.ones(len(forest.records), bool)
    if only_correct:
        useful_N = reachable_leaves(forest, forest.reward_N)[0] > 0  # a correct leaf below
    examples = []
    for record, useful in zip(forest.records, useful_N, strict=True):
        if record.action is None or not useful:
            continue
        trivial = record.role == ROUTER and not record.action.text.startswith(f"[{RETRIEVAL}]")
        if only_correct or not trivial or rng.random() < 0.3:
            examples.append(Example(record.action.prompt_ids, record.action.ids, record.role))
    return examples


def example_stream(
    task: WarmupTask, tokenizer: ChatTokenizer, stage: Stage, known_world: World
) -> Iterator[list[Example]]:
    """Yields the examples of world after world, prefetched by a Grain thread."""
    worlds = grain.MapDataset.range(1_000_000)
    examples = worlds.map(functools.partial(world_examples, task, tokenizer, stage, known_world))
    # One thread generates two worlds ahead, while the devices train.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(examples.to_iter_dataset(options))


# --- The tasks of a frozen language model ---------------------------------------------------------

# Fraction of the requests of a rollout that become examples, by purpose.
FRACTIONS = {"roadmap": 0.5, "answer": 0.25}


class RecordingLLM:
    """A language model that records its requests."""

    def __init__(self, llm: FrozenLLM):
        self._llm, self.name = llm, llm.name
        self.requests: list[LLMRequest] = []

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Returns the replies of the wrapped model."""
        self.requests += requests
        return self._llm.complete(requests)


def careful_reader(world: World, style: str) -> WorldReader:
    """Returns a reader that reads all documents and makes no errors."""
    return WorldReader(world, style=style, limit=1000, noise=0.0, confusion=0.0)


def reading_examples(
    requests: Sequence[LLMRequest], reader: FrozenLLM, tokenizer: ChatTokenizer, rng: random.Random
) -> list[Example]:
    """Returns examples of a fraction of the distinct requested roadmaps and answers."""
    distinct = dict.fromkeys(request._replace(seed=0) for request in requests)
    sample = [request for request in distinct if rng.random() < FRACTIONS.get(request.purpose, 0.0)]
    return replies_of(sample, reader, tokenizer)


def fact_examples(
    world: World, style: str, tokenizer: ChatTokenizer, rng: random.Random, count: int
) -> list[Example]:
    """Returns examples of questions about single facts, without documents.

    Half of them ask for famous facts; to the others the target is that the answer is unknown.
    """
    famous = sorted(world.famous)
    others = sorted(set(world.source) - world.famous)
    pairs = [pick(rng, others if i % 2 else famous) for i in range(count)]
    texts = [pick(rng, RELATIONS[relation].asks).format(entity) for entity, relation in pairs]
    requests = [
        LLMRequest("answer_direct", user_turn(style, "answer_direct", question=text))
        for text in texts
    ]
    return replies_of(requests, careful_reader(world, style), tokenizer)


def replies_of(
    requests: Sequence[LLMRequest], reader: FrozenLLM, tokenizer: ChatTokenizer
) -> list[Example]:
    """Returns one example per request, whose role is the purpose of the request."""
    return [
        example(tokenizer, request.messages, str(reply), request.purpose)
        for request, reply in zip(requests, reader.complete(requests), strict=True)
    ]
