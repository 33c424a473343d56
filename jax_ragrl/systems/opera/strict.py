"""Strict grammars of OPERA's roles: the JSON form of the prompts, or the compact form.

A plan refers to earlier steps alone, and no text contains brackets or braces that a parser could
read as JSON.
"""

from __future__ import annotations

from jax_ragrl.systems.opera.grammar import ANALYSIS, NO, PLAN, REWRITE, STRATEGIES, YES
from jax_ragrl.text.patterns import character, choice, line

_BRACKETS = "[]{}<"
_ESCAPED = '"\\'  # characters that a JSON string would have to escape
# Text of a JSON string, without escapes; it begins with a visible character.
_STRING = line(without=_BRACKETS + _ESCAPED)
_ANSWER = line(without=_BRACKETS, first=":,.")
_COMMA = r",(?: |\n )?"
_STRATEGY = choice(*STRATEGIES)


def strict_grammars(max_plan_steps: int) -> dict[str, str]:
    """Returns the regular expression of each role's actions.

    Args:
      max_plan_steps: the most steps of a plan; 0 if there is no planner.
    """
    strategy, keywords = f'"strategy": "{_STRATEGY}"', f'"{_STRING}"(?:, "{_STRING}")*'
    yes = f'"status": "{YES}", "answer": "{_STRING}"'
    no = f'"status": "{NO}", "answer": ""'
    compact = [f"{i} {_goal(i, '')}" for i in range(1, max_plan_steps + 1)]
    return {
        PLAN: choice(_json_plan(max_plan_steps), _prefixes(compact, r"\n")),
        ANALYSIS: choice(
            rf'\{{{choice(yes, no)}, "analysis": "{_STRING}"\}}',
            f"{line(without=_BRACKETS)}\n{choice(f'{YES}: {_ANSWER}', NO)}",
        ),
        REWRITE: choice(
            rf'\{{"rewritten_query": "{_STRING}", {strategy}, "keywords": \[{keywords}\]\}}',
            f"{_STRATEGY}: {line(without=_BRACKETS)}",
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
