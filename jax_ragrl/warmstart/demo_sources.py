"""What a language model's rollouts teach: the actions that ended right, or a baseline's choices.

A lesson of a baseline gives the rows that its classifier is trained on: which of C-3PO's strategies
Adaptive-RAG is to take for a question, and whether SlimPLM is to trust a draft. A row's prompt is
the one that `ragrl evaluate` shows that baseline: with `--style tiny` where the config's own style
is a compact one (its name ends in `_tiny`), else with `--style full`.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.expand import Expander, Tree, once
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.evaluate import METRICS
from jax_ragrl.systems.ablation import Apart
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.baselines.adaptive import CLASSES, class_rows
from jax_ragrl.systems.baselines.rows import Row
from jax_ragrl.systems.baselines.slim_plm import Drafts, gate_rows
from jax_ragrl.systems.c3po import C3PO, ROUTER
from jax_ragrl.types import Message
from jax_ragrl.warmstart.demos import Demo

Prompts = Mapping[tuple[int, ...], tuple[Message, ...]]  # conversations by their ids
Written = tuple[str, str, tuple[Message, ...], str]  # as the fields of a `Demo` begin


class Lesson(NamedTuple):
    """What is rolled out, how it branches, and the demonstrations that a forest of it gives."""

    system: System
    expander: Expander
    demos: Callable[[Forest, Prompts], list[Demo]]


def lesson_of(recipe: Recipe, of: str = "") -> Lesson:
    """The lesson of a config's own system, or of a baseline in `BASELINES`.

    Raises `UserError` where the config's rollouts do not show what the baseline has to learn.
    """
    if of:
        one_of("--of", of, BASELINES)
        return BASELINES[of](recipe)
    # Nothing is in training: a tree is a tree, but no role has groups to be compared in.
    expander = recipe.expander(frozenset())
    return Lesson(recipe.system, expander, functools.partial(right_actions, recipe))


def right_answers(recipe: Recipe, forest: Forest) -> np.ndarray:
    """float32 `[N]`: 1 at leaves with a right answer, else 0.

    Right is an answer with the full score of the recipe's metric, or the judge's verdict.
    """
    return (answer_rewards(forest, METRICS[recipe.metric]) >= 1).astype(np.float32)


def right_actions(recipe: Recipe, forest: Forest, prompts: Prompts) -> list[Demo]:
    """The actions without fault that a right answer came of, each once a question.

    The reward of an action is the share of answers below it that are right: the best, where it was
    written several times.
    """
    share_N, _ = reachable_leaves(forest, right_answers(recipe, forest))
    best: dict[Written, float] = collections.defaultdict(float)
    for record, share in zip(forest.records, share_N.tolist(), strict=True):
        faults = (record.fault, *getattr(record.state, "faults", ()))
        if share <= 0 or record.action is None or any(faults):
            continue
        prompt, text = prompts[record.action.prompt_ids], record.action.text
        key = (forest.questions[record.question].id, record.role, prompt, text)
        best[key] = max(best[key], round(share, 4))
    roles = recipe.system.roles
    return [Demo(*key, reward, roles[key[1]].chat) for key, reward in best.items()]


# --- Of baselines ---------------------------------------------------------------------------------


def adaptive_rag(recipe: Recipe) -> Lesson:
    """The class of every question, by the forced strategies of C-3PO's tree."""
    system = recipe.system.system if isinstance(recipe.system, Apart) else recipe.system
    if not isinstance(system, C3PO):
        raise UserError(
            "--of adaptive_rag compares the strategies of C-3PO, and this config has another "
            "system: give one of system c3po, such as configs/c3po.py"
        )
    tree = recipe.expander(frozenset())
    forced = tree.forced.get(ROUTER, ()) if isinstance(tree, Tree) else ()
    for strategy in CLASSES:
        if not any(text.startswith(f"[{strategy}]") for text, _ in forced):
            raise UserError(
                f"--of adaptive_rag compares strategies, but this tree does not force "
                f"[{strategy}]: set recipe.tree.retrieval to prefix or text"
            )

    def demos(forest: Forest, prompts: Prompts) -> list[Demo]:
        del prompts
        right_N = right_answers(recipe, forest)
        return taught(class_rows(_style(recipe), forest, right_N), forest)

    return Lesson(recipe.system, tree, demos)


def slim_plm(recipe: Recipe) -> Lesson:
    """Whether each draft holds an answer; the config's own system is not rolled out."""
    style = _style(recipe)

    def demos(forest: Forest, prompts: Prompts) -> list[Demo]:
        del prompts
        return taught(gate_rows(style, forest), forest)

    return Lesson(Drafts(style), once, demos)


def taught(rows: Sequence[tuple[str, Row]], forest: Forest) -> list[Demo]:
    """Rows, each after its question's id, as demonstrations, each once.

    Questions about which the writer failed give none: what it did not write is no choice.
    """
    written = ((r.question, r.action) for r in forest.records)
    lost = {forest.questions[i].id for i, action in written if action and action.error}
    made = (Demo(id, row.role, row.messages, row.target) for id, row in rows if id not in lost)
    return list(dict.fromkeys(made))


def _style(recipe: Recipe) -> str:
    return "baselines_tiny" if recipe.system.style.endswith("_tiny") else "baselines"


BASELINES: Mapping[str, Callable[[Recipe], Lesson]] = {
    "adaptive_rag": adaptive_rag,
    "slim_plm": slim_plm,
}
