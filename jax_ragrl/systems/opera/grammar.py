"""Grammars of OPERA's three roles: total functions from text to `ParsedAction`, and back.

Every role has a JSON form, as in the paper, and a compact form of a few lines. Other text is
recovered as far as possible, with a lower `format_score` and a named error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.runtime.records import declare
from jax_ragrl.text.patterns import character, choice, enclosed, line

PLAN, ANALYSIS, REWRITE = "plan", "analysis", "rewrite"
YES, NO = "yes", "no"
STRATEGIES = ("expand", "synonyms", "rephrase", "entity")
MAX_OPENERS = 50  # brackets that are tried as the start of a JSON value: bounds the search

_PLANS = ("sub_questions", "steps", "subgoals", "plan")
_GOALS = ("subgoal", "sub_question", "subquestion", "question", "goal")
_IDS, _NEEDS = ("subgoal_id", "id", "step"), ("dependencies", "depends_on")
_XML = re.compile(r"<sub_?question[^>]*>", re.IGNORECASE)
_XML_END = re.compile(r"</sub_?question>", re.IGNORECASE)
_LINE = re.compile(r"^[^\S\n]*[0-9]{1,2}[).:]?\s+(\S.*)$", re.MULTILINE)
_DEPS = re.compile(r"\{deps:[^}]*\}")
_PLACEHOLDER = re.compile(
    r"\[(?:answer[ _]?|[^\[\]]{0,80}\bfrom step )?([0-9]{1,3})\]", re.IGNORECASE
)
_STATUS = re.compile(r"\"?\bstatus\"?\s*[:=]\s*\"?(yes|no)\b", re.IGNORECASE)
_ANSWER = re.compile(r"\"?\banswer\"?\s*[:=]\s*\"?([^\"\n]*)", re.IGNORECASE)
_VERDICT = re.compile(r"^(yes|no)\b[ :,.]*(.*)$", re.MULTILINE | re.IGNORECASE)
# A quote ends a value only before a comma, a brace or the end of the line: values may hold quotes.
_QUERY = re.compile(
    r"\brewritten_query[\"']?\s*:\s*([\"'])(?P<query>.*?)(?:\1\s*(?:[,}]|$)|$)", re.MULTILINE
)
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*")  # without its closing quote
_SPARE = re.compile(r"\"|,(?=\s*[\]}])")  # the start of a string, or a trailing comma
_QUOTED = re.compile(r"\"(?P<query>[^\"]+)\"")


@declare
class Step(NamedTuple):
    """A sub-goal of a plan.

    Fields:
      goal: the text, with placeholders such as `[1]` for the answers of earlier steps.
      declared_needs: the steps that the plan lists as its dependencies, numbered from 1.
      missing: the number of required fields that the JSON object of the sub-goal lacks.
    """

    goal: str
    declared_needs: tuple[int, ...] = ()
    missing: int = 0


# --- Plans --------------------------------------------------------------------------------------


def parse_plan(text: str) -> ParsedAction:
    """Parses a plan: a JSON list of sub-goals, JSON objects (one around a list, or one per line),
    XML, or numbered lines.

    A comma after the last item is allowed. A truncated list is not a plan: its last step, which
    gives the answer, would be missing.
    """
    tidy = _without_spare_commas(text)
    lines = json_lines(tidy)
    # 1. JSON: a list in a line, one object per line, or a value anywhere in the text.
    for value in (*lines, lines, *json_values(tidy)):
        if steps := _json_steps(value):
            return ParsedAction(PLAN, steps)
    # 2. XML or numbered lines, whose needs are their placeholders.
    pairs = enclosed(_up_to_last(">", text), _XML, lambda _: _XML_END)
    goals = [goal for _, goal in pairs] or _LINE.findall(text)
    starts = [_up_to_last("}", goal) for goal in goals]
    plain = [
        (_DEPS.sub("", start) + goal[len(start) :]).strip()
        for start, goal in zip(starts, goals, strict=True)
    ]
    if not any(plain):
        return invalid_action("No Plan")
    return ParsedAction(PLAN, tuple(Step(goal, references(goal)) for goal in plain if goal))


def _up_to_last(mark: str, text: str) -> str:
    """Returns a text up to a mark, after which no pattern that ends with the mark should search."""
    return text[: text.rfind(mark) + 1]


def _without_spare_commas(text: str) -> str:
    """Removes the commas before closing brackets, except in strings."""
    parts, rest, position, open_until = [], 0, 0, 0
    while match := _SPARE.search(text, position):
        start, position = match.span()
        if match[0] == ",":
            parts.append(text[rest:start])
            rest = position
        elif start >= open_until and (string := _STRING.match(text, start)):
            if text.startswith('"', string.end()):
                position = string.end() + 1
            else:
                # Not a string: the place that ends this one would also end each string within it.
                open_until = string.end()
    return "".join(parts) + text[rest:]


def _json_steps(value: Any) -> tuple[Step, ...]:
    """Returns the steps of a JSON value; () if it is not a plan."""
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
    numbers = [_number(n) for n in needs] if isinstance(needs, list) else []
    missing = (needs is None) + (not any(name in item for name in _IDS))
    return Step(_string(item, _GOALS), tuple(n for n in numbers if n), missing)


def _number(value: Any) -> int:
    """Returns the number of a step in a JSON value such as 2 or "step 2"; 0 for other values."""
    match = re.fullmatch(r"\D*([0-9]{1,3})", str(value))
    return int(match[1]) if match else 0


def references(goal: str) -> tuple[int, ...]:
    """Returns the numbers of the steps in a sub-goal's placeholders, in order."""
    return tuple(dict.fromkeys(int(n) for n in _PLACEHOLDER.findall(goal)))


