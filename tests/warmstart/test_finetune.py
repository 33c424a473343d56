"""Supervised runs of a generator: batches, prompts, output files and a falling loss."""

from __future__ import annotations

import itertools
import json
import signal

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import Example, imitate
from jax_ragrl.retrieval.kinds import VectorIndex
from jax_ragrl.run.data import load_data
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.models import load_policy
from jax_ragrl.warmstart import finetune
from jax_ragrl.warmstart.finetune import EXAMPLES, batches, build_examples, load_finetune
from tests.rollout.tape import ANN, Tape
from tests.tiny import saved_policy, tokenizer


def nth(i: int) -> Example:
    return Example((i,), (i,), "answer")


def test_every_pass_uses_each_example_once():
    data = list(itertools.islice(batches([nth(i) for i in range(5)], 2, seed=0), 5))
    order = [e.prompt[0] for batch in data for e in batch]
    assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4] and order[:5] != order[5:]
    again = itertools.islice(batches([nth(i) for i in range(5)], 2, seed=0), 5)
    assert data == list(again)


def test_an_empty_list_of_examples_is_refused():
    with pytest.raises(UserError, match="there are no examples"):
        next(batches([], 2, seed=0))


CONFIG = """
from ml_collections import ConfigDict
def get_config():
    return ConfigDict({
        "policy": "FOLDER", "examples": "vanilla", "steps": 8, "batch_size": 16, "top_k": 1,
        "test_questions": 4, "data": {"world": {"seed": 0, "size": 60}},
        "index": {"kind": "exact"}, "optimizer": {"policy_lr": 0.02, "schedule": "constant"},
        "shapes": {"prompt_lengths": (512,), "batch_sizes": (4,), "max_new_tokens": 4},
        "packing": {"row_lengths": (512,), "tokens_per_device": 4096},
    })
"""


def test_unknown_examples_are_refused():
    with pytest.raises(UserError, match="examples is 'x': use one of vanilla, robust, explained"):
        load_finetune({"examples": "x", "steps": 1, "optimizer": {"policy_lr": 1.0}, "data": {}})


@pytest.mark.parametrize(("kind", "first"), [("vanilla", "answer"), ("robust", "answer"),
                                             ("explained", "instruct")])  # fmt: skip
def test_evaluation_uses_the_prompts_of_training(tmp_path, kind, first):
    values = {"examples": kind, "steps": 1, "optimizer": {"policy_lr": 1.0}, "top_k": 2}
    run = load_finetune(values | {"data": {"world": {"seed": 0, "size": 60}}})
    corpus, questions, world = load_data(run.data)
    retriever = load_retriever(corpus, VectorIndex(kind="exact"), tmp_path)
    examples = build_examples(run, questions["train"][:40], retriever, corpus.passages, world)
    tape = Tape({})
    evaluate(EXAMPLES[kind](run.style, run.top_k), [ANN], tape.environment())
    prompts = [example.messages[-1].content for example in examples] + tape.prompts
    assert len(examples) > 5 and {prompt.partition("\n")[0] for prompt in prompts} == {first}
    assert all(prompt.count("\n") == 3 for prompt in prompts)  # equal numbers of passages


class Interrupted:
    """A function whose second call is interrupted."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return self.function(*args)


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_its_own_config_only(tmp_path, monkeypatch, capsys):
    folder = saved_policy(tmp_path)
    config = tmp_path / "config.py"
    config.write_text(CONFIG.replace("FOLDER", str(folder)))

    def sft(out: str, *options: str) -> int:
        return main(["warmup", "sft", f"--config={config}", f"--out={tmp_path / out}", *options])

    def stop_in_second_step(*args):
        steps.append(args)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)
        return imitate(*args)

    steps: list[tuple] = []
    assert sft("whole") == 0
    monkeypatch.setattr(finetune, "imitate", stop_in_second_step)
    assert sft("cut") == 143 and len(steps) == 2
    assert sft("cut", "--config.seed=1") == 2
    assert "another config (config.seed differs)" in capsys.readouterr().err
    monkeypatch.setattr(finetune, "_accuracy", interrupted := Interrupted(finetune._accuracy))
    assert sft("cut") == 130  # in the evaluation after the training
    monkeypatch.setattr(finetune, "_accuracy", interrupted.function)
    assert sft("cut") == 0 and len(steps) >= 8
    assert sft("cut") == 2 and "exists already: choose another --out" in capsys.readouterr().err
    one, other = (json.loads((tmp_path / x / "summary.json").read_text()) for x in ("whole", "cut"))
    assert one | {"checkpoint": ""} == other | {"checkpoint": ""}
    rows = map(json.loads, (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert one["examples"] > 16 and set(one["accuracy"]) == {"before", "after"}
    assert other["checkpoint"] == str(tmp_path / "cut" / "checkpoint")
    assert load_policy(other["checkpoint"])[1].vocabulary() == tokenizer().vocabulary()
