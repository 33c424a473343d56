"""The claims of MAO-ARAG (Chen et al. 2025), see `jax_ragrl.experiments.claims`.

ragrl reproduce --claims 18-22
"""

from ml_collections import ConfigDict


def arm(*overrides: str) -> dict:
    return {
        "config": "configs/tiny/mao_arag.py",
        "overrides": overrides,
        "warm_up": "configs/tiny/warmup_mao_arag.py",
    }


CLAIMS = (
    {
        "number": 18,
        "statement": "A higher price lowers F1 slowly at first, and to trivial workflows beyond "
        "a threshold.",
        "source": "section 4.4",
        "arms": {
            "no price": arm("recipe.costs.alpha=0.0"),
            "low price": arm(),
            "high price": arm("recipe.costs.alpha=1.0"),
        },
        "pairs": (("no price", "high price"), ("low price", "high price")),
        "missing": "tokens, searches and turns are totals of a run, not scores of questions",
    },
    {
        "number": 19,
        "statement": "The trained planner is better than the untrained one, and than the best "
        "fixed workflow on mixed questions.",
        "source": "section 4.2",
        "arms": {"trained": arm(), "untrained": arm("run.steps=0")},
        "pairs": (("trained", "untrained"),),
        "missing": "fixed workflows are rows of 'ragrl evaluate --systems workflows', no arms",
    },
    {
        "number": 20,
        "statement": "The price of turns decides between serial and parallel decomposition.",
        "source": "table 4",
        "tests": (
            "tests/systems/test_mao_arag.py::test_the_printed_turn_table_swaps_the_decompositions",
        ),
        "missing": "which one a trained planner chooses per kind of question is not a score",
    },
    {
        "number": 21,
        "statement": "A small planner that learns from a large one reaches it; from scratch it "
        "fails.",
        "source": "section 4.3",
        "missing": "there is one tiny policy, of one size",
    },
    {
        "number": 22,
        "statement": "Planners learn legal plans sooner if malformed turns are trained too.",
        "source": "format penalty",
        "arms": {
            "all turns": arm(),
            "legal turns": arm("recipe.train_malformed=False"),
        },
        "pairs": (("all turns", "legal turns"),),
    },
)


def get_config() -> ConfigDict:
    return ConfigDict({"claims": CLAIMS})
