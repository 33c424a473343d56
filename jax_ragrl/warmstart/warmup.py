"""Supervised warm-up of a tiny decoder on the actions of a scripted teacher.

The examples of each step are a function of the config (`teacher_examples.py`), so that a warm-up
that was interrupted generates those of its unfinished stage again and continues bit-identically.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_ragrl.config.ranges import Count, Lengths, Natural, NotNegative, Positive, Seed
from jax_ragrl.config.schema import build
from jax_ragrl.corpus.world import World, generate
from jax_ragrl.errors import UserError
from jax_ragrl.learner.gradients import TrainState, check_finite
from jax_ragrl.learner.imitation import Example, PackedRows, pack, sft_step, token_losses
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.run.load import load_recipe
from jax_ragrl.run.models import load_policy
from jax_ragrl.runtime.jsonl import append_row, drop_after_step, last_row
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import train_tokenizer
from jax_ragrl.warmstart.teacher_examples import (
    Stage,
    WarmupTask,
    example_stream,
    teacher_of,
    three_strategies,
    world_examples,
)
from jax_ragrl.warmstart.unfinished import MODEL, claim_folder, open_unfinished, remove_unfinished

LOG = "warmup.jsonl"


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
      save_every: steps between checkpoints for resuming; 0: only at the end of each stage.
    """

    stages: tuple[Stage, ...]
    learning_rate: Positive
    model: DecoderConfig | None = None
    policy: str = ""
    seed: Seed = 0
    tokens_per_step: Count = 6144
    row_lengths: Lengths = (48, 80, 112, 144, 176, 224)
    prompt_loss_weight: NotNegative = 0.1
    log_every: Count = 50
    save_every: Natural = 50


def load_warmup(values: Mapping[str, Any]) -> tuple[Warmup, WarmupTask]:
    """Builds a warm-up and its task from a config; `system` and `recipe` are as in training."""
    values = dict(values)
    name = str(values.get("system"))
    recipe = load_recipe(values)
    expander = three_strategies if name == "c3po" else single_chain
    teacher = functools.partial(build, teacher_of(name), where="config.stages.teacher")
    return build(Warmup, values), WarmupTask(recipe.system, teacher, expander)


def batches(stream: Iterator[list[Example]], config: Warmup) -> Iterator[PackedRows]:
    """Yields batches of equal token count, each with rows of a single length."""
    # Examples wait in a pool per row length until they fill a batch.
    pools: dict[int, list[Example]] = {length: [] for length in config.row_lengths}
    for i, examples in enumerate(stream):
        for example in examples:
            size = len(example.prompt) + len(example.target)
            length = next((b for b in config.row_lengths if size <= b), None)
            if length is not None:
                pools[length].append(example)
        full = []
        for length, pool in pools.items():
            count = config.tokens_per_step // length
            while len(pool) >= count:
                own, weight = pool[:count], config.prompt_loss_weight
                full.append(pack(own, count, length, prompt_weight=weight)[0])
                del pool[:count]
        yield from shuffled(random.Random(i), full)


def initial_model(config: Warmup, out: pathlib.Path) -> tuple[Decoder, ChatTokenizer]:
    """Returns the initial decoder and its tokenizer, which is saved in `out/tokenizer`.

    A new decoder has equal query and key projections, so that heads attend to similar tokens from
    the start. Simplified from Trockman and Kolter 2023, "Mimetic initialization of self-attention
    layers".
    """
    sizes = config.model
    if (sizes is None) == (not config.policy):
        raise UserError(
            "config has both or neither of model (sizes) and policy (a directory): set one of them"
        )
    if sizes is None:
        model, tokenizer = load_policy(config.policy)
    else:
        worlds = [generate(seed, 400) for seed in range(900_000, 900_006)]
        texts = (
            text
            for world in worlds
            for text in (
                *(f"{p.title}: {p.text}" for p in world.passages),
                *(q.text for q in world.questions["train"]),
            )
        )
        tokenizer = ChatTokenizer(train_tokenizer(texts, sizes.vocab_size))
        model = Decoder(sizes, rngs=nnx.Rngs(config.seed))
        # With grouped-query attention the shapes differ.
        if sizes.num_heads == sizes.num_kv_heads:
            model.layers["k_proj"].set_value(jnp.array(model.layers["q_proj"][...]))
    tokenizer.save(out / "tokenizer")
    return model, tokenizer


def exact_fraction(
    graph: Any, params: Any, examples: list[Example], length: int
) -> dict[str, float]:
    """Returns by role the share of targets, up to `length`, all of whose tokens are most likely."""
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    fitting = [e for e in examples if len(e.prompt) + len(e.target) <= length]
    # Full chunks alone: a smaller one would compile a second program.
    for start in range(0, len(fitting) - 31, 32):
        chunk = fitting[start : start + 32]
        rows = [pack([example], 1, length)[0] for example in chunk]
        batch = PackedRows(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))
        correct_RL = jax.device_get(_token_correct(graph, params, jax.device_put(batch)))
        correct_R = np.all(correct_RL | (batch.weight_RL[:, 1:] == 0), axis=1)
        for example, is_correct in zip(chunk, correct_R, strict=True):
            hits[example.role].append(bool(is_correct))
    return {role: round(float(np.mean(x)), 3) for role, x in sorted(hits.items())}


