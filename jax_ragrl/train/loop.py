"""The training loop: ask, roll out, credit, batch, update, log, save, evaluate."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import time
from typing import Any

import jax
import numpy as np
import tensorboardX
from flax import nnx
from tqdm import tqdm

from jax_ragrl.batch import groups_of
from jax_ragrl.corpus.questions import question_batches
from jax_ragrl.credit.returns import monte_carlo
from jax_ragrl.errors import UserError
from jax_ragrl.evaluate import Result, evaluate
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.trace import trees
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.train.assemble import Job, Parts, TreeShape
from jax_ragrl.train.checkpoint import Checkpoints
from jax_ragrl.train.trainer import Models, Trainer, acting, prepare
from jax_ragrl.train.update import update
from jax_ragrl.types import Question


def train(job: Job, parts: Parts, workdir: pathlib.Path) -> tuple[Trainer, Models]:
    """Trains to `job.run.steps` updates, from the newest checkpoint of `workdir` where one is."""
    roles = tuple(job.system.roles)
    trainer, models = prepare(
        *(parts.policy, job.objective, job.optimizer, job.layout, roles),
        *(job.system.temperature, job.run.steps),
    )
    data = question_batches(parts.questions["train"], job.run.questions, job.seed)
    checkpoints = Checkpoints(workdir)
    start = checkpoints.latest() or 0
    if start:
        models, meta = checkpoints.restore(start, models)
        data.set_state(meta["data"])
    log = Log(workdir, start, job.run.steps)
    for step in range(start, job.run.steps):
        questions = next(data)
        clock = Clock()
        forest = roll_out(job, parts, trainer, models, questions, step)
        credit_N, weight_N = credit(forest, job.tree)
        clock.lap("time/rollout_s")
        groups = groups_of(forest, weight_N, job.layout, forced=job.tree.train_forced)
        rng = random.Random(f"{job.seed} {step}")
        models, metrics = update(trainer, models, groups, credit_N, sampled_logps(forest), rng)
        clock.lap("time/train_s")
        metrics |= describe(forest, credit_N) | clock.laps
        tokens = sum(group.size() for group in groups)
        metrics["tokens_per_sec"] = tokens / clock.laps["time/train_s"]
        if (step + 1) % job.run.eval_every == 0 or step + 1 == job.run.steps:
            metrics |= dev_metrics(job, parts, trainer, models)
        known_N = np.where(weight_N > 0, credit_N, np.nan)
        shown = step % job.run.trees_every == 0
        drawn = trees(forest, known_N, job.run.trees) if shown else None
        log.write(step + 1, metrics, drawn)
        if (step + 1) % job.run.save_every == 0 or step + 1 == job.run.steps:
            checkpoints.save(step + 1, models, {"data": data.get_state()})
    checkpoints.close()
    log.close()
    return trainer, models


def trained_policy(job: Job, parts: Parts, workdir: pathlib.Path) -> Decoder:
    """The policy of the newest checkpoint; `UserError` where there is none."""
    roles, steps = tuple(job.system.roles), job.run.steps
    trainer, models = prepare(
        *(parts.policy, job.objective, job.optimizer, job.layout, roles),
        *(job.system.temperature, steps),
    )
    checkpoints = Checkpoints(workdir)
    newest = checkpoints.latest()
    if newest is None:
        raise UserError(f"{checkpoints.folder} holds no checkpoint: run 'ragrl train' first")
    models, _ = checkpoints.restore(newest, models)
    return nnx.merge(*acting(trainer, models))


def roll_out(
    job: Job, parts: Parts, trainer: Trainer, models: Models, questions: list[Question], step: int
) -> Forest:
    """The trees of a batch under the current policy."""
    policy = PolicySampler(*acting(trainer, models), parts.tokenizer, job.shapes)
    environment = Environment(policy, parts.retriever, parts.llm)
    seed = job.seed * 1_000_003 + step
    expander = job.tree.expander()
    return collect(job.system, expander, questions, environment, seed=seed, reward=answer_reward)


def answer_reward(question: Question, answer: str | None) -> float:
    """1 where the answer covers a gold one, else 0; a dead leaf is 0."""
    return 0.0 if answer is None else cover_match(answer, question.answers)


def credit(forest: Forest, shape: TreeShape) -> tuple[np.ndarray, np.ndarray]:
    """Monte Carlo credit of every node and the leaves it rests on, float32 `[N]` each."""
    if shape.dead_leaf not in ("zero", "ignore"):
        raise UserError(f"tree.dead_leaf is {shape.dead_leaf!r}: it must be zero or ignore")
    counted_N = forest.leaf_N & ~(forest.dead_N & (shape.dead_leaf == "ignore"))
    weight_N = forest.multiplicity_N if shape.multiplicity else np.ones_like(forest.parent_N)
    arrays = (forest.parent_N, counted_N, forest.reward_N, weight_N.astype(np.float32))
    count = len(forest.parent_N)
    size = -(-count // 512) * 512  # few compiled shapes: padding nodes are roots and no leaves
    fills: tuple[Any, ...] = (-1, False, 0.0, 0.0)
    padded = [
        np.pad(x, (0, size - count), constant_values=fill)
        for x, fill in zip(arrays, fills, strict=True)
    ]
    value_N, leaves_N = jax.device_get(_monte_carlo(*jax.device_put(padded)))
    return value_N[:count], leaves_N[:count]


_monte_carlo = jax.jit(monte_carlo)


def sampled_logps(forest: Forest) -> dict[int, tuple[float, ...]]:
    """The sampler's own log-probabilities by node, where there are any."""
    return {
        node: record.action.logps
        for node, record in enumerate(forest.records)
        if record.action is not None and record.action.logps
    }


