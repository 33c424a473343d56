"""Demonstrations: their file format, their ids, and a training run that is killed."""

import dataclasses
import json
import pathlib
from unittest.mock import Mock

import numpy as np
import pytest
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.effects import ModelOutput, Observation
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.llm_policy import LLMActionSampler, conversation
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.run.models import load_policy
from jax_ragrl.types import Message
from jax_ragrl.warmstart import demos, finetune
from jax_ragrl.warmstart.demos import Demo, DemoData, WarmStart, load_demos, warm_start
from tests.tiny import saved_policy, tokenizer
from tests.warmstart.test_expert_pool import ScriptedLLM

QUESTION = (Message("user", "who directed"),)
DIALOGUE = (*QUESTION, Message("assistant", "film"), Message("user", "the <|im_end|>"))


def write(file: pathlib.Path, *rows: Demo) -> str:
    file.write_text("".join(json.dumps(row.row()) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_a_demonstration_survives_its_file(tmp_path):
    rows = [
        Demo("q", "router", QUESTION, "film", 0.5),
        Demo("q", "agent", DIALOGUE, "a\nb", chat=False),
    ]
    assert load_demos(write(tmp_path / "d.jsonl", *rows)) == rows
    assert load_demos(tmp_path / "d.jsonl", ["agent"]) == rows[1:]
    file = tmp_path / "minimal.jsonl"
    file.write_text(json.dumps({"role": "r", "prompt": "who directed", "reply": "film"}))
    assert load_demos(file) == [Demo("", "r", QUESTION, "film")]
    # As `datasets` writes rows without these fields.
    row = json.loads(file.read_text()) | dict.fromkeys(("question", "reward", "chat"))
    file.write_text(json.dumps(row))
    assert load_demos(file) == [Demo("", "r", QUESTION, "film")]
    file.write_text(json.dumps(row | {"chat": "false"}))
    with pytest.raises(UserError, match=r"minimal.jsonl, line 1: field 'chat' holds str, expected"):
        load_demos(file)


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, [], [{"role": "user"}], [3], 3),
        [{"role": "user", "content": "q?"}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "q?"}]}],
    ],
)
def test_a_line_without_a_prompt_is_named(tmp_path, prompt):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"role": "r", "prompt": prompt, "reply": "film"}) + "\n")
    with pytest.raises(UserError, match=r"d.jsonl, line 1: 'prompt' is neither a string nor"):
        load_demos(file)


def test_a_file_without_the_roles_is_refused(tmp_path):
    file = write(tmp_path / "d.jsonl", Demo("q", "router", QUESTION, "film"))
    with pytest.raises(UserError, match=r"demonstrations of router, but none of plan"):
        load_demos(file, ("plan",))
    with pytest.raises(UserError, match="e.jsonl is empty"):
        load_demos(write(tmp_path / "e.jsonl"))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("turns", [False, True])
def test_a_demonstration_has_the_ids_of_its_action(chat, turns):
    role = Role("agent", lambda text: ParsedAction(text), as_chat_turns=chat)
    stop = tokenizer().stop_ids[:1] if chat else ()
    output = ModelOutput((*tokenizer().encode("film"), *stop))
    history = (output, Observation("the <|im_end|>")) if turns else ()
    request = ActionRequest(role, QUESTION, Branching(1), 0, history)
    llm = ScriptedLLM(lambda request: "Thought: who")
    ((action,),) = LLMActionSampler(llm, tokenizer()).sample([request])
    messages = conversation(tokenizer(), request)
    assert messages == (DIALOGUE if turns else QUESTION)
    example = Demo("q", "agent", messages, action.text, chat=chat).example(tokenizer())
    assert example == (action.prompt_ids, action.ids, "agent")


