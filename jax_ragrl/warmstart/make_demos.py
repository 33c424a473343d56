"""`ragrl demos`: demonstrations on the questions, corpus and language models of a config.

Rejection sampling (C-3PO, section 5.2): a language model plays every role of the system, and its
actions on the way to a right answer are kept. The paper's writer is a model of 72B parameters.
MMOA-RAG's heuristic labels (its appendix B) need no model.

Departures from the paper: it collects four solutions a question; here all that one tree a question
finds are kept, seven at most in the tree of C-3PO (`--samples` rolls out more). The writer reads
the very prompts of the policy, without examples in them; where a forced action is to be gone on
with (`[Retrieval]`), its prompt says so, and the demonstration does not.
"""

from __future__ import annotations

import collections
import functools
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.run.components import (
    Parts,
    index_folder,
    load_data,
    load_llm,
    mesh_for,
    policy_folder,
    surrounded,
)
from jax_ragrl.run.config import Job, load_job, model_of, parse_llm
from jax_ragrl.runtime.jsonl import rows_of
from jax_ragrl.runtime.sharding import own_mesh
from jax_ragrl.systems.ablation import Apart
from jax_ragrl.systems.mmoa_rag import MMOARAG
from jax_ragrl.systems.opera.expert_pool import Scribe
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question
from jax_ragrl.warmstart.demo_sources import Lesson, lesson_of
from jax_ragrl.warmstart.expert_pool import Ghostwriter, conversation
from jax_ragrl.warmstart.resumable import Kind, Made, begin, distinct, failures, gather
from jax_ragrl.warmstart.teachers.mmoa_rag import heuristic_demos

LABELS = "labels"
DEMOS = Kind("question", "demos")

Source = Callable[[Sequence[Question]], Made]


class Writer(NamedTuple):
    """Who writes, as the command line names it, and how often and how freely it tries."""

    name: str
    samples: int = 1
    temperature: float | None = None


def make_demos(
    values: Mapping[str, Any], out: pathlib.Path, writer: Writer, count: int, of: str = ""
) -> dict[str, Any]:
    """Writes demonstrations on the first `count` training questions (0: all) of a config.

    They are of its system, or `of` a baseline (`lessons.BASELINES`). The same call goes on where it
    stood, and tries questions again on which something failed. Beside `out` it keeps what it was
    called with, and a line a question. Returns a summary.
    """
    job = load_job(values)
    lesson = lesson_of(job.recipe, of)
    if of and _labels(writer):
        raise UserError(f"--writer labels is for system mmoa_rag: name a model, for --of {of}")
    data = load_data(job.data, index_folder(job.index, out.parent))
    tokenizer = ChatTokenizer.load(policy_folder(job.policy, weights=False))
    parts = surrounded(job, out.parent, data, mesh_for(job), tokenizer)
    questions = distinct(q for q in parts.questions["train"] if q.answers)[: count or None]
    if not questions:
        raise UserError("no training question has an answer: there is nothing to be right about")
    source = source_of(job, parts, writer, lesson)
    given = {**values, "writer": writer._replace(name=model_of(writer.name))._asdict()}
    given |= {"of": of} if of else {}
    begin(out, given, DEMOS)
    gather(source, questions, out, DEMOS)
    return summary(out)


def _labels(writer: Writer) -> bool:
    return writer.name.partition(":")[0] == LABELS


def source_of(job: Job, parts: Parts, writer: Writer, lesson: Lesson) -> Source:
    """Where demonstrations come from: `labels`, or a language model as `parse_llm` reads it."""
    if _labels(writer):
        label = writer.name.partition(":")[2] or "both"
        return functools.partial(_labelled, job, parts, label)
    mesh = own_mesh(mesh_for(job))
    llm = load_llm(parse_llm(writer.name), None, "", job.shapes, mesh)
    ghost = Ghostwriter(llm, parts.tokenizer, writer.temperature)
    return functools.partial(_tried, job, parts, lesson, ghost, writer.samples)


def _labelled(job: Job, parts: Parts, label: str, questions: Sequence[Question]) -> Made:
    """MMOA-RAG's labels; a question's metadata may hold `rewritings`, separated by `;`."""
    system = job.recipe.system
    system = system.system if isinstance(system, Apart) else system
    if not isinstance(system, MMOARAG):
        raise UserError("--writer labels is for system mmoa_rag: name a language model instead")
    rewritings = {q.id: str(q.metadata.get("rewritings", "")) for q in questions}
    rng = random.Random(f"{job.seed} {questions[0].id}")
    given: dict[str, Any] = {"rewritings": rewritings, "label": label}
    try:
        demos = heuristic_demos(system, questions, parts.retriever, rng, **given)
    except EffectError as error:
        return Made((), dict.fromkeys((q.id for q in questions), str(error)))
    return Made([demo.row() for demo in demos], {})


def _tried(
    job: Job,
    parts: Parts,
    lesson: Lesson,
    writer: Ghostwriter,
    samples: int,
    questions: Sequence[Question],
) -> Made:
    """What a lesson makes of a language model's rollouts, `samples` a question."""
    scribe, fixed = Scribe(writer), {"seed": job.seed, "rollouts": samples}
    environment: Environment = parts.environment(scribe)
    forest = collect(lesson.system, lesson.expander, questions, environment, **fixed)
    texts = {i: conversation(parts.tokenizer, r) for i, r in scribe.prompts.items()}
    demos = [demo.row() for demo in lesson.demos(forest, texts)]
    return Made(demos, {questions[q].id: why for q, why in forest.errors().items()})


def summary(out: pathlib.Path) -> dict[str, Any]:
    """What a file holds by role, and what became of the questions."""
    rows = list(rows_of(DEMOS.log(out)))
    roles = collections.Counter(row["role"] for row in rows_of(out))
    return {
        "questions": len(rows),
        "with_demos": sum(row["demos"] > 0 for row in rows),
        **failures(rows),
        "demos": sum(roles.values()),
        "roles": dict(sorted(roles.items())),
        "out": str(out),
    }
