"""Failures are never saved: of questions, evaluations and updates; no reply is paid twice."""

import collections
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_centred
from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.learner.dpo import pairs_of
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.llm.kinds import OpenAIConfig
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.trace import trees
from jax_ragrl.rollout.tree import build_forest
from jax_ragrl.run.build import build_components, reply_cache
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import Result, Trace
from jax_ragrl.run.load import load_job, load_recipe
from jax_ragrl.run.models import load_llm
from jax_ragrl.run.parts import Components
from jax_ragrl.runtime import servers
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.training import loop
from jax_ragrl.training.log import read_metrics
from jax_ragrl.training.rollout_metrics import describe_rollout, expert_fractions
from tests.jobs import config_values
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, Tape
from tests.tiny import saved_policy

SYSTEMS = ("c3po", "mmoa_rag", "coda", "mao_arag", "opera", "tree_grpo", "rag_ddr")
SMALL = {
    "data.world.size": 40,
    "index.kind": "exact",
    "run.questions_per_step": 2,
    "run.save_every": 1,
    "run.eval_before_training": False,
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_of_failed_questions_trains_nothing(system):
    recipe = load_recipe(config_values(f"tiny/{system}"))
    roles = tuple(recipe.system.roles)
    forest = build_forest([ANN, BOB], [], {0: "away", 1: "away"})
    forest = forest._replace(reward_N=recipe.reward(forest))
    compare = recipe.compare and functools.partial(recipe.compare, rule=group_centred)
    for credit in filter(None, (recipe.credit, compare)):
        credit_N, weight_N = credit(forest, forest.reward_N)
        assert credit_N.shape == weight_N.shape == (0,)
    turns = turns_of(forest, credit_N, weight_N)
    assert not turns and not pairs_of(forest, turns, roles)
    metrics = describe_rollout(forest, credit_N)
    metrics |= expert_fractions(forest, recipe.expander(frozenset(roles)), roles)
    assert metrics["failed"] == 2 and np.isfinite(list(metrics.values())).all()
    assert trees(forest, credit_N, 2) == []


def small_values(folder: pathlib.Path, **changes: object) -> dict[str, Any]:
    """Returns the config of CoDA with a policy in `folder`; `changes` are keys of `run`."""
    values = SMALL | {"policy": folder / "policy"} | {f"run.{k}": v for k, v in changes.items()}
    return config_values("tiny/coda", values)


def small_run(folder: pathlib.Path, **changes: object) -> tuple[Job, Components]:
    saved_policy(folder)
    job = load_job(small_values(folder, **changes))
    return job, build_components(job, folder)


def result(score: float, failures: tuple[str, ...] = ()) -> Result:
    """Returns an evaluation of two questions with the same score, or NaN."""
    scores = {"cover_em": np.full(2, score), "f1": np.full(2, score), "em": np.full(2, score)}
    ended = collections.Counter(failed=len(failures))
    traces = (Trace("answered", None, (), ()),) * 2
    lists = {"failures": failures, "passages": ((), ()), "traces": traces}
    return Result(scores, ended, {}, {}, {}, {}, (None, None), **lists)


ROLL_OUT = "jax_ragrl.training.rollouts.collect_shard"  # for `monkeypatch.setattr`


def roll_out_nothing(method, environment, questions, step):
    return build_forest(questions, [], {})


def fail_at(monkeypatch: pytest.MonkeyPatch, down: set[int]) -> tuple[set[int], list[Any]]:
    """Lets all questions of some steps fail; returns these and a list of all rollouts."""
    requests: list[Any] = []

    def roll_out(method, environment, questions, step):
        requests.append((step, [question.id for question in questions]))
        failed = range(len(questions)) if step in down else ()
        return build_forest(questions, [], dict.fromkeys(failed, "no route to the server"))

    monkeypatch.setattr(ROLL_OUT, roll_out)
    return down, requests


def test_an_outage_is_not_saved_and_its_steps_are_repeated(tmp_path, monkeypatch):
    job, parts = small_run(tmp_path, steps=7, dev_questions=0)
    down, requests = fail_at(monkeypatch, {1, 2, 3, 4, 5})
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {})
    with pytest.raises(UserError, match=r"5 steps in a row .* no route to the server"):
        loop.train(job, parts, tmp_path)
    assert [step for step, _ in requests] == [0, 1, 2, 3, 4, 5]
    assert Checkpoints(tmp_path).latest() == 1
    before = requests[:]
    with pytest.raises(UserError, match=r"the first step .* no route to the server"):
        loop.train(job, parts, tmp_path)  # the first step of a process does not wait
    assert requests[6:] == [before[1]]
    requests[:] = []
    down -= {1, 4, 5}  # a shorter outage does not stop the run
    loop.train(job, parts, tmp_path)
    assert requests[:5] == before[1:] and requests[-1][0] == 6
    assert [row["failed"] for row in read_metrics(tmp_path)] == [0, 0, 2, 2, 0, 0, 0]


def test_an_outage_at_the_last_step_is_repeated(tmp_path, monkeypatch):
    job, parts = small_run(tmp_path, steps=4, dev_questions=0)
    down, requests = fail_at(monkeypatch, {2, 3})
    with pytest.raises(UserError, match="not saved.*no route to the server.*--workdir=") as error:
        loop.train(job, parts, tmp_path)
    assert str(tmp_path) in str(error.value) and Checkpoints(tmp_path).latest() == 2
    before = requests[:]
    requests.clear()
    down.clear()
    loop.train(job, parts, tmp_path)
    assert requests == before[2:] and Checkpoints(tmp_path).latest() == 4
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["failed"]) for row in rows] == [(i, 0) for i in (1, 2, 3, 4)]


