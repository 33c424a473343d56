"""Under the launchers of launch/, a preempted run resumes and ends as an undisturbed one."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.chaos.runs import digest, train_command, wait_for
from tests.pods.cloud import Cloud, write_script
from tests.tiny import saved_policy
from tests.training.test_hosts import MESH, REPO, TWO_DEVICES, environments

LAUNCH = REPO / "launch"


# --- Real runs of two processes -------------------------------------------------------------------


def training(workdir: pathlib.Path, policy: pathlib.Path) -> list[str]:
    """Returns the arguments of `ragrl` for a run on the devices of two processes."""
    command = train_command(workdir, policy, mesh=MESH, run__dev_questions=0)
    return [word.replace(f"{REPO}/", "") for word in command]


@pytest.fixture(autouse=True, scope="module")
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All processes compile the same programs: the first ones keep them for those that follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        yield


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return saved_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, policy: pathlib.Path) -> str:
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    ragrl = [sys.executable, "-m", "jax_ragrl.cli.main", *training(workdir, policy)]
    processes = [
        subprocess.Popen(ragrl, cwd=REPO, env=os.environ | TWO_DEVICES | own)
        for own in environments(2)
    ]
    assert [process.wait(timeout=1500) for process in processes] == [0, 0]
    return digest(workdir)


# --- launch/tpu.sh --------------------------------------------------------------------------------


def start_tpu(cloud: Cloud, checkout: pathlib.Path, *command: str, **more: str) -> subprocess.Popen:
    """Starts `tpu.sh` of a checkout with the stand-in of gcloud."""
    write_script(
        cloud.folder / "bin" / "gcloud",
        f'PYTHONPATH="{REPO}" exec "{sys.executable}" -m tests.pods.cloud "$@"',
    )
    environ = os.environ | {
        "PATH": f"{cloud.folder / 'bin'}:{os.environ['PATH']}",
        "CLOUD_OF_TEST": str(cloud.folder),
        "NAME": "pod",
        "ZONE": "zone-a",
        "ACCELERATOR": "v5litepod-8",
        "FLAGS": "--spot",
        "POLL": "0.2",
    }
    return subprocess.Popen(
        [checkout / "launch" / "tpu.sh", *command],
        env=environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def small_checkout(folder: pathlib.Path) -> pathlib.Path:
    """Returns a repository with what the installation reads."""
    shutil.copytree(LAUNCH, folder / "launch")
    shutil.copytree(REPO / "requirements", folder / "requirements")
    shutil.copy(REPO / "pyproject.toml", folder)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    return folder


@pytest.fixture
def cloud(tmp_path: pathlib.Path) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path / "cloud")
    cloud.folder.mkdir()
    yield cloud
    cloud.preempt()  # leaves no process behind


# A `ragrl` that prints a line and ends with the next of its codes, the last one for good.
SCRIPTED = """echo "$JAX_PROCESS_ID: $*"
codes=(CODES); count=$(cat ~/count 2>/dev/null || echo 0); echo $((count + 1)) >~/count
exit "${codes[count < ${#codes[@]} ? count : -1]}\""""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "starts", "last_line"),
    [
        ("0", 1, "tpu.sh: the run is finished"),
        # Three crashes, and two times asked to stop, which no limit counts.
        ("134 143 1 143 75 0", 6, "tpu.sh: the run is finished"),
        ("134", 4, "  see its log above"),  # three restarts
        ("2", 1, "  see its last line above"),
    ],
)
def test_a_pod_is_deleted_after_the_run_whose_crashes_are_repaired(
    tmp_path: pathlib.Path, cloud: Cloud, codes: str, starts: int, last_line: str
):
    write_script(cloud.folder / "ragrl", SCRIPTED.replace("CODES", codes))
    checkout = small_checkout(tmp_path / "check out")
    process = start_tpu(cloud, checkout, "train", "--workdir=a b", "$HOME;'")
    output = process.communicate(timeout=240)[0]
    assert output.splitlines()[-1] == last_line, output
    assert (process.returncode == 0) == last_line.endswith("finished")
    assert output.count("0: train --workdir=a b $HOME;'\n") == starts
    calls = cloud.calls()
    assert calls[0][1] == "create" and "--runtime-version=v2-alpha-tpuv5-lite" in calls[0]
    assert "--spot" in calls[0] and calls[-1][1] == "delete" and not cloud.states_file.exists()
    assert sum(call[1] == "scp" for call in calls) == starts


