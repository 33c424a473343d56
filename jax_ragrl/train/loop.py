"""The training loop: ask, roll out, credit, batch, update, log, save, evaluate."""

from __future__ import annotations

import collections
import json
import pathlib
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorboardX
from flax import nnx
from tqdm import tqdm

from jax_ragrl.batch import turns_of
from jax_ragrl.corpus.questions import question_batches
from jax_ragrl.errors import UserError
from jax_ragrl.evaluate import Result, evaluate
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import Expander, once
from jax_ragrl.rollout.policy import Models as SamplerModels
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.trace import transcript, trees
from jax_ragrl.rollout.tree import LEAF, Forest, decisions
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.train.assemble import Job, Parts
from jax_ragrl.train.checkpoint import Checkpoints
from jax_ragrl.train.dpo import pairs_of, prefer_all
from jax_ragrl.train.policies import Policies, entered, refreshed, update_all, with_kl
from jax_ragrl.train.trainer import Models, acting, prepare
from jax_ragrl.types import Question


def train(job: Job, parts: Parts, workdir: pathlib.Path) -> Policies:
    """Trains to `job.run.steps` updates, from the newest checkpoint of `workdir` where one is."""
    policies = begin(job, parts)
    data = question_batches(parts.questions["train"], job.run.questions, job.seed)
    checkpoints = Checkpoints(workdir)
    start = checkpoints.latest() or 0
    if start:
        policies, meta = resumed(checkpoints, start, policies)
        data.set_state(meta["data"])
    log = Log(workdir, start, job.run.steps)
    for step in range(start, job.run.steps):
        questions = next(data)
        clock = Clock()
        if job.schedule.begins(step):
            policies = refreshed(policies)
        if step == start or job.schedule.begins(step):
            policies = enter(job, policies, step)
        roles = job.schedule.roles(step, tuple(job.policy_of))
        forest = roll_out(job, parts, policies, questions, roles, step)
        credit_N, weight_N = job.recipe.credit(forest, forest.reward_N)
        known_N = np.where(weight_N > 0, credit_N, np.nan)
        clock.lap("time/rollout_s")
        turns = turns_of(forest, weight_N, forced=job.train_forced)
        rng, sampled = random.Random(f"{job.seed} {step}"), sampled_logps(forest)
        if job.preference is None:
            policies, metrics = update_all(
                policies, job.policy_of, roles, turns, credit_N, sampled, rng
            )
        else:
            pairs = pairs_of(forest, credit_N, roles, job.preference.margin)
            policies, metrics = prefer_all(policies, job.policy_of, pairs, job.preference.beta, rng)
        clock.lap("time/train_s")
        metrics |= describe(forest, known_N) | clock.laps
        metrics |= expert_shares(forest, job.recipe.expander(frozenset(roles)), roles)
        tokens = sum(len(turn.context()) for turn in turns if turn.role in roles)
        metrics["tokens_per_sec"] = tokens / clock.laps["time/train_s"]
        if (step + 1) % job.run.eval_every == 0 or step + 1 == job.run.steps:
            metrics |= dev_metrics(job, parts, policies)
        shown = step % job.run.trees_every == 0 or step + 1 == job.run.steps
        drawn = trees(forest, known_N, job.run.trees) if shown else None
        log.write(step + 1, metrics, drawn)
        if (step + 1) % job.run.save_every == 0 or step + 1 == job.run.steps:
            checkpoints.save(step + 1, trained_state(policies), {"data": data.get_state()})
    checkpoints.close()
    log.close()
    return policies


def begin(job: Job, parts: Parts) -> Policies:
    """The trainers of a run and their models before the first update, by policy."""
    roles = tuple(job.policy_of)
    policies, allowed_ZV = {}, allowed_tokens(job, parts.tokenizer)
    for name, decoder in parts.policies.items():
        updates = updates_of(job, name)
        choices = (job.objective, job.optimizer, job.layout, roles, job.temperature, updates)
        policies[name] = prepare(
            decoder, *choices, compute=job.compute, remat=job.remat, allowed_ZV=allowed_ZV
        )
    return policies


def updates_of(job: Job, policy: str) -> int:
    """In how many steps of a run a policy is trained."""
    own = [role for role, name in job.policy_of.items() if name == policy]
    return job.schedule.updates(job.run.steps, tuple(job.policy_of), own)


