"""The HTTP server: the same answers as in an evaluation, in any batch."""

import contextlib
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.serve import app
from jax_ragrl.serve.access import Settings
from jax_ragrl.serve.app import Limits, application
from jax_ragrl.serve.bodies import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_MARKS,
    MAX_QUERIES,
    MAX_TOP_K,
    parse_question,
)
from jax_ragrl.serve.replies import ServedSystem
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.types import Question
from tests.listening import listening
from tests.rollout.tape import Tape, improvise, passage, system
from tests.serve.stub import accepts, connect, request, status, wait_until

REPO = pathlib.Path(__file__).parents[2]
TEXTS = [f"Where was {name} born?" for name in ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay")]


def answer_text(request: Any) -> str:
    """A text with the question; a failure for Bob and Eve."""
    text = request.messages[-1].content
    for name in ("Bob", "Eve"):
        if name in text:
            return EffectError(f"no route to {name}")
    if "Zoe" in text:
        raise RuntimeError("a bug")
    return f"said {next(t for t in text.splitlines() if 'Where' in t)} {request.seed}"


@contextlib.contextmanager
def client(
    tape: Tape, system: Any = None, limits: Limits | None = None, *, warm: bool = True
) -> Iterator[TestClient]:
    """A client of an application whose environment is a tape."""
    system = system or StandardRAG("c3po_tiny", 2)
    served = ServedSystem("tape", "a stub", system, tape.environment(), "Where is Warm?")
    with TestClient(application(served, limits or Limits(8, 16)), "http://localhost") as http:
        if warm:
            wait_until_ready(http)
        yield http


def wait_until_ready(http: httpx2.Client) -> None:
    wait_until(lambda: http.get("/health").status_code == 200)


def failing_tape() -> Tape:
    return Tape({}, replies={"answer": answer_text})


def ask(http: TestClient, *texts: str) -> list[Any]:
    reply = http.post("/answer", json={"questions": list(texts)})
    assert reply.status_code == 200, reply.text
    return [x.get("error") or x["answer"] for x in reply.json()["answers"]]


def test_answers_equal_those_of_an_evaluation():
    """Actions are sampled with the seed of each state: with other seeds, most answers differ."""
    tape, tape_system = (
        Tape(improvise, replies={"answer": answer_text, "answer_direct": answer_text}),
        system(),
    )
    texts = [f"Where was number {i} born?" for i in range(30)]
    questions = [Question(text, text, ()) for text in texts]
    expected = dict(
        zip(texts, evaluate(tape_system, questions, tape.environment()).answers, strict=True)
    )
    assert len(set(expected.values())) > 2
    with client(tape, tape_system, Limits(60, 60)) as http:
        for batch in (texts, texts[::-1], texts[1:3] * 2, texts[:1]):
            assert ask(http, *batch) == [expected[text] for text in batch]


class Gate(Tape):
    """A tape whose language model blocks until `opened`; it records the sizes of batches."""

    def __init__(self, reply: str) -> None:
        super().__init__({}, replies={"answer": reply})
        self.opened, self.is_waiting, self.batch_sizes = threading.Event(), threading.Event(), []

    def complete(self, requests):
        if "Warm" not in requests[0].messages[-1].content:
            self.batch_sizes.append(len(requests))
            self.is_waiting.set()
            if not self.opened.wait(20):
                self.opened.set()  # a broken test must end, too
        return super().complete(requests)


def wait_for_queue(http: TestClient, count: int) -> None:
    """Waits until `count` questions are queued."""
    wait_until(lambda: http.get("/health").json()["waiting"] == count)


def test_a_full_queue_refuses_the_whole_request():
    tape = Gate("Ulm")
    with client(tape, limits=Limits(2, 3)) as http, ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(ask, http, TEXTS[0])]
        tape.is_waiting.wait()
        replies += [pool.submit(ask, http, *TEXTS[1:3])]
        wait_for_queue(http, 2)
        full = http.post("/answer", json={"questions": TEXTS[3:5]})
        assert full.status_code == 503 and int(full.headers["retry-after"]) >= 1
        assert "later" in full.json()["error"]["message"]
        tape.opened.set()
        assert [reply.result() for reply in replies] == [["Ulm"], ["Ulm"] * 2]
        assert ask(http, *TEXTS[3:5]) == ["Ulm"] * 2


