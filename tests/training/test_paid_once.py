"""A resumed run and a repeated evaluation send no request that was answered before."""

import json
import pathlib

import numpy as np
import pytest

from jax_ragrl.llm.kinds import OpenAIConfig
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.run.build import reply_cache
from jax_ragrl.run.evaluate import NoSampler, evaluate
from jax_ragrl.run.models import load_llm
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.training import loop
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, Tape
from tests.training.test_outage import ROLL_OUT, small_run


class Stopped(Exception):  # noqa: N818 - as a kill
    """The run is killed."""


def test_a_run_that_is_killed_and_resumed_sends_each_request_once(tmp_path, monkeypatch):
    """Steps after the last checkpoint are repeated; their replies come from the file."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {})
    monkeypatch.setattr(loop, "learn", lambda method, policies, *_: (policies, {}))
    job, parts = small_run(tmp_path, steps=4, save_every=4, dev_questions=0)

    def run(folder: pathlib.Path, address: str, last: int = 9) -> list[dict[str, float]]:
        tape = Tape({})
        # As `ragrl train` does: each process loads the language model for the folder of the run.
        llm = load_llm(OpenAIConfig("m", address), None, "", Shapes(), cache=reply_cache(folder))

        def roll_out(method, environment, questions, step):
            if step > last:
                raise Stopped
            system = StandardRAG("c3po_tiny", 2)
            forest = collect(
                system, single_chain, questions, Environment(tape, tape, llm), seed=step
            )
            return forest._replace(reward_N=np.zeros(len(forest.records)))

        monkeypatch.setattr(ROLL_OUT, roll_out)
        loop.train(job, parts, folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    take_counts()
    with serving() as (address, seen):
        whole = run(folders[0], address)
        number = len(seen)
        with pytest.raises(Stopped):
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


def test_a_repeated_evaluation_sends_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    results = []
    with serving(lambda body: "False") as (address, seen):
        for _ in range(2):
            llm = OpenAILLM("m", address, cache=reply_cache(tmp_path))
            environment = Environment(NoSampler(), Tape({}), llm)
            system = StandardRAG("c3po_tiny", 2)
            result = evaluate(system, [ANN, BOB], environment, judge=llm)
            results.append(json.dumps(result.summary()))
        assert len(seen) == 4 and results[0] == results[1]  # two answers and two verdicts
