"""`ragrl warmup demos`: generates demonstrations with the questions, corpus and models of a config.

Rejection sampling (C-3PO, section 5.2): a language model plays every role of the system, and its
actions on paths to a correct answer are retained. The writer of the paper has 72B parameters.
Labels replace that model: MMOA-RAG's heuristics (its appendix B), and rules for the other systems
that read the gold passages and answers of a question (`labels/`).

Departures from the paper:
  It collects four solutions per question. Here, all solutions of one tree per question are
    retained, at most seven in the tree of C-3PO (`--samples` generates more trees).
  The writer gets the prompts of the policy, without few-shot examples. If an action has a forced
    prefix (`[Retrieval]`), the writer's prompt asks for it; the demonstration's prompt does not.
"""

from __future__ import annotations

import collections
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import NoLLM
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.llm_policy import LLMActionSampler, conversation
from jax_ragrl.run.build import build_surroundings, reply_cache
from jax_ragrl.run.claims import content_of, local_models
from jax_ragrl.run.config import Job
from jax_ragrl.run.data import load_data
from jax_ragrl.run.index import index_folder
from jax_ragrl.run.load import load_job
from jax_ragrl.run.lock import lock_output
from jax_ragrl.run.models import load_llm, mesh_for, policy_folder
from jax_ragrl.run.parts import Components
from jax_ragrl.run.short_names import model_of, parse_llm
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.runtime.sharding import local_mesh
from jax_ragrl.systems.base import innermost_system
from jax_ragrl.systems.mmoa_rag import MMOARAG
from jax_ragrl.systems.opera.expert_pool import RecordingSampler
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question
from jax_ragrl.warmstart.demo_sources import DemoSource, demo_source
from jax_ragrl.warmstart.demos import Demo
from jax_ragrl.warmstart.labels.base import Labeler, gold_titles, label_demos, labeler_of
from jax_ragrl.warmstart.resumable import (
    ItemResults,
    OutputKind,
    claim_output,
    failure_summary,
    run_resumable,
    unique_questions,
)
from jax_ragrl.warmstart.teachers.mmoa_rag import LABELS as HEURISTICS
from jax_ragrl.warmstart.teachers.mmoa_rag import heuristic_demos

LABELS = "labels"
DEMO_OUTPUT = OutputKind("question", "demos")

DemoFunction = Callable[[Sequence[Question]], ItemResults]


class WriterConfig(NamedTuple):
    """The writer of the demonstrations: `labels` (rules from gold), or a language model.

    `samples` is the number of rollouts per question; without a `temperature` each role has its own.
    """

    name: str
    samples: int = 1
    temperature: float | None = None


def make_demos(
    values: Mapping[str, Any], out: pathlib.Path, writer: WriterConfig, count: int, of: str = ""
) -> dict[str, Any]:
    """Writes demonstrations on `count` training questions of a config (0: all), as a JSONL file.

    The same call resumes an interrupted one and retries failed questions. The settings and a log
    with one line per question are written next to `out`. The demonstrations are those `of` a
    baseline of `demo_sources.BASELINES`; empty: of the config's system. Returns a summary.
    """
    job = load_job(values)
    source = demo_source(job.recipe, of)
    if of and _is_labels(writer):
        raise UserError(
            f"--writer labels is for the system of a config, not for --of {of}: choose a language "
            "model"
        )
    lock_output(out)
    # The index is built here if it is missing: demonstrations are the first stage of a run.
    data = load_data(job.data, index_folder(job.index, out.parent), job.index)
    tokenizer = ChatTokenizer.load(policy_folder(job.policy, weights=False))
    parts = build_surroundings(job, out.parent, data, mesh_for(job), tokenizer)
    known = unique_questions(q for q in parts.questions["train"] if q.answers)
    questions = known[: count or None]
    if not questions:
        raise UserError(
            "no training question has an answer, so no action can be judged: choose other "
            "questions in data.files"
        )
    if _is_labels(writer):
        titles = gold_titles(questions, data.corpus.passages)
        function = label_function(job, parts, writer.name, str(values.get("system")), titles)
    else:
        function = rollout_function(job, parts, writer, source, reply_cache(out.parent))
    author = [] if _is_labels(writer) else [parse_llm(writer.name)]
    content = content_of(known, parts.retriever, local_models(job.llm, job.judge, *author))
    claim_output(out, demo_settings(values, writer, of), DEMO_OUTPUT, content)
    run_resumable(function, questions, out, DEMO_OUTPUT)
    return demo_summary(out)


