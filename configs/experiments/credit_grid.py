"""Which credit for several agents? Sharing x rollouts x credit x objective, at equal tokens.

    ragrl experiment run configs/experiments/credit_grid.py --out runs/credit_grid
    ragrl experiment run configs/experiments/credit_grid.py --out runs/credit_grid --share 1/2
    ragrl experiment run configs/experiments/credit_grid.py --out runs/credit_grid --finished

27 arms on one world, one reader and one system, C-3PO, whose three roles start from the policy that
ships with the package. An arm is named SHARING-CREDIT:

  sharing   `one`: a policy for all roles; `separate`: a policy per role; `separate_lora`: an
            adapter per role on one frozen base
  credit    chain, PPO: `shared` (the reward of the answer for all actions), `last` (for the last
              action alone: each action has only its own rewards)
            group of rollouts, no critic: `grpo` (rollouts normalized), `rloo` (leave one out),
              `roles` (each action against the actions of its role: agent-wise normalization)
            tree: `leaves` (mean over reachable leaves, PPO), `children` (mean over children, PPO),
              `siblings` (GRPO among the actions of a decision), `siblings_rloo` (leave one out)

Every training ends at the end of the step in which it has generated `TOKENS` tokens. The questions
per step are chosen such that a step of each shape generates about as many tokens, so that all arms
also take about as many optimizer steps. No arm has a KL penalty, forced actions or a decaying rate.
GAE over turns is missing: no turn of C-3PO continues the context of another. The world has no seed
of the configs and their warm starts. Rates are as in `configs/tiny/c3po.py`; the rate of adapters
is not tuned.
"""

from ml_collections import ConfigDict

BASE = "configs/tiny/c3po.py"
TOKENS = 24_000
ROLES = ("router", "filter", "decision")

COMMON = (
    "run.steps=100",  # the budget ends a run before
    f"run.token_budget={TOKENS}",
    "run.role_gradients_every=6",
    # No evaluation during the run; all arms answer the same test questions at its end.
    "run.dev_questions=0",
    "run.eval_every=100",
    "run.save_every=100",
    "run.save_trees_every=100",
    "recipe.tree.router_forcing=sampled",  # no action is forced, in any shape
    "recipe.tree.router_samples=0",
    "objective.kl.where=none",
    "optimizer.schedule=constant",
    "optimizer.minibatches=2",
    # Few shapes: compiling takes as long as training.
    "shapes.prompt_lengths=(144,256)",
    "shapes.batch_sizes=(32,)",
    "packing.row_lengths=(256,)",
    "packing.tokens_per_device=2048",
)
# Tokens of a first step: chain 1,854; group of 30 rollouts 2,567; tree 1,027, then up to 2,240.
CHAIN = ("recipe.tree.width=1", "run.questions_per_step=32")
GROUP = ("recipe.tree.width=1", "rollouts=6", "run.questions_per_step=4")
TREE = ("recipe.tree.width=2", "run.questions_per_step=6")
GRPO = ("objective.critic=none", "objective.advantage=group_normalised")
RLOO = ("objective.critic=none", "objective.advantage=leave_one_out")

CREDITS = {
    "shared": (*CHAIN, "credit=shared"),
    "last": (*CHAIN, "credit=earned"),
    "grpo": (*GROUP, *GRPO, "credit=rollouts"),
    "rloo": (*GROUP, *RLOO, "credit=rollouts"),
    "roles": (*GROUP, *GRPO, "credit=roles"),
    "leaves": (*TREE, "credit=reachable_leaves"),
    "children": (*TREE, "credit=child_mean"),
    "siblings": (*TREE, *GRPO, "credit=siblings"),
    "siblings_rloo": (*TREE, *RLOO, "credit=siblings"),
}
OWN = f"policies={tuple((role, 'tiny') for role in ROLES)}"
SHARING = {
    "one": (),
    "separate": (OWN,),
    "separate_lora": (OWN, "lora.rank=8", "optimizer.policy_lr=4e-3", "optimizer.value_lr=4e-3"),
}


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "arms": {
                f"{sharing}-{credit}": {
                    "config": BASE,
                    "overrides": (*COMMON, *SHARING[sharing], *CREDITS[credit]),
                }
                for credit in CREDITS
                for sharing in SHARING
            },
            "baseline": "one-leaves",
            "metrics": ("cover_em", "f1"),
            "training_seeds": (0, 1, 2),
            "world_seeds": (100,),
            "test_questions": 400,
        }
    )