def fill_placeholders(step: Step, answers: Sequence[str]) -> str | None:
    """Fills the answers of earlier steps into a sub-goal; None if a needed answer is missing.

    There is one answer per earlier step, empty if the step failed. The answer of a declared need
    without a placeholder is appended. Declared needs that are not earlier steps are ignored.
    """
    in_text = references(step.goal)
    needs = [n for n in step.declared_needs if 1 <= n <= len(answers)]
    # A placeholder of a later step is never filled; a later declared need is ignored.
    if any(not 1 <= n <= len(answers) or not answers[n - 1] for n in {*in_text, *needs}):
        return None
    goal = _PLACEHOLDER.sub(lambda match: answers[int(match[1]) - 1], step.goal)
    extra = ", ".join(answers[n - 1] for n in needs if n not in in_text)
    return f"{goal} (given {extra})" if extra else goal


def render_plan(goals: Sequence[str]) -> str:
    """Renders a plan as numbered lines."""
    return "\n".join(f"{i} {goal}" for i, goal in enumerate(goals, start=1))


# --- Analysis and answer ------------------------------------------------------------------------


def parse_analysis(text: str) -> ParsedAction:
    """Parses `{"status", "answer", "analysis"}`, or an analysis and a line `yes: answer` or `no`.

    The action is `yes` with the answer, or `no`. Another status is read as `yes` if there is an
    answer, and a `yes` without an answer as `no`. The analysis is the thought.
    """
    for value in json_values(text):
        if isinstance(value, Mapping) and value.keys() & {"status", "answer", "analysis"}:
            return _verdict(*(_string(value, (k,)) for k in ("status", "answer", "analysis")))
    # JSON with mistakes: read the fields one by one.
    if match := _STATUS.search(text):
        answer = _ANSWER.search(text)
        return _verdict(match[1], answer[1].strip() if answer else "", "")
    # The compact form: the last line that starts with yes or no is the verdict.
    verdicts = list(_VERDICT.finditer(text))
    if not verdicts:
        return invalid_action("No Status")
    status, rest = verdicts[-1].groups()
    before = text[: verdicts[-1].start()].strip()
    if status.lower() == YES:
        return _verdict(status, rest.strip(), before)
    return _verdict(status, "", before or rest.strip())


def _verdict(status: str, answer: str, analysis: str) -> ParsedAction:
    """Returns a verdict with the score of its form."""
    status = status.lower()
    valid, is_yes = status in (YES, NO), bool(answer) and status != NO
    # Each defect multiplies the score: no analysis, a wrong or missing status, a contradiction.
    score = 1.0 if analysis else 0.7
    score *= 1.0 if valid else 0.5 if status else 0.7
    score *= 0.8 if status == YES and not answer else 0.9 if status == NO and answer else 1.0
    error = "" if valid else "No Status"
    action, args = (YES, (answer,)) if is_yes else (NO, ())
    return ParsedAction(action, args, analysis, not error, error, score)


def render_analysis(analysis: str, answer: str = "") -> str:
    """Renders a verdict in the compact form; without an answer it is a `no`."""
    return f"{analysis}\n{f'{YES}: {answer}' if answer else NO}"


# --- Rewritten queries --------------------------------------------------------------------------


def parse_rewrite(text: str) -> ParsedAction:
    """Parses `{"rewritten_query", "strategy", "keywords"}`, or one line `strategy: query`.

    In other text the query is the value after `rewritten_query` (JSON with a mistake), or the first
    quoted string, or the first line. The strategy is the thought.
    """
    for value in json_values(text):
        if isinstance(value, Mapping) and "rewritten_query" in value:
            strategy = _string(value, ("strategy",))
            query = _string(value, ("rewritten_query",))
            return _query(query, strategy, (not strategy) + ("keywords" not in value))
    name, colon, rest = text.strip().partition(":")
    if colon and name.strip().lower() in STRATEGIES:
        return _query(rest.strip().split("\n")[0], name.strip().lower(), 0)
    # Other text: recover a query and name the fault.
    match = _QUERY.search(text) or _QUOTED.search(text)
    query = match["query"] if match else text.strip().split("\n")[0]
    return _query(query.strip(), "", 2, "No JSON")


