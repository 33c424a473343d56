"""A pool of actions that were scored before training; the best one for a prompt is its expert.

OPERA's D_scored (eq. 11): about ten candidates per instance, from large models at several
temperatures, scored by executing them, without near duplicates.

Departures from the paper
  1. Algorithm 1 looks up an expert by question for a plan and by sub-goal, D_scored(p), for the
     other roles, independent of the documents in the prompt. Here a prompt that is in the pool gets
     its own best candidate, and any other prompt that of its question or sub-goal.
  2. Near duplicates are found by the cosine of word counts, unless there is an encoder of texts;
     the paper uses a semantic cosine.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import ActionRequest, ActionSampler
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.tree import Action, Forest
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.systems.opera.grammar import ANALYSIS, REWRITE, YES, parse_analysis
from jax_ragrl.text.metrics import CLOSED, cover_match_tokens, normalize
from jax_ragrl.text.words import WORD

_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)


class Candidate(NamedTuple):
    """An action for a prompt of a role, and its score."""

    role: str
    prompt: str
    text: str
    score: float


class RecordingSampler:
    """A sampler that records its requests by the token ids of their prompts."""

    def __init__(self, sampler: ActionSampler):
        self._sampler = sampler
        self.prompts: dict[tuple[int, ...], ActionRequest] = {}

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        replies = self._sampler.sample(requests)
        for request, actions in zip(requests, replies, strict=True):
            self.prompts |= {action.prompt_ids: request for action in actions}
        return replies


def candidates_of(
    forest: Forest, reward_N: np.ndarray, prompts: Mapping[tuple[int, ...], ActionRequest]
) -> list[tuple[int, Candidate]]:
    """Returns a candidate for every action of a forest, after the number of its question.

    The score is the immediate reward; `prompts` are those of the `RecordingSampler` that was used.
    """
    result = []
    for record, reward in zip(forest.records, reward_N.tolist(), strict=True):
        # Leaves have no action, and failed actions no text.
        if (action := record.action) is not None and not action.error:
            prompt = prompts[action.prompt_ids].messages[-1].content
            result.append((record.question, Candidate(record.role, prompt, action.text, reward)))
    return result


@dataclasses.dataclass(frozen=True)
class Pool:
    """Candidates by role and prompt, best first. As an `Expert` it returns the best one."""

    candidates: Mapping[tuple[str, str], tuple[Candidate, ...]]

    def __call__(self, effect: Generate, question: str) -> str | None:
        del question
        role, prompt = effect.role, effect.messages[-1].content
        if candidates := self.candidates.get((role, prompt)):
            return candidates[0].text
        return best_transferable(role, prompt, self._by_goal.get((role, goal_of(role, prompt)), ()))

    @functools.cached_property
    def _by_goal(self) -> Mapping[tuple[str, str], tuple[Candidate, ...]]:
        """The candidates of all prompts with the same question or sub-goal, best first."""
        # Computed once per pool: every prompt that is not in the pool needs it.
        groups: dict[tuple[str, str], list[Candidate]] = collections.defaultdict(list)
        for candidate in self:
            if goal := goal_of(candidate.role, candidate.prompt):
                groups[candidate.role, goal].append(candidate)
        return {key: tuple(sorted(group, key=_rank)) for key, group in groups.items()}

    def __iter__(self) -> Iterator[Candidate]:
        return (candidate for group in self.candidates.values() for candidate in group)

    def summary(self) -> dict[str, float]:
        """Returns counts, mean and deviation of scores, and the shares above 0.85 and below 0.5."""
        # The mean of an empty pool is nan, without a warning of NumPy.
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
        """Writes one JSON line per candidate; an interruption leaves no partial file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_rows(file, (candidate._asdict() for candidate in self))


