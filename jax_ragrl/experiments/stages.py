"""Stages of a cell of an experiment: warm-up, imitation, training and evaluation.

Each stage has its own folder, and a finished one is not run again. It is refused if its config has
changed since.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jax_ragrl.config.snapshot import LOCATION_KEYS, check_saved_config
from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.experiments.experiment import result_row
from jax_ragrl.rollout.policy import SamplerModels
from jax_ragrl.rollout.system import System
from jax_ragrl.run.build import build_components
from jax_ragrl.run.checkpoint_name import RunCheckpoint, has_checkpoints
from jax_ragrl.run.config import Job
from jax_ragrl.run.inference import evaluate_models, trained_policies
from jax_ragrl.run.lock import lock_unless_done
from jax_ragrl.run.overrides import load_config
from jax_ragrl.run.parts import Components
from jax_ragrl.run.predictions import write_predictions
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.jsonl import read_rows, write_json
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.training.loop import train
from jax_ragrl.training.setup import acting_models
from jax_ragrl.warmstart.demos import WarmStart, load_warm_start, warm_start
from jax_ragrl.warmstart.make_demos import WriterConfig, demo_settings, make_demos
from jax_ragrl.warmstart.resumable import CONTENT_KEYS
from jax_ragrl.warmstart.warmup import warm_up

# Sums over the steps of a training, the x axes on which arms may be matched.
TOTALS = ("llm_calls", "retrieval_calls", "time/rollout_s", "time/train_s", "policy_tokens")
IMITATION = "imitation"  # the subfolder of a supervised training
TEST = "test"  # the name of the predictions
POLICY = "policy"  # the author of demonstrations: the policy that imitates them
# About as many rollouts as the tiny configs have in reinforcement learning.
DEMO_QUESTIONS = 400


def check_unchanged(
    file: pathlib.Path, values: Mapping[str, Any], free: Collection[str] = ()
) -> None:
    """Raises `UserError` if the config `file` of a stage, if it exists, has other values.

    Places may differ, and the dotted keys `free` (`config.a.b`).
    """
    if file.is_file():
        check_saved_config(file, values, (*LOCATION_KEYS, *free), "--out")


def ensure_warm_up(config: str, seed: int, folder: pathlib.Path) -> None:
    """Runs a warm-up, or resumes it, unless its folder holds a finished one.

    If another process, such as another share of the experiment, runs it, this one waits for it.
    """
    done = folder / "done.json"
    lock_unless_done(folder, done)
    if done.is_file():
        check_warm_up(config, seed, folder)
    else:
        write_json(done, warm_up(warm_up_values(config, seed), folder))


def check_warm_up(config: str, seed: int, folder: pathlib.Path) -> None:
    """Raises `UserError` if a warm-up had another config; arguments as in `ensure_warm_up`."""
    check_unchanged(folder / "config.json", warm_up_values(config, seed))


def warm_up_values(config: str, seed: int) -> dict[str, Any]:
    """Returns the config of a warm-up; `UserError` if it cannot be read."""
    return load_config(pathlib.Path(config), []) | {"seed": seed}


def ensure_imitation(
    values: Mapping[str, Any], config: str, author: str, folder: pathlib.Path
) -> None:
    """Trains a policy on demonstrations, unless the folder holds the trained policy."""
    if (folder / IMITATION / "checkpoint").exists():
        check_imitation(values, config, author, folder)
        return
    make_demos(values, folder / "demos.jsonl", _writer(values, author), DEMO_QUESTIONS)
    warm_start(imitation(values, config, folder), folder / IMITATION)


def check_imitation(
    values: Mapping[str, Any], config: str, author: str, folder: pathlib.Path
) -> None:
    """Raises `UserError` if an imitation had another config; arguments as in `ensure_imitation`."""
    settings = demo_settings(values, _writer(values, author))
    # What the names stand for is compared when demonstrations are made.
    check_unchanged(folder / "demos.config.json", settings, CONTENT_KEYS)
    run = dataclasses.asdict(imitation(values, config, folder))
    # The number of demonstrations is a result, and their file moves with the folder.
    check_unchanged(folder / IMITATION / "config.json", run, ("config.demos", "config.data.demos"))


def _writer(values: Mapping[str, Any], author: str) -> WriterConfig:
    # The policy writes for itself: only its rollouts with a correct answer become demonstrations.
    return WriterConfig(str(values["policy"]) if author == POLICY else author)


def imitation(values: Mapping[str, Any], config: str, folder: pathlib.Path) -> WarmStart:
    """Returns the imitation before a training; `UserError` if its config is not valid."""
    demos = folder / "demos.jsonl"
    changes = {"data.demos": demos, "policy": values["policy"], "seed": values["seed"]}
    overrides = [f"--config.{key}={value}" for key, value in changes.items()]
    return load_warm_start(load_config(pathlib.Path(config), overrides))


def train_and_evaluate(values: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Trains and evaluates a run; returns its row, see `arms.run_cell`."""
    job = claim_workdir(values, folder)
    parts = build_components(job, folder)
    models = acting_models(train(job, parts, folder))
    rows = list(read_rows(folder / "metrics.jsonl"))
    totals = {name: round(sum(row.get(name) or 0.0 for row in rows), 1) for name in TOTALS}
    return _evaluate(job, parts, models, None, folder) | {"totals": totals}


def answer_again(
    values: Mapping[str, Any], strategy: str, run_folder: pathlib.Path, folder: pathlib.Path
) -> dict[str, Any]:
    """Evaluates the trained policies of a run with another config; returns their row."""
    job = claim_workdir(values, folder)
    # Before models are loaded, which takes long.
    system = fixed_strategy(job, strategy) if strategy else None
    parts = build_components(job, folder)
    models = parts.models()
    # The policies of a run without steps come from the config.
    if has_checkpoints(run_folder):
        models = for_sampling(trained_policies(job, parts.policies, RunCheckpoint(run_folder)))
    return _evaluate(job, parts, models, system, folder) | {"totals": {}}


def fixed_strategy(job: Job, name: str) -> System:
    """Returns the system of a job with one strategy for every question."""
    systems = job.recipe.fixed_strategies
    if name not in systems:
        names = ", ".join(map(repr, systems)) or "none: this system selects no strategy"
        raise UserError(f"there is no fixed strategy {name!r}: use one of {names}")
    return systems[name]


def _evaluate(
    job: Job, parts: Components, models: SamplerModels, system: System | None, folder: pathlib.Path
) -> dict[str, Any]:
    questions = parts.questions["test"][: job.run.test_questions]
    result = evaluate_models(job, parts, models, questions, system)
    result.check_answered()
    write_predictions(folder, TEST, questions, result)
    return {**result_row(result), "questions": fingerprint(questions)}
