"""C-3PO's table of choices: tree rollouts, answer accuracy, Monte Carlo credit.

Chen et al. 2025, "C-3PO: Compact Plug-and-Play Proxy Optimization to Achieve Human-like
Retrieval-Augmented Generation". One policy plays three roles, distinguished by instruction: the
router selects a strategy, the filter selects among retrieved passages, the decision maker leads a
planned search. Search, roadmap and final answer belong to the environment.

Departures from the paper and its published code
  1. In the mode that allows only `[LLM]`, another action is overwritten in the state, and counted;
     the code corrects a local variable, so that a search still happens. The sampled tokens stay.
  2. A dead branch (malformed action, depth) counts as a leaf of reward 0; the code drops it.
     `dead_leaf="ignore"` restores that.
  3. For the router, both forced texts and forced prefixes are available (paper: prefix, code:
     text).
  4. The router may sample in addition to its forced actions (`router_samples`); in the paper it
     does not. Without samples, training never sees a malformed route of the policy, and the
     probability that losing strategies lose may move there: a run of 48 steps on the embedded
     default ended with half of its routes malformed.
  5. Clip 0.2, gamma 1, lambda 0.95, KL in the reward and whitening are not stated; they are the
     defaults of the trainer that the authors name (OpenRLHF 0.5.6). So is the clip of values
     (eq. 10 has the plain squared error: `objective.value_loss=plain`). The temperature is not
     stated either: 0.6 is the code's, whose sampler also wrote the demonstrations.
  6. Eqs. 8 and 9 add up the tokens of all roles without a denominator. Here each role has the mean
     of its tokens, and the roles are added up (`aggregation=role_sum`): a role with few tokens
     weighs as much as one with many. `token_mean` weighs roles by their tokens. The critic's loss
     is a mean over all tokens.
  7. The definition of a right answer in training is not stated. Here it contains the tokens of a
     gold answer or, with a `judge` in the config, a language model accepts it: the paper's measure,
     by the rules of the paper's prompt in other words. The substring of tables (cover-EM) would pay
     for "I do not know." if the gold answer is "no".
  8. The code gives the router a hint about each data set; here `hint` is one text for all
     questions, and empty, as in the paper.
  9. The query is the text around the bracket; in the code, the text after it. The code also reads
     `[ LLM ]` and `[1,]`, which are malformed here.
 10. Epochs and minibatches are not stated: `configs/c3po.py` takes eight optimizer steps per batch
     of rollouts, one per 128 of about 1,024 actions, as that trainer does.
 11. One roadmap per planned search (`system.roadmaps`), from a prompt with one example; the code
     has two of each.
 12. The paper's depth limit is 13, but its figure 6 shows depths up to 15, the code's limit in
     evaluation: `configs/c3po.py` has 13 in training and 15 in evaluation (`evaluation_depth`), and
     so have tables of prompted models.
 13. Eq. 5 is a mean over leaves, which is a biased estimate of the expected reward where nodes have
     different numbers of leaves below them; `credit=child_mean` is a mean over children.
 14. The paper states no limit for roadmaps and answers of the frozen model. `configs/c3po.py` has
     the code's 2,048 tokens; the default of `system.reply_tokens` is 256.
 15. The fixed strategy `Retrieval` of table 3 searches for the question itself; the policy writes
     no query, which it does in training after the forced prefix (`router_forcing="prefix"`).
 16. After an empty selection a note says that the query found nothing. The decision maker and the
     model that answers read the note, and it counts as a document (`system.max_documents`). A query
     that was made before returns the next page.
"""

from __future__ import annotations

import dataclasses
import functools

from jax_ragrl.config.ranges import Count, Natural
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.expand import ForcedAction, Tree
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.c3po.fixed_strategy import fixed_strategies
from jax_ragrl.systems.c3po.system import C3PO, NO_RETRIEVAL, PLANNING, RETRIEVAL, ROUTER
from jax_ragrl.text.metrics import cover_match_tokens

