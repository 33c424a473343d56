"""Forests of decisions as arrays; the creation order of nodes is a topological order.

A node is one action of a role, or a leaf (the end of one rollout). Its parent is the action that
led to the state of the node. Texts and objects of the host are in `records`, which has the same
node numbers.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.runtime.records import declare
from jax_ragrl.types import Passage, Question

NO_PARENT = -1
LEAF = "leaf"  # the role of leaves
SEARCH = "search"  # the purpose of a call to the retriever
TOOL_PREFIX = "tool:"  # begins the purpose of a call of a tool
# Finish reasons that do not name an invalid action.
LIMITS = ("Max Depth", "Out of Turns", "Out of Rewrites", "Missing Answer")


class Action(NamedTuple):
    """The output of a sampler for one role.

    Fields:
      ids: the token ids. They end with a stop id or a stop string unless the action reached its
        maximum length.
      text: the text of `ids`, after the think block's opening tag if the prompt ends with it.
      logps: float32 natural-log probabilities of `ids` at the sampling temperature. None if the
        action was not sampled (forced text, the text of a teacher).
      error: why there is no text; empty if there is.
      removed: the mean probability per token that the mask of a strict grammar removed; None if
        there was no such mask.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    logps: tuple[float, ...] | None = None
    error: str = ""
    removed: float | None = None


class Call(NamedTuple):
    """One call to the environment: a search, or a call to the frozen language model or of a tool.

    Fields:
      purpose: `SEARCH`, `TOOL_PREFIX` and the name of a tool, or the purpose of the language-model
        request.
      turn: the action that pays for the call, as an index into the actions of its rollout.
      round: the round of the call, see `Record`.
      request: the query, the last message of the prompt, or the arguments of a tool as JSON.
      reply: of the language model, or the result of a tool as JSON.
      prompt_tokens, completion_tokens: of the language model.
      passages: the passages that a search returned.
    """

    purpose: str
    turn: int
    round: int
    request: str
    reply: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    passages: tuple[Passage, ...] = ()

    @property
    def is_of_llm(self) -> bool:
        """Whether the frozen language model was called."""
        return self.purpose != SEARCH and not self.purpose.startswith(TOOL_PREFIX)


@dataclasses.dataclass
class Record:
    """The host side of one node.

    Fields:
      parent, question: the number of the parent, or `NO_PARENT`, and the index of the question.
      role: the role of the action, or `LEAF`.
      depth: the decision level of the action.
      path: the indices of the siblings chosen from the root down to this node.
      action, parsed: the action and its parse; None at a leaf.
      multiplicity: the number of identical siblings that were merged into the node.
      round: the number of batched calls before the node; concurrent effects share a round.
      calls: at a leaf, every call to the environment on the path to it.
      answer, verdict, finish_reason: at a leaf, the answer or None, the grade of the judge if there
        is one, and why the rollout ended.
      state: the state of the system after the action, or at the leaf.
      passages: the passages of the searches directly after the action.
    """

    parent: int
    question: int
    role: str
    depth: int
    path: tuple[int, ...]
    action: Action | None = None
    is_forced: bool = False
    multiplicity: int = 1
    parsed: ParsedAction | None = None
    round: int = 0
    calls: tuple[Call, ...] = ()
    answer: str | None = None
    verdict: float | None = None
    finish_reason: str = ""
    state: Any = None
    passages: tuple[Passage, ...] = ()

    @property
    def parse_error(self) -> str:
        """The parse error of this action or, for a leaf without an answer, of its parent."""
        if self.parsed is not None:
            return self.parsed.error
        # A leaf repeats the error of the action above it as its finish reason.
        is_limit = self.answer is not None or self.finish_reason in LIMITS
        return "" if is_limit else self.finish_reason


class Text(NamedTuple):
    """A text of which the log-probability is asked, see `Forest.score`.

    Fields:
      role: whose policy is asked.
      prompt: the token ids before it, such as `Action.prompt_ids`.
      text: what is scored, without a stop token.
      opening: text between the prompt and `text`, such as the tag of an answer; not scored.
    """

    role: str
    prompt: tuple[int, ...]
    text: str
    opening: str = ""


