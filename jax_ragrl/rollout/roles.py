"""Roles: a name, a policy, sampling settings and a grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ragrl.config.functions import own_code
from jax_ragrl.errors import UserError
from jax_ragrl.text.thoughts import split_thought
from jax_ragrl.types import Sampling

UNCLOSED_THOUGHT = "Unclosed Thought"  # the error of an action whose think block never ends
TOO_LONG = "Prompt Too Long"  # the error of an action whose prompt fits no static shape
# The faults of any system, each with a sentence; a system declares its own in the same way.
FAULTS = {
    TOO_LONG: "The prompt exceeds the longest static shape, so nothing was sampled.",
    UNCLOSED_THOUGHT: "The think block never ends.",
}


class ParsedAction(NamedTuple):
    """The parse of an action.

    Fields:
      action, args: its name, such as `Retrieval`, and its arguments.
      thought: the reasoning before the action, as the grammar of the role has it. It excludes a
        think block, because systems show thoughts in later prompts.
      valid, error: whether the text follows the grammar, and else the kind of violation.
      format_score: a grade of the form, 0 to 1.
      text, ids: the action as it was sampled, which `parse_action` and the rollout fill in:
        penalties read the raw text after a think block, and contexts continue with the ids, the
        block included.
    """

    action: str
    args: tuple[Any, ...] = ()
    thought: str = ""
    valid: bool = True
    error: str = ""
    format_score: float = 1.0
    text: str = ""
    ids: tuple[int, ...] = ()


def invalid_action(error: str) -> ParsedAction:
    """Returns the parse of a text that violates the grammar in the way that `error` names."""
    return ParsedAction("", valid=False, error=error, format_score=0.0)


@dataclasses.dataclass(frozen=True)
class Role:
    """A role of a system: how its actions are sampled and parsed.

    Fields:
      parse: the grammar. It returns `invalid_action(...)` for a text that violates the grammar and
        never raises.
      policy: the name of the parameters that write the actions.
      stop_strings: an action ends with the model's stop token, or earlier with the shortest ids
        whose text contains one of these strings.
      as_chat_turns: whether observations are user turns of the chat template. If not, they are
        appended as plain text.
      allowed_token_regex: if not empty, only stop tokens and tokens whose text matches this regular
        expression may be written. This grammar mask applies in sampling and in scoring.
      thinking: whether an action may begin with a think block, which is not parsed.
      reads_thoughts: whether the grammar has think tags, so that it parses the block too.
      action_regex: a regular expression that describes whole actions, each of which `parse`
        accepts: the syntax of Rust's `regex` crate, matched to the whole text. With stop strings,
        it ends with one of them. Used if `strict` is set.
      strict: whether an action has to match `action_regex`, in sampling and in scoring; then
        `allowed_token_regex` is not used.
      chooses: whether it chooses among the passages of the latest note `Shown`; reports mark them.
    """

    name: str
    parse: Callable[[str], ParsedAction]
    sampling: Sampling = Sampling()
    policy: str = "policy"
    stop_strings: tuple[str, ...] = ()
    as_chat_turns: bool = True
    allowed_token_regex: str = ""
    thinking: bool = False
    reads_thoughts: bool = False
    action_regex: str = ""
    strict: bool = False
    chooses: bool = False


def parse_action(role: Role, text: str) -> ParsedAction:
    """Parses the text of an action by the grammar of its role, without the think block before it.

    It is parsed as a whole if the role does not think, or if its grammar has think tags.
    """
    if not role.thinking or role.reads_thoughts:
        return checked_parse(role, text)._replace(text=text)
    _, rest = split_thought(text)
    if rest is None:
        return invalid_action(UNCLOSED_THOUGHT)._replace(text=text)
    return checked_parse(role, rest)._replace(text=rest)


def checked_parse(role: Role, text: str) -> ParsedAction:
    """Returns the parse of a text; `UserError` if the parser raises or returns something else."""
    name = f"the parser of role {role.name!r}"
    with own_code(name):
        parsed = role.parse(text)
    if not isinstance(parsed, ParsedAction):
        raise UserError(
            f"{name} returned {parsed!r:.80} for {text!r:.80}: return a ParsedAction, for a "
            "malformed text that of invalid_action"
        )
    return parsed
