"""OPERA's three rewards (eq. 7, 9 and 10), and the gold answers they compare with.

The published code scores plans by other terms than the paper; `plan_reward_code` implements them.
If the paper names a term without a definition, the definition of the code is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_ragrl.retrieval.measures import gains
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.runtime.records import declare
from jax_ragrl.systems.opera.grammar import YES, Step, references
from jax_ragrl.text.metrics import CLOSED, cover_match_tokens, exact_match, normalize
from jax_ragrl.types import Passage, Question

_ENTITY = re.compile(r"\b[A-Z][\w'.-]*(?: [A-Z][\w'.-]*)*")
_ENDING = re.compile(r"(?:'s|['.])+$")  # the end of a sentence or a genitive, not of a name
_ASKS = re.compile(r"\b(who|whom|whose|what|which|where|when|why|how)\b", re.IGNORECASE)


# --- Gold ---------------------------------------------------------------------------------------


class Gold(NamedTuple):
    """The gold of a sub-goal for some passages.

    Fields:
      answers: the gold answers; () if the passages do not contain them; None if unknown.
      relevant: per passage, whether it is relevant to the sub-goal.
      total: the number of relevant passages in the corpus.
    """

    answers: tuple[str, ...] | None
    relevant: tuple[bool, ...]
    total: int


@declare
class SubGoal(NamedTuple):
    """A sub-goal with the answers of earlier steps in it, and its number in the plan, from 0."""

    text: str
    number: int
    steps: int


GoldOf = Callable[[Question, SubGoal, Sequence[Passage]], Gold]


def steps_gold(question: Question, goal: SubGoal, passages: Sequence[Passage]) -> Gold:
    """Returns the gold of a sub-goal for passages, from the decomposition in a data set.

    The last step of any plan has the answers of the question. Other steps have the answers of the
    decomposition (MuSiQue) or of a triple (`object_of`, 2WikiMultiHopQA), in `question.metadata`;
    they are unknown if the decomposition has another length. Of several passages with one gold
    name, which are pieces of an article, only the first counts as relevant.
    """
    # 1. Find the relevant passages. MuSiQue assigns one to each step of its decomposition, in the
    # order of the gold; for a plan of another length, and in other data sets, all gold counts.
    decomposition, names = question.metadata.get("question_decomposition", ()), question.gold
    is_assigned = len(decomposition) == len(names) and all(
        step.get("paragraph_support_idx") is not None for step in decomposition
    )
    if is_assigned and len(decomposition) == goal.steps:
        names = names[goal.number : goal.number + 1]
    relevant = tuple(map(bool, gains(names, passages)))
    total = len(set(names))
    # 2. Find the answers of a middle step.
    is_middle = goal.number < goal.steps - 1
    answers = () if is_middle else question.answers
    evidence = question.metadata.get("evidences", ())
    triples = [x for x in evidence if isinstance(x, list | tuple) and len(x) == 3]
    if not answers and len(decomposition) == goal.steps:
        answers = (str(decomposition[goal.number]["answer"]),)
    elif is_middle:
        answers = object_of(goal, triples)
    # 3. Decide whether the passages contain them.
    shown, gold = sum(gains(question.gold, passages)), len(set(question.gold))
    answerable = is_answerable(answers, passages, shown, gold, alone=goal.steps == 1)
    if is_middle and triples and any(relevant) and not answerable:
        # Triples have Wikidata's spelling, for example of a date, which a passage may not have.
        answerable = None
    if answerable is None:
        return Gold(None, relevant, total)
    return Gold(tuple(answers) if answerable else (), relevant, total)


def object_of(goal: SubGoal, triples: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns the object of the only (subject, relation, object) whose subject a sub-goal names.

    Triples are found by subject and not by number, since a plan may order the two sides of a
    comparison either way. A plan has one step per triple, and may have one more that compares;
    for other plans, and if no or several subjects match, the result is ().
    """
    if goal.steps - len(triples) not in (0, 1):
        return ()
    objects = [
        str(triple[-1])
        for triple in triples
        if cover_match_tokens(goal.text, (str(triple[0]),), punct="space")
    ]
    return tuple(objects) if len(objects) == 1 else ()


def is_answerable(
    answers: Sequence[str], passages: Sequence[Passage], gold: int, total: int, *, alone: bool
) -> bool | None:
    """Returns whether passages contain an answer; None if that is unknown.

    An answer must occur in a passage as complete words. Yes and no count as contained if all gold
    passages are shown (`gold` of `total`; 0 if unknown). If some are missing, a step `alone` in its
    plan cannot be answered; the last of several may compare earlier answers, which no passage
    holds.
    """
    if not answers:
        return None
    if normalize(answers[0]) not in CLOSED:
        return any(cover_match_tokens(p.text, answers) for p in passages)
    if not total:
        return None
    return True if gold == total else False if alone else None


# --- Plans --------------------------------------------------------------------------------------


