"""llama.cpp's own server as the frozen language model: evaluation, training, streams, a kill."""

import json

import pytest
from starlette.testclient import TestClient

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.llm.cache import FILE, read_cache
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.models.by_name import SMOLLM2
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.evaluate import NoSampler
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.serve.app import Limits, application
from jax_ragrl.serve.replies import ServedSystem
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.text.metrics import f1
from tests.llm.llama_server import MISSING, llama_cpp
from tests.rollout.tape import Tape
from tests.serve.stub import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
# A server may be slow on a machine with other work, but not for longer than this.
PATIENCE = 100.0
TRAINING = {
    "data.world.size": 60,
    "index.kind": "exact",
    "recipe.system.top_k": 1,
    "recipe.reward": "f1",
    "optimizer.minibatches": 1,
    "run.steps": 3,
    "run.questions_per_step": 4,
    "run.dev_questions": 0,
    "run.eval_before_training": False,
    "run.save_every": 1,
    "run.save_trees_every": 1,
    "run.trees_per_save": 4,
    "shapes.prompt_lengths": (144,),
    "shapes.batch_sizes": (4,),
    "packing.row_lengths": (192,),
    "packing.tokens_per_device": 768,
    "llm.kind": "openai",
    "llm.model": SMOLLM2,
    "llm.timeout": PATIENCE,
    "llm.concurrency": 1,  # the requests of a step come one after the other
    "llm.retries": 1,
    "llm.extra_body.max_tokens": 8,
}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("jax_ragrl.llm.openai.PAUSE", 0.01)


@pytest.fixture(scope="module")
def address():
    with llama_cpp() as (address, _):
        yield address


def test_an_evaluation_is_repeated_offline_from_its_recorded_replies(address, tmp_path, capsys):
    rows = [
        {"id": "q1", "question": "What is the capital of France?", "answers": ["Paris"]},
        {"id": "q2", "question": "What is two plus two?", "answers": ["4", "four"]},
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def table(*options: str) -> dict[str, dict[str, object]]:
        shared = (f"--questions={tmp_path}/q.jsonl", "--retriever=http://127.0.0.1:1", "--json")
        assert main(["evaluate", "--systems=direct", *shared, *options]) == 0
        return json.loads(capsys.readouterr().out)

    few = '#{"max_tokens": 12}'
    live = table(f"--llm=openai:{SMOLLM2}@{address}{few}", f"--out={tmp_path}/t.json")
    assert live["direct"]["costs"]["llm_calls"] == 1
    assert 1 <= live["direct"]["costs"]["llm_completion_tokens"] <= 12
    assert main(["replies", f"{tmp_path}/{FILE}", f"--out={tmp_path}/r.xz"]) == 0
    assert f"2 replies of {SMOLLM2}" in capsys.readouterr().out
    offline = (f"--llm=openai:{SMOLLM2}{few}", f"--replies={tmp_path}/r.xz", "--replies-only")
    assert table(*offline) == live


def test_its_answers_are_streamed(address):
    llm = OpenAILLM(SMOLLM2, address, timeout=PATIENCE, extra={"max_tokens": 8})
    environment = Environment(NoSampler(), Tape({}), llm)
    served = ServedSystem("rag", SMOLLM2, StandardRAG("c3po_tiny", 1), environment, "Who is Ann?")
    limits = Limits(2, 4, seconds=PATIENCE)
    with TestClient(application(served, limits), "http://localhost") as http:
        wait_until(lambda: http.get("/health").status_code == 200)
        body = {"model": "rag", "messages": [{"role": "user", "content": "Where was Ann born?"}]}
        whole = http.post("/v1/chat/completions", json=body).json()
        text = http.post("/v1/chat/completions", json=body | {"stream": True}).text
    *events, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert end == "[DONE]" and whole["choices"][0]["message"]["content"]
    parts = "".join(delta.get("content") or "" for delta in deltas)
    assert parts == whole["choices"][0]["message"]["content"]


def test_a_server_that_is_killed_within_a_step_fails_its_questions_and_the_run_goes_on_with_another(
    tmp_path, capsys, monkeypatch
):
    config = [f"--config={CONFIGS}/tiny/one_module.py:rrr"]
    config += [f"--config.{key}={value}" for key, value in TRAINING.items()]
    tries, attempt, kill_at = [], OpenAILLM._attempt, 7  # the third question of the second step

    async def counted(self, *request):
        tries.append(request)
        if len(tries) == kill_at:
            process.kill()
            process.wait()
        return await attempt(self, *request)

    def train(address: str) -> int:
        return main(["train", *config, f"--workdir={tmp_path}", f"--config.llm.base_url={address}"])

    def rows() -> list[dict[str, float]]:
        return list(read_rows(tmp_path / "metrics.jsonl"))

    monkeypatch.setattr(OpenAILLM, "_attempt", counted)
    with llama_cpp() as (address, process):
        assert train(address) == 2
    error = capsys.readouterr().err
    assert f"every question of the step failed, the last with: {SMOLLM2} at {address} fai" in error
    assert "the last step is not saved" in error and "start the same command again" in error
    assert [row["failed"] for row in rows()] == [0, 2, 4]
    # Only questions with a reply have a tree, and the reward of this reply.
    replies = {text.strip() for _, text, *_ in read_cache(tmp_path / FILE)[0]}
    trees = [row["trees"] for row in read_rows(tmp_path / "trees.jsonl")]
    assert [len(row) for row in trees] == [4, 2, 0]
    for tree in trees[0] + trees[1]:
        (leaf,) = (node for node in tree["nodes"] if node["role"] == "leaf")
        assert leaf["why"] == "answered" and leaf["answer"].strip() in replies
        assert leaf["reward"] == pytest.approx(
            f1(leaf["answer"], tree["answers"], punct="space"), abs=1e-5
        )
    # A step whose questions all failed is repeated; nothing else is.
    before = rows()[:2]
    with llama_cpp() as (address, process):
        kill_at = 0
        tries.clear()
        assert train(address) == 0
    assert rows()[:2] == before and [row["failed"] for row in rows()] == [0, 2, 0]
    assert len(tries) == 4 and len(read_cache(tmp_path / FILE)[0]) == 10
