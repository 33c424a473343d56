"""The scripts of launch/, with stubs for the programs that they call."""

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from jax_ragrl.cli import main as cli
from tests.pods.cloud import write_script

LAUNCH = pathlib.Path(__file__).parent.parent / "launch"


def run(
    *command: str | pathlib.Path, cwd: pathlib.Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command with these variables besides the environment's own."""
    environment = os.environ | environ
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def path_with_stubs(folder: pathlib.Path) -> str:
    return f"{folder / 'bin'}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    "codes, queued",
    [
        ([0], 0),
        ([2], 0),  # a user error
        ([137, 1, 134, 137], 3),
        ([137, 143, 143, 143, 143, 1, 0], 6),  # four times asked to stop
    ],
)
def test_a_slurm_job_is_queued_again_three_times_and_after_each_preemption(tmp_path, codes, queued):
    write_script(tmp_path / "launch" / "install.sh", "")
    write_script(tmp_path / "bin" / "srun", 'echo "srun $*" >>calls\nexit "$CODE"')
    write_script(tmp_path / "bin" / "scontrol", 'echo "scontrol $*" >>calls')
    elsewhere = tmp_path / "spool" / "script"
    elsewhere.parent.mkdir()
    shutil.copy(LAUNCH / "slurm.sh", elsewhere)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    slurm["PATH"] = path_with_stubs(tmp_path)
    for start, code in enumerate(codes):
        # Slurm's own count has preemptions at which it killed the job, too.
        own = slurm | {"CODE": str(code), "SLURM_RESTART_COUNT": str(5 + start)}
        assert run(elsewhere, "train", "--workdir=runs/a b", **own).returncode == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].endswith("launch/ragrl.sh train --workdir=runs/a b")
    assert calls[1::2] == ["scontrol requeue 7"] * queued and len(calls) == len(codes) + queued
    assert not (tmp_path / "ragrl-7.crashes").exists()


def resolved(
    folder: pathlib.Path, wanted: str, driver: str = "", gpus: str = ""
) -> tuple[str, str]:
    """The device that install.sh selects on a machine with these GPUs, and its message."""
    if driver:
        told = f'[[ "$1" == *driver* ]] && echo {driver} || printf "%s\\n" {gpus}'
        write_script(folder / "bin" / "nvidia-smi", told)
    shutil.copytree(LAUNCH, folder / "launch", dirs_exist_ok=True)
    command = f'source "{folder}/launch/install.sh"; resolve_device {wanted}'
    ran = run("bash", "-c", command, PATH=path_with_stubs(folder), RAGRL_DEVICE="auto")
    return ran.stdout.strip(), ran.stderr.strip()


@pytest.mark.parametrize(
    "driver, gpus, lock",
    [
        ("580.65.06", "9.0 9.0", "cuda"),
        ("580.65.06", "12.0", "cuda"),  # a two-digit capability
        ("580.65.06", "9.0 7.0", "cuda12"),  # one of them a V100
        ("580.65.06", "", "cuda"),  # an nvidia-smi that does not know capabilities
        ("550.54.15", "7.5", "cuda12"),
    ],
)
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_gpus_get_a_cuda_version_that_they_support(tmp_path, wanted, driver, gpus, lock):
    assert resolved(tmp_path, wanted, driver, gpus) == (lock, "")


def test_an_old_driver_falls_back_to_the_cpu_and_an_unknown_device_is_refused(tmp_path):
    device, said = resolved(tmp_path, "auto", "470.82.01", "8.0")
    assert device == "cpu" and "525 or newer" in said
    device, said = resolved(tmp_path, "cuda", "470.82.01", "8.0")
    assert device == "" and said.startswith("error: NVIDIA driver 470.82.01 is too old")
    assert resolved(tmp_path, "cuda12") == ("cuda12", "")
    assert resolved(tmp_path, "gpu")[1].startswith("error: unknown device 'gpu'")


FIND = 'if [[ "$*" == *"python find 3.12" ]]; then echo "$NEW_PYTHON"; exit; fi'


