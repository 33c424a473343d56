"""`ragrl pool`: OPERA's D_scored, actions written and scored before training.

The writer is a language model behind the interface of a frozen one, as the paper's is, or the
policy that will be trained. Every action is scored as in training, by carrying it out; the paper
scores plans by another rubric (eq. 14), which is `recipe.plan_reward=code`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ragrl.config import build
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import ActionRequest, ActionSampler, Environment, collect
from jax_ragrl.rollout.context import context_ids
from jax_ragrl.rollout.effects import Said
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.tree import Action
from jax_ragrl.systems.expert_pool import Candidate, Pool, Scribe, build_pool, candidates_of
from jax_ragrl.systems.mapgrpo import Groups, Injection
from jax_ragrl.systems.opera import Settings, recipe
from jax_ragrl.systems.opera_grammar import PLAN, REWRITE
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.train.assemble import assemble, load_job, load_llm, parse_llm
from jax_ragrl.types import LLMRequest, Message, Question

GROUP = 3  # candidates a decision and temperature: twelve at the four of the paper


class Ghostwriter:
    """A frozen language model in the place of a policy: what it writes is encoded as it stands.

    A request that it could not serve becomes an action without text, whose error says so.
    """

    def __init__(self, llm: FrozenLLM, tokenizer: ChatTokenizer):
        self._llm, self._tokenizer = llm, tokenizer

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """For each request the forced texts first, then the model's."""
        asked = [self._asked(r, i) for r in requests for i in range(r.branching.samples)]
        replies = iter(self._llm.complete(asked) if asked else [])
        return [
            [self._action(r, forced.text) for forced in r.branching.forced]
            + [self._action(r, next(replies)) for _ in range(r.branching.samples)]
            for r in requests
        ]

    def _asked(self, request: ActionRequest, number: int) -> LLMRequest:
        later = [
            Message("assistant", self._tokenizer.decode(segment.ids))
            if isinstance(segment, Said)
            else Message("user", segment.text)
            for segment in request.after
        ]
        role, seed = request.role, (request.seed + number) % 2**31
        return LLMRequest(role.name, (*request.messages, *later), role.sampling, seed)

    def _action(self, request: ActionRequest, reply: str | EffectError) -> Action:
        chat = request.role.chat
        prompt = context_ids(self._tokenizer, request.messages, request.after, chat)
        if isinstance(reply, EffectError):
            return Action(prompt, (), "", None, str(reply))
        stop = self._tokenizer.stop_ids[:1] if chat else ()
        return Action(prompt, (*self._tokenizer.encode(reply), *stop), reply)


def scored_pool(
    settings: Settings,
    questions: Sequence[Question],
    writers: Sequence[ActionSampler],
    retriever: Retriever,
    llm: FrozenLLM,
    temperatures: Sequence[float] = (1.0,),
) -> Pool:
    """What several writers try at every decision, at each temperature, by what it earned."""
    tries = [(writer, temperature) for writer in writers for temperature in temperatures]
    candidates: list[Candidate] = []
    for seed, (writer, temperature) in enumerate(tries):
        made = recipe(dataclasses.replace(settings, temperature=temperature))
        scribe = Scribe(writer)
        roles, off = frozenset(made.system.roles), Injection("off")
        groups = Groups(roles, GROUP, off, None, frozenset((PLAN,)), frozenset((REWRITE,)))
        environment = Environment(scribe, retriever, llm)
        forest = collect(made.system, groups, questions, environment, seed=seed)
        candidates += candidates_of(forest, made.reward(forest), scribe.prompts)
    return build_pool(candidates)


def make_pool(
    values: Mapping[str, Any],
    out: pathlib.Path,
    writer: str,
    temperatures: Sequence[float],
    count: int,
) -> dict[str, float]:
    """Writes the pool of the first `count` training questions (0: all) of an OPERA config.

    Args:
      values: of the config; its `recipe.pool` is not read.
      out: the file for `recipe.pool` of the run to come.
      writer: `policy`, or a language model as `assemble.parse_llm` reads it.
      temperatures: each gives its own candidates.

    Returns the pool's summary.
    """
    if values.get("system") != "opera":
        raise UserError(f"a pool is for system opera, but the config's is {values.get('system')!r}")
    values = {**values, "recipe": {**values.get("recipe", {}), "pool": ""}}
    job = load_job(values)
    parts = assemble(job, out.parent)
    author: ActionSampler = (
        PolicySampler(parts.models(), parts.tokenizer, job.shapes)
        if writer == "policy"
        else Ghostwriter(load_llm(parse_llm(writer), None, "", job.shapes), parts.tokenizer)
    )
    settings = build(Settings, values["recipe"], "config.recipe")
    questions = parts.questions["train"][: count or None]
    made = scored_pool(settings, questions, [author], parts.retriever, parts.llm, temperatures)
    made.save(out)
    return made.summary()