def load_pool(file: pathlib.Path) -> Pool:
    """Reads a file that `Pool.save` wrote; `UserError` if it is missing or holds something else."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        candidates = [Candidate(**json.loads(line)) for line in lines]
    # TypeError: a line is valid JSON with other fields.
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is not a pool of scored actions ({error}): give a file with one JSON object "
            "per line with role, prompt, text and score, as 'ragrl warmup pool' writes it"
        ) from error
    # No cosine reaches infinity, so no candidate is dropped a second time.
    return build_pool(candidates, max_cosine=math.inf)


def goal_of(role: str, prompt: str) -> str:
    """Returns the normalized question in a prompt; empty if the prompt has no question.

    The prompt of a rewriter begins with its question. In the other prompts it comes last, after
    documents that may contain questions themselves.
    """
    questions = _QUESTION.findall(prompt)
    return normalize(questions[0 if role == REWRITE else -1]) if questions else ""


def best_transferable(role: str, prompt: str, candidates: Sequence[Candidate]) -> str | None:
    """Returns the best of some candidates, best first, that were scored with other documents.

    An analysis is right only for its own documents. So a `yes` must have an answer that this prompt
    contains too, unless the answer is yes or no, which no document contains. A `no` always fits. Of
    equal scores a `yes` is preferred.
    """
    if role != ANALYSIS:
        return candidates[0].text if candidates else None
    fitting = []
    for candidate in candidates:
        verdict = parse_analysis(candidate.text)
        is_yes = verdict.action == YES
        is_closed = is_yes and normalize(verdict.args[0]) in CLOSED
        if not is_yes or is_closed or cover_match_tokens(prompt, verdict.args):
            fitting.append((candidate.score, is_yes, candidate.text))
    # Not by text: of equal candidates the first in the order of the pool is taken.
    return max(fitting, key=lambda row: row[:2])[2] if fitting else None


# From n texts to the similarity of each pair, float `[n, n]`, at most 1.
Similarity = Callable[[Sequence[str]], np.ndarray]


def word_cosines(texts: Sequence[str]) -> np.ndarray:
    """Returns the cosines of the word counts of texts, float64 `[n, n]`."""
    counts = [collections.Counter(WORD.findall(text.lower())) for text in texts]
    return np.array([[_cosine(a, b) for b in counts] for a in counts])


def _cosine(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Returns the cosine of two count vectors; 1 if both are empty."""
    if not a and not b:
        return 1.0
    norms = math.prod(math.sqrt(sum(n * n for n in x.values())) for x in (a, b))
    return sum(n * b.get(word, 0) for word, n in a.items()) / norms if norms else 0.0


def vector_cosines(
    encode: Callable[[Sequence[str]], np.ndarray], texts: Sequence[str]
) -> np.ndarray:
    """Returns the cosines of the vectors of texts, float32 `[n, n]`, from `encode`, float32
    `[n, D]`."""
    vectors_ND = encode(texts)
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    directions_ND = vectors_ND / np.maximum(lengths_N1, np.finfo(np.float32).tiny)
    return directions_ND @ directions_ND.T


def build_pool(
    candidates: Iterable[Candidate], max_cosine: float = 0.85, similarity: Similarity = word_cosines
) -> Pool:
    """Returns the distinct candidates of every instance, best first; equal scores by their text.

    A candidate is dropped if its similarity with a better one of the same instance is `max_cosine`
    or more (`vector_cosines` is a semantic one).
    """
    instances: dict[tuple[str, str], list[Candidate]] = collections.defaultdict(list)
    for candidate in candidates:
        instances[candidate.role, candidate.prompt].append(candidate)
    pool = {}
    for instance, group in sorted(instances.items()):
        # Best first: of two near duplicates the worse one is dropped.
        in_order, distinct = sorted(group, key=_rank), list[int]()
        cosine_NN = similarity([candidate.text for candidate in in_order])
        for i in range(len(in_order)):
            if all(cosine_NN[i, j] < max_cosine for j in distinct):
                distinct.append(i)
        pool[instance] = tuple(in_order[i] for i in distinct)
    return Pool(pool)


def _rank(candidate: Candidate) -> tuple[float, str]:
    return -candidate.score, candidate.text
