"""RAG-DDR: every module prefers what led to the better answer.

Li et al. 2025, "RAG-DDR: Optimizing Retrieval-Augmented Generation Using Differentiable Data
Rewards". Several outputs of one module are sampled, each is carried out to the answer, and the best
and the worst become a pair for direct preference optimisation (`dpo.py`); first the generator
learns, then the module before it (the config section `schedule`).

Departures from the paper
  1. The module before the generator is MMOA-RAG's selector, which reads all passages at once; the
     paper's judges each passage alone.
  2. One policy plays both modules, and its reference is what it was when its phase began.
  3. The reward is the answer's F1 for every data set; the paper has one for each.
"""

from __future__ import annotations

import dataclasses
import functools

from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.mmoa_rag import MMOARAG
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.text.metrics import f1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`: the modules, and how many outputs of one are compared."""

    system: MMOARAG = MMOARAG(modules="S+G", temperature=1.0, top_p=1.0)
    samples: int = 5

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise UserError(f"recipe.samples is {self.samples}: a pair needs 2 or more")


def recipe(settings: Settings) -> Recipe:
    """Groups at the module in training, all carried out; its outputs' mean F1 for credit."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(answer_rewards, metric=f1),
        credit=reachable_leaves,
        expander=lambda roles: Groups(roles, settings.samples, Injection("off"), whole=roles),
        width=settings.samples,
    )
