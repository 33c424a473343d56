"""`ragrl pool`: OPERA's D_scored, actions written and scored before training.

The writer is a language model behind the interface of a frozen one, as the paper's is, or the
policy that will be trained. Every action is scored as in training, by carrying it out; the paper
scores plans by another rubric (eq. 14), which is `recipe.plan_reward=code`. Its golden plans,
written from a question's supporting facts, are not asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.config.schema import build
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import ActionRequest, ActionSampler, Environment, collect
from jax_ragrl.rollout.context import context_ids, written_ids
from jax_ragrl.rollout.effects import Said
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.tree import Action
from jax_ragrl.run.components import assemble, load_llm
from jax_ragrl.run.config import load_job, model_of, parse_llm
from jax_ragrl.runtime.jsonl import rows_of
from jax_ragrl.systems.opera.expert_pool import Candidate, Pool, Scribe, build_pool, candidates_of
from jax_ragrl.systems.opera.grammar import PLAN, REWRITE
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.systems.opera.system import Settings, recipe
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest, Message, Question
from jax_ragrl.warmstart.resumable import Kind, Made, begin, distinct, failures, gather

TRIES = Kind("rollout", "candidates")
GROUP = 3  # candidates a decision and temperature: twelve at the four of the paper
BEGIN = "\n\nBegin your reply with exactly this text: "


class Ghostwriter:
    """A frozen language model in the place of a policy: what it writes is encoded as it stands, but
    for space around it and what comes after a role's stop string.

    A request that it could not serve becomes an action without text, whose error says so. Where
    there is a `temperature`, it is every role's.
    """

    def __init__(self, llm: FrozenLLM, tokenizer: ChatTokenizer, temperature: float | None = None):
        self._llm, self._tokenizer, self._temperature = llm, tokenizer, temperature

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """For each request the forced actions in order, then the model's."""
        asked = [self._asked(r, i, start) for r in requests for i, start in enumerate(_starts(r))]
        replies = iter(self._llm.complete(asked) if asked else [])
        return [[self._action(r, text) for text in _texts(r, replies)] for r in requests]

    def _asked(self, request: ActionRequest, number: int, start: str) -> LLMRequest:
        *before, last = conversation(self._tokenizer, request)
        told = last._replace(content=last.content + BEGIN + start) if start else last
        role, seed = request.role, (request.seed + number) % 2**31
        sampling = role.sampling
        if self._temperature is not None:
            sampling = sampling._replace(temperature=self._temperature)
        return LLMRequest(role.name, (*before, told), sampling, seed)

    def _action(self, request: ActionRequest, reply: str | EffectError) -> Action:
        role = request.role
        prompt = context_ids(self._tokenizer, request.messages, request.after, role.chat)
        if isinstance(reply, EffectError):
            return Action(prompt, (), "", None, str(reply))
        text = _cut(reply.strip(), role.stops)
        return Action(prompt, written_ids(self._tokenizer, text, role.chat), text)


def conversation(tokenizer: ChatTokenizer, request: ActionRequest) -> tuple[Message, ...]:
    """The whole context of an action as messages, its earlier actions those of the assistant."""
    later = [
        Message("assistant", tokenizer.decode(segment.ids))
        if isinstance(segment, Said)
        else Message("user", segment.text)
        for segment in request.after
    ]
    return (*request.messages, *later)


def _starts(request: ActionRequest) -> list[str]:
    """What each reply to a request is to begin with: forced prefixes first, then nothing."""
    forced = [forced.text for forced in request.branching.forced if not forced.complete]
    return forced + [""] * request.branching.samples


def _texts(request: ActionRequest, replies: Iterator[str | EffectError]) -> list[str | EffectError]:
    """The texts of a request's actions in order, out of the replies to all requests."""
    forced = [
        f.text if f.complete else _begun(request.role, f.text, next(replies))
        for f in request.branching.forced
    ]
    return forced + [next(replies) for _ in range(request.branching.samples)]


def _begun(role: Role, start: str, reply: str | EffectError) -> str | EffectError:
    """A reply that was to begin with `start`. One that does not is taken for the rest of it, unless
    it is another action by itself."""
    if isinstance(reply, EffectError) or reply.strip().startswith(start):
        return reply
    return reply if role.parse(reply.strip()).valid else f"{start} {reply.strip()}"


def _cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the end of the first stop string in it."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends, default=None)]