def describe(forest: Forest, credit_N: np.ndarray) -> dict[str, float]:
    """What a rollout was like: rewards, malformed shares by role, size."""
    leaves = np.flatnonzero(forest.leaf_N)
    metrics = {
        "reward/mean": float(forest.reward_N[leaves].mean()) if len(leaves) else 0.0,
        "nodes": float(len(forest.records) - len(leaves)),
        "leaves": float(len(leaves)),
        "failed": float(len(forest.failed)),
        "retrieval/recall": found_gold(forest),
    }
    dead = {int(forest.parent_N[i]) for i in leaves if forest.dead_N[i]}
    for role in sorted({r.role for r in forest.records if r.action is not None}):
        nodes = [i for i, r in enumerate(forest.records) if r.role == role]
        metrics[f"valid_frac/{role}"] = 1 - sum(i in dead for i in nodes) / len(nodes)
        metrics[f"credit/{role}"] = float(credit_N[nodes].mean())
    for i in leaves:
        if forest.dead_N[i]:
            name = f"dead/{forest.records[i].why}"
            metrics[name] = metrics.get(name, 0.0) + 1
    return metrics


def found_gold(forest: Forest) -> float:
    """The mean share of a question's gold passages that some search of its tree returned."""
    found: dict[int, set[str]] = {}
    for record in forest.records:
        seen = getattr(record.state, "candidates", ())
        found.setdefault(record.question, set()).update(p.id for p in seen)
    shares = [
        len(found.get(i, set()).intersection(question.gold)) / len(question.gold)
        for i, question in enumerate(forest.questions)
        if question.gold and i not in forest.failed
    ]
    return float(np.mean(shares)) if shares else 0.0


def evaluate_policy(
    job: Job, parts: Parts, graph: Any, params: Any, questions: tuple[Question, ...]
) -> Result:
    """The inference algorithm: greedy, one path, indices out of range skipped."""
    policy = PolicySampler(graph, params, parts.tokenizer, job.shapes, greedy=True)
    system = dataclasses.replace(job.system, strict=False)
    return evaluate(system, questions, policy, parts.retriever, parts.llm)


def dev_metrics(job: Job, parts: Parts, trainer: Trainer, models: Models) -> dict[str, float]:
    """Accuracy and strategy shares on the first dev questions."""
    questions = parts.questions["dev"][: job.run.dev_questions]
    result = evaluate_policy(job, parts, *acting(trainer, models), questions)
    shares = {f"strategy/{k}": n / len(questions) for k, n in result.strategies.items()}
    return {"eval/accuracy": result.mean(), **shares}


class Clock:
    """Wall time between laps, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends a lap."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


class Log:
    """Metrics of each step: one line, a JSON row, TensorBoard; trees for the report.

    What a killed run wrote after its last checkpoint is dropped first, so a resumed run's files
    hold each step once.
    """

    SHOWN = ("reward/mean", "kl/mean", "entropy", "clip_frac", "eval/accuracy")

    def __init__(self, workdir: pathlib.Path, start: int, steps: int):
        self._metrics, self._trees = workdir / "metrics.jsonl", workdir / "trees.jsonl"
        for file in (self._metrics, self._trees):
            _keep_until(file, start)
        self._board = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=start + 1 if start else None
        )
        self._bar = tqdm(total=steps, initial=start, desc="train", unit="step")

    def write(
        self, step: int, metrics: dict[str, float], trees: list[dict[str, Any]] | None
    ) -> None:
        """Writes one step everywhere."""
        row = {"step": step, **{k: round(float(v), 6) for k, v in sorted(metrics.items())}}
        _append(self._metrics, row)
        if trees is not None:
            _append(self._trees, {"step": step, "trees": trees})
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        shown = " ".join(f"{k} {metrics[k]:.3f}" for k in self.SHOWN if k in metrics)
        seconds = metrics["time/rollout_s"] + metrics["time/train_s"]
        self._bar.write(f"step {step} {shown} {seconds:.1f}s")
        self._bar.update()

    def close(self) -> None:
        """Closes the files."""
        self._bar.close()
        self._board.close()


def _append(file: pathlib.Path, row: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def _keep_until(file: pathlib.Path, step: int) -> None:
    """Drops rows after `step`, a torn last line among them."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        kept += [line] if row["step"] <= step else []
    file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
