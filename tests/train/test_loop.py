"""What the training loop keeps while it runs."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import weakref

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.corpus.questions import question_batches
from jax_ragrl.learner import state as trainer
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.run import inference
from jax_ragrl.run.components import assemble
from jax_ragrl.run.config import load_job
from jax_ragrl.train import loop
from tests.tiny import policy, tokenizer


class FirstRolloutError(Exception):
    """Raised by the first rollout of a run."""


@pytest.mark.parametrize(("where", "kept"), [("none", False), ("reward", True)])
def test_a_run_keeps_the_policies_it_was_given_only_as_references(
    where: str, kept: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    given = {"policy": folder, "data.world.size": 40, "objective.kl.where": where}
    values = load_config(
        CONFIGS / "tiny" / "c3po.py", [f"--config.{key}={value}" for key, value in given.items()]
    )
    job, alive = load_job(values), []

    def begin(job, decoders, tokenizer):
        alive.extend(weakref.ref(x) for x in jax.tree.leaves(decoders["policy"].params()))
        return begun(job, decoders, tokenizer)

    def roll_out(*args):
        gc.collect()
        assert {ref() is not None for ref in alive} == {kept}
        raise FirstRolloutError

    begun = loop.prepare_policies
    monkeypatch.setattr(loop, "prepare_policies", begin)
    monkeypatch.setattr(loop, "roll_out", roll_out)
    with pytest.raises(FirstRolloutError):
        loop.train(job, assemble(job, tmp_path), tmp_path)


def test_a_role_without_a_grammar_may_write_what_its_sampler_may():
    """A model's vocabulary is often padded beyond its tokenizer's; the sampler knows no edge."""
    job, size = load_job(load_config(CONFIGS / "tiny" / "mmoa_rag.py", [])), len(tokenizer()) + 4
    allowed_ZV = loop.allowed_tokens(job, tokenizer(), size)
    assert allowed_ZV.shape == (3, size)
    assert allowed_ZV[[0, 2]].all() and not allowed_ZV[1, -4:].any()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory):
    """A run with a checkpoint, the parts it begins with, and its folder."""
    folder = tmp_path_factory.mktemp("begun")
    tokenizer().save(folder / "tokenizer")
    base = save_decoder(nnx.merge(*policy()), folder / "policy", folder / "tokenizer")
    given = {"policy": base, "data.world.size": 40, "objective.critic": "shared", "run.steps": 9}
    values = load_config(
        CONFIGS / "tiny" / "c3po.py", [f"--config.{key}={value}" for key, value in given.items()]
    )
    job = load_job(values)
    parts = assemble(job, folder)
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        data = question_batches(parts.questions["train"], job.run.questions, job.seed)
        policies = loop.prepare_policies(job, parts.policies, parts.tokenizer)
        state = jax.tree.map(lambda x: x + 1, loop.trained_state(policies))
        checkpoints.save(1, state, {"data": data.get_state()})
    return job, parts, folder, jax.device_get(state)


def test_a_run_that_goes_on_holds_what_it_began_with_or_what_it_reads_and_never_both(
    begun, monkeypatch: pytest.MonkeyPatch
):
    (job, parts, folder, _), alive = begun, []

    def begin(*args):
        policies = begin_as_ever(*args)
        learner = policies["policy"][1].policy
        alive.extend(weakref.ref(x) for x in jax.tree.leaves(learner))
        return policies

    def restore(*args):
        gc.collect()
        assert alive and not any(ref() is not None for ref in alive)
        return restore_as_ever(*args)

    def roll_out(job, environment, questions, roles, step):
        assert step == 1
        raise FirstRolloutError

    begin_as_ever, restore_as_ever = loop.prepare_policies, Checkpoints.restore
    monkeypatch.setattr(loop, "prepare_policies", begin)
    monkeypatch.setattr(loop, "roll_out", roll_out)
    monkeypatch.setattr(Checkpoints, "restore", restore)
    with pytest.raises(FirstRolloutError):
        loop.train(job, parts, folder)


def test_policies_are_read_of_a_checkpoint_without_what_only_training_needs(
    begun, monkeypatch: pytest.MonkeyPatch
):
    job, parts, folder, state = begun
    monkeypatch.setattr(trainer, "_state", lambda *_: pytest.fail("an optimizer is made"))
    monkeypatch.setattr(Checkpoints, "restore", lambda *_: pytest.fail("all of it is read"))
    found = inference.trained_policies(job, parts.policies, folder)["policy"]
    saved = state["policy"].policy.params["policy"]
    np.testing.assert_array_equal(jax.device_get(found.embed[...]), saved["embed"][...])
    assert found.config.dtype == job.compute
