"""The baselines on a small synthetic corpus, end to end and without a model."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.llm.reader import UNKNOWN, WorldReader, facts_of, resolve, understand
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.evaluate import Result, evaluate
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.agents import BEGIN, END, ReAct, SearchO1
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.iterative import IRCoT, IterRetGen
from jax_ragrl.systems.baselines.replug import Replug
from jax_ragrl.systems.baselines.rerank import Reranker
from jax_ragrl.systems.baselines.rewrite import QueryRewrite
from jax_ragrl.systems.baselines.selection import Selection
from jax_ragrl.systems.baselines.self_rag import SelfRAG
from jax_ragrl.systems.baselines.skr import SKR, fit_neighbors
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.systems.c3po import C3PO, NO_RETRIEVAL, PLANNING, RETRIEVAL, FixedStrategy
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import LLMRequest, Message, Question
from jax_ragrl.warmstart.teacher_examples import build_world_retriever, careful_reader
from jax_ragrl.warmstart.teachers.c3po import Teacher
from tests.rollout.tape import Tape

STYLE, K = "baselines_tiny", 4


@functools.cache
def world() -> World:
    return generate(0, 60)


@functools.cache
def retriever():
    return build_world_retriever(world())


def questions(count: int = 40) -> list[Question]:
    return list(world().questions["test"][:count])


class Scholar:
    """A language model that plays every frozen role correctly, from the text of its prompts."""

    name = "scholar"

    def __init__(self) -> None:
        self._reader = careful_reader(world(), STYLE)

    def complete(self, requests: Sequence[LLMRequest]) -> list[str]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: LLMRequest) -> str:
        if request.purpose.startswith(("answer", "roadmap")):
            return self._reader.complete([request])[0]
        text = "\n".join(m.content for m in request.messages)
        question = re.findall(r"^Question: (.*)$", text, re.MULTILINE)[-1]
        plan = understand(question)
        assert plan is not None
        documents = list(dict.fromkeys(parse_passages(STYLE, text)))
        steps = resolve(plan, [facts_of(d) for _, d in documents])
        missing = next((f"{r} of {e}" for (e, r), value in steps if not value), "")
        useful = [f"0 {title}: {d}" for title, d in documents if self._tells(d, steps)]
        document_texts = "\n".join(f"0 {title}: {d}" for title, d in documents)
        prompt = Message("user", f"answer\n{document_texts}\nQuestion: {question}")
        reply_text = self._reader.complete([LLMRequest("answer", (prompt,))])[0]
        replies = {
            "grade": "10" if useful else "0",
            "select": ", ".join(
                str(i) for i, (_, d) in enumerate(documents, 1) if self._tells(d, steps)
            )
            or "none",
            "rewrite": "\n".join(f"{r} of {e}" for r, e in plan.hops if e),
            "thought": f"What is the {missing}?" if missing else f"So the answer is: {reply_text}.",
            "react": f"Search[{missing}]" if missing else f"Finish[{reply_text}]",
            "search_o1": f"{BEGIN}{missing}{END}" if missing else f"Answer: {reply_text}",
            "instruct": f"{' '.join(useful)}\nSo the answer is: {reply_text}",
            "distil": "\n".join(useful),
            "retrieve": "yes",
            "relevant": "yes" if useful else "no",
            "supported": "yes" if text.split("Answer: ")[-1] in str(documents) else "no",
            "useful": "no" if UNKNOWN in text else "yes",
        }
        return replies[request.purpose]

    def _tells(self, document: str, steps) -> bool:
        return any(pair in facts_of(document) for pair, _ in steps)


def teach(role: str, prompt: str, rng) -> str:
    """A sampler for the roles of a policy that imitates the careful teacher."""
    if role == "classifier":
        return rng.choice("ABC")
    if role in ("drafter", "gate"):
        return rng.choice("AB")
    if role == "rewriter":
        return prompt.partition("Question: ")[2].partition("\n")[0]
    return Teacher("c3po_tiny").write(role, (Message("user", prompt),), (), rng)


def run(system, llm=None, batch: int = 512) -> Result:
    environment = Environment(Tape(teach), retriever(), llm or Scholar())
    return evaluate(system, questions(), environment, batch=batch)


@functools.cache
def model() -> object:
    train = world().questions["train"][:30]
    environment = Environment(Tape({}), retriever(), WorldReader(world(), style=STYLE))
    scores = [
        evaluate(s, train, environment).scores["cover_em"]
        for s in (direct(STYLE), StandardRAG(STYLE, K))
    ]
    return fit_neighbors(retriever().encoder, train, *scores)


SYSTEMS = {
    "direct": lambda: direct(STYLE),
    "standard_rag": lambda: StandardRAG(STYLE, K),
    "reranker": lambda: Reranker(STYLE, K),
    "replug": lambda: Replug(STYLE, K),
    "bgm_frozen": lambda: Selection(STYLE, K),
    "query_rewrite": lambda: QueryRewrite(STYLE, K),
    "iter_retgen": lambda: IterRetGen(STYLE, K),
    "ircot": lambda: IRCoT(STYLE, K, max_documents=40),
    "react": lambda: ReAct(STYLE, K),
    "search_o1": lambda: SearchO1(STYLE, K),
    "self_rag": lambda: SelfRAG(STYLE, K),
    "skr_knn": lambda: SKR(STYLE, K, model()),
    "adaptive_rag": lambda: AdaptiveRAG(STYLE, K),
    "slim_plm": lambda: SlimPLM(STYLE, K),
    "instruct_rag": lambda: InstructRAG(STYLE, K),
    **{
        f"c3po {s}": lambda s=s: FixedStrategy(C3PO("c3po_tiny", K, strict=False), s)
        for s in (NO_RETRIEVAL, RETRIEVAL, PLANNING)
    },
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_question_is_answered_by_any_model(name):
    system = SYSTEMS[name]()
    reader = WorldReader(world(), style=STYLE)
    result = run(system, reader)
    assert set(result.finish_reasons) == {"answered"} and None not in result.answers
    assert run(system, reader, batch=7).answers == result.answers


@functools.cache
def accuracy(name: str) -> float:
    return run(SYSTEMS[name]()).mean("cover_em")


def test_a_careful_model_answers_nearly_everything_stepwise():
    for name in ("ircot", "react", "search_o1", "c3po Planning"):
        assert accuracy(name) >= 0.9, name
    assert accuracy("direct") < accuracy("standard_rag") < 0.7


def test_fixed_strategies_cost_and_gain_in_order():
    names = ("c3po No Retrieval", "c3po Retrieval", "c3po Planning")
    none, single, planning = (accuracy(name) for name in names)
    assert none < single < planning
    assert none == accuracy("direct")


def test_no_careful_reply_is_malformed():
    names = "reranker bgm_frozen query_rewrite ircot react search_o1 self_rag instruct_rag"
    for name in names.split():
        assert run(SYSTEMS[name]()).invalid_actions == {}, name
