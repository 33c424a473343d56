"""The baselines on a small synthetic corpus, end to end and without a model."""

import functools

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.evaluate import Result, evaluate
from jax_ragrl.systems.baselines import standard
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.agents import ReAct, SearchO1
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.iterative import IRCoT, IterRetGen
from jax_ragrl.systems.baselines.replug import Replug
from jax_ragrl.systems.baselines.self_rag import SelfRAG
from jax_ragrl.systems.baselines.skr import SKR, fit_neighbors
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.c3po import C3PO, NO_RETRIEVAL, PLANNING, RETRIEVAL, FixedStrategy
from jax_ragrl.types import Message, Question
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


def teach(role: str, prompt: str, rng) -> str:
    """A sampler for the roles of a policy that imitates the careful teacher."""
    if role == "classifier":
        return rng.choice("ABC")
    if role in ("drafter", "gate"):
        return rng.choice("AB")
    if role == "rewriter":
        return prompt.partition("Question: ")[2].partition("\n")[0]
    return Teacher("c3po_tiny").write(role, (Message("user", prompt),), (), rng)


def run(system, llm, batch: int = 512) -> Result:
    environment = Environment(Tape(teach), retriever(), llm)
    return evaluate(system, questions(), environment, batch=batch)


@functools.cache
def model() -> object:
    train = world().questions["train"][:30]
    environment = Environment(Tape({}), retriever(), WorldReader(world(), style=STYLE))
    scores = [
        evaluate(s, train, environment).scores["cover_em"]
        for s in (standard.direct(STYLE), standard.StandardRAG(STYLE, K))
    ]
    return fit_neighbors(retriever().encoder, train, *scores)


SYSTEMS = {
    "direct": lambda: standard.direct(STYLE),
    "standard_rag": lambda: standard.StandardRAG(STYLE, K),
    "reranker": lambda: standard.Reranker(STYLE, K),
    "replug": lambda: Replug(STYLE, K),
    "bgm_frozen": lambda: standard.Selection(STYLE, K),
    "query_rewrite": lambda: standard.QueryRewrite(STYLE, K),
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


def test_fixed_strategies_cost_and_gain_in_order():
    """The model reads and plans without errors."""
    reader = careful_reader(world(), STYLE)
    names = ("direct", "c3po No Retrieval", "c3po Retrieval", "standard_rag", "c3po Planning")
    accuracy = [run(SYSTEMS[name](), reader).mean("cover_em") for name in names]
    assert accuracy[0] == accuracy[1] < min(accuracy[2:4]) and max(accuracy[2:4]) < 0.7
    assert accuracy[4] >= 0.9
