"""The warm start: a tiny decoder learns its roles from a teacher, by supervised fine-tuning.

Two kinds of stages on one code path. *Skills*: the teacher's careful rollouts in many generated
worlds, with few passages a search at first. *Rejection sampling* (Chen et al. 2025, section 5.2):
the careless teacher's trees, of which only actions on the way to a right answer are kept.

Beside the proxy's roles the decoder learns those of a frozen language model (`reader_rows.py`):
to write a roadmap, to answer from documents, and the famous facts of one world by heart.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
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
from jax_ragrl.learner.imitation import Example, Packed, pack, sft_step, token_losses
from jax_ragrl.llm.executors import WorldExecutors, query_of
from jax_ragrl.llm.reader import understand
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.lexical import LexicalEncoder
from jax_ragrl.retrieval.scann import ScannSearcher
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Expander, Forced, once
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.components import load_policy
from jax_ragrl.run.config import load_recipe
from jax_ragrl.runtime.jsonl import append
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.systems.c3po import NO_RETRIEVAL, PLANNING, RETRIEVAL, ROUTER, render_router
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import train_tokenizer
from jax_ragrl.warmstart.reader_rows import Listener, careful_reader, fact_rows, reading_rows
from jax_ragrl.warmstart.teachers import c3po, coda, mao_arag, mmoa_rag, opera
from jax_ragrl.warmstart.teachers.base import TeacherSampler, Writer


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the warm-up: how long, from which teacher, with how many passages a search.

    `teacher` are settings of the system's teacher. `passages` are cycled through from world to
    world. `only_correct` keeps the actions that lead to a right answer (rejection sampling).
    `facts` are asked of the known world beside each world, and chains have as many `hops`.
    """

    steps: int
    teacher: Mapping[str, Any]
    passages: tuple[int, ...]
    worlds_from: int
    only_correct: bool = False
    questions: int = 120
    facts: int = 80
    hops: tuple[int, ...] = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Warmup:
    """The whole warm-up. `tokens` a step are split over rows of the bucket lengths.

    It begins with a fresh `model`, or with the one in the folder `start`. `known_world` is the seed
    of the world whose famous facts are learnt by heart.
    """

    stages: tuple[Stage, ...]
    learning_rate: float
    model: DecoderConfig | None = None
    start: str = ""
    seed: int = 0
    tokens: int = 6144
    buckets: tuple[int, ...] = (48, 80, 112, 144, 176, 224)
    prompt_weight: float = 0.1
    log_every: int = 50
    known_world: int = 0


class Lesson(NamedTuple):
    """What is taught: a system, whose settings make its teacher, and how its rollouts branch."""

    system: Any
    teacher: Callable[[Mapping[str, Any]], Writer]
    expander: Expander


TEACHERS: Mapping[str, type] = {
    "c3po": c3po.Teacher,
    "coda": coda.Teacher,
    "jax_ragrl.systems.baselines.executor": coda.Teacher,
    "mao_arag": mao_arag.Teacher,
    "mmoa_rag": mmoa_rag.Teacher,
    "opera": opera.Teacher,
}


def load_warmup(values: Mapping[str, Any]) -> tuple[Warmup, Lesson]:
    """A warm-up and its lesson from a config, whose `system` and `recipe` are as in training."""
    values = dict(values)
    name = str(values.get("system"))
    recipe = load_recipe(values)
    if name not in TEACHERS:
        raise UserError(f"config.system is {name!r}: it has no teacher, use {', '.join(TEACHERS)}")
    expander = three_strategies if name == "c3po" else once
    teacher = functools.partial(build, TEACHERS[name], where="config.stages.teacher")
    return build(Warmup, values), Lesson(recipe.system, teacher, expander)


def world_texts(seeds: range) -> Iterator[str]:
    """Passages and questions to train the tokenizer on."""
    for seed in seeds:
        world = generate(seed, 400)
        yield from (f"{p.title}: {p.text}" for p in world.passages)
        yield from (q.text for q in world.questions["train"])


def search_world(world: World) -> DenseRetriever:
    """The lexical ScaNN index of a world, in memory."""
    corpus = Corpus(world.passages)
    encoder = LexicalEncoder.fit(corpus.passages)
    searcher = ScannSearcher.from_vectors(encoder.encode_passages(corpus.passages))
    return DenseRetriever(corpus, encoder, searcher)