def test_a_worker_is_installed_from_the_tpu_lock_with_a_new_python_and_the_token(tmp_path, cloud):
    token = "~/.cache/huggingface/token"  # which huggingface_hub reads
    write_script(
        cloud.folder / "ragrl",
        f"cp ~/pip {tmp_path}/pip-$JAX_PROCESS_ID; cp -r $PWD {tmp_path}/sent\n"
        f'echo "$(stat -c %a {token}) $(cat {token})" >{tmp_path}/token-$JAX_PROCESS_ID',
    )
    checkout = small_checkout(tmp_path / "checkout")
    (checkout / "mine.py").touch()
    (checkout / ".gitignore").write_text("runs\n")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "big").touch()
    setup = f'echo "$JAX_PROCESS_ID" >>{tmp_path}/mounted'
    process = start_tpu(cloud, checkout, "train", SETUP=setup, HF_TOKEN="hf_secret")
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    for i in range(2):
        assert (tmp_path / f"token-{i}").read_text() == "600 hf_secret\n"
    assert "hf_secret" not in output + cloud.calls_file.read_text()
    installed = [(tmp_path / f"pip-{i}").read_text().splitlines() for i in range(2)]
    assert all(
        "-r requirements/tpu.lock" in one[0] and one[1].endswith("-e .") for one in installed
    )
    assert sorted((tmp_path / "mounted").read_text().split()) == ["0", "1"]
    assert (tmp_path / "sent" / "mine.py").exists() and not (tmp_path / "sent" / "runs").exists()


@pytest.mark.slow
def test_an_installation_that_fails_ends_with_what_to_do(tmp_path: pathlib.Path, cloud: Cloud):
    write_script(cloud.folder / "ragrl", "exit 0")
    checkout = small_checkout(tmp_path / "checkout")
    process = start_tpu(cloud, checkout, "train", SETUP="echo no such disk >&2; false")
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 1
    assert "no such disk" in output and "which still exists and costs money" in output
    assert output.splitlines()[-1].endswith(f"{checkout}/launch/tpu.sh delete")
    assert cloud.states_file.exists()
    assert start_tpu(cloud, checkout, "delete").wait(60) == 0 and not cloud.states_file.exists()


def test_a_checkout_that_cannot_be_packed_requests_no_pod(tmp_path: pathlib.Path, cloud: Cloud):
    checkout = small_checkout(tmp_path / "checkout")
    shutil.rmtree(checkout / ".git")
    output = start_tpu(cloud, checkout, "train").communicate(timeout=60)[0]
    assert "it has to be a clone of git" in output and not cloud.calls_file.exists()


def test_the_same_command_watches_a_run_that_goes_on(tmp_path: pathlib.Path, cloud: Cloud):
    go_on = tmp_path / "go-on"
    write_script(
        cloud.folder / "ragrl",
        f"echo begins; until [[ -e {go_on} ]]; do sleep 0.1; done; echo ends",
    )
    checkout = small_checkout(tmp_path / "checkout")
    first = start_tpu(cloud, checkout, "train")
    assert first.stdout is not None
    while "begins" not in first.stdout.readline():
        assert first.poll() is None
    first.kill()
    first.communicate(timeout=60)
    other = start_tpu(cloud, checkout, "train", "--x=a b")
    assert "pod runs another command: ragrl train\n" in other.communicate(timeout=60)[0]
    assert other.returncode == 1 and cloud.states_file.exists()
    second = start_tpu(cloud, checkout, "train", SETUP=":")
    assert second.stdout is not None and "ACTIVE" in second.stdout.readline()
    go_on.touch()
    output = second.communicate(timeout=240)[0]
    assert second.returncode == 0 and "\nbegins\nends\n" in output, output
    assert [call[1] for call in cloud.calls()].count("scp") == 1


@pytest.mark.slow
def test_a_preempted_pod_is_replaced_and_its_run_ends_as_an_undisturbed_one(
    tmp_path: pathlib.Path, cloud: Cloud, policy: pathlib.Path, undisturbed: str
):
    environ = TWO_DEVICES | {"PYTHONPATH": "$HOME/jax_ragrl"}
    own = " ".join(f'{name}="{value}"' for name, value in environ.items())
    ragrl = f'{own} exec "$PYTHON_OF_TESTS" -m jax_ragrl.cli.main "$@"'
    write_script(cloud.folder / "ragrl", ragrl)
    workdir = tmp_path / "runs" / "run"
    process = start_tpu(cloud, REPO, *training(workdir, policy), POLL="1")
    wait_for(workdir / "checkpoints" / "1", process)
    cloud.preempt()
    output = process.communicate(timeout=1500)[0]
    assert process.returncode == 0, output
    assert not (workdir / "checkpoints" / "damaged-1").exists()
    what = [call[1] for call in cloud.calls() if call[1] in ("create", "delete")]
    # Deleted when the request is suspended, or before that when its worker does not answer.
    assert what == ["create", "delete", "create", "delete"]
    assert output.count("process 0 of 2, 2 devices here, 4 in all") == 2
    assert digest(workdir) == undisturbed


# --- launch/slurm.sh ------------------------------------------------------------------------------

