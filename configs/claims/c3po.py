"""The claims of C-3PO (Chen et al. 2025), see `jax_ragrl.experiments.claims`.

ragrl reproduce --claims 1,2
"""

from ml_collections import ConfigDict

C3PO = "configs/tiny/c3po.py"
TREE = {"config": C3PO}


CLAIMS = (
    {
        "number": 1,
        "statement": "Trees with Monte Carlo credit train better than single trajectories "
        "at about equal numbers of decisions.",
        "source": "section 6.4",
        "arms": {
            "trees": TREE,
            # Trees have about five times the decisions of a trajectory.
            "trajectories": {
                "config": C3PO,
                "overrides": (
                    "recipe.tree.router_forcing=sampled",
                    "recipe.tree.router_samples=0",
                    "recipe.tree.width=1",
                    "run.questions_per_step=70",
                ),
            },
        },
        "pairs": (("trees", "trajectories"),),
        "metric": "cover_em",
        "missing": "the variance over seeds needs more of them (--training-seeds)",
    },
    {
        "number": 2,
        "statement": "Reinforcement learning is better than supervised training on its own "
        "best answers, which is better than none.",
        "source": "section 5",
        "arms": {
            "trained": TREE,
            "untrained": {"config": C3PO, "overrides": ("run.steps=0",)},
        },
        "pairs": (("trained", "untrained"),),
        "metric": "cover_em",
        "missing": "supervised training: an arm cannot begin with 'ragrl demos' and 'ragrl sft'",
    },
    {
        "number": 3,
        "statement": "The trained router is as good as the best fixed strategy, and cheaper.",
        "source": "section 6",
        "missing": "fixed strategies are no arms: 'ragrl quickstart' evaluates each of them "
        "with the same policy (gain_over_fixed)",
    },
    {
        "number": 4,
        "statement": "A proxy that was trained with one reader and retriever improves others.",
        "source": "section 5",
        "missing": "an arm answers with the reader and retriever of its training: use "
        "'ragrl evaluate --run RUN --llm LLM --index INDEX'",
    },
    {
        "number": 5,
        "statement": "Training moves the strategies towards planning, and a reader that knows "
        "more towards direct answers.",
        "source": "section 6",
        "missing": "strategies are metrics of a run (strategy_frac), not scores of questions: "
        "compare runs with data.world.famous_fraction of 0.1 and 0.9",
    },
    {
        "number": 6,
        "statement": "The Monte Carlo credit of a node is an unbiased estimate of its expected "
        "reward: the mean over children is, equation 5's mean over leaves only on trees of equal "
        "width.",
        "source": "equation 5",
        "tests": (
            "tests/credit/test_returns.py::"
            "test_only_the_mean_over_children_is_unbiased_on_trees_of_unequal_width",
            "tests/credit/test_assign.py::"
            "test_the_mean_over_children_counts_samples_costs_and_dead_branches",
        ),
    },
)


def get_config() -> ConfigDict:
    return ConfigDict({"claims": CLAIMS})
