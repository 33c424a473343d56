"""The training loop around `training.step`: phases, guard, evaluation, logs, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import warnings
from typing import Any

import numpy as np

from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.errors import Preempted, UserError
from jax_ragrl.learner.checkpoint import Checkpoints, abstract
from jax_ragrl.learner.policies import Policies
from jax_ragrl.learner.state import Policy
from jax_ragrl.learner.throughput import speed
from jax_ragrl.rollout.trace import trees
from jax_ragrl.run.claims import claim_data, claim_models, version_changes
from jax_ragrl.run.config import Job
from jax_ragrl.run.guards import RunMonitor, is_comparable
from jax_ragrl.run.inference import evaluate_models
from jax_ragrl.run.parts import Components
from jax_ragrl.run.predictions import write_predictions
from jax_ragrl.run.preemption import stop_notice
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.runtime.multihost import on_process_zero
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.text.metrics import training_metric
from jax_ragrl.training.best import forget_best, keep_best
from jax_ragrl.training.early_stop import Scores
from jax_ragrl.training.handover import Handover
from jax_ragrl.training.log import (
    METRICS,
    TREES,
    Clock,
    Log,
    ProgramCounter,
    metrics_row,
    read_metrics,
)
from jax_ragrl.training.rollout_metrics import describe_rollout, expert_fractions, server_metrics
from jax_ragrl.training.rollouts import Rollouts
from jax_ragrl.training.setup import (
    acting_environment,
    acting_models,
    enter_phase,
    method_of,
    prepare_policies,
    trained_state,
    updates_of,
)
from jax_ragrl.training.step import dead_questions, learn, turns_to_train, with_scorer
from jax_ragrl.training.warden import Warden


def train(job: Job, parts: Components, workdir: pathlib.Path) -> Policies:
    """Trains up to `job.run.steps` updates, resuming from the newest checkpoint in `workdir`.

    With `job.run.patience` the run may end before (`training.early_stop`). The decoders of `parts`
    are the policies before the first update.

    Raises:
      UserError: the environment no longer answers, a metric exceeds its bounds (see `run.guards`),
        an indicator stops the run (`run.indicators`), the last evaluation has no score, or
        parameters are no longer finite. Such steps are not saved; when the run is started again,
        it repeats them.
      Preempted: the process received SIGTERM; the newest step is saved.
    """
    claim_data(parts.retriever, parts.questions, workdir)
    claim_models(job, workdir)
    run = job.run
    with contextlib.ExitStack() as files:
        # Start, or resume from a checkpoint with its rollouts in flight.
        checkpoints = files.enter_context(contextlib.closing(Checkpoints(workdir)))
        start, policies, entries = start_or_resume(job, parts, checkpoints, workdir)
        on_process_zero(lambda: check_records(job, workdir, start))
        take_counts()  # what servers did before the run is no metric of its first step
        log = Log(workdir, start, run.steps, run.projects)
        files.enter_context(contextlib.closing(log))
        rows = read_metrics(workdir)
        updates = {name: updates_of(job, name) for name in policies}
        warden, scores = Warden(job, workdir, updates, rows), Scores(rows)
        monitor = RunMonitor(job.guard, workdir, run.eval_every)
        notice, programs = files.enter_context(stop_notice()), ProgramCounter()
        changes = on_process_zero(lambda: version_changes(workdir))
        # Frees the device memory of all initial weights that no reference shares.
        parts = parts._replace(policies={})
        handover = Handover(job, parts.tokenizer, workdir, start) if job.engine else None
        rollouts = make_rollouts(job, parts, handover)
        files.enter_context(contextlib.closing(rollouts))
        if start:
            rollouts.restore(entries, start)
        # Training may only make the policies worse: `RUN@best` then has the initial ones.
        elif run.eval_before_training and (
            metrics := dev_metrics(job, parts, policies, monitor, workdir, 0)
        ):
            scores.add(log.write(0, metrics, None))
        for step in range(start, run.steps):
            if reason := scores.reason_to_end(run.patience, run.token_budget):
                log.say(reason)
                break
            policies = warden.at_rate(enter_phase(job, policies, step, first=step == start), step)
            policies, metrics, step_trees = take_step(
                job, parts, policies, rollouts, step, monitor, warden
            )
            last = step + 1 == run.steps or scores.is_spent(run.token_budget, metrics)
            if is_evaluated := (step + 1) % run.eval_every == 0 or last:
                rollouts.wait()  # an evaluation calls the same models
                metrics |= dev_metrics(job, parts, policies, monitor, workdir, step + 1)
                metrics |= scores.drop(metrics)
                warden.judge(metrics_row(step + 1, metrics))
                metrics |= warden.metrics()
            metrics |= server_metrics() | programs.metrics(has_evaluation=is_evaluated) | changes
            scores.add(log.write(step + 1, metrics, step_trees))
            # Stop a diverging run, or save.
            last = last or bool(scores.reason_to_end(run.patience))
            warden.check_stop()
            monitor.check_metrics(metrics, last=last)
            stop = notice.reached(step + 1)
            is_due = (step + 1) % run.save_every == 0 and warden.may_save
            if monitor.is_healthy and (is_due or last or stop):
                checkpoints.save(step + 1, trained_state(policies), rollouts.state(is_last=last))
            if stop and not last:
                raise Preempted(f"stopped after step {step + 1}: the same command continues")
        return policies


def take_step(
    job: Job,
    parts: Components,
    policies: Policies,
    rollouts: Rollouts,
    step: int,
    monitor: RunMonitor,
    warden: Warden,
) -> tuple[Policies, dict[str, float], list[dict[str, Any]] | None]:
    """Takes the step of `training.step`, whose policies it donates, and measures and guards it.

    Returns the policies after the step, its metrics without an evaluation, and the trees of its
    log; None: the step saves no trees.
    """
    method, clock = rollouts.method, Clock()
    # Before the rollouts, which hide the transfer: they do not change the policies.
    before = warden.spare(policies)
    # 1. Roll out, with rewards. Stale rollouts of the next step begin here.
    rollout = rollouts.take(policies, step)
    forest = rollout.forest
    clock.lap("time/wait_rollout_s")
    rollouts.begin(policies, step + 1)
    monitor.check_rollout(forest)
    # 2. Assign credit and update.
    scored = with_scorer(forest, method, policies, parts.tokenizer)
    turns, credit_N = turns_to_train(method, scored)
    clock.lap("time/rollout_s")
    policies, metrics = learn(method, policies, forest, turns, step)
    clock.lap("time/train_s")
    # 3. Describe the step.
    roles = method.roles(step)
    recipe, metric = job.recipe, training_metric(job.recipe.metric)
    metrics |= describe_rollout(forest, credit_N, recipe.reward_terms, job.prices, metric)
    metrics |= expert_fractions(forest, recipe.expander(frozenset(roles)), roles)
    if job.objective.group_rule is not None:
        dead = dead_questions(forest, turns)
        metrics |= {"questions/asked": len(forest.questions), "questions/dead": len(dead)}
    metrics |= rollout.metrics(clock.laps)
    tokens = sum(len(turn.context()) for turn in turns if turn.role in roles)
    metrics |= speed(metrics, tokens, clock.laps["time/train_s"], on_mesh=bool(job.mesh))
    # 4. Act on indicators of a collapse.
    policies = warden.act(policies, before, metrics_row(step + 1, metrics), forest)
    if warden.has_undone:
        rollouts.refresh()  # they come from the policies that are trained again
    metrics |= warden.metrics()
    if step % job.run.save_trees_every != 0 and step + 1 != job.run.steps:
        return policies, metrics, None
    choosers = [name for name, role in recipe.system.roles.items() if role.chooses]
    count, tokenizer = job.run.trees_per_save, parts.tokenizer
    shown = trees(forest, credit_N, count, choosers=choosers, tokenizer=tokenizer)
    return policies, metrics, shown


def start_or_resume(
    job: Job, parts: Components, checkpoints: Checkpoints, workdir: pathlib.Path
) -> tuple[int, Policies, dict[str, Any]]:
    """Returns the steps that are finished, the policies after them and entries of `Rollouts`."""
    policies = prepare_policies(job, parts.policies, parts.tokenizer)
    if checkpoints.latest() is None:
        forget_best(workdir)
        return 0, policies, {}
    # Frees the initial arrays before the checkpoint is read: device memory holds one copy.
    policies = {name: Policy(spec, abstract(state)) for name, (spec, state) in policies.items()}
    start, states, meta = checkpoints.restore_newest(trained_state(policies))
    return start, {name: Policy(spec, states[name]) for name, (spec, _) in policies.items()}, meta


def make_rollouts(job: Job, parts: Components, handover: Handover | None = None) -> Rollouts:
    return Rollouts(
        method=method_of(job),
        data=QuestionStream(parts.questions["train"], job.seed),
        questions_per_step=job.run.questions_per_step,
        steps=job.run.steps,
        staleness=job.run.staleness,
        act=functools.partial(acting_environment, job, parts, handover=handover),
        notes_signal=job.run.prefer_signal,
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

    Without dev questions there are no metrics, and no accuracy if too few of them could be scored
    (see `is_comparable`).
    """
    questions = parts.questions["dev"][: job.run.dev_questions]
    if not questions:
        return {}
    result = evaluate_models(job, parts, acting_models(policies), questions)
    write_predictions(workdir, f"dev-{step}", questions, result)
    # Of the questions with a strategy, which one whose environment failed has not.
    total = sum(result.strategies.values())
    fractions = {f"strategy_frac/{k}": n / total for k, n in result.strategies.items()}
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


def check_records(job: Job, workdir: pathlib.Path, start: int) -> None:
    """Warns of lost records of finished steps; `UserError` if the run would decide by them."""
    settings = {
        "run.patience": job.run.patience,
        "run.token_budget": job.run.token_budget,
        "an action of the guard": job.guard.can_act,
    }
    reader = next((name for name, value in settings.items() if value), "")
    for name, every in ((METRICS, 1), (TREES, job.run.save_trees_every)):
        file, steps = workdir / name, range(1, start + 1, every)
        missing = set(steps) - {row.get("step") for row in read_rows(file)}
        if not missing:
            continue
        text = f"{file} is damaged: it lacks the records of {len(missing)} of {len(steps)} steps"
        if name == METRICS and reader:
            raise UserError(
                f"{text}, and {reader} would decide otherwise without them: restore the file from "
                "a backup, or start a new run from the policies: ragrl train --from "
                f"{workdir} --workdir=NEW"
            )
        warnings.warn(
            f"{text}, and so will the report; the policies are not affected", stacklevel=2
        )
