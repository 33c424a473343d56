"""Inference: load trained policies, answer questions, evaluate."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from jax_ragrl.errors import UserError
from jax_ragrl.learner.state import restored_decoders
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.policy import PolicySampler, SamplerModels
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.trace import transcript
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.run.claims import claim_models
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import Result, evaluate
from jax_ragrl.run.parts import Components
from jax_ragrl.types import Question


def trained_policies(
    job: Job, decoders: Mapping[str, Decoder], run: RunCheckpoint, reader: Job | None = None
) -> dict[str, Decoder]:
    """Loads the policies of a checkpoint; `UserError` if there is none, or for other adapters.

    `decoders`, those before training, give the shapes and frozen weights. They are of `reader`, by
    default of the `job` that was trained.
    """
    checkpoints, step = run.open()
    claim_models(reader or job, run.folder, is_reader=True)
    # Only the parameters are read: optimizer state and critics are not needed.
    read = functools.partial(checkpoints.restore_part, step)
    return restored_decoders(
        decoders, job.objective, read, compute=job.compute_dtype, remat=job.remat
    )


def evaluate_models(
    job: Job,
    parts: Components,
    models: SamplerModels,
    questions: Sequence[Question],
    system: System | None = None,
) -> Result:
    """Evaluates policies with the inference algorithm of the system: greedy, one rollout each.

    `models` are split decoders by the name of their policy; `system` is by default the one for
    evaluation in the recipe of the job.
    """
    environment = greedy_environment(job, parts, models)
    system = system or job.recipe.evaluation_system
    return evaluate(system, questions, environment, judge=parts.judge, prices=job.prices)


def ask(job: Job, parts: Components, question: str) -> str:
    """Answers one question with the inference algorithm of the system; returns the transcript."""
    environment = greedy_environment(job, parts, parts.models())
    return transcript(roll_out_texts(job.recipe.evaluation_system, environment, [question]), 0)


def roll_out_texts(system: System, environment: Environment, texts: Sequence[str]) -> Forest:
    """Rolls out each distinct text once, in order.

    The text is the id of its question, so its seed does not depend on the batch. Duplicates are
    removed, because a repeated id would get a new seed. `UserError` if one is no text to answer.
    """
    # A command line that is not UTF-8 becomes halves of surrogate pairs, which have no tokens.
    if faulty := [x for x in texts if not x.strip() or x != x.encode(errors="replace").decode()]:
        raise UserError(f"the question {faulty[0]!r} is blank or no Unicode: give a text in UTF-8")
    questions = [Question(text, text, ()) for text in dict.fromkeys(texts)]
    return collect(system, single_chain, questions, environment)


def greedy_environment(job: Job, parts: Components, models: SamplerModels) -> Environment:
    """Returns the environment of an evaluation, without a judge (see `evaluate`)."""
    # Greedy, so that equal checkpoints give equal scores.
    sampler = PolicySampler(models, parts.tokenizer, job.shapes, greedy=True)
    return parts.environment(sampler)._replace(judge=None)
