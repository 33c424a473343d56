"""The style budget: the numbers of `measure.py` may only get better.

A limit is the number of the day that it was entered. A change that improves a number enters the new
one here; no change makes a limit easier.
"""

from __future__ import annotations

import functools

import pytest

from tests.style import measure

# Phrases per 10,000 words, shares in percent, lengths in lines of code; see `measure.py`.
BUDGET = {
    "README": 1500,
    "per": 0.1,
    "where": 0.9,
    "what": 1.7,
    "idiom": 3.5,
    "opening": 0.1,
    "pronoun": 0.3,
    "participle": 0.4,
    "long": 9,
    "loose": 4,
    "median length": 6,
    "maximum length": 39,
    "described": 95.0,
    "comments": 6.0,
    "count of per": 600,
}
AT_LEAST = {"described", "comments", "count of per"}  # the other limits are upper ones
LISTS = {"described": "args", "median length": "long", "maximum length": "long"}


@functools.cache
def numbers() -> dict[str, float]:
    return measure.measure()


def explain(name: str) -> str:
    """The offences behind a number and the command that lists them all."""
    kind = LISTS.get(name, name)
    if kind not in measure.KINDS:
        return "python tests/style/measure.py prints the numbers"
    offences = measure.offences(kind)
    first = "\n".join(f"{file}:{line}: {text!r}" for file, line, text in offences[:5])
    command = f"python tests/style/measure.py --list {kind} [PATH ...]"
    return f"{len(offences)} offences, the first of them:\n{first}\n{command} lists all"


def test_every_number_has_a_limit():
    assert numbers().keys() == BUDGET.keys()


@pytest.mark.parametrize("name", BUDGET)
def test_the_style_budget_holds(name):
    number, limit = numbers()[name], BUDGET[name]
    sign = -1 if name in AT_LEAST else 1
    bound = "at least" if name in AT_LEAST else "at most"
    assert sign * number <= sign * limit, f"{name} is {number}, {bound} {limit}: {explain(name)}"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("found", True),
        ("Told", True),
        ("loaded", True),
        ("found_and", False),
        ("cached_rows", False),
        ("seed", False),
        ("drawn_B", False),
        ("FrozenLLM", False),
    ],
)
def test_a_bare_participle_has_no_noun(name, expected):
    assert measure.is_participle(name) == expected


SAMPLE = '''
def train(rows, told, limit, width):
    """What it learns: one number a row, where there is one.

    Args:
      rows: the rows.
      told: the replies.
    """
    # It goes
    # on with what was found.
    found = told
    return found
'''


@pytest.mark.parametrize(
    "kind, lines",
    [
        ("per", [3]),
        ("where", [3]),
        ("what", [3, 10]),
        ("idiom", [9]),
        ("opening", [3]),
        ("pronoun", [9]),
        ("participle", [2, 11]),
        ("args", [2]),
        ("long", []),
        ("loose", [1]),
    ],
)
def test_an_offence_is_listed_at_its_line(tmp_path, monkeypatch, kind, lines):
    file = tmp_path / measure.PACKAGE / f"sample_{kind}.py"  # the texts of a path are read once
    file.parent.mkdir()
    file.write_text(SAMPLE)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    assert [offence.line for offence in measure.offences(kind)] == lines
