"""Supervised warm-up of a tiny decoder on data of a scripted teacher.

Two kinds of stages share one code path. *Skills*: the teacher's careful rollouts in many synthetic
worlds, with few passages per search at first. *Rejection sampling* (Chen et al. 2025, section 5.2):
the trees of a careless teacher, of which only actions on paths to a correct answer are retained.

In addition to the roles of the system, the decoder learns the tasks of a frozen language model
(`reader_rows.py`): to write a roadmap, to answer from documents, and to know the famous facts of
one world by heart.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import json
import pathlib
import pkgutil
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_ragrl.config.schema import build
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.world import World, generate
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.learner.gradients import TrainState, check_finite
from jax_ragrl.learner.imitation import Example, PackedRows, pack, sft_step, token_losses
from jax_ragrl.llm.executors import WorldExecutors, query_of
from jax_ragrl.llm.reader import understand
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.scann import ScannSearcher
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Expander, ForcedAction, single_chain
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.components import load_policy
from jax_ragrl.run.config import load_recipe
from jax_ragrl.runtime.jsonl import append_row
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.systems.c3po import NO_RETRIEVAL, PLANNING, RETRIEVAL, ROUTER, render_router
from jax_ragrl.systems.registry import system_module
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import train_tokenizer
from jax_ragrl.warmstart import teachers
from jax_ragrl.warmstart.reader_rows import (
    RecordingLLM,
    careful_reader,
    fact_examples,
    reading_examples,
)
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

    steps: int
    teacher: Mapping[str, Any]
    passages_per_search: tuple[int, ...]
    first_world_seed: int
    only_correct: bool = False
    questions_per_world: int = 120
    known_facts_per_world: int = 80
    hops: tuple[int, ...] = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Warmup:
    """The config of a warm-up, which starts from a new `model` or from `policy`.

    Fields:
      stages: the stages, in order.
      learning_rate: peak learning rate.
      model: sizes of a new decoder.
      policy: directory of an initial policy.
      seed: seed of a new decoder.
      tokens_per_step: tokens per step, padding included.
      row_lengths: allowed row lengths; a step has rows of one length.
      prompt_loss_weight: loss weight of prompt tokens; targets have weight 1.
      log_every: steps per line of the log.
      known_world_seed: seed of the world whose famous facts are learned.
    """

    stages: tuple[Stage, ...]
    learning_rate: float
    model: DecoderConfig | None = None
    policy: str = ""
    seed: int = 0
    tokens_per_step: int = 6144
    row_lengths: tuple[int, ...] = (48, 80, 112, 144, 176, 224)
    prompt_loss_weight: float = 0.1
    log_every: int = 50
    known_world_seed: int = 0


class WarmupTask(NamedTuple):
    """A system, the builder of its teacher from settings, and the expander of its rollouts."""

    system: Any
    teacher: Callable[[Mapping[str, Any]], TeacherScript]
    expander: Expander


# The teachers by the names of their systems: a new one is one file.
TEACHERS = tuple(m.name for m in pkgutil.iter_modules(teachers.__path__) if m.name != "base")


def teacher_of(system: str) -> type:
    """Returns the teacher with the name of a system, or with the name in its `TEACHER`.

    Raises:
      UserError: the system has no teacher.
    """
    name = getattr(system_module(system), "TEACHER", system)
    if name not in TEACHERS:
        raise UserError(
            f"config.system is {system!r}: it has no teacher, use {', '.join(TEACHERS)}"
        )
    return importlib.import_module(f"{teachers.__name__}.{name}").Teacher


def load_warmup(values: Mapping[str, Any]) -> tuple[Warmup, WarmupTask]:
    """Builds a warm-up and its task from a config; `system` and `recipe` are as in training."""
    values = dict(values)
    name = str(values.get("system"))
    recipe = load_recipe(values)
    expander = three_strategies if name == "c3po" else single_chain
    teacher = functools.partial(build, teacher_of(name), where="config.stages.teacher")
    return build(Warmup, values), WarmupTask(recipe.system, teacher, expander)


def world_texts(seeds: range) -> Iterator[str]:
    """Yields passages and questions of some worlds, for the training of a tokenizer."""
    for seed in seeds:
        world = generate(seed, 400)
        yield from (f"{p.title}: {p.text}" for p in world.passages)
        yield from (q.text for q in world.questions["train"])


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
    """Generates the examples of one world, a pure function of its arguments.

    Args:
      task: system, teacher and expander.
      tokenizer: the tokenizer of the decoder.
      stage: the stage.
      known_world: the world whose facts are learned.
      number: number of the world within the stage.
    """
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
    forest = forest._replace(reward_N=answer_rewards(forest, cover_match))
    reader = careful_reader(world, system.style)
    examples = action_examples(forest, rng, stage.only_correct)
    examples += reading_examples(llm.requests, reader, tokenizer, rng)
    examples += fact_examples(
        known_world, system.style, tokenizer, rng, stage.known_facts_per_world
    )
    return shuffled(rng, examples)


def action_examples(forest: Forest, rng: random.Random, only_correct: bool) -> list[Example]:
    """Converts the actions of a forest to examples.

    Args:
      forest: rollouts of the teacher.
      rng: drops 70 % of the router's short actions, which would otherwise dominate.
      only_correct: retain only actions from which a correct answer is reachable, and all of them.
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
    """Yields the examples of world after world, prefetched by a Grain thread.

    Args:
      task: system, teacher and expander.
      tokenizer: the tokenizer of the decoder.
      stage: the stage.
      known_world: the world whose facts are learned.
    """
    worlds = grain.MapDataset.range(1_000_000)
    examples = worlds.map(functools.partial(world_examples, task, tokenizer, stage, known_world))
    # One thread generates two worlds ahead, while the devices train.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(examples.to_iter_dataset(options))


