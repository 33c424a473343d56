"""Tagged turns, and the conversations of CoDA's roles and of the single-agent baselines.

A turn is free text that ends with one action between tags, such as `<search>query</search>`. A
conversation only grows. Only the text of the agent is parsed, never an observation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from jax_ragrl.rollout.effects import Generate, ModelOutput, Observation, Search, Segment
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Shown, Steps
from jax_ragrl.text.patterns import between, choice, enclosed, line, lines
from jax_ragrl.text.prompts import format_passages, template
from jax_ragrl.types import Message

TAG_FAULTS = {
    "No Action": "The text holds no tag of an action.",
    "Empty Action": "The tag of the action holds no text.",
    "Out of Turns": "The last turn was spent without an answer.",
}

THINK, TASK, SEARCH, REFINE, ANSWER = "think", "task", "search", "refine", "answer"


# --- Grammar ------------------------------------------------------------------------------------


def parse_turn(text: str, actions: tuple[str, ...]) -> ParsedAction:
    """Parses the first of `actions` in a turn; the text between think tags is the thought."""
    action, content = next(_between(text, actions), ("", ""))
    if not content:
        return invalid_action("Empty Action" if action else "No Action")
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
    opening = re.compile(f"<({'|'.join(tags)})>")  # `re` caches compiled patterns
    for match, content in enclosed(text, opening, lambda match: re.compile(f"</{match[1]}>")):
        yield match[1], content.strip()


# --- Conversations ------------------------------------------------------------------------------


# From a valid or malformed action that is no answer, and the depth of the next action, to the text
# of the observation after it, and the depth after it. The text comes from a generator of effects.
Observe = Callable[[ParsedAction, int], Steps]


def converse(
    role: str, messages: tuple[Message, ...], max_turns: int, observe: Observe, depth: int = 1
) -> Steps:
    """Alternates actions of a role and observations until it answers.

    Args:
      role: the name of the role.
      messages: the prompt, which begins the conversation.
      max_turns: the maximum number of actions, malformed ones included.
      observe: yields the effects of an action, and returns the observation.
      depth: the depth of the first action.

    Returns:
      The answer, empty if there is none; why the conversation ended; the depth of the next action.
    """
    history: tuple[Segment, ...] = ()
    for turn in itertools.count(1):
        action = yield Generate(role, messages, depth, history)
        depth += 1
        if action.action == ANSWER:
            return action.args[0], "answered", depth
        # An action in the last turn is not carried out: no turn is left to read its result. There
        # are no ids if the sampler wrote nothing.
        if not action.ids or turn >= max_turns:
            return "", "Out of Turns" if action.ids else action.error, depth
        text, depth = yield from observe(action, depth)
        # Token in, token out: re-encoding decoded text could yield other ids than were sampled.
        history += (ModelOutput(action.ids), Observation(text))


def search_passages(style: str, top_k: int, chat: bool, action: ParsedAction, depth: int) -> Steps:
    """Performs the search of an action; a malformed one gets a reminder. See `Observe`.

    Args:
      style: the prompt style.
      top_k: passages per search.
      chat: see `observation`.
      action: the action.
      depth: the depth of the next action, which is returned as it is.
    """
    if action.action != SEARCH:
        return observation(style, "retry_executor", chat), depth
    hits = yield Search(action.args[0], top_k)
    yield Shown(hits.passages)
    documents = format_passages(style, hits.passages)
    return observation(style, "documents", chat, documents=documents), depth


def observation(style: str, name: str, chat: bool, **values: str) -> str:
    """Returns the text of an observation.

    Args:
      style: the prompt style.
      name: the name of the prompt.
      chat: whether observations are chat turns of the user; otherwise they are separate lines in
        the turn of the assistant.
      values: the values of the placeholders in the prompt.
    """
    text = template(style, name).substitute(values)
    return text if chat else f"\n{text}\n"
