"""What OPERA's three roles write: total functions from text to `Parsed`, and back.

Every role has a JSON form, as in the paper, and a compact one of a few lines. What is neither is
recovered as far as it can be, with a lower `format_score`, and its fault is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.rollout.roles import Parsed, malformed

PLAN, ANALYSIS, REWRITE = "plan", "analysis", "rewrite"
YES, NO = "yes", "no"
STRATEGIES = ("expand", "synonyms", "rephrase", "entity")
MAX_OPENERS = 50  # how many brackets may begin a JSON value before the search is given up

_PLANS = ("sub_questions", "steps", "subgoals", "plan")
_GOALS = ("subgoal", "sub_question", "subquestion", "question", "goal")
_IDS, _NEEDS = ("subgoal_id", "id", "step"), ("dependencies", "depends_on")
_XML = re.compile(r"<sub_?question[^>]*>(.*?)</sub_?question>", re.DOTALL | re.IGNORECASE)
_LINE = re.compile(r"^\s*[0-9]{1,2}[).:]?\s+(\S.*)$", re.MULTILINE)
_DEPS = re.compile(r"\{deps:[^}]*\}")
_PLACEHOLDER = re.compile(
    r"\[(?:answer[ _]?|[^\[\]]{0,80}\bfrom step )?([0-9]{1,3})\]", re.IGNORECASE
)
_STATUS = re.compile(r"\"?\bstatus\"?\s*[:=]\s*\"?(yes|no)\b", re.IGNORECASE)
_ANSWER = re.compile(r"\"?\banswer\"?\s*[:=]\s*\"?([^\"\n]*)", re.IGNORECASE)
_VERDICT = re.compile(r"^(yes|no)\b[ :,.]*(.*)$", re.MULTILINE | re.IGNORECASE)
# A quote ends a value before a comma, a brace or the line's end only: values may hold quotes.
_QUERY = re.compile(
    r"\brewritten_query[\"']?\s*:\s*([\"'])(?P<query>.*?)(?:\1\s*(?:[,}]|$)|$)", re.MULTILINE
)
# A string, which is passed over, or a comma that nothing follows.
_SPARE = re.compile(r"(\"(?:[^\"\\]|\\.)*\")|,(?=\s*[\]}])")
_QUOTED = re.compile(r"\"(?P<query>[^\"]+)\"")


class Step(NamedTuple):
    """A sub-goal of a plan. `declared` are the steps that it says it needs, numbered from 1.

    `missing` counts the fields that a JSON object of a sub-goal should have and has not.
    """

    goal: str
    declared: tuple[int, ...] = ()
    missing: int = 0


# --- Plans --------------------------------------------------------------------------------------


def parse_plan(text: str) -> Parsed:
    """A JSON list of sub-goals, a JSON object that holds one or one a line, XML or numbered lines.

    A comma after the last item is forgiven. A list that is cut off is no plan: the step with the
    answer would be missing.
    """
    tidy = _SPARE.sub(lambda found: found[1] or "", text)
    lines = json_lines(tidy)
    for value in (*lines, lines, *json_values(tidy)):
        if steps := _json_steps(value):
            return Parsed(PLAN, steps)
    goals = _XML.findall(text) or _LINE.findall(text)
    plain = [_DEPS.sub("", goal).strip() for goal in goals]
    if not any(plain):
        return malformed("No Plan")
    return Parsed(PLAN, tuple(Step(goal, references(goal)) for goal in plain if goal))


def _json_steps(value: Any) -> tuple[Step, ...]:
    """The steps that a JSON value holds, if it holds any."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in _PLANS if name in value), None)
    items = value if isinstance(value, list) else []
    return tuple(step for item in items if (step := _json_step(item)).goal)


def _json_step(item: Any) -> Step:
    if isinstance(item, str):
        return Step(item.strip(), references(item))
    if not isinstance(item, Mapping):
        return Step("")
    needs = next((item[name] for name in _NEEDS if name in item), None)
    declared = [_number(n) for n in needs] if isinstance(needs, list) else []
    missing = (needs is None) + (not any(name in item for name in _IDS))
    return Step(_string(item, _GOALS), tuple(n for n in declared if n), missing)


def _number(value: Any) -> int:
    """A step's number, where a JSON value is one; else 0."""
    found = re.fullmatch(r"\D*([0-9]{1,3})", str(value))
    return int(found[1]) if found else 0


def references(goal: str) -> tuple[int, ...]:
    """The steps whose answers a sub-goal has placeholders for, in order."""
    return tuple(dict.fromkeys(int(n) for n in _PLACEHOLDER.findall(goal)))


