"""A model on a server as the policy of a table, with worked examples in its prompts."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import TINY
from jax_ragrl.rollout.llm_policy import LLMActionSampler
from jax_ragrl.run.models import load_llm, policy_folder
from jax_ragrl.run.short_names import SERVER, parse_llm
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message
from jax_ragrl.warmstart.demos import Demo, load_demos


def served_policy(
    name: str,
    examples: pathlib.Path | None,
    shots: int,
    cache: pathlib.Path | None = None,
    **recorded: Any,
) -> tuple[LLMActionSampler, ChatTokenizer]:
    """Connects to the model `openai:MODEL[@URL]` on a server that plays all roles, greedily.

    `shots` examples per role come from a file of demonstrations; see `parse_llm` for `cache` and
    `recorded`. The tokenizer is that of the shipped policy, which only counts tokens.

    Raises:
      UserError: examples are given for a model that is not on a server.
    """
    if not name.startswith(SERVER):
        raise UserError(
            f"--examples {examples} precede the prompts of a policy on a server, but --policy is "
            f"{name}: give openai:MODEL@URL, or leave --examples out"
        )
    tokenizer = ChatTokenizer.load(policy_folder(TINY, weights=False))
    llm = load_llm(parse_llm(name, **recorded), None, "", Shapes(), cache=cache)
    messages = few_shots(load_demos(examples), shots) if examples else {}
    return LLMActionSampler(llm, tokenizer, temperature=0.0, examples=messages), tokenizer


def few_shots(demos: Sequence[Demo], count: int) -> dict[str, tuple[Message, ...]]:
    """Returns the first demonstrations of each role whose prompt is a single user turn."""
    shots: dict[str, tuple[Message, ...]] = {}
    for demo in demos:
        own = shots.get(demo.role, ())
        turns = [message for message in demo.prompt if message.role != "system"]
        # A later turn of a conversation would bring its earlier ones along.
        if len(own) < 2 * count and len(turns) == 1:
            shots[demo.role] = (*own, turns[0], Message("assistant", demo.reply))
    return shots
