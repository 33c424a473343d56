"""A pool of actions that were scored before training; the best one for a prompt is its expert.

OPERA's D_scored (eq. 11): some ten candidates an instance, from large models at several
temperatures, scored by carrying them out, near duplicates left out. The paper's has 30,000
candidates for 3,000 questions with a mean score of 0.73.

Algorithm 1 looks an expert up by question for a plan, and by sub-goal, D_scored(p), for the others,
whatever documents are shown. Here a prompt that was scored as it stands has its own best candidate,
and any other prompt that of its question or sub-goal.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import ActionRequest, ActionSampler
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.tree import Action, Forest
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.systems.opera.grammar import ANALYSIS, REWRITE, YES, parse_analysis
from jax_ragrl.text.metrics import CLOSED, cover_match_tokens, normalise

_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)
_WORD = re.compile(r"\w+")


class Candidate(NamedTuple):
    """An action for a prompt of a role, and what it earned."""

    role: str
    prompt: str
    text: str
    score: float


class Scribe:
    """A sampler that remembers what it was asked, by the ids of the prompt."""

    def __init__(self, sampler: ActionSampler):
        self._sampler = sampler
        self.prompts: dict[tuple[int, ...], ActionRequest] = {}

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """What the sampler behind it writes."""
        written = self._sampler.sample(requests)
        for request, actions in zip(requests, written, strict=True):
            self.prompts |= {action.prompt_ids: request for action in actions}
        return written


def candidates_of(
    forest: Forest, reward_N: np.ndarray, prompts: Mapping[tuple[int, ...], ActionRequest]
) -> list[tuple[int, Candidate]]:
    """Every action of a forest with its reward, after the number of its question.

    `prompts` are those of the `Scribe` that wrote.
    """
    return [
        (
            r.question,
            Candidate(r.role, _text(prompts[r.action.prompt_ids]), r.action.text, float(reward)),
        )
        for r, reward in zip(forest.records, reward_N, strict=True)
        if r.action is not None and not r.action.error
    ]


def _text(request: ActionRequest) -> str:
    return request.messages[-1].content


@dataclasses.dataclass(frozen=True)
class Pool:
    """Candidates by role and prompt, the best first. As an `Expert` it gives the best one."""

    candidates: Mapping[tuple[str, str], tuple[Candidate, ...]]

    def __call__(self, effect: Generate, question: str) -> str | None:
        del question
        role, prompt = effect.role, effect.messages[-1].content
        if known := self.candidates.get((role, prompt)):
            return known[0].text
        known = self._by_goal.get((role, goal_of(role, prompt)), ())
        return best_elsewhere(role, prompt, known)

    @functools.cached_property
    def _by_goal(self) -> Mapping[tuple[str, str], tuple[Candidate, ...]]:
        """The candidates of all prompts about the same thing, the best first."""
        found: dict[tuple[str, str], list[Candidate]] = collections.defaultdict(list)
        for candidate in self:
            if goal := goal_of(candidate.role, candidate.prompt):
                found[candidate.role, goal].append(candidate)
        return {key: tuple(sorted(some, key=_rank)) for key, some in found.items()}

    def __iter__(self) -> Iterator[Candidate]:
        return (candidate for known in self.candidates.values() for candidate in known)

    def summary(self) -> dict[str, float]:
        """Counts, the scores' mean and deviation, and the shares above 0.85 and below 0.5."""
        score_X = np.array([candidate.score for candidate in self] or [np.nan])
        return {
            "instances": float(len(self.candidates)),
            "candidates": float(sum(map(len, self.candidates.values()))),
            "mean": float(score_X.mean()),
            "deviation": float(score_X.std()),
            "high": float((score_X > 0.85).mean()),
            "low": float((score_X < 0.5).mean()),
        }

    def save(self, file: pathlib.Path) -> None:
        """One JSON line a candidate; the file is written whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_rows(file, (candidate._asdict() for candidate in self))


def load_pool(file: pathlib.Path) -> Pool:
    """What `save` wrote; nothing is filtered again.

    Raises:
      UserError: the file is missing, or a line of it is no candidate.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        rows = [Candidate(**json.loads(line)) for line in lines]
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is no pool of scored actions ({error}): give one JSON object a line with "
            "role, prompt, text and score, as 'ragrl pool' writes them"
        ) from error
    return build_pool(rows, alike=math.inf)


def goal_of(role: str, prompt: str) -> str:
    """What a prompt asks, without case, articles and punctuation; empty where it asks nothing.

    A rewriter's prompt begins with it; the others' documents, which may hold questions, precede it.
    """
    asked = _QUESTION.findall(prompt)
    return normalise(asked[0 if role == REWRITE else -1]) if asked else ""


def best_elsewhere(role: str, prompt: str, known: Sequence[Candidate]) -> str | None:
    """The best of candidates for the same goal that were scored with other documents.

    An analysis is right for its documents alone. So of those only a `no` is taken, and a `yes`
    whose answer this prompt holds too (yes and no themselves stand nowhere); of equals the `yes`.
    """
    if role != ANALYSIS:
        return known[0].text if known else None
    verdicts = [(candidate, parse_analysis(candidate.text)) for candidate in known]
    fitting = [
        (candidate.score, verdict.action == YES, candidate.text)
        for candidate, verdict in verdicts
        if verdict.action != YES
        or normalise(verdict.args[0]) in CLOSED
        or cover_match_tokens(prompt, verdict.args)
    ]
    return max(fitting, key=lambda row: row[:2])[2] if fitting else None


def build_pool(candidates: Iterable[Candidate], alike: float = 0.85) -> Pool:
    """The distinct candidates of every instance, the best first.

    A candidate is left out if its words' cosine with a better one of the same instance is `alike`
    or more. Equal scores are ordered by text, so that the pool is a function of the candidates.
    """
    instances: dict[tuple[str, str], list[Candidate]] = collections.defaultdict(list)
    for candidate in candidates:
        instances[candidate.role, candidate.prompt].append(candidate)
    return Pool({key: _distinct(known, alike) for key, known in sorted(instances.items())})


def _rank(candidate: Candidate) -> tuple[float, str]:
    return -candidate.score, candidate.text


def _distinct(candidates: Iterable[Candidate], alike: float) -> tuple[Candidate, ...]:
    kept: list[tuple[Candidate, collections.Counter[str]]] = []
    for candidate in sorted(candidates, key=_rank):
        words = collections.Counter(_WORD.findall(candidate.text.lower()))
        if all(cosine(words, other) < alike for _, other in kept):
            kept.append((candidate, words))
    return tuple(candidate for candidate, _ in kept)


def cosine(a: Mapping[Any, int], b: Mapping[Any, int]) -> float:
    """The cosine of two counts; two empty ones are alike."""
    if not a and not b:
        return 1.0
    norms = math.prod(math.sqrt(sum(n * n for n in x.values())) for x in (a, b))
    return sum(n * b.get(word, 0) for word, n in a.items()) / norms if norms else 0.0
