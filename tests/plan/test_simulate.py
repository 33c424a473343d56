"""Simulated steps, fitted configs and the text of a plan; nothing is compiled."""

import dataclasses
import json
from typing import Any

import pytest

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.errors import UserError
from jax_ragrl.learner.packing import Layout
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.published import published_config
from jax_ragrl.plan.abstract_arrays import TooLargeError
from jax_ragrl.plan.fit import fit, meshes
from jax_ragrl.plan.other_models import OtherModels, index_place
from jax_ragrl.plan.simulate import Workload, parse_workload, simulate
from jax_ragrl.plan.text import plan_text
from jax_ragrl.run.config import Job
from tests.plan.jobs import small_job

COLLECTIVES = {"all-gather": {"count": 28, "bytes": 3_000_000_000}}
WORK = {"flops": 1e15, "hbm_bytes": 10**9, "kernels": 639, "collectives": {}}
# Of a host with 4 of the 8 devices.
BATCH = {"devices": 4, "prompts": [16, 1000], "prefill_tokens": 16 * 1000, "width": 2}
BATCH |= {"prefill": WORK, "decode_step": WORK}
FLOPS = {"flops_per_token": 6e9, "gradient_flops_per_token": 4e9}
TIME = {"seconds_at_least": 1.0, "bound": "compute", "tokens_per_s_at_most": 1}


def planned(**changes: Any) -> dict[str, Any]:
    """A plan of 8 devices: batches of 4 prompts of 1,000 tokens, of a row of 1,024 trained ones."""
    return {
        "device": "TPU v5 lite",
        "devices": 8,
        "mesh": {"data": 1, "fsdp": 8, "tensor": 1},
        "state_bytes": 5 * 10**9,
        "peak_bytes": 9 * 10**9,
        "memory_bytes": 16 * 2**30,
        "fits": True,
        "checkpoint_bytes": 40 * 10**9,
        "other_models": {
            "index": TIME | {"weight_bytes": 8 * 10**9, "queries": 256},
            "encoder": {"weight_bytes": 4 * 10**8},
        },
        "index_place": {},
        "uncounted": ["judge: no folder"],
        "update": {"rows": [8, 1024], "bytes": 10**9, **WORK, "collectives": COLLECTIVES},
        "sampling": BATCH | {"bytes": 4 * 10**9, "weight_bytes": 2 * 10**9},
        "passes": {"gradients": 1, "scores": 2} | FLOPS,
        "programs": {"sampler": 12, "update": 4},
        "compile_s": 230.0,
        "speed": {
            "ceilings": {"flops": 1e15, "bandwidth": 1e12, "link": 1e11, "devices": 8},
            "gradient": TIME | {"seconds_at_least": 0.1},
            "prefill": TIME | {"seconds_at_least": 0.4},
            "decode_step": TIME | {"seconds_at_least": 0.01, "bound": "memory"},
        },
        **changes,
    }


WORKLOAD = Workload(questions=64, actions=4, rounds=4, prompt=500, tokens=100)


def test_a_step_is_the_sum_of_its_parts():
    step = simulate(planned(), WORKLOAD, 8)
    # 64 x 4 / 4 actions per round on 8 groups are 8 rows of a group, a full batch of 4 x 2.
    prefill = 500 * 8 * 0.4 / (4 * 1000)
    assert step["rollout_s"] == pytest.approx(4 * (prefill + 100 * 0.01))
    # 32 actions of 600 tokens per group in batches of 1,024; scores add half of a gradient.
    assert step["update_s"] == pytest.approx(19 * 0.1 * 1.5)
    assert step["sync_s"] == pytest.approx(0.02)
    parts = ("rollout_s", "update_s", "sync_s", "host_s")
    assert step["step_s"] == pytest.approx(sum(step[name] for name in parts))
    assert step["tokens_per_s"] == pytest.approx(256 * 100 / step["step_s"])


def test_decoding_is_never_faster_than_reading_the_weights():
    """More devices leave fewer rows to each of them, which read the weights for every token."""
    many = simulate(planned(), WORKLOAD, 8 * 10**6)
    floor = 4 * 100 * 2e9 / 1e12  # rounds, tokens, weights over bandwidth
    assert many["rollout_s"] == pytest.approx(floor, rel=0.01)


def test_devices_wait_for_the_language_model_and_the_host():
    work = Workload(questions=64, actions=4, rounds=4, prompt=500, tokens=100, llm=2, host=0.01)
    step, plain = simulate(planned(), work, 8), simulate(planned(), WORKLOAD, 8)
    assert step["step_s"] - plain["step_s"] == pytest.approx(4 * 2 + 256 * 0.01)
    assert step["waiting"] == pytest.approx((8 + 2.56) / step["step_s"]) and not plain["waiting"]
    half = simulate(planned(), dataclasses.replace(WORKLOAD, efficiency=0.5), 8)
    assert half["step_s"] == pytest.approx(2 * plain["step_s"])


