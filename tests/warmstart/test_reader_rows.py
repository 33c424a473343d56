"""What the tiny decoder is taught of a frozen language model's work."""

import collections
import random

import pytest

from jax_ragrl.corpus.world import generate
from jax_ragrl.llm.reader import UNKNOWN, WorldReader
from jax_ragrl.run.components import policy_folder
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest
from jax_ragrl.warmstart.reader_rows import Listener, careful_reader, fact_rows, reading_rows

STYLE = "c3po_tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer.load(policy_folder("tiny"))


def target(tokenizer, example):
    assert example.target[-1] == tokenizer.stop_ids[0]
    return tokenizer.decode(example.target)


def test_facts_by_heart_are_the_known_worlds_and_half_of_them_famous(tokenizer):
    world = generate(3, 60)
    rows = fact_rows(world, STYLE, tokenizer, random.Random(0), 40)
    answers = [target(tokenizer, row) for row in rows]
    famous = {world.facts[entity][relation] for entity, relation in world.famous}
    assert answers.count(UNKNOWN) == 20
    assert all(answer in famous for answer in answers if answer != UNKNOWN)


def test_a_row_is_the_careful_readers_reply_to_what_was_asked(tokenizer):
    world = generate(3, 60)
    question = next(q for q in world.questions["train"] if q.hops == 2)
    turn = user_turn(STYLE, "roadmap", question=question.text, documents="")
    listener = Listener(WorldReader(world, style=STYLE))
    listener.complete([LLMRequest("roadmap", turn, seed=i) for i in range(50)])
    reader = careful_reader(world, STYLE)
    drawn = [reading_rows(listener.heard, reader, tokenizer, random.Random(i)) for i in range(40)]
    # Fifty equal requests are one row, in about half of the draws.
    assert set(collections.Counter(map(len, drawn))) == {0, 1}
    row = next(rows for rows in drawn if rows)[0]
    expected = "\n".join(f"{i}. {step}" for i, step in enumerate(question.steps, 1))
    assert target(tokenizer, row) == expected
