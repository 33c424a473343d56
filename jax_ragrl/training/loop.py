"""The training loop: questions, rollouts, credit, update, log, checkpoint, evaluation.

The call path from here to the loss is listed in `jax_ragrl.learner`.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.config.snapshot import load_saved_config
from jax_ragrl.corpus.questions import question_batches
from jax_ragrl.errors import Preempted, UserError
from jax_ragrl.learner.checkpoint import Checkpoints, abstract
from jax_ragrl.learner.dpo import pairs_of, prefer_all
from jax_ragrl.learner.grammars import role_grammars
from jax_ragrl.learner.packing import Turn, carry_credit, turns_of
from jax_ragrl.learner.policies import (
    Policies,
    update_all,
    with_kl,
    with_new_references,
    with_phase_rate,
)
from jax_ragrl.learner.state import Policy, PolicyState, prepare, trained_decoder
from jax_ragrl.learner.throughput import speed
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.data_parallel import gather_shards, shard_rollout
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.rewards import rewards_of
from jax_ragrl.rollout.trace import trees
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.checkpoint_name import parse_run
from jax_ragrl.run.components import Components
from jax_ragrl.run.config import Job, load_job
from jax_ragrl.run.evaluate import training_metric
from jax_ragrl.run.guards import RunMonitor, is_comparable
from jax_ragrl.run.indicators import OFF
from jax_ragrl.run.inference import evaluate_models, trained_policies
from jax_ragrl.run.predictions import write_predictions
from jax_ragrl.run.preemption import stop_notice
from jax_ragrl.run.workdir import claim_data, version_changes
from jax_ragrl.runtime.multihost import on_process_zero
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.runtime.sharding import accelerators
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.training.adapters import check_adapters
from jax_ragrl.training.best import forget_best, keep_best
from jax_ragrl.training.compile_ahead import compile_ahead
from jax_ragrl.training.early_stop import Scores, drop, is_spent, reason_to_end
from jax_ragrl.training.log import (
    METRICS,
    TREES,
    Clock,
    Log,
    NoOpLog,
    ProgramCounter,
    metrics_row,
    missing_records,
    open_log,
    read_metrics,
)
from jax_ragrl.training.rollout_metrics import (
    describe_rollout,
    expert_fractions,
    server_metrics,
)
from jax_ragrl.training.rollouts import Rollouts
from jax_ragrl.training.warden import Warden
from jax_ragrl.types import Question


def train(job: Job, parts: Components, workdir: pathlib.Path) -> Policies:
    """Trains up to `job.run.steps` updates, resuming from the newest checkpoint in `workdir`.

    With `job.run.patience` the run may end before (`training.early_stop`).

    Args:
      job: the run's config.
      parts: the components of the run; its decoders are the policies before the first update.
      workdir: directory of checkpoints, metrics and logs.

    Returns:
      The trained policies.

    Raises:
      UserError: the environment no longer answers, a metric exceeds its bounds (see `run.guards`),
        an indicator stops the run (`run.indicators`), the last evaluation has no score, or
        parameters are no longer finite. Such steps are not saved; when the run is started again,
        it repeats them.
      Preempted: the process received SIGTERM; the newest step is saved.
    """
    claim_data(parts.retriever, parts.questions, workdir)
    with contextlib.ExitStack() as files:
        checkpoints = files.enter_context(contextlib.closing(Checkpoints(workdir)))
        start, policies, entries = _start_or_resume(job, parts, checkpoints, workdir)
        log = files.enter_context(_open_log(job, workdir, start))
        rows = read_metrics(workdir)
        warden = Warden(job, workdir, _updates_by_policy(job, policies), rows)
        rows, monitor = Scores(rows), RunMonitor(job.guard, workdir, job.run.eval_every)
        notice, programs = files.enter_context(stop_notice()), ProgramCounter()
        changes = on_process_zero(lambda: version_changes(workdir))
        # Frees the device memory of all initial weights that no reference shares.
        parts = parts._replace(policies={})
        rollouts = files.enter_context(_resumed_rollouts(job, parts, policies, entries, start))
        # Training may only make the policies worse: `RUN@best` then has the initial ones.
        if (start == 0 and job.run.eval_before_training) and (
            metrics := dev_metrics(job, parts, policies, monitor, workdir, 0)
        ):
            rows.append(log.write(0, metrics, None))
        for step in range(start, job.run.steps):
            if reason := reason_to_end(rows, job.run.patience, job.run.token_budget):
                log.say(reason)
                break
            policies = warden.at_rate(enter_phase(job, policies, step, first=step == start), step)
            policies, metrics, step_trees = _take_step(
                job, parts, policies, rollouts, step, monitor, warden
            )
            last = step + 1 == job.run.steps or is_spent(rows, metrics, job.run.token_budget)
            if is_evaluated := (step + 1) % job.run.eval_every == 0 or last:
                rollouts.wait()  # an evaluation calls the same models
                metrics |= dev_metrics(job, parts, policies, monitor, workdir, step + 1)
                metrics |= drop(rows, metrics)
                warden.judge(metrics_row(step + 1, metrics))
                metrics |= warden.metrics()
            metrics |= server_metrics() | programs.metrics(has_evaluation=is_evaluated) | changes
            rows.append(log.write(step + 1, metrics, step_trees))
            # Stop a diverging run, or save.
            last = last or bool(reason_to_end(rows, job.run.patience))
            warden.check_stop()
            monitor.check_metrics(metrics, last=last)
            stop = notice.reached(step + 1)
            is_due = (step + 1) % job.run.save_every == 0 and warden.may_save
            if monitor.is_healthy and (is_due or last or stop):
                checkpoints.save(step + 1, trained_state(policies), rollouts.state(is_last=last))
            if stop and not last:
                raise Preempted(f"stopped after step {step + 1}: the same command continues")
        return policies


def _take_step(
    job: Job,
    parts: Components,
    policies: Policies,
    rollouts: Rollouts,
    step: int,
    monitor: RunMonitor,
    warden: Warden,
) -> tuple[Policies, dict[str, float], list[dict[str, Any]] | None]:
    """Rolls out, updates and describes one step.

    Args:
      job: the run's config.
      parts: retriever, language models and tokenizer.
      policies: the policies before the step; their buffers are donated.
      rollouts: makes the rollouts.
      step: the step, from 0.
      monitor: stops the run if the environment fails.
      warden: acts on the policies if an indicator is beyond its threshold.

    Returns:
      The policies after the step, its metrics without an evaluation, and the trees of its log.
    """
    clock = Clock()
    # Before the rollouts, which hide the transfer: they do not change the policies.
    before = warden.spare(policies)
    # 1. Roll out and assign credit. Stale rollouts of the next step begin here.
    roles = job.schedule.roles(step, tuple(job.policy_of))
    rollout = rollouts.take(policies, step)
    clock.lap("time/wait_rollout_s")
    rollouts.begin(policies, step + 1)
    forest = rollout.forest
    monitor.check_rollout(forest)
    credit_N, weight_N = job.credit(forest, forest.reward_N)
    turns = turns_to_train(job, forest, credit_N, weight_N)
    clock.lap("time/rollout_s")
    # 2. Update.
    policies, metrics = learn(job, policies, forest, turns, roles, step)
    clock.lap("time/train_s")
    # 3. Metrics. Credit is undefined if no leaf is reachable.
    credit_N = np.where(weight_N > 0, credit_N, np.nan)
    metrics |= rollout_metrics(job, forest, credit_N, roles) | rollout.metrics(clock.laps)
    tokens = sum(len(turn.context()) for turn in turns if turn.role in roles)
    metrics |= speed(metrics, tokens, clock.laps["time/train_s"], on_mesh=bool(job.mesh))
    # 4. Act on indicators of a collapse.
    policies = warden.act(policies, before, metrics_row(step + 1, metrics), forest)
    if warden.has_undone:
        rollouts.refresh()  # they come from the policies that are trained again
    return policies, metrics | warden.metrics(), _saved_trees(job, parts, forest, credit_N, step)


def turns_to_train(
    job: Job, forest: Forest, credit_N: np.ndarray, weight_N: np.ndarray
) -> list[Turn]:
    """Returns the turns of a forest to train, each with its credit.

    Args:
      job: the run's config.
      forest: the rollouts.
      credit_N: float32, one number per node.
      weight_N: float32, positive at the nodes to train.
    """
    turns = turns_of(forest, credit_N, weight_N, include_forced=job.train_forced)
    if job.objective.gae_span != "conversation":
        return turns
    return carry_credit(turns, forest, credit_N, job.packing.row_lengths[-1])


def rollout_metrics(
    job: Job, forest: Forest, credit_N: np.ndarray, roles: Sequence[str]
) -> dict[str, float]:
    """Returns the metrics of the rollouts of a step.

    Args:
      job: the run's config.
      forest: the rollouts.
      credit_N: the credit of each node, NaN if it is undefined.
      roles: the roles that the step trains.
    """
    metrics = describe_rollout(
        forest,
        credit_N,
        job.recipe.reward_terms,
        job.prices,
        training_metric(job.recipe.metric),
    )
    return metrics | expert_fractions(forest, job.recipe.expander(frozenset(roles)), roles)


def _saved_trees(
    job: Job, parts: Components, forest: Forest, credit_N: np.ndarray, step: int
) -> list[dict[str, Any]] | None:
    """Returns the first trees of a step for the log, or None if its trees are not saved."""
    if step % job.run.save_trees_every != 0 and step + 1 != job.run.steps:
        return None
    choosers = [name for name, role in job.recipe.system.roles.items() if role.chooses]
    count, tokenizer = job.run.trees_per_save, parts.tokenizer
    return trees(forest, credit_N, count, choosers=choosers, tokenizer=tokenizer)


def _start_or_resume(
    job: Job, parts: Components, checkpoints: Checkpoints, workdir: pathlib.Path
) -> tuple[int, Policies, dict[str, Any]]:
    """Returns the steps that are finished, the policies after them and entries of `Rollouts`."""
    if checkpoints.latest() is None and job.start_from:
        parts = start_components(job, parts)
    policies = prepare_policies(job, parts.policies, parts.tokenizer)
    if checkpoints.latest() is None:
        forget_best(workdir)
        return 0, policies, {}
    # Frees the initial arrays before the checkpoint is read: device memory holds one copy.
    policies = {name: Policy(spec, abstract(state)) for name, (spec, state) in policies.items()}
    start, states, meta = checkpoints.restore_newest(trained_state(policies))
    return start, {name: Policy(spec, states[name]) for name, (spec, _) in policies.items()}, meta


def start_components(job: Job, parts: Components) -> Components:
    """Returns the components with the trained policies of the run `job.start_from`.

    Args:
      job: the config of the new run.
      parts: its components.

    Raises:
      UserError: there is no such run or checkpoint, its policies have other shapes, or its adapters
        belong to other weights.
    """
    # The other run's config defines adapters, names and shapes, not the config of this run.
    run = parse_run(job.start_from)
    origin = load_job(load_saved_config(run.folder / "config.json"))
    check_adapters(job, origin)
    return parts._replace(policies=trained_policies(origin, parts.policies, run))


def prepare_policies(
    job: Job, decoders: Mapping[str, Decoder], tokenizer: ChatTokenizer
) -> Policies:
    """Builds the policies of a run as they are before the first update.

    Args:
      job: the run's config.
      decoders: by policy, the initial weights; they remain unchanged.
      tokenizer: the tokenizer, for the grammars of roles.
    """
    policies = {}
    grammars = role_grammars(job.recipe.system.roles.values(), tokenizer)
    for name, decoder in decoders.items():
        policies[name] = prepare(
            decoder,
            objective=job.objective,
            optimizer=job.optimizer,
            layout=job.packing,
            roles=tuple(job.policy_of),
            temperature=job.temperature,
            updates=updates_of(job, name),
            compute=job.compute_dtype,
            remat=job.remat,
            allowed_ZV=allowed_tokens(job, tokenizer, decoder.config.vocab_size),
            grammars=grammars,
            shares_devices=bool(job.run.staleness),
        )
    return policies


def updates_of(job: Job, policy: str) -> int:
    """Returns the number of steps of a run in which a policy is trained."""
    own = [role for role, name in job.policy_of.items() if name == policy]
    return job.schedule.updates(job.run.steps, tuple(job.policy_of), own)


def enter_phase(job: Job, policies: Policies, step: int, *, first: bool) -> Policies:
    """Applies the settings of a step's phase to the policies.

    At the first step of a phase the policies get its learning rate and KL coefficient, and their
    references become copies of them.

    Args:
      job: the run's config.
      policies: the policies before the step.
      step: the step, from 0.
      first: whether this is the first step of this process: the learning rate is not part of a
        checkpoint and must be set again.
    """
    begins, phase = job.schedule.begins_phase(step), job.schedule.phase(step)
    if begins:
        policies = with_new_references(policies)
    if phase is None or not (first or begins):
        return policies
    # A phase without its own rate returns to the rate of the run, if any phase has one.
    if any(p.policy_lr for p in job.schedule.phases):
        updates = {name: updates_of(job, name) for name in policies}
        policies = with_phase_rate(policies, phase, job.optimizer, updates)
    # The coefficient is part of the state, so it is set only when a phase begins.
    if any(p.kl_coefficient for p in job.schedule.phases) and (step == 0 or begins):
        policies = with_kl(policies, phase.kl_coefficient or job.objective.kl.coefficient)
    return policies


def allowed_tokens(job: Job, tokenizer: ChatTokenizer, size: int) -> np.ndarray | None:
    """Returns the tokens that the grammar of each role allows, bool `[Z, V]`; None: all.

    Args:
      job: the run's config.
      tokenizer: the tokenizer.
      size: vocabulary size of the model, which may exceed the tokenizer's.
    """
    patterns = [role.allowed_token_regex for role in job.recipe.system.roles.values()]
    if not any(patterns):
        return None
    masks = [tokenizer.allowed_tokens(pattern) for pattern in patterns]
    every_V = np.ones(size, bool)
    return np.stack([every_V if m is None else np.pad(m, (0, size - len(m))) for m in masks])


def trained_state(policies: Policies) -> dict[str, PolicyState]:
    """Returns the state of each policy: the content of a checkpoint."""
    return {name: policy.state for name, policy in policies.items()}


def acting_models(policies: Policies, *, outlive_update: bool = False) -> dict[str, SplitModel]:
    """Returns the policies for a sampler, see `for_sampling`.

    Args:
      policies: the policies.
      outlive_update: whether the models can be used after the next update too. It donates the
        trained arrays, so all of them are copied.
    """
    decoders = {name: trained_decoder(policy) for name, policy in policies.items()}
    params = jax.tree.leaves([policy.state.policy.params for policy in policies.values()])
    return for_sampling(decoders, donated_arrays=params if outlive_update else ())


def acting_environment(
    job: Job, parts: Components, policies: Policies, outlive_update: bool = False
) -> Environment:
    """Builds the environment of a rollout of the current policies.

    Args:
      job: the run's config.
      parts: retriever, language models and tokenizer.
      policies: the policies.
      outlive_update: see `acting_models`.
    """
    models = acting_models(policies, outlive_update=outlive_update)
    return parts.environment(PolicySampler(models, parts.tokenizer, job.shapes))


def make_rollouts(job: Job, parts: Components) -> Rollouts:
    """Returns the rollouts of a run from its first step on.

    Args:
      job: the run's config.
      parts: the components, without initial policies.
    """

    def roll_out_step(environment: Environment, questions: Sequence[Question], step: int) -> Forest:
        roles = job.schedule.roles(step, tuple(job.policy_of))
        return roll_out_shard(job, environment, questions, roles, step)

    return Rollouts(
        data=question_batches(parts.questions["train"], job.run.questions_per_step, job.seed),
        steps=job.run.steps,
        staleness=job.run.staleness,
        schedule=job.schedule,
        act=functools.partial(acting_environment, job, parts),
        roll_out=roll_out_step,
        gather=functools.partial(gather_rollouts, job),
    )


def _open_log(
    job: Job, workdir: pathlib.Path, start: int
) -> contextlib.AbstractContextManager[Log | NoOpLog]:
    on_process_zero(lambda: _check_records(job, workdir, start))
    take_counts()  # what servers did before the run is no metric of its first step
    return contextlib.closing(open_log(workdir, start, job.run.steps, job.run.projects))


def _check_records(job: Job, workdir: pathlib.Path, start: int) -> None:
    """Warns of lost records of finished steps; a lost row that decides about the run is an error.

    Args:
      job: the run's config.
      workdir: the folder of the run.
      start: the number of finished steps.

    Raises:
      UserError: the guard, `run.patience` or `run.token_budget` reads the rows.
    """
    for name, every in ((METRICS, 1), (TREES, job.run.save_trees_every)):
        text = missing_records(workdir / name, range(1, start + 1, every))
        if text and name == METRICS and (reader := _reader_of_metrics(job)):
            raise UserError(
                f"{text}, and {reader} would decide otherwise without them: restore the file from "
                "a backup, or start a new run from the policies: ragrl train --from "
                f"{workdir} --workdir=NEW"
            )
        if text:
            warnings.warn(
                f"{text}, and so will the report; the policies are not affected", stacklevel=2
            )


def _reader_of_metrics(job: Job) -> str:
    """Returns a setting that makes a resumed run read its former metrics; empty without one."""
    settings = {
        "run.patience": job.run.patience,
        "run.token_budget": job.run.token_budget,
        "an action of the guard": job.guard.can_act,
    }
    return next((name for name, value in settings.items() if value), "")


@contextlib.contextmanager
def _resumed_rollouts(
    job: Job, parts: Components, policies: Policies, entries: Mapping[str, Any], start: int
) -> Iterator[Rollouts]:
    """Makes the rollouts after `start` steps, from the entries of their checkpoint if any.

    All programs of the run may be compiled first, see `compile_ahead`.
    """
    _compile_programs(job, parts, policies, start)
    with contextlib.closing(make_rollouts(job, parts)) as rollouts:
        if start:
            rollouts.restore(entries, start)
        yield rollouts


def _compile_programs(job: Job, parts: Components, policies: Policies, start: int) -> None:
    """Compiles the programs of the steps after `start`; on a CPU if the config asks for it."""
    if (job.run.compile_ahead or accelerators()) and start < job.run.steps:
        # A copy of the weights as a sampler gets them, which ends with this function.
        models = acting_models(policies, outlive_update=bool(job.run.staleness))
        compile_ahead(job, policies, models, parts.tokenizer)


def _updates_by_policy(job: Job, policies: Policies) -> dict[str, int]:
    return {name: updates_of(job, name) for name in policies}


def roll_out(
    job: Job,
    environment: Environment,
    questions: Sequence[Question],
    roles: Sequence[str],
    step: int,
) -> Forest:
    """Rolls out a batch of questions on all processes and computes its rewards (a collective).

    Args:
      job: the run's config.
      environment: policies, retriever and language models, on devices of this process.
      questions: the questions of the step.
      roles: the roles trained at this step, which branch.
      step: the step, from 0; part of the seed.
    """
    shard = functools.partial(roll_out_shard, job, environment, questions, roles, step)
    return gather_rollouts(job, questions, shard)


def roll_out_shard(
    job: Job,
    environment: Environment,
    questions: Sequence[Question],
    roles: Sequence[str],
    step: int,
) -> Forest:
    """Rolls out the shard of this process of a batch of questions, without rewards.

    Args:
      job, environment, questions, roles, step: as in `roll_out`.
    """
    recipe = job.recipe

    def roll_out_own(own: Sequence[Question], copies: Sequence[Sequence[int]]) -> Forest:
        return collect(
            recipe.system,
            recipe.expander(frozenset(roles)),
            own,
            environment,
            seed=job.seed * 1_000_003 + step,  # distinct for all runs of up to a million steps
            rollouts=recipe.rollouts,
            copies=copies,
            lockstep=job.run.lockstep,
        )

    return shard_rollout(questions, roll_out_own, recipe.rollouts)


def gather_rollouts(job: Job, questions: Sequence[Question], shard: Callable[[], Forest]) -> Forest:
    """Returns the rollouts of all processes with their rewards (a collective).

    Args:
      job: the run's config.
      questions: the questions of the step.
      shard: returns the rollouts of this process, see `roll_out_shard`.
    """
    forest = gather_shards(questions, shard, job.recipe.rollouts)
    return forest._replace(reward_N=rewards_of(job.recipe.reward, forest))


def learn(
    job: Job,
    policies: Policies,
    forest: Forest,
    turns: Sequence[Turn],
    roles: Sequence[str],
    step: int,
) -> tuple[Policies, dict[str, float]]:
    """Updates the policies on the turns of a step, or on its preference pairs.

    Args:
      job: the run's config; with `preference`, the update is DPO.
      policies: the policies; the buffers of their states are donated.
      forest: the rollouts.
      turns: its turns with their credit, see `turns_of`.
      roles: the roles trained at this step.
      step: the step, from 0; part of the seed.

    Returns:
      The updated policies, and metrics.
    """
    rng = random.Random(f"{job.seed} {step}")
    is_measured = job.guard.update_kl.action != OFF
    if job.preference is not None:
        pairs = pairs_of(forest, turns, roles, job.preference.margin)
        beta = job.preference.beta
        return prefer_all(policies, job.policy_of, pairs, beta, rng, is_measured=is_measured)
    every = job.run.role_gradients_every
    return update_all(
        policies,
        job.policy_of,
        roles,
        turns,
        rng,
        is_measured=is_measured,
        by_role=bool(every) and step % every == 0,
    )


def dev_metrics(
    job: Job,
    parts: Components,
    policies: Policies,
    monitor: RunMonitor,
    workdir: pathlib.Path,
    step: int,
) -> dict[str, float]:
    """Evaluates the policies on the first dev questions; keeps predictions and the best policies.

    Args:
      job: the run's config.
      parts: components, with the dev questions; without any there are no metrics.
      policies: the policies.
      monitor: receives the score.
      workdir: the folder of the run.
      step: the number of completed steps.

    Returns:
      Accuracy unless too few questions could be scored (see `is_comparable`), the fraction of each
      strategy, and the number of failed questions if any failed.
    """
    questions = parts.questions["dev"][: job.run.dev_questions]
    if not questions:
        return {}
    result = evaluate_models(job, parts, acting_models(policies), questions)
    write_predictions(workdir, f"dev-{step}", questions, result)
    fractions = {f"strategy_frac/{k}": n / len(questions) for k, n in result.strategies.items()}
    metric = "judge" if parts.judge is not None else job.recipe.metric
    score = result.mean(metric)
    monitor.check_evaluation(score, result.failures)
    has_enough = is_comparable(result.scores[metric], result.failures)
    if monitor.is_healthy and has_enough:
        keep_best(workdir, step, score, policies)
    failures = {"eval/failed": float(result.finish_reasons["failed"])} if result.failures else {}
    scores = {"accuracy": score, "standard_error": result.standard_error(metric)}
    # Patience, `eval/drop` and bounds would compare a mean of few questions with means of all.
    if not has_enough and np.isfinite(score):
        scores = {}
    return {f"eval/{key}": value for key, value in scores.items()} | fractions | failures
