"""What a run needs is what its arrays take and what the compiler says of its programs."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
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
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import prepare
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.models.encoder import load_encoder
from jax_ragrl.models.hf_config import to_hf
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.plan import Plan, plan, plan_of, policies_of, shape_of
from jax_ragrl.plan.abstract_arrays import attending
from jax_ragrl.plan.other_models import Beside, count_beside
from jax_ragrl.plan.policies import (
    Trained,
    copied_bytes,
    count_rollout,
    count_updates,
    state_bytes,
)
from jax_ragrl.run.config import LLM, Index
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.topology import GPUS, describe_devices, memory_of
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling

SMALL = DecoderConfig(64, 16, 32, 1, 2, 2, 8)
RUN = Plan(
    Objective(critic="none", advantage="group_normalised", kl=KL("loss", "k3")),
    Optimizer(1e-3),
    Shapes(lengths=(32,), batches=(16,), steps=8, tokens=64),
    Layout(lengths=(64,), tokens=64),
    mesh=(1, 8, 1),
)
NORMS = 3 * 16 + 2 * 8  # a layer's two, the last one, queries' and keys': whole on each device
COMPUTED = dataclasses.replace(SMALL, dtype=RUN.compute)


LORA = LoRAConfig(2, targets=("up_proj",))
ABC = ("a", "b", "c")


@functools.cache
def planned(**changes: Any) -> dict[str, Any]:
    return plan(dataclasses.replace(RUN, **changes), SMALL, jax.devices())


def test_state_is_weights_moments_and_a_reference_split_over_the_devices():
    """Every matrix of this shape splits evenly; the vectors of norms lie on each device whole."""
    found, whole = planned(), NORMS
    split = (param_count(SMALL) - whole) // 8
    each, reference = 4 * (split + whole), 2 * split + 4 * whole
    assert found["state_bytes"] == 3 * each + reference  # weights and two moments are float32
    assert found["devices"] == 8
    count = param_count(SMALL)
    assert found["policies"] == {"policy": {"parameters": count, "trained": count}}
    assert found["update"]["rows"] == [8, 64] and found["sampling"]["prompts"] == [16, 32]
    larger = max(found["update"]["bytes"], found["sampling"]["bytes"])
    assert found["peak_bytes"] == found["state_bytes"] + larger
    assert found["update"]["bytes"] == found["update"]["temporary_bytes"] + each
    assert found["update"]["temporary_bytes"] > 0 < found["sampling"]["temporary_bytes"]
    assert found["fits"] is None and found["memory_bytes"] is None


def test_a_rollout_takes_a_copy_of_the_weights_to_each_device_and_caches_of_all_siblings():
    """The copies are in the compute dtype, and only tensor parallelism splits them."""
    one, more = planned()["sampling"], planned(width=64, learners=ABC)["sampling"]
    assert one["weight_bytes"] == 2 * (param_count(SMALL) - NORMS)
    assert more["weight_bytes"] == 3 * one["weight_bytes"]
    for found in (one, more):
        assert found["bytes"] == found["weight_bytes"] + found["temporary_bytes"]
    prompts, slots = 2, 8  # of a device, and a sibling; bfloat16 keys and values of 2 heads of 8
    caches = 63 * prompts * slots * 2 * 2 * 8 * 2
    assert more["temporary_bytes"] - one["temporary_bytes"] > caches


def test_a_cache_that_grows_is_planned_at_its_end_beside_a_batch_that_has_begun():
    shapes = dataclasses.replace(RUN.shapes, steps=32, slots=16)
    found = plan(dataclasses.replace(RUN, shapes=shapes, width=64), SMALL, jax.devices())
    slot = 64 * 2 * 2 * 2 * 8 * 2  # of siblings after two prompts; bfloat16 keys and values
    assert found["sampling"]["temporary_bytes"] > (32 + 16) * slot
    assert found["sampling"]["bytes"] == sum(
        found["sampling"][name] for name in ("weight_bytes", "temporary_bytes")
    )


def test_a_reference_is_planned_in_the_bytes_that_it_is_kept_in():
    given = (
        Decoder(SMALL, rngs=nnx.Rngs(0)),
        RUN.objective,
        RUN.optimizer,
        RUN.layout,
        ("a",),
        1.0,
        1,
    )
    kept = prepare(*given, compute=RUN.compute)[1].reference
    policies, mesh = {"a": Trained("", COMPUTED)}, make_mesh((1, 1, 1), jax.devices()[:1])
    none = dataclasses.replace(RUN.objective, kl=KL("none"))
    with_it, without = (
        state_bytes(policies, objective, RUN.optimizer, mesh) for objective in (RUN.objective, none)
    )
    assert with_it - without == sum(x.nbytes for x in jax.tree.leaves(kept))


def test_a_critic_of_its_own_has_weights_and_moments_as_its_policy_has():
    policies, mesh = {"a": Trained("", COMPUTED)}, make_mesh((1, 1, 1), jax.devices()[:1])
    none = dataclasses.replace(RUN.objective, kl=KL("none"))
    own = dataclasses.replace(none, critic="own", advantage="gae")
    reward = dataclasses.replace(none, kl=KL("reward"))
    state, twice, more = (
        state_bytes(policies, x, RUN.optimizer, mesh) for x in (none, own, reward)
    )
    assert state == 3 * 4 * param_count(SMALL) and twice == 2 * state
    assert more - state == 2 * param_count(SMALL) + 2 * NORMS  # a reference, for any KL


def test_every_policy_has_a_state_and_one_gradient_is_there_at_a_time():
    one, three = planned(), planned(width=64, learners=ABC)
    assert three["state_bytes"] == 3 * one["state_bytes"]
    assert three["update"]["bytes"] == one["update"]["bytes"]


def test_policies_of_several_shapes_take_what_each_of_them_does():
    """Two of one shape and one that is larger, whose programs take most."""
    large = dataclasses.replace(SMALL, hidden_size=32, intermediate_size=64)
    alone = [plan(RUN, config, jax.devices()) for config in (SMALL, large)]
    policies = {"a": SMALL, "b": SMALL, "c": large}
    mixed = {
        name: Trained("", dataclasses.replace(x, dtype="bfloat16")) for name, x in policies.items()
    }
    mesh = make_mesh(RUN.mesh, jax.devices())
    small, more = (found["state_bytes"] for found in alone)
    assert state_bytes(mixed, RUN.objective, RUN.optimizer, mesh) == 2 * small + more
    update = count_updates(mixed, RUN.objective, RUN.layout, mesh)
    assert update["bytes"] == alone[1]["update"]["bytes"] > alone[0]["update"]["bytes"]
    sampled = count_rollout(mixed, RUN.shapes, 1, mesh)
    small, more = (found["sampling"]["weight_bytes"] for found in alone)
    assert sampled["weight_bytes"] == 2 * small + more


def test_adapters_share_a_base_and_alone_have_moments_gradients_and_copies():
    found = planned(learners=ABC, lora=LORA)
    adapter = 2 * (16 + 32)  # A and B of one layer
    assert found["policies"]["a"] == {"parameters": param_count(SMALL), "trained": adapter}
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    policies, _ = policies_of(dataclasses.replace(RUN, learners=ABC, lora=LORA), SMALL)
    state = state_bytes(policies, RUN.objective, RUN.optimizer, mesh)
    # Float32 adapters with two moments, a reference of each in bfloat16, one base in bfloat16.
    assert state == 3 * (3 * 4 + 2) * adapter + 2 * param_count(SMALL)
    update = count_updates(policies, RUN.objective, RUN.layout, mesh)
    assert update["bytes"] == update["temporary_bytes"] + 4 * adapter
    # A base that every device holds whole is not copied for a rollout; one that is split is, once.
    assert count_rollout(policies, RUN.shapes, 1, mesh)["weight_bytes"] == 3 * 2 * adapter
    assert found["sampling"]["weight_bytes"] == 2 * (param_count(SMALL) - NORMS) + 6 * adapter


def test_what_is_planned_of_adapters_is_what_training_keeps():
    policies, _ = policies_of(dataclasses.replace(RUN, lora=LORA), SMALL)
    base = Decoder(dataclasses.replace(COMPUTED, param_dtype="bfloat16"), rngs=nnx.Rngs(0))
    adapted = add_lora(base, LORA, rngs=nnx.Rngs(1))
    given = (adapted, RUN.objective, RUN.optimizer, RUN.layout, ("a",), 1.0, 1)
    trainer, models = prepare(*given, compute=RUN.compute)
    kept = (trainer.policy.frozen, models.policy, models.reference)
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    sizes = [x.nbytes for x in jax.tree.leaves(kept) if x.size > 1]  # no counts of steps
    assert state_bytes(policies, RUN.objective, RUN.optimizer, mesh) == sum(sizes)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_what_a_rollout_is_planned_to_copy_is_what_it_copies(mesh, compute, lora):
    """Of two policies on one base; float32 over two devices is as large as bfloat16 on each."""
    laid = make_mesh(mesh, jax.devices()[: int(np.prod(mesh))])
    config = dataclasses.replace(SMALL, dtype=compute)
    stored = dataclasses.replace(config, param_dtype="float32" if lora is None else compute)
    policies = {name: Trained("", config, lora) for name in "ab"}
    decoders = {name: init_sharded(stored, laid, nnx.Rngs(0)) for name in policies}
    if lora is not None:
        decoders = {x: add_lora(decoders["a"], lora, rngs=nnx.Rngs(0)) for x in policies}
    kept = {id(x) for decoder in decoders.values() for x in jax.tree.leaves(nnx.state(decoder))}
    acting = [x for _, params in for_sampling(decoders).values() for x in jax.tree.leaves(params)]
    taken = {id(x): x for x in acting}
    copied = [x for x in taken.values() if id(x) not in kept]
    found = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in copied)
    assert copied_bytes(policies, laid) == found


def test_a_base_that_a_role_names_again_is_counted_once():
    given = dataclasses.replace(RUN, learners=("a", "b"), lora=LORA, policy="tiny")
    mesh = make_mesh(RUN.mesh, jax.devices())
    alike, again = (
        policies_of(dataclasses.replace(given, policies=own), shape_of("tiny"))[0]
        for own in ((), (("b", "tiny"),))
    )
    assert again == alike
    one, other = (state_bytes(x, RUN.objective, RUN.optimizer, mesh) for x in (alike, again))
    assert one == other


def test_a_shape_is_that_of_a_folder_or_of_a_published_model(described, monkeypatch):
    monkeypatch.chdir(described)
    assert shape_of("llm").hidden_size == 16
    assert shape_of("Qwen/Qwen2.5-3B-Instruct") == shape_of("qwen2.5-3b")
    assert shape_of("tiny").num_layers == 6
    for name in ("qwen2.5-3", "tiny-bert", "Qwen2.5-Coder-3B"):
        with pytest.raises(UserError, match=f"no shape named '{name}'"):
            shape_of(name)
    given = {"policies": (("rewrite", "Qwen2.5-3B-Instruct"),), "learners": ("plan", "rewrite")}
    policies, unknown = policies_of(dataclasses.replace(RUN, **given), SMALL)
    assert [policy.config.num_layers for policy in policies.values()] == [1, 36] and not unknown
    with pytest.raises(UserError, match="policies names 'filter': this system has policy"):
        policies_of(dataclasses.replace(RUN, policies=(("filter", "llm"),)), SMALL)


@pytest.mark.parametrize(
    ("platform", "named", "planned"),
    [("tpu", "auto", "splash"), ("tpu", "xla", "xla"), ("cpu", "auto", "xla")],
)
def test_the_attention_of_the_device_is_planned_unless_the_config_names_another(
    platform, named, planned
):
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
    config = dataclasses.replace(SMALL, attention_impl=named)
    assert attending(config, 2048, mesh).attention_impl == planned


def test_siblings_and_policies_are_those_of_the_recipe_and_no_file_is_needed():
    pool = {"group": 6, "shared": False, "pool": None, "gold": "steps"}
    shared = pool | {"shared": True}
    tree = {"tree": {"width": 3}}
    found = [
        plan_of({"system": system, "recipe": recipe, "policy": None, "mesh": (1, 2, 4)})
        for system, recipe in (("opera", pool), ("opera", shared), ("c3po", tree), ("coda", {}))
    ]
    assert [(x["width"], x["learners"]) for x in found] == [
        (6, ("analysis", "plan", "rewrite")),
        (6, ("policy",)),
        (3, ("policy",)),
        (1, ("policy",)),
    ]
    assert all(x.keys() == {"mesh", "policy", "width", "learners"} for x in found)
    assert plan_of({"run": {}, "remat": "dots"}) == {"remat": "dots"}


def test_the_command_prints_the_plan_of_a_config(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("jax_ragrl.runtime.topology.describe_devices", asked.append)
    monkeypatch.setattr("jax_ragrl.plan.plan", lambda *given: {"given": repr(given)})
    config = f"--config={CONFIGS / 'tiny' / 'opera.py'}"
    assert main(["plan", config, "--shape", "tiny", "--topology", "v5e:4x4"]) == 0
    given = json.loads(capsys.readouterr().out)["given"]
    assert asked == ["v5e:4x4"] and "num_layers=6" in given
    assert "width=6, learners=('policy',)" in given


def test_a_shape_that_is_not_given_is_that_of_the_policy(monkeypatch, capsys):
    monkeypatch.setattr("jax_ragrl.runtime.topology.describe_devices", lambda _: [])
    monkeypatch.setattr("jax_ragrl.plan.plan", lambda *given: {"layers": given[1].num_layers})
    config = [f"--config={CONFIGS / 'opera.py'}", "--topology", "v5e:4x4"]
    assert main(["plan", *config, "--config.policy=Qwen2.5-7B-Instruct"]) == 0
    assert json.loads(capsys.readouterr().out) == {"layers": 28}
    assert main(["plan", *config]) == 2
    assert "give --shape NAME, or --config.policy=FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["v5e:banana", "h100:many", "b9000:8"])
def test_a_topology_that_is_not_known_is_refused(name):
    with pytest.raises(UserError, match=f"'{name}'.*v5e:4x4.*h100:8"):
        describe_devices(name)


@pytest.mark.parametrize(
    ("name", "options"), [("v4:2x2x4", {"chip_config_name": "megacore"}), ("v5p:2x2x4", {})]
)
def test_a_chip_is_one_device_of_a_described_v4_too(monkeypatch, name, options):
    """Its two cores would be one each, where nothing is said: no mesh is made of those."""
    asked = []

    def describe(*given: str, **options: str) -> types.SimpleNamespace:
        asked.append((given, options))
        return types.SimpleNamespace(devices=[])

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    assert describe_devices(name) == [] and asked == [((name, "tpu"), options)]


def test_gpus_are_described_and_compiled_for_where_there_are_none():
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("a CUDA plugin describes GPUs; the lock for tests has none")
    found = plan(RUN, SMALL, describe_devices("h100:8"))
    assert found["device"] == "h100" and found["devices"] == 8 and found["fits"]
    assert found["update"]["temporary_bytes"] > 0 < found["sampling"]["temporary_bytes"]


def test_of_a_gpus_memory_jax_takes_a_share(monkeypatch):
    device = types.SimpleNamespace(device_kind="h200")
    assert memory_of(device) == GPUS["h200"].memory * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert memory_of(device) == GPUS["h200"].memory // 2
    assert memory_of(types.SimpleNamespace(device_kind="cpu")) is None


def test_the_batch_whose_cache_is_largest_is_planned_and_not_that_of_the_longest_prompts():
    shapes = Shapes(lengths=(32, 64), batches=(8, 64), steps=64, tokens=8 * 32)
    found = plan(dataclasses.replace(RUN, shapes=shapes), SMALL, jax.devices())
    assert found["sampling"]["prompts"] == [64, 32]


BERT = pathlib.Path(__file__).parents[1] / "models" / "tiny_bert"


@pytest.fixture
def described(tmp_path):
    """The folder of an index that says no more than how large it is, and that of a decoder."""
    made = {"count": 2 * 65536 + 1, "dimension": 64, "dtype": "bfloat16"}
    for name, file, values in (
        ("index", "index.json", made),
        ("llm", "config.json", to_hf(SMALL, "float32")),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(json.dumps(values))
    return tmp_path


def test_vectors_lie_on_the_devices_that_are_worth_it_and_an_encoder_on_the_first(described):
    index = Index(str(BERT), "exact", folder=str(described / "index"))
    found = count_beside(index, {}, RUN.shapes, make_mesh((1, 8, 1), jax.devices()))
    vectors, encoder = found.parts["index"], found.parts["encoder"]
    assert vectors["weight_bytes"] == 65537 * 64 * 2  # the fuller of two
    weights = jax.tree.leaves(load_encoder(BERT)._state)
    assert encoder["weight_bytes"] == sum(x.nbytes for x in weights)
    assert vectors["temporary_bytes"] >= 65537 * 256 * 4  # scores of a call, float32
    kept = vectors["weight_bytes"] + encoder["weight_bytes"]
    assert found.lasting == kept + max(x["temporary_bytes"] for x in (vectors, encoder))
    assert found.writing == 0 and found.uncounted == []


def test_a_language_model_is_split_like_a_policy_and_takes_more_while_it_writes(
    described, monkeypatch
):
    monkeypatch.setattr("jax_ragrl.plan.other_models.REPLY", 8)
    mesh = make_mesh((1, 8, 1), jax.devices())
    llm = LLM("local", str(described / "llm"), dtype="bfloat16")
    models = {"llm": llm, "judge": dataclasses.replace(llm, int8=True)}
    found = count_beside(Index(), models, RUN.shapes, mesh)
    plain, eighth = (found.parts[name]["weight_bytes"] for name in models)
    assert plain == 2 * ((param_count(SMALL) - NORMS) // 8 + NORMS)
    kernels, outputs = 16 * 8 * (2 + 2 + 2 + 2) + 3 * 16 * 32, 2 * 8 * 3 + 16 + 2 * 32 + 16
    assert plain - eighth == kernels // 8 - 4 * outputs
    assert found.lasting == plain + eighth
    assert found.writing == found.parts["llm"]["temporary_bytes"] > 0
    assert found.uncounted == ["judge: copies of its int8 weights, widened"]


@pytest.mark.parametrize(
    ("section", "fits", "little"),
    [
        ({}, True, False),
        ({"llm": {"kind": "local", "model": "absent"}}, None, False),
        ({"judge": {"kind": "local", "model": None}}, None, False),
        ({"index": {"kind": "exact"}}, None, False),
        ({"index": {"encoder": None, "folder": "absent"}}, None, False),
        ({"index": {"encoder": None, "kind": "remote", "url": "http://host:1"}}, True, False),
        ({"lora": {"rank": 4}}, True, False),
        ({"policies": (("policy", "absent"),)}, None, None),
        ({"policies": (("policy", "llm"),)}, True, False),
        ({"preference": {}}, None, None),
    ],
)
def test_what_is_not_counted_is_named_and_nothing_is_said_to_fit_with_it(
    described, monkeypatch, section, fits, little
):
    monkeypatch.chdir(described)
    monkeypatch.setattr("jax_ragrl.plan.count_updates", lambda *_: {"bytes": 2})
    sampled = {"bytes": 1, "weight_bytes": 1}
    monkeypatch.setattr("jax_ragrl.plan.count_rollout", lambda *_: sampled)
    given = plan_of({"objective": RUN.objective, "optimizer": RUN.optimizer} | section)
    for memory, expected in ((2**40, fits), (1, little)):
        monkeypatch.setattr("jax_ragrl.plan.memory_of", lambda _, memory=memory: memory)
        found = plan(build(Plan, given), SMALL, jax.devices())
        assert found["fits"] is expected
        names = [text.partition(":")[0].partition(".")[0] for text in found["uncounted"]]
        (asked, *_) = (*section, "")
        named = "encoder" if "encoder" in section.get("index", {}) else asked
        assert names == ([] if fits else [named])


def test_a_peak_holds_what_lies_beside_and_the_program_that_takes_most(monkeypatch):
    parts = {
        "index": {"weight_bytes": 100, "temporary_bytes": 20},
        "encoder": {"weight_bytes": 10, "temporary_bytes": 7},  # not while it is searched
        "llm": {"weight_bytes": 1000, "temporary_bytes": 5},
    }
    monkeypatch.setattr("jax_ragrl.plan.count_updates", lambda *_: {"bytes": 2})
    sampled = {"bytes": 4, "weight_bytes": 3}
    monkeypatch.setattr("jax_ragrl.plan.count_rollout", lambda *_: sampled)
    monkeypatch.setattr("jax_ragrl.plan.count_beside", lambda *_: Beside(parts, []))
    found = plan(RUN, SMALL, jax.devices())
    assert found["peak_bytes"] - found["state_bytes"] == 100 + 10 + 20 + 1000 + (3 + 5)
