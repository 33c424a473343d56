"""The training loop: ask, roll out, credit, batch, update, log, save, evaluate."""

from __future__ import annotations

import contextlib
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.corpus.questions import Batches, question_batches
from jax_ragrl.learner.checkpoint import Checkpoints, abstract
from jax_ragrl.learner.dpo import pairs_of, prefer_all
from jax_ragrl.learner.packing import Turn, turns_of
from jax_ragrl.learner.policies import (
    Policies,
    update_all,
    with_kl,
    with_new_references,
    with_phase_rate,
)
from jax_ragrl.learner.state import Models, prepare, trained
from jax_ragrl.learner.throughput import speed
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.data_parallel import in_shares
from jax_ragrl.rollout.pipelining import in_cohorts
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.trace import trees
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.components import Parts
from jax_ragrl.run.config import Job
from jax_ragrl.run.guards import Watch
from jax_ragrl.run.inference import evaluate_models
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.train.log import Clock, Log, Silent, open_log
from jax_ragrl.train.rollout_metrics import describe, expert_shares
from jax_ragrl.types import Question


def train(job: Job, parts: Parts, workdir: pathlib.Path) -> Policies:
    """Trains to `job.run.steps` updates, from the newest checkpoint of `workdir` where one is.

    Raises `UserError` if the environment no longer answers, a metric leaves its bounds (see
    `run.guards`), the last evaluation has no score, or parameters are no longer finite. Such steps
    are not saved: started again, the run repeats them.
    """
    with _kept(job, workdir) as (checkpoints, log, watch):
        start = checkpoints.latest() or 0
        policies, data = _begun_or_resumed(job, parts, checkpoints, start)
        parts = parts._replace(policies={})  # device memory: what a reference does not hold is free
        for step in range(start, job.run.steps):
            questions, last = next(data), step + 1 == job.run.steps
            clock = Clock()
            policies = enter_phase(job, policies, step, first=step == start)
            roles = job.schedule.roles(step, tuple(job.policy_of))
            forest = roll_out(job, acting_environment(job, parts, policies), questions, roles, step)
            watch.rollout(forest)
            credit_N, weight_N = job.credit(forest, forest.reward_N)
            known_N = np.where(weight_N > 0, credit_N, np.nan)
            clock.lap("time/rollout_s")
            turns = turns_of(forest, weight_N, forced=job.train_forced)
            policies, metrics = learn(job, policies, forest, credit_N, turns, roles, step)
            clock.lap("time/train_s")
            metrics |= describe(forest, known_N, job.recipe.terms) | clock.laps
            metrics |= expert_shares(forest, job.recipe.expander(frozenset(roles)), roles)
            tokens = sum(len(turn.context()) for turn in turns if turn.role in roles)
            metrics |= speed(metrics, tokens, clock.laps["time/train_s"], meshed=bool(job.mesh))
            if (step + 1) % job.run.eval_every == 0 or last:
                metrics |= dev_metrics(job, parts, policies, watch)
            shown = step % job.run.trees_every == 0 or last
            drawn = (
                trees(forest, known_N, job.run.trees, tokenizer=parts.tokenizer) if shown else None
            )
            log.write(step + 1, metrics, drawn)
            watch.update(metrics)
            if last:
                watch.check_last()
            if watch.well and ((step + 1) % job.run.save_every == 0 or last):
                checkpoints.save(step + 1, trained_state(policies), {"data": data.get_state()})
        return policies


@contextlib.contextmanager
def _kept(job: Job, workdir: pathlib.Path) -> Iterator[tuple[Checkpoints, Log | Silent, Watch]]:
    """What a run keeps, which is closed however it ends, and who looks after it."""
    with contextlib.closing(Checkpoints(workdir)) as checkpoints:
        log = open_log(workdir, checkpoints.latest() or 0, job.run.steps, job.run.wandb)
        with contextlib.closing(log):
            yield checkpoints, log, Watch(job.guard, workdir, job.run.eval_every)


def _begun_or_resumed(
    job: Job, parts: Parts, checkpoints: Checkpoints, start: int
) -> tuple[Policies, Batches]:
    """The policies and the questions where a run starts, or goes on."""
    policies = prepare_policies(job, parts.policies, parts.tokenizer)
    data = question_batches(parts.questions["train"], job.run.questions, job.seed)
    if start:
        # Device memory: what is read takes the place of these arrays.
        policies = {
            name: (trainer, abstract(models)) for name, (trainer, models) in policies.items()
        }
        policies, meta = resumed(checkpoints, start, policies)
        data.set_state(meta["data"])
    return policies, data


def prepare_policies(
    job: Job, decoders: Mapping[str, Decoder], tokenizer: ChatTokenizer
) -> Policies:
    """The trainers of a run and their models before the first update, by policy."""
    roles = tuple(job.policy_of)
    policies = {}
    for name, decoder in decoders.items():
        updates = updates_of(job, name)
        allowed_ZV = allowed_tokens(job, tokenizer, decoder.config.vocab_size)
        choices = (job.objective, job.optimizer, job.layout, roles, job.temperature, updates)
        policies[name] = prepare(
            decoder, *choices, compute=job.compute, remat=job.remat, allowed_ZV=allowed_ZV
        )
    return policies