def demo_settings(values: Mapping[str, Any], writer: WriterConfig, of: str = "") -> dict[str, Any]:
    """Returns the settings that are saved next to demonstrations; arguments as in `make_demos`."""
    # The model without its address: a server may move between calls.
    settings = {**values, "writer": writer._replace(name=model_of(writer.name))._asdict()}
    return settings | {"of": of}


def _is_labels(writer: WriterConfig) -> bool:
    return writer.name.partition(":")[0] == LABELS


def rollout_function(
    job: Job,
    parts: Components,
    writer: WriterConfig,
    source: DemoSource,
    cache: pathlib.Path | None = None,
) -> DemoFunction:
    """Returns the function that selects demonstrations from a language model's rollouts."""
    mesh = local_mesh(mesh_for(job))
    llm = load_llm(parse_llm(writer.name), None, "", job.shapes, mesh, cache=cache)
    sampler = LLMActionSampler(llm, parts.tokenizer, writer.temperature)
    seeds: dict[str, Any] = {"seed": job.seed, "rollouts": writer.samples}

    def results(questions: Sequence[Question]) -> ItemResults:
        recorder = RecordingSampler(sampler)
        environment: Environment = parts.environment(recorder)
        forest = collect(source.system, source.expander, questions, environment, **seeds)
        prompts = {ids: conversation(parts.tokenizer, r) for ids, r in recorder.prompts.items()}
        demos = [demo.row() for demo in source.demos(forest, prompts)]
        return ItemResults(demos, {questions[q].id: x for q, x in forest.errors().items()})

    return results


def find_labeler(job: Job, writer: str, name: str) -> Labeler | None:
    """Returns the labeler of the system `name`; None for MMOA-RAG's heuristic.

    The writer is `labels`, or `labels:answer` for another rule of MMOA-RAG's selection.

    Raises:
      UserError: there are no labels for the system, or none of that kind.
    """
    kind = writer.partition(":")[2]
    if isinstance(innermost_system(job.recipe.system), MMOARAG):
        one_of("label", kind or "both", HEURISTICS)
        return None
    if kind:
        raise UserError(
            f"--writer {writer} is for system mmoa_rag, and this config has another system: "
            "use --writer labels"
        )
    return labeler_of(name)


def label_function(
    job: Job, parts: Components, writer: str, name: str, titles: Mapping[str, str]
) -> DemoFunction:
    """Returns the function that labels some questions of the system `name`, see `find_labeler`.

    `titles` are those of gold passages, see `gold_titles`. A failed search, of which one serves
    all the questions, is an error of each of them.
    """
    labeler = find_labeler(job, writer, name)
    system, kind = innermost_system(job.recipe.system), writer.partition(":")[2]
    llm = None if isinstance(parts.llm, NoLLM) else parts.llm

    def demos(questions: Sequence[Question]) -> list[Demo]:
        if labeler is not None:
            outer = job.recipe.system
            tools = parts.retriever, parts.tokenizer, llm
            return label_demos(outer, labeler, questions, *tools, titles)
        rewritings = {q.id: str(q.metadata.get("rewritings", "")) for q in questions}
        # Seeded by the first question, so that chunks have different orders of documents.
        rng = random.Random(f"{job.seed} {questions[0].id}")
        mmoa_rag, label = cast(MMOARAG, system), kind or "both"
        return heuristic_demos(
            mmoa_rag, questions, parts.retriever, rng, rewritings=rewritings, label=label
        )

    def results(questions: Sequence[Question]) -> ItemResults:
        try:
            return ItemResults([demo.row() for demo in demos(questions)], {})
        except EffectError as error:
            return ItemResults((), dict.fromkeys((q.id for q in questions), str(error)))

    return results


def demo_summary(out: pathlib.Path) -> dict[str, Any]:
    """Returns the number of demonstrations by role, and of finished and failed questions."""
    rows = list(read_rows(DEMO_OUTPUT.log(out)))
    roles = collections.Counter(row["role"] for row in read_rows(out))
    return {
        "questions": len(rows),
        "with_demos": sum(row["demos"] > 0 for row in rows),
        **failure_summary(rows),
        "demos": sum(roles.values()),
        "roles": dict(sorted(roles.items())),
        "out": str(out),
    }
