"""Tables of docs/data/*.json: measurements, each row with its command and its commit."""

from __future__ import annotations

import json
import pathlib

DATA = pathlib.Path(__file__).parents[1] / "data"


def load(name: str) -> dict:
    """One file of measurements."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def markdown(name: str) -> str:
    """A table, with the command and commit of its rows below it."""
    data = load(name)
    columns = data["columns"]
    head = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)
    rows = [
        "| " + " | ".join(str(row["cells"].get(c, "")) for c in columns) + " |"
        for row in data["rows"]
    ]
    return "\n".join([head, *rows, "", origins(data)])


def origins(data: dict) -> str:
    """How each row was measured; rows measured alike share a line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in data["rows"]:
        key = (row["command"], row["commit"], row.get("device", data.get("device", "")))
        lines.setdefault(key, []).append(str(next(iter(row["cells"].values()))))
    text = []
    for (command, commit, device), names in lines.items():
        which = "All rows" if len(lines) == 1 else ", ".join(names)
        text.append(f"- {which}: `{command}`, commit `{commit}`, {device}.")
    return "\n".join(text) + "\n"
