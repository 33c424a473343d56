"""The world's reader as MAO-ARAG's executors."""

import functools

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.llm.executors import EXECUTORS, WorldExecutors
from jax_ragrl.llm.reader import UNKNOWN, understand
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


SERIAL = """1. Who is the spouse of Ann Lee?
2. What is the employer of #1?
3. Who is the founder of #2?"""
PARALLEL = """1. Who is the spouse of Ann Lee?
2. What is the employer of the spouse of Ann Lee?
3. Who is the founder of the employer of the spouse of Ann Lee?"""
SIDES = "1. What is the country of Old Ulm?\n2. What is the country of New Ulm?"
STEPS = [("Who is the spouse of Ann Lee?", "Bob"), ("Where does Bob work?", "Acme Inc")]
ONE = ("What is the country of Old Ulm?", "Norland")
DOCUMENTS = [
    ("Ann Lee", "Ann Lee was born in Ulm."),
    ("Ann Lee", "Ann Lee married Bob and works for Acme Inc."),
    ("Bob", "Bob married Ann Lee and works for Bolt."),
    ("Bolt", "Bolt was founded by Zoe and is based in Rom."),
]


def other(answer: str) -> list[tuple[str, str]]:
    return [ONE, ("In which country is New Ulm?", answer)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("purpose", "question", "shown", "reply"),
    [
        # Serial steps of a chain depend on each other; the parts of a comparison never do.
        ("decompose_serial", CHAIN, [], SERIAL),
        ("decompose_parallel", CHAIN, [], PARALLEL),
        ("decompose_serial", SAME, [], SIDES),
        ("decompose_parallel", SAME, [], SIDES),
        # Earlier answers stand in for their numbers.
        ("substitute", "Who is the founder of #2?", STEPS, "Who is the founder of Acme Inc?"),
        ("substitute", "Who is the founder of #3?", STEPS, "Who is the founder of #3?"),
        # Selected documents contain needed facts.
        ("select", CHAIN, DOCUMENTS, "2, 3, 4"),
        ("select", CHAIN, DOCUMENTS[:1], "none"),
        ("summarise", CHAIN, STEPS, "Acme Inc"),
        ("summarise", SAME, other("Norland"), "yes"),
        ("summarise", SAME, other("Sur"), "no"),
        ("summarise", SAME, other(UNKNOWN), "no"),
        # A query is the noun phrase of the question.
        ("rewrite", CHAIN, [], "founder of employer of spouse of Ann Lee"),
        ("rewrite", SAME, [], "country of Old Ulm and New Ulm"),
    ],
)
def test_an_executor_replies_in_every_style(style, purpose, question, shown, reply):
    assert ask(style, purpose, question, *shown) == reply


@pytest.mark.parametrize("style", STYLES)
def test_every_part_of_every_question_is_understood(style):
    for question in [q for split in world().questions.values() for q in split][:100]:
        serial = ask(style, "decompose_serial", question.text).split("\n")
        assert len(serial) == max(question.hops, 1)
        for line in (*serial, *ask(style, "decompose_parallel", question.text).split("\n")):
            part = understand(line.partition(" ")[2])
            assert part is not None and not part.compare


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
    replies = WorldExecutors(world(), style=STYLES[0]).complete(requests)
    assert all(isinstance(reply, str) for reply in replies)
