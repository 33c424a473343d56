"""A served system answers as it does under evaluation, whatever else is asked meanwhile."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from starlette.testclient import TestClient

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.serve import app, bodies
from jax_ragrl.serve.app import Limits, application
from jax_ragrl.serve.replies import Served
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.types import Question
from tests.listening import listening
from tests.rollout.tape import Tape, improvise, passage, system

REPO = pathlib.Path(__file__).parents[2]
TEXTS = [f"Where was {name} born?" for name in ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay")]


def tell(request: Any) -> str:
    """The question, and a failure where it is Bob's or Eve's."""
    text = request.messages[-1].content
    for name in ("Bob", "Eve"):
        if name in text:
            return EffectError(f"no route to {name}")
    if "Zoe" in text:
        raise RuntimeError("a bug")
    return f"said {next(t for t in text.splitlines() if 'Where' in t)} {request.seed}"


@contextlib.contextmanager
def client(
    tape: Tape, made: Any = None, limits: Limits | None = None, *, warm: bool = True
) -> Iterator[TestClient]:
    """A client of an application that plays a tape."""
    made = made or StandardRAG("c3po_tiny", 2)
    served = Served("tape", "a stub", made, tape.environment(), "Where is Warm?")
    with TestClient(application(served, limits or Limits(8, 16))) as http:
        if warm:
            ready(http)
        yield http


def ready(http: httpx2.Client) -> None:
    """Returns once a server is."""
    until(lambda: http.get("/health").status_code == 200)


def until(true: Callable[[], bool]) -> None:
    """Waits for what must come; a test that is broken ends all the same."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it has not come in two minutes"
        time.sleep(0.01)


def played() -> Tape:
    return Tape({}, told={"answer": tell})


def asked(http: TestClient, *texts: str) -> list[Any]:
    reply = http.post("/answer", json={"questions": list(texts)})
    assert reply.status_code == 200, reply.text
    return [told.get("error") or told["answer"] for told in reply.json()["answers"]]


def test_answers_are_those_of_an_evaluation_in_any_company():
    """Actions are drawn from each state's own seed: another seed, and most answers are others."""
    tape, made = Tape(improvise, told={"answer": tell, "answer_direct": tell}), system()
    texts = [f"Where was number {i} born?" for i in range(30)]
    questions = [Question(text, text, ()) for text in texts]
    wanted = dict(zip(texts, evaluate(made, questions, tape.environment()).answers, strict=True))
    assert len(set(wanted.values())) > 2
    with client(tape, made, Limits(60, 60)) as http:
        for company in (texts, texts[::-1], texts[1:3] * 2, texts[:1]):
            assert asked(http, *company) == [wanted[text] for text in company]


class Gate(Tape):
    """A tape whose language model waits to be let through; it keeps how many asked together."""

    def __init__(self, reply: str) -> None:
        super().__init__({}, told={"answer": reply})
        self.through, self.waits, self.together = threading.Event(), threading.Event(), []

    def complete(self, requests):
        if "Warm" not in requests[0].messages[-1].content:
            self.together.append(len(requests))
            self.waits.set()
            if not self.through.wait(20):
                self.through.set()  # a test that is broken ends all the same
        return super().complete(requests)


def waiting(http: TestClient, count: int) -> None:
    """Returns once so many questions wait."""
    until(lambda: http.get("/health").json()["waiting"] == count)


def test_what_is_asked_during_a_rollout_is_answered_together_in_the_next():
    tape = Gate("Ulm")
    with client(tape, limits=Limits(4, 4)) as http, ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(asked, http, TEXTS[0])]
        tape.waits.wait()
        replies += [pool.submit(asked, http, *TEXTS[i : i + 2]) for i in (1, 3)]
        waiting(http, 4)
        tape.through.set()
        assert [reply.result() for reply in replies] == [["Ulm"], ["Ulm"] * 2, ["Ulm"] * 2]
    assert tape.together == [1, 4]


def test_what_the_queue_has_no_room_for_is_refused_whole_and_may_come_again():
    tape = Gate("Ulm")
    with client(tape, limits=Limits(2, 3)) as http, ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(asked, http, TEXTS[0])]
        tape.waits.wait()
        replies += [pool.submit(asked, http, *TEXTS[1:3])]
        waiting(http, 2)
        full = http.post("/answer", json={"questions": TEXTS[3:5]})
        assert full.status_code == 503 and int(full.headers["retry-after"]) >= 1
        assert "later" in full.json()["error"]["message"]
        tape.through.set()
        assert [reply.result() for reply in replies] == [["Ulm"], ["Ulm"] * 2]
        assert asked(http, *TEXTS[3:5]) == ["Ulm"] * 2