def three_strategies(effect: Generate, question: str) -> Branching:
    """Every strategy at the router, one action elsewhere."""
    plan = understand(question)
    if effect.role != ROUTER or plan is None:
        return Branching(1)
    actions = ((NO_RETRIEVAL, ""), (RETRIEVAL, query_of(plan)), (PLANNING, ""))
    return Branching(0, tuple(Forced(render_router(*action)) for action in actions))


def teach(
    lesson: Lesson, tokenizer: ChatTokenizer, stage: Stage, known: World, number: int
) -> list[Example]:
    """The rows of one world of a stage: a function of the stage and the world's number."""
    seed = stage.worlds_from + number
    world = generate(seed, 120 + 40 * (number % 5), hops=stage.hops)
    rng = random.Random(seed)
    questions = shuffled(rng, world.questions["train"])[: stage.questions]
    shown = stage.passages[number % len(stage.passages)]
    system = dataclasses.replace(lesson.system, top_k=shown)
    llm = Listener(WorldExecutors(world, style=system.style))
    sampler = TeacherSampler(lesson.teacher(stage.teacher), tokenizer)
    environment = Environment(sampler, search_world(world), llm)
    forest = collect(system, lesson.expander, questions, environment, seed=seed)
    forest = forest._replace(reward_N=answer_rewards(forest, cover_match))
    reader = careful_reader(world, system.style)
    taught = rows(forest, rng, stage.only_correct)
    taught += reading_rows(llm.heard, reader, tokenizer, rng)
    taught += fact_rows(known, system.style, tokenizer, rng, stage.facts)
    return shuffled(rng, taught)


def rows(forest: Forest, rng: random.Random, only_correct: bool) -> list[Example]:
    """The actions of a forest as supervised rows; of the router's, the short ones are thinned."""
    useful_N = np.ones(len(forest.records), bool)
    if only_correct:
        useful_N = reachable_leaves(forest, forest.reward_N)[0] > 0  # some leaf below was right
    examples = []
    for record, useful in zip(forest.records, useful_N, strict=True):
        if record.action is None or not useful:
            continue
        trivial = record.role == ROUTER and not record.action.text.startswith(f"[{RETRIEVAL}]")
        if only_correct or not trivial or rng.random() < 0.3:
            examples.append(Example(record.action.prompt_ids, record.action.ids, record.role))
    return examples


def world_rows(
    lesson: Lesson, tokenizer: ChatTokenizer, stage: Stage, known: World
) -> Iterator[list[Example]]:
    """Rows world by world, made ahead by Grain's threads."""
    worlds = grain.MapDataset.range(1_000_000)
    taught = worlds.map(functools.partial(teach, lesson, tokenizer, stage, known))
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(taught.to_iter_dataset(options))


def batches(taught: Iterator[list[Example]], config: Warmup) -> Iterator[Packed]:
    """Batches of equal token count; a batch holds rows of one bucket length."""
    pools: dict[int, list[Example]] = {length: [] for length in config.buckets}
    for i, examples in enumerate(taught):
        for example in examples:
            size = len(example.prompt) + len(example.target)
            length = next((b for b in config.buckets if size <= b), None)
            if length is not None:
                pools[length].append(example)
        yield from shuffled(random.Random(i), list(_full(pools, config)))


def _full(pools: dict[int, list[Example]], config: Warmup) -> Iterator[Packed]:
    for length, pool in pools.items():
        count = config.tokens // length
        while len(pool) >= count:
            batch, _ = pack(pool[:count], count, length, prompt_weight=config.prompt_weight)
            del pool[:count]
            yield batch


def optimizer(config: Warmup) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices, Adam for the rest; warm-up and cosine."""
    total = sum(stage.steps for stage in config.stages)
    rise = min(100, total // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, rise, total, 0.0)
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
    """Which axes of the stacked layer weights are the rows and columns of a matrix."""
    axes = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ((1,), (2, 3))),
        "o_proj": ((1, 2), (3,)),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ((1,), (2,))),
    }

    def of(path: Any, _: Any) -> Any:
        name = next((n for n in axes if n in jax.tree_util.keystr(path)), None)
        return optax.contrib.MuonDimensionNumbers(*axes[name]) if name else None

    return jax.tree_util.tree_map_with_path(of, params)


def first_model(config: Warmup, out: pathlib.Path) -> tuple[Decoder, ChatTokenizer]:
    """What a warm-up begins with; the tokenizer is saved in `out/tokenizer`."""
    if (config.model is None) == (not config.start):
        raise UserError("config: a warm-up needs one of model (sizes) and start (a folder)")
    if config.model is None:
        model, tokenizer = load_policy(config.start)
    else:
        texts = world_texts(range(900_000, 900_006))
        tokenizer = ChatTokenizer(train_tokenizer(texts, config.model.vocab_size))
        model = fresh_model(config.model, config.seed)
    tokenizer.save(out / "tokenizer")
    return model, tokenizer


def fresh_model(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder whose keys begin as its queries: heads look for like tokens from the start.

    Trockman and Kolter 2023, "Mimetic initialization of self-attention layers", simplified.
    """
    model = Decoder(config, rngs=nnx.Rngs(seed))
    if config.num_heads == config.num_kv_heads:
        model.layers["k_proj"].set_value(jnp.array(model.layers["q_proj"][...]))
    return model


