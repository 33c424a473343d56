"""The world's reader as MAO-ARAG's executors."""

from __future__ import annotations

import functools

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.llm.executors import EXECUTORS, WorldExecutors
from jax_ragrl.llm.reader import UNKNOWN, WorldReader, understand
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage

STYLES = ("mao_arag_tiny", "mao_arag")
CHAIN = "Who founded the employer of the spouse of Ann Lee?"
SAME = "Are Old Ulm and New Ulm in the same country?"


@functools.cache
def world() -> World:
    return generate(0, 60)


def ask(style: str, purpose: str, question: str, *shown: tuple[str, str]) -> str:
    """An executor's reply; `shown` are (title, text) or (sub-question, answer) pairs."""
    passages = [Passage("", *pair) for pair in shown]
    values = {
        "documents": format_passages(style, passages),
        "answers": format_passages(style, passages, form="pair"),
    }
    messages = user_turn(style, purpose, question=question, **values)
    return WorldExecutors(world(), style=style).complete([LLMRequest(purpose, messages)])[0]


@pytest.mark.parametrize("style", STYLES)
def test_serial_steps_of_a_chain_depend_on_each_other(style):
    assert ask(style, "decompose_serial", CHAIN).split("\n") == [
        "1. Who is the spouse of Ann Lee?",
        "2. What is the employer of #1?",
        "3. Who is the founder of #2?",
    ]
    assert ask(style, "decompose_parallel", CHAIN).split("\n") == [
        "1. Who is the spouse of Ann Lee?",
        "2. What is the employer of the spouse of Ann Lee?",
        "3. Who is the founder of the employer of the spouse of Ann Lee?",
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("purpose", ["decompose_serial", "decompose_parallel"])
def test_a_comparison_has_the_same_two_parts_either_way(style, purpose):
    assert ask(style, purpose, SAME).split("\n") == [
        "1. What is the country of Old Ulm?",
        "2. What is the country of New Ulm?",
    ]


@pytest.mark.parametrize("style", STYLES)
def test_every_part_of_every_question_is_understood(style):
    for question in [q for split in world().questions.values() for q in split][:100]:
        serial = ask(style, "decompose_serial", question.text).split("\n")
        assert len(serial) == max(question.hops, 1)
        for line in (*serial, *ask(style, "decompose_parallel", question.text).split("\n")):
            part = understand(line.partition(" ")[2])
            assert part is not None and not part.compare


@pytest.mark.parametrize("style", STYLES)
def test_earlier_answers_stand_in_for_their_numbers(style):
    earlier = [("Who is the spouse of Ann Lee?", "Bob"), ("Where does Bob work?", "Acme Inc")]
    rewritten = ask(style, "substitute", "Who is the founder of #2?", *earlier)
    assert rewritten == "Who is the founder of Acme Inc?"
    assert ask(style, "substitute", "Who is the founder of #3?", *earlier).endswith("#3?")


@pytest.mark.parametrize("style", STYLES)
def test_selected_documents_contain_needed_facts(style):
    documents = [
        ("Ann Lee", "Ann Lee was born in Ulm."),
        ("Ann Lee", "Ann Lee married Bob and works for Acme Inc."),
        ("Bob", "Bob married Ann Lee and works for Bolt."),
        ("Bolt", "Bolt was founded by Zoe and is based in Rom."),
    ]
    assert ask(style, "select", CHAIN, *documents) == "2, 3, 4"
    assert ask(style, "select", CHAIN, documents[0]) == "none"


@pytest.mark.parametrize("style", STYLES)
def test_summaries_answer_chains_and_comparisons(style):
    steps = [("Who is the spouse of Ann Lee?", "Bob"), ("Where does Bob work?", "Acme Inc")]
    assert ask(style, "summarise", CHAIN, *steps) == "Acme Inc"
    one = ("What is the country of Old Ulm?", "Norland")
    assert ask(style, "summarise", SAME, one, ("In which country is New Ulm?", "Norland")) == "yes"
    assert ask(style, "summarise", SAME, one, ("In which country is New Ulm?", "Sur")) == "no"
    assert ask(style, "summarise", SAME, one, ("In which country is New Ulm?", UNKNOWN)) == "no"


@pytest.mark.parametrize("style", STYLES)
def test_a_query_is_the_questions_noun_phrase(style):
    assert ask(style, "rewrite", CHAIN) == "founder of employer of spouse of Ann Lee"
    assert ask(style, "rewrite", SAME) == "country of Old Ulm and New Ulm"


@pytest.mark.parametrize("style", ["baselines_tiny", "baselines"])
def test_an_explanation_lists_facts_and_the_comparison(style):
    def explained(question: str, *texts: str) -> str:
        shown = format_passages(style, [Passage("", "title", text) for text in texts])
        values = {"question": question, "documents": shown, "answer": "Zoe"}
        request = LLMRequest("explain", user_turn(style, "explain", **values))
        return WorldExecutors(world(), style=style).complete([request])[0]

    founder = "Bolt was founded by Zoe and is based in Rom."
    links = ("Bob married Ann Lee and works for Bolt.", "Ann Lee married Bob and works for Acme.")
    assert explained(CHAIN, founder, *links) == (
        "The spouse of Ann Lee is Bob. The employer of Bob is Bolt. The founder of Bolt is Zoe."
    )
    assert explained(CHAIN, *links) == UNKNOWN
    sides = [
        "Old Ulm is a city in Norland run by mayor Zoe.",
        "Zoe is the mayor of New Ulm, a city in Sur.",
    ]
    assert explained(SAME, *sides) == (
        "The country of Old Ulm is Norland. The country of New Ulm is Sur. So it is no."
    )
    assert explained(SAME, sides[0]) == explained("Who?", *sides) == UNKNOWN


@pytest.mark.parametrize("prompt", ["", "Question: ", "Question: Who are you?", "1. a Answer: "])
def test_any_prompt_gets_a_reply(prompt):
    requests = [LLMRequest(purpose, (Message("user", prompt),)) for purpose in EXECUTORS]
    assert all(
        isinstance(r, str) for r in WorldExecutors(world(), style=STYLES[0]).complete(requests)
    )


def test_other_purposes_are_answered_as_the_reader_does():
    style = "mao_arag_tiny"
    questions = [q.text for q in world().questions["train"][:40]]
    shown = format_passages(style, world().passages[:3])
    requests = [
        LLMRequest("answer", user_turn(style, "answer", question=q, documents=shown))
        for q in questions
    ]
    reader, executors = (kind(world(), style=style) for kind in (WorldReader, WorldExecutors))
    assert executors.complete(requests) == reader.complete(requests)
