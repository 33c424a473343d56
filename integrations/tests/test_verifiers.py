"""The taskset of verifiers, run by its own command."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
from verifiers.v1.cli.eval.main import main

from jax_ragrl.text.metrics import f1
from ragrl_envs.questions import load
from serving import MIXTURE, URL, answer, findable, searching_model


@pytest.fixture
def evaluate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    # The program of an agent gets an environment by uv, of packages that no lock pins. Instead it
    # gets this one, which has them all. verifiers puts this folder of the home before the PATH.
    uv = tmp_path / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    answers = f"*--help*) echo --script;; *find*) echo {sys.executable};;"
    uv.write_text(f"#!/bin/sh\ncase $* in {answers} esac\n")
    uv.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(data: str, split: str, model: str, search: str) -> list[dict[str, Any]]:
        """The traces of the first two questions, in order, by `vf-eval`."""
        command = f"""ragrl-envs --env.taskset.data {data} --env.taskset.split {split}
            --env.taskset.search.url {search}/mcp --env.agent.harness.id null
            --env.agent.runtime.type subprocess --client.base-url {model} --client.api-key-var NONE
            -m ragrl -n 2 -o {tmp_path} --run.dir run --push False --rich None"""
        monkeypatch.setattr(sys, "argv", ["vf-eval"])  # which it changes
        main(command.split())
        lines = (tmp_path / "run" / "traces.jsonl").read_text().splitlines()
        episodes = sorted(map(json.loads, lines), key=lambda line: line["task"]["data"]["idx"])
        assert [len(episode["traces"]) for episode in episodes] == [1, 1]
        return [episode["traces"][0] for episode in episodes]

    return run


def test_a_model_that_searches_the_mixture_earns_the_reward(evaluate):
    golds = {question.text: question.answers[0] for question in load("mixture", "dev")[:2]}
    with searching_model(golds) as model:
        traces = evaluate("mixture", "dev", model, MIXTURE)
    found = findable(golds, MIXTURE)
    assert sorted(found) == [0.0, 1.0]
    assert [trace["rewards"]["f1"]["score"] for trace in traces] == found
    assert [trace["metrics"]["exact"] for trace in traces] == found
    assert [len(trace["calls"]) for trace in traces] == [2, 2]  # a search, then the answer


def test_a_served_system_gets_the_f1_of_its_answers(evaluate):
    questions = load("world", "test")[:2]
    traces = evaluate("world", "test", f"{URL}/v1", URL)
    expected = [f1(answer(question.text), question.answers) for question in questions]
    assert [trace["rewards"]["f1"]["score"] for trace in traces] == expected
