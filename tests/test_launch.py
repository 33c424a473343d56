"""The scripts of launch/ that decide something, with stand-ins for what they call."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

LAUNCH = pathlib.Path(__file__).parent.parent / "launch"


def script(file: pathlib.Path, *lines: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    file.chmod(0o755)


@pytest.mark.parametrize(
    "code, restarts, queued",
    [(0, 0, False), (137, 0, True), (134, 2, True), (137, 3, False), (2, 0, False)],
)
def test_a_slurm_job_is_queued_again_unless_it_ended_was_wrong_or_was_too_often(
    tmp_path, code, restarts, queued
):
    script(tmp_path / "launch" / "install.sh")
    script(tmp_path / "bin" / "srun", 'echo "srun $*" >>calls', f"exit {code}")
    script(tmp_path / "bin" / "scontrol", 'echo "scontrol $*" >>calls')
    elsewhere = tmp_path / "spool" / "script"
    elsewhere.parent.mkdir()
    shutil.copy(LAUNCH / "slurm.sh", elsewhere)
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    ran = subprocess.run([elsewhere, "train", "--workdir=runs/a b"], env=os.environ | slurm)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ran.returncode == code
    assert calls[0].endswith("launch/ragrl.sh train --workdir=runs/a b")
    assert calls[1:] == (["scontrol requeue 7"] if queued else [])


def test_the_quickstart_is_ragrl_quickstart_with_the_arguments_that_were_given(tmp_path):
    shutil.copytree(LAUNCH, tmp_path / "launch")
    script(tmp_path / "launch" / "ragrl.sh", 'printf "%s|" "$@"')
    start = tmp_path / "launch" / "quickstart.sh"
    told = subprocess.run([start, "--seed", "1", "--workdir", "a b"], capture_output=True)
    assert told.stdout == b"quickstart|--seed|1|--workdir|a b|"