def enter(job: Job, policies: Policies, step: int) -> Policies:
    """The policies as the phase of a step trains them: its rate, and from its first step its KL."""
    phase = job.schedule.at(step)
    if phase is None:
        return policies
    if any(p.policy_lr for p in job.schedule.phases):
        updates = {name: updates_of(job, name) for name in policies}
        policies = entered(policies, phase, job.optimizer, updates)
    if any(p.kl for p in job.schedule.phases) and (step == 0 or job.schedule.begins(step)):
        policies = with_kl(policies, phase.kl or job.objective.kl.coefficient)
    return policies


def allowed_tokens(job: Job, tokenizer: ChatTokenizer) -> np.ndarray | None:
    """What each role's grammar lets it write, bool `[Z, V]`; None where no role has a mask."""
    patterns = [role.tokens for role in job.recipe.system.roles.values()]
    if not any(patterns):
        return None
    masks = [tokenizer.allowed(pattern) for pattern in patterns]
    return np.stack([np.ones(len(tokenizer), bool) if mask is None else mask for mask in masks])


def trained_state(policies: Policies) -> dict[str, Models]:
    """What an update changes, by policy: what a checkpoint holds."""
    return {name: models for name, (_, models) in policies.items()}


def resumed(
    checkpoints: Checkpoints, step: int, policies: Policies
) -> tuple[Policies, dict[str, Any]]:
    """The policies as they were after a step, and what else was saved."""
    state, meta = checkpoints.restore(step, trained_state(policies))
    return {name: (trainer, state[name]) for name, (trainer, _) in policies.items()}, meta


def acting_models(policies: Policies) -> dict[str, tuple[Any, Any]]:
    """The policies as a sampler takes them."""
    return {name: acting(trainer, models) for name, (trainer, models) in policies.items()}


def trained_policies(job: Job, parts: Parts, workdir: pathlib.Path) -> dict[str, Decoder]:
    """The policies of the newest checkpoint; `UserError` where there is none."""
    checkpoints = Checkpoints(workdir)
    newest = checkpoints.latest()
    if newest is None:
        raise UserError(f"{checkpoints.folder} holds no checkpoint: run 'ragrl train' first")
    policies, _ = resumed(checkpoints, newest, begin(job, parts))
    return {name: nnx.merge(*split) for name, split in acting_models(policies).items()}


def roll_out(
    job: Job,
    parts: Parts,
    policies: Policies,
    questions: list[Question],
    roles: Sequence[str],
    step: int,
) -> Forest:
    """The rollouts of a batch under the current policies, with what each node earned."""
    sampler = PolicySampler(acting_models(policies), parts.tokenizer, job.shapes)
    recipe = job.recipe
    forest = collect(
        recipe.system,
        recipe.expander(frozenset(roles)),
        questions,
        parts.environment(sampler),
        seed=job.seed * 1_000_003 + step,
        rollouts=recipe.rollouts,
    )
    return forest._replace(reward_N=recipe.reward(forest))


def sampled_logps(forest: Forest) -> dict[int, tuple[float, ...]]:
    """The sampler's own log-probabilities by node, where there are any."""
    return {
        node: record.action.logps
        for node, record in enumerate(forest.records)
        if record.action is not None and record.action.logps
    }


def describe(forest: Forest, known_N: np.ndarray) -> dict[str, float]:
    """What a rollout was like: rewards, size, the credit of each role's trained actions (`known_N`,
    nan elsewhere), and the valid share of what it sampled.
    """
    leaves = np.flatnonzero(forest.leaf_N)
    metrics = {
        "reward/mean": float(forest.reward_N[leaves].mean()) if len(leaves) else 0.0,
        "nodes": float(len(forest.records) - len(leaves)),
        "leaves": float(len(leaves)),
        "failed": float(len(forest.failed)),
        "retrieval/recall": found_gold(forest),
        "zero_variance_frac": zero_variance(forest),
    }
    fatal = {int(forest.parent_N[i]) for i in leaves if forest.records[i].fault}
    for role in sorted({r.role for r in forest.records if r.action is not None}):
        nodes = [i for i, r in enumerate(forest.records) if r.role == role]
        if np.isfinite(known_N[nodes]).any():
            metrics[f"credit/{role}"] = float(np.nanmean(known_N[nodes]))
        sampled = forest.multiplicity_N[nodes] - forest.forced_N[nodes]
        if sampled.any():
            valid = [i not in fatal and forest.records[i].fault == "" for i in nodes]
            metrics[f"valid_frac/{role}"] = float(np.average(valid, weights=sampled))
    return metrics | counts(forest) | strategy_rewards(forest)


