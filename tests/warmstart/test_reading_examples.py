"""Examples of the tasks of a frozen language model."""

import collections
import random

import pytest

from jax_ragrl.corpus.world import generate
from jax_ragrl.llm.reader import UNKNOWN, WorldReader
from jax_ragrl.run.models import policy_folder
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest
from jax_ragrl.warmstart.teacher_examples import (
    RecordingLLM,
    careful_reader,
    fact_examples,
    reading_examples,
)

STYLE = "c3po_tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer.load(policy_folder("tiny"))


def target(tokenizer, example):
    assert example.target[-1] == tokenizer.stop_ids[0]
    return tokenizer.decode(example.target)


def test_half_of_the_fact_examples_are_famous(tokenizer):
    world = generate(3, 60)
    examples = fact_examples(world, STYLE, tokenizer, random.Random(0), 40)
    answers = [target(tokenizer, row) for row in examples]
    famous = {world.facts[entity][relation] for entity, relation in world.famous}
    assert answers.count(UNKNOWN) == 20
    assert all(answer in famous for answer in answers if answer != UNKNOWN)


def test_a_reading_example_has_the_careful_readers_reply(tokenizer):
    world = generate(3, 60)
    question = next(q for q in world.questions["train"] if q.hops == 2)
    turn = user_turn(STYLE, "roadmap", question=question.text, documents="")
    llm = RecordingLLM(WorldReader(world, style=STYLE))
    llm.complete([LLMRequest("roadmap", turn, seed=i) for i in range(50)])
    reader = careful_reader(world, STYLE)
    draws = [reading_examples(llm.requests, reader, tokenizer, random.Random(i)) for i in range(40)]
    # Fifty equal requests give one example, in about half of the draws.
    assert set(collections.Counter(map(len, draws))) == {0, 1}
    row = next(examples for examples in draws if examples)[0]
    expected = "\n".join(f"{i}. {step}" for i, step in enumerate(question.steps, 1))
    assert target(tokenizer, row) == expected
