"""Nothing is paid twice, and nothing that is wrong is stored."""

import multiprocessing
import signal
import sqlite3
from multiprocessing.connection import wait

import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.cache import FILE, ReplyCache, request_key
from jax_ragrl.llm.judge import grade_answers
from jax_ragrl.llm.kinds import OpenAIConfig
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.llm.recorded import record_replies
from jax_ragrl.run.build import reply_cache
from jax_ragrl.run.models import load_llm
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import LLMRequest, Message, Sampling
from tests.llm.server import serving
from tests.llm.writers import ROWS, complete, write
from tests.rollout.tape import ANN, BOB

WRITERS = 4


def asked(text: str, **changes: object) -> LLMRequest:
    return LLMRequest("answer", (Message("user", text),), **changes)  # type: ignore[arg-type]


def test_a_repeated_request_is_answered_from_the_file(tmp_path):
    requests = [asked(f"q{i}") for i in range(5)]
    with serving() as (address, seen):
        first = OpenAILLM("m", address, cache=tmp_path / FILE).complete(requests)
    # The server has stopped: another process would get the same replies, with their costs.
    take_counts()
    again = OpenAILLM("m", address, retries=0, cache=tmp_path / FILE).complete(requests)
    assert again == first and len(seen) == 5 and take_counts() == {"llm_cache_hits": 5}
    assert all(isinstance(reply, MeteredReply) for reply in again)
    assert [r.prompt_tokens for r in again] == [r.prompt_tokens for r in first]


def test_every_part_of_a_request_is_in_the_key_and_its_seed_if_it_is_sampled(tmp_path):
    greedy = [asked("q", seed=seed) for seed in range(3)]
    other = [
        asked("q"),
        asked("q", sampling=Sampling(0.5), seed=1),
        asked("q", sampling=Sampling(0.5)),
        asked("q", sampling=Sampling(0.0, 0.9)),
        asked("q", sampling=Sampling(0.0, 1.0, 7)),
        asked("p"),
        LLMRequest("answer", (Message("system", "q"),)),
    ]
    with serving() as (address, seen):
        for model, extra in (("m", {}), ("n", {}), ("m", {"top_k": 3}), ("m", {"seed": 5})):
            OpenAILLM(model, address, extra=extra, cache=tmp_path / FILE).complete(greedy + other)
    assert len(seen) == 4 * len(other)
    body = {"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]}
    assert request_key(body, 0) == request_key(dict(reversed(body.items())), 0)


def test_an_error_is_not_stored(tmp_path):
    states = iter([500, b'{"choices": [', b'{"choices": [{"message": {"content": 3}}]}', "good"])
    with serving(lambda body: next(states)) as (address, seen):
        for _ in range(3):
            llm = OpenAILLM("m", address, retries=0, cache=tmp_path / FILE)
            assert isinstance(llm.complete([asked("q")])[0], EffectError)
        assert llm.complete([asked("q")]) == llm.complete([asked("q")]) == ["good"]
    assert len(seen) == 4


def test_a_judge_is_paid_once_too(tmp_path):
    config = OpenAIConfig("m", None)
    with serving(lambda body: "true") as (address, seen):
        for _ in range(2):
            config = OpenAIConfig("m", address)
            judge = load_llm(config, None, "", Shapes(), cache=reply_cache(tmp_path))
            assert grade_answers(judge, [ANN, BOB], ["Ulm", "Rom"]).tolist() == [1.0, 1.0]
        assert len(seen) == 2
        off = load_llm(OpenAIConfig("m", address, cache=False), None, "", Shapes(), cache=tmp_path)
        assert off.complete([asked("q")]) == ["true"]
    assert [path.name for path in tmp_path.glob("*.sqlite")] == [FILE]


def test_without_a_folder_there_is_no_cache_and_a_damaged_file_is_named(tmp_path):
    cache = ReplyCache(tmp_path / "absent" / FILE)
    cache.put(b"key", "reply", {})
    assert cache.get(b"key") is None and not [*tmp_path.iterdir()]
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match=r"llm_cache.sqlite.*move the file away"):
        ReplyCache(tmp_path / FILE).get(b"key")
    with serving() as (address, _), pytest.raises(UserError, match="move the file away"):
        OpenAILLM("m", address, cache=tmp_path / FILE).complete([asked("q")])


def test_four_writers_and_a_kill_lose_and_damage_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    events = [context.Event() for _ in range(WRITERS)]
    writers = [
        context.Process(target=write, args=(tmp_path / FILE, i, event))
        for i, event in enumerate(events)
    ]
    for process in writers:
        process.start()
    assert all(event.wait(120) for event in events)
    writers[0].kill()
    for process in writers:
        process.join(120)
    assert [process.exitcode for process in writers] == [-signal.SIGKILL, 0, 0, 0]
    cache = ReplyCache(tmp_path / FILE)
    for writer in range(1, WRITERS):
        assert cache.get(b"%d-%d" % (writer, ROWS - 1)) == f"reply {writer} {ROWS - 1}"
    assert cache.get(b"0-19") == "reply 0 19" and cache.get(b"common 7") == "common 7"
    database = sqlite3.connect(tmp_path / FILE)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_killed_process_has_paid_for_what_it_received(tmp_path):
    """The server counts: a killed and a repeated call together cost one call."""
    file, process = tmp_path / FILE, None

    def reply(body) -> str:
        if len(seen) == 6 and process is not None:
            process.kill()
            # Not join(): of two threads that wait for one process, only one learns how it ended.
            wait([process.sentinel])
        return "x"

    with serving(reply) as (address, seen):
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=complete, args=(file, address))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        before, process = len(seen), None
        assert "5 replies of m, 5 new" in record_replies([file], tmp_path / "replies")
        complete(file, address)
        # The reply to the request during which it was killed never arrived.
        assert before == 6 and len(seen) == 10
