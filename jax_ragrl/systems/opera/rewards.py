"""OPERA's three rewards (eq. 7, 9 and 10), and what they take for gold.

The published code scores plans by another rubric than the paper; `plan_reward_code` is that one.
Where the paper names a term and does not define it, the code's definition is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_ragrl.rollout.roles import Parsed
from jax_ragrl.systems.opera.grammar import YES, Step, references
from jax_ragrl.text.metrics import CLOSED, cover_match_tokens, exact_match, normalise
from jax_ragrl.types import Passage, Question

_ENTITY = re.compile(r"\b[A-Z][\w'.-]*(?: [A-Z][\w'.-]*)*")
_ENDING = re.compile(r"(?:'s|['.])+$")  # of a sentence or a genitive, not of a name
_ASKS = re.compile(r"\b(who|whom|whose|what|which|where|when|why|how)\b", re.IGNORECASE)


# --- Gold ---------------------------------------------------------------------------------------


class Gold(NamedTuple):
    """What is known about a sub-goal and some passages.

    `answers` are its gold answers, none where the passages do not tell it, and None where that is
    not known. `relevant` says of each passage whether it bears on the sub-goal, and `total` how
    many of all passages do.
    """

    answers: tuple[str, ...] | None
    relevant: tuple[bool, ...]
    total: int


class SubGoal(NamedTuple):
    """A sub-goal as it was put: step `number` (from 0) of a plan with `steps` steps."""

    text: str
    number: int
    steps: int


GoldOf = Callable[[Question, SubGoal, Sequence[Passage]], Gold]


def steps_gold(question: Question, goal: SubGoal, passages: Sequence[Passage]) -> Gold:
    """Gold from a data set's own decomposition.

    The last step of any plan has the question's answers, the others those of the decomposition
    (MuSiQue) or of a triple (`object_of`, 2WikiMultiHopQA); they are not known where that is of
    another length. The question's gold passages count as relevant to each step, since data sets do
    not say which step one belongs to, and of several with one gold name, pieces of an article, the
    first.
    """
    relevant = first_named(passages, question.gold)
    middle = goal.number < goal.steps - 1
    answers = () if middle else question.answers
    known = question.metadata.get("question_decomposition", ())
    facts = question.metadata.get("evidences", ())
    triples = [x for x in facts if isinstance(x, list | tuple) and len(x) == 3]
    if not answers and len(known) == goal.steps:
        answers = (str(known[goal.number]["answer"]),)
    elif middle:
        answers = object_of(goal, triples)
    total = len(set(question.gold))
    told = settled(answers, passages, sum(relevant), total, alone=goal.steps == 1)
    if middle and triples and any(relevant) and not told:
        told = None  # Wikidata's spelling of it, a date's say, need not be that of the passages
    return Gold(None if told is None else tuple(answers) if told else (), relevant, total)


def object_of(goal: SubGoal, triples: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The object of the one (subject, relation, object) whose subject a sub-goal names, or none.

    By subject and not by number, since a comparison's sides may be planned in either order. A plan
    has a step for each triple, and may have another that compares.
    """
    if goal.steps - len(triples) not in (0, 1):
        return ()
    named = [
        str(triple[-1])
        for triple in triples
        if cover_match_tokens(goal.text, (str(triple[0]),), punct="space")
    ]
    return tuple(named) if len(named) == 1 else ()


def first_named(passages: Sequence[Passage], names: Sequence[str]) -> tuple[bool, ...]:
    """Of each passage, whether it is the first to bear some name as its id or title."""
    left, first = set(names), []
    for passage in passages:
        borne = {passage.id, passage.title} & left
        left -= borne
        first.append(bool(borne))
    return tuple(first)


def settled(
    answers: Sequence[str], passages: Sequence[Passage], gold: int, total: int, *, alone: bool
) -> bool | None:
    """Whether passages tell an answer, `gold` of the `total` gold ones among them; None: unknown.

    An answer is told where it stands, as whole words, in a passage. Yes and no stand nowhere: they
    are told where all gold passages are shown. Where these are not, a plan of one step, which is
    `alone`, cannot know; the last of several may compare earlier answers, which no passage shows.
    """
    if not answers:
        return None
    if normalise(answers[0]) not in CLOSED:
        return any(cover_match_tokens(p.text, answers) for p in passages)
    if not total:
        return None
    return True if gold == total else False if alone else None


# --- Plans --------------------------------------------------------------------------------------


def plan_logic(question: str, steps: Sequence[Step]) -> float:
    """f_logic: 1, times 0.8 a sub-goal that joins two, 0.7 one that needs itself or a later one.

    Times the share of the question's names that the plan mentions.
    """
    score = 1.0
    for number, step in enumerate(steps, start=1):
        score *= 0.8 if " and " in step.goal else 1.0
        score *= 0.7 if any(n >= number for n in step.declared) else 1.0
    return score * _covered(question, steps)