def run(folder: pathlib.Path, file: str, **changes) -> WarmStart:
    layout, optimizer = Layout((64,), 256), Optimizer(0.01, schedule="constant")
    defaults = {"epochs": 2, "batch_size": 4, "save_every": 2, "packing": layout}
    return WarmStart(DemoData(file), optimizer, str(folder), **(defaults | changes))


@pytest.mark.parametrize("name", ["epochs", "minibatches"])
def test_several_steps_per_batch_are_refused(name):
    """Other numbers would only stretch the schedule of the learning rate."""
    with pytest.raises(UserError, match=f"optimizer.{name} is 3, but supervised training"):
        WarmStart(DemoData("demos.jsonl"), Optimizer(1e-3, **{name: 3}))


def weights(out: pathlib.Path) -> list[np.ndarray]:
    decoder, _ = load_policy(str(out / "checkpoint"))
    return [np.asarray(x) for x in nnx.to_flat_state(nnx.state(decoder, nnx.Param)).leaves]


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    folder = saved_policy(tmp_path)
    prompts = ["who", "directed", "the", "film", "Question"]
    rows = [Demo(p, "r", (Message("user", p),), f"film {p}") for p in prompts]
    long = Demo("long", "other", QUESTION, "Question" * 80)
    config = run(folder, write(tmp_path / "d.jsonl", *rows, long))
    full = warm_start(config, tmp_path / "full")
    assert full["steps"] == 3 and full["roles"] == {"other": 1, "r": 5} and full["too_long"] == 2
    assert full["loss"]["last"] < full["loss"]["first"]
    original = finetune.imitate
    calls = iter([original, original, Mock(side_effect=KeyboardInterrupt)])
    monkeypatch.setattr(finetune, "imitate", lambda *args: next(calls)(*args))
    with pytest.raises(KeyboardInterrupt):
        warm_start(config, tmp_path / "cut")
    monkeypatch.setattr(finetune, "imitate", original)
    with pytest.raises(UserError, match="another config.*epochs differs.*another --out"):
        warm_start(dataclasses.replace(config, epochs=3), tmp_path / "cut")
    write(tmp_path / "d.jsonl", *rows, long._replace(reply="film"))  # as many, of the same name
    with pytest.raises(UserError, match="other examples .*another --out"):
        warm_start(config, tmp_path / "cut")
    write(tmp_path / "d.jsonl", *rows, long)
    with monkeypatch.context() as patch:  # and once more, after the last step
        patch.setattr(demos, "write_json", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            warm_start(config, tmp_path / "cut")
    assert warm_start(config, tmp_path / "cut") == full | {
        "checkpoint": str(tmp_path / "cut" / "checkpoint")
    }
    for one, other in zip(weights(tmp_path / "full"), weights(tmp_path / "cut"), strict=True):
        np.testing.assert_array_equal(one, other)
    assert curve(tmp_path / "full") == curve(tmp_path / "cut")
    with pytest.raises(UserError, match="checkpoint exists already"):
        warm_start(config, tmp_path / "cut")


def curve(folder: pathlib.Path) -> list[dict]:
    """The metrics of all steps, without durations."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.slow
def test_an_adapter_is_merged_and_a_mesh_changes_nothing(tmp_path):
    folder = saved_policy(tmp_path)
    file = write(
        tmp_path / "d.jsonl", *[Demo(str(i), "r", QUESTION, "film " * i) for i in range(8)]
    )
    for mesh in ((), (2, 4, 1)):
        config = run(folder, file, mesh=mesh, lora=LoRAConfig(2, 4.0), batch_size=8, save_every=0)
        warm_start(config, tmp_path / f"out{len(mesh)}")
    before, _ = load_policy(str(folder))
    one, other = (weights(tmp_path / name) for name in ("out0", "out3"))
    base = [np.asarray(x) for x in nnx.to_flat_state(nnx.state(before, nnx.Param)).leaves]
    assert any(np.abs(x - y).max() > 0.01 for x, y in zip(one, base, strict=True))
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, atol=0.01)