def test_an_evaluation_without_a_score_warns_or_is_repeated(tmp_path, monkeypatch):
    job, parts = small_run(tmp_path, steps=2, dev_questions=2, eval_every=1)
    results = [result(np.nan, ("connection refused",) * 2)] * 2 + [result(0.5)]
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: results.pop(0))
    with (
        pytest.warns(UserWarning, match="no dev question could be scored.*connection refused"),
        pytest.raises(UserError, match="last step is not saved: no dev question.*refused"),
    ):
        loop.train(job, parts, tmp_path)
    assert Checkpoints(tmp_path).latest() == 1
    loop.train(job, parts, tmp_path)
    rows = read_metrics(tmp_path)
    assert [row["eval/accuracy"] for row in rows] == [None, 0.5]
    assert [row.get("eval/failed") for row in rows] == [2, None]
    assert Checkpoints(tmp_path).latest() == 2


@pytest.mark.parametrize("change", [{"answers": ("another",)}, {"gold": ("p9",)}])
def test_a_resumed_run_refuses_other_questions(tmp_path, monkeypatch, change):
    """A file of questions is edited between two calls; the config names the same file."""
    job, parts = small_run(tmp_path, steps=2, dev_questions=0)

    def roll_out(method, environment, questions, step):
        if step == 1 and parts.questions is before:
            raise KeyboardInterrupt
        return build_forest(questions, [], {})

    before = parts.questions
    monkeypatch.setattr(ROLL_OUT, roll_out)
    with pytest.raises(KeyboardInterrupt):
        loop.train(job, parts, tmp_path)
    first, *rest = before["train"]
    edited = (dataclasses.replace(first, **change), *rest)
    parts = parts._replace(questions={**before, "train": edited})
    with pytest.raises(
        UserError, match=r"begun with other train questions .*delete questions\.json"
    ):
        loop.train(job, parts, tmp_path)
    (tmp_path / "questions.json").unlink()
    loop.train(job, parts, tmp_path)
    assert Checkpoints(tmp_path).latest() == 2
    with pytest.raises(UserError, match="begun with other train questions"):
        loop.train(job, parts._replace(questions=before), tmp_path)


def test_the_first_evaluation_is_step_zero_and_is_never_repeated(tmp_path, monkeypatch):
    """A run that is called again after its last step keeps the rows that it has."""
    job, parts = small_run(
        tmp_path, steps=1, dev_questions=2, eval_every=1, eval_before_training=True
    )
    results = [result(0.25), result(0.5)]
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: results.pop(0))
    servers.COUNTS["server_retries"] += 1  # before the run, of which it is no metric
    for _ in range(2):
        loop.train(job, parts, tmp_path)
        rows = read_metrics(tmp_path)
        assert [(row["step"], row["eval/accuracy"]) for row in rows] == [(0, 0.25), (1, 0.5)]
        assert "server_retries" not in rows[1]
    files = sorted(file.name for file in (tmp_path / "predictions").iterdir())
    assert files == ["dev-0.jsonl", "dev-1.jsonl"]


def test_a_run_that_is_killed_and_resumed_sends_each_request_once(tmp_path, monkeypatch):
    """Steps after the last checkpoint are repeated; their replies come from the file."""
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {})
    monkeypatch.setattr(loop, "learn", lambda method, policies, *_: (policies, {}))
    job, parts = small_run(tmp_path, steps=4, save_every=4, dev_questions=0)

    def run(folder: pathlib.Path, address: str, last: int = 9) -> list[dict[str, float]]:
        tape = Tape({})
        # As `ragrl train` does: each process loads the language model for the folder of the run.
        llm = load_llm(OpenAIConfig("m", address), None, "", Shapes(), cache=reply_cache(folder))

        def roll_out(method, environment, questions, step):
            if step > last:
                raise KeyboardInterrupt
            system = StandardRAG("c3po_tiny", 2)
            forest = collect(
                system, single_chain, questions, Environment(tape, tape, llm), seed=step
            )
            return forest._replace(reward_N=np.zeros(len(forest.records)))

        monkeypatch.setattr(ROLL_OUT, roll_out)
        loop.train(job, parts, folder)
        return read_metrics(folder)

    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    take_counts()
    with serving() as (address, seen):
        whole = run(folders[0], address)
        number = len(seen)
        with pytest.raises(KeyboardInterrupt):
            run(folders[1], address, last=2)
        assert 0 < len(seen) - number < number
        take_counts()  # another process begins at zero
        resumed = run(folders[1], address)
        assert len(seen) == 2 * number
    assert not any("llm_cache_hits" in row for row in whole)
    assert [row.get("llm_cache_hits", 0) for row in resumed] == [
        row["llm_calls"] if row["step"] <= 3 else 0 for row in whole
    ]
    paid = ("llm_calls", "llm_prompt_tokens", "llm_completion_tokens", "failed")
    assert [[row[k] for k in paid] for row in whole] == [[row[k] for k in paid] for row in resumed]
