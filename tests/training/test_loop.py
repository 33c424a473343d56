"""The training loop: device memory, phases of a run and grammars."""

import contextlib
import gc
import weakref

import jax
import numpy as np
import pytest

from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.learner import state as state_module
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.run import inference
from jax_ragrl.run.build import build_components
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.training import loop, setup
from jax_ragrl.training import step as step_module
from tests.jobs import config_job
from tests.tiny import saved_policy, tokenizer
from tests.training.test_outage import ROLL_OUT


class FirstRolloutError(Exception):
    """Raised by the first rollout of a run."""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "retained"), [("none", False), ("reward", True)])
def test_initial_weights_are_retained_only_as_references(where, retained, tmp_path, monkeypatch):
    folder = saved_policy(tmp_path)
    settings = {"policy": folder, "data.world.size": 40, "objective.kl.where": where}
    job, alive = config_job("tiny/c3po", settings), []

    def prepare_policies(job, decoders, *rest):
        alive.extend(weakref.ref(x) for x in jax.tree.leaves(decoders["policy"].params()))
        return original(job, decoders, *rest)

    def roll_out(*args):
        gc.collect()
        assert {ref() is not None for ref in alive} == {retained}
        raise FirstRolloutError

    original = loop.prepare_policies
    monkeypatch.setattr(loop, "prepare_policies", prepare_policies)
    monkeypatch.setattr(ROLL_OUT, roll_out)
    with pytest.raises(FirstRolloutError):
        loop.train(job, build_components(job, tmp_path), tmp_path)


def test_a_role_without_a_grammar_may_write_every_id():
    """Model vocabularies are often padded beyond the tokenizer; the sampler may use all of it."""
    job, size = config_job("tiny/mmoa_rag"), len(tokenizer()) + 4
    allowed_ZV = setup.allowed_tokens(job, tokenizer(), size)
    assert allowed_ZV.shape == (3, size)
    assert allowed_ZV[[0, 2]].all() and not allowed_ZV[1, -4:].any()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory):
    """A run with a checkpoint: job, components, directory and the saved state."""
    folder = tmp_path_factory.mktemp("interrupted")
    base = saved_policy(folder)
    settings = {"policy": base, "data.world.size": 40, "objective.critic": "shared", "run.steps": 9}
    settings["guard.update_kl.action"] = "warn"  # the run has no metrics, which `undo` would read
    job = config_job("tiny/c3po", settings)
    parts = build_components(job, folder)
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        data = QuestionStream(parts.questions["train"], job.seed)
        policies = setup.prepare_policies(job, parts.policies, parts.tokenizer)
        state = jax.tree.map(lambda x: x + 1, setup.trained_state(policies))
        checkpoints.save(1, state, {"data": data.get_state()})
    return job, parts, folder, jax.device_get(state)


def test_a_resumed_run_never_holds_two_copies_of_its_state(interrupted, monkeypatch):
    (job, parts, folder, _), alive = interrupted, []

    def prepare_policies(*args):
        policies = original_prepare(*args)
        train_state = policies["policy"].state.policy
        alive.extend(weakref.ref(x) for x in jax.tree.leaves(train_state))
        return policies

    def restore(*args):
        gc.collect()
        assert alive and not any(ref() is not None for ref in alive)
        return original_restore(*args)

    def roll_out(method, environment, questions, step):
        assert step == 1
        raise FirstRolloutError

    original_prepare, original_restore = loop.prepare_policies, Checkpoints.restore
    monkeypatch.setattr(loop, "prepare_policies", prepare_policies)
    monkeypatch.setattr(ROLL_OUT, roll_out)
    monkeypatch.setattr(Checkpoints, "restore", restore)
    with pytest.raises(FirstRolloutError):
        loop.train(job, parts, folder)


def test_policies_are_restored_without_optimizer_state(interrupted, monkeypatch):
    job, parts, folder, state = interrupted
    monkeypatch.setattr(
        state_module, "_optimizer_state", lambda *_: pytest.fail("builds an optimizer state")
    )
    monkeypatch.setattr(Checkpoints, "restore", lambda *_: pytest.fail("reads the complete state"))
    decoder = inference.trained_policies(job, parts.policies, RunCheckpoint(folder))["policy"]
    saved = state["policy"].policy.params["policy"]
    np.testing.assert_array_equal(jax.device_get(decoder.embed[...]), saved["embed"][...])
    assert decoder.config.dtype == job.compute_dtype


@pytest.mark.parametrize(("every", "measured"), [(0, []), (1, [0, 1, 2, 3, 4]), (3, [0, 3])])
def test_gradients_by_role_are_measured_at_every_kth_step(monkeypatch, every, measured):
    job, steps = config_job("tiny/coda", {"run.role_gradients_every": every}), []
    monkeypatch.setattr(
        step_module,
        "update_all",
        lambda *_, by_role, is_measured: steps.append(by_role) or ({}, {}),
    )
    for step in range(5):
        step_module.learn(setup.method_of(job), {}, None, [], step)
    assert [step for step, by_role in enumerate(steps) if by_role] == measured
