"""Registry of the systems that an evaluation can name."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.costs import FREE, Prices
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems.baselines import executor
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.agents import ReAct, SearchO1
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.iterative import IRCoT, IterRetGen
from jax_ragrl.systems.baselines.replug import Replug
from jax_ragrl.systems.baselines.self_rag import SelfRAG
from jax_ragrl.systems.baselines.skr import SKR, fit_neighbors
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.baselines.standard import (
    QueryRewrite,
    Reranker,
    Selection,
    StandardRAG,
    direct,
)
from jax_ragrl.systems.c3po import NO_RETRIEVAL, PLANNING, RETRIEVAL, FixedStrategy
from jax_ragrl.systems.mao_arag import PLANS, FixedWorkflow
from jax_ragrl.systems.registry import PAPERS, system_module
from jax_ragrl.types import Question


class BuildContext(NamedTuple):
    """Inputs from which the systems of a table are built; each brings its own sampler."""

    style: str
    top_k: int
    environment: Environment
    train: Sequence[Question]
    overrides: tuple[str, ...] = ()
    predictions: pathlib.Path | None = None
    prices: Prices = FREE

    @property
    def is_tiny(self) -> bool:
        """Whether systems are built for the model in the package, as in `configs/tiny`."""
        return self.style == "tiny"

    def prompt_style(self, system: str) -> str:
        """The name of the folder with a system's prompts in the style of the table."""
        return f"{system}_tiny" if self.is_tiny else system


Builder = Callable[[BuildContext], Any]


def _baseline(system: Callable[[str, int], Any]) -> Builder:
    return lambda context: system(context.prompt_style("baselines"), context.top_k)


def _paper(name: str) -> Builder:
    """The builder of a system in `systems/registry.py`."""
    return lambda context: system_module(name).table_system(
        context.prompt_style(name), context.top_k, tiny=context.is_tiny
    )


def _agent(context: BuildContext, settings: executor.Settings) -> Any:
    style, top_k = context.prompt_style("coda"), context.top_k
    agent = settings.system
    return dataclasses.replace(agent, style=style, top_k=top_k, as_chat_turns=context.is_tiny)


def _fixed(strategy: str) -> Builder:
    return lambda context: FixedStrategy(_paper("c3po")(context), strategy)


def _workflow(plan: tuple[str, ...]) -> Builder:
    return lambda context: FixedWorkflow(_paper("mao_arag")(context), plan)


def _skr(context: BuildContext) -> SKR:
    """Fits SKR to the scores of direct answering and Standard RAG on the training questions."""
    if not context.train:
        raise UserError("skr_knn learns from labeled questions: give them with --train FILE")
    if not isinstance(context.environment.retriever, DenseRetriever):
        raise UserError(
            "skr_knn compares the embeddings of questions: give the --index of an encoder, "
            "not --retriever"
        )
    direct_scores, rag_scores = (
        evaluate(SYSTEMS[name](context), context.train, context.environment).scores["cover_em"]
        for name in ("direct", "standard_rag")
    )
    encoder = context.environment.retriever.encoder
    neighbors = fit_neighbors(encoder, context.train, direct_scores, rag_scores)
    return SKR(context.prompt_style("baselines"), context.top_k, neighbors)


SYSTEMS: Mapping[str, Builder] = {
    "direct": lambda context: direct(context.prompt_style("baselines")),
    "standard_rag": _baseline(StandardRAG),
    "reranker": _baseline(Reranker),
    "replug": _baseline(Replug),
    "bgm_frozen": _baseline(Selection),
    "query_rewrite": _baseline(QueryRewrite),
    "instruct_rag": _baseline(InstructRAG),
    "skr_knn": _skr,
    "slim_plm": _baseline(SlimPLM),
    "self_rag": _baseline(SelfRAG),
    "iter_retgen": _baseline(IterRetGen),
    "ircot": _baseline(IRCoT),
    "adaptive_rag": _baseline(AdaptiveRAG),
    "react": _baseline(ReAct),
    "search_o1": _baseline(SearchO1),
    "search_r1": lambda context: _agent(context, executor.SEARCH_R1),
    "autorefine": lambda context: _agent(context, executor.AUTOREFINE),
    "auto_rag": lambda context: _agent(context, executor.AUTO_RAG),
    **{name: _paper(name) for name in PAPERS if hasattr(system_module(name), "table_system")},
    "c3po_none": _fixed(NO_RETRIEVAL),
    "c3po_single": _fixed(RETRIEVAL),
    "c3po_planning": _fixed(PLANNING),
}
# The fixed workflows of MAO-ARAG: `workflow_ag`, ..., `workflow_qds_r_ag`. Not part of `all`.
WORKFLOWS: Mapping[str, Builder] = {
    "_".join(("workflow", *plan)).lower(): _workflow(plan) for plan in PLANS
}
# Names for several systems; a system that learns needs `BuildContext.train`.
EVERY_SYSTEM, EVERY_WORKFLOW = "all", "workflows"
LEARNERS = frozenset({"skr_knn"})  # need `BuildContext.train`
