"""Demonstrations: what a line holds, the ids it has, and a run that was killed while it learnt."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.effects import Said, Told
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.run.components import load_policy
from jax_ragrl.types import Message
from jax_ragrl.warmstart import finetune
from jax_ragrl.warmstart.demos import Demo, Taught, WarmStart, load_demos, warm_start
from jax_ragrl.warmstart.expert_pool import Ghostwriter, conversation
from tests.tiny import policy, tokenizer
from tests.warmstart.test_expert_pool import Clerk

ASKED = (Message("user", "who directed"),)
TALKED = (*ASKED, Message("assistant", "film"), Message("user", "the <|im_end|>"))


def write(file: pathlib.Path, *rows: Demo) -> str:
    file.write_text("".join(json.dumps(row.row()) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_a_demonstration_survives_its_file(tmp_path):
    rows = [Demo("q", "router", ASKED, "film", 0.5), Demo("q", "agent", TALKED, "a\nb", chat=False)]
    assert load_demos(write(tmp_path / "d.jsonl", *rows)) == rows
    assert load_demos(tmp_path / "d.jsonl", ["agent"]) == rows[1:]


def test_a_prompt_may_be_a_text_and_nothing_but_role_prompt_and_reply_is_needed(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"role": "r", "prompt": "who directed", "reply": "film"}))
    assert load_demos(file) == [Demo("", "r", ASKED, "film")]


@pytest.mark.parametrize("prompt", [None, [], [{"role": "user"}], [3], 3])
def test_a_line_without_a_prompt_is_named(tmp_path, prompt):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"role": "r", "prompt": prompt, "reply": "film"}) + "\n")
    with pytest.raises(UserError, match=r"d.jsonl, line 1: 'prompt' is neither a text nor"):
        load_demos(file)


def test_a_file_without_the_roles_says_which_it_has(tmp_path):
    file = write(tmp_path / "d.jsonl", Demo("q", "router", ASKED, "film"))
    with pytest.raises(UserError, match=r"demonstrations of router, but those of plan are"):
        load_demos(file, ("plan",))
    with pytest.raises(UserError, match=r"demonstrations of nothing, but those of any role are"):
        load_demos(write(tmp_path / "e.jsonl"))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("turns", [False, True])
def test_a_demonstration_has_the_ids_of_the_action_that_it_was(chat, turns):
    role = Role("agent", lambda text: Parsed(text), chat=chat)
    stop = tokenizer().stop_ids[:1] if chat else ()
    said = Said((*tokenizer().encode("film"), *stop))
    after = (said, Told("the <|im_end|>")) if turns else ()
    request = ActionRequest(role, ASKED, Branching(1), 0, after)
    clerk = Clerk(lambda request: "Thought: who")
    ((action,),) = Ghostwriter(clerk, tokenizer()).sample([request])
    told = conversation(tokenizer(), request)
    assert told == (TALKED if turns else ASKED)
    made = Demo("q", "agent", told, action.text, chat=chat).example(tokenizer())
    assert made == (action.prompt_ids, action.ids, "agent")


class KilledError(Exception):
    """Raised in the middle of a run."""


def run(folder: pathlib.Path, file: str, **changes) -> WarmStart:
    layout, optimizer = Layout((64,), 256), Optimizer(0.01, schedule="constant")
    fixed = {"epochs": 2, "batch": 4, "save_every": 2, "layout": layout}
    return WarmStart(Taught(file), optimizer, str(folder), **(fixed | changes))


def weights(out: pathlib.Path) -> list[np.ndarray]:
    decoder, _ = load_policy(str(out / "checkpoint"))
    return [np.asarray(x) for x in nnx.to_flat_state(nnx.state(decoder, nnx.Param)).leaves]


def test_a_killed_run_ends_as_one_that_was_not(tmp_path, monkeypatch):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    prompts = ["who", "directed", "the", "film", "Question"]
    rows = [Demo(p, "r", (Message("user", p),), f"film {p}") for p in prompts]
    long = Demo("long", "other", ASKED, "Question" * 80)
    given = run(folder, write(tmp_path / "d.jsonl", *rows, long))
    whole = warm_start(given, tmp_path / "whole")
    assert whole["steps"] == 3 and whole["roles"] == {"other": 1, "r": 5} and whole["too_long"] == 2
    assert whole["loss"]["last"] < whole["loss"]["first"]

    def killed(*args):
        raise KilledError

    real = finetune.imitate
    left = iter([real, real, killed])
    monkeypatch.setattr(finetune, "imitate", lambda *args: next(left)(*args))
    with pytest.raises(KilledError):
        warm_start(given, tmp_path / "cut")
    monkeypatch.setattr(finetune, "imitate", real)
    with pytest.raises(UserError, match="another config.*epochs differs.*another --out"):
        warm_start(dataclasses.replace(given, epochs=3), tmp_path / "cut")
    assert warm_start(given, tmp_path / "cut") == whole | {
        "checkpoint": str(tmp_path / "cut" / "checkpoint")
    }
    for one, other in zip(weights(tmp_path / "whole"), weights(tmp_path / "cut"), strict=True):
        np.testing.assert_array_equal(one, other)
    curves = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert curves[0] == curves[1]
    with pytest.raises(UserError, match="checkpoint is there already"):
        warm_start(given, tmp_path / "cut")


@pytest.mark.slow
def test_an_adapter_is_merged_and_a_mesh_changes_nothing_else(tmp_path):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    file = write(tmp_path / "d.jsonl", *[Demo(str(i), "r", ASKED, "film " * i) for i in range(8)])
    for mesh in ((), (2, 4, 1)):
        given = run(folder, file, mesh=mesh, lora=LoRAConfig(2, 4.0), batch=8, save_every=0)
        warm_start(given, tmp_path / f"out{len(mesh)}")
    before, _ = load_policy(str(folder))
    one, other = (weights(tmp_path / name) for name in ("out0", "out3"))
    base = [np.asarray(x) for x in nnx.to_flat_state(nnx.state(before, nnx.Param)).leaves]
    assert any(np.abs(x - y).max() > 0.01 for x, y in zip(one, base, strict=True))
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, atol=0.01)