def test_stale_rollouts_hide_the_shorter_of_waiting_and_updates():
    def steps(llm: float) -> list[dict[str, Any]]:
        works = (dataclasses.replace(WORKLOAD, llm=llm, staleness=n) for n in (0, 1))
        return [simulate(planned(), work, 8) for work in works]

    fresh, stale = steps(llm=0.5)  # 2 s of waiting, and updates of 2.85 s
    assert fresh["step_s"] - stale["step_s"] == pytest.approx(2)
    assert fresh["waiting"] > 0 and stale["waiting"] == pytest.approx(0)
    fresh, stale = steps(llm=5)
    assert fresh["step_s"] - stale["step_s"] == pytest.approx(fresh["update_s"])
    assert stale["waiting"] == pytest.approx((20 - fresh["update_s"]) / stale["step_s"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("staleness=2", "staleness=2.0 is neither 0 nor 1"),
        ("questions=x", "'questions=x' has no number"),
        ("banana=1", "no workload number 'banana': use questions"),
        ("tokens=0", "tokens=0.0 is out of range"),
        ("tokens=5,llm=1,tokens=7", "tokens has two values"),
        ("llm=-1", "llm=-1.0 is out of range"),
        ("host=nan", "host=nan is out of range"),
        ("efficiency=2", "efficiency=2.0 exceeds the data sheet"),
    ],
)
def test_a_wrong_workload_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_workload(text)


def test_a_workload_is_read_by_name():
    assert parse_workload("") == Workload()
    assert parse_workload("tokens=7,llm=.5") == Workload(tokens=7, llm=0.5)
    own = parse_workload("questions=2", questions=48, staleness=1)  # those of a config
    assert own == Workload(questions=2, staleness=1)


def test_devices_that_cannot_be_simulated_are_refused():
    with pytest.raises(UserError, match="give a multiple of 4"):
        simulate(planned(mesh={"data": 1, "fsdp": 2, "tensor": 4}), WORKLOAD, 6)
    with pytest.raises(UserError, match="no data sheet for 'cpu'"):
        simulate(planned(speed=None, device="cpu"), WORKLOAD, 8)


RUN = small_job(packing=Layout(row_lengths=(1024,), tokens_per_device=4096), mesh=())
SMALL = DecoderConfig(512, 256, 1024, 1, 4, 2, 64)


@pytest.mark.parametrize("devices", [8, 256, 1024])
@pytest.mark.parametrize(
    "names",
    [["qwen2.5-0.5b"], ["qwen2.5-1.5b"], ["qwen2.5-7b"], ["qwen2.5-7b", "qwen2.5-0.5b"]],
)
def test_every_mesh_leaves_wide_columns_and_divides_all_policies(names, devices):
    policies = [published_config(name) for name in names]
    assert meshes(policies, devices)
    for data, fsdp, tensor in meshes(policies, devices):
        assert data * fsdp * tensor == devices
        for config in policies:
            assert config.hidden_size % fsdp == 0 and config.hidden_size // fsdp >= 128
            assert config.num_kv_heads % tensor == 0


def memory_of_changes(run: Job) -> dict[str, Any]:
    """A plan whose memory falls with recomputation and with smaller batches."""
    factor = {"none": 16, "dots": 6, "full": 2}[run.remat]
    return planned(peak_bytes=factor * run.packing.tokens_per_device, memory_bytes=20_000)


def test_the_fitted_config_recomputes_the_least_that_fits():
    result = fit(RUN, [SMALL], 8, memory_of_changes)
    assert result["changes"] == {
        "mesh": (4, 2, 1),
        "remat": "none",
        "packing.tokens_per_device": 1024,
    }


def test_an_index_that_is_too_large_gets_a_server_per_host():
    def with_index(size: int) -> dict[str, Any]:
        def planned_run(run: Job) -> dict[str, Any]:
            result = memory_of_changes(run)
            sections = {"index": {"weight_bytes": size - 100, "temporary_bytes": 100}}
            peak = result["peak_bytes"] + size
            place = index_place(OtherModels(sections, []), peak, result["memory_bytes"])
            return result | {"peak_bytes": peak, "index_place": place}

        return fit(RUN, [SMALL], 8, planned_run)

    # With more recomputation it fits on the devices.
    small = with_index(5_000)
    assert small["changes"]["remat"] == "dots" and small["index_place"]["place"] == "devices"
    large = with_index(30_000)
    remote = {"index.kind": "remote", "index.url": "http://localhost:8001"}
    assert large["changes"] == fit(RUN, [SMALL], 8, memory_of_changes)["changes"] | remote
    assert large["index_place"] == {"place": "server", "device_bytes": 30_000}
    text = plan_text(planned(index_place=large["index_place"]))
    assert "a server per host ('ragrl serve retriever'): 30 kB per device is too much" in text


