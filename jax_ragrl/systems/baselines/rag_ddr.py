"""RAG-DDR: every module learns to prefer outputs that led to the better answer.

Li et al. 2025, "RAG-DDR: Optimizing Retrieval-Augmented Generation Using Differentiable Data
Rewards". Several outputs of one module are sampled, and each is continued to the answer. The best
and the worst form a pair for direct preference optimization (`learner/dpo.py`). First the generator
learns, then the module before it (the config section `schedule`).

Departures from the paper
  1. The module before the generator is MMOA-RAG's selector, which reads all passages at once; the
     paper's judges each passage separately.
  2. One policy plays both modules. Its reference is the policy at the start of the phase.
  3. The reward is the F1 of the answer for every data set; the paper has one reward per data set.
  4. There is no configuration at the paper's size, only `configs/tiny/rag_ddr.py`.
"""

from __future__ import annotations

import dataclasses
import functools

from jax_ragrl.config.ranges import Count
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.systems.base import Recipe, check_group_size
from jax_ragrl.systems.mmoa_rag import MMOARAG
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.text.metrics import f1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`.

    Fields:
      system: the modules.
      group_size: outputs of one module that are sampled per prompt and compared.
    """

    system: MMOARAG = MMOARAG(modules="S+G", temperature=1.0, top_p=1.0)
    group_size: Count = 5

    def __post_init__(self) -> None:
        check_group_size("group_size", self.group_size)


def recipe(settings: Settings) -> Recipe:
    """Returns groups of outputs of the module in training, each credited with its mean F1."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(answer_rewards, metric=f1),
        credit=reachable_leaves,
        # Each output is continued to an answer, since its F1 is the preference.
        expander=lambda roles: Groups(
            roles, settings.group_size, Injection("off"), continue_all=roles
        ),
        width=settings.group_size,
    )