def test_a_failing_question_affects_no_other():
    bug = "Where is Zoe?"
    with client(failing_tape()) as http:
        ann, bob, zoe, cid = ask(http, TEXTS[0], TEXTS[1], bug, TEXTS[2])
        assert ann.startswith(f"said Question: {TEXTS[0]}") and TEXTS[2] in cid
        assert (bob, zoe) == ("no route to Bob", "RuntimeError: a bug")
        assert ask(http, *TEXTS[:5])[1::3] == ["no route to Bob", "no route to Eve"]
        reply = http.post("/answer", json={"question": TEXTS[1]})
        assert reply.status_code == 502 and "no route to Bob" in reply.text
        assert http.post("/answer", json={"question": bug}).status_code == 500


def test_an_outage_at_the_start_is_reported_until_it_ends():
    replies = iter([EffectError("no route"), "Ulm", "Ulm"])
    with client(Tape({}, replies={"answer": lambda request: next(replies)}), warm=False) as http:
        bodies: list[dict[str, Any]] = []

        def is_ready() -> bool:
            reply = http.get("/health")
            bodies.append(reply.json())
            assert (reply.status_code == 200) == bodies[-1]["ready"]
            return bodies[-1]["ready"]

        wait_until(is_ready)
        assert "no route" in [body.get("failure") for body in bodies]
        assert "failure" not in bodies[-1]


def test_health_describes_the_system_once_it_is_ready():
    tape = Gate("Ulm")
    served = ServedSystem(
        "tape", "a stub", StandardRAG("c3po_tiny", 2), tape.environment(), TEXTS[0]
    )
    with TestClient(application(served, Limits(2, 2)), "http://localhost") as http:
        tape.is_waiting.wait()
        first = http.get("/health")
        assert first.status_code == 503 and first.json()["ready"] is False
        tape.opened.set()
        wait_until_ready(http)
        facts = {"system": "tape", "policy": "a stub", "corpus": "tape", "passages": None}
        assert http.get("/health").json() == facts | {"ready": True, "waiting": 0}


def test_a_trace_has_actions_queries_passages_and_calls():
    texts = {
        "router": ["[Retrieval] Ann", "[Retrieval] Ann"],
        "filter": ["Thought: t\nAction: [1]"] * 2,
    }
    with client(Tape(texts, replies={"answer": "Ulm"}), system()) as http:
        reply = http.post("/answer", json={"question": TEXTS[0], "trace": True}).json()
    steps = reply.pop("steps")
    assert reply == {"question": TEXTS[0], "answer": "Ulm", "why": "answered"}
    assert [step["role"] for step in steps] == ["router", "search", "filter", "answer"]
    assert [step["round"] for step in steps] == [0, 1, 2, 3]
    assert (steps[0]["action"], steps[0]["text"]) == ("Retrieval", "[Retrieval] Ann")
    documents = [{"id": p.id, "title": p.title} for p in map(passage, (1, 2))]
    assert (steps[1]["query"], steps[1]["passages"]) == ("Ann", documents)
    assert TEXTS[0] in steps[3]["prompt"] and steps[3]["reply"] == "Ulm"