def test_programs_that_no_tpu_compiles_do_not_fit():
    """An update is too large without recomputation; a sampler depends on the mesh alone."""
    tried = []

    def too_large(run: Job) -> dict[str, Any]:
        tried.append((run.mesh, run.remat))
        if run.mesh == (4, 2, 1):
            raise TooLargeError("sampling does not fit", "sampling")
        if run.remat != "full":
            raise TooLargeError("an update does not fit", "an update")
        return memory_of_changes(run)

    assert fit(RUN, [SMALL], 8, too_large)["changes"]["mesh"] == (2, 2, 2)
    assert tried[-1] == ((2, 2, 2), "full")
    assert tried.count(((4, 2, 1), "none")) == 1 and ((4, 2, 1), "full") not in tried
    with pytest.raises(TooLargeError, match="sampling does not fit"):
        fit(RUN, [dataclasses.replace(SMALL, num_kv_heads=1)], 8, too_large)


def test_a_config_that_cannot_fit_is_refused():
    with pytest.raises(UserError, match="no mesh, remat and batch size fit 8 devices"):
        fit(RUN, [SMALL], 8, lambda _: planned(memory_bytes=1))
    with pytest.raises(UserError, match="memory of 'TPU v5 lite' is unknown"):
        fit(RUN, [SMALL], 8, lambda _: planned(memory_bytes=None))


def test_the_text_has_memory_time_and_steps():
    steps = [simulate(planned(), WORKLOAD, count) for count in (8, 16)]
    text = plan_text(planned(steps=steps, changes={"mesh": (4, 2, 1), "remat": "dots"}))
    for line in (
        "8 x TPU v5 lite, mesh data 1, fsdp 8, tensor 1",
        "9 GB of 17.2 GB, fits",
        "8 GB, 256 queries in at least 1 s",
        "400 MB\n",
        "1 PFLOP, 1 GB of device memory, 639 kernels",
        "28, 3 GB",
        "10 ms (memory), at most 1 tokens/s",
        "about 230 s, one by one",
        '--config.mesh="(4,2,1)"',
        "--config.remat=dots",
        "judge: no folder",
    ):
        assert line in text
    assert len(text.partition("rollout_s")[2].splitlines()) == 3


def test_the_command_tries_meshes_of_all_policies(monkeypatch, capsys):
    tried = set()
    monkeypatch.setattr("jax_ragrl.runtime.topology.describe_devices", lambda _: [None] * 8)
    monkeypatch.setattr(
        "jax_ragrl.plan.plan", lambda job, *_: tried.add(job.mesh) or planned(memory_bytes=1)
    )
    command = ["config", "plan", f"--config={CONFIGS / 'tiny' / 'c3po.py'}", "--topology=v5e:2x4",
               "--shape=qwen2.5-7b", "--config.policies=(('router','qwen2.5-0.5b'),)"]  # fmt: skip
    assert main([*command, "--fit"]) == 2
    assert "no mesh, remat and batch size fit 8 devices" in capsys.readouterr().err
    assert tried == {(2, 4, 1), (1, 4, 2)}  # not the (1, 2, 4) and (1, 8, 1) of --shape


def test_the_command_simulates_and_prints_text_or_json(monkeypatch, capsys):
    monkeypatch.setattr("jax_ragrl.runtime.topology.describe_devices", lambda _: [None] * 8)
    monkeypatch.setattr("jax_ragrl.plan.plan", lambda *_: planned())
    command = ["config", "plan", f"--config={CONFIGS / 'tiny' / 'c3po.py'}", "--shape=tiny",
               "--topology=v5e:2x4", "--simulate=8,32", "--workload=questions=64"]  # fmt: skip
    assert main([*command, "--json"]) == 0
    assert [step["devices"] for step in json.loads(capsys.readouterr().out)["steps"]] == [8, 32]
    assert main([*command[:-1], "--json"]) == 0  # questions of the config
    own = simulate(planned(), Workload(questions=14), 8)
    assert json.loads(capsys.readouterr().out)["steps"][0] == own
    assert main(command) == 0
    assert capsys.readouterr().out.count("\n") == len(plan_text(planned()).splitlines()) + 4
    assert main([*command, "--workload=tokens=none"]) == 2
    assert "write NAME=NUMBER" in capsys.readouterr().err
    assert main([*command, "--simulate="]) == 2
    assert "give --simulate=DEVICES too" in capsys.readouterr().err
    assert main([*command, "--simulate=8,0"]) == 2
    assert "--simulate=8,0: give numbers of devices from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("compute_dtype=float8", "compute_dtype is 'float8': use one of float32, bfloat16"),
        ("run.steps=-5", "config.run.steps is -5"),
        ("run.staleness=1", "objective.importance_weight_cap is 0"),
    ],
)
def test_what_a_run_refuses_is_not_planned(key, message, monkeypatch, capsys):
    """With a config that still has to name its data, policy and encoder."""
    monkeypatch.setattr("jax_ragrl.runtime.topology.describe_devices", lambda _: [None] * 8)
    monkeypatch.setattr("jax_ragrl.plan.plan", lambda *_: planned())
    command = ["config", "plan", f"--config={CONFIGS / 'c3po.py'}", "--shape=tiny", "--topology=x"]
    assert main(command) == 0 and capsys.readouterr().err == ""
    assert main([*command, f"--config.{key}"]) == 2
    assert message in capsys.readouterr().err
