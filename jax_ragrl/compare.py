"""A table of systems on one set of questions: answer metrics, malformed outputs, costs, recall."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.passages import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.evaluate import NoSampler, evaluate
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.index import open_index
from jax_ragrl.retrieval.recall import recall
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.systems.c3po import C3PO
from jax_ragrl.train.assemble import LLM, load_llm, load_policy


class Setting(NamedTuple):
    """What a table is made of. `llm` is `tiny`, a model folder, or `openai:MODEL[@URL]`."""

    corpus: pathlib.Path
    questions: pathlib.Path
    index_folder: pathlib.Path
    systems: tuple[str, ...]
    policy: str
    llm: str
    style: str
    top_k: int
    limit: int


SYSTEMS: Mapping[str, Callable[[str, int], Any]] = {
    "direct": lambda style, top_k: direct(style),
    "standard_rag": StandardRAG,
    "c3po": lambda style, top_k: C3PO(style, top_k, strict=False),
}


def compare(setting: Setting) -> dict[str, Any]:
    """Every system on every question, and the recall of the retriever where gold is known."""
    unknown = [name for name in setting.systems if name not in SYSTEMS]
    if unknown:
        raise UserError(f"unknown system {unknown[0]!r}: known are {', '.join(SYSTEMS)}")
    corpus = load_corpus(setting.corpus)
    questions = load_questions(setting.questions)[: setting.limit or None]
    retriever = open_index(setting.index_folder, corpus)
    shapes = Shapes()
    llm = _language_model(setting.llm, setting.style, shapes)
    decoder, tokenizer = load_policy(setting.policy)
    split = nnx.split(decoder, nnx.Param)
    table: dict[str, Any] = {"questions": len(questions), "llm": llm.name}
    if any(question.gold for question in questions):
        table |= recall(retriever, questions)
    for name in setting.systems:
        system = SYSTEMS[name](setting.style, setting.top_k)
        models = {role.policy: split for role in system.roles.values()}
        policy = PolicySampler(models, tokenizer, shapes, greedy=True)
        sampler = policy if system.roles else NoSampler()
        environment = Environment(sampler, retriever, llm, tokenizer.count)
        table[name] = evaluate(system, questions, environment).summary()
    return table


def _language_model(name: str, style: str, shapes: Shapes) -> FrozenLLM:
    if not name.startswith("openai:"):
        return load_llm(LLM("local", name), None, style, shapes)
    model, _, url = name.removeprefix("openai:").partition("@")
    return load_llm(LLM("openai", model, url or None), None, style, shapes)
