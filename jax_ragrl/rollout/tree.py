"""A forest of decisions as arrays; creation order is topological order.

A node is one action of a role, or a leaf (the end of one rollout). Its parent is the action that
its state came from. Host text lives in `records`, indexed by the same node number.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.rollout.roles import Parsed
from jax_ragrl.types import Passage, Question

NO_PARENT = -1
LEAF = "leaf"
# Ends of a rollout that are nobody's malformed action.
LIMITS = ("Max Depth", "Out of Turns", "Out of Rewrites", "Missing Answer")


class Action(NamedTuple):
    """What a sampler wrote for one role. `ids` ends with a stop id or string unless it was cut.

    `logps` are float32 natural-log probabilities of `ids` at the sampling temperature, or None
    where nothing sampled them (forced text, a teacher's text). `error` names why there is no text.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    logps: tuple[float, ...] | None = None
    error: str = ""


SEARCH = "search"  # the purpose of a call that searched


class Call(NamedTuple):
    """One call to the environment. `turn` is the action that pays, counted along its path.

    `purpose` is `SEARCH`, or that of the request. `asked` is the query or the prompt, `told` the
    reply. Tokens are zero for searches; `found` are the passages that one returned.
    """

    purpose: str
    turn: int
    round: int
    asked: str
    told: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    found: tuple[Passage, ...] = ()


@dataclasses.dataclass
class Record:
    """One node on the host. `answer`, `verdict` (of a judge, where there is one), `why` and `calls`
    belong to leaves, the rest to actions.

    `round` counts the batched calls before the node: what runs side by side shares a round.
    `state` is what the action led to, `found` what was searched right after it returned.
    """

    parent: int
    question: int
    role: str
    depth: int
    path: tuple[int, ...]
    action: Action | None = None
    forced: bool = False
    multiplicity: int = 1
    parsed: Parsed | None = None
    round: int = 0
    calls: tuple[Call, ...] = ()
    answer: str | None = None
    verdict: float | None = None
    why: str = ""
    state: Any = None
    found: tuple[Passage, ...] = ()

    @property
    def fault(self) -> str:
        """What was malformed: in an action, or, at a dead leaf, in the one before it."""
        if self.parsed is not None:
            return self.parsed.error
        return self.why if self.answer is None and self.why not in LIMITS else ""


class Forest(NamedTuple):
    """All rollouts of a batch of questions.

    Fields:
      parent_N: int32, smaller than the node's own number; `NO_PARENT` at roots.
      question_N: int32, index into `questions`.
      leaf_N, dead_N, forced_N: bool. A dead leaf has no answer.
      reward_N: float32, what each node earned itself (`Recipe.reward`); 0 until that is known.
      multiplicity_N: int32, how many identical siblings were merged into the node.
      records: host side of every node.
      failed: questions whose effects failed; they have no nodes here and no reward.
      failures: what the environment said of each of them.
    """

    questions: tuple[Question, ...]
    parent_N: np.ndarray
    question_N: np.ndarray
    leaf_N: np.ndarray
    dead_N: np.ndarray
    forced_N: np.ndarray
    reward_N: np.ndarray
    multiplicity_N: np.ndarray
    records: tuple[Record, ...]
    failed: tuple[int, ...] = ()
    failures: tuple[str, ...] = ()

    def nodes_of(self, question: int) -> np.ndarray:
        """The node numbers of one question, ascending."""
        return np.flatnonzero(self.question_N == question)

    def ends(self) -> list[Record | None]:
        """The leaf of every question, where rollouts do not branch; None where it failed."""
        leaves: list[Record | None] = [None] * len(self.questions)
        for i in np.flatnonzero(self.leaf_N).tolist():
            leaves[self.records[i].question] = self.records[i]
        return leaves

    def errors(self) -> dict[int, str]:
        """What failed, by question: effects, or the writing of an action, which costs its branch
        alone."""
        unwritten = ((r.question, r.action.error) for r in self.records if r.action is not None)
        failed = zip(self.failed, self.failures, strict=True)
        return dict(failed) | {question: why for question, why in unwritten if why}

    def roots(self) -> np.ndarray:
        """int32 `[N]`: the first node of the rollout (or tree) that each node belongs to."""
        root_N = np.arange(len(self.parent_N), dtype=np.int32)
        for node, parent in enumerate(self.parent_N):
            if parent != NO_PARENT:
                root_N[node] = root_N[parent]
        return root_N


def plant(
    questions: Sequence[Question],
    records: Sequence[Record],
    failures: Mapping[int, str] | None = None,
) -> Forest:
    """The arrays of recorded nodes.

    `failures` tells, by question, what the environment said where it failed: the nodes of these
    questions are left out.
    """
    failures = failures or {}
    failed = tuple(sorted(failures))
    kept = [i for i, r in enumerate(records) if r.question not in failures]
    number = {old: new for new, old in enumerate(kept)} | {NO_PARENT: NO_PARENT}
    rows = [dataclasses.replace(records[i], parent=number[records[i].parent]) for i in kept]
    leaf = np.array([r.role == LEAF for r in rows], bool)
    return Forest(
        questions=tuple(questions),
        parent_N=np.array([r.parent for r in rows], np.int32),
        question_N=np.array([r.question for r in rows], np.int32),
        leaf_N=leaf,
        dead_N=leaf & np.array([r.answer is None for r in rows], bool),
        forced_N=np.array([r.forced for r in rows], bool),
        reward_N=np.zeros(len(rows), np.float32),
        multiplicity_N=np.array([r.multiplicity for r in rows], np.int32),
        records=tuple(rows),
        failed=failed,
        failures=tuple(failures[i] for i in failed),
    )


def decisions(forest: Forest) -> list[list[int]]:
    """The nodes of every decision that was made: the actions tried in one state."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[int]] = collections.defaultdict(list)
    for node, record in enumerate(forest.records):
        if record.action is not None:
            groups[record.question, record.parent, record.path[:-1]].append(node)
    return list(groups.values())