def exact_share(graph: Any, params: Any, examples: list[Example], length: int) -> dict[str, float]:
    """The share of held-out targets, by role, of which every token is the likeliest."""
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    fitting = [e for e in examples if len(e.prompt) + len(e.target) <= length]
    for start in range(0, len(fitting) - 31, 32):
        chunk = fitting[start : start + 32]
        for example, right in zip(chunk, _all_right(graph, params, chunk, length), strict=True):
            hits[example.role].append(right)
    return {role: round(float(np.mean(right)), 3) for role, right in sorted(hits.items())}


@functools.partial(jax.jit, static_argnames="graph")
def _right(graph: Any, params: Any, batch: Packed) -> jax.Array:
    return token_losses(graph, params, batch)[1]


def _all_right(graph: Any, params: Any, chunk: list[Example], length: int) -> list[bool]:
    packed = [pack([example], 1, length)[0] for example in chunk]
    batch = Packed(*(np.concatenate(arrays) for arrays in zip(*packed, strict=True)))
    right_RL = jax.device_get(_right(graph, params, jax.device_put(batch)))
    return list(np.all(right_RL | (batch.weight_RL[:, 1:] == 0), axis=1))


def warm_up(config: Warmup, lesson: Lesson, out: pathlib.Path) -> dict[str, Any]:
    """Trains a model: `out/checkpoint` (Hugging Face layout) and `out/warmup.jsonl`.

    Returns the last line of the curve: step, tokens, seconds, loss, token accuracy, and the share
    of held-out targets that come out whole, by role.
    """
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = first_model(config, out)
    graph, params = nnx.split(model, nnx.Param)
    transform = optimizer(config)
    state = transform.init(params)
    step = jax.jit(functools.partial(sft_step, graph, transform), donate_argnums=(0, 1))
    log = _Log(config, out / "warmup.jsonl")
    known = generate(config.known_world)
    held_out = teach(lesson, tokenizer, config.stages[-1], known, 999_999)
    for stage in config.stages:
        data = batches(world_rows(lesson, tokenizer, stage, known), config)
        for _, batch in zip(range(stage.steps), data, strict=False):
            params, state, metrics = step(params, state, jax.device_put(batch))
            log.step(batch, metrics)
            if log.due():
                log.write(exact_share(graph, params, held_out, config.buckets[-1]))
        _save(nnx.merge(graph, params), out)
    return log.last


def _save(model: Decoder, out: pathlib.Path) -> None:
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    save_decoder(model, out / "checkpoint", out / "tokenizer", dtype="bfloat16")


class _Log:
    """The curve: one JSON line every `log_every` steps, printed and kept."""

    def __init__(self, config: Warmup, file: pathlib.Path):
        self._every, self._file = config.log_every, file
        self._start, self._steps, self._tokens = time.perf_counter(), 0, 0
        self._recent: collections.deque[Any] = collections.deque(maxlen=config.log_every)
        self.last: dict[str, Any] = {}
        file.write_text("", encoding="utf-8")

    def step(self, batch: Packed, metrics: Any) -> None:
        self._steps += 1
        self._tokens += int(np.sum(batch.segments_RL > 0))
        self._recent.append(metrics)

    def due(self) -> bool:
        return self._steps % self._every == 0

    def write(self, exact: dict[str, float]) -> None:
        recent = jax.device_get(list(self._recent))
        means = {k: round(float(np.mean([m[k] for m in recent])), 4) for k in recent[0]}
        seconds = round(time.perf_counter() - self._start, 1)
        self.last = {"step": self._steps, "tokens": self._tokens, "seconds": seconds, **means}
        self.last["exact"] = exact
        print(json.dumps(self.last), flush=True)
        append(self._file, self.last)
