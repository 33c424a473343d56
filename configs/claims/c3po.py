"""The claims of C-3PO (Chen et al. 2025), see `jax_ragrl.experiments.claims`.

ragrl experiment reproduce --claims 1,2
"""

from ml_collections import ConfigDict

C3PO = "configs/tiny/c3po.py"
TREE = {"config": C3PO}
UNTRAINED = {"config": C3PO, "overrides": ("run.steps=0",)}
# The reader knows facts that have changed since: each strategy is the best one for some questions.
ROUTER = {"config": "configs/tiny/c3po_router.py"}
STRATEGIES = ("No Retrieval", "Retrieval", "Planning")
# The policy was not trained with them: a reader that is often distracted, and a search for words.
READER = ("llm.noise=0.3", "llm.confusion=0.6", "llm.max_documents=3")
RETRIEVER = ("index.kind=bm25",)


def knowing(fraction: float) -> dict:
    """An arm whose reader knows a fraction of the facts that have not changed."""
    return ROUTER | {"overrides": (f"data.world.famous_fraction={fraction}",)}


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
            "supervised": UNTRAINED | {"sft": "configs/tiny/sft_c3po.py"},
            "untrained": UNTRAINED,
        },
        "pairs": (("trained", "supervised"), ("supervised", "untrained")),
        "metric": "cover_em",
    },
    {
        "number": 3,
        "statement": "The trained router is as good as the best fixed strategy, and cheaper than "
        "always planning.",
        "source": "section 6",
        "arms": {
            "router": ROUTER,
            **{f"always {name}": ROUTER | {"strategy": name} for name in STRATEGIES},
        },
        "pairs": (
            *(
                {"first": "router", "second": f"always {name}", "kind": "not lower"}
                for name in STRATEGIES
            ),
            {"first": "always Planning", "second": "router", "metric": "retrieval_calls"},
        ),
        "metric": "cover_em",
        "missing": "the router alone is trained, without critic, in a world in which each strategy "
        "is the best one for some questions; a strategy that never plans is cheaper still",
    },
    {
        "number": 4,
        "statement": "A proxy that was trained with one reader and retriever improves others.",
        "source": "section 6.3, table 2",
        "arms": {
            f"{policy}, {other}": arm | {"answer_with": changes}
            for policy, arm in (("trained", TREE), ("untrained", UNTRAINED))
            for other, changes in (("other reader", READER), ("other retriever", RETRIEVER))
        },
        "pairs": tuple(
            (f"trained, {other}", f"untrained, {other}")
            for other in ("other reader", "other retriever")
        ),
        "metric": "cover_em",
        "missing": "the other reader follows the same rules, and is distracted more often; "
        "Standard RAG, with which the paper compares, is no arm",
    },
    {
        "number": 5,
        "statement": "Training moves the strategies towards planning, and a reader that knows "
        "more towards direct answers.",
        "source": "section 6",
        "arms": {
            "trained": TREE,
            "untrained": UNTRAINED,
            "reader knows 90 %": knowing(0.9),
            "reader knows 10 %": knowing(0.1),
        },
        "pairs": (
            {"first": "trained", "second": "untrained", "metric": "strategy=Planning"},
            {
                "first": "reader knows 90 %",
                "second": "reader knows 10 %",
                "metric": "strategy=No Retrieval",
            },
        ),
        "missing": "two worlds: in that of the first half a plan costs nothing, so that a reader "
        "that knows more changes no strategy; in that of the second half a search can mislead",
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
