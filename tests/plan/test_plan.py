"""Planned memory equals the memory of real arrays, plus that of compiled programs."""

import dataclasses
import functools
import json
import math
import pathlib
import types
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.learner.objective import KL
from jax_ragrl.learner.state import Policy, prepare
from jax_ragrl.llm.kinds import LocalLLMConfig
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.models.encoder import load_encoder
from jax_ragrl.models.hf_config import to_hf
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.models.published import MODEL_CONFIGS
from jax_ragrl.plan import _programs, config_named, plan, policies_of
from jax_ragrl.plan.abstract_arrays import TooLargeError, compile_program
from jax_ragrl.plan.other_models import OtherModels, count_other_models, host_mesh
from jax_ragrl.plan.policies import (
    PlannedPolicy,
    copy_bytes,
    count_rollout,
    count_updates,
    state_bytes,
)
from jax_ragrl.plan.sampling import count_sampling
from jax_ragrl.retrieval.exact import BLOCK, STREAM
from jax_ragrl.retrieval.kinds import VectorIndex
from jax_ragrl.run.config import Job
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.topology import CEILINGS, GPUS, Ceilings, describe_devices, memory_of
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling
from tests.jobs import config_job
from tests.plan.jobs import small_job

UPDATE = {"bytes": 2, "compile_s": 1.0}  # of a policy, as `count_updates` returns it
SMALL = DecoderConfig(64, 16, 32, 1, 2, 2, 8)
RUN = small_job()
NORMS = 3 * 16 + 2 * 8  # two of the layer, the last, queries, keys: replicated
COMPUTE_CONFIG = dataclasses.replace(SMALL, dtype=RUN.compute_dtype)


LORA = LoRAConfig(2, targets=("up_proj",))
ABC = ("a", "b", "c")


@functools.cache
def plan_with(**changes: Any) -> dict[str, Any]:
    return plan(small_job(**changes), SMALL, jax.devices())


@pytest.mark.slow
def test_the_state_is_weights_moments_and_a_reference():
    """Each matrix of this architecture splits evenly; vectors of norms are replicated."""
    result, replicated = plan_with(), NORMS
    split = (param_count(SMALL) - replicated) // 8
    weights, reference = 4 * (split + replicated), 2 * split + 4 * replicated
    assert result["state_bytes"] == 3 * weights + reference  # weights and two moments are float32
    assert result["devices"] == 8
    count = param_count(SMALL)
    assert result["policies"] == {"policy": {"parameters": count, "trained": count}}
    assert result["update"]["rows"] == [8, 64] and result["sampling"]["prompts"] == [16, 32]
    larger = max(result["update"]["bytes"], result["sampling"]["bytes"])
    assert result["peak_bytes"] == result["state_bytes"] + larger
    assert result["update"]["bytes"] == result["update"]["temporary_bytes"] + weights
    assert result["update"]["temporary_bytes"] > 0 < result["sampling"]["temporary_bytes"]
    assert result["fits"] is None and result["memory_bytes"] is None


def test_a_plan_names_the_mesh_that_a_run_without_one_would_not_use(monkeypatch):
    sizes = {"bytes": 0, "weight_bytes": 0}
    monkeypatch.setattr("jax_ragrl.plan._programs", lambda *_: (sizes, sizes))
    monkeypatch.setattr("jax_ragrl.plan._speed", lambda *_: {})
    changes = [
        plan(dataclasses.replace(RUN, mesh=mesh), SMALL, jax.devices()[:count])["changes"]
        for mesh, count in (((), 8), ((), 1), ((-1, 2, 1), 8))
    ]
    assert changes == [{"mesh": (8, 1, 1)}, {}, {}]


def test_a_rollout_copies_weights_and_caches_all_siblings():
    """The copies are in the compute dtype, and only tensor parallelism splits them."""
    one, more = plan_with()["sampling"], plan_with(width=64, learners=ABC)["sampling"]
    assert one["weight_bytes"] == 2 * (param_count(SMALL) - NORMS)
    assert more["weight_bytes"] == 3 * one["weight_bytes"]
    for result in (one, more):
        assert result["bytes"] == result["weight_bytes"] + result["temporary_bytes"]
    # Prompts per device, slots per sibling; bfloat16 keys and values of 2 heads of 8.
    prompts, slots = 2, 8
    caches = 63 * prompts * slots * 2 * 2 * 8 * 2
    assert more["temporary_bytes"] - one["temporary_bytes"] > caches


