"""Turns between tags, and the search loop that CoDA's executor shares with its relatives.

A turn is free text that ends with one action between tags, `<search>query</search>` for instance.
A context is a conversation that only grows; what it was told is never parsed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

from jax_ragrl.rollout.effects import Said, Segment, Told
from jax_ragrl.rollout.roles import Parsed, malformed

THINK, TASK, SEARCH, REFINE, ANSWER = "think", "task", "search", "refine", "answer"


# --- Grammar ------------------------------------------------------------------------------------


def parse_turn(text: str, actions: tuple[str, ...]) -> Parsed:
    """The first action of a turn with its content; what was thought is the thought."""
    found = _between(actions).search(text)
    if not found:
        return malformed("No Action")
    content = found[2].strip()
    if not content:
        return malformed("Empty Action")
    return Parsed(found[1], (content,), contents(text, THINK))


def contents(text: str, tag: str) -> str:
    """All that stands between a pair of tags, piece by piece in one line."""
    return " ".join(found[2].strip() for found in _between((tag,)).finditer(text))


def well_formed(text: str, tags: Sequence[str]) -> bool:
    """Whether each tag is opened, and closed as often as opened."""
    return all(0 < text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in tags)


def closing(actions: Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a role: an action ends where its tag closes."""
    return tuple(f"</{action}>" for action in actions)


def render_turn(**parts: str) -> str:
    """A turn as text: each part between its tags, in order; parts that are None are left out."""
    return "".join(f"<{tag}>{text}</{tag}>" for tag, text in parts.items() if text is not None)


@functools.cache
def _between(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(tags)})>(.*?)</\1>", re.DOTALL)


# --- Contexts and the loop ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Context:
    """A conversation about a question or a task: what was said and told in it so far."""

    about: str
    after: tuple[Segment, ...] = ()
    turns: int = 0

    def said(self, parsed: Parsed) -> Context:
        """With one more action, as the ids that were sampled; it takes a turn, valid or not."""
        after = (*self.after, Said(parsed.ids))
        return dataclasses.replace(self, after=after, turns=self.turns + 1)

    def told(self, text: str) -> Context:
        """With one more observation."""
        return dataclasses.replace(self, after=(*self.after, Told(text)))


@dataclasses.dataclass(frozen=True)
class Errand:
    """An agent that looks something up: it searches for `query`, or acts, or has ended.

    `why` says how it ended: `answered`, out of turns, or unable to write. Without an answer the
    result is empty.
    """

    context: Context
    query: str = ""
    result: str = ""
    why: str = ""

    def acted(self, parsed: Parsed, max_turns: int, retry: str) -> Errand:
        """After an action. A search in the last turn is not made: nobody would read it."""
        context = self.context.said(parsed)
        if parsed.action == ANSWER:
            return Errand(context, result=parsed.args[0], why="answered")
        if not parsed.ids or context.turns >= max_turns:
            return Errand(context, why="Out of Turns" if parsed.ids else parsed.error)
        if parsed.action == SEARCH:
            return Errand(context, query=parsed.args[0])
        return Errand(context.told(retry))

    def found(self, documents: str) -> Errand:
        """After a search."""
        return Errand(self.context.told(documents))
