"""`ragrl pool`: OPERA's D_scored, a pool of actions generated and scored before training.

The writer is a language model, as in the paper, or the policy that will be trained. Every action is
scored as in training, by executing it.

Departures from the paper:
  It scores plans by another rubric (eq. 14), which is `recipe.plan_reward=code`.
  Its golden plans, written from the supporting facts of a question, are not generated.
  Near duplicates are found by the encoder of the index if it has one, else by words.
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
from jax_ragrl.llm.base import FrozenLLM, without_thoughts
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.rollout.collect import ActionRequest, ActionSampler, Environment, collect
from jax_ragrl.rollout.context import action_ids, context_ids
from jax_ragrl.rollout.effects import ModelOutput
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.tree import Action
from jax_ragrl.run.components import build_components, load_llm
from jax_ragrl.run.config import load_job, model_of, parse_llm
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.systems.opera import Settings, recipe
from jax_ragrl.systems.opera.expert_pool import (
    Candidate,
    Pool,
    RecordingSampler,
    Similarity,
    build_pool,
    candidates_of,
    vector_cosines,
    word_cosines,
)
from jax_ragrl.systems.opera.grammar import PLAN, REWRITE
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest, Message, Question
from jax_ragrl.warmstart.resumable import (
    ItemResults,
    OutputKind,
    claim_output,
    failure_summary,
    run_resumable,
    unique_questions,
)

POOL_OUTPUT = OutputKind("rollout", "candidates")
GROUP = 3  # candidates per decision and temperature; 12 at the four temperatures of the paper
BEGIN = "\n\nBegin your reply with exactly this text: "


class LLMActionSampler:
    """An action sampler that is a language model instead of a policy.

    Replies are stripped, cut after the first stop string of the role, and encoded. A failed request
    becomes an action without text and with an error message.

    Args:
      llm: the language model.
      tokenizer: the tokenizer of the policy.
      temperature: sampling temperature of all roles; None: that of each role.
    """

    def __init__(self, llm: FrozenLLM, tokenizer: ChatTokenizer, temperature: float | None = None):
        self._llm, self._tokenizer, self._temperature = llm, tokenizer, temperature

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Returns for each request the forced actions in order, then the sampled ones."""
        llm_requests = [
            self._llm_request(r, i, start) for r in requests for i, start in enumerate(_starts(r))
        ]
        replies = iter(self._llm.complete(llm_requests) if llm_requests else [])
        own = [(r, [next(replies) for _ in _starts(r)]) for r in requests]
        return [
            [self._action(r, text) for text in _texts(r, iter(_without_thoughts(r.role, texts)))]
            for r, texts in own
        ]

    def _llm_request(self, request: ActionRequest, number: int, start: str) -> LLMRequest:
        *before, last = conversation(self._tokenizer, request)
        if start:
            last = last._replace(content=last.content + BEGIN + start)
        # Siblings of a request have consecutive seeds; servers take 31-bit numbers.
        role, seed = request.role, (request.seed + number) % 2**31
        sampling = role.sampling
        if self._temperature is not None:
            sampling = sampling._replace(temperature=self._temperature)
        return LLMRequest(role.name, (*before, last), sampling, seed)

    def _action(self, request: ActionRequest, reply: str | EffectError) -> Action:
        role = request.role
        prompt = context_ids(self._tokenizer, request.messages, request.history, role.as_chat_turns)
        if isinstance(reply, EffectError):
            return Action(prompt, (), "", None, str(reply))
        text = _cut(reply.strip(), role.stop_strings)
        return Action(prompt, action_ids(self._tokenizer, text, role.as_chat_turns), text)


def conversation(tokenizer: ChatTokenizer, request: ActionRequest) -> tuple[Message, ...]:
    """Returns the context of an action as messages; earlier actions are assistant messages."""
    later = [
        Message("assistant", tokenizer.decode(segment.ids))
        if isinstance(segment, ModelOutput)
        else Message("user", segment.text)
        for segment in request.history
    ]
    return (*request.messages, *later)


def _starts(request: ActionRequest) -> list[str]:
    """Returns the required start of each reply to a request: forced prefixes, then ''."""
    actions = request.branching.forced_actions
    starts = [action.text for action in actions if not action.complete]
    return starts + [""] * request.branching.samples


def _texts(request: ActionRequest, replies: Iterator[str | EffectError]) -> list[str | EffectError]:
    """Returns the texts of the actions of a request, taking their replies from an iterator."""
    texts = [
        f.text if f.complete else _with_start(request.role, f.text, next(replies))
        for f in request.branching.forced_actions
    ]
    return texts + [next(replies) for _ in range(request.branching.samples)]


def _without_thoughts(
    role: Role, replies: Sequence[str | EffectError]
) -> Sequence[str | EffectError]:
    """Returns replies as texts of actions: a writer's reasoning is kept if the grammar has it."""
    return replies if role.reads_thoughts else without_thoughts(replies)


def _with_start(role: Role, start: str, reply: str | EffectError) -> str | EffectError:
    """Returns a reply with the required start.

    A reply without it is taken for the continuation, unless it is a valid action on its own.
    """
    if isinstance(reply, EffectError) or reply.strip().startswith(start):
        return reply
    return reply if role.parse(reply.strip()).valid else f"{start} {reply.strip()}"


