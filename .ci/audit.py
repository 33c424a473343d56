"""Asks a database of known vulnerabilities about every package of the lock files.

    python .ci/audit.py [LOCK ...]           all of requirements/ by default

One request carries all packages, those of other platforms and other Pythons included. Exits with 1
if a package is vulnerable. A database out of reach is one line and no failure, so that checks also
pass on a machine without a network.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence

REQUIREMENTS = pathlib.Path(__file__).resolve().parents[1] / "requirements"
DATABASE = os.environ.get("RAGRL_AUDIT_URL", "https://api.osv.dev")
PATIENCE = 20.0  # seconds without a byte
DEADLINE = 60.0  # seconds for everything, since a slow server sends bytes now and then
BATCH = 1000  # packages per request, the most that the database takes
# Vulnerabilities that do not concern this package, with the reason.
ACCEPTED: dict[str, str] = {}

Package = tuple[str, str]


def packages(locks: Iterable[pathlib.Path]) -> list[Package]:
    """Names and versions of the packages of lock files, each once."""
    texts = (file.read_text(encoding="utf-8") for file in locks)
    pins = {pin for text in texts for pin in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.M)}
    return sorted(pins)


def ask(pins: Sequence[Package]) -> dict[Package, list[str]]:
    """The vulnerabilities of packages, without those that are accepted.

    Raises:
      OSError: the database cannot be reached.
      ValueError: its reply is not one of such a database.
    """
    vulnerable = {}
    for first in range(0, len(pins), BATCH):
        part = pins[first : first + BATCH]
        for pin, result in zip(part, results(part), strict=True):
            names = [x["id"] for x in result.get("vulns", []) if x["id"] not in ACCEPTED]
            vulnerable |= {pin: names} if names else {}
    return vulnerable


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """Raises `TimeoutError` in the body after `DEADLINE` seconds."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"no complete answer in {DEADLINE:g} s")

    former = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def results(pins: Sequence[Package]) -> list[dict]:
    """One result per package."""
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
        for name, version in pins
    ]
    request = urllib.request.Request(
        f"{DATABASE}/v1/querybatch",
        json.dumps({"queries": queries}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        value = json.load(reply)
    listed = value.get("results") if isinstance(value, dict) else None
    if not isinstance(listed, list) or not all(isinstance(x, dict) for x in listed):
        raise ValueError(f"a reply without results from {DATABASE}")
    return listed


def main(arguments: Sequence[str]) -> int:
    """Prints the result; returns the exit code."""
    locks = [pathlib.Path(x) for x in arguments] or sorted(REQUIREMENTS.glob("*.lock"))
    pins = packages(locks)
    try:
        with deadline():
            vulnerable = ask(pins)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = str(error).strip()
        print(f"not audited: {len(pins)} packages, since the database does not answer ({why})")
        return 0
    for (name, version), names in vulnerable.items():
        print(f"{name}=={version} is vulnerable: {', '.join(names)}")
    print(f"audited {len(pins)} packages of {len(locks)} lock files: {len(vulnerable)} vulnerable")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