def _covered(question: str, steps: Sequence[Step]) -> float:
    """The share of a question's capitalised names, its first word aside, that a plan mentions."""
    found = _ENTITY.findall(question[:1].lower() + question[1:])
    names = [_ENDING.sub("", name) for name in found]
    mentioned = " ".join(step.goal for step in steps)
    return sum(name in mentioned for name in names) / len(names) if names else 1.0


def plan_struct(steps: Sequence[Step], least: int = 2) -> float:
    """f_struct: 1, times 0.8 a missing field, 0.7 an invalid placeholder, 0.9 an undeclared one.

    Times 0.7 for fewer steps than `least`, and 0.8 for more than five.
    """
    score = (0.7 if len(steps) < least else 1.0) * (0.8 if len(steps) > 5 else 1.0)
    for number, step in enumerate(steps, start=1):
        placed = references(step.goal)
        score *= 0.8**step.missing
        score *= 0.7 ** sum(not 1 <= n < number for n in placed)
        score *= 0.9 ** sum(n not in step.declared for n in placed)
    return score


def plan_reward(question: str, plan: Parsed, success: float, least: int = 2) -> float:
    """r_plan = 0.4 f_logic + 0.3 f_struct + 0.3 f_exec (eq. 7 and table 6).

    `success` is f_exec: what the rollout that carries the plan out earns. Text without a plan has
    neither logic nor structure, though one step is carried out in its place.
    """
    if not plan.valid:
        return 0.3 * success
    logic, struct = plan_logic(question, plan.args), plan_struct(plan.args, least)
    return 0.4 * logic + 0.3 * struct + 0.3 * success


def plan_reward_code(question: str, plan: Parsed, success: float, least: int = 2) -> float:
    """0.25 logic + 0.25 potential + 0.3 success + 0.1 efficiency + 0.1 placeholders (the code)."""
    del least
    if not plan.valid:
        return 0.3 * success
    steps = plan.args
    parts = (plan_logic(question, steps), plan_potential(steps))
    rest = (plan_efficiency(len(steps)), plan_placeholders(steps))
    return 0.25 * sum(parts) + 0.3 * success + 0.1 * sum(rest)


def plan_potential(steps: Sequence[Step]) -> float:
    """Whether sub-goals look answerable: 1, times 0.8 a short one, 0.9 one that asks nothing.

    Times the share of needs that an earlier step can meet.
    """
    score, met, needs = 1.0, 0, 0
    for number, step in enumerate(steps, start=1):
        score *= 0.8 if len(step.goal.split()) < 3 else 1.0
        score *= 1.0 if _ASKS.search(step.goal) else 0.9
        needs += len(step.declared)
        met += sum(1 <= n < number for n in step.declared)
    return score * (met / needs if needs else 1.0)


def plan_efficiency(steps: int) -> float:
    """How well a plan's length is chosen, whatever the question."""
    return 0.3 if steps < 2 else 1.0 if steps < 4 else 0.8 if steps < 6 else 0.5


def plan_placeholders(steps: Sequence[Step]) -> float:
    """The mean over placeholders of 0.5 for a valid one and 0.5 for a declared one; 1 without."""
    scores = [
        0.5 * (1 <= n < number) + 0.5 * (n in step.declared)
        for number, step in enumerate(steps, start=1)
        for n in references(step.goal)
    ]
    return sum(scores) / len(scores) if scores else 1.0


# --- Analyses and rewritten queries -------------------------------------------------------------


def analysis_reward(verdict: Parsed, gold: Gold) -> float:
    """r_ana = 0.25 I[phi = phi*] + 0.65 EM(a, a*) + 0.1 f_format (eq. 9).

    Where the passages do not settle the sub-goal, a* is no answer, which a `no` matches: 0.9 for
    the status. Where that is not known the form alone is graded.
    """
    form = 0.1 * verdict.format_score
    if gold.answers is None:
        return form
    if not gold.answers:
        return 0.9 * (verdict.action != YES) + form
    if verdict.action != YES:
        return form
    return 0.25 + 0.65 * exact_match(verdict.args[0], gold.answers) + form


def ndcg(relevant: Sequence[bool], total: int) -> float:
    """Normalised discounted cumulative gain at k, k being how many passages were found.

      DCG = sum_i rel_i / log2(i + 1),   NDCG = DCG / (DCG of min(total, k) relevant ones in front)

    Järvelin and Kekäläinen 2002, with binary relevance. 0 where nothing could be found.
    """
    gains = [1 / math.log2(i + 2) for i in range(len(relevant))]
    ideal = sum(gains[:total])
    gained = sum(gain for gain, right in zip(gains, relevant, strict=True) if right)
    return gained / ideal if ideal else 0.0


def rewrite_reward(query: Parsed, gold: Gold, power: float = 0.5) -> float:
    """r_rew = 0.9 sqrt(NDCG@k) + 0.1 f_format (eq. 10).

    `gold` judges what the query found. Where nothing is known to be relevant, 0.5 stands for the
    root. `power` 1 leaves the root out.
    """
    found = ndcg(gold.relevant, gold.total) ** power if gold.total else 0.5
    return 0.9 * found + 0.1 * query.format_score
