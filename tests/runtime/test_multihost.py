"""Which processes belong to a run, what they tell each other, and which devices are whose."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.runtime import multihost as hosts
from jax_ragrl.runtime.multihost import by_first, check_shared, gathered, in_turn, launched, named
from jax_ragrl.runtime.sharding import make_mesh, own_mesh, own_part, share
from tests.flags import flags

REPO = pathlib.Path(__file__).parents[2]
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1"}
SLURM = dict.fromkeys(hosts.SLURM, "3") | {"SLURM_NTASKS": "8"}
ALL = dict(zip(hosts.NAMES, ("10.0.0.1:8476", "4", "3"), strict=True))


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


# --- Joining --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        (NO_TPU, 1),
        (NO_TPU | SLURM, 8),
        ({**NO_TPU, "SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}, 1),  # a shell in an allocation
        (NO_TPU | {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, 4),
        ({"GCE_METADATA_IP": "127.0.0.1:9"}, 1),  # a TPU without a metadata server
    ],
)
def test_a_launcher_tells_how_many_processes_it_started(environ: dict[str, str], count: int):
    assert launched(environ) == count


def test_a_cloud_tpu_is_asked_for_its_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "_tpu_workers", lambda _: "a:0:10.0.0.1,b:1:10.0.0.2")
    assert launched({}) == 2


def test_explicit_variables_are_taken_whole():
    assert named(NO_TPU) == {}
    given = named(ALL)
    assert given["coordinator_address"] == "10.0.0.1:8476"
    assert (given["num_processes"], given["process_id"]) == (4, 3)
    # An address alone belongs to what a launcher says.
    assert named(SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "without JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": ""}, "without JAX_COORDINATOR_ADDRESS"),
        ({"JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""}, "set all three"),
        ({"JAX_PROCESS_ID": "4"}, "0 to 3"),
        ({"JAX_NUM_PROCESSES": "four"}, "four"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "HOST:N"),
    ],
)
def test_variables_that_cannot_be_meant_are_refused(changes: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        named(NO_TPU | ALL | changes)


def test_a_half_set_environment_is_one_line_of_ragrl_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    config = REPO / "configs" / "tiny" / "c3po.py"
    assert main(["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "JAX_NUM_PROCESSES without" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_process_joins_nobody(monkeypatch: pytest.MonkeyPatch):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **known: joined.append(known))
    for name, value in zip(hosts.NAMES, ("localhost:1", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    hosts.join()
    assert joined == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_nobody_joins_says_what_to_see_to(number: int):
    address = free_address()
    told = dict(zip(hosts.NAMES, (address, "2", str(number)), strict=True))
    program = [sys.executable, "-c", "from jax_ragrl.runtime.multihost import join; join(2)"]
    run = subprocess.run(
        program, cwd=REPO, env=os.environ | told, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == hosts.LATE
    assert f"not all of 2 processes joined at {address} within 2 s" in run.stderr
    assert "open port" in run.stderr


def test_a_process_that_waits_says_so_until_the_others_are_there(monkeypatch, capfd):
    monkeypatch.setattr(hosts, "WORD", 0.02)
    with hosts._waiting():
        time.sleep(0.2)
    said = capfd.readouterr().err
    assert 2 <= said.count("process 0 has waited for others for 0 s") <= 11
    time.sleep(0.1)
    assert "waited" not in capfd.readouterr().err


def test_a_process_that_hangs_prints_where_it_stands_when_it_is_asked():
    program = """
import os, signal
from jax_ragrl.cli import main
def stands_here():
    os.kill(os.getpid(), signal.SIGUSR1)
try:
    main(["--help"])
except SystemExit:
    stands_here()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO)
    assert run.returncode == 0 and "in stands_here" in run.stderr


# --- Telling each other ---------------------------------------------------------------------------


def test_one_process_only_calls(tmp_path: pathlib.Path):
    """Nothing is pickled or waited for: what is given comes back itself."""
    thing = lambda: None  # noqa: E731
    assert gathered(lambda: thing) == [thing]
    assert by_first(lambda: thing) is thing and in_turn(lambda: thing) is thing
    check_shared(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_processes_tell_each_other_what_they_made_and_what_went_wrong(tmp_path: pathlib.Path):
    told = dict(zip(hosts.NAMES, (free_address(), "2", ""), strict=True))
    given = told | {"XLA_FLAGS": flags(2)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.telling", str(tmp_path)],
            cwd=REPO,
            env=os.environ | given | {"JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert all(text.count("as it should") == 1 for text in said), said


# --- Whose devices --------------------------------------------------------------------------------


def device(host: int, number: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(process_index=host, id=number, platform="cpu")


def grid(shape: tuple[int, ...], devices: list) -> types.SimpleNamespace:
    """What `own_mesh` reads of a mesh."""
    names = ("data", "fsdp", "tensor")
    return types.SimpleNamespace(
        devices=np.array(devices, object).reshape(shape),
        shape=dict(zip(names, shape, strict=True)),
        local_devices=[d for d in devices if d.process_index == 0],
        is_multi_process=True,
    )


def test_a_tensor_axis_across_hosts_is_refused():
    four = [device(i // 2, i) for i in range(4)]
    with pytest.raises(UserError, match="divides"):
        own_mesh(grid((1, 1, 4), four))
    with pytest.raises(UserError, match="divides"):
        own_mesh(grid((1, 2, 2), [four[i] for i in (0, 2, 1, 3)]))


def test_the_mesh_of_one_process_and_what_lies_on_it_are_its_own():
    mesh = make_mesh((2, 2, 2))
    x = share(np.arange(4), mesh)
    assert own_mesh(mesh) is mesh and own_mesh(None) is None
    assert own_part(x) is x
