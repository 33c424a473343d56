"""What is done to a run ends with the result of an undisturbed one, or with its name and remedy."""

import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jax_ragrl.runtime.jsonl import read_rows
from tests.chaos import servers
from tests.chaos.runs import call, digest, train_command, wait_for
from tests.chaos.servers import Servers, train_on
from tests.tiny import saved_policy

pytestmark = [pytest.mark.optimized, pytest.mark.slow]
REPO = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return saved_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, policy: pathlib.Path) -> pathlib.Path:
    """A finished run, made in this process, which compiles only once."""
    folder = tmp_path_factory.mktemp("c3po") / "whole"
    outcome = call(train_command(folder, policy), folder)
    assert outcome.code == 0, outcome.output
    assert all(row["grad_norm"] > 0 for row in read_rows(folder / "metrics.jsonl") if row["step"])
    return folder


def test_a_run_killed_at_a_random_moment_ends_as_an_undisturbed_one(whole, policy, tmp_path):
    command = train_command(tmp_path / "run", policy)
    program = [sys.executable, "-m", "jax_ragrl.cli.main", *command]
    process = subprocess.Popen(program, cwd=REPO)
    wait_for(tmp_path / "run" / "checkpoints" / "1", process)
    time.sleep(random.Random(1).uniform(0, 1))
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert digest(tmp_path / "run") != digest(whole)
    assert call(command, tmp_path / "run").code == 0
    assert digest(tmp_path / "run") == digest(whole)


def test_a_damaged_run_is_mended(whole, policy, tmp_path):
    """Checkpoint 3, the log and the lock; that other damage is named: tests of each file."""
    copy = shutil.copytree(whole, tmp_path / "run")
    data = (x for x in (copy / "checkpoints" / "3" / "state").glob("**/d/*") if x.is_file())
    largest = max(data, key=lambda x: x.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    for name in ("metrics.jsonl", ".lock"):
        (copy / name).write_bytes((copy / name).read_bytes() + b"\x80\xff\xfe{\x00")
    with pytest.warns(UserWarning, match="is damaged: it is renamed to damaged-3"):
        outcome = call(train_command(copy, policy), copy)
    assert outcome.code == 0, outcome
    assert digest(copy) == digest(whole)


def test_a_full_disk_is_named_and_the_run_continues_when_there_is_space(whole, policy, tmp_path):
    """No file may have more than 64 KiB, so that a checkpoint cannot be written."""
    shutil.copytree(whole / "index", tmp_path / "index")
    command = train_command(tmp_path, policy)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        first = call(command, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = "".join(first.messages())
    assert first.code == 2 and ("full" in message or "ulimit" in message), first
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")][:2] == [0, 1]
    assert call(command, tmp_path).code == 0
    assert digest(tmp_path) == digest(whole)


def test_faults_that_pass_change_nothing_and_an_outage_stops_the_run(policy, tmp_path):
    kinds = [*servers.PASSING]
    without, some = (Servers(tmp_path / "index", n, kinds, 0) for n in (0.0, 0.3))
    for own, name in ((without, "whole"), (some, "faulty")):
        outcome = train_on(own, tmp_path / name, policy, run__questions_per_step=6)
        assert outcome.code == 0, outcome
    assert sum(some.counts.values()) > 5
    assert not sum(row.get("failed", 0) for row in read_rows(tmp_path / "faulty" / "metrics.jsonl"))
    assert digest(tmp_path / "whole") == digest(tmp_path / "faulty")
    # The servers answer the first step, and nothing after it.
    every = Servers(tmp_path / "index", 1.0, kinds, 0, after=0)
    for own, steps, code in ((without, 1, 0), (every, 3, 2)):
        changes = {"run__questions_per_step": 6, "run__steps": steps}
        outcome = train_on(own, tmp_path / "outage", policy, **changes)
        assert outcome.code == code and not outcome.has_traceback, outcome
    assert [x.name for x in (tmp_path / "outage" / "checkpoints").iterdir()] == ["1"]


def test_odd_replies_fail_their_questions_and_end_no_run(policy, tmp_path):
    """From the first request on: a server need not have answered before."""
    own = Servers(tmp_path / "index", 0.3, [*servers.ODD], 1, 0)
    changes = {"run__steps": 2, "run__questions_per_step": 6, "run__dev_questions": 0}
    changes |= {"run__trees_per_save": 6}
    outcome = train_on(own, tmp_path / "odd", policy, **changes)
    assert outcome.code == 0 and not outcome.has_traceback, outcome
    rows = [row for row in read_rows(tmp_path / "odd" / "metrics.jsonl") if row["step"]]
    assert sum(own.counts.values()) > 3 and 0 < sum(row["failed"] for row in rows) < 12
    # Only questions with a reply have a tree.
    trees = [len(row["trees"]) for row in read_rows(tmp_path / "odd" / "trees.jsonl")]
    assert [n + row["failed"] for n, row in zip(trees, rows, strict=True)] == [6, 6]
