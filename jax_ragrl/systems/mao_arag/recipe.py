"""MAO-ARAG's table of choices: the answer's F1, costs per planner call, PPO.

Chen et al. 2025, "MAO-ARAG: Multi-Agent Orchestration for Adaptive Retrieval-Augmented Generation".
A trained planner answers a question with a comma-separated list of frozen executors. Query
rewriter, retriever, document selector and answer generator form a workflow; a serial or a parallel
decomposition is a complete plan, and each of its sub-questions gets a planner call and a workflow.
Every planner call earns the F1 of the final answer and pays for the effects it caused.

Departures from the paper and its published code
  1. The grammar (`workflows.py`) has the 16 workflows that end in AG, and the two decompositions
     for the first plan. The code also accepts AS, which has no meaning in a plan: it runs
     automatically after sub-questions.
  2. Turn costs are the code's: 0.25 for each sub-question of QDS, 0.25 for QDP. The rows of the
     paper's table 4 are swapped, as its own text shows; `costs.turn_table=paper` has them as they
     are printed.
  3. Parallel sub-questions run at the same time; the code runs them in sequence and prices them as
     parallel.
  4. A malformed turn is trained. The code masks malformed turns before the first legal plan, as
     `train_malformed=False` does (`code()`).
  5. A decomposition pays for the substitutions and the summary that follow, also QDP (for which the
     code reads the key of QDS).
  6. DS before any R has nothing to select from and is skipped; `select_needs_search` makes such a
     plan malformed. QR changes the search query, not the question that is answered.
  7. If no sub-question has an answer when the turns are used up, there is nothing to summarize: the
     rollout is dead.
  8. The paper states no limit for replies of executors; here it is 256 tokens
     (`system.reply_tokens`).
  9. `configs/mao_arag.py` takes one optimizer step per batch of rollouts, as the code does: 96
     rollouts in batches of 96.
 10. The paper scales the token cost to a range between 0 and 1; here a turn of many long calls may
     cost more than 1.
 11. Advantages are whitened over the batch, as in the code; eq. 8 has plain ones.
The costs have equal weights in the paper, and 1 : 0.25 : 0.5 in the code (`code()`), whose unit of
token costs is 5e-4 dollars instead of 6.02e-4.
"""

from __future__ import annotations

import dataclasses
import functools

from jax_ragrl.credit.assign import shared_credit
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.mao_arag.fixed_workflow import fixed_workflows
from jax_ragrl.systems.mao_arag.rewards import Costs, follows_grammar, reward
from jax_ragrl.systems.mao_arag.system import MAOARAG


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's main result, without costs.

    Fields:
      system: the steps and how actions are sampled.
      costs: weights and prices of the costs of a planner call.
      train_malformed: whether malformed planner calls before the first legal plan are trained.
    """

    system: MAOARAG = MAOARAG()
    costs: Costs = Costs()
    train_malformed: bool = True


def paper() -> Settings:
    """The choices of the paper: the three costs have equal weights."""
    return Settings()


def code() -> Settings:
    """The choices of the published code."""
    costs = Costs(retrieval_weight=0.25, turn_weight=0.5, dollars_per_cost_unit=5e-4)
    return Settings(costs=costs, train_malformed=False)


def recipe(settings: Settings) -> Recipe:
    """Returns single rollouts in which each planner call earns the answer's F1 minus its costs."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, costs=settings.costs),
        credit=shared_credit,
        metric="f1",
        accepts_judge=True,
        fixed_strategies=fixed_workflows(settings.system),
        trainable=None if settings.train_malformed else follows_grammar,
        priced=settings.costs.alpha > 0,
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> MAOARAG:
    """Returns the system for `ragrl evaluate`.

    Args:
      style: the prompt style.
      top_k: passages per search.
      tiny: whether the policy is the model that ships with the package.
    """
    del tiny
    return MAOARAG(style, top_k)