@pytest.mark.parametrize(
    "name, line", [("uv", FIND), ("python3", FIND), ("uv", "exit 2")], ids=["uv", "module", "none"]
)
def test_a_python_of_uv_is_used_if_the_others_are_too_old(tmp_path, name, line):
    """As on the image of a TPU VM: every Python in PATH is 3.10."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    version = '[[ "$1" == --version ]] || exit 1; echo "Python 3.10.12"'
    programs = dict.fromkeys(["python3", "python3.11", "python3.12", "python3.13", "uv"], [version])
    for program, lines in (programs | {name: [line, version]}).items():
        write_script(tmp_path / "bin" / program, "\n".join(lines))
    new = tmp_path / "new python"
    write_script(new, "exit 0")
    environ = {"PATH": path_with_stubs(tmp_path), "NEW_PYTHON": str(new), "PYTHON": ""}
    command = f'source "{tmp_path}/launch/install.sh"; find_python'
    ran = run("bash", "-c", command, **environ)
    assert ran.stdout.strip() == (str(new) if line == FIND else "")
    if line != FIND:
        assert "python3 (Python 3.10.12)" in ran.stderr and "uv python install 3.12" in ran.stderr


@pytest.mark.parametrize(
    "device, platforms", [("cpu", "cpu"), ("cuda", "cuda,cpu"), ("cuda12", "cuda,cpu")]
)
def test_jax_uses_the_device_of_the_installation(tmp_path, device, platforms):
    shutil.copytree(LAUNCH, tmp_path / "launch")
    stand_in = (
        f"venv={tmp_path}; resolve_device() {{ echo $1; }}; install_lock() {{ :; }}; say() {{ :; }}"
    )
    write_script(tmp_path / "launch" / "install.sh", stand_in)
    write_script(tmp_path / "bin" / "ragrl", 'echo "$JAX_PLATFORMS $*"')
    elsewhere = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    command = [tmp_path / "launch" / "ragrl.sh", "--device", device, "plan", "--json"]
    told = subprocess.run(command, env=elsewhere, capture_output=True, text=True)
    assert told.stdout.split() == [platforms, "plan", "--json"]


@pytest.mark.parametrize("name", ["ragrl.sh", "quickstart.sh"])
def test_arguments_are_passed_and_paths_refer_to_the_folder_of_the_caller(tmp_path, name):
    checkout, folder = tmp_path / "check out", tmp_path / "my data"
    shutil.copytree(LAUNCH, checkout / "launch")
    venv = tmp_path / "venv"
    folder.mkdir()
    venv.mkdir()
    write_script(venv / "bin" / "ragrl", 'echo "$PWD"; printf "%s|" "$@"')
    with (checkout / "launch" / "install.sh").open("a") as file:
        file.write("install_lock() { pwd >&2; }\n")  # installs nothing
    command = [f"../check out/launch/{name}", "--device", "cpu", "a b.py"]
    ran = run(*command, cwd=folder, RAGRL_VENV=str(venv))
    assert ran.stderr.splitlines()[0] == str(checkout)  # the locks are in the checkout
    words = "a b.py|" if name == "ragrl.sh" else "quickstart|a b.py|"
    assert ran.stdout.splitlines() == [str(folder), words]


def test_a_job_of_hugging_face_trains_with_its_variables_and_arguments(monkeypatch):
    calls = []
    monkeypatch.setattr(cli, "main", lambda words: calls.append(words) or 3)
    monkeypatch.setenv("CONFIG", "configs/c3po.py")
    monkeypatch.setenv("RUN", "one")
    monkeypatch.setattr(sys, "argv", ["hf_job.py", "--config.run.steps=2"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(LAUNCH / "hf_job.py"), run_name="__main__")
    assert end.value.code == 3
    options = ["--config=configs/c3po.py", "--workdir=/runs/one", "--config.run.steps=2"]
    assert calls == [["train", *options]]
    monkeypatch.setenv("RUN", "")  # the whole bucket
    with pytest.raises(SystemExit, match="error: RUN is not set"):
        runpy.run_path(str(LAUNCH / "hf_job.py"), run_name="__main__")
    assert len(calls) == 1


def test_a_job_of_hugging_face_declares_what_the_package_offers():
    # The reference implementation of PEP 723.
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (match,) = re.finditer(pattern, (LAUNCH / "hf_job.py").read_text())
    assert match["type"] == "script"
    declared = tomllib.loads(re.sub(r"(?m)^# ?", "", match["content"]))
    project = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["project"]
    (package,) = map(Requirement, declared["dependencies"])
    assert package.name == project["name"] and package.url is not None
    assert package.extras <= project["optional-dependencies"].keys()
    assert declared["requires-python"].startswith(project["requires-python"])


# A Python of an environment without pip, until `ensurepip` adds it.
NO_PIP = """case "$*" in
*ensurepip*) touch "$0.pip" ;;
*'version("pip")'*) [[ -e "$0.pip" ]] ;;
*version_info*) echo VERSION ;;
esac"""


@pytest.mark.parametrize("name", ["", "python-same", "python-other"])
def test_an_environment_without_pip_gets_it_and_keeps_the_named_python(tmp_path, name):
    """As one whose making was interrupted, or that uv made."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    python, stamp = tmp_path / ".venv" / "bin" / "python", tmp_path / ".venv" / ".ragrl-cpu"
    write_script(python, NO_PIP.replace("VERSION", "3.12"))
    stamp.touch()
    for other, version in (("python-same", "3.12"), ("python-other", "3.13")):
        write_script(tmp_path / "bin" / other, f"echo {version}")
    environ = {"PATH": path_with_stubs(tmp_path), "PYTHON": name, "RAGRL_VENV": ""}
    ran = run("bash", "-c", f'source "{tmp_path}/launch/install.sh"; make_venv', **environ)
    healed = python.with_name("python.pip").exists() and not stamp.exists()
    assert (ran.returncode, healed) == ((1, False) if name == "python-other" else (0, True))
    assert ("not the Python that PYTHON=python-other names" in ran.stderr) == (not healed)


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock, which macOS has not")
def test_the_second_of_two_installations_waits_and_finds_its_packages(tmp_path):
    """As those of two jobs on a shared disk."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    shutil.copytree(LAUNCH.parent / "requirements", tmp_path / "requirements")
    shutil.copy(LAUNCH.parent / "pyproject.toml", tmp_path)
    (tmp_path / ".venv").mkdir()
    stand_in = (
        "make_venv() { :; }; pip_install() { echo begin >>calls; sleep 0.5; echo end >>calls; }"
    )
    command = f'source "{tmp_path}/launch/install.sh"; {stand_in}; install_lock cpu'
    environ = os.environ | {"RAGRL_VENV": ""}
    both = [subprocess.Popen(["bash", "-c", command], env=environ) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert (tmp_path / "calls").read_text().split() == ["begin", "end"] * 2


def test_every_device_that_is_named_is_installed(tmp_path):
    shutil.copytree(LAUNCH, tmp_path / "launch")
    installer = tmp_path / "launch" / "install.sh"
    before, main = installer.read_text().split("\nif [[", 1)
    installer.write_text(f'{before}\ninstall_lock() {{ echo "$1"; }}\nif [[{main}')

    def told(*names: str) -> tuple[list[str], str]:
        ran = run(installer, *names, RAGRL_DEVICE="cpu")
        return ran.stdout.split(), ran.stderr

    assert told()[0] == told("auto")[0] == ["cpu"]  # the meaning of `auto`
    assert told("tpu", "test")[0] == ["tpu", "test"]
    assert told("gpu")[1].endswith("unknown device 'gpu'\n  use cpu, cuda, cuda12, tpu or auto\n")


def test_scripts_find_their_checkout_whatever_cd_searches(tmp_path):
    shutil.copytree(LAUNCH, tmp_path / "checkout" / "launch")
    (tmp_path / "other" / "launch").mkdir(parents=True)
    environ = {"CDPATH": str(tmp_path / "other")}
    ran = run("bash", "-c", "source launch/install.sh; pwd", cwd=tmp_path / "checkout", **environ)
    assert ran.stdout == f"{tmp_path / 'checkout'}\n"
    scripts = [file.read_text() for file in LAUNCH.glob("*.sh")]
    lines = [line for text in scripts for line in text.splitlines() if " cd " in f" {line}"]
    assert all(line.startswith("CDPATH='' cd ") for line in lines if "dirname" in line)
