"""Tagged turns, and the conversations of CoDA's roles and of the single-agent baselines.

A turn is free text that ends with one action between tags, such as `<search>query</search>`. A
conversation only grows. Only the text of the agent is parsed, never an observation.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from jax_ragrl.rollout.effects import Generate, ModelOutput, Observation, Search, Segment
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Shown, Steps
from jax_ragrl.text.patterns import between, choice, enclosed, line, lines
from jax_ragrl.text.prompts import fill, format_passages
from jax_ragrl.types import Message, Sampling

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


def turn_role(
    name: str, actions: tuple[str, ...], notes: Sequence[str], sampling: Sampling, chat: bool
) -> Role:
    """Returns a role whose turns end at the closing tag of one of its `actions`.

    In a strict grammar each of the tags `notes` may precede it once, in this order. With `chat`,
    observations are chat turns of the user.
    """
    before = "".join(f"(?:{between(tag, lines(without='<'))}\\n?)?" for tag in notes)
    return Role(
        name,
        functools.partial(parse_turn, actions=actions),
        sampling,
        stop_strings=tuple(f"</{action}>" for action in actions),
        as_chat_turns=chat,
        reads_thoughts=True,
        action_regex=before + choice(*(between(tag, line(without="<")) for tag in actions)),
    )


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

    The prompt `messages` begins the conversation; malformed actions count for `max_turns`; `depth`
    is that of the first action. Returns the answer, empty if there is none; why the conversation
    ended; and the depth of the next action.
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
    """Performs the search of an action; a malformed one gets a reminder. See `Observe`."""
    if action.action != SEARCH:
        return observation(style, "retry_executor", chat), depth
    hits = yield Search(action.args[0], top_k)
    yield Shown(hits.passages)
    documents = format_passages(style, hits.passages)
    return observation(style, "documents", chat, documents=documents), depth


def observation(style: str, name: str, chat: bool, **values: str) -> str:
    """Returns an observation, as a chat turn of the user or as lines in the assistant's turn."""
    text = fill(style, name, **values)
    return text if chat else f"\n{text}\n"