# --- The pool -------------------------------------------------------------------------------------


class Try(NamedTuple):
    """A rollout of a question at a temperature; `seed` is the temperature's number."""

    question: Question
    seed: int
    temperature: float

    @property
    def id(self) -> str:
        """No other try has it."""
        return f"{self.seed} {self.question.id}"


def scored(
    settings: Settings,
    writer: ActionSampler,
    retriever: Retriever,
    llm: FrozenLLM,
    tries: Sequence[Try],
) -> Made:
    """What a writer tries at every decision of some rollouts, and what each of it earned."""
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for _, same in itertools.groupby(tries, key=lambda each: each.seed):
        some = list(same)
        made = recipe(dataclasses.replace(settings, temperature=some[0].temperature))
        scribe = Scribe(writer)
        roles, off = frozenset(made.system.roles), Injection("off")
        groups = Groups(roles, GROUP, off, None, frozenset((PLAN,)), frozenset((REWRITE,)))
        environment = Environment(scribe, retriever, llm)
        questions = [each.question for each in some]
        forest = collect(made.system, groups, questions, environment, seed=some[0].seed)
        rows += [
            {TRIES.item: some[question].id, **candidate._asdict()}
            for question, candidate in candidates_of(forest, made.reward(forest), scribe.prompts)
        ]
        failed |= {some[question].id: why for question, why in forest.errors().items()}
    return Made(rows, failed)


def make_pool(
    values: Mapping[str, Any],
    out: pathlib.Path,
    writer: str,
    temperatures: Sequence[float],
    count: int,
) -> dict[str, Any]:
    """Writes the pool of the first `count` training questions (0: all) of an OPERA config.

    The same call goes on where it stood, and tries again what failed. Beside `out` it keeps all
    candidates, what it was called with, and a line a question and temperature.

    Args:
      values: of the config; its `recipe.pool` is not read.
      out: the file for `recipe.pool` of the run to come.
      writer: `policy`, or a language model as `job.parse_llm` reads it.
      temperatures: each gives its own candidates.

    Returns the pool's summary, and how many rollouts failed.
    """
    if values.get("system") != "opera":
        raise UserError(f"a pool is for system opera, but the config's is {values.get('system')!r}")
    values = {**values, "recipe": {**values.get("recipe", {}), "pool": ""}}
    job = load_job(values)
    if out.exists() and not candidates_file(out).exists():
        raise UserError(f"{out} is there, and was not made by 'ragrl pool': name another --out")
    parts = assemble(job, out.parent)
    author: ActionSampler = (
        PolicySampler(parts.models(), parts.tokenizer, job.shapes)
        if writer == "policy"
        else Ghostwriter(load_llm(parse_llm(writer), None, "", job.shapes), parts.tokenizer)
    )
    settings = build(Settings, values["recipe"], "config.recipe")
    questions = distinct(parts.questions["train"])[: count or None]
    source = functools.partial(scored, settings, author, parts.retriever, parts.llm)
    given = {**values, "writer": model_of(writer), "temperatures": temperatures}
    begin(candidates_file(out), given, TRIES)
    return gather_pool(source, tries_of(questions, temperatures), out)


def pool_of(rows: Iterable[Mapping[str, Any]]) -> Pool:
    """The pool of candidates that `scored` gave."""
    return build_pool(Candidate(*(row[key] for key in Candidate._fields)) for row in rows)


def tries_of(questions: Sequence[Question], temperatures: Sequence[float]) -> list[Try]:
    """Every question at every temperature, one temperature after the other."""
    return [Try(question, i, t) for i, t in enumerate(temperatures) for question in questions]


def candidates_file(out: pathlib.Path) -> pathlib.Path:
    """The file beside a pool with all that was written for it, a line a candidate."""
    return out.with_suffix(".candidates.jsonl")


def gather_pool(
    source: Callable[[Sequence[Try]], Made], tries: Sequence[Try], out: pathlib.Path
) -> dict[str, Any]:
    """Writes the pool of all candidates that were ever gathered for it; returns its summary."""
    file = candidates_file(out)
    gather(source, tries, file, TRIES)
    pool, lost = pool_of(rows_of(file)), failures(list(rows_of(TRIES.log(file))))
    if not pool.candidates:
        why = lost.get("error", "nothing was asked")
        raise UserError(f"no action could be written, and there is no pool: {why}")
    pool.save(out)
    return {**pool.summary(), **lost}
