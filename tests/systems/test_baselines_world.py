"""The baselines on a small synthetic corpus, end to end and without a model."""

import functools

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.evaluation.registry import SYSTEMS, BuildContext
from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.evaluate import Result, evaluate
from jax_ragrl.systems.registry import PAPERS
from jax_ragrl.types import Message
from jax_ragrl.warmstart.teacher_examples import build_world_retriever, careful_reader
from jax_ragrl.warmstart.teachers.c3po import Teacher
from tests.rollout.tape import Tape

STYLE = "baselines_tiny"
NAMES = SYSTEMS.keys() - {"search_r1", "autorefine", "auto_rag", *PAPERS}


@functools.cache
def world() -> World:
    return generate(0, 60)


@functools.cache
def retriever():
    return build_world_retriever(world())


def teach(role: str, prompt: str, rng) -> str:
    """A sampler for the roles of a policy that imitates the careful teacher."""
    if role == "classifier":
        return rng.choice("ABC")
    if role in ("drafter", "gate"):
        return rng.choice("AB")
    if role == "rewriter":
        return prompt.partition("Question: ")[2].partition("\n")[0]
    return Teacher("c3po_tiny").write(role, (Message("user", prompt),), (), rng)


def run(name: str, llm, batch: int = 512) -> Result:
    environment = Environment(Tape(teach), retriever(), llm)
    system = SYSTEMS[name](BuildContext("tiny", 4, environment, world().questions["train"][:30]))
    return evaluate(system, world().questions["test"][:40], environment, batch=batch)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_question_is_answered_by_any_model(name):
    reader = WorldReader(world(), style=STYLE)
    result = run(name, reader)
    assert set(result.finish_reasons) == {"answered"} and None not in result.answers
    assert run(name, reader, batch=7).answers == result.answers


def test_fixed_strategies_cost_and_gain_in_order():
    """The model reads and plans without errors."""
    reader = careful_reader(world(), STYLE)
    names = ("direct", "c3po_none", "c3po_single", "standard_rag", "c3po_planning")
    accuracy = [run(name, reader).mean("cover_em") for name in names]
    assert accuracy[0] == accuracy[1] < min(accuracy[2:4]) and max(accuracy[2:4]) < 0.7
    assert accuracy[4] >= 0.9
