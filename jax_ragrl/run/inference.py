"""Inference: load a trained policy, answer questions, evaluate."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence

from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.learner.state import saved
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.policy import Models as SamplerModels
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.trace import transcript
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.components import Parts
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import Result, evaluate
from jax_ragrl.types import Question


def trained_policies(
    job: Job, decoders: Mapping[str, Decoder], workdir: pathlib.Path
) -> dict[str, Decoder]:
    """The policies of the newest checkpoint; `UserError` where there is none."""
    checkpoints = Checkpoints(workdir)
    newest = checkpoints.latest()
    if newest is None:
        raise UserError(f"{checkpoints.folder} holds no checkpoint: run 'ragrl train' first")
    read = functools.partial(checkpoints.restore_part, newest)
    return saved(decoders, job.objective, read, compute=job.compute, remat=job.remat)


def evaluate_models(
    job: Job, parts: Parts, models: SamplerModels, questions: Sequence[Question]
) -> Result:
    """The inference algorithm: greedy, one path a question."""
    acting = greedy_environment(job, parts, models)
    return evaluate(job.recipe.evaluated, questions, acting, judge=parts.judge)


def ask(job: Job, parts: Parts, question: str) -> str:
    """The transcript of one question under a system's inference algorithm."""
    environment = greedy_environment(job, parts, parts.models())
    return transcript(answered(job.recipe.evaluated, environment, [question]), 0)


def answered(system: System, environment: Environment, texts: Sequence[str]) -> Forest:
    """One rollout of each distinct text, in order, which it gets beside any others too.

    A text is its own id: seeds are folded from ids, and one that is there again would get others.
    """
    questions = [Question(text, text, ()) for text in dict.fromkeys(texts)]
    return collect(system, once, questions, environment)


def greedy_environment(job: Job, parts: Parts, models: SamplerModels) -> Environment:
    """What an evaluation acts on; its answers are graded all at once, or by nobody."""
    sampler = PolicySampler(models, parts.tokenizer, job.shapes, greedy=True)
    return parts.environment(sampler)._replace(judge=None)