def test_each_host_samples_its_own_prompts(monkeypatch):
    """As `local_mesh`: the devices of other hosts have other prompts, in batches of their own."""
    order, kind = (0, 1, 4, 5, 2, 3, 6, 7), types.SimpleNamespace
    chips = np.array([kind(process_index=n // 4, device_kind="TPU v5") for n in order])
    pod = kind(devices=chips.reshape(2, 2, 2), shape={"tensor": 2}, axis_names=(), axis_types=())
    mesh = lambda devices, *_, **__: kind(devices=devices)  # noqa: E731
    monkeypatch.setattr("jax_ragrl.runtime.sharding.Mesh", mesh)
    monkeypatch.setattr("jax_ragrl.plan.other_models.Mesh", mesh)
    assert host_mesh(pod).devices.tolist() == [[[chips[0], chips[1]], [chips[4], chips[5]]]]
    with pytest.raises(TooLargeError, match="over 4 devices of several hosts"):
        host_mesh(kind(devices=pod.devices, shape={"tensor": 4}))
    # XLA compiles no program for a part of a slice of v5e: those of one host take their place.
    chips[0].device_kind = "TPU v5 lite"
    monkeypatch.setattr("jax_ragrl.plan.other_models.describe_devices", lambda name: [name] * 4)
    assert host_mesh(pod).devices.tolist() == [[["v5e:2x2"] * 2] * 2]
    monkeypatch.undo()
    one = make_mesh((2, 4, 1), jax.devices())
    assert host_mesh(one) is one
    half = make_mesh((1, 4, 1), jax.devices()[:4])
    monkeypatch.setattr("jax_ragrl.plan.policies.host_mesh", lambda _: half)
    policies = {"policy": PlannedPolicy("", COMPUTE_CONFIG)}
    shapes = dataclasses.replace(RUN.shapes, batch_sizes=(8, 16))
    result = count_rollout(policies, shapes, 1, make_mesh((1, 8, 1), jax.devices()))
    assert (result["devices"], result["prompts"], result["prefill_tokens"]) == (4, [8, 32], 256)


def test_a_growing_cache_is_counted_at_its_full_size(monkeypatch):
    monkeypatch.setattr("jax_ragrl.sampling.jobs.FIRST_CACHE", 16)
    shapes = dataclasses.replace(RUN.shapes, max_new_tokens=32)
    result = plan(small_job(64, shapes=shapes), SMALL, jax.devices())
    slot = 64 * 2 * 2 * 2 * 8 * 2  # siblings of two prompts; bfloat16 keys and values
    # A batch that has started (16 slots) exists next to a full one (32).
    assert result["sampling"]["temporary_bytes"] > (32 + 16) * slot


def one_device_mesh() -> jax.sharding.Mesh:
    return make_mesh((1, 1, 1), jax.devices()[:1])


def prepare_policy(decoder: Decoder) -> Policy:
    run = {"objective": RUN.objective, "optimizer": RUN.optimizer, "layout": RUN.packing}
    more = {"roles": ("a",), "temperature": 1.0, "updates": 1, "compute": RUN.compute_dtype}
    return prepare(decoder, **run, **more)


def test_a_critic_has_the_state_of_a_policy():
    policies, mesh = {"a": PlannedPolicy("", COMPUTE_CONFIG)}, one_device_mesh()
    none = dataclasses.replace(RUN.objective, kl=KL("none"))
    own = dataclasses.replace(none, critic="own", advantage="gae")
    reward = dataclasses.replace(none, kl=KL("reward"))
    state, twice, more = (
        state_bytes(policies, x, RUN.optimizer, mesh) for x in (none, own, reward)
    )
    assert state == 3 * 4 * param_count(SMALL) and twice == 2 * state
    assert more - state == 2 * param_count(SMALL) + 2 * NORMS  # a reference, for each kind of KL


@pytest.mark.slow
def test_policies_of_different_sizes_add_up():
    """Two small policies and a larger one, whose programs have the largest memory."""
    large = dataclasses.replace(SMALL, hidden_size=32, intermediate_size=64)
    separate = [plan(RUN, config, jax.devices()) for config in (SMALL, large)]
    policies = {"a": SMALL, "b": SMALL, "c": large}
    changes = {"dtype": RUN.compute_dtype, "remat": RUN.remat}
    planned_policies = {
        name: PlannedPolicy("", dataclasses.replace(x, **changes)) for name, x in policies.items()
    }
    mesh = make_mesh(RUN.mesh, jax.devices())
    small, more = (result["state_bytes"] for result in separate)
    assert state_bytes(planned_policies, RUN.objective, RUN.optimizer, mesh) == 2 * small + more
    update = count_updates(planned_policies, RUN.objective, RUN.packing, mesh)
    assert update["bytes"] == separate[1]["update"]["bytes"] > separate[0]["update"]["bytes"]
    sampling = count_rollout(planned_policies, RUN.shapes, 1, mesh)
    small, more = (result["sampling"]["weight_bytes"] for result in separate)
    assert sampling["weight_bytes"] == 2 * small + more


@pytest.mark.slow
def test_adapters_share_a_base_without_state():
    result = plan_with(learners=ABC, lora=LORA)
    adapter = 2 * (16 + 32)  # A and B of one layer
    assert result["policies"]["a"] == {"parameters": param_count(SMALL), "trained": adapter}
    mesh = one_device_mesh()
    policies, _ = policies_of(small_job(learners=ABC, lora=LORA), SMALL)
    state = state_bytes(policies, RUN.objective, RUN.optimizer, mesh)
    # Float32 adapters with two moments; per adapter a reference in bfloat16; one base in bfloat16.
    assert state == 3 * (3 * 4 + 2) * adapter + 2 * param_count(SMALL)
    update = count_updates(policies, RUN.objective, RUN.packing, mesh)
    assert update["bytes"] == update["temporary_bytes"] + 4 * adapter
    # A replicated base is not copied for a rollout; a sharded one is copied once.
    assert count_rollout(policies, RUN.shapes, 1, mesh)["weight_bytes"] == 3 * 2 * adapter
    assert result["sampling"]["weight_bytes"] == 2 * (param_count(SMALL) - NORMS) + 6 * adapter


def test_the_counted_state_of_adapters_is_that_of_training():
    policies, _ = policies_of(dataclasses.replace(RUN, lora=LORA), SMALL)
    base = Decoder(dataclasses.replace(COMPUTE_CONFIG, param_dtype="bfloat16"), rngs=nnx.Rngs(0))
    adapted = add_lora(base, LORA, rngs=nnx.Rngs(1))
    policy = prepare_policy(adapted)
    arrays = (policy.spec.policy.frozen, policy.state.policy, policy.state.reference)
    mesh = one_device_mesh()
    sizes = [x.nbytes for x in jax.tree.leaves(arrays) if x.size > 1]  # without step counters
    assert state_bytes(policies, RUN.objective, RUN.optimizer, mesh) == sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_the_counted_copies_are_those_of_a_rollout(mesh, compute, lora):
    """Two policies on one base; float32 on two devices has the size of bfloat16 on each."""
    device_mesh = make_mesh(mesh, jax.devices()[: int(np.prod(mesh))])
    config = dataclasses.replace(SMALL, dtype=compute)
    storage_config = dataclasses.replace(config, param_dtype="float32" if lora is None else compute)
    policies = {name: PlannedPolicy("", config, lora) for name in "ab"}
    decoders = {name: init_sharded(storage_config, device_mesh, nnx.Rngs(0)) for name in policies}
    if lora is not None:
        decoders = {x: add_lora(decoders["a"], lora, rngs=nnx.Rngs(0)) for x in policies}
    originals = {
        id(x) for decoder in decoders.values() for x in jax.tree.leaves(nnx.state(decoder))
    }

    def copied_bytes(acting):
        distinct = {id(x): x for x in jax.tree.leaves(acting)}
        copies = [x for x in distinct.values() if id(x) not in originals]
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in copies)

    assert copy_bytes(policies, device_mesh) == copied_bytes(for_sampling(decoders))
    # Stale rollouts also copy the arrays that an update donates: all weights, or the adapters.
    trained = nnx.Param if lora is None else nnx.LoRAParam
    donated = [x for d in decoders.values() for x in jax.tree.leaves(nnx.state(d, trained))]
    stale = copied_bytes(for_sampling(decoders, donated_arrays=donated))
    assert copy_bytes(policies, device_mesh, outlive_update=True) == stale > 0


def test_a_base_that_is_named_twice_is_counted_once():
    run = small_job(learners=("a", "b"), lora=LORA, policy="tiny")
    default, named = (
        policies_of(dataclasses.replace(run, policies=own), config_named("tiny"))[0]
        for own in ((), (("b", "tiny"),))
    )
    assert named == default


def test_an_architecture_is_that_of_a_folder_or_a_published_model(model_folders, monkeypatch):
    monkeypatch.chdir(model_folders)
    assert config_named("llm").hidden_size == 16
    assert config_named("Qwen/Qwen2.5-3B-Instruct") == config_named("qwen2.5-3b")
    assert config_named("tiny").num_layers == 6
    for name in ("qwen2.5-3", "tiny-bert", "Qwen2.5-Coder-3B"):
        with pytest.raises(UserError, match=f"no model size named '{name}'"):
            config_named(name)
    changes = {"policies": (("rewrite", "Qwen2.5-3B-Instruct"),), "learners": ("plan", "rewrite")}
    policies, unknown = policies_of(small_job(**changes), SMALL)
    assert [policy.config.num_layers for policy in policies.values()] == [1, 36] and not unknown
    # Without a model, it has that of the others.
    changes = {"policies": (("rewrite", ""),), "learners": ("plan", "rewrite"), "policy": "x"}
    policies, unknown = policies_of(small_job(**changes), SMALL)
    assert [policy.name for policy in policies.values()] == ["x", "x"] and not unknown
    with pytest.raises(UserError, match="policies names 'filter': this system has policy"):
        policies_of(dataclasses.replace(RUN, policies=(("filter", "llm"),)), SMALL)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Qwen/Qwen2-0.5B", "qwen2.5-0.5b"),
        ("Qwen2-1.5B", "qwen2.5-1.5b"),
        ("Qwen2-7B-Instruct", "qwen2.5-7b"),
        ("Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
    ],
)
def test_the_models_of_the_papers_have_names(name, size):
    assert config_named(name) == MODEL_CONFIGS[size]
    old, new = MODEL_CONFIGS["llama-3-8b"], MODEL_CONFIGS["llama-3.1-8b"]
    changes = {"max_positions": old.max_positions, "rope_scaling": old.rope_scaling}
    assert dataclasses.replace(new, **changes) == old and old.max_positions == 8192


def test_width_policies_and_nucleus_come_from_the_recipe(monkeypatch):
    counted = []

    def count(policies, shapes, width, mesh, *, nucleus, outlive_update):
        counted.append((width, tuple(policies), nucleus))
        return UPDATE

    monkeypatch.setattr("jax_ragrl.plan.count_rollout", count)
    monkeypatch.setattr("jax_ragrl.plan.count_updates", lambda *_: UPDATE)
    shared = {"recipe.system.shared_policy": True, "recipe.group_size": 6}
    own = {"recipe.system.shared_policy": False}
    cut = {"recipe.system.top_p": 0.9}
    for name, changes in (("tiny/opera", shared), ("tiny/opera", own), ("tiny/mmoa_rag", cut)):
        job = config_job(name, changes)
        _programs(job, policies_of(job, SMALL)[0], one_device_mesh())
    assert counted[0] == (6, ("policy",), False)
    assert counted[1][1:] == (("analysis", "plan", "rewrite"), False)
    assert counted[2] == (1, ("policy",), True)


def test_the_default_architecture_is_that_of_the_policy(monkeypatch, capsys):
    monkeypatch.setattr("jax_ragrl.runtime.topology.describe_devices", lambda _: [])
    monkeypatch.setattr("jax_ragrl.plan.plan", lambda *args: {"layers": args[1].num_layers})
    config = [f"--config={CONFIGS / 'opera.py'}", "--topology", "v5e:4x4", "--json"]
    assert main(["config", "plan", *config, "--config.policy=Qwen2.5-7B-Instruct"]) == 0
    assert json.loads(capsys.readouterr().out) == {"layers": 28}
    assert main(["config", "plan", *config]) == 2
    assert "give --shape NAME, or --config.policy=FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["v5e:banana", "h100:many", "b9000:8", "h100:0", ""])
def test_an_unknown_topology_is_refused(name):
    with pytest.raises(UserError, match=f"'{name}'.*v5e:4x4.*h100:8"):
        describe_devices(name)


@pytest.mark.parametrize(
    ("name", "options"), [("v4:2x2x4", {"chip_config_name": "megacore"}), ("v5p:2x2x4", {})]
)
def test_a_described_chip_is_one_device(monkeypatch, name, options):
    """By default, the two cores of a v4 chip would be two devices, unlike on a real host."""
    calls = []

    def describe(*args: str, **options: str) -> types.SimpleNamespace:
        calls.append((args, options))
        return types.SimpleNamespace(devices=[])

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    assert describe_devices(name) == [] and calls == [((name, "tpu"), options)]


def test_the_memory_of_a_gpu_is_the_share_of_jax(monkeypatch):
    device = types.SimpleNamespace(device_kind="h200")
    assert memory_of(device) == GPUS["h200"].memory * 3 // 4
    # An empty value is none, as for JAX.
    for old, new, share in (("0.5", "", 2), ("", "0.25", 4)):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", old)
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", new)
        assert memory_of(device) == GPUS["h200"].memory // share
    for text in ("92", "92%", "0", "nan"):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", text)
        with pytest.raises(UserError, match=f"FRACTION is '{text}': give a share above 0"):
            memory_of(device)
    assert memory_of(types.SimpleNamespace(device_kind="cpu")) is None


def test_the_batch_with_the_largest_cache_is_counted():
    shapes = Shapes(
        prompt_lengths=(32, 64), batch_sizes=(8, 64), max_new_tokens=64, max_prompt_tokens=8 * 32
    )
    result = plan(dataclasses.replace(RUN, shapes=shapes), SMALL, jax.devices())
    assert result["sampling"]["prompts"] == [64, 32]


def test_kept_contexts_are_counted_for_one_device():
    shapes = dataclasses.replace(RUN.shapes, kept_contexts=6)
    meshes = one_device_mesh(), make_mesh((1, 8, 1), jax.devices())
    added = [
        count_sampling(shapes, SMALL, mesh)["begun_bytes"]
        - count_sampling(RUN.shapes, SMALL, mesh)["begun_bytes"]
        for mesh in meshes
    ]
    token = 2 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_dim
    assert added == [6 * 40 * token * np.dtype(SMALL.dtype).itemsize, 0]


BERT = pathlib.Path(__file__).parents[1] / "models" / "tiny_bert"


@pytest.fixture
def model_folders(tmp_path):
    """A folder with the description of an index, and one with the config of a decoder."""
    description = {"corpus": "3f2a", "kind": "exact", "encoder": {"kind": "bert"}}
    description |= {"count": 2 * 65536 + 1, "dimension": 64, "dtype": "bfloat16"}
    for name, file, values in (
        ("index", "index.json", description),
        ("llm", "config.json", to_hf(SMALL, "float32")),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(json.dumps(values))
    return tmp_path


def test_an_index_and_its_encoder_are_counted(model_folders, monkeypatch):
    monkeypatch.setitem(CEILINGS, "cpu", Ceilings(1e15, 1e9, 1))
    index = VectorIndex(str(BERT), "exact", folder=str(model_folders / "index"))
    result = count_other_models(index, {}, RUN.shapes, make_mesh((1, 8, 1), jax.devices()))
    vectors, encoder = result.sections["index"], result.sections["encoder"]
    rows = 65537 + -65537 % BLOCK  # the fuller of two devices, padded to blocks
    assert vectors["weight_bytes"] == rows * 64 * 2
    arrays = jax.tree.leaves(load_encoder(BERT)._state)
    assert encoder["weight_bytes"] == sum(x.nbytes for x in arrays)
    assert vectors["temporary_bytes"] >= STREAM * 256 * 4  # float32 scores of a block
    assert vectors["queries"] == 256 and vectors["bound"] == "memory"
    assert vectors["seconds_at_least"] * 1e9 / vectors["weight_bytes"] > 1  # it reads all vectors
    weights = vectors["weight_bytes"] + encoder["weight_bytes"]
    assert result.permanent_bytes == weights + max(x["temporary_bytes"] for x in (vectors, encoder))
    assert result.generation_bytes == 0 and result.uncounted_models == []


def test_a_language_model_is_whole_on_every_device_of_a_batch(model_folders, monkeypatch):
    monkeypatch.setattr("jax_ragrl.plan.other_models.REPLY", 8)
    mesh = make_mesh((1, 8, 1), jax.devices())
    llm = LocalLLMConfig(str(model_folders / "llm"), dtype="bfloat16")
    models = {"llm": llm, "judge": dataclasses.replace(llm, int8=True)}
    result = count_other_models(VectorIndex(), models, RUN.shapes, mesh)
    plain, int8 = (result.sections[name]["weight_bytes"] for name in models)
    assert plain == 2 * param_count(SMALL)
    kernels, outputs = 16 * 8 * (2 + 2 + 2 + 2) + 3 * 16 * 32, 2 * 8 * 3 + 16 + 2 * 32 + 16
    assert plain - int8 == kernels - 4 * outputs
    assert result.permanent_bytes == plain + int8
    assert result.generation_bytes == result.sections["llm"]["temporary_bytes"] > 0
    assert result.uncounted_models == ["judge: copies of its int8 weights in the compute dtype"]


@pytest.mark.parametrize(
    ("section", "fits", "fits_little"),
    [
        ({}, True, False),
        ({"llm": {"kind": "local", "model": "absent"}}, None, False),
        ({"judge": {"kind": "local", "model": ""}}, None, False),
        ({"index": {"kind": "exact"}}, None, False),
        ({"index": {"encoder": "", "folder": "absent"}}, None, False),
        ({"index": {"kind": "remote", "url": "http://host:1"}}, True, False),
        ({"lora": {"rank": 4}}, True, False),
        ({"policies": (("policy", "absent"),)}, None, None),
        ({"policies": (("policy", "llm"),)}, True, False),
        ({"preference": {}}, None, None),
    ],
)
def test_uncounted_models_make_a_fit_unknown(
    model_folders, monkeypatch, section, fits, fits_little
):
    monkeypatch.chdir(model_folders)
    monkeypatch.setattr("jax_ragrl.plan.count_updates", lambda *_, **__: UPDATE)
    sampling = {"bytes": 1, "weight_bytes": 1, "compile_s": 1.0}
    monkeypatch.setattr("jax_ragrl.plan.count_rollout", lambda *_, **__: sampling)
    job = build(Job, vars(small_job(2)) | section)
    for memory, expected in ((2**40, fits), (1, fits_little)):
        monkeypatch.setattr("jax_ragrl.plan.memory_of", lambda _, memory=memory: memory)
        result = plan(job, SMALL, jax.devices())
        assert result["fits"] is expected
        names = [text.partition(":")[0].partition(".")[0] for text in result["uncounted"]]
        (first_key, *_) = (*section, "")
        name = "encoder" if "encoder" in section.get("index", {}) else first_key
        assert names == ([] if fits else [name])


def test_the_peak_is_the_permanent_memory_and_one_program(monkeypatch):
    sections = {
        "index": {"weight_bytes": 100, "temporary_bytes": 20},
        "encoder": {"weight_bytes": 10, "temporary_bytes": 7},  # not during a search
        "llm": {"weight_bytes": 1000, "temporary_bytes": 5},
    }
    monkeypatch.setattr("jax_ragrl.plan.count_updates", lambda *_, **__: UPDATE)
    sampling = {"bytes": 4, "weight_bytes": 3, "compile_s": 1.0}
    monkeypatch.setattr("jax_ragrl.plan.count_rollout", lambda *_, **__: sampling)
    monkeypatch.setattr("jax_ragrl.plan.count_other_models", lambda *_: OtherModels(sections, []))
    result = plan(RUN, SMALL, jax.devices())
    assert result["peak_bytes"] - result["state_bytes"] == 100 + 10 + 20 + 1000 + (3 + 5)
    # Stale rollouts run during the update.
    stale = plan(small_job(staleness=1), SMALL, jax.devices())
    assert stale["peak_bytes"] == result["peak_bytes"] + 2


def test_a_program_that_a_tpu_cannot_compile_is_named(monkeypatch: pytest.MonkeyPatch):
    text = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, it needs 19.73G of 15.75G.\nProgram:"

    class Trace:
        def compile(self, options: Any) -> None:
            raise jax.errors.JaxRuntimeError(text)

    mesh = make_mesh((1, 8, 1), jax.devices())
    monkeypatch.setattr(
        "jax_ragrl.plan.count_rollout", lambda *_, **__: compile_program(Trace(), mesh)
    )
    with pytest.raises(UserError, match=r"sampling does not fit a device \(Ran .* 15.75G\): lower"):
        plan(RUN, SMALL, jax.devices())
    text = "INTERNAL: a bug"
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        plan(RUN, SMALL, jax.devices())
