"""Supervised runs of a generator: batches, prompts, output files and a falling loss."""

from __future__ import annotations

import itertools
import json
import pathlib
import signal

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import Example, example, imitate
from jax_ragrl.retrieval.kinds import VectorIndex
from jax_ragrl.run.data import load_data
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.models import load_policy
from jax_ragrl.systems.baselines.examples import ChatExample
from jax_ragrl.types import Message
from jax_ragrl.warmstart import finetune
from jax_ragrl.warmstart.finetune import EXAMPLES, batches, build_examples, fine_tune, load_finetune
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


def test_a_target_ends_with_the_stop_token():
    sample = example(tokenizer(), *ChatExample((Message("user", "who"),), "film", "answer"))
    assert tokenizer().decode(sample.target[:-1]) == "film"
    assert sample.target[-1] == tokenizer().stop_ids[0]
    assert sample.prompt == tuple(tokenizer().chat([Message("user", "who")]))


def test_an_existing_model_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    data = {"world": {"size": 60}}
    run = load_finetune({"examples": "vanilla", "steps": 1, "optimizer": {"policy_lr": 1.0},
                         "data": data})  # fmt: skip
    with pytest.raises(UserError, match="checkpoint exists already.*another --out"):
        fine_tune(run, tmp_path)


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
    data = {"world": {"seed": 0, "size": 60}}
    values = {
        "examples": kind,
        "steps": 1,
        "optimizer": {"policy_lr": 1.0},
        "data": data,
        "top_k": 2,
    }
    run = load_finetune(values)
    corpus, questions, world = load_data(run.data)
    retriever = load_retriever(corpus, VectorIndex(kind="exact"), tmp_path)
    examples = build_examples(run, questions["train"][:40], retriever, corpus.passages, world)
    tape = Tape({})
    evaluate(EXAMPLES[kind](run.style, run.top_k), [ANN], tape.environment())
    prompts = [example.messages[-1].content for example in examples] + tape.prompts
    assert len(examples) > 5 and {prompt.partition("\n")[0] for prompt in prompts} == {first}
    assert all(prompt.count("\n") == 3 for prompt in prompts)  # equal numbers of passages


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "robust", "explained"])
def test_a_run_learns_and_saves_a_model(tmp_path, kind):
    folder = saved_policy(tmp_path)
    config = tmp_path / "config.py"
    config.write_text(CONFIG.replace("FOLDER", str(folder)))
    out = tmp_path / "out"
    assert (
        main(["warmup", "sft", f"--config={config}", f"--config.examples={kind}", f"--out={out}"])
        == 0
    )
    losses = [json.loads(row)["loss"] for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    summary = json.loads((out / "summary.json").read_text())
    assert summary["examples"] > 16 and set(summary["accuracy"]) == {"before", "after"}
    assert pathlib.Path(summary["checkpoint"]) == out / "checkpoint"
    assert load_policy(summary["checkpoint"])[1].vocabulary() == tokenizer().vocabulary()


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
    summaries = [tmp_path / out / "summary.json" for out in ("whole", "cut")]
    one, other = (json.loads(x.read_text()) | {"checkpoint": ""} for x in summaries)
    assert one == other
