"""Warm-ups and supervised runs: their data, divergence, complete and resumed runs."""

import contextlib
import itertools
import json
import pathlib
import random
import shutil
import signal
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config, main
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import Preempted, UserError
from jax_ragrl.learner.imitation import Example, imitate, pack
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.retrieval.kinds import VectorIndex
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.run.data import load_data
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.models import load_policy
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.warmstart import finetune, warmup
from jax_ragrl.warmstart.finetune import EXAMPLES, batches, build_examples, load_finetune
from jax_ragrl.warmstart.teacher_examples import action_examples, build_world_retriever
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.warmup import LOG, WarmupLog, load_warmup, warm_up
from tests.rollout.tape import ANN, Tape
from tests.tiny import saved_policy, tokenizer

AUTO_RAG = CONFIGS / "tiny" / "warmup_auto_rag.py"


def test_auto_rag_learns_only_traces_with_correct_answers():
    config, task = load_warmup(load_config(AUTO_RAG, []))
    assert isinstance(task.system, SearchAgent) and task.system.kind == "auto_rag"
    assert [stage.only_correct for stage in config.stages] == [False, True]
    world = generate(3, 60, hops=(1, 2))
    teacher = TeacherSampler(task.teacher({"p_misread": 0.9}), tokenizer())
    environment = Environment(teacher, build_world_retriever(world), None)  # no language model
    forest = collect(task.system, task.expander, world.questions["train"][:40], environment)
    forest = forest._replace(reward_N=answer_rewards(forest, cover_match))
    ends = {r.question: r.answer for r in forest.records if r.role == "leaf"}
    right = {i for i, answer in ends.items() if answer in forest.questions[i].answers}
    assert 0 < len(right) < 40
    expected = [
        Example(r.action.prompt_ids, r.action.ids, "agent")
        for r in forest.records
        if r.action and r.question in right
    ]
    assert action_examples(forest, random.Random(0), only_correct=True) == expected
    assert len(action_examples(forest, random.Random(0), only_correct=False)) > len(expected)


def test_non_finite_parameters_stop_a_warm_up(tmp_path):
    """The flag of the last step is enough: parameters that are not finite remain so."""
    log = WarmupLog(tmp_path / LOG, 1, 0, {})
    log.check()
    batch, _ = pack([Example((1,), (2,), "agent")], 1, 4)
    for flag in (0.0, 1.0):
        log.add(batch, {"loss": 1.0, "skipped": 0.0, "not_finite": flag})
    for stop in (log.check, log.entries, lambda: log.write({})):
        with pytest.raises(UserError, match="parameters of the policy are NaN or infinite"):
            stop()
    assert not (tmp_path / LOG).exists()


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> dict:
    """The config of a warm-up of two stages with 3 steps each."""
    folder = tmp_path_factory.mktemp("policy")
    values = load_config(AUTO_RAG, []) | {"policy": str(saved_policy(folder))}
    values |= {"tokens_per_step": 1024, "row_lengths": (1024,), "log_every": 2, "save_every": 2}
    stages = [stage | {"steps": 3, "questions_per_world": 4} for stage in values["stages"]]
    return values | {"stages": stages}


def trained(values: dict, out: pathlib.Path) -> list[np.ndarray]:
    """The parameters after a warm-up, in the dtype of the training."""
    models: list[Decoder] = []

    def save(model, *args, **kwargs):
        models.append(model)
        return save_decoder(model, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(warmup, "save_decoder", save)  # optax mixes integers and floats
        last = warm_up(values, out)
    assert last == json.loads((out / LOG).read_text().splitlines()[-1])
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(models[0], nnx.Param))]


class Trained(NamedTuple):
    """The folder of a finished warm-up and its parameters."""

    out: pathlib.Path
    params: list[np.ndarray]


@pytest.fixture(scope="module")
def whole(short, tmp_path_factory) -> Trained:
    """The warm-up `short` without an interruption."""
    out = tmp_path_factory.mktemp("whole")
    params = trained(short, out)
    assert load_policy(str(out / "checkpoint"))[1].vocabulary() == tokenizer().vocabulary()
    assert [row["step"] for row in curve(out)] == [2, 4, 6]
    return Trained(out, params)


def curve(out: pathlib.Path) -> list[dict]:
    """The lines of the log without times."""
    rows = map(json.loads, (out / LOG).read_text().splitlines())
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def ending(at: int, end: Callable[[], object]) -> Callable[..., None]:
    """A method of `WarmupLog` that adds a step, and calls `end` in step `at`."""
    add = WarmupLog.add

    def replacement(log, batch, metrics):
        add(log, batch, metrics)
        if log._step == at:
            end()

    return replacement


def damage(out: pathlib.Path, step: int) -> None:
    (out / "unfinished" / "checkpoints" / str(step) / "meta" / "metadata").write_text("[]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "error", "saved", "is_damaged"),
    [
        # Step 3 ends a stage.
        (Mock(side_effect=KeyboardInterrupt), KeyboardInterrupt, ["3", "4"], True),
        (lambda: signal.raise_signal(signal.SIGTERM), Preempted, ["4", "5"], False),
    ],
    ids=["killed and damaged", "SIGTERM"],
)
def test_an_interrupted_and_resumed_warm_up_equals_a_whole_one(
    end, error, saved, is_damaged, short, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(WarmupLog, "add", ending(5, end))
    with jax.numpy_dtype_promotion("standard"), pytest.raises(error):
        warm_up(short, tmp_path)
    assert sorted(x.name for x in tmp_path.glob("unfinished/checkpoints/[0-9]*")) == saved
    assert not (tmp_path / "checkpoint").exists()
    with pytest.raises(UserError, match="another config.*learning_rate differs.*another --out"):
        warm_up(short | {"learning_rate": 0.5}, tmp_path)
    monkeypatch.undo()
    with contextlib.ExitStack() as files:
        if is_damaged:
            damage(tmp_path, int(saved[-1]))
            files.enter_context(pytest.warns(match=f"checkpoint {saved[-1]} .* is damaged"))
        params = trained(short, tmp_path)
    assert curve(tmp_path) == curve(whole.out)
    for one, other in zip(params, whole.params, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not (tmp_path / "unfinished").exists()


def test_a_finished_warm_up_is_not_trained_again(short, whole, tmp_path, monkeypatch):
    """The end of `warm_up` may be lost: an experiment that was killed then asks again."""
    shutil.copytree(whole.out, tmp_path, dirs_exist_ok=True)
    (tmp_path / "unfinished").mkdir()
    monkeypatch.setattr(warmup, "_train", None)
    assert warm_up(short, tmp_path)["step"] == 6
    assert not (tmp_path / "unfinished").exists()
    with pytest.raises(UserError, match="another config.*seed differs.*another --out"):
        warm_up(short | {"seed": 1}, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="checkpoint exists already.*another --out"):
        warm_up(short, tmp_path)


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
