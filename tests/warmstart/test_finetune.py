"""Supervised runs of a generator: what is drawn, what is written, and that it learns."""

from __future__ import annotations

import itertools
import json
import pathlib

import pytest
from flax import nnx

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import Example, example
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.run.components import load_data, load_policy, load_retriever
from jax_ragrl.run.config import Index
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems.baselines.rows import Row
from jax_ragrl.types import Message
from jax_ragrl.warmstart.finetune import ROWS, Source, batches, fine_tune, load_finetune
from tests.rollout.tape import ANN, Tape
from tests.tiny import policy, tokenizer


def nth(i: int) -> Example:
    return Example((i,), (i,), "answer")


def test_every_example_is_seen_once_before_any_is_seen_twice():
    drawn = list(itertools.islice(batches([nth(i) for i in range(5)], 2, seed=0), 5))
    seen = [e.prompt[0] for batch in drawn for e in batch]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [0, 1, 2, 3, 4] and seen[:5] != seen[5:]
    again = itertools.islice(batches([nth(i) for i in range(5)], 2, seed=0), 5)
    assert drawn == list(again)


def test_no_example_at_all_is_refused():
    with pytest.raises(UserError, match="nothing to learn"):
        next(batches([], 2, seed=0))


def test_a_target_ends_with_the_stop_token():
    made = example(tokenizer(), *Row((Message("user", "who"),), "film", "answer"))
    assert tokenizer().decode(made.target[:-1]) == "film"
    assert made.target[-1] == tokenizer().stop_ids[0]
    assert made.prompt == tuple(tokenizer().chat([Message("user", "who")]))


def test_a_model_that_is_there_is_not_trained_over(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    data = {"world": {"size": 60}}
    run = load_finetune({"rows": "vanilla", "steps": 1, "optimizer": {"policy_lr": 1.0},
                         "data": data})  # fmt: skip
    with pytest.raises(UserError, match="checkpoint is there already.*another --out"):
        fine_tune(run, tmp_path)


CONFIG = """
from ml_collections import ConfigDict
def get_config():
    return ConfigDict({
        "policy": "FOLDER", "rows": "vanilla", "steps": 8, "batch": 16, "top_k": 1,
        "test_questions": 4, "data": {"world": {"seed": 0, "size": 60}},
        "index": {"kind": "exact"}, "optimizer": {"policy_lr": 0.02, "schedule": "constant"},
        "shapes": {"lengths": (512,), "batches": (4,), "steps": 4},
        "layout": {"lengths": (512,), "tokens": 4096},
    })
"""


def test_unknown_rows_are_refused():
    with pytest.raises(UserError, match="rows is 'x': use one of vanilla, robust, explained"):
        load_finetune({"rows": "x", "steps": 1, "optimizer": {"policy_lr": 1.0}, "data": {}})


@pytest.mark.parametrize(("kind", "first"), [("vanilla", "answer"), ("robust", "answer"),
                                             ("explained", "instruct")])  # fmt: skip
def test_a_model_is_tried_by_the_prompt_that_it_was_taught(tmp_path, kind, first):
    data = {"world": {"seed": 0, "size": 60}}
    values = {"rows": kind, "steps": 1, "optimizer": {"policy_lr": 1.0}, "data": data, "top_k": 2}
    run = load_finetune(values)
    corpus, questions, world = load_data(run.data)
    retriever = load_retriever(corpus, Index(kind="exact"), tmp_path)
    rows = ROWS[kind].rows(run, Source(questions["train"][:40], retriever, corpus, world))
    tape = Tape({})
    evaluate(ROWS[kind].system(run.style, run.top_k), [ANN], tape.environment())
    prompts = [row.messages[-1].content for row in rows] + tape.prompts
    assert len(rows) > 5 and {prompt.partition("\n")[0] for prompt in prompts} == {first}
    assert all(prompt.count("\n") == 3 for prompt in prompts)  # as many passages


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["vanilla", "robust", "explained"])
def test_a_run_learns_and_leaves_a_model(tmp_path, rows):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    config = tmp_path / "config.py"
    config.write_text(CONFIG.replace("FOLDER", str(folder)))
    out = tmp_path / "out"
    assert main(["sft", f"--config={config}", f"--config.rows={rows}", f"--out={out}"]) == 0
    losses = [json.loads(row)["loss"] for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    summary = json.loads((out / "summary.json").read_text())
    assert summary["examples"] > 16 and set(summary["accuracy"]) == {"before", "after"}
    assert pathlib.Path(summary["checkpoint"]) == out / "checkpoint"
    assert load_policy(summary["checkpoint"])[1].vocabulary() == tokenizer().vocabulary()