def test_a_question_that_fails_is_one_answer_less():
    bugs = "Where is Zoe?"
    with client(played()) as http:
        ann, bob, zoe, cid = asked(http, TEXTS[0], TEXTS[1], bugs, TEXTS[2])
        assert ann.startswith(f"said Question: {TEXTS[0]}") and TEXTS[2] in cid
        assert (bob, zoe) == ("no route to Bob", "RuntimeError: a bug")
        assert asked(http, *TEXTS[:5])[1::3] == ["no route to Bob", "no route to Eve"]
        alone = http.post("/answer", json={"question": TEXTS[1]})
        assert alone.status_code == 502 and "no route to Bob" in alone.text
        assert http.post("/answer", json={"question": bugs}).status_code == 500


def test_an_outage_at_the_start_is_told_until_it_is_over():
    replies = iter([EffectError("no route"), "Ulm", "Ulm"])
    with client(Tape({}, told={"answer": lambda request: next(replies)}), warm=False) as http:
        seen: list[dict[str, Any]] = []

        def well() -> bool:
            reply = http.get("/health")
            seen.append(reply.json())
            assert (reply.status_code == 200) == seen[-1]["ready"]
            return seen[-1]["ready"]

        until(well)
        assert "no route" in [body.get("failure") for body in seen] and "failure" not in seen[-1]


def test_health_waits_for_the_first_answer_and_says_what_is_served():
    tape = Gate("Ulm")
    served = Served("tape", "a stub", StandardRAG("c3po_tiny", 2), tape.environment(), TEXTS[0])
    with TestClient(application(served, Limits(2, 2))) as http:
        tape.waits.wait()
        first = http.get("/health")
        assert first.status_code == 503 and first.json()["ready"] is False
        tape.through.set()
        ready(http)
        wanted = {"system": "tape", "policy": "a stub", "corpus": "tape", "passages": None}
        assert http.get("/health").json() == wanted | {"ready": True, "waiting": 0}


def test_a_trace_tells_actions_queries_passages_and_calls():
    texts = {
        "router": ["[Retrieval] Ann", "[Retrieval] Ann"],
        "filter": ["Thought: t\nAction: [1]"] * 2,
    }
    with client(Tape(texts, told={"answer": "Ulm"}), system()) as http:
        reply = http.post("/answer", json={"question": TEXTS[0], "trace": True}).json()
    steps = reply.pop("steps")
    assert reply == {"question": TEXTS[0], "answer": "Ulm", "why": "answered"}
    assert [step["role"] for step in steps] == ["router", "search", "filter", "answer"]
    assert [step["round"] for step in steps] == [0, 1, 2, 3]
    assert (steps[0]["action"], steps[0]["text"]) == ("Retrieval", "[Retrieval] Ann")
    found = [{"id": p.id, "title": p.title} for p in map(passage, (1, 2))]
    assert (steps[1]["query"], steps[1]["passages"]) == ("Ann", found)
    assert TEXTS[0] in steps[3]["prompt"] and steps[3]["reply"] == "Ulm"


