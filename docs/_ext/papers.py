"""The pages of docs/papers and the scripts of launch/paper.sh, both from launch/papers.toml.

python docs/_ext/papers.py PAPER [--toy] [STAGE ...]      prints the script

A paper has `stages` (`name`, what it `does`, `command`), `names` that replace `{name}` in commands,
`files` to download, `rows` of published numbers for its `sets`, `tables` (which table or figure has
a command) and, per machine, what the stage `plan` gave as `planned`; `simulated` says how. `all`
holds what papers share, and `like` names a paper whose missing entries are used. With --toy the
entries of `toy` replace names, a stage's `toy` replaces its command, and `options` of the stage's
name are appended to it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import socket
import tomllib
from typing import Any, NamedTuple

FILE = pathlib.Path(__file__).parents[2] / "launch" / "papers.toml"
SERVER, PLAN = "server", "plan"  # runs in the background; runs only if it is named
# Whether a server answers: curl may be missing, and a proxy of the environment does not know it.
ASK = """python 2>/dev/null -c 'import urllib.request as r
r.build_opener(r.ProxyHandler({{}})).open("http://localhost:{port}/v1/models", timeout=9)'"""
VARIABLES = ("flashrag", "musique", "two", "hotpot", "data", "search")  # of the shell


class Stage(NamedTuple):
    """A stage with its command, which is empty if there is nothing to run."""

    name: str
    does: str
    command: str


def papers() -> dict[str, dict[str, Any]]:
    """The papers of the file by name, with what they share."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    shared = data.pop("all")
    for name, paper in data.items():
        like = data.get(paper.get("like", ""), {})
        for key in ("names", "toy", "options"):
            paper[key] = {**shared[key], **like.get(key, {}), **paper.get(key, {})}
        for key in ("stages", "files"):
            paper[key] = paper.get(key) or like[key]
        paper["files"] = [*paper["files"], *shared["files"]]
        paper["simulated"] = shared["simulated"]
        paper["names"] |= {"out": os.environ.get("RUNS", "runs"), "runs": f"{{out}}/{name}"}
    return data


def stages(name: str, *, toy: bool = False, whole: bool = False) -> list[Stage]:
    """The stages of a paper, or of its toy; the first one sets the `VARIABLES`, unless `whole`."""
    paper = papers()[name]
    names, options = paper["names"], paper["options"] if toy else {}
    if toy:
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        names |= paper["toy"] | {"runs": f"{{out}}/toy/{name}", "url": url}
    kept = () if whole else VARIABLES

    def fill(text: str, table: dict[str, str]) -> str:
        def value(match: re.Match[str]) -> str:
            key = match[1]
            return f"${{{key}}}" if key in kept else fill(table[key], table)

        return re.sub(r"\{(\w+)\}", value, text)

    result = []
    for stage in paper["stages"]:
        command = fill(stage.get("toy", stage["command"]) if toy else stage["command"], names)
        if stage["name"] in options:
            command += f" \\\n    {fill(options[stage['name']], names | options)}"
        result.append(Stage(stage["name"], stage["does"], command.strip()))
    set_up = {key: f'{key}="{fill(names[key], names)}"' for key in kept if key in names}
    text = "\n".join([*set_up.values(), *(stage.command for stage in result)])
    used = [line for key, line in set_up.items() if f"${{{key}}}" in text]
    first = Stage("names", "files and options of all commands", "\n".join(used))
    return [first, *result] if used else result


def script(name: str, chosen: list[str], *, toy: bool) -> str:
    """A bash script of some stages, in their order; of all but the plan by default."""
    if special := re.search(r"[^\w@%+=:./-]", out := os.environ.get("RUNS", "")):
        raise SystemExit(
            f"error: RUNS is {out!r}, but the commands would split it at {special[0]!r}: give a "
            "path of letters, digits and ./_-, such as that of a link to it"
        )
    known = stages(name, toy=toy)
    wanted = chosen or [stage.name for stage in known if stage.name != PLAN]
    if unknown := set(wanted) - {stage.name for stage in known}:
        raise SystemExit(
            f"error: {name} has no stage {', '.join(sorted(unknown))}: use "
            + ", ".join(stage.name for stage in known)
        )
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for stage in known:
        if stage.name not in (*wanted, known[0].name) or not stage.command:
            continue
        lines.append(f"echo {shlex.quote(f'== {stage.name}: {stage.does}')} >&2")
        if stage.name != SERVER:
            lines.append(stage.command)
            continue
        port = re.search(r":(\d+)/v1|--port (\d+)", stage.command)
        assert port, "the command of a server names its port"
        lines += [
            f"{stage.command} & server=$!",
            f"until {ASK.format(port=port[1] or port[2])}; do",
            "  kill -0 $server 2>/dev/null || { echo 'error: the server has ended' >&2; exit 1; }",
            "  sleep 0.5",
            "done",
        ]
    return "\n".join(lines)


def markdown(name: str, part: str) -> str:
    """A part of a paper's page: files, stages, results or tables."""
    paper = papers()[name]
    return {"files": _files, "stages": _stages, "results": _results, "tables": _tables}[part](
        name, paper
    )


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _files(_: str, paper: dict[str, Any]) -> str:
    rows = [[file["what"], file["name"], file["note"]] for file in paper["files"]]
    return _table(["what", "name", "state"], rows)


def _stages(name: str, paper: dict[str, Any]) -> str:
    parts = []
    for number, stage in enumerate(stages(name), 1):
        parts.append(f"**{number}. {stage.name}**: {stage.does}.\n")
        if stage.command:
            parts.append(f"```bash\n{stage.command}\n```\n")
    head = ["machine", "GB per device", "seconds per step", "hours", "differs from `plan`"]
    return "\n".join([*parts, _table(head, paper["planned"]), "", paper["simulated"]])


def planned() -> str:
    """All papers on all machines in one table."""
    rows = [[p["title"], *row[:4]] for p in papers().values() for row in p["planned"]]
    head = ["paper", "machine", "GB per device", "seconds per step", "hours"]
    return _table(head, rows) + "\n\n" + papers()["c3po"]["simulated"]


def _results(_: str, paper: dict[str, Any]) -> str:
    systems = paper["rows"]
    head = ["set", *(cell for system in systems for cell in (system, "here"))]
    rows = [
        [name, *(cell for numbers in systems.values() for cell in (numbers[i], ""))]
        for i, name in enumerate(paper["sets"])
    ]
    return f"Published: {paper['score']}. Nobody has filled the empty columns yet.\n\n" + _table(
        head, rows
    )


def _tables(_: str, paper: dict[str, Any]) -> str:
    states = {"command": "has a command", "config": "needs more", "nothing": "has nothing"}
    rows = [[entry["item"], states[entry["state"]], entry["how"]] for entry in paper["tables"]]
    return _table(["of the paper", "state", "how"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="launch/paper.sh")
    parser.add_argument("paper", choices=papers())
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("stage", nargs="*")
    options = parser.parse_intermixed_args()  # stages may follow --toy
    print(script(options.paper, options.stage, toy=options.toy))
