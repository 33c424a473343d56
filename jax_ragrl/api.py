"""The Python interface: load a config, train, evaluate and ask.

The names are available as `jax_ragrl.NAME`; see `jax_ragrl.__init__` for the list.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.config.schema import local
from jax_ragrl.config.snapshot import load_saved_config
from jax_ragrl.corpus.formats import check_ids
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.rewards import leaf_rewards
from jax_ragrl.rollout.trace import transcript
from jax_ragrl.run.build import build_components
from jax_ragrl.run.checkpoint_name import RunCheckpoint, has_checkpoints, parse_run
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import Result
from jax_ragrl.run.inference import (
    evaluate_models,
    greedy_environment,
    roll_out_texts,
    trained_policies,
)
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config as read_config
from jax_ragrl.run.overrides import override
from jax_ragrl.run.parts import Components
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.compile_cache import enable_compile_cache
from jax_ragrl.systems.base import Recipe
from jax_ragrl.training import loop
from jax_ragrl.types import Question

Reward = Callable[[Question, str], float]
Questions = Mapping[str, Sequence[Question]]


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run with its trained policies, loaded and ready to answer.

    Fields:
      job: the config of the run as dataclasses.
      components: questions, retriever, frozen language model, tokenizer and trained policies.
      workdir: the folder with checkpoints, metrics and config.
    """

    job: Job
    components: Components
    workdir: pathlib.Path

    @property
    def questions(self) -> Mapping[str, tuple[Question, ...]]:
        """The questions by split: train, dev and test."""
        return self.components.questions


class Answer(NamedTuple):
    """The reply to one question: its text, None if there is none, and every step as text."""

    text: str | None
    transcript: str


def load_config(
    file: str | pathlib.Path, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Reads a config file, a Python file with a function `get_config()`, as nested dictionaries.

    `overrides` are values by dotted key, such as `{"run.steps": 10}`.

    Raises:
      UserError: the file cannot be read, or a key does not fit its structure.
    """
    config = read_config(local(file), [])
    override(config, [f"--config.{key}={value}" for key, value in (overrides or {}).items()])
    return config


def train(
    config: Mapping[str, Any],
    workdir: str | pathlib.Path,
    *,
    questions: Questions | None = None,
    retriever: Retriever | None = None,
    llm: FrozenLLM | None = None,
    reward: Reward | None = None,
) -> TrainedRun:
    """Trains a system, or resumes a run that was interrupted.

    Args:
      config: from `load_config`. With `run.steps` 0 the run has its untrained policies.
      workdir: the folder of the run; it belongs to this config.
      questions: your own questions by split (`train`, `dev`, `test`); None uses the config's data.
      retriever: your own retriever; None builds or opens the config's index.
      llm: your own frozen language model; None uses the config's.
      reward: maps a question and an answer to a finite number and replaces the recipe's reward.
        Answers that the rollout could not give earn 0. None keeps the recipe's reward.

    Returns:
      The run with its trained policies.

    Raises:
      UserError: an invalid config, a reward that the credit does not read, an unreachable
        environment, or training that diverges; a later call with the same arguments continues from
        the newest checkpoint.
    """
    folder = local(workdir)
    job = claim_workdir(config, folder)
    # The function is not part of the config, so that a resumed run may pass another one.
    if reward is not None:
        job = dataclasses.replace(job, recipe=_with_reward(job.recipe, reward))
    # Before the components, whose models are the first programs to compile.
    enable_compile_cache(folder)
    components = _components(job, folder, questions, retriever, llm)
    loop.train(job, components, folder)
    # A run without steps has the policies that it would start from.
    if not (job.run.steps or has_checkpoints(folder)):
        return TrainedRun(job, components, folder)
    return _with_trained_policies(job, components, RunCheckpoint(folder))


def _with_reward(recipe: Recipe, reward: Reward) -> Recipe:
    if not recipe.reads_leaves:
        raise UserError(
            "reward is a function of the answer, but the roles of this system learn from their own "
            "rewards: set config.credit, such as siblings, or leave out the reward"
        )
    leaves = functools.partial(leaf_rewards, reward)
    # The terms of the former reward would not add up to this one.
    return dataclasses.replace(recipe, reward=leaves, reward_terms=None)


def open_run(
    workdir: str | pathlib.Path,
    *,
    questions: Questions | None = None,
    retriever: Retriever | None = None,
    llm: FrozenLLM | None = None,
) -> TrainedRun:
    """Opens a run with the policies of a checkpoint.

    Args:
      workdir: the folder of the run; `RUN@best` selects its best checkpoint, `RUN@STEP` another.
      questions: see `train`.
      retriever: see `train`.
      llm: see `train`.

    Raises:
      UserError: the folder holds no run, or no checkpoint.
    """
    run = parse_run(workdir)
    # Only the saved config is needed: the config file may have changed since.
    job = load_job(load_saved_config(run.folder / "config.json"))
    components = _components(job, run.folder, questions, retriever, llm)
    return _with_trained_policies(job, components, run)


def evaluate(run: TrainedRun, questions: Sequence[Question]) -> Result:
    """Answers every question once, greedily, and scores the answers.

    `Result.summary()` has the means in percent. Questions have gold answers, such as
    `run.questions["test"]`.
    """
    return evaluate_models(run.job, run.components, run.components.models(), questions)


def ask(run: TrainedRun, question: str) -> Answer:
    """Answers one question.

    Raises:
      UserError: the retriever or the frozen language model failed.
    """
    environment = greedy_environment(run.job, run.components, run.components.models())
    forest = roll_out_texts(run.job.recipe.evaluation_system, environment, [question])
    if forest.failures:
        raise UserError(f"{question!r} has no answer: {forest.failures[0]}. Fix this and ask again")
    (leaf,) = forest.leaves()
    return Answer(leaf.answer if leaf else None, transcript(forest, 0))


def _components(
    job: Job,
    workdir: pathlib.Path,
    questions: Questions | None,
    retriever: Retriever | None,
    llm: FrozenLLM | None,
) -> Components:
    # Tuples, because callers may pass lists and change them during the run.
    fixed = None if questions is None else {k: tuple(v) for k, v in questions.items()}
    for split, part in (fixed or {}).items():
        check_ids(part, f"questions[{split!r}]")
    return build_components(job, workdir, questions=fixed, retriever=retriever, llm=llm)


def _with_trained_policies(job: Job, components: Components, run: RunCheckpoint) -> TrainedRun:
    policies = trained_policies(job, components.policies, run)
    return TrainedRun(job, components._replace(policies=policies), run.folder)
