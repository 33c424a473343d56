"""Asks a database of known vulnerabilities about every package of the lock files.

    python .ci/audit.py [LOCK ...]           all of requirements/ by default

One request carries all packages, those of other platforms and other Pythons included. Exits with 1
if a package is vulnerable. A database out of reach is one line and no failure, so that checks also
pass on a machine without a network.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence

REQUIREMENTS = pathlib.Path(__file__).resolve().parents[1] / "requirements"
DATABASE = os.environ.get("RAGRL_AUDIT_URL", "https://api.osv.dev")
PATIENCE = 20.0  # seconds
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
    found = {}
    for first in range(0, len(pins), BATCH):
        part = pins[first : first + BATCH]
        for pin, result in zip(part, results(part), strict=True):
            names = [x["id"] for x in result.get("vulns", []) if x["id"] not in ACCEPTED]
            found |= {pin: names} if names else {}
    return found


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
    if not isinstance(value, dict) or not isinstance(value.get("results"), list):
        raise ValueError(f"a reply without results from {DATABASE}")
    return value["results"]


def main(arguments: Sequence[str]) -> int:
    """Prints the result; returns the exit code."""
    locks = [pathlib.Path(x) for x in arguments] or sorted(REQUIREMENTS.glob("*.lock"))
    pins = packages(locks)
    try:
        found = ask(pins)
    except (OSError, ValueError) as error:
        print(f"not audited: {len(pins)} packages, since the database does not answer ({error})")
        return 0
    for (name, version), names in found.items():
        print(f"{name}=={version} is vulnerable: {', '.join(names)}")
    print(f"audited {len(pins)} packages of {len(locks)} lock files: {len(found)} vulnerable")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
