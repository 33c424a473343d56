"""Tables of docs/data/*.json: measurements, each row with its command and its commit."""

from __future__ import annotations

import json
import pathlib

DATA = pathlib.Path(__file__).parents[1] / "data"


def load(name: str) -> dict:
    """One file of measurements."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def markdown(name: str, group: str = "") -> str:
    """A table, with the command and commit of its rows below it; of one group of rows if named."""
    data = load(name)
    data["rows"] = [row for row in data["rows"] if not group or row.get("group") == group]
    columns = data["columns"]
    head = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)
    rows = [
        "| " + " | ".join(str(row["cells"].get(c, "")) for c in columns) + " |"
        for row in data["rows"]
    ]
    return "\n".join([f"{data['title']}:\n", head, *rows, "", origins(data)])


def origins(data: dict) -> str:
    """How each row was measured; rows measured alike share a line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in data["rows"]:
        key = (row["command"], row["commit"], row.get("device", data.get("device", "")))
        name = str(next(iter(row["cells"].values())))
        if name not in lines.setdefault(key, []):
            lines[key].append(name)
    text = []
    for (command, commit, device), names in lines.items():
        which = "All rows" if len(lines) == 1 else ", ".join(names)
        text.append(f"- {which}: `{command}`, commit `{commit}`, {device}.")
    return "\n".join(text) + "\n"
