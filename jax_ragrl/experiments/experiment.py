"""A complete experiment: baselines, training, evaluation and report (`ragrl quickstart`)."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.models.split import SplitModel
from jax_ragrl.report.build import build_report
from jax_ragrl.rollout.policy import SamplerModels
from jax_ragrl.rollout.system import System
from jax_ragrl.run.build import build_components
from jax_ragrl.run.claims import claim_data, claim_models, steps_taken
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import NoSampler, Result, evaluate
from jax_ragrl.run.inference import evaluate_models
from jax_ragrl.run.parts import Components
from jax_ragrl.run.predictions import write_predictions
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import all_gather_object, on_process_zero
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.text.metrics import METRIC_NAMES, paired_bootstrap
from jax_ragrl.training.loop import train
from jax_ragrl.training.setup import acting_models
from jax_ragrl.types import Question


def quickstart(job: Job, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains a system and compares it with its warm start, Standard RAG and direct answering.

    If the system selects a strategy per question, each strategy is also evaluated alone, with the
    policy before and after training. Parts that already exist in `workdir` are resumed.

    Returns the content of `summary.json`. Scores are in percent, on the same held-out questions:
    the recipe's metric or, if there is a judge, the judge's verdict. `gain` is over the best row
    without reinforcement learning, `gain_over_fixed` over the best fixed strategy of the trained
    policy.
    """
    start = time.perf_counter()
    components = build_components(job, workdir)
    questions = components.questions["test"][: job.run.test_questions]
    # Before the baselines, whose scores belong to these data and weights.
    claim_data(components.retriever, components.questions, workdir)
    claim_models(job, workdir, is_trained=False)
    # Before the training: an environment that fails is reported within minutes, not hours.
    before = evaluate_baselines(job, components, questions, workdir / "baselines.json")
    models = acting_models(train(job, components, workdir))
    rows = evaluate_trained(job, components, models, questions, before, workdir)
    summary = summarize(job, components, before, rows, workdir)
    summary["wall_s"] = round(time.perf_counter() - start, 1)
    on_process_zero(lambda: write_results(workdir, summary))
    return summary


def evaluations(
    job: Job,
    components: Components,
    models: SamplerModels,
    questions: tuple[Question, ...],
    name: str,
) -> dict[str, Callable[[], Result]]:
    """Returns evaluations of policies by row: `name`, and each `name: always STRATEGY`."""
    fixed = job.recipe.fixed_strategies if job.run.fixed_strategies else {}
    systems = {name: None} | {f"{name}: always {key}": x for key, x in fixed.items()}

    def evaluation(system: System | None) -> Callable[[], Result]:
        return lambda: evaluate_models(job, components, models, questions, system)

    return {row: evaluation(system) for row, system in systems.items()}


def write_results(workdir: pathlib.Path, summary: dict[str, Any]) -> None:
    write_json(workdir / "summary.json", summary)
    build_report(workdir)


def evaluate_baselines(
    job: Job, components: Components, questions: tuple[Question, ...], file: pathlib.Path
) -> dict[str, Any]:
    """Evaluates the systems without training, or reads their scores when a run resumes.

    Returns one row per system, see `result_row`.
    """
    # One process reads for all: with different views of the folder, hosts would diverge here.
    rows = on_process_zero(lambda: json.loads(file.read_text("utf-8")) if file.exists() else {})
    for name, run_evaluation in baselines(job, components, questions).items():
        if name in rows:
            continue
        result = timed(name, job.recipe.metric, run_evaluation)
        # A system without any answer must not be stored: its score would never be measured again.
        result.check_answered()
        write_predictions(file.parent, name, questions, result)
        rows[name] = result_row(result)
        # After each system, so that an interrupted run repeats one at most.
        on_process_zero(lambda: write_json(file, rows))
    return rows


def evaluate_trained(
    job: Job,
    components: Components,
    models: SamplerModels,
    questions: tuple[Question, ...],
    before: Mapping[str, Any],
    workdir: pathlib.Path,
) -> dict[str, Any]:
    """Evaluates the trained policies, or reads their scores when a run resumes.

    Returns one row per evaluation, see `evaluations` and `result_row`. A strategy whose policies
    are the same arrays as before training has its row of `before`.
    """
    file = workdir / "trained.json"
    key = {"asked": fingerprint(questions), "steps": steps_taken(workdir)}
    # One process reads for all, as in `evaluate_baselines`.
    row = on_process_zero(lambda: json.loads(file.read_text("utf-8")) if file.exists() else {})
    if key.items() <= row.items():
        return {"trained": row, **row["fixed"]}
    runs = evaluations(job, components, models, questions, "trained")
    changed = changed_policies(components.models(), models)
    same = {
        f"trained: always {name}": before[f"warm_start: always {name}"]
        for name, system in job.recipe.fixed_strategies.items()
        if job.run.fixed_strategies and changed.isdisjoint(x.policy for x in system.roles.values())
    }
    results = {
        name: timed(name, job.recipe.metric, run) for name, run in runs.items() if name not in same
    }
    # Raises before anything is written, so that a repeated call evaluates again.
    for name, result in results.items():
        result.check_answered()
        write_predictions(workdir, name, questions, result)
    rows = {name: result_row(result) for name, result in results.items()} | same
    others = {name: row for name, row in rows.items() if name != "trained"}
    on_process_zero(lambda: write_json(file, {**key, **rows["trained"], "fixed": others}))
    return rows