def test_the_openai_client_works():
    with client(failing_tape()) as http:
        ai = openai.OpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        )
        (model,) = ai.models.list().data
        earlier = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        for content in (TEXTS[0], [{"type": "text", "text": TEXTS[0]}]):
            messages = [*earlier, {"role": "user", "content": content}]
            completion = ai.chat.completions.create(
                model=model.id, messages=messages, temperature=0
            )
            text = completion.choices[0].message.content
            assert [text] == ask(http, TEXTS[0]) and completion.model == "tape"
            assert completion.usage.completion_tokens == len(text.split())
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = ai.chat.completions.create(model=model.id, messages=messages, **options)
        *chunks, end, last = stream
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text
        assert end.choices[0].finish_reason == "stop" and end.usage is None
        assert last.choices == [] and last.usage == completion.usage
        with pytest.raises(openai.InternalServerError, match="no route to Bob") as failure:
            messages = [{"role": "user", "content": TEXTS[1]}]
            ai.chat.completions.create(model=model.id, messages=messages)
        assert failure.value.status_code == 502


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_without_an_answer_is_not_complete(stream):
    messages = [{"role": "user", "content": TEXTS[0]}]
    with client(Tape(lambda role, prompt, rng: "?"), system(), warm=False) as http:
        reply = http.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
    reason, why = re.search(r'"finish_reason": ?"(\w+)", ?"why": ?"([^"]*)"', reply.text).groups()
    assert reason == "length" and why not in ("", "answered")


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/answer", b"{", 400, "not JSON"),
        ("/answer", b"\xff", 400, "not JSON"),
        ("/answer", b"[" * 100_000, 400, "not JSON"),
        ("/answer", [TEXTS[0]], 400, "send a JSON object"),
        ("/answer", {}, 400, "fields []"),
        ("/answer", {"question": "q", "questions": ["q"]}, 400, "either question or questions"),
        ("/answer", {"question": "q", "trce": True}, 400, "trce"),
        ("/answer", {"question": "q", "trace": 1}, 400, "trace is 1"),
        ("/answer", {"question": " \n"}, 400, "not blank"),
        ("/answer", {"question": 7}, 400, "question is 7"),
        ("/answer", {"question": None}, 400, "question is null"),
        ("/answer", b'{"question": "\\ud800"}', 400, "surrogate"),
        ("/answer", b'{"\\ud800": 1}', 400, "either question or questions"),
        ("/answer", {"questions": "q"}, 400, "a list of texts"),
        ("/answer", {"questions": []}, 400, "a list of texts"),
        ("/answer", {"questions": ["q", {}]}, 400, "questions[1] is {}"),
        ("/answer", {"questions": ["q"] * 9}, 413, "8 at most"),
        ("/answer", {"question": "q" * (MAX_CHARACTERS + 1)}, 413, "at most"),
        ("/answer", b" " * (MAX_BYTES + 1), 413, "bytes"),
        ("/answer", b"[" + b"[]," * MAX_MARKS + b"[]]", 413, "commas"),
        ("/v1/chat/completions", {}, 400, "messages is null"),
        ("/v1/chat/completions", {"messages": ["q"]}, 400, "list of objects"),
        ("/v1/chat/completions", {"messages": []}, 400, "no message has the role user"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "is null"),
        ("/v1/chat/completions", {"messages": [{**USER, "content": [{}]}]}, 400, "is [{}]"),
        ("/v1/chat/completions", {"messages": [USER], "stream": 1}, 400, "stream is 1"),
        ("/v1/chat/completions", {"messages": [USER], "stream_options": {}}, 400, "and stream as"),
        ("/v1/chat/completions", {"messages": [USER], "n": 2}, 400, "n is 2"),
        ("/retrieve", {}, 400, "queries is null"),
        ("/retrieve", {"queries": ["q", 1]}, 400, "a list of texts"),
        ("/retrieve", {"queries": ["q"] * (MAX_QUERIES + 1)}, 413, "at most"),
        ("/retrieve", {"queries": ["q"] * 300, "topk": 900}, 413, "too many passages"),
        ("/retrieve", {"queries": ["q"], "topk": 0}, 400, "topk is 0"),
        ("/retrieve", {"queries": ["q"], "topk": True}, 400, "topk is true"),
        ("/retrieve", {"queries": ["q"], "topk": MAX_TOP_K + 1}, 400, "from 1 to"),
        ("/retrieve", {"queries": ["q"], "return_scores": 1}, 400, "return_scores is 1"),
        ("/retrieve", {"queries": ["q"], "top_k": 1}, 400, "optionally topk"),
        ("/nowhere", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_a_bad_request_is_refused_with_a_reason(http, path, body, status, message):
    content = body if isinstance(body, bytes) else json.dumps(body)
    reply = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status and message in reply.json()["error"]["message"]


def test_a_value_of_more_levels_than_json_can_be_written_with_is_refused():
    deep: list[Any] = []
    for _ in range(100_000):  # the parser accepts some more than the encoder
        deep = [deep]
    with pytest.raises(HTTPException, match="question is a value of too many levels: give a text"):
        parse_question(deep)


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    with client(failing_tape()) as http:
        yield http


def test_search_returns_documents_with_optional_scores(http: TestClient):
    documents = [
        {"id": f"p{i}", "title": f"title {i}", "text": f"text {i}"}
        | {"contents": f'"title {i}"\ntext {i}'}
        for i in (1, 2, 3)
    ]
    body = {"queries": ["a", ""], "topk": 3}
    assert http.post("/retrieve", json=body).json() == {"result": [documents] * 2}
    result = http.post("/retrieve", json=body | {"return_scores": True}).json()["result"]
    assert result == [[{"document": d, "score": 1.0} for d in documents]] * 2
    assert http.post("/retrieve", json={"queries": []}).json() == {"result": []}
    nothing = {"topk": None, "return_scores": None}  # typed clients send what is not set as null
    assert (
        http.post("/retrieve", json=body | nothing | {"topk": 3}).json()["result"][0] == documents
    )
    default = http.post("/retrieve", json={"queries": ["a"]}).json()  # the top_k of the system
    assert default == {"result": [documents[:2]]}


STUB = """
import pathlib, sys, time
from jax_ragrl.serve.access import Settings
from jax_ragrl.serve.app import Limits, serve
from jax_ragrl.serve.replies import ServedSystem
from jax_ragrl.systems.baselines.standard import StandardRAG
from tests.rollout.tape import Tape

def reply(request):
    print("busy", flush=True)
    while "Warm" not in request.messages[-1].content and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return "Ulm"

environment = Tape({}, replies={"answer": reply}).environment()
served = ServedSystem("tape", "a stub", StandardRAG("c3po_tiny", 2), environment, "Where is Warm?")
serve(served, Limits(1, 3), Settings(drain=5))
"""


@pytest.mark.slow
def test_a_terminated_server_answers_its_queue(tmp_path):
    go = tmp_path / "go"
    command = [sys.executable, "-c", STUB, str(go)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO
    ) as server:
        line = server.stdout.readline()
        address = line.split()[-1]
        assert line == f"ragrl: tape answers at {address}\n"
        with httpx2.Client(base_url=address, timeout=60) as http, ThreadPoolExecutor(3) as pool:
            wait_until_ready(http)
            assert server.stdout.readline() == "busy\n"  # with the warm-up question
            assert re.fullmatch(r"ragrl: tape is ready after [\d.]+ s\n", server.stdout.readline())
            replies = [pool.submit(ask, http, text) for text in TEXTS[:3]]
            wait_for_queue(http, 2)
            port = int(address.rpartition(":")[2])
            hanging = connect(port, request(b"{", length=9, path="/answer"))
            half = connect(port, b"POST /")
            time.sleep(0.2)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: not accepts(port))
            go.touch()
            assert [reply.result() for reply in replies] == [["Ulm"]] * 3
            assert (status(half), status(hanging)) == (0, 503), "at the deadline"
        assert server.wait(60) == 0 and "Traceback" not in server.stderr.read()


def test_a_port_in_use_is_a_user_error(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = ServedSystem("tape", "a stub", StandardRAG(), Tape({}).environment(), "q")
        with pytest.raises(UserError, match="give another --port"):
            app.serve(served, settings=Settings(port=listener.getsockname()[1]))


def test_a_missing_extra_is_named_with_its_installation(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("jax_ragrl.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["serve"]) == 2
    line = capsys.readouterr().err
    assert "pip install starlette uvicorn" in line and line.count("\n") == 1


@pytest.mark.slow
def test_the_tiny_policy_gives_equal_answers_over_http(monkeypatch):
    questions, calls = generate(0, 40).questions["test"][:12], []
    texts = [question.text for question in questions]

    def serve(served: ServedSystem, limits: Limits, settings: Settings) -> None:
        expected = evaluate(served.system, questions, served.environment).answers
        with (
            listening(application(served, limits)) as address,
            httpx2.Client(base_url=address, timeout=120) as http,
            ThreadPoolExecutor(12) as pool,
        ):
            wait_until_ready(http)
            apart = [reply[0] for reply in pool.map(lambda text: ask(http, text), texts)]
            calls.append((expected, ask(http, *texts), apart))

    monkeypatch.setattr(app, "serve", serve)
    overrides = ("data.world.size=40", "index.kind=exact")
    assert main(["serve", *(f"--config.{setting}" for setting in overrides)]) == 0
    ((expected, together, apart),) = calls
    assert tuple(together) == expected == tuple(apart) and len(set(expected)) > 3
