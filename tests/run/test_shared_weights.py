"""One set of weights is in memory once, on the mesh of the run."""

import dataclasses
import gc

import jax
import pytest

import jax_ragrl.run.models as models
from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.learner.objective import KL
from jax_ragrl.llm.kinds import LocalLLMConfig
from jax_ragrl.models.config import param_count
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.run.build import build_surroundings
from jax_ragrl.run.config import Job
from jax_ragrl.run.data import LoadedData
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policies, mesh_of_shape, shared_loader
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.sampling.weights import SAMPLING_RULES
from jax_ragrl.training.setup import prepare_policies


def local_job(dtype: str, **changes) -> Job:
    """C-3PO whose frozen model and judge are the policy that ships with the package."""
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    llm = LocalLLMConfig("tiny", dtype=dtype)
    objective = dataclasses.replace(job.objective, kl=KL("loss", "k3", 0.1))
    parts = {"llm": llm, "judge": llm, "compute_dtype": dtype, "objective": objective}
    return dataclasses.replace(job, **parts | changes)


def live_bytes() -> int:
    gc.collect()  # earlier tests
    buffers = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays() if x.nbytes > 1000}
    return sum(buffers.values())


class Start:
    def __init__(self, job: Job, tmp_path) -> None:
        before, load = live_bytes(), shared_loader()
        policies, tokenizer = load_policies(job, None, load=load)
        data = LoadedData((), {}, None)
        self.parts = build_surroundings(
            job, tmp_path, data, None, tokenizer, object(), load=load
        )._replace(policies=policies)
        self.loaded = live_bytes() - before
        self.trained = prepare_policies(job, policies, tokenizer)
        del load, policies
        self.parts = self.parts._replace(policies={})
        self.bytes = live_bytes() - before
        (policy,) = self.trained.values()
        self.reference = jax.tree.leaves(policy.state.reference)
        trained = jax.tree.leaves((policy.state.policy, policy.state.critic))
        self.trained_bytes = sum(x.nbytes for x in trained)
        self.llm = jax.tree.leaves(self.parts.llm._model.params)
        self.judge = jax.tree.leaves(self.parts.judge._model.params)


def pointers(arrays: list[jax.Array]) -> set[int]:
    return {x.unsafe_buffer_pointer() for x in arrays if x.ndim > 2}


@pytest.mark.slow
def test_frozen_model_judge_and_reference_are_one_set_of_weights(tmp_path):
    start = Start(local_job("float32"), tmp_path)
    assert pointers(start.llm) == pointers(start.judge) == pointers(start.reference)
    (policy,) = start.trained.values()
    count = param_count(policy.spec.policy.with_params(policy.state.policy.params).merge().config)
    # The trained weights and their moments, and one frozen set.
    assert start.bytes - start.trained_bytes == pytest.approx(count * 4, rel=0.01)
    assert not pointers(jax.tree.leaves(policy.state.policy)) & pointers(start.llm)


@pytest.mark.slow
def test_the_reference_of_another_compute_dtype_is_a_set_of_its_own(tmp_path):
    start = Start(local_job("bfloat16"), tmp_path)
    assert pointers(start.llm) == pointers(start.judge)
    assert not pointers(start.reference) & pointers(start.llm)


@pytest.mark.slow
def test_an_adapter_trains_on_the_weights_of_the_frozen_model(tmp_path):
    start = Start(local_job("float32", lora=LoRAConfig(rank=2)), tmp_path)
    (policy,) = start.trained.values()
    base = jax.tree.leaves(policy.spec.policy.frozen)
    assert pointers(base) == pointers(start.llm)


def test_models_of_one_folder_share_arrays_and_have_their_own_config():
    load = shared_loader()
    first, second = load("tiny", None, "float32")[0], load("tiny", None, "float32")[0]
    first.config = dataclasses.replace(first.config, attention_impl="xla")
    assert second.config.attention_impl == "auto"
    assert first.embed[...] is second.embed[...]
    assert load("tiny", None, "bfloat16")[0].embed[...].dtype == "bfloat16"
    # On a mesh, a policy with FSDP has another layout, so that it shares none.
    for shape, is_shared in (((1, 4, 1), False), ((4, 1, 1), True)):
        mesh, load = make_mesh(shape, jax.devices()[:4]), shared_loader()
        llm, judge = (load("tiny", mesh, "float32", SAMPLING_RULES)[0] for _ in range(2))
        table = llm.embed[...]
        assert table is judge.embed[...] and table.sharding.is_fully_replicated
        assert (load("tiny", mesh, "float32")[0].embed[...] is table) == is_shared


def test_the_narrowest_policy_limits_fsdp(monkeypatch):
    """The tiny policy has 128 columns, all of which stay on one device."""
    assert mesh_of_shape((-1, -1, 1), ["tiny", ""]).devices.shape == (8, 1, 1)
    widths = {"wide": 1024, "narrow": 512}
    monkeypatch.setattr(models, "policy_folder", lambda name, weights: name)
    monkeypatch.setattr(models, "model_config", lambda name: name)
    monkeypatch.setattr(
        models, "from_hf", lambda name: type("C", (), {"hidden_size": widths[name]})
    )
    assert mesh_of_shape((-1, -1, 1), ["wide"]).devices.shape == (1, 8, 1)
    assert mesh_of_shape((-1, -1, 1), ["wide", "narrow"]).devices.shape == (2, 4, 1)
    assert mesh_of_shape((), ["tiny"]) is None
