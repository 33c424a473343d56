"""Tagged turns, and the search loop that CoDA's executor shares with the single-agent baselines.

A turn is free text that ends with one action between tags, such as `<search>query</search>`. A
conversation only grows. Only the text of the agent is parsed, never an observation.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from jax_ragrl.rollout.effects import ModelOutput, Observation, Segment
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.text.patterns import between, choice, enclosed, line, lines

THINK, TASK, SEARCH, REFINE, ANSWER = "think", "task", "search", "refine", "answer"


# --- Grammar ------------------------------------------------------------------------------------


def parse_turn(text: str, actions: tuple[str, ...]) -> ParsedAction:
    """Parses the first of `actions` in a turn; the text between think tags is the thought."""
    action, content = next(_between(text, actions), ("", ""))
    if not action:
        return invalid_action("No Action")
    if not content:
        return invalid_action("Empty Action")
    return ParsedAction(action, (content,), tag_contents(text, THINK))


def tag_contents(text: str, tag: str) -> str:
    """Returns the text of all pairs of a tag, joined by spaces."""
    return " ".join(content for _, content in _between(text, (tag,)))


def tags_match(text: str, tags: Sequence[str]) -> bool:
    """Returns whether each tag occurs, with as many closing as opening ones."""
    return all(0 < text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in tags)


def stop_strings(actions: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings of a role: sampling ends at the closing tag of an action."""
    return tuple(f"</{action}>" for action in actions)


def turn_regex(actions: Sequence[str], notes: Sequence[str] = (THINK,)) -> str:
    """Returns the regular expression of a turn: notes between tags, then one action.

    Args:
      actions: the tags of the action, which is one line of text.
      notes: the tags that may precede it, each at most once, in this order.
    """
    before = (f"(?:{between(tag, lines(without='<'))}\\n?)?" for tag in notes)
    return "".join(before) + choice(*(between(tag, line(without="<")) for tag in actions))


def render_turn(**parts: str | None) -> str:
    """Renders a turn: each part between tags of its name, in order; None omits a part."""
    return "".join(f"<{tag}>{text}</{tag}>" for tag, text in parts.items() if text is not None)


def _between(text: str, tags: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields the tag and the content of each pair of `tags`, from left to right."""
    for match, content in enclosed(text, _opening(tags), lambda match: _closing(match[1])):
        yield match[1], content.strip()


@functools.cache
def _opening(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"<({'|'.join(tags)})>")


@functools.cache
def _closing(tag: str) -> re.Pattern[str]:
    return re.compile(f"</{tag}>")


# --- Conversations and the search loop ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The conversation of one agent about a question or a task.

    Fields:
      about: the text of the question or the task.
      history: the actions of the agent and the observations so far.
      turns: the number of actions, malformed ones included.
    """

    about: str
    history: tuple[Segment, ...] = ()
    turns: int = 0

    def with_action(self, action: ParsedAction) -> Conversation:
        """Appends an action as the sampled token ids; also a malformed action uses a turn."""
        # Token in, token out: re-encoding decoded text could yield other ids than were sampled.
        history = (*self.history, ModelOutput(action.ids))
        return dataclasses.replace(self, history=history, turns=self.turns + 1)

    def with_observation(self, text: str) -> Conversation:
        """Appends an observation."""
        return dataclasses.replace(self, history=(*self.history, Observation(text)))


@dataclasses.dataclass(frozen=True)
class SearchLoop:
    """An agent that searches until it answers: a pure state.

    Fields:
      conversation: the conversation so far.
      query: the query of the pending search; empty if the agent acts next.
      result: the answer; empty if there is none.
      finish_reason: why the loop ended: `answered`, out of turns, or a sampler error. Empty before.
    """

    conversation: Conversation
    query: str = ""
    result: str = ""
    finish_reason: str = ""

    def after_action(self, action: ParsedAction, max_turns: int, retry: str) -> SearchLoop:
        """Returns the state after an action.

        Args:
          action: the parsed action; without ids if the sampler wrote nothing.
          max_turns: the maximum number of actions.
          retry: the observation after a malformed action.
        """
        conversation = self.conversation.with_action(action)
        if action.action == ANSWER:
            return SearchLoop(conversation, result=action.args[0], finish_reason="answered")
        # A search in the last turn is not performed: no turn is left to read its passages.
        if not action.ids or conversation.turns >= max_turns:
            reason = "Out of Turns" if action.ids else action.error
            return SearchLoop(conversation, finish_reason=reason)
        if action.action == SEARCH:
            return SearchLoop(conversation, query=action.args[0])
        return SearchLoop(conversation.with_observation(retry))

    def after_search(self, documents: str) -> SearchLoop:
        """Returns the state after a search; `documents` is the text of its passages."""
        return SearchLoop(self.conversation.with_observation(documents))
