"""`ragrl warmup pool`: OPERA's D_scored, a pool of actions generated and scored before training.

The writer is a language model, as in the paper, or the policy that will be trained. Every action is
scored as in training, by executing it.

Departures from the paper:
  It scores plans by another rubric (eq. 14), which is `recipe.plan_reward=code`.
  Its golden plans, written from the supporting facts of a question, are not generated.
  Near duplicates are found by the encoder of the index if it has one, else by words.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.rollout.collect import ActionSampler, Environment, collect
from jax_ragrl.rollout.llm_policy import LLMActionSampler
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.run.build import build_components, reply_cache
from jax_ragrl.run.claims import content_of, local_models
from jax_ragrl.run.load import load_job
from jax_ragrl.run.lock import lock_output
from jax_ragrl.run.models import initial_models, load_llm
from jax_ragrl.run.short_names import model_of, parse_llm
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.systems.opera import Settings, recipe
from jax_ragrl.systems.opera.expert_pool import (
    Candidate,
    Pool,
    RecordingSampler,
    Similarity,
    build_pool,
    candidates_of,
    vector_cosines,
    word_cosines,
)
from jax_ragrl.systems.opera.grammar import PLAN, REWRITE
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.types import Question
from jax_ragrl.warmstart.resumable import (
    ItemResults,
    OutputKind,
    claim_output,
    failure_summary,
    run_resumable,
    unique_questions,
)

POOL_OUTPUT = OutputKind("rollout", "candidates")
GROUP = 3  # candidates per decision and temperature; 12 at the four temperatures of the paper


# --- The pool -------------------------------------------------------------------------------------


class PoolRollout(NamedTuple):
    """A rollout of a question at a temperature; `seed` is the index of the temperature."""

    question: Question
    seed: int
    temperature: float

    @property
    def id(self) -> str:
        """A unique id."""
        return f"{self.seed} {self.question.id}"


def score_candidates(
    settings: Settings,
    writer: ActionSampler,
    retriever: Retriever,
    llm: FrozenLLM,
    items: Sequence[PoolRollout],
) -> ItemResults:
    """Generates candidates at every decision of some rollouts, and scores them."""
    # A failed question has no row: a later call tries it again.
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for _, equal in itertools.groupby(items, key=lambda rollout: rollout.seed):
        # One temperature at a time, since it is part of the system.
        rollouts = list(equal)
        system = dataclasses.replace(settings.system, temperature=rollouts[0].temperature)
        opera = recipe(dataclasses.replace(settings, system=system))
        recorder = RecordingSampler(writer)
        roles, off = frozenset(opera.system.roles), Injection("off")
        groups = Groups(roles, GROUP, off, None, frozenset((PLAN,)), frozenset((REWRITE,)))
        environment = Environment(recorder, retriever, llm)
        questions = [rollout.question for rollout in rollouts]
        forest = collect(opera.system, groups, questions, environment, seed=rollouts[0].seed)
        rows += [
            {POOL_OUTPUT.item: rollouts[question].id, **candidate._asdict()}
            for question, candidate in candidates_of(forest, opera.reward(forest), recorder.prompts)
        ]
        errors |= {rollouts[question].id: error for question, error in forest.errors().items()}
    return ItemResults(rows, errors)


def make_pool(
    values: Mapping[str, Any],
    out: pathlib.Path,
    writer: str,
    temperatures: Sequence[float],
    count: int,
) -> dict[str, Any]:
    """Writes the expert pool of an OPERA config, for `recipe.expert_pool`.

    The same call resumes an interrupted one and retries failed rollouts. All candidates, the
    settings and a log with one line per question and temperature are written next to `out`. The
    `writer` is `policy`, or a language model as `parse_llm` reads it; each of its temperatures
    generates its own candidates for `count` training questions (0: all).

    Returns:
      The summary of the pool, and the number of failed rollouts.
    """
    if values.get("system") != "opera":
        raise UserError(
            f"config.system is {values.get('system')!r}, but a pool is for opera: use a config of "
            "that system"
        )
    # The pool does not exist yet, and must not influence its own candidates.
    values = {**values, "recipe": {**values.get("recipe", {}), "expert_pool": ""}}
    job = load_job(values)
    if out.exists() and not candidates_file(out).exists():
        raise UserError(
            f"{out} exists and was not written by 'ragrl warmup pool': choose another --out"
        )
    lock_output(out)
    parts = build_components(job, out.parent)
    sampler: ActionSampler
    models = local_models(job.llm, job.judge)
    if writer == "policy":
        models += initial_models(job).values()
        sampler = PolicySampler(parts.models(), parts.tokenizer, job.shapes)
    else:
        # The cache holds earlier replies of a server.
        config = parse_llm(writer)
        models += local_models(config)
        llm = load_llm(config, None, "", job.shapes, cache=reply_cache(out.parent))
        sampler = LLMActionSampler(llm, parts.tokenizer)
    settings = build(Settings, values["recipe"], "config.recipe")
    known = unique_questions(parts.questions["train"])
    questions = known[: count or None]
    source = functools.partial(score_candidates, settings, sampler, parts.retriever, parts.llm)
    call = {**values, "writer": model_of(writer), "temperatures": temperatures}
    content = content_of(known, parts.retriever, models)
    claim_output(candidates_file(out), call, POOL_OUTPUT, content)
    rollouts = pool_rollouts(questions, temperatures)
    return collect_pool(source, rollouts, out, similarity_of(parts.retriever))


def pool_of_rows(rows: Iterable[Mapping[str, Any]], similarity: Similarity = word_cosines) -> Pool:
    """Builds the pool from rows of `score_candidates`, without near duplicates."""
    candidates = (Candidate(*(row[key] for key in Candidate._fields)) for row in rows)
    return build_pool(candidates, similarity=similarity)


def similarity_of(retriever: Retriever) -> Similarity:
    """Returns the similarity of texts by the encoder of a retriever, or by words without one."""
    encoder = getattr(retriever, "encoder", None)
    if encoder is None or isinstance(encoder, HashedEncoder):
        return word_cosines
    return functools.partial(vector_cosines, encoder.encode_queries)


def pool_rollouts(
    questions: Sequence[Question], temperatures: Sequence[float]
) -> list[PoolRollout]:
    """Returns a rollout per question and temperature, ordered by temperature."""
    return [
        PoolRollout(question, i, t) for i, t in enumerate(temperatures) for question in questions
    ]


def candidates_file(out: pathlib.Path) -> pathlib.Path:
    """Returns the path of the file next to a pool with one line per candidate."""
    return out.with_suffix(".candidates.jsonl")


def collect_pool(
    source: Callable[[Sequence[PoolRollout]], ItemResults],
    rollouts: Sequence[PoolRollout],
    out: pathlib.Path,
    similarity: Similarity = word_cosines,
) -> dict[str, Any]:
    """Generates missing candidates, writes the pool of all, and returns its summary."""
    file = candidates_file(out)
    run_resumable(source, rollouts, file, POOL_OUTPUT)
    pool, failures = (
        pool_of_rows(read_rows(file), similarity),
        failure_summary(list(read_rows(POOL_OUTPUT.log(file)))),
    )
    if not pool.candidates:
        reason = failures.get("error", "there are no questions")
        raise UserError(
            f"no action was generated ({reason}), so there is no pool: fix this and rerun the same "
            "command"
        )
    pool.save(out)
    return {**pool.summary(), **failures}