def filled(step: Step, answers: Sequence[str]) -> str | None:
    """The next sub-goal with the answers of earlier steps in place; None where one is missing.

    `answers` holds one answer for each earlier step, empty where it failed. The answer of a need
    that was declared without a placeholder is appended; needs that are no earlier step are ignored.
    """
    placed = references(step.goal)
    declared = [n for n in step.declared if 1 <= n <= len(answers)]
    needed = {*placed, *declared}
    if any(not 1 <= n <= len(answers) or not answers[n - 1] for n in needed):
        return None
    goal = _PLACEHOLDER.sub(lambda found: answers[int(found[1]) - 1], step.goal)
    given = ", ".join(answers[n - 1] for n in declared if n not in placed)
    return f"{goal} (given {given})" if given else goal


def render_plan(goals: Sequence[str]) -> str:
    """A plan as numbered lines."""
    return "\n".join(f"{i} {goal}" for i, goal in enumerate(goals, start=1))


# --- Analysis and answer ------------------------------------------------------------------------


def parse_analysis(text: str) -> Parsed:
    """`{"status", "answer", "analysis"}`, or an analysis and then a line `yes: answer` or `no`.

    The action is `yes` with the answer, or `no`; a status that says neither is repaired from
    whether there is an answer, and a `yes` without one is a `no`. The analysis is the thought.
    """
    for value in json_values(text):
        if isinstance(value, Mapping) and value.keys() & {"status", "answer", "analysis"}:
            return _judged(*(_string(value, (k,)) for k in ("status", "answer", "analysis")))
    if found := _STATUS.search(text):
        answer = _ANSWER.search(text)
        return _judged(found[1], answer[1].strip() if answer else "", "")
    verdicts = list(_VERDICT.finditer(text))
    if not verdicts:
        return malformed("No Status")
    status, rest = verdicts[-1].groups()
    before = text[: verdicts[-1].start()].strip()
    if status.lower() == YES:
        return _judged(status, rest.strip(), before)
    return _judged(status, "", before or rest.strip())


def _judged(status: str, answer: str, analysis: str) -> Parsed:
    """A verdict with the grade of its form."""
    status = status.lower()
    known, yes = status in (YES, NO), bool(answer) and status != NO
    score = 1.0 if analysis else 0.7
    score *= 1.0 if known else 0.5 if status else 0.7
    score *= 0.8 if status == YES and not answer else 0.9 if status == NO and answer else 1.0
    error = "" if known else "No Status"
    action, args = (YES, (answer,)) if yes else (NO, ())
    return Parsed(action, args, analysis, not error, error, score)


def render_analysis(analysis: str, answer: str = "") -> str:
    """A verdict in the compact form; no answer is a `no`."""
    return f"{analysis}\n{f'{YES}: {answer}' if answer else NO}"


# --- Rewritten queries --------------------------------------------------------------------------


def parse_rewrite(text: str) -> Parsed:
    """`{"rewritten_query", "strategy", "keywords"}`, or one line `strategy: query`.

    Else what stands after that name, as in JSON with a mistake, the first quoted string or the
    first line is the query. The strategy is the thought.
    """
    for value in json_values(text):
        if isinstance(value, Mapping) and "rewritten_query" in value:
            strategy = _string(value, ("strategy",))
            query = _string(value, ("rewritten_query",))
            return _rewritten(query, strategy, (not strategy) + ("keywords" not in value))
    name, colon, rest = text.strip().partition(":")
    if colon and name.strip().lower() in STRATEGIES:
        return _rewritten(rest.strip().split("\n")[0], name.strip().lower(), 0)
    found = _QUERY.search(text) or _QUOTED.search(text)
    query = found["query"] if found else text.strip().split("\n")[0]
    return _rewritten(query.strip(), "", 2, "No JSON")


def _rewritten(query: str, strategy: str, missing: int, error: str = "") -> Parsed:
    """A query with the grade of its form."""
    score = 0.5**missing * (1.0 if query else 0.3)
    score *= 0.9 if strategy and strategy.lower() not in STRATEGIES else 1.0
    error = error if query else "Empty Query"
    return Parsed(REWRITE, (query,) if query else (), strategy, not error, error, score)


def render_rewrite(strategy: str, query: str) -> str:
    """A rewritten query in the compact form."""
    return f"{strategy}: {query}"


# --- JSON ---------------------------------------------------------------------------------------


def json_values(text: str) -> Iterator[Any]:
    """The JSON lists and objects in a text, wherever they begin."""
    decoder = json.JSONDecoder()
    for opener in [found.start() for found in re.finditer(r"[\[{]", text)][:MAX_OPENERS]:
        try:
            yield decoder.raw_decode(text, opener)[0]
        except (ValueError, RecursionError):
            continue


def json_lines(text: str) -> list[Any]:
    """The values of the lines that begin one; none where one of these lines is not whole."""
    begun = [line.strip() for line in text.split("\n") if line.lstrip().startswith(("{", "["))]
    try:
        return [json.loads(line.rstrip(",")) for line in begun]
    except (ValueError, RecursionError):
        return []


def _string(item: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of some fields that is there, as text; nested values and nothing are empty."""
    value = next((item[name] for name in names if name in item), "")
    return str(value).strip() if isinstance(value, str | int | float) else ""