@declare
class Forest(NamedTuple):
    """All rollouts of a batch of questions.

    Fields:
      parent_N: int32, smaller than the node's own number; `NO_PARENT` at roots.
      question_N: int32, index into `questions`.
      leaf_N, unanswered_N: bool, True at leaves, and at leaves without an answer.
      forced_N: bool, True at actions that were forced instead of sampled.
      reward_N: float32, the immediate reward of each node; 0 before `Recipe.reward` computes it.
      multiplicity_N: int32, the number of identical siblings that were merged into the node.
      records: the host side of every node.
      failed_questions, failures: ascending indices of questions whose environment failed, and the
        error messages. They have no nodes and no reward.
      scorer: asks the policies in training, see `score`; None before the credit is assigned.
    """

    questions: tuple[Question, ...]
    parent_N: np.ndarray
    question_N: np.ndarray
    leaf_N: np.ndarray
    unanswered_N: np.ndarray
    forced_N: np.ndarray
    reward_N: np.ndarray
    multiplicity_N: np.ndarray
    records: tuple[Record, ...]
    failed_questions: tuple[int, ...] = ()
    failures: tuple[str, ...] = ()
    scorer: Callable[[Sequence[Text]], list[np.ndarray]] | None = None

    def score(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Returns the log-probabilities of the tokens of each text, for a credit that reads them.

        Float32 `[tokens]` in nats, under the policies before the update, see
        `learner.policies.score_texts`.

        Raises:
          UserError: the credit is asked outside of a step.
        """
        if self.scorer is None:
            raise UserError(
                "this credit asks for the log-probabilities of texts, which are computed within a "
                "step: set run.refill=0 and run.prefer_signal=False, which ask it before that"
            )
        return self.scorer(texts)

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed for every question."""
        return len(self.failed_questions) == len(self.questions)

    def nodes_of(self, question: int) -> np.ndarray:
        """Returns the node numbers of one question, ascending."""
        return np.flatnonzero(self.question_N == question)

    def leaves(self) -> list[Record | None]:
        """Returns the leaf of each question, None if it failed; for forests that do not branch."""
        leaves: list[Record | None] = [None] * len(self.questions)
        for i in np.flatnonzero(self.leaf_N).tolist():
            leaves[self.records[i].question] = self.records[i]
        return leaves

    def errors(self) -> dict[int, str]:
        """Returns the errors by question: failed effects, and actions that could not be sampled.

        An action that could not be sampled ends its branch only.
        """
        actions = ((r.question, r.action.error) for r in self.records if r.action is not None)
        failures = zip(self.failed_questions, self.failures, strict=True)
        return dict(failures) | {question: error for question, error in actions if error}

    def roots(self) -> np.ndarray:
        """Returns the root of each node's rollout (or tree), int32 `[N]`."""
        root_N = np.arange(len(self.parent_N), dtype=np.int32)
        # Parents come first, so the root of a parent is final when its children read it.
        for node, parent in enumerate(self.parent_N):
            if parent != NO_PARENT:
                root_N[node] = root_N[parent]
        return root_N


def build_forest(
    questions: Sequence[Question],
    records: Sequence[Record],
    failures: Mapping[int, str] | None = None,
) -> Forest:
    """Builds the arrays of recorded nodes, in which a parent comes before its children.

    `failures` has error messages by the index of the question whose environment failed. The nodes
    of these questions are left out, and the parents of the others renumbered.
    """
    failures = failures or {}
    failed_questions = tuple(sorted(failures))
    # Nodes of failed questions would have no reward; leaving them out renumbers all others.
    nodes = [i for i, r in enumerate(records) if r.question not in failures]
    rows = reorder(records, nodes)
    leaf_N = np.array([r.role == LEAF for r in rows], bool)
    return Forest(
        questions=tuple(questions),
        parent_N=np.array([r.parent for r in rows], np.int32),
        question_N=np.array([r.question for r in rows], np.int32),
        leaf_N=leaf_N,
        unanswered_N=leaf_N & np.array([r.answer is None for r in rows], bool),
        forced_N=np.array([r.is_forced for r in rows], bool),
        reward_N=np.zeros(len(rows), np.float32),
        multiplicity_N=np.array([r.multiplicity for r in rows], np.int32),
        records=tuple(rows),
        failed_questions=failed_questions,
        failures=tuple(failures[i] for i in failed_questions),
    )


def reorder(records: Sequence[Record], order: Sequence[int]) -> list[Record]:
    """Returns nodes in the order of the old numbers `order`, with their parents renumbered."""
    number = {old: new for new, old in enumerate(order)} | {NO_PARENT: NO_PARENT}
    return [dataclasses.replace(records[n], parent=number[records[n].parent]) for n in order]


def sibling_groups(forest: Forest) -> list[list[int]]:
    """Returns the nodes of each decision: the actions that were tried in one state."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[int]] = collections.defaultdict(list)
    for node, record in enumerate(forest.records):
        if record.action is not None:
            # The path without its last index names the state. The parent distinguishes concurrent
            # actions of one state, which form a chain, from alternatives.
            groups[record.question, record.parent, record.path[:-1]].append(node)
    return list(groups.values())
