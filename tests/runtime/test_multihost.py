"""Processes join a run, exchange objects, and own parts of its mesh."""

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
from jax_ragrl.runtime.sharding import local_mesh, local_part, make_mesh, replicate
from tests.flags import flags

REPO = pathlib.Path(__file__).parents[2]
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1"}
SLURM = dict.fromkeys(hosts.SLURM, "3") | {"SLURM_NTASKS": "8"}
ALL = dict(zip(hosts.NAMES, ("10.0.0.1:8476", "4", "3"), strict=True))


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        (NO_TPU, 1),
        (NO_TPU | SLURM, 8),
        ({**NO_TPU, "SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}, 1),  # a shell in an allocation
        (NO_TPU | {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        (NO_TPU | {"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4),  # GKE, several hosts
        (NO_TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, 1),  # GKE, one host
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, 4),
        ({"GCE_METADATA_IP": "127.0.0.1:9"}, 1),  # a TPU without a metadata server
    ],
)
def test_the_number_of_launched_processes(environ, count):
    assert hosts.launched_processes(environ) == count


def test_a_cloud_tpu_reports_its_workers(monkeypatch):
    monkeypatch.setattr(hosts, "_tpu_workers", lambda _: "a:0:10.0.0.1,b:1:10.0.0.2")
    assert hosts.launched_processes({}) == 2


def test_explicit_variables_are_used_entirely():
    assert hosts.explicit_settings(NO_TPU) == {}
    environment = hosts.explicit_settings(ALL)
    assert environment["coordinator_address"] == "10.0.0.1:8476"
    assert (environment["num_processes"], environment["process_id"]) == (4, 3)
    # An address alone complements a launcher.
    assert hosts.explicit_settings(SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "without JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": ""}, "without JAX_COORDINATOR_ADDRESS"),
        ({"JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""}, "set all three"),
        ({"JAX_PROCESS_ID": "4"}, "0 to 3"),
        ({"JAX_NUM_PROCESSES": "four"}, "four"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "HOST:N"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:65536"}, "HOST:N"),
    ],
)
def test_impossible_variables_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        hosts.explicit_settings(NO_TPU | ALL | changes)


def test_an_incomplete_environment_is_a_one_line_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    config = REPO / "configs" / "tiny" / "c3po.py"
    assert main(["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "JAX_NUM_PROCESSES without" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_process_joins_no_other(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **known: joined.append(known))
    for name, value in zip(hosts.NAMES, ("localhost:1", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    hosts.join()
    assert joined == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_without_others_gives_up_with_advice(number):
    address = free_address()
    settings = dict(zip(hosts.NAMES, (address, "2", str(number)), strict=True))
    program = [sys.executable, "-c", "from jax_ragrl.runtime.multihost import join; join(2)"]
    run = subprocess.run(
        program, cwd=REPO, env=os.environ | settings, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == hosts.EXIT_TIMEOUT
    assert f"not all of 2 processes joined at {address} within 2 s" in run.stderr
    assert "open port" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_taken_port_of_the_coordinator_is_one_clear_line(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        settings = dict(zip(hosts.NAMES, (f"127.0.0.1:{port}", "2", "0"), strict=True))
        program = [sys.executable, "-m", "jax_ragrl", "train"]
        program += [f"--config={REPO / 'configs/tiny/c3po.py'}", "--workdir=never"]
        run = subprocess.run(
            program, cwd=REPO, env=os.environ | settings, capture_output=True, text=True, timeout=99
        )
    assert run.returncode == 2, run.stderr
    (line,) = [x for x in run.stderr.splitlines() if "waiting for" not in x]
    assert f"cannot listen at port {port} (Address already in use): set a free port" in line


def test_a_waiting_process_prints_messages(monkeypatch, capfd):
    monkeypatch.setattr(hosts, "WAIT_MESSAGE_EVERY", 0.02)
    with hosts._waiting():
        time.sleep(0.2)
    output = capfd.readouterr().err
    assert 2 <= output.count("process 0 has waited for others for 0 s") <= 11
    time.sleep(0.1)
    assert "waited" not in capfd.readouterr().err


def test_a_signal_prints_the_stack_of_a_process():
    program = """
import os, signal
from jax_ragrl.cli.main import main
def stands_here():
    os.kill(os.getpid(), signal.SIGUSR1)
try:
    main(["--help"])
except SystemExit:
    stands_here()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO)
    assert run.returncode == 0 and "in stands_here" in run.stderr


def test_collectives_of_one_process_are_plain_calls(tmp_path):
    """Nothing is pickled and no process waits: the same object is returned."""
    thing = lambda: None  # noqa: E731
    assert hosts.all_gather_object(lambda: thing) == [thing]
    assert (
        hosts.on_process_zero(lambda: thing) is thing
        and hosts.process_zero_first(lambda: thing) is thing
    )
    hosts.check_shared_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_two_processes_exchange_results_and_errors(tmp_path):
    settings = dict(zip(hosts.NAMES, (free_address(), "2", ""), strict=True))
    environment = settings | {"XLA_FLAGS": flags(2)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.telling", str(tmp_path)],
            cwd=REPO,
            env=os.environ | environment | {"JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    output = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], output
    assert all(text.count("as it should") == 1 for text in output), output


def device(host: int, number: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(process_index=host, id=number, platform="cpu")


def grid(shape: tuple[int, ...], devices: list) -> types.SimpleNamespace:
    """The attributes of a mesh that `local_mesh` reads."""
    names = ("data", "fsdp", "tensor")
    return types.SimpleNamespace(
        devices=np.array(devices, object).reshape(shape),
        shape=dict(zip(names, shape, strict=True)),
        local_devices=[d for d in devices if d.process_index == 0],
        is_multi_process=True,
    )


def test_the_mesh_of_one_process_is_local_and_a_tensor_axis_across_hosts_is_refused():
    four = [device(i // 2, i) for i in range(4)]
    with pytest.raises(UserError, match="divides"):
        local_mesh(grid((1, 1, 4), four))
    with pytest.raises(UserError, match="divides"):
        local_mesh(grid((1, 2, 2), [four[i] for i in (0, 2, 1, 3)]))
    mesh = make_mesh((2, 2, 2))
    x = replicate(np.arange(4), mesh)
    assert local_mesh(mesh) is mesh and local_mesh(None) is None
    assert local_part(x) is x
