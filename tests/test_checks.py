"""The scripts of .ci/: the audit of the lock files, and the checks with other Pythons."""

import importlib.util
import json
import pathlib
import shutil
import subprocess
import time
from types import ModuleType

import pytest

from tests.faults import sending, whole
from tests.pods.cloud import write_script

CI = pathlib.Path(__file__).parents[1] / ".ci"
LOCK = """\
first==1.0 \\
    --hash=sha256:0
second==2.5 ; python_version < '3.12' \\
    --hash=sha256:1
"""


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", CI / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lock(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "some.lock"
    file.write_text(LOCK)
    return file


def audited(audit: ModuleType, lock: pathlib.Path, body: bytes) -> int:
    with sending(lambda number: [whole(body)]) as (url, _):
        audit.DATABASE = url
        return audit.main([str(lock)])


def test_a_vulnerable_package_fails_the_audit_by_name_unless_it_is_accepted(audit, lock, capsys):
    results = [{}, {"vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}]
    assert audited(audit, lock, json.dumps({"results": results}).encode()) == 1
    assert "second==2.5 is vulnerable: CVE-1, CVE-2\n" in capsys.readouterr().out
    results = [{}, {"vulns": [{"id": "CVE-1"}]}]
    audit.ACCEPTED = {"CVE-1": "does not concern this package"}
    assert audited(audit, lock, json.dumps({"results": results}).encode()) == 0
    assert capsys.readouterr().out == "audited 2 packages of 1 lock files: 0 vulnerable\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [whole(b"", "403 Forbidden")],
        [whole(b"<html>")],
        [whole(b"[]")],
        [whole(b'{"results": []}')],
        [whole(b'{"results": [{}, {}]}')[:-5]],
        [b"no HTTP\r\n\r\n"],
        [whole(b'{"results": [1, null]}')],
        [whole(b" " * 100)[:-100], *[b" ", 0.1] * 100],
    ],
    ids=["403", "HTML", "no object", "none", "cut off", "no HTTP", "no objects", "slow bytes"],
)
def test_a_database_that_answers_badly_is_one_line_before_the_deadline(audit, lock, capsys, pieces):
    audit.DEADLINE, begin = 1.0, time.monotonic()
    with sending(lambda number: pieces) as (url, _):
        audit.DATABASE = url
        assert audit.main([str(lock)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("not audited: 2 packages") and said.count("\n") == 1
    assert time.monotonic() - begin < 5.0


def test_the_audit_knows_every_package_of_the_locks(audit):
    """Also the packages of other platforms, which no environment of this machine has."""
    pins = dict(audit.packages(sorted(audit.REQUIREMENTS.glob("*.lock"))))
    some = {"libtpu", "jax-cuda12-plugin", "jaxlib", "haystack-ai", "inspect-ai", "torch"}
    assert some - pins.keys() == {"torch"}
    assert all(version[0].isdigit() for version in pins.values())


def other_python(folder: pathlib.Path, version: str, *tests: str) -> subprocess.CompletedProcess:
    """Runs the script in a copy of the checkout, without pyenv and with stubs alone on the PATH."""
    (folder / ".ci").mkdir(exist_ok=True)
    shutil.copy(CI / "other_python", folder / ".ci")
    write_script(folder / "launch" / "install.sh", "venv=$PWD/.venv")
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
    command = ["bash", folder / ".ci" / "other_python", version, *tests]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_missing_python_is_skipped_with_a_line(tmp_path):
    """Also one on the PATH that does not run: pyenv has such a file for versions not selected."""
    write_script(tmp_path / "bin" / "python3.99", "exit 127")
    ran = other_python(tmp_path, "3.99")
    assert ran.returncode == 77
    assert ran.stdout == "SKIPPED: Python 3.99 is not installed, so nothing was checked with it\n"


@pytest.mark.parametrize(
    ("code", "last", "status"),
    [
        (0, "all passed\nchecks: 2 passed, 0 failed\n", 0),
        (77, "all passed\nSKIPPED: odd\nchecks: 1 passed, 0 failed\n", 0),
        (1, "failed: odd\nFAILED tests/a.py\nchecks: 1 passed, 1 failed\n", 1),
    ],
)
def test_the_last_lines_name_skipped_stages_and_failed_tests(tmp_path, code, last, status):
    """The functions and the end of the real script, with two stages, of which one began before."""
    _, _, rest = (CI / "run").read_text().partition("passed=0\n")
    functions, end = rest.partition("# The reference")[0], rest.partition("'docs' print_pages\n")[2]
    stages = "exits() { echo 1 test; echo FAILED tests/a.py; return " + f"{code}; }}\n"
    stages += f'{functions}exits >"$logs/sphinx" &\npages=$!\n'
    stages += "stage even true\nstage odd print_pages\n"
    script = f"set -euo pipefail\nlogs={tmp_path}\npassed=0\n{stages}{end}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ran.stdout.endswith(last) and ran.returncode == status, (ran.stdout, ran.stderr)


def test_the_tests_of_other_pythons_exist():
    files = [x for x in (CI / "run").read_text().split() if x.startswith("tests/")]
    assert len(files) > 5 and all((CI.parent / file).is_file() for file in files)