@functools.partial(jax.jit, static_argnames="graph")
def _token_correct(graph: Any, params: Any, batch: PackedRows) -> jax.Array:
    return token_losses(graph, params, batch)[1]


class WarmupLog:
    """One JSON line every `every` steps, printed and written, with means over these steps."""

    def __init__(self, file: pathlib.Path, every: int, step: int, entries: Mapping[str, Any]):
        """Opens the log; lines of steps that are repeated are removed."""
        drop_after_step(file, step)
        self._file, self._every, self._step = file, every, step
        self._tokens = entries.get("tokens", 0)
        self._start = time.perf_counter() - entries.get("seconds", 0.0)
        # The dtype of the devices, in which the means are computed.
        recent = jax.tree.map(np.float32, entries.get("recent", []))
        self._recent: collections.deque[Any] = collections.deque(recent, maxlen=every)

    def add(self, batch: PackedRows, metrics: Any) -> None:
        self._step += 1
        self._tokens += int(np.sum(batch.segments_RL > 0))
        self._recent.append(metrics)

    def is_due(self) -> bool:
        """Whether the last step ends a line."""
        return self._step % self._every == 0

    def check(self) -> None:
        """Raises `UserError` if parameters are not finite; once they are not, they remain so."""
        if self._recent:
            check_finite({"not_finite": float(self._recent[-1]["not_finite"])})

    def entries(self) -> dict[str, Any]:
        """Returns the values from which a log continues; checks, since a checkpoint has them."""
        self.check()
        recent = jax.tree.map(float, jax.device_get(list(self._recent)))
        return {"tokens": self._tokens, "seconds": self._seconds(), "recent": recent}

    def write(self, exact: Mapping[str, float]) -> None:
        """Writes a line; raises `UserError` if parameters are not finite."""
        self.check()
        # Fetched here only: a fetch per step would let the devices wait for the host.
        recent = jax.device_get(list(self._recent))
        names = sorted(recent[0].keys() - {"skipped", "not_finite"})
        means = {k: round(float(np.mean([m[k] for m in recent])), 4) for k in names}
        means["skipped"] = float(sum(m["skipped"] for m in recent))
        line = {"step": self._step, "tokens": self._tokens, "seconds": self._seconds()}
        line |= {**means, "exact": exact}
        print(json.dumps(line), flush=True)
        append_row(self._file, line)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._start, 1)


def muon(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024) for matrices and Adam for the rest, with cosine decay.

    The peak learning rate is reached after a tenth of the steps, at most 100.
    """
    warmup = min(100, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps, 0.0)
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


def warm_up(values: Mapping[str, Any], out: pathlib.Path) -> dict[str, Any]:
    """Trains a decoder; the same call resumes an interrupted warm-up, and trains no finished one.

    Writes `out/checkpoint` (Hugging Face layout) and `out/warmup.jsonl`. Returns the last line of
    the log: step, tokens, seconds, means of the metrics since the previous line, and `exact`, the
    result of `exact_fraction` on held-out examples.

    Raises:
      UserError: parameters are no longer finite, or `out` holds results of another config.
      Preempted: the process received SIGTERM; the last step is saved.
    """
    config, task = load_warmup(values)
    claim_folder(values, out)
    if not (out / MODEL).exists():
        model = _train(config, task, out)
        save_decoder(model, out / MODEL, out / "tokenizer", dtype="bfloat16")
    remove_unfinished(out)
    return last_row(out / LOG)


def _train(config: Warmup, task: WarmupTask, out: pathlib.Path) -> Decoder:
    model, tokenizer = initial_model(config, out)
    graph, params = nnx.split(model, nnx.Param)
    ends = list(itertools.accumulate(stage.steps for stage in config.stages))
    transform = muon(config.learning_rate, ends[-1])
    take_step = jax.jit(functools.partial(sft_step, graph, transform), donate_argnums=0)
    known_world = generate(0)  # whose famous facts are learned
    # The last world of the range in `example_stream`, too far for a stage to reach.
    held_out = world_examples(task, tokenizer, config.stages[-1], known_world, 999_999)
    with open_unfinished(out, config.save_every) as unfinished:
        start, state, entries = unfinished.restore(TrainState(params, transform.init(params)))
        log = WarmupLog(out / LOG, config.log_every, start, entries)
        data = batches_after(start, config, task, tokenizer, known_world)
        for step, batch in enumerate(data, start + 1):
            state, metrics = take_step(state, jax.device_put(batch))
            log.add(batch, metrics)
            if log.is_due():
                log.write(exact_fraction(graph, state.params, held_out, config.row_lengths[-1]))
            # The entries check the parameters: a diverged model must not replace a checkpoint.
            unfinished.end_step(step, state, log.entries, is_milestone=step in ends)
    return nnx.merge(graph, state.params)


def batches_after(
    step: int, config: Warmup, task: WarmupTask, tokenizer: ChatTokenizer, known_world: World
) -> Iterator[PackedRows]:
    """Yields the batches of all steps after the first ones, generating those of a stage again."""
    for stage in config.stages:
        if step < stage.steps:
            data = batches(example_stream(task, tokenizer, stage, known_world), config)
            yield from itertools.islice(data, step, stage.steps)
        step = max(step - stage.steps, 0)
