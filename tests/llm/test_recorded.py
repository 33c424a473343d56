"""Replies are paid once: a cache repeats them, and a file repeats a run without its server."""

import contextlib
import json
import lzma
import multiprocessing
import pathlib
import signal
import sqlite3
from multiprocessing.connection import wait

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.cache import FILE, ReplyCache, print_hits, request_key
from jax_ragrl.llm.kinds import OpenAIConfig
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.llm.recorded import FORMAT, read_replies, record_replies
from jax_ragrl.run.models import load_llm
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import LLMRequest, Message, Sampling
from jax_ragrl.validation.models import _check_reply
from tests.llm.server import completion, serving
from tests.llm.writers import ROWS, complete, write


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def said(body) -> bytes:
    """An echo whose costs depend on the prompt."""
    text = body["messages"][-1]["content"].partition("\n")[0]
    usage = {"prompt_tokens": len(str(body)), "completion_tokens": len(text)}
    return json.dumps(completion(body, text) | {"usage": usage}).encode()


def filled(cache: pathlib.Path, replies: dict[str, str]) -> pathlib.Path:
    """Returns a cache of replies by the text of their requests, of the model `m`."""
    for text, reply in replies.items():
        body = {"model": "m", "messages": [{"content": text}], "max_tokens": 100 + ord(text[0])}
        ReplyCache(cache).put(request_key(body, 0), MeteredReply(reply, 7, 2), body)
    return cache


def offline(file: pathlib.Path, model: str = "m", **fields: object):
    """Returns a model without an address, a key or a cache."""
    config = OpenAIConfig(model, replies=str(file), replies_only=True, **fields)  # type: ignore[arg-type]
    return load_llm(config, None, "", Shapes())


@pytest.mark.parametrize("name", ["replies.jsonl", "replies.jsonl.xz"])
def test_a_file_gives_the_replies_and_costs_of_its_caches_without_a_server(tmp_path, capsys, name):
    sampled = [asked("c", sampling=Sampling(0.7), seed=seed) for seed in (1, 2)]
    requests = [asked("a"), asked("b", seed=3), *sampled]
    with serving(said) as (address, _):
        live = OpenAILLM("m", address, cache=tmp_path / FILE).complete(requests)
    assert main(["replies", f"{tmp_path}/{FILE}", f"--out={tmp_path}/{name}"]) == 0
    assert f"{name}: 4 replies of m, 4 new" in capsys.readouterr().out
    take_counts()
    found = offline(tmp_path / name).complete(requests)
    assert found == live and take_counts() == {"llm_cache_hits": 4}
    assert [r.__getnewargs__() for r in found] == [r.__getnewargs__() for r in live]
    print_hits()
    assert f"4 replies of language models came from {name}, not a" in capsys.readouterr().err
    settings = read_replies(tmp_path / name).settings
    assert [json.loads(text)["temperature"] for text in sorted(settings)] == [0.0, 0.7]