CLUSTER = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host},{host}b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs=1
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@contextlib.contextmanager
def cluster(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes on this machine; yields its environment variables."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [x.getsockname()[1] for x in found]
    config = folder / "slurm.conf"
    host = socket.gethostname()
    nodes = (host, f"{host}b")  # in Slurm's order: the first one, which has an address, coordinates
    config.write_text(CLUSTER.format(folder=folder, host=host, ports=ports))
    environ = os.environ | {"SLURM_CONF": str(config)}
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)]
    with (folder / "slurm.log").open("w") as log:
        running = [subprocess.Popen(x, env=environ, stdout=log, stderr=log) for x in daemons]
        try:
            deadline = time.monotonic() + 120
            sees = ["sinfo", "--noheader", "--states=idle", "--format=%D", "--partition=spot"]
            while subprocess.run(sees, env=environ, capture_output=True, text=True).stdout != "2\n":
                assert time.monotonic() < deadline, (folder / "slurm.log").read_text()
                time.sleep(0.5)
            yield environ
        finally:
            subprocess.run(["scancel", "--partition=spot,urgent", "--signal=KILL"], env=environ)
            for daemon in reversed(running):
                daemon.terminate()
                daemon.wait(60)


def installed(folder: pathlib.Path, lock: str) -> pathlib.Path:
    """A virtual environment in which launch/install.sh finds this lock already installed."""
    write_script(folder / "bin" / "python", f'exec "{sys.executable}" "$@"')
    write_script(folder / "bin" / "ragrl", f'exec "{sys.executable}" -m jax_ragrl.cli.main "$@"')
    stamp = f'source launch/install.sh && fingerprint >"{folder}/.ragrl-{lock}"'
    subprocess.run(["bash", "-c", stamp], cwd=REPO, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("slurmctld") and shutil.which("slurmd")) or os.getuid() != 0,
    reason="needs Slurm (Debian: slurm-wlm), and to be root",
)
def test_a_job_that_slurm_preempts_is_queued_again_and_ends_as_an_undisturbed_one(
    tmp_path: pathlib.Path, policy: pathlib.Path, undisturbed: str
):
    workdir, log = tmp_path / "run", tmp_path / "job.log"
    (tmp_path / "slurm").mkdir()
    with cluster(tmp_path / "slurm") as environ:
        environ |= {"RAGRL_VENV": str(installed(tmp_path / "venv", "cpu")), "RAGRL_DEVICE": "cpu"}
        environ |= TWO_DEVICES | {"PYTHONPATH": str(REPO)}

        def ask(*command: str) -> str:
            return subprocess.run(
                command, cwd=REPO, env=environ, check=True, capture_output=True, text=True
            ).stdout

        job = ask(
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--ntasks=2",
            f"--output={log}",
            "launch/slurm.sh",
            *training(workdir, policy),
        ).strip()

        def told(word: str) -> str:
            words = ask("scontrol", "show", "job", job).split()
            return next(x.partition("=")[2] for x in words if x.startswith(f"{word}="))

        deadline = time.monotonic() + 1500
        while not (workdir / "checkpoints" / "1").exists():
            assert time.monotonic() < deadline and told("JobState") in ("PENDING", "RUNNING"), (
                log.read_text()
            )
            time.sleep(0.2)
        ask("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
        while told("JobState") not in ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED"):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(1)
        assert told("JobState") == "COMPLETED" and told("Restarts") == "1", log.read_text()
    assert digest(workdir) == undisturbed


# --- launch/gke/jobset.yaml and launch/skypilot.yaml ----------------------------------------------


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / name).read_text())


def mistakes(name: str, content: dict[str, Any]) -> list[str]:
    """What a part of the published schema, recorded for the fields in use, does not allow.

    That of JobSet, with the fields of Kubernetes' jobs, is from its repository at commit 08dfbdfd;
    that of SkyPilot from its package 0.14.1. Fields that are not in use are unknown.
    """
    schema = json.loads((pathlib.Path(__file__).parent / name).read_text())
    return [x.message for x in jsonschema.Draft202012Validator(schema).iter_errors(content)]


def test_the_jobset_is_one_and_restarts_all_pods_unless_a_user_error_ended_them():
    content = manifest("gke/jobset.yaml")
    assert mistakes("jobset.json", content) == []
    (group,) = content["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["parallelism"] == job["completions"] == 4 and job["backoffLimit"] == 0
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    mounts = [mount["name"] for mount in container["volumeMounts"]]
    assert mounts == [volume["name"] for volume in job["template"]["spec"]["volumes"]]
    job["paralelism"] = job.pop("parallelism")
    assert len(mistakes("jobset.json", content)) == 1


def test_the_task_of_skypilot_is_one_and_repeats_three_crashes_but_no_user_error(tmp_path):
    content = manifest("skypilot.yaml")
    assert mistakes("skypilot.json", content) == []
    # The task fails with the code of its script, and is then not repeated.
    assert "job_recovery" not in content["resources"]
    write_script(tmp_path / "bin" / "sleep", "")
    own = {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for codes, starts, code in (("2", 1, 2), ("134", 4, 134), ("1 143 1 143 75 0", 6, 0)):
        write_script(tmp_path / "launch" / "ragrl.sh", SCRIPTED.replace("CODES", codes))
        (tmp_path / "count").write_text("0")
        ran = subprocess.run(["bash", "-c", content["run"]], cwd=tmp_path, env=os.environ | own)
        assert (ran.returncode, (tmp_path / "count").read_text()) == (code, f"{starts}\n")