def updates_of(job: Job, policy: str) -> int:
    """In how many steps of a run a policy is trained."""
    own = [role for role, name in job.policy_of.items() if name == policy]
    return job.schedule.updates(job.run.steps, tuple(job.policy_of), own)


def enter_phase(job: Job, policies: Policies, step: int, *, first: bool) -> Policies:
    """The policies as the phase of a step trains them.

    Where one begins they get its rate and its KL, and themselves as they are for a reference; the
    `first` step of a process sets the rate too, which no checkpoint holds.
    """
    begins, phase = job.schedule.begins_phase(step), job.schedule.phase(step)
    if begins:
        policies = with_new_references(policies)
    if phase is None or not (first or begins):
        return policies
    if any(p.policy_lr for p in job.schedule.phases):
        updates = {name: updates_of(job, name) for name in policies}
        policies = with_phase_rate(policies, phase, job.optimizer, updates)
    if any(p.kl for p in job.schedule.phases) and (step == 0 or begins):
        policies = with_kl(policies, phase.kl or job.objective.kl.coefficient)
    return policies


def allowed_tokens(job: Job, tokenizer: ChatTokenizer, size: int) -> np.ndarray | None:
    """What each role's grammar lets it write, bool `[Z, V]`; None where no role has a mask.

    `size` is that of the model's vocabulary. Beyond its tokenizer's are ids that a role without a
    mask is as free to write here as in sampling.
    """
    patterns = [role.tokens for role in job.recipe.system.roles.values()]
    if not any(patterns):
        return None
    masks = [tokenizer.allowed(pattern) for pattern in patterns]
    every_V = np.ones(size, bool)
    return np.stack([every_V if m is None else np.pad(m, (0, size - len(m))) for m in masks])


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
    """The policies as a sampler takes them until the next update, see `for_sampling`."""
    return for_sampling({name: trained(*policy) for name, policy in policies.items()})


def acting_environment(job: Job, parts: Parts, policies: Policies) -> Environment:
    """What a rollout of the current policies acts on."""
    return parts.environment(PolicySampler(acting_models(policies), parts.tokenizer, job.shapes))


def roll_out(
    job: Job,
    environment: Environment,
    questions: Sequence[Question],
    roles: Sequence[str],
    step: int,
) -> Forest:
    """The rollouts of a batch of questions, with what each node earned."""
    recipe = job.recipe
    expander = recipe.expander(frozenset(roles))
    fixed = {"seed": job.seed * 1_000_003 + step, "rollouts": recipe.rollouts}

    def cohort(own: Sequence[Question], shared: Environment) -> Forest:
        return collect(recipe.system, expander, own, shared, **fixed)

    forest = in_shares(questions, lambda own: in_cohorts(own, environment, job.run.cohorts, cohort))
    return forest._replace(reward_N=recipe.reward(forest))


def learn(
    job: Job,
    policies: Policies,
    forest: Forest,
    credit_N: np.ndarray,
    turns: Sequence[Turn],
    roles: Sequence[str],
    step: int,
) -> tuple[Policies, dict[str, float]]:
    """The policies after the updates of a step, and their metrics: on its turns or its pairs."""
    rng = random.Random(f"{job.seed} {step}")
    if job.preference is not None:
        own = [turn.node for turn in turns]
        known_N = np.full_like(credit_N, np.nan)
        known_N[own] = credit_N[own]
        pairs = pairs_of(forest, known_N, roles, job.preference.margin)
        return prefer_all(policies, job.policy_of, pairs, job.preference.beta, rng)
    sampled = sampled_logps(forest)
    return update_all(policies, job.policy_of, roles, turns, credit_N, sampled, rng)


def sampled_logps(forest: Forest) -> dict[int, tuple[float, ...]]:
    """The sampler's own log-probabilities by node, where there are any."""
    return {
        node: record.action.logps
        for node, record in enumerate(forest.records)
        if record.action is not None and record.action.logps
    }


def dev_metrics(job: Job, parts: Parts, policies: Policies, watch: Watch) -> dict[str, float]:
    """Accuracy and strategy shares on the first dev questions, and how many failed if any did.

    Without dev questions there are no metrics. `watch` gets the score.
    """
    questions = parts.questions["dev"][: job.run.dev_questions]
    if not questions:
        return {}
    result = evaluate_models(job, parts, acting_models(policies), questions)
    shares = {f"strategy/{k}": n / len(questions) for k, n in result.strategies.items()}
    metric = "judge" if parts.judge is not None else job.recipe.metric
    watch.evaluation(result.mean(metric), result.failures)
    failed = {"eval/failed": float(result.ended["failed"])} if result.failures else {}
    return {"eval/accuracy": result.mean(metric), **shares, **failed}
