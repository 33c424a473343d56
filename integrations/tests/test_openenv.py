"""The environment of OpenEnv, behind its own server and client."""

from __future__ import annotations

import runpy
import sys

import httpx2
import pytest

from jax_ragrl.text.metrics import f1
from ragrl_envs import environment
from ragrl_envs.environment import QuestionAction, QuestionEnvironment
from ragrl_envs.questions import INSTRUCTIONS, load
from serving import MIXTURE, ROOT, URL, contents, post
from tests.listening import listening


@pytest.mark.parametrize(("data", "retriever"), [("world", URL), ("mixture", MIXTURE)])
def test_an_episode_searches_and_is_rewarded_at_its_end(data, retriever, monkeypatch, capsys):
    questions = load(data, "dev")
    question = questions[0]
    text = f"the {question.answers[0]} or so"
    reward = f1(text, question.answers)
    assert 0 < reward < 1
    monkeypatch.setenv("RAGRL_DATA", data)
    monkeypatch.setenv("RAGRL_RETRIEVER", retriever)
    with listening(environment.app) as address:
        monkeypatch.setenv("RAGRL_URL", address)
        monkeypatch.setattr(sys, "argv", ["openenv_episode.py", question.text, text])
        runpy.run_path(str(ROOT / "integrations" / "examples" / "openenv_episode.py"))
        splits = httpx2.get(f"{address}/ragrl/splits", trust_env=False).json()
        count = post("/ragrl/num_tasks", {"split": "dev"}, address)
        listed = post("/ragrl/task", {"split": "dev", "index": 1}, address)["task"]
    # On the wire a title stands in quotation marks.
    found = "\n\n".join(contents(question.text, 3, retriever)).replace('"', "")
    expected = f"{INSTRUCTIONS}\n\n{question.text}\n{found}\n{reward}\n"
    assert capsys.readouterr().out.replace('"', "") == expected.replace('"', "")
    assert [split["name"] for split in splits] == ["train", "dev", "test"]
    assert count == {"num_tasks": len(questions)}
    assert listed == {"id": questions[1].id, "index": 1, "question": questions[1].text}


def test_wrong_actions_are_refused_and_searches_are_limited(monkeypatch):
    monkeypatch.setattr(environment, "MAX_SEARCHES", 1)
    tried = QuestionEnvironment("world", URL)
    with pytest.raises(ValueError, match="call reset"):
        tried.step(QuestionAction(answer="x"))
    assert tried.reset(seed=3).text == QuestionEnvironment("world", URL).reset(seed=3).text
    with pytest.raises(ValueError, match="either search or answer"):
        tried.step(QuestionAction(search="x", answer="y"))
    assert not tried.step(QuestionAction(search="Hestria")).done
    last = tried.step(QuestionAction(search="Hestria"))
    assert last.done and last.reward == 0 and tried.state.step_count == 2
