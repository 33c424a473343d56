"""A chat completion of any form is text, or an error of one question."""

from __future__ import annotations

import json

import pytest

from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.judge import grade_answers
from jax_ragrl.llm.openai import OpenAILLM, read_completion
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.costs import step_costs
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.systems.baselines.standard import StandardRAG
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, Tape

ODD = [
    {"content": {"text": "Ulm"}},
    {"content": 3},
    {"content": True},
    {"content": ["Ulm"]},
    {"content": [{"type": "text", "text": 3}]},
    {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {},
    "Ulm",
    None,
]


def body(message: object, usage: object = None) -> bytes:
    return json.dumps({"choices": [{"message": message}], "usage": usage}).encode()


@pytest.mark.parametrize("message", ODD)
def test_content_that_is_not_text_is_an_error(message):
    with pytest.raises(ValueError, match=r"content|message"):
        read_completion(body(message))


@pytest.mark.parametrize(
    "value",
    [b"", b"3", b"null", b"<html>502</html>", b'{"choices": [', b"[]", b"{}", b'{"choices": {}}']
    + [b'{"choices": []}', b'{"choices": [1]}', b'{"error": {"message": "overloaded"}}'],
)
def test_a_body_of_another_form_is_an_error(value):
    with pytest.raises(ValueError, match=r"choices|message|Expecting"):
        read_completion(value)


@pytest.mark.parametrize(
    "value", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500, b"9" * 5000, b"\xff"]
)
def test_no_nesting_no_number_and_no_byte_ends_the_parser(value):
    with pytest.raises(ValueError, match=r"nested|limit|codec|Expecting"):
        read_completion(value)


def test_a_list_of_text_parts_is_text():
    parts = [{"type": "text", "text": "New "}, {"type": "text", "text": "Ulm"}]
    assert read_completion(body({"content": parts})) == "New Ulm"
    assert read_completion(body({"content": []})) == read_completion(body({"content": None})) == ""


def test_half_a_surrogate_pair_is_replaced():
    assert read_completion(body({"content": "cut \ud83d"})) == "cut \ufffd"


@pytest.mark.parametrize("wrong", ["7", -1, 1.5, True, None, [1], 10**30])
def test_missing_and_impossible_counts_are_no_counts(wrong):
    counts = {"prompt_tokens": wrong, "completion_tokens": 1}
    for usage in (counts, wrong, [wrong], {}, {"prompt_tokens": 5}):
        reply = read_completion(body({"content": "Ulm"}, usage))
        assert reply == "Ulm" and not isinstance(reply, MeteredReply)


@pytest.mark.parametrize("message", ODD)
def test_an_odd_reply_costs_its_own_question_alone(message, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    odd = body(message)
    tape = Tape({}, replies={})
    replies = {"True or False": "False", "": "Ulm"}

    def reply(sent):
        return (
            odd if ANN.text in str(sent) else next(r for k, r in replies.items() if k in str(sent))
        )

    with serving(reply) as (address, _):
        llm = OpenAILLM("m", address, retries=0)
        environment = Environment(tape, tape, llm)
        forest = collect(StandardRAG("c3po_tiny", 2), single_chain, [ANN, BOB], environment)
        grades = grade_answers(llm, [ANN, BOB], ["true", "true"])
    assert forest.failed_questions == (0,) and forest.leaves()[1].answer == "Ulm"
    assert f"m at {address} failed on answer: the reply" in forest.failures[0]
    assert step_costs(forest)["llm_prompt_tokens"] > 0
    assert grades[0] != grades[0] and grades[1] == 0.0
