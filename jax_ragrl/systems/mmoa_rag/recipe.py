"""MMOA-RAG's table of choices: a shared F1 reward, penalties per role, PPO.

Chen et al. 2025, "Improving Retrieval-Augmented Generation through Multi-Agent Reinforcement
Learning". One policy plays three roles. The rewriter splits the question into searches, which share
a fixed number of passages; the selector names the passages worth reading; the generator answers.
Every role earns the F1 of the answer and pays for its own faults. A module that is off passes its
input on.

Two baselines of the paper are one module before the frozen language model as reader: RRR is its
rewriter (`QR`; Ma et al. 2023, "Query Rewriting for Retrieval-Augmented Large Language Models") and
BGM its selector (`S`; Ke et al. 2024, "Bridging the Preference Gap between Retrievers and LLMs").

Departures from the paper and its published code
  1. Penalties read the raw text. The code counts sub-questions after cutting them to four, so that
     its penalty never applies; its effective rule is a limit on their characters (`code()`).
  2. The selector's mask applies in scoring too; the code samples with a mask and scores without.
     The mask admits tokens that join pieces of a selection, as tokenizers merge them. With
     `grammar` set to `strict`, a selection is in ascending order; the paper allows any order.
  3. An empty line is not a query; the code searches with it.
  4. The reward is the best F1 over all gold answers, with the guard on yes and no that the code has
     only in evaluation; the code uses one gold answer per question. The reward replaces punctuation
     by a space, as the code does; tables delete it, for all systems.
  5. One user turn per role; the code puts scripted assistant turns before it.
  6. The paper states no word limit for answers and no temperature; 30 and 0.95 are the code's.
  7. RRR's hit is an answer in whole words; in its code it is any substring. BGM's bridge may repeat
     a passage; here a selection names each passage once.
  8. The paper states no epochs and no minibatches. `configs/mmoa_rag.py` takes six optimizer steps
     per batch of rollouts, as the code does: two epochs of three minibatches.
  9. The warm starts of RRR and BGM are MMOA-RAG's; each of their papers makes one from the
     successes of its frozen model. RRR and BGM have no configuration at the paper's size, only
     `configs/tiny/one_module.py`.
 10. The KL coefficient falls from a maximum of 0.2 to a minimum of 0.06 (table 6) by a rule that
     the paper does not state. `configs/mmoa_rag.py` has the code's adaptive controller between
     these bounds; the code's own has a minimum alone.
 11. Eq. 11 adds up the agents. Here the loss is one mean over the tokens of all agents, as in the
     code, so that an agent weighs as much as it writes; `objective.aggregation=role_sum` adds up
     the mean of each.
 12. Advantages are whitened over the batch, as in the code; the paper's equations have plain ones.
The paper has its KL in the reward of the last token, the code in that of every token: this and the
learning rate are settings of the objective (`configs/mmoa_rag.py`).
"""

from __future__ import annotations

import dataclasses
import functools

from jax_ragrl.config.ranges import Count
from jax_ragrl.credit.assign import over_roles, shared_credit
from jax_ragrl.errors import UserError
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.mmoa_rag.rewards import REWARDS, Penalties, reward
from jax_ragrl.systems.mmoa_rag.system import DOCUMENT, MMOARAG


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's.

    Fields:
      system: the steps and how actions are sampled.
      penalties: the penalties of each role.
      reward: the reward of an answer: its `f1`, or RRR's `em_f1_hit`.
      rollouts: rollouts per question; several are for a group rule, which replaces the critic.
    """

    system: MMOARAG = MMOARAG()
    penalties: Penalties = Penalties()
    reward: str = "f1"
    rollouts: Count = 1

    def __post_init__(self) -> None:
        if self.reward not in REWARDS:
            raise UserError(f"recipe.reward is {self.reward!r}: use {' or '.join(REWARDS)}")


def paper() -> Settings:
    """The choices of the paper."""
    return Settings()


def code() -> Settings:
    """The choices of the published code."""
    return Settings(penalties=Penalties(query_rule="characters", generator=-1.0))


def recipe(settings: Settings) -> Recipe:
    """Returns chains in which each role earns the answer's F1 and its own penalty."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, metric=settings.reward, penalties=settings.penalties),
        credit=shared_credit,
        compare=over_roles,  # a critic does not need a group
        rollouts=settings.rollouts,
        metric="f1",
        accepts_judge=True,
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> MMOARAG:
    """Returns the system for `ragrl evaluate`.

    Args:
      style: the prompt style.
      top_k: passages per search.
      tiny: whether the policy is the model that ships with the package.
    """
    # The mask of the selector needs a word of one token.
    return MMOARAG(style, top_k=top_k, document_word="D" if tiny else DOCUMENT)
