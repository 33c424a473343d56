"""Supervised runs of a generator: batches, prompts, output files and a falling loss."""

import itertools
import json
import signal
from unittest.mock import Mock

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
    with pytest.raises(UserError, match="there are no examples"):
        next(batches([], 2, seed=0))
    data = list(itertools.islice(batches([nth(i) for i in range(5)], 2, seed=0), 5))
    order = [e.prompt[0] for batch in data for e in batch]
    assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4] and order[:5] != order[5:]
    again = itertools.islice(batches([nth(i) for i in range(5)], 2, seed=0), 5)
    assert data == list(again)


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


@pytest.mark.slow
def test_a_run_stopped_in_training_and_in_evaluation_resumes(tmp_path, monkeypatch, capsys):
    """That the parameters are those of a whole run: test_demos.py, of the same loop."""
    config, out = tmp_path / "config.py", tmp_path / "out"
    config.write_text(CONFIG.replace("FOLDER", str(saved_policy(tmp_path))))
    command = ["warmup", "sft", f"--config={config}", f"--out={out}"]

    def stop_in_second_step(*args):
        steps.append(args)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)
        return imitate(*args)

    steps: list[tuple] = []
    monkeypatch.setattr(finetune, "imitate", stop_in_second_step)
    assert main(command) == 143 and len(steps) == 2
    with monkeypatch.context() as patch:
        calls = iter([finetune._accuracy, Mock(side_effect=KeyboardInterrupt)])
        patch.setattr(finetune, "_accuracy", lambda *args: next(calls)(*args))
        assert main(command) == 130  # in the evaluation after the training
    assert main(command) == 0
    assert main(command) == 2 and "exists already: choose another --out" in capsys.readouterr().err
    summary = json.loads((out / "summary.json").read_text())
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert summary["examples"] > 16 and set(summary["accuracy"]) == {"before", "after"}
    assert summary["checkpoint"] == str(out / "checkpoint")
    assert load_policy(summary["checkpoint"])[1].vocabulary() == tokenizer().vocabulary()