def _query(query: str, strategy: str, missing: int, error: str = "") -> ParsedAction:
    """Returns a query with the score of its form; each missing field halves it."""
    score = 0.5**missing * (1.0 if query else 0.3)
    score *= 0.9 if strategy and strategy.lower() not in STRATEGIES else 1.0
    error = error if query else "Empty Query"
    return ParsedAction(REWRITE, (query,) if query else (), strategy, not error, error, score)


def render_rewrite(strategy: str, query: str) -> str:
    """Renders a rewritten query in the compact form."""
    return f"{strategy}: {query}"


# --- JSON ---------------------------------------------------------------------------------------


def json_values(text: str) -> Iterator[Any]:
    """Yields the JSON lists and objects in a text, at any position."""
    decoder = json.JSONDecoder()
    for opener in [match.start() for match in re.finditer(r"[\[{]", text)][:MAX_OPENERS]:
        try:
            yield decoder.raw_decode(text, opener)[0]
        except (ValueError, RecursionError):  # the latter from thousands of open brackets
            continue


def json_lines(text: str) -> list[Any]:
    """Returns the JSON values of the lines that start with a bracket; [] if any is incomplete."""
    lines = [line.strip() for line in text.split("\n") if line.lstrip().startswith(("{", "["))]
    try:
        return [json.loads(line.rstrip(",")) for line in lines]
    except (ValueError, RecursionError):
        return []


def _string(item: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the first existing field as text; empty for nested values and missing fields."""
    value = next((item[name] for name in names if name in item), "")
    return str(value).strip() if isinstance(value, str | int | float) else ""


# --- Strict grammars ----------------------------------------------------------------------------

# A plan refers to earlier steps alone, and no text contains brackets or braces that a parser could
# read as JSON.
_BRACKETS = "[]{}<"
_ESCAPED = '"\\'  # characters that a JSON string would have to escape
# Text of a JSON string, without escapes; it begins with a visible character.
_JSON_STRING = line(without=_BRACKETS + _ESCAPED)
_ANSWER_LINE = line(without=_BRACKETS, first=":,.")
_COMMA = r",(?: |\n )?"
_STRATEGY_NAME = choice(*STRATEGIES)


def strict_grammars(max_plan_steps: int) -> dict[str, str]:
    """Returns the regular expression of each role's actions; 0 steps: there is no planner."""
    strategy, keywords = (
        f'"strategy": "{_STRATEGY_NAME}"',
        f'"{_JSON_STRING}"(?:, "{_JSON_STRING}")*',
    )
    yes = f'"status": "{YES}", "answer": "{_JSON_STRING}"'
    no = f'"status": "{NO}", "answer": ""'
    compact = [f"{i} {_goal(i, '')}" for i in range(1, max_plan_steps + 1)]
    return {
        PLAN: choice(_json_plan(max_plan_steps), _prefixes(compact, r"\n")),
        ANALYSIS: choice(
            rf'\{{{choice(yes, no)}, "analysis": "{_JSON_STRING}"\}}',
            f"{line(without=_BRACKETS)}\n{choice(f'{YES}: {_ANSWER_LINE}', NO)}",
        ),
        REWRITE: choice(
            rf'\{{"rewritten_query": "{_JSON_STRING}", {strategy}, "keywords": \[{keywords}\]\}}',
            f"{_STRATEGY_NAME}: {line(without=_BRACKETS)}",
        ),
    }


def _json_plan(steps: int) -> str:
    objects = []
    for i in range(1, steps + 1):
        needs = rf"{_earlier(i)}(?:, {_earlier(i)})*" if i > 1 else ""
        goal = _goal(i, "answer ", without=_ESCAPED)
        objects.append(
            rf'\{{"subgoal_id": {i}, "subgoal": "{goal}", "dependencies": \[(?:{needs})?\]\}}'
        )
    return rf"\[{_prefixes(objects, _COMMA)}\]"


def _goal(i: int, label: str, without: str = "") -> str:
    """Text in which a bracket is a placeholder of an earlier step; it begins with a letter."""
    text = line(without=_BRACKETS + without)
    if i == 1:
        return text
    return rf"{text}(?:\[{label}{_earlier(i)}\]{character(_BRACKETS + without)}*)*"


def _earlier(i: int) -> str:
    """The number of a step before step `i`."""
    return choice(*(str(n) for n in range(1, i)))


def _prefixes(parts: list[str], separator: str) -> str:
    """One or more parts from the first one on."""
    pattern = ""
    for part in reversed(parts):
        pattern = part + (f"(?:{separator}{pattern})?" if pattern else "")
    return pattern
