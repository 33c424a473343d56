"""A server behind the interface of a frozen language model: order, settings, retries, failures."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from jax_ragrl.config.overrides import override
from jax_ragrl.config.schema import build
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.run.components import load_llm
from jax_ragrl.run.config import LLM, parse_llm
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import LLMRequest, Message, Sampling
from tests.llm.server import completion, serving


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def asked(text: str, **changes) -> LLMRequest:
    return LLMRequest("answer", (Message("system", "be brief"), Message("user", text)), **changes)


def test_replies_come_in_the_order_of_the_requests():
    with serving() as (address, seen):
        llm = OpenAILLM("m", address, concurrency=3)
        assert llm.complete([asked(f"q{i}") for i in range(8)]) == [f"q{i}" for i in range(8)]
        assert llm.complete([]) == [] and len(seen) == 8


def test_a_request_says_how_it_is_sampled():
    with serving() as (address, seen):
        OpenAILLM("m", address).complete([asked("q", sampling=Sampling(0.3, 0.9, 7), seed=5)])
    wanted = {"model": "m", "temperature": 0.3, "top_p": 0.9, "max_tokens": 7, "seed": 5}
    assert {name: seen[0][name] for name in wanted} == wanted
    assert [message["role"] for message in seen[0]["messages"]] == ["system", "user"]


def test_what_else_a_request_holds_is_sent_and_none_leaves_out_what_would_be():
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": None, "top_p": 0.5}
    with serving() as (address, seen):
        assert load_llm(LLM("openai", "m", address, extra=extra), None, "", Shapes()).complete(
            [asked("q", sampling=Sampling(0.3, 0.9, 7))]
        ) == ["q"]
    assert seen[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "max_tokens" not in seen[0]
    assert (seen[0]["top_p"], seen[0]["temperature"], seen[0]["seed"]) == (0.5, 0.3, 0)


def test_what_else_it_holds_can_be_said_on_the_command_line_and_in_a_config():
    named = parse_llm('openai:m@http://h:1/v1#{"top_k": 20}')
    assert (named.model, named.base_url, named.extra) == ("m", "http://h:1/v1", {"top_k": 20})
    assert parse_llm("openai:m").extra == {}
    for wrong in ("openai:m#{", "openai:m#[1]"):
        with pytest.raises(UserError, match="give a JSON object"):
            parse_llm(wrong)
    values: dict[str, Any] = {"llm": {"kind": "openai", "model": "m"}}
    override(values, ["--config.llm.extra.a.b=False", "--config.llm.extra.max_tokens=None"])
    assert build(LLM, values["llm"]).extra == {"a": {"b": False}, "max_tokens": None}
    with pytest.raises(UserError, match="config.extra is 3: it must be a section of keys"):
        build(LLM, {"extra": 3})


def test_a_reply_costs_what_its_server_says():
    with serving() as (address, _):
        (reply,) = OpenAILLM("m", address).complete([asked("q")])
    assert isinstance(reply, MeteredReply)
    assert (reply.prompt_tokens, reply.completion_tokens) == (1, 1)


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 5}])
def test_of_a_server_that_does_not_say_a_reply_is_its_text_alone(usage):
    def said(body):
        return json.dumps({**completion(body, "Ulm"), "usage": usage}).encode()

    with serving(said) as (address, _):
        (reply,) = OpenAILLM("m", address).complete([asked("q")])
    assert reply == "Ulm" and not isinstance(reply, MeteredReply)


def test_a_busy_server_is_asked_again():
    states = iter([429, 500, "late"])
    with serving(lambda body: next(states)) as (address, seen):
        assert OpenAILLM("m", address).complete([asked("q")]) == ["late"] and len(seen) == 3


def test_what_stays_refused_is_a_failure_and_not_an_answer():
    with serving(lambda body: 400 if "bad" in str(body) else "good") as (address, _):
        good, bad = OpenAILLM("m", address).complete([asked("q"), asked("bad")])
    assert good == "good" and isinstance(bad, EffectError) and "answer" in str(bad)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [',
        b"<html>502</html>",
        b'{"choices": []}',
        b'{"choices": null}',
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"index": 0, "finish_reason": "content_filter", "message": null}]}',
        b'{"error": {"message": "overloaded"}}',
        b"null",
        b"[1]",
    ],
)
def test_a_reply_that_is_no_completion_is_a_failure_and_stops_nothing(body):
    with serving(lambda sent: body if "bad" in str(sent) else "good") as (address, _):
        bad, good = OpenAILLM("m", address, retries=0).complete([asked("bad"), asked("q")])
    assert good == "good" and isinstance(bad, EffectError)
    assert str(bad).startswith(f"m at {address} failed on answer: ")


def test_a_server_of_ones_own_needs_no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with serving() as (address, _):
        assert OpenAILLM("m", address).complete([asked("q")]) == ["q"]
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        OpenAILLM("m")


@pytest.mark.parametrize("model, address", [("m", "localhost:8000"), ("", "http://h:1/v1")])
def test_what_can_be_no_server_is_refused_before_anything_is_asked(model, address):
    with pytest.raises(UserError, match="http://HOST:PORT"):
        OpenAILLM(model, address)


def test_a_config_says_how_many_requests_are_made_at_once_and_how_long_they_take():
    inside, most = [], []

    def reply(body) -> str:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return "x"

    with serving(reply) as (address, _):
        llm = LLM("openai", "m", address, concurrency=2, retries=0, timeout=9.0)
        found = load_llm(llm, None, "", Shapes())
        assert found.complete([asked(f"q{i}") for i in range(8)]) == ["x"] * 8
    assert max(most) == 2


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"retries": -1}, {"timeout": 0}])
def test_numbers_that_allow_no_request_are_refused(wrong):
    with pytest.raises(UserError, match="allow no request"):
        OpenAILLM("m", "http://localhost:1/v1", **wrong)
