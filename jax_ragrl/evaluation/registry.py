"""Registry of the systems that an evaluation can name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems.baselines import executor
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.agents import ReAct, SearchO1
from jax_ragrl.systems.baselines.fixed import FixedStrategy
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.iterative import IRCoT, IterRetGen
from jax_ragrl.systems.baselines.replug import Replug
from jax_ragrl.systems.baselines.rerank import Reranker
from jax_ragrl.systems.baselines.rewrite import QueryRewrite
from jax_ragrl.systems.baselines.selection import Selection
from jax_ragrl.systems.baselines.self_rag import SelfRAG
from jax_ragrl.systems.baselines.skr import SKR, neighbours
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.systems.c3po import C3PO, NO_RETRIEVAL, PLANNING, RETRIEVAL
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.systems.mao_arag import MAOARAG
from jax_ragrl.systems.mmoa_rag import DOCUMENT, MMOARAG
from jax_ragrl.systems.opera.system import Opera
from jax_ragrl.types import Question


class Bench(NamedTuple):
    """What a system is built from. `environment` has no sampler; `train` may be empty.

    `changes` are those of a `Setting`.
    """

    style: str
    top_k: int
    environment: Environment
    retriever: Retriever
    train: Sequence[Question]
    changes: tuple[str, ...] = ()

    @property
    def tiny(self) -> bool:
        """Whether systems are built for the model in the package, as in `configs/tiny`."""
        return self.style == "tiny"

    def prompts(self, system: str) -> str:
        """The name of a system's prompts in the style of the table."""
        return f"{system}_tiny" if self.tiny else system


Builder = Callable[[Bench], Any]


def _baseline(system: Callable[[str, int], Any]) -> Builder:
    return lambda bench: system(bench.prompts("baselines"), bench.top_k)


def _c3po(bench: Bench) -> C3PO:
    return C3PO(bench.prompts("c3po"), bench.top_k, strict=False)


def _agent(bench: Bench, settings: executor.Settings) -> Any:
    style, top_k = bench.prompts("coda"), bench.top_k
    settings = dataclasses.replace(settings, style=style, top_k=top_k, chat=bench.tiny)
    return executor.recipe(settings).system


def _mmoa_rag(bench: Bench) -> MMOARAG:
    word = "D" if bench.tiny else DOCUMENT  # the mask needs a word of one token
    return MMOARAG(bench.prompts("mmoa_rag"), top_k=bench.top_k, word=word)


def _fixed(strategy: str) -> Builder:
    return lambda bench: FixedStrategy(_c3po(bench), strategy)


def _skr(bench: Bench) -> SKR:
    """Learns from what direct answering and Standard RAG score on the training questions."""
    if not bench.train:
        raise UserError("skr_knn learns from questions with answers: give them with --train FILE")
    if not isinstance(bench.retriever, DenseRetriever):
        raise UserError("skr_knn compares questions by an encoder: give --index, not --retriever")
    alone, retrieved = (
        evaluate(SYSTEMS[name](bench), bench.train, bench.environment).scores["cover_em"]
        for name in ("direct", "standard_rag")
    )
    known = neighbours(bench.retriever.encoder, bench.train, alone, retrieved)
    return SKR(bench.prompts("baselines"), bench.top_k, known)


SYSTEMS: Mapping[str, Builder] = {
    "direct": lambda bench: direct(bench.prompts("baselines")),
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
    "search_r1": lambda bench: _agent(bench, executor.search_r1()),
    "autorefine": lambda bench: _agent(bench, executor.autorefine()),
    "auto_rag": lambda bench: _agent(bench, executor.auto_rag()),
    "c3po": _c3po,
    "c3po_none": _fixed(NO_RETRIEVAL),
    "c3po_single": _fixed(RETRIEVAL),
    "c3po_planning": _fixed(PLANNING),
    "mmoa_rag": _mmoa_rag,
    "coda": lambda bench: CoDA(bench.prompts("coda"), bench.top_k, chat=bench.tiny),
    "mao_arag": lambda bench: MAOARAG(bench.prompts("mao_arag"), bench.top_k),
    "opera": lambda bench: Opera(bench.prompts("opera"), bench.top_k),
}
LEARNERS = frozenset({"skr_knn"})
