"""Are C-3PO's trees better than single trajectories, at about equal numbers of decisions?

    ragrl experiment run configs/experiments/tree_or_chain.py

Chen et al. 2025, section 6.4. Trees have about five times the decisions of a trajectory. Therefore
the arm `chain` has five times the questions per step; the `totals` in the result show how equal the
budgets were. The world and its test questions are the same for all seeds of training.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "arms": {
                "tree": {"config": "configs/tiny/c3po.py"},
                "chain": {
                    "config": "configs/tiny/c3po.py",
                    "overrides": (
                        "recipe.tree.router_forcing=sampled",
                        "recipe.tree.router_samples=0",
                        "recipe.tree.width=1",
                        "run.questions_per_step=70",
                    ),
                },
            },
            "baseline": "chain",
            "metrics": ("cover_em", "f1"),
            "training_seeds": (0, 1, 2),
            "world_seeds": (100,),  # no seed of the configs and their warm starts
        }
    )
