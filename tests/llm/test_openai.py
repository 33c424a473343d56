"""A server behind the interface of a frozen language model: settings, retries, odd replies."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jax_ragrl.config.schema import convert
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.judge import grade_answers
from jax_ragrl.llm.kinds import LLM, OpenAIConfig
from jax_ragrl.llm.openai import OPENAI, OpenAILLM, read_completion
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.costs import step_costs
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.run.models import load_llm
from jax_ragrl.run.overrides import override
from jax_ragrl.run.short_names import parse_llm
from jax_ragrl.runtime.servers import BoundedClient, take_counts, wait_for
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.types import LLMRequest, Message, Sampling
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, Tape

NO_REQUEST = {"concurrency": 0, "retries": -1, "timeout": 0}


def asked(text: str, **changes) -> LLMRequest:
    return LLMRequest("answer", (Message("system", "be brief"), Message("user", text)), **changes)


def test_extra_fields_are_sent_and_none_omits_a_field():
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": None, "top_p": 0.5}
    with serving() as (address, seen):
        assert load_llm(OpenAIConfig("m", address, extra_body=extra), None, "", Shapes()).complete(
            [asked("q", sampling=Sampling(0.3, 0.9, 7))]
        ) == ["q"]
    assert seen[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "max_tokens" not in seen[0] and seen[0]["model"] == "m"
    assert [message["role"] for message in seen[0]["messages"]] == ["system", "user"]
    assert (seen[0]["top_p"], seen[0]["temperature"], seen[0]["seed"]) == (0.5, 0.3, 0)


def test_extra_fields_come_from_command_line_or_config():
    named = parse_llm('openai:m@http://h:1/v1#{"top_k": 20}')
    assert (named.model, named.base_url, named.extra_body) == ("m", "http://h:1/v1", {"top_k": 20})
    assert parse_llm("openai:m").extra_body == {}
    for wrong in ("openai:m#{", "openai:m#[1]"):
        with pytest.raises(UserError, match="use a JSON object"):
            parse_llm(wrong)
    values: dict[str, Any] = {"llm": {"kind": "openai", "model": "m"}}
    override(
        values, ["--config.llm.extra_body.a.b=False", "--config.llm.extra_body.max_tokens=None"]
    )
    assert convert(LLM, values["llm"], "config.llm").extra_body == {
        "a": {"b": False},
        "max_tokens": None,
    }
    for text in ("3", "{[1]: 2}"):  # the second one is no literal of Python
        override(values, [f"--config.llm.extra_body={text}"])
        with pytest.raises(UserError, match="extra_body is .*: it must be a section of keys"):
            convert(LLM, values["llm"], "config.llm")


def test_a_key_may_end_in_a_newline_and_a_server_of_ones_own_needs_none(monkeypatch):
    """Files of secrets end in one; no header may contain it."""
    with serving() as (address, _):
        monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
        assert OpenAILLM("m", address, retries=0).complete([asked("q")]) == ["q"]
        monkeypatch.delenv("OPENAI_API_KEY")
        assert OpenAILLM("m", address).complete([asked("q")]) == ["q"]
        assert OpenAILLM("m", address).complete([]) == []
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        OpenAILLM("m")


def test_a_request_has_the_address_and_headers_of_openais_client(monkeypatch):
    sent = []

    async def ask(self, method, url, *, headers, **_) -> Any:
        sent.append((url, {name: x for name, x in headers.items() if name != "Content-Type"}))
        raise EffectError("no network")

    monkeypatch.setattr(BoundedClient, "ask", ask)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for name in ("OPENAI_API_KEY", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, f"my {name}")
    OpenAILLM("m").complete([asked("q")])
    monkeypatch.delenv("OPENAI_API_KEY")
    OpenAILLM("m", "http://h:1/v1/").complete([asked("q")])
    project = {"OpenAI-Project": "my OPENAI_PROJECT_ID"}
    assert sent == [
        (f"{OPENAI}/chat/completions", project | {"Authorization": "Bearer my OPENAI_API_KEY"}),
        ("http://h:1/v1/chat/completions", project),
    ]


@pytest.mark.parametrize(
    ("model", "address", "options", "message"),
    [
        ("m", "localhost:8000", {}, "http://HOST:PORT"),
        ("", "http://h:1/v1", {}, "http://HOST:PORT"),
        *(("m", "http://h:1/v1", {k: x}, "allow no request") for k, x in NO_REQUEST.items()),
    ],
)
def test_an_invalid_server_is_refused_before_any_request(model, address, options, message):
    with pytest.raises(UserError, match=message):
        OpenAILLM(model, address, **options)


def test_concurrency_and_timeout_come_from_the_config():
    inside, most = [], []

    def reply(body) -> str:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return "x"

    with serving(reply) as (address, _):
        llm = OpenAIConfig("m", address, concurrency=2, retries=0, timeout=9.0)
        found = load_llm(llm, None, "", Shapes())
        assert found.complete([asked(f"q{i}") for i in range(8)]) == ["x"] * 8
    assert max(most) == 2


def test_a_server_that_refuses_more_than_a_few_requests_gets_fewer(monkeypatch):
    """64 questions to a server with room for four: the limit falls until all are answered."""
    monkeypatch.setattr("jax_ragrl.llm.openai.PAUSE", 0.01)
    room, lock = threading.Semaphore(4), threading.Lock()
    refused = []

    def reply(body) -> Any:
        if not room.acquire(blocking=False):
            with lock:
                refused.append(1)
            return 429
        time.sleep(0.02)
        room.release()
        return "x"

    with serving(reply) as (address, _):
        llm = OpenAILLM("m", address, retries=30)
        assert llm.complete([asked(f"q{i}") for i in range(64)]) == ["x"] * 64
        assert refused and llm._gate.limit < 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_once", "seconds", "timeout"),
    [(2, 0.05, 0.4), (1, 0.1, 0.25), (4, 0.12, 0.09)],  # the last is longer than a first deadline
)
def test_a_slow_server_loses_no_request(at_once, seconds, timeout, monkeypatch):
    """All at once the 40 requests would take many times as long as a deadline."""
    monkeypatch.setattr("jax_ragrl.llm.openai.PAUSE", 0.01)
    room = threading.Semaphore(at_once)

    def reply(body) -> str:
        with room:
            time.sleep(seconds)
        return body["messages"][-1]["content"]

    with serving(reply) as (address, _):
        llm = OpenAILLM("m", address, timeout=timeout)
        assert llm.complete([asked(f"q{i}") for i in range(40)]) == [f"q{i}" for i in range(40)]


def test_a_late_try_has_a_longer_deadline_and_a_server_that_is_too_slow_names_the_remedy(
    monkeypatch,
):
    monkeypatch.setattr("jax_ragrl.llm.openai.PAUSE", 0.001)
    gone = threading.Event()

    def reply(body) -> str:
        gone.wait(20)
        return "late"

    with serving(reply) as (address, seen):
        start = time.monotonic()
        llm = OpenAILLM("m", address, timeout=0.1, retries=3)
        outcomes = llm.complete([asked(f"q{i}") for i in range(40)])
        seconds = time.monotonic() - start
        gone.set()
    late = [str(outcome) for outcome in outcomes if "within 0.4 s" in str(outcome)]
    assert late and all("raise llm.timeout" in text and "--parallel" in text for text in late)
    # One request in all of its tries proves the silence of the server: 0.1 + 0.2 + 0.4 + 0.4 s.
    assert all(isinstance(outcome, EffectError) for outcome in outcomes) and seconds < 5
    assert len(seen) < 40


def test_equal_greedy_requests_are_sent_once_and_without_a_seed(tmp_path):
    paths = [asked("q", seed=seed) for seed in range(4)]
    cold = [asked("q", seed=seed, sampling=Sampling(0.7)) for seed in range(2)]
    take_counts()
    with serving() as (address, seen):
        cached = OpenAILLM("m", address, cache=tmp_path / "llm_cache.sqlite")
        for llm in (OpenAILLM("m", address), cached):
            assert llm.complete(paths) == ["q"] * 4
        assert len(seen) == 2 and not any("seed" in body for body in seen)
        # A later batch of another path gets the stored reply.
        assert cached.complete([asked("q", seed=9)]) == ["q"] and len(seen) == 2
        assert take_counts() == {"llm_cache_hits": 1}
        # Samples have a seed each.
        assert cached.complete(cold) == ["q"] * 2
        assert sorted(body["seed"] for body in seen[2:]) == [0, 1]
        # A server that chooses the temperature may sample.
        for extra, count in (({"temperature": None}, 4), ({"temperature": 0, "seed": 3}, 1)):
            del seen[:]
            OpenAILLM("m", address, extra=extra).complete(paths)
            assert len(seen) == count and all("seed" in body for body in seen)


def test_equal_requests_of_batches_in_flight_at_once_are_sent_once(monkeypatch):
    """Groups of questions ask from a thread each, here before any reply has come."""
    arrived, all_arrived, one = [], threading.Event(), OpenAILLM._one

    async def counted(self, request):
        arrived.append(request)
        if len(arrived) == 4:
            all_arrived.set()
        return await one(self, request)

    def reply(body) -> str:
        assert all_arrived.wait(30)
        return "x"

    monkeypatch.setattr(OpenAILLM, "_one", counted)
    with serving(reply) as (address, seen), ThreadPoolExecutor() as pool:
        llm = OpenAILLM("m", address)
        batches = [[asked("q", seed=seed), asked("q", seed=seed + 9)] for seed in range(2)]
        assert list(pool.map(llm.complete, batches)) == [["x", "x"]] * 2 and len(seen) == 1


def test_a_request_whose_equal_was_interrupted_is_sent_itself():
    """The first of two threads is interrupted while both wait for one reply."""
    is_first, release = threading.Event(), threading.Event()

    def reply(body) -> str:
        if not is_first.is_set():
            is_first.set()
            release.wait(10)
        return "x"

    with serving(reply) as (address, seen):
        llm = OpenAILLM("m", address)

        async def run() -> object:
            first = asyncio.create_task(llm._one(asked("q")))
            await asyncio.to_thread(is_first.wait, 10)
            second = asyncio.create_task(llm._one(asked("q", seed=1)))
            await asyncio.sleep(0.05)
            assert len(seen) == 1
            first.cancel()
            return await second

        assert wait_for(run()) == "x" and len(seen) == 2
        release.set()


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


@pytest.mark.parametrize(
    "value",
    [b"", b"3", b"null", b"<html>502</html>", b'{"choices": [', b"[]", b"{}", b'{"choices": {}}']
    + [b'{"choices": []}', b'{"choices": [1]}', b'{"error": {"message": "overloaded"}}']
    + [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500, b"9" * 5000, b"\xff"],
)
def test_a_body_of_another_form_is_an_error(value):
    with pytest.raises(ValueError, match=r"choices|message|Expecting|nested|limit|codec"):
        read_completion(value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "New "}, {"type": "text", "text": "Ulm"}], "New Ulm"),
        ([], ""),
        (None, ""),
        ("cut \ud83d", "cut \ufffd"),
    ],
)
def test_content_is_text_parts_of_text_or_nothing(content, text):
    assert read_completion(body({"content": content})) == text


@pytest.mark.parametrize("wrong", ["7", -1, 1.5, True, None, [1], 10**30])
def test_missing_and_impossible_counts_are_no_counts(wrong):
    counts = {"prompt_tokens": wrong, "completion_tokens": 1}
    for usage in (counts, wrong, [wrong], {}, {"prompt_tokens": 5}):
        reply = read_completion(body({"content": "Ulm"}, usage))
        assert reply == "Ulm" and not isinstance(reply, MeteredReply)


@pytest.mark.parametrize("message", ODD)
def test_an_odd_reply_costs_its_own_question_alone(message):
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
