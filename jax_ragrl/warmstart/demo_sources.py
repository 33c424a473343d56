"""Selects demonstrations from rollouts: actions with correct outcomes, or labels for baselines.

For a baseline, the demonstrations train its classifier: which strategy of C-3PO Adaptive-RAG should
choose for a question, and whether SlimPLM should trust a draft. Their prompts are the prompts
of `ragrl evaluate`: of `--style tiny` if the config has a compact style (its name ends in `_tiny`),
otherwise of `--style full`.
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
from jax_ragrl.rollout.expand import Expander, Tree, single_chain
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Recipe, innermost_system
from jax_ragrl.systems.baselines.adaptive import CLASSES, classifier_examples
from jax_ragrl.systems.baselines.examples import ChatExample
from jax_ragrl.systems.baselines.slim_plm import DraftOnly, gate_examples
from jax_ragrl.systems.c3po import C3PO, ROUTER
from jax_ragrl.text.metrics import training_metric
from jax_ragrl.types import Message
from jax_ragrl.warmstart.demos import Demo

Prompts = Mapping[tuple[int, ...], tuple[Message, ...]]  # conversations by their token ids
DemoKey = tuple[str, str, tuple[Message, ...], str]  # the first four fields of a `Demo`


class DemoSource(NamedTuple):
    """A system to roll out, its expander, and the selection of demonstrations from a forest."""

    system: System
    expander: Expander
    demos: Callable[[Forest, Prompts], list[Demo]]


def demo_source(recipe: Recipe, of: str = "") -> DemoSource:
    """Returns the source for the system of a config, or for a baseline of `BASELINES`.

    Raises `UserError` if the rollouts of the config cannot label the examples of the baseline.
    """
    if of:
        one_of("--of", of, BASELINES)
        return BASELINES[of](recipe)
    # No role is trained: trees branch as usual, but no role has groups of siblings.
    expander = recipe.expander(frozenset())
    return DemoSource(recipe.system, expander, functools.partial(right_actions, recipe))


def right_answers(recipe: Recipe, forest: Forest) -> np.ndarray:
    """Returns float32 `[N]`: 1 at leaves with the full score of the recipe's metric or judge."""
    return (answer_rewards(forest, training_metric(recipe.metric)) >= 1).astype(np.float32)


def right_actions(recipe: Recipe, forest: Forest, prompts: Prompts) -> list[Demo]:
    """Returns the valid actions that led to a correct answer, without repetitions per question.

    The reward of an action is the fraction of correct answers below it; of equal actions, the
    largest.
    """
    fraction_N, _ = reachable_leaves(forest, right_answers(recipe, forest))
    best: dict[DemoKey, float] = collections.defaultdict(float)
    for record, fraction in zip(forest.records, fraction_N.tolist(), strict=True):
        faults = (record.parse_error, *record.state.faults)
        if fraction <= 0 or record.action is None or any(faults):
            continue
        prompt, text = prompts[record.action.prompt_ids], record.action.text
        # The text, not the ids: demonstrations do not depend on a tokenizer.
        key = (forest.questions[record.question].id, record.role, prompt, text)
        best[key] = max(best[key], round(fraction, 4))
    roles = recipe.system.roles
    return [Demo(*key, reward, roles[key[1]].as_chat_turns) for key, reward in best.items()]


# --- Baselines ------------------------------------------------------------------------------------


def adaptive_rag(recipe: Recipe) -> DemoSource:
    """Labels every question with its best strategy, from the forced strategies of C-3PO's tree."""
    system = innermost_system(recipe.system)
    if not isinstance(system, C3PO):
        raise UserError(
            "--of adaptive_rag compares the strategies of C-3PO, and this config has another "
            "system: use a config of system c3po, such as configs/c3po.py"
        )
    tree = recipe.expander(frozenset())
    forced_actions = tree.forced_actions.get(ROUTER, ()) if isinstance(tree, Tree) else ()
    for strategy in CLASSES:
        if not any(text.startswith(f"[{strategy}]") for text, _ in forced_actions):
            raise UserError(
                f"--of adaptive_rag compares strategies, but this tree does not force "
                f"[{strategy}]: set recipe.tree.router_forcing to prefix or text"
            )

    def demos(forest: Forest, prompts: Prompts) -> list[Demo]:
        del prompts
        right_N = right_answers(recipe, forest)
        return demos_of_examples(classifier_examples(_style(recipe), forest, right_N), forest)

    return DemoSource(recipe.system, tree, demos)


def slim_plm(recipe: Recipe) -> DemoSource:
    """Labels every draft answer as correct or not; the system of the config is not rolled out."""
    style = _style(recipe)

    def demos(forest: Forest, prompts: Prompts) -> list[Demo]:
        del prompts
        return demos_of_examples(gate_examples(style, forest), forest)

    return DemoSource(DraftOnly(style), single_chain, demos)


def demos_of_examples(examples: Sequence[tuple[str, ChatExample]], forest: Forest) -> list[Demo]:
    """Converts pairs of question id and example to demonstrations without repetitions.

    Questions on which the writer failed are left out: a missing reply is not a choice.
    """
    actions = ((r.question, r.action) for r in forest.records)
    failed_ids = {forest.questions[i].id for i, action in actions if action and action.error}
    demos = (Demo(id, x.role, x.messages, x.target) for id, x in examples if id not in failed_ids)
    return list(dict.fromkeys(demos))


def _style(recipe: Recipe) -> str:
    return "baselines_tiny" if recipe.system.style.endswith("_tiny") else "baselines"


BASELINES: Mapping[str, Callable[[Recipe], DemoSource]] = {
    "adaptive_rag": adaptive_rag,
    "slim_plm": slim_plm,
}