def test_a_client_of_openai_is_answered():
    with client(played()) as http:
        ai = openai.OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
        )
        (model,) = ai.models.list().data
        earlier = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        for content in (TEXTS[0], [{"type": "text", "text": TEXTS[0]}]):
            asked_now = [*earlier, {"role": "user", "content": content}]
            said = ai.chat.completions.create(model=model.id, messages=asked_now, temperature=0)
            text = said.choices[0].message.content
            assert [text] == asked(http, TEXTS[0]) and said.model == "tape"
            assert said.usage.completion_tokens == len(text.split())
        with pytest.raises(openai.BadRequestError, match="leave stream out"):
            ai.chat.completions.create(model=model.id, messages=asked_now, stream=True)
        with pytest.raises(openai.InternalServerError, match="no route to Bob") as failed:
            said = [{"role": "user", "content": TEXTS[1]}]
            ai.chat.completions.create(model=model.id, messages=said)
        assert failed.value.status_code == 502


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
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
        ("/answer", {"question": "q" * (bodies.CHARACTERS + 1)}, 413, "at most"),
        ("/answer", b" " * (bodies.BYTES + 1), 413, "bytes"),
        ("/v1/chat/completions", {}, 400, "messages is null"),
        ("/v1/chat/completions", {"messages": ["q"]}, 400, "list of objects"),
        ("/v1/chat/completions", {"messages": []}, 400, "no message has the role user"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "is null"),
        ("/v1/chat/completions", {"messages": [{**USER, "content": [{}]}]}, 400, "is [{}]"),
        ("/v1/chat/completions", {"messages": [USER], "stream": True}, 400, "stream"),
        ("/v1/chat/completions", {"messages": [USER], "n": 2}, 400, "n is 2"),
        ("/retrieve", {}, 400, "queries is null"),
        ("/retrieve", {"queries": ["q", 1]}, 400, "a list of texts"),
        ("/retrieve", {"queries": ["q"] * (bodies.QUERIES + 1)}, 413, "at most"),
        ("/retrieve", {"queries": ["q"] * 300, "topk": 900}, 413, "too many passages"),
        ("/retrieve", {"queries": ["q"], "topk": 0}, 400, "topk is 0"),
        ("/retrieve", {"queries": ["q"], "topk": True}, 400, "topk is true"),
        ("/retrieve", {"queries": ["q"], "topk": bodies.TOP_K + 1}, 400, "from 1 to"),
        ("/retrieve", {"queries": ["q"], "return_scores": 1}, 400, "return_scores is 1"),
        ("/nowhere", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_with_it(
    http: TestClient, path: str, body: Any, status: int, told: str
):
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = http.post(path, **given)
    assert reply.status_code == status and told in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    with client(played()) as http:
        yield http


def test_the_index_alone_answers_with_documents_and_scores_if_asked_for(http: TestClient):
    documents = [
        {"id": f"p{i}", "title": f"title {i}", "text": f"text {i}"}
        | {"contents": f'"title {i}"\ntext {i}'}
        for i in (1, 2, 3)
    ]
    given = {"queries": ["a", ""], "topk": 3}
    assert http.post("/retrieve", json=given).json() == {"result": [documents] * 2}
    scored = http.post("/retrieve", json=given | {"return_scores": True}).json()["result"]
    assert scored == [[{"document": d, "score": 1.0} for d in documents]] * 2
    assert http.post("/retrieve", json={"queries": []}).json() == {"result": []}
    usual = http.post("/retrieve", json={"queries": ["a"]}).json()  # as many as the system asks for
    assert usual == {"result": [documents[:2]]}


STUB = """
import pathlib, sys, time
from jax_ragrl.serve.app import Limits, serve
from jax_ragrl.serve.replies import Served
from jax_ragrl.systems.baselines.standard import StandardRAG
from tests.listening import listening
from tests.rollout.tape import Tape

def reply(request):
    print("busy", flush=True)
    while "Warm" not in request.messages[-1].content and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return "Ulm"

environment = Tape({}, told={"answer": reply}).environment()
served = Served("tape", "a stub", StandardRAG("c3po_tiny", 2), environment, "Where is Warm?")
serve(served, "127.0.0.1", 0, Limits(1, 3))
"""


def test_a_server_that_is_told_to_end_finishes_what_it_has_and_leaves_with_0(tmp_path):
    go = tmp_path / "go"
    given = [sys.executable, "-c", STUB, str(go)]
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO
    ) as server:
        line = server.stdout.readline()
        address = line.split()[-1]
        assert line == f"ragrl: tape answers at {address}\n"
        with httpx2.Client(base_url=address, timeout=60) as http, ThreadPoolExecutor(3) as pool:
            ready(http)
            replies = [pool.submit(asked, http, text) for text in TEXTS[:3]]
            waiting(http, 2)
            server.send_signal(signal.SIGTERM)
            until(lambda: not accepts(address))
            go.touch()
            assert [reply.result() for reply in replies] == [["Ulm"]] * 3
        assert server.wait(60) == 0 and server.stderr.read() == ""


def accepts(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True


def test_a_port_that_is_taken_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        served = Served("tape", "a stub", StandardRAG(), Tape({}).environment(), "q")
        with pytest.raises(UserError, match="give another --port"):
            app.serve(served, "127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="at least a batch"):
        app.serve(served, "127.0.0.1", 0, Limits(4, 3))


def test_without_its_extra_the_command_says_how_to_install_it(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("jax_ragrl.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["serve"]) == 2
    line = capsys.readouterr().err
    assert "pip install starlette uvicorn" in line and line.count("\n") == 1


@pytest.mark.slow
def test_the_tiny_policy_behind_a_socket_answers_as_it_does_under_evaluation(monkeypatch):
    questions, seen = generate(0, 40).questions["test"][:12], []

    def serve(served: Served, host: str, port: int, limits: Limits) -> None:
        wanted = evaluate(served.system, questions, served.environment).answers
        with listening(application(served, limits)) as address:
            seen.append((wanted, *answers_at(address, [question.text for question in questions])))

    monkeypatch.setattr(app, "serve", serve)
    small = ("data.world.size=40", "index.kind=exact")
    assert main(["serve", *(f"--config.{setting}" for setting in small)]) == 0
    ((wanted, together, apart, chatted),) = seen
    assert tuple(together) == wanted == tuple(apart) and len(set(wanted)) > 3
    assert chatted == [answer or "" for answer in wanted]


def answers_at(address: str, texts: list[str]) -> tuple[list[Any], list[Any], list[Any]]:
    """Asked in one request, in one each at the same time, and by chat."""
    ai = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120)

    def chat(text: str) -> str | None:
        user = {"role": "user", "content": text}
        said = ai.chat.completions.create(model="c3po", messages=[user])
        return said.choices[0].message.content

    with httpx2.Client(base_url=address, timeout=120) as http, ThreadPoolExecutor(12) as pool:
        ready(http)
        together = asked(http, *texts)
        apart = [reply[0] for reply in pool.map(lambda text: asked(http, text), texts)]
        return together, apart, list(pool.map(chat, texts))