def changed_policies(before: SamplerModels, after: SamplerModels) -> set[str]:
    """Returns the names of the policies of which an array has changed on any host; a collective."""

    def is_same(x: SplitModel, y: SplitModel) -> bool:
        pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
        return all(jax.device_get(jnp.array_equal(a, b)) for a, b in pairs)

    names = all_gather_object(lambda: [x for x in after if not is_same(before[x], after[x])])
    return {name for host in names for name in host}


def timed(row: str, metric: str, run_evaluation: Callable[[], Result]) -> Result:
    """Runs an evaluation and prints a line with its score and duration."""
    start = time.perf_counter()
    result = run_evaluation()
    score, seconds = result.summary()[metric], time.perf_counter() - start
    questions = len(result.scores[metric])
    # A line, not a bar: evaluations follow each other, and output may go to a file.
    line = f"{row}: {METRIC_NAMES.get(metric, metric)} {score} on {questions} questions"
    on_process_zero(lambda: tqdm.tqdm.write(f"{line}, {seconds:.0f} s", file=sys.stderr))
    return result


def baselines(
    job: Job, components: Components, questions: tuple[Question, ...]
) -> dict[str, Callable[[], Result]]:
    """Returns the evaluations of all systems without training, by row."""
    style = job.run.baseline_style
    # `evaluate` grades all answers of a system together, which needs fewer requests to the judge.
    environment = components.environment(NoSampler())._replace(judge=None)

    def evaluation(system: System) -> Callable[[], Result]:
        return lambda: evaluate(
            system, questions, environment, judge=components.judge, prices=job.prices
        )

    return {
        "direct": evaluation(direct(style)),
        "standard_rag": evaluation(StandardRAG(style, job.recipe.system.top_k)),
        **evaluations(job, components, components.models(), questions, "warm_start"),
    }


def result_row(result: Result) -> dict[str, Any]:
    """A result as JSON: its summary and, per metric, one score per question."""
    scores = {metric: values.tolist() for metric, values in result.scores.items()}
    return {"scores": scores, **result.summary()}


def summarize(
    job: Job,
    components: Components,
    before: dict[str, Any],
    after: Mapping[str, Any],
    workdir: pathlib.Path,
) -> dict[str, Any]:
    """The summary of an experiment, as JSON values."""
    metric = headline_metric(job, has_judge=components.judge is not None)
    rows = dict(after)
    after_row = rows.pop("trained")
    # Gains are paired by question, which removes the variance between questions.
    warm = before["warm_start"]["scores"]
    gains = {name: paired_gain(warm[name], scores) for name, scores in after_row["scores"].items()}
    total = sum(after_row["strategies"].values())
    steps = steps_taken(workdir)
    # The trained policy is last, after its fixed strategies.
    all_rows = {**before, **rows, "trained": after_row}
    return {
        "steps": steps,
        "seed": job.seed,
        "questions": len(after_row["scores"][metric]),
        "metric": f"{METRIC_NAMES.get(metric, metric)}, percent",
        "reader": components.llm.name,
        "accuracy": {name: row[metric] for name, row in all_rows.items()},
        "gain": gain_over_best(before, after_row, metric),
        "gain_over_warm_start": {"over": "warm_start", **gains[metric]},
        **({"gain_over_fixed": gain_over_best(rows, after_row, metric)} if rows else {}),
        "gains": gains,
        "strategy_share": {
            k: round(n / total, 4) for k, n in sorted(after_row["strategies"].items())
        },
        "ended": after_row["ended"],
        "costs": {name: row["costs"] for name, row in all_rows.items()},
        # Without a training step there is no checkpoint: the policy is the given one.
        "checkpoint": str(workdir / "checkpoints" / str(steps)) if steps else job.policy,
        "report": str(workdir / "report.html"),
    }


def headline_metric(job: Job, *, has_judge: bool) -> str:
    """Returns the metric of the scores and gains of a summary."""
    return "judge" if has_judge else job.recipe.metric


def gain_over_best(
    rows: Mapping[str, dict[str, Any]], after_row: Mapping[str, Any], metric: str
) -> dict[str, Any]:
    """Returns the gain of the trained policy over the best of some rows, see `paired_gain`."""
    best = max(rows, key=lambda name: rows[name][metric] or 0.0)
    return {"over": best, **paired_gain(rows[best]["scores"][metric], after_row["scores"][metric])}


def paired_gain(before: Sequence[float], after: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The gain of a policy over another policy on the same questions in the same order.

    Returns `trained`: mean of `after`; `mean`: mean difference; `ci95`: its 95 % bootstrap
    interval, all in percent or None without pairs; `pairs`: number of questions with both scores.
    """
    before_Q, after_Q = np.array(before, np.float64), np.asarray(after, np.float64)
    # Failed questions have no score: None in JSON becomes nan here.
    finite_Q = np.isfinite(before_Q) & np.isfinite(after_Q)
    pairs = int(finite_Q.sum())
    if not pairs:
        return {"trained": None, "mean": None, "ci95": [None, None], "pairs": 0}
    mean, low, high = paired_bootstrap(after_Q[finite_Q], before_Q[finite_Q])
    # Rounded only after the bootstrap, whose means need all digits.
    interval = [round(100 * low, 2), round(100 * high, 2)]
    score = round(100 * float(after_Q[finite_Q].mean()), 2)
    return {"trained": score, "mean": round(100 * mean, 2), "ci95": interval, "pairs": pairs}