def _cut(text: str, stops: Sequence[str]) -> str:
    """Returns a text up to the end of its first stop string."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends, default=None)]


# --- The pool -------------------------------------------------------------------------------------


class PoolRollout(NamedTuple):
    """A rollout of a question at a temperature; `seed` is the index of the temperature."""

    question: Question
    seed: int
    temperature: float

    @property
    def id(self) -> str:
        """A unique id."""
        return f"{self.seed} {self.question.id}"


def score_candidates(
    settings: Settings,
    writer: ActionSampler,
    retriever: Retriever,
    llm: FrozenLLM,
    items: Sequence[PoolRollout],
) -> ItemResults:
    """Generates candidates at every decision of some rollouts, and scores them.

    Args:
      settings: OPERA's settings.
      writer: samples the actions.
      retriever: the retriever.
      llm: the frozen language model.
      items: the rollouts; consecutive ones of one temperature are run together.
    """
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for _, equal in itertools.groupby(items, key=lambda rollout: rollout.seed):
        # One temperature at a time, since it is part of the system.
        rollouts = list(equal)
        system = dataclasses.replace(settings.system, temperature=rollouts[0].temperature)
        opera = recipe(dataclasses.replace(settings, system=system))
        recorder = RecordingSampler(writer)
        roles, off = frozenset(opera.system.roles), Injection("off")
        groups = Groups(roles, GROUP, off, None, frozenset((PLAN,)), frozenset((REWRITE,)))
        environment = Environment(recorder, retriever, llm)
        questions = [rollout.question for rollout in rollouts]
        forest = collect(opera.system, groups, questions, environment, seed=rollouts[0].seed)
        rows += [
            {POOL_OUTPUT.item: rollouts[question].id, **candidate._asdict()}
            for question, candidate in candidates_of(forest, opera.reward(forest), recorder.prompts)
        ]
        errors |= {rollouts[question].id: error for question, error in forest.errors().items()}
    return ItemResults(rows, errors)


def make_pool(
    values: Mapping[str, Any],
    out: pathlib.Path,
    writer: str,
    temperatures: Sequence[float],
    count: int,
) -> dict[str, Any]:
    """Writes the expert pool of an OPERA config.

    The same call resumes an interrupted one and retries failed rollouts. All candidates, the
    settings and a log with one line per question and temperature are written next to `out`.

    Args:
      values: the config of a run; its `recipe.expert_pool` is ignored.
      out: the pool file, for `recipe.expert_pool`.
      writer: `policy`, or a language model as `parse_llm` reads it.
      temperatures: sampling temperatures; each generates its own candidates.
      count: number of training questions; 0: all.

    Returns:
      The summary of the pool, and the number of failed rollouts.
    """
    if values.get("system") != "opera":
        raise UserError(
            f"config.system is {values.get('system')!r}, but a pool is for opera: use a config of "
            "that system"
        )
    # The pool does not exist yet, and must not influence its own candidates.
    values = {**values, "recipe": {**values.get("recipe", {}), "expert_pool": ""}}
    job = load_job(values)
    if out.exists() and not candidates_file(out).exists():
        raise UserError(f"{out} exists and was not written by 'ragrl pool': choose another --out")
    parts = build_components(job, out.parent)
    sampler: ActionSampler = (
        PolicySampler(parts.models(), parts.tokenizer, job.shapes)
        if writer == "policy"
        else LLMActionSampler(load_llm(parse_llm(writer), None, "", job.shapes), parts.tokenizer)
    )
    settings = build(Settings, values["recipe"], "config.recipe")
    questions = unique_questions(parts.questions["train"])[: count or None]
    source = functools.partial(score_candidates, settings, sampler, parts.retriever, parts.llm)
    call = {**values, "writer": model_of(writer), "temperatures": temperatures}
    claim_output(candidates_file(out), call, POOL_OUTPUT)
    rollouts = pool_rollouts(questions, temperatures)
    return collect_pool(source, rollouts, out, similarity_of(parts.retriever))


def pool_of_rows(rows: Iterable[Mapping[str, Any]], similarity: Similarity = word_cosines) -> Pool:
    """Builds the pool from rows of `score_candidates`, without near duplicates."""
    candidates = (Candidate(*(row[key] for key in Candidate._fields)) for row in rows)
    return build_pool(candidates, similarity=similarity)


def similarity_of(retriever: Retriever) -> Similarity:
    """Returns the similarity of texts by the encoder of a retriever, or by words without one."""
    encoder = getattr(retriever, "encoder", None)
    if encoder is None or isinstance(encoder, HashedEncoder):
        return word_cosines
    return functools.partial(vector_cosines, encoder.encode_queries)


def pool_rollouts(
    questions: Sequence[Question], temperatures: Sequence[float]
) -> list[PoolRollout]:
    """Returns a rollout per question and temperature, ordered by temperature."""
    return [
        PoolRollout(question, i, t) for i, t in enumerate(temperatures) for question in questions
    ]


def candidates_file(out: pathlib.Path) -> pathlib.Path:
    """Returns the path of the file next to a pool with one line per candidate."""
    return out.with_suffix(".candidates.jsonl")


def collect_pool(
    source: Callable[[Sequence[PoolRollout]], ItemResults],
    rollouts: Sequence[PoolRollout],
    out: pathlib.Path,
    similarity: Similarity = word_cosines,
) -> dict[str, Any]:
    """Generates missing candidates, and writes the pool of all candidates.

    Args:
      source: generates and scores the candidates of some rollouts.
      rollouts: all rollouts; finished ones are skipped.
      out: the pool file.
      similarity: of the actions of one prompt, of which near duplicates are dropped.

    Returns:
      The summary of the pool, and the number of failed rollouts.
    """
    file = candidates_file(out)
    run_resumable(source, rollouts, file, POOL_OUTPUT)
    pool, failures = (
        pool_of_rows(read_rows(file), similarity),
        failure_summary(list(read_rows(POOL_OUTPUT.log(file)))),
    )
    if not pool.candidates:
        reason = failures.get("error", "there are no questions")
        raise UserError(
            f"no action was generated ({reason}), so there is no pool: fix this and rerun the same "
            "command"
        )
    pool.save(out)
    return {**pool.summary(), **failures}
