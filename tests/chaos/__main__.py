"""`python -m tests.chaos PART ...` runs parts of the harness and prints a table as JSON.

    python -m tests.chaos kills --kills=40             five systems, two of them with two processes
    python -m tests.chaos damages disks servers clocks
    python -m tests.chaos kills --change=run.KEY=VALUE further config keys, for another kind of run

A part takes from minutes to hours, as its numbers say. The exit code is 1 if any run ended with
another digest, a traceback, or success that it should not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tests.chaos import damages, kills, limited_disk, servers
from tests.chaos.runs import SYSTEMS, Variant, call, digest, train, train_command

TWO_PROCESSES = ("c3po", "coda")
OUTAGES: Mapping[str, Mapping[str, int]] = {"from the start": {"after": 0}, "later": {"after": 100}}
PATIENCE = 600  # seconds within which a run whose servers fail must stop, its good steps included
Table = dict[str, Any]


def run_kills(options: argparse.Namespace, folder: pathlib.Path) -> Table:
    """Disturbs runs of every system; the two-process variants come last."""
    variants = [Variant(system, 1, options.changes) for system in options.systems]
    both = set(options.systems) & set(TWO_PROCESSES)
    variants += [Variant(system, 2, options.changes) for system in sorted(both)]
    each = -(-options.kills // len(variants))
    rows = []
    for variant in variants:
        for result in kills.torment(variant, folder / variant.name, each, options.seed):
            rows.append({**dataclasses.asdict(result), "equal": result.is_equal})
            _note("kills", result.variant, len(result.disturbances), result.is_equal)
    disturbances = [d for row in rows for d in row["disturbances"]]
    faults = [d for d in disturbances if d["fault"]]
    return {
        "disturbances": len(disturbances),
        "signals": Counter(d["signal"] for d in disturbances),
        "by variant": Counter(row["variant"] for row in rows for _ in row["disturbances"]),
        "runs": len(rows),
        "equal": sum(row["equal"] for row in rows),
        "wrong ends": faults,
        "good": not faults and all(row["equal"] for row in rows),
        "rows": rows,
    }


def run_damages(options: argparse.Namespace, folder: pathlib.Path) -> Table:
    names = options.damages or None
    results = damages.hurt(Variant("c3po", 1, options.changes), folder, names, note=_note)
    bad = [dataclasses.asdict(result) for result in results if not result.is_good]
    return {
        "damages": len({result.damage for result in results}),
        "commands": len(results),
        "verdicts": Counter(f"{r.command}: {r.verdict}" for r in results),
        "bad": bad,
        "good": not bad,
        "rows": [dataclasses.asdict(result) for result in results],
    }


def run_disks(options: argparse.Namespace, folder: pathlib.Path) -> Table:
    """Fills a tmpfs, if this user can mount one, and limits the size of files."""
    variant, rows = Variant("c3po", 1, options.changes), []
    assert call(train_command(variant, folder / "whole"), folder / "whole").is_success
    expected = digest(folder / "whole")
    for kind, names in (("tmpfs", limited_disk.TMPFS), ("files", limited_disk.FILES)):
        for name in names:
            place = folder / f"{kind}-{name}".replace(" ", "-")
            fill = limited_disk.on_small_disk if kind == "tmpfs" else limited_disk.with_small_files
            try:
                result = fill(variant, place, name, expected)
            except PermissionError as error:
                rows.append({"name": name, "skipped": str(error), "good": True})
                continue
            _note("disks", result.name, result.first.codes, result.is_good)
            rows.append(_described(result))
    return {"rows": rows, "good": all(row["good"] for row in rows)}


def _described(result: limited_disk.Full) -> Table:
    first = result.first
    lines = first.messages() or first.output.splitlines()[-3:]
    return {
        "name": result.name,
        "codes": first.codes,
        "message": lines,
        "tracebacks": first.output.count("Traceback (most recent call last)"),
        "equal": result.actual == result.expected,
        "good": result.is_good,
    }


def run_servers(options: argparse.Namespace, folder: pathlib.Path) -> Table:
    """Compares 30 % of faults with none, and lets servers fail every request."""
    changes = {
        "run.steps": options.steps,
        "run.save_every": 10,
        "run.eval_every": options.steps,
        **options.changes,
    }

    def run(name: str, share: float, kinds: Any, limit: float, **more: Any) -> servers.Faulty:
        own = servers.Servers(folder / "index", share, [*kinds], options.seed, **more)
        result = servers.run_with_faults(name, folder / name, own, changes, limit)
        _note("servers", name, result.outcome.codes, result.steps, result.reward, result.failed)
        return result

    whole = run("without faults", 0.0, servers.ALL, options.limit)
    passing = run("30 % passing faults", options.share, servers.PASSING, options.limit)
    every = run("30 % faults of all kinds", options.share, servers.ALL, options.limit)
    outages = [
        run(f"all requests fail {name}", 1.0, servers.PASSING, PATIENCE, **more)
        for name, more in OUTAGES.items()
    ]
    width = 2 * (whole.reward[1] ** 2 + every.reward[1] ** 2) ** 0.5
    ended = all(x.outcome.is_success for x in (whole, passing, every))
    same = passing.reward == whole.reward or bool(passing.failed)
    stopped = all(_has_stopped(result, options.steps) for result in outages)
    near = abs(every.reward[0] - whole.reward[0]) <= width
    rows = [_row(result) for result in (whole, passing, every, *outages)]
    return {"kinds": len(servers.ALL), "rows": rows, "good": ended and same and near and stopped}


def _has_stopped(result: servers.Faulty, steps: int) -> bool:
    """Whether a run on failing servers stopped in time, with an error and without its last step."""
    outcome = result.outcome
    is_named = outcome.codes == (2,) and not outcome.has_traceback and not outcome.is_late
    return is_named and steps not in result.saved


def _row(result: servers.Faulty) -> Table:
    row = dataclasses.asdict(result) | {"message": result.outcome.messages()}
    return row | {"outcome": result.outcome.codes, "traceback": result.outcome.has_traceback}


def run_clocks(options: argparse.Namespace, folder: pathlib.Path) -> Table:
    """Lets the wall clock jump, in one run of each system."""
    rows = []
    for system in options.systems:
        variant = Variant(system, 1, options.changes)
        assert train(variant, folder / system).is_success
        jumped = train(variant, folder / f"{system}-jumps", module=("tests.chaos.shifted_clock",))
        equal = jumped.is_success and digest(folder / f"{system}-jumps") == digest(folder / system)
        rows.append({"system": system, "codes": jumped.codes, "equal": equal})
        _note("clocks", system, jumped.codes, equal)
    return {"rows": rows, "good": all(row["equal"] for row in rows)}


PARTS: Mapping[str, Callable[[argparse.Namespace, pathlib.Path], Table]] = {
    "kills": run_kills,
    "damages": run_damages,
    "disks": run_disks,
    "servers": run_servers,
    "clocks": run_clocks,
}


def _note(*values: object) -> None:
    print(*values, file=sys.stderr, flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0, help="of moments, signals and faults")
    parser.add_argument("--kills", type=int, default=40, help="signals that meet a living run")
    parser.add_argument("--systems", type=lambda x: x.split(","), default=[*SYSTEMS])
    parser.add_argument("--damages", nargs="*", help="names of damages (default: all)")
    parser.add_argument("--steps", type=int, default=50, help="of the runs on faulty servers")
    parser.add_argument("--share", type=float, default=0.3, help="of requests that fail")
    parser.add_argument("--limit", type=float, default=7200, help="seconds of such a run")
    parser.add_argument("--change", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=pathlib.Path, help="file of the table, besides stdout")
    options = parser.parse_args(argv)
    options.changes = dict(pair.split("=", 1) for pair in options.change)
    return options


def main(argv: list[str] | None = None) -> int:
    options, tables = parse(argv), {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            tables[part] = PARTS[part](options, pathlib.Path(folder))
        if options.out:
            options.out.write_text(json.dumps(tables, indent=2))
    print(json.dumps(tables, indent=2))
    return 0 if all(table["good"] for table in tables.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