def test_a_file_has_no_secret_of_the_requests(tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWAY_TOKEN", "very-secret")
    with serving(said) as (address, seen):
        llm = OpenAILLM("m", address, extra={"user": "very-secret"}, cache=tmp_path / FILE)
        llm.complete([asked("a")])
    record_replies([tmp_path / FILE], tmp_path / "r")
    assert seen[0]["user"] == "very-secret" and "secret" not in (tmp_path / "r").read_text()
    (reply,) = offline(tmp_path / "r", extra_body={"user": "very-secret"}).complete([asked("a")])
    assert reply == "a"


def test_a_reply_without_counts_stays_without(tmp_path):
    body = b'{"choices": [{"message": {"content": "x\\u2028\\n\\u00e9"}}]}'
    with serving(lambda _: body) as (address, _):
        OpenAILLM("m", address, cache=tmp_path / FILE).complete([asked("a")])
    record_replies([tmp_path / FILE], tmp_path / "r")
    (reply,) = offline(tmp_path / "r").complete([asked("a")])
    assert reply == "x\u2028\n\u00e9" and not isinstance(reply, MeteredReply)


def test_other_requests_are_sent_or_end_the_run_with_their_first_words(tmp_path):
    with serving(said) as (address, seen):
        OpenAILLM("m", address, cache=tmp_path / FILE).complete([asked("a")])
        record_replies([tmp_path / FILE], tmp_path / "r")
        llm = load_llm(OpenAIConfig("m", address, replies=f"{tmp_path}/r"), None, "", Shapes())
        assert llm.complete([asked("a"), asked("b")]) == ["a", "b"] and len(seen) == 2
    long = asked(" ".join(map(str, range(99))))
    words = r"'answer' that begins with '0 1 2 3 4 5 6 7 8 9 10 11'; it holds 1 reply of m: "
    with pytest.raises(UserError, match=words + ".*start the server.*'ragrl replies'"):
        offline(tmp_path / "r").complete([long])
    # The name of the model and the sampling are part of a request.
    with pytest.raises(UserError, match="no reply of another model"):
        offline(tmp_path / "r", "another model").complete([asked("a")])
    with pytest.raises(UserError, match="no reply of m to"):
        offline(tmp_path / "r", extra_body={"top_k": 1}).complete([asked("a")])
    with pytest.raises(UserError, match="without replies: give the file"):
        OpenAIConfig("m", replies_only=True)


def test_equal_replies_make_equal_bytes_and_the_first_of_two_stays(tmp_path):
    one = filled(tmp_path / "one", {"a": "1", "b": "2", "c": "3"})
    two = filled(tmp_path / "two", {"c": "3", "d": "4", "a": "another"})
    for name in ("x", "x.xz"):
        at_once, later = tmp_path / f"at_once.{name}", tmp_path / f"later.{name}"
        assert "4 replies of m, 4 new" in record_replies([one, two], at_once)
        assert "3 replies of m, 3 new" in record_replies([one], later)
        assert "1 new, " in (text := record_replies([two], later))
        assert text.endswith("left out for an earlier reply to the same request: 1")
        assert at_once.read_bytes() == later.read_bytes()
        assert "0 new" in record_replies([two, one], later)
        assert at_once.read_bytes() == later.read_bytes()
    three = filled(tmp_path / "three", {"d": "4", "b": "2"})
    assert "2 new" in record_replies([three], tmp_path / "y")
    assert "2 new" in record_replies([one], tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == (tmp_path / "at_once.x").read_bytes()
    head = json.loads((tmp_path / "at_once.x").read_text().partition("\n")[0])
    limits = [settings["max_tokens"] for settings in head["settings"]]
    assert limits == [197, 198, 199, 200] and head["replies"] == 4
    texts = [text for text, *_ in read_replies(later).rows.values()]
    assert sorted(texts) == ["1", "2", "3", "4"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".tmp") == []


HEAD = {"format": FORMAT, "replies": 1, "settings": [{"model": "m"}]}


def lines(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no recorded replies"),
        (b"\xff\xfe\x00", "holds no recorded replies"),
        (b"SQLite format 3\x00", "holds no recorded replies"),
        (lines({"question": "Who?"}), "not of the format"),
        (lines([1]), "not of the format"),
        (lines({"format": FORMAT}), "of None replies"),
        (lines(HEAD), "it has 0 of 1 replies"),
        (lines(HEAD, ["00", "x", 1, 2])[:-5], "holds no recorded replies"),
        (lines(HEAD, ["00", "x", 1]), "line 2 is not a key, a text and two numbers"),
        (lines(HEAD, ["00", "x", 1, "2"]), "line 2 is not a key"),
        (lines(HEAD, 3), "holds no recorded replies"),
        (lines(HEAD | {"settings": 3}, ["00", "x", 1, 2]), "holds no recorded replies"),
        (lines(HEAD | {"settings": ["x"]}, ["00", "x", 1, 2]), "'x' is no settings of a model"),
        (lines(HEAD | {"settings": "ab"}, ["00", "x", 1, 2]), "'a' is no settings of a model"),
        (lines(HEAD, ["00", "x", 1, 2], ["00", "y", 1, 2]), "line 3 is another reply to the requ"),
        (lzma.compress(lines(HEAD, ["00", "x", 1, 2]))[:-20], "damaged xz file"),
    ],
)
def test_an_unreadable_file_is_refused_before_any_request(tmp_path, content, message):
    file = tmp_path / "r"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        offline(file)
    assert str(file) in str(error.value)
    with pytest.raises(UserError, match=message):
        record_replies([filled(tmp_path / "c", {"a": "1"})], file)
    assert file.read_bytes() == content


def test_a_cache_that_cannot_be_read_is_named_and_not_created(tmp_path):
    (tmp_path / "text").write_bytes(b"no database" * 1000)
    sqlite3.connect(tmp_path / "empty").execute("CREATE TABLE t (x)")
    for name in ("absent", "text", "empty"):
        with pytest.raises(UserError, match=f"{name}: no replies can be read.*give the llm_cache"):
            record_replies([tmp_path / name], tmp_path / "r")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text"]
    with pytest.raises(UserError, match="does not exist"):
        offline(tmp_path / "r")


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("settings", ("{bad",)),
        ("settings", ("[1]",)),
        ("settings", (3,)),
        ("replies", ("a key of text", "x", 1, 2)),
        ("replies", (b"k", "x", 1, None)),
        ("replies", (b"k", b"x", 1, 2)),
    ],
)
def test_a_cache_with_rows_of_another_kind_is_refused(table, row, tmp_path):
    cache = filled(tmp_path / "c", {"a": "1"})
    with contextlib.closing(sqlite3.connect(cache, isolation_level=None)) as database:
        database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)
    with pytest.raises(UserError, match="c: no replies can be read.*give the llm_cache"):
        record_replies([cache], tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_table_is_repeated_offline_with_equal_scores_and_costs(tmp_path, capsys):
    rows = [{"id": f"q{i}", "question": f"Who is {i}?", "answers": [f"{i}"]} for i in range(3)]
    questions = tmp_path / "q.jsonl"
    questions.write_bytes(lines(*rows))

    def table(*options: str) -> str:
        args = ["--systems=direct", "--retriever=http://127.0.0.1:1", "--json", "--prices=1,2"]
        assert main(["evaluate", f"--questions={questions}", *args, *options]) == 0
        return capsys.readouterr().out

    with serving(lambda body: said(body) if "grade" not in str(body) else "True") as (address, _):
        models = [f"--{role}=openai:m@{address}" for role in ("llm", "judge")]
        live = table(*models, f"--out={tmp_path}/t.json")
    assert main(["replies", f"{tmp_path}/{FILE}", f"--out={tmp_path}/r"]) == 0
    assert "6 replies of m" in capsys.readouterr().out
    offline = ("--llm=openai:m", "--judge=openai:m", f"--replies={tmp_path}/r", "--replies-only")
    assert table(*offline) == live
    assert json.loads(live)["direct"]["costs"]["dollars"] > 0
    rows.append({"id": "new", "question": "Who is new?", "answers": ["x"]})
    questions.write_bytes(lines(*rows))
    assert main(["evaluate", f"--questions={questions}", "--systems=direct", *offline]) == 2


def test_recorded_replies_are_checked_instead_of_a_server(tmp_path):
    record_replies([filled(tmp_path / FILE, {"a": "1"})], tmp_path / "r")
    config = OpenAIConfig("m", replies=f"{tmp_path}/r", replies_only=True)
    (finding,) = _check_reply("llm", config)
    assert (finding.level, finding.text) == ("ok", f"{tmp_path}/r holds 1 reply of m")


WRITERS = 4


def asked(text: str, **changes: object) -> LLMRequest:
    return LLMRequest("answer", (Message("user", text),), **changes)  # type: ignore[arg-type]


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