def expert_shares(forest: Forest, expander: Expander, roles: Sequence[str]) -> dict[str, float]:
    """The share of each trained role's decisions that hold an expert's action, where the expander
    asks an expert: how many questions or sub-goals it knew nothing of is not seen otherwise."""
    if getattr(expander, "expert", None) is None:
        return {}
    held: dict[str, list[bool]] = {}
    for nodes in decisions(forest):
        known = bool(forest.forced_N[nodes].any())
        held.setdefault(forest.records[nodes[0]].role, []).append(known)
    return {f"expert_frac/{role}": float(np.mean(held[role])) for role in roles if role in held}


def zero_variance(forest: Forest) -> float:
    """The share of questions whose leaves all earned the same: of those no group learns."""
    earned: dict[int, set[float]] = {}
    for i in np.flatnonzero(forest.leaf_N).tolist():
        earned.setdefault(int(forest.question_N[i]), set()).add(float(forest.reward_N[i]))
    return float(np.mean([len(rewards) == 1 for rewards in earned.values()])) if earned else 0.0


def counts(forest: Forest) -> dict[str, float]:
    """How often what went wrong: `dead/<why>` and `malformed/<error>`, actions as often as they
    were written, and on leaves what their states put right."""
    seen: collections.Counter[str] = collections.Counter()
    for record in forest.records:
        if record.role == LEAF:
            seen.update(f"malformed/{fault}" for fault in getattr(record.state, "faults", ()))
            seen[f"dead/{record.why}"] += record.answer is None
        elif record.fault:
            seen[f"malformed/{record.fault}"] += record.multiplicity
    return {name: float(count) for name, count in seen.items() if count}


def strategy_rewards(forest: Forest) -> dict[str, float]:
    """The mean reward of the leaves of each strategy, where a system has strategies."""
    rewards: dict[str, list[float]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        strategy = getattr(forest.records[i].state, "strategy", "")
        if strategy:
            rewards.setdefault(f"reward/{strategy}", []).append(float(forest.reward_N[i]))
    return {name: float(np.mean(values)) for name, values in rewards.items()}


def found_gold(forest: Forest) -> float:
    """The mean share of a question's gold passages that some search of its rollouts returned."""
    found: dict[int, set[str]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        record = forest.records[i]
        passages = (passage for call in record.calls for passage in call.found)
        names = {name for passage in passages for name in (passage.id, passage.title)}
        found.setdefault(record.question, set()).update(names)
    shares = [
        len(found.get(i, set()).intersection(question.gold)) / len(question.gold)
        for i, question in enumerate(forest.questions)
        if question.gold and i not in forest.failed
    ]
    return float(np.mean(shares)) if shares else 0.0


def evaluate_models(
    job: Job, parts: Parts, models: SamplerModels, questions: tuple[Question, ...]
) -> Result:
    """The inference algorithm: greedy, one path a question."""
    sampler = PolicySampler(models, parts.tokenizer, job.shapes, greedy=True)
    system = job.recipe.inference or job.recipe.system
    return evaluate(system, questions, parts.environment(sampler))


def ask(job: Job, parts: Parts, question: str) -> str:
    """The transcript of one question under a system's inference algorithm."""
    sampler = PolicySampler(parts.models(), parts.tokenizer, job.shapes, greedy=True)
    system = job.recipe.inference or job.recipe.system
    forest = collect(system, once, [Question("ask", question, ())], parts.environment(sampler))
    return transcript(forest, 0)


def dev_metrics(job: Job, parts: Parts, policies: Policies) -> dict[str, float]:
    """Accuracy and strategy shares on the first dev questions."""
    questions = parts.questions["dev"][: job.run.dev_questions]
    result = evaluate_models(job, parts, acting_models(policies), questions)
    shares = {f"strategy/{k}": n / len(questions) for k, n in result.strategies.items()}
    return {"eval/accuracy": result.mean(job.recipe.metric), **shares}


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