NO_PLANNING = "no_planning"
SEARCHES = {
    # The policy continues a prefix, here with the query; a complete text stays as it is.
    "prefix": ForcedAction(f"[{RETRIEVAL}]", complete=False),
    "text": ForcedAction(f"[{RETRIEVAL}] $question"),
    NO_PLANNING: ForcedAction(f"[{RETRIEVAL}]", complete=False),
}
SAMPLED_ROUTER = "sampled"


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The rollout (section 5.1) and its credit.

    Fields:
      width: actions sampled per decision.
      branching_depth: decisions down to this depth branch; deeper ones sample one action.
      router_samples: actions that the router samples in addition to its three forced ones.
      router_forcing: how the router's search is forced: `prefix` (the policy writes the query, as
        in the paper), `text` (the question is the query, as in the code), or `no_planning`: as
        `prefix`, but planning is not forced, for questions that one search answers. With `sampled`
        nothing is forced and the router samples `width` actions like any role; with a width of 1
        this is the single trajectory of the paper's ablation (section 6.4).
      dead_leaf: `zero` counts a failed branch as a leaf of reward 0, `ignore` leaves it out.
      weigh_duplicates: the credit weighs identical siblings, which are one node, by their number.
    """

    width: Count = 2
    branching_depth: Natural = 4
    router_samples: Natural = 0
    router_forcing: str = "prefix"
    dead_leaf: str = "zero"
    weigh_duplicates: bool = False

    def __post_init__(self) -> None:
        one_of("tree.router_forcing", self.router_forcing, (*SEARCHES, SAMPLED_ROUTER))
        if self.dead_leaf not in ("zero", "ignore"):
            raise UserError(f"tree.dead_leaf is {self.dead_leaf!r}: it must be zero or ignore")
        if self.router_samples and self.router_forcing == SAMPLED_ROUTER:
            raise UserError(
                f"tree.router_samples is {self.router_samples}, but tree.router_forcing is "
                f"{SAMPLED_ROUTER!r}, so that the router samples `width` actions: set "
                "router_samples to 0"
            )

    def expander(self, roles: frozenset[str] = frozenset()) -> Tree:
        """Returns the tree, the same for any `roles` in training."""
        del roles
        if self.router_forcing == SAMPLED_ROUTER:
            return Tree(self.width, self.branching_depth)
        # All strategies are tried at every root, so that their leaves can be compared.
        search = SEARCHES[self.router_forcing]
        strategies: tuple[ForcedAction, ...] = (ForcedAction(f"[{NO_RETRIEVAL}]"), search)
        if self.router_forcing != NO_PLANNING:
            strategies = (*strategies, ForcedAction(f"[{PLANNING}]"))
        return Tree(self.width, self.branching_depth, {ROUTER: strategies}, self.router_samples)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's.

    Fields:
      system: the steps and how actions are sampled.
      tree: the rollouts and their credit.
      evaluation_depth: the depth limit in evaluation; 0: that of training.
    """

    system: C3PO = C3PO()
    tree: TreeShape = TreeShape()
    evaluation_depth: Natural = 0


def recipe(settings: Settings) -> Recipe:
    """Returns tree rollouts with the accuracy of leaves, averaged over reachable leaves."""
    tree, depth = settings.tree, settings.evaluation_depth or settings.system.max_depth
    credit = functools.partial(
        reachable_leaves,
        ignore_unanswered=tree.dead_leaf == "ignore",
        multiplicity=tree.weigh_duplicates,
    )
    # In evaluation a selection out of range is skipped, and one roadmap makes one rollout.
    inference = dataclasses.replace(settings.system, strict=False, roadmaps=1, max_depth=depth)
    return Recipe(
        system=settings.system,
        reward=functools.partial(answer_rewards, metric=cover_match_tokens),
        credit=credit,
        expander=tree.expander,
        # Forced actions are not sampled, so they do not count for the batch size.
        width=max(tree.width, tree.router_samples),
        inference=inference,
        metric="cover_em",
        accepts_judge=True,
        fixed_strategies=fixed_strategies(inference),
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> C3PO:
    """Returns the system for `ragrl evaluate`, which skips selections out of range.

    Args:
      style: the prompt style.
      top_k: passages per search.
      tiny: whether the policy is the model that ships with the package.
    """
    return C3PO(style, top_k, max_depth=13 if tiny else 15, strict=False)
