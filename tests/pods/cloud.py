"""A stand-in of `gcloud` with one TPU pod, whose workers are folders and processes of this machine.

The flags of its commands, its states and messages are those of the Google Cloud SDK 528.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

WORKERS = 2
ALL = {"--zone", "--quiet"}
FLAGS = {
    "queued-resources create": {"--node-id", "--accelerator-type", "--runtime-version", "--spot"},
    "queued-resources describe": {"--format"},
    "queued-resources delete": {"--force"},
    "tpu-vm describe": {"--format"},
    "tpu-vm ssh": {"--worker", "--command"},
    "tpu-vm scp": {"--worker"},
}
# The programs of a worker. Its own Python is too old; pip installs the `ragrl` of the test.
PROGRAMS = {
    "python3": """case "$*" in
-c*) exit 1 ;;
--version) echo Python 3.10.12 ;;
"-m pip install --user uv") touch ~/uv ;;
"-m uv python install 3.12") [[ -e ~/uv ]] && touch ~/new ;;
"-m uv python find 3.12") [[ -e ~/new ]] && echo ~/bin/python-of-uv ;;
*) exit 1 ;;
esac""",
    "python-of-uv": """case "$*" in
"-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && touch "$4/pyvenv.cfg" ;;
"-m pip install "*) echo "$*" >>~/pip
  [[ "$*" != *" -e ."* ]] || cp "$CLOUD/ragrl" "${0%/*}/ragrl" ;;
*) exec "$PYTHON_OF_TESTS" "$@" ;;
esac""",
} | dict.fromkeys(["python3.11", "python3.12", "python3.13"], "exit 1")


def write_script(file: pathlib.Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)


class Cloud:
    """The pod and its request; `folder` holds all of its state."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.states_file, self.calls_file = folder / "states", folder / "calls"
        self.homes = [folder / f"worker-{i}" for i in range(WORKERS)]

    def calls(self) -> list[list[str]]:
        """Returns the arguments of all calls of `gcloud`, without states that were asked for."""
        calls = [json.loads(line) for line in self.calls_file.read_text().splitlines()]
        return [x[2:] for x in calls if x[3] != "describe"]

    def preempt(self) -> None:
        """Takes the machines away, with all processes and files."""
        self._stop()
        self._come(["SUSPENDING", "SUSPENDED"])

    def run(self, arguments: list[str]) -> int:
        """Runs a command of `gcloud compute tpus`; returns its exit code."""
        with self.calls_file.open("a") as file:
            file.write(json.dumps(arguments) + "\n")
        command, rest = " ".join(arguments[2:4]), arguments[4:]
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for flag in FLAGS[command] | ALL:
            is_switch = flag in ("--quiet", "--force", "--spot")
            parser.add_argument(flag, **({"action": "store_true"} if is_switch else {}))
        parser.add_argument("names", nargs="+")
        flags = parser.parse_args(rest)
        assert arguments[:2] == ["compute", "tpus"] and flags.zone == "zone-a"
        states = self.states_file.read_text().split() if self.states_file.exists() else []
        match command:
            case "queued-resources create":
                assert not states and flags.node_id == "pod"
                self._come(["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
            case "queued-resources describe" if states:
                print(states[0])
                self._come(states[1:] or states)
            case "queued-resources delete" if states:
                assert flags.force
                self._stop()
                self.states_file.unlink()
            case "tpu-vm describe" if states:
                print("READY" if states == ["ACTIVE"] else "PREEMPTED")
            case "tpu-vm scp" if states == ["ACTIVE"]:
                *sources, target = flags.names
                assert target == "pod:"
                for home in self._at(flags.worker):
                    for source in sources:
                        shutil.copy(source, home)
            case "tpu-vm ssh" if states == ["ACTIVE"]:
                return self._ssh(flags.worker, flags.command)
            case _:
                told = "is in state PREEMPTED" if states else "NOT_FOUND: Resource was not found."
                print(f"ERROR: (gcloud.{'.'.join(arguments[:4])}) {told}", file=sys.stderr)
                return 1
        return 0

    def _come(self, states: list[str]) -> None:
        """States that follow each other, the last one for good."""
        self.states_file.write_text("\n".join(states))

    def _at(self, worker: str) -> list[pathlib.Path]:
        if not self.homes[0].exists():
            self._boot()
        return self.homes if worker == "all" else [self.homes[int(worker)]]

    def _boot(self) -> None:
        for home in self.homes:
            for name, text in PROGRAMS.items():
                write_script(home / "bin" / name, text)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            (self.folder / "address").write_text(f"localhost:{free.getsockname()[1]}")

    def _ssh(self, worker: str, command: str) -> int:
        kept = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
        processes = []
        for home in self._at(worker):
            environ = {name: os.environ[name] for name in kept if name in os.environ}
            environ |= {
                "CLOUD": str(self.folder),
                "HOME": str(home),
                "PATH": f"{home}/bin:/usr/bin:/bin",
                "PYTHON_OF_TESTS": sys.executable,
                # A TPU's processes find each other through its metadata server.
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": (self.folder / "address").read_text(),
                "JAX_NUM_PROCESSES": str(WORKERS),
                "JAX_PROCESS_ID": str(self.homes.index(home)),
            }
            processes.append(subprocess.Popen(["bash", "-c", command], env=environ, cwd=home))
        codes = [process.wait() for process in processes]
        return next((code if code > 0 else 255 for code in codes if code), 0)

    def _stop(self) -> None:
        """Kills all processes of the workers, also those that a session left behind."""
        mark = f"CLOUD={self.folder}\0".encode()
        deadline = time.monotonic() + 60
        while running := [x for x in pathlib.Path("/proc").glob("[0-9]*") if _has(x, mark)]:
            assert time.monotonic() < deadline, running
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
        for home in self.homes:
            shutil.rmtree(home, ignore_errors=True)


def _has(process: pathlib.Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    # The name of the variable differs from that of the workers, by which `_stop` knows these.
    sys.exit(Cloud(pathlib.Path(os.environ["CLOUD_OF_TEST"])).run(sys.argv[1:]))