def batches(stream: Iterator[list[Example]], config: Warmup) -> Iterator[PackedRows]:
    """Yields batches of equal token count, each with rows of a single length."""
    pools: dict[int, list[Example]] = {length: [] for length in config.row_lengths}
    for i, examples in enumerate(stream):
        # Examples wait in a pool per row length until they fill a batch.
        for example in examples:
            size = len(example.prompt) + len(example.target)
            length = next((b for b in config.row_lengths if size <= b), None)
            if length is not None:
                pools[length].append(example)
        yield from shuffled(random.Random(i), list(_full(pools, config)))


def _full(pools: dict[int, list[Example]], config: Warmup) -> Iterator[PackedRows]:
    for length, pool in pools.items():
        count = config.tokens_per_step // length
        while len(pool) >= count:
            batch, _ = pack(pool[:count], count, length, prompt_weight=config.prompt_loss_weight)
            del pool[:count]
            yield batch


def optimizer(config: Warmup) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024) for matrices and Adam for the rest, with cosine decay."""
    total = sum(stage.steps for stage in config.stages)
    warmup = min(100, total // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, total, 0.0)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            adam_learning_rate=lambda step: 0.3 * schedule(step),
            adam_b2=0.98,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=0.2,
        ),
    )


def _matrices(params: Any) -> Any:
    """Returns the row and column axes of the stacked layer weights that are matrices."""
    axes = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ((1,), (2, 3))),
        "o_proj": ((1, 2), (3,)),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ((1,), (2,))),
    }

    def of(path: Any, _: Any) -> Any:
        name = next((n for n in axes if n in jax.tree_util.keystr(path)), None)
        return optax.contrib.MuonDimensionNumbers(*axes[name]) if name else None

    return jax.tree_util.tree_map_with_path(of, params)


def initial_model(config: Warmup, out: pathlib.Path) -> tuple[Decoder, ChatTokenizer]:
    """Returns the initial decoder and its tokenizer, which is saved in `out/tokenizer`."""
    if (config.model is None) == (not config.policy):
        raise UserError(
            "config has both or neither of model (sizes) and policy (a directory): set one of them"
        )
    if config.model is None:
        model, tokenizer = load_policy(config.policy)
    else:
        texts = world_texts(range(900_000, 900_006))
        tokenizer = ChatTokenizer(train_tokenizer(texts, config.model.vocab_size))
        model = fresh_model(config.model, config.seed)
    tokenizer.save(out / "tokenizer")
    return model, tokenizer


def fresh_model(config: DecoderConfig, seed: int) -> Decoder:
    """Returns a random decoder with equal query and key projections.

    Heads then attend to similar tokens from the start. Simplified from Trockman and Kolter 2023,
    "Mimetic initialization of self-attention layers".
    """
    model = Decoder(config, rngs=nnx.Rngs(seed))
    # With grouped-query attention the shapes differ.
    if config.num_heads == config.num_kv_heads:
        model.layers["k_proj"].set_value(jnp.array(model.layers["q_proj"][...]))
    return model


def exact_fraction(
    graph: Any, params: Any, examples: list[Example], length: int
) -> dict[str, float]:
    """Returns, by role, the fraction of targets of which every token is the most likely one.

    Args:
      graph: structure of the decoder.
      params: its parameters.
      examples: held-out examples.
      length: row length; longer examples are left out.
    """
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    fitting = [e for e in examples if len(e.prompt) + len(e.target) <= length]
    # Full chunks alone: a smaller one would compile a second program.
    for start in range(0, len(fitting) - 31, 32):
        chunk = fitting[start : start + 32]
        correct = _all_correct(graph, params, chunk, length)
        for example, is_correct in zip(chunk, correct, strict=True):
            hits[example.role].append(is_correct)
    return {role: round(float(np.mean(x)), 3) for role, x in sorted(hits.items())}


@functools.partial(jax.jit, static_argnames="graph")
def _token_correct(graph: Any, params: Any, batch: PackedRows) -> jax.Array:
    return token_losses(graph, params, batch)[1]


def _all_correct(graph: Any, params: Any, chunk: list[Example], length: int) -> list[bool]:
    rows = [pack([example], 1, length)[0] for example in chunk]
    batch = PackedRows(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))
    correct_RL = jax.device_get(_token_correct(graph, params, jax.device_put(batch)))
    return list(np.all(correct_RL | (batch.weight_RL[:, 1:] == 0), axis=1))


def warm_up(config: Warmup, task: WarmupTask, out: pathlib.Path) -> dict[str, Any]:
    """Trains a decoder, and writes `out/checkpoint` (Hugging Face layout) and `out/warmup.jsonl`.

    Args:
      config: the config.
      task: system, teacher and expander.
      out: the output directory.

    Returns:
      The last line of the log: step, tokens, seconds, means of the metrics since the previous line,
      and `exact`, the result of `exact_fraction` on held-out examples.

    Raises:
      UserError: parameters are no longer finite.
    """
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = initial_model(config, out)
    graph, params = nnx.split(model, nnx.Param)
    transform = optimizer(config)
    state = TrainState(params, transform.init(params))
    step = jax.jit(functools.partial(sft_step, graph, transform), donate_argnums=0)
    log = _Log(config, out / "warmup.jsonl")
    known_world = generate(config.known_world_seed)
    # The last world of the range in `example_stream`, too far for a stage to reach.
    held_out = world_examples(task, tokenizer, config.stages[-1], known_world, 999_999)
    for stage in config.stages:
        data = batches(example_stream(task, tokenizer, stage, known_world), config)
        for _, batch in zip(range(stage.steps), data, strict=False):
            state, metrics = step(state, jax.device_put(batch))
            log.step(batch, metrics)
            if log.due():
                log.write(exact_fraction(graph, state.params, held_out, config.row_lengths[-1]))
        log.check()  # a diverged model must not replace the previous checkpoint
        _save(nnx.merge(graph, state.params), out)
    return log.last


def _save(model: Decoder, out: pathlib.Path) -> None:
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    save_decoder(model, out / "checkpoint", out / "tokenizer", dtype="bfloat16")


class _Log:
    """The log: one JSON line every `log_every` steps, printed and written to a file."""

    def __init__(self, config: Warmup, file: pathlib.Path):
        self._every, self._file = config.log_every, file
        self._start, self._steps, self._tokens = time.perf_counter(), 0, 0
        self._recent: collections.deque[Any] = collections.deque(maxlen=config.log_every)
        self.last: dict[str, Any] = {}
        file.write_text("", encoding="utf-8")

    def step(self, batch: PackedRows, metrics: Any) -> None:
        self._steps += 1
        self._tokens += int(np.sum(batch.segments_RL > 0))
        self._recent.append(metrics)

    def due(self) -> bool:
        return self._steps % self._every == 0

    def check(self) -> None:
        """Raises `UserError` if parameters are not finite; once they are not, they remain so."""
        if self._recent:
            check_finite({"not_finite": float(self._recent[-1]["not_finite"])})

    def write(self, exact: dict[str, float]) -> None:
        self.check()
        # Fetched here only: a fetch per step would let the devices wait for the host.
        recent = jax.device_get(list(self._recent))
        names = sorted(recent[0].keys() - {"skipped", "not_finite"})
        means = {k: round(float(np.mean([m[k] for m in recent])), 4) for k in names}
        means["skipped"] = float(sum(m["skipped"] for m in recent))
        seconds = round(time.perf_counter() - self._start, 1)
        self.last = {"step": self._steps, "tokens": self._tokens, "seconds": seconds, **means}
        self.last["exact"] = exact
        print(json.dumps(self.last), flush=True)
        append_row(self._file, self.last)