def plan_logic(question: str, steps: Sequence[Step]) -> float:
    """Returns f_logic: the share of the question's names in the plan, times a factor per defect.

    The factors are 0.8 per sub-goal that joins two with "and", and 0.7 per sub-goal that declares
    a need of itself or of a later one.
    """
    score = 1.0
    for number, step in enumerate(steps, start=1):
        score *= 0.8 if " and " in step.goal else 1.0
        score *= 0.7 if any(n >= number for n in step.declared_needs) else 1.0
    # The first word of a question is capitalized without being a name.
    entities = _ENTITY.findall(question[:1].lower() + question[1:])
    names = [_ENDING.sub("", name) for name in entities]
    goals = " ".join(step.goal for step in steps)
    return score * (sum(name in goals for name in names) / len(names) if names else 1.0)


def plan_struct(steps: Sequence[Step], least: int = 2) -> float:
    """Returns f_struct: a product of factors for defects of the structure.

    The factors are 0.8 per missing field, 0.7 per invalid placeholder, 0.9 per undeclared one, 0.7
    for fewer steps than `least`, and 0.8 for more than five steps.
    """
    score = (0.7 if len(steps) < least else 1.0) * (0.8 if len(steps) > 5 else 1.0)
    for number, step in enumerate(steps, start=1):
        placeholders = references(step.goal)
        score *= 0.8**step.missing
        score *= 0.7 ** sum(not 1 <= n < number for n in placeholders)
        score *= 0.9 ** sum(n not in step.declared_needs for n in placeholders)
    return score


def plan_reward(question: str, plan: ParsedAction, success: float, least: int = 2) -> float:
    """Returns r_plan = 0.4 f_logic + 0.3 f_struct + 0.3 f_exec (eq. 7 and table 6).

    Text without a plan has neither logic nor structure, although one step is executed in its place.
    `success` is f_exec, the reward of the rollouts that execute the plan, 0 to 1.
    """
    if not plan.valid:
        return 0.3 * success
    logic, struct = plan_logic(question, plan.args), plan_struct(plan.args, least)
    return 0.4 * logic + 0.3 * struct + 0.3 * success


def plan_reward_code(question: str, plan: ParsedAction, success: float, least: int = 2) -> float:
    """Returns the plan reward of the published code; the score per number of steps is fixed.

    0.25 logic + 0.25 potential + 0.3 success + 0.1 efficiency + 0.1 placeholders
    """
    del least
    if not plan.valid:
        return 0.3 * success
    steps = plan.args
    parts = (plan_logic(question, steps), plan_potential(steps))
    rest = (plan_efficiency(len(steps)), plan_placeholders(steps))
    return 0.25 * sum(parts) + 0.3 * success + 0.1 * sum(rest)


def plan_potential(steps: Sequence[Step]) -> float:
    """Returns how answerable sub-goals look: the share of declared needs that are earlier steps,
    times 0.8 per sub-goal of one or two words and 0.9 per sub-goal without a question word.
    """
    score, satisfiable, needs = 1.0, 0, 0
    for number, step in enumerate(steps, start=1):
        score *= 0.8 if len(step.goal.split()) < 3 else 1.0
        score *= 1.0 if _ASKS.search(step.goal) else 0.9
        needs += len(step.declared_needs)
        satisfiable += sum(1 <= n < number for n in step.declared_needs)
    return score * (satisfiable / needs if needs else 1.0)


def plan_efficiency(steps: int) -> float:
    """Returns the score of the length of a plan, independent of the question."""
    return 0.3 if steps < 2 else 1.0 if steps < 4 else 0.8 if steps < 6 else 0.5


def plan_placeholders(steps: Sequence[Step]) -> float:
    """Returns the mean score of placeholders: 0.5 if valid plus 0.5 if declared; 1 without any."""
    scores = [
        0.5 * (1 <= n < number) + 0.5 * (n in step.declared_needs)
        for number, step in enumerate(steps, start=1)
        for n in references(step.goal)
    ]
    return sum(scores) / len(scores) if scores else 1.0


# --- Analyses and rewritten queries -------------------------------------------------------------


def analysis_reward(verdict: ParsedAction, gold: Gold) -> float:
    """Returns r_ana = 0.25 I[phi = phi*] + 0.65 EM(a, a*) + 0.1 f_format (eq. 9).

    If the passages do not contain an answer, a `no` is right in status and answer: 0.9. If that is
    unknown, only the form is scored.
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
    """Returns the normalized discounted cumulative gain of a ranking of k passages.

      DCG = sum_i rel_i / log2(i + 1),   NDCG = DCG / (DCG of min(total, k) relevant ones in front)

    Järvelin and Kekäläinen 2002, with binary relevance. 0 if `total`, the number of relevant
    passages in the corpus, is 0 or the ranking is empty.
    """
    discounts = [1 / math.log2(i + 2) for i in range(len(relevant))]
    ideal = sum(discounts[:total])
    dcg = sum(x for x, is_relevant in zip(discounts, relevant, strict=True) if is_relevant)
    return dcg / ideal if ideal else 0.0


def rewrite_reward(query: ParsedAction, gold: Gold, power: float = 0.5) -> float:
    """Returns r_rew = 0.9 sqrt(NDCG@k) + 0.1 f_format (eq. 10), for the passages of the query.

    If no relevant passage is known, 0.5 replaces the root. A `power` of 1 leaves out the root.
    """
    ranking = ndcg(gold.relevant, gold.total) ** power if gold.total else 0.5
    return 0.9 * ranking + 0.1 * query.format_score
