"""The claims of CoDA (Liu et al. 2025), see `jax_ragrl.experiments.claims`.

ragrl reproduce --claims 12-17
"""

from ml_collections import ConfigDict


def arm(*overrides: str) -> dict:
    return {
        "config": "configs/tiny/coda.py",
        "overrides": overrides,
        "warm_up": "configs/tiny/warmup_coda.py",
    }


CLAIMS = (
    {
        "number": 12,
        "statement": "With more passages per search the hierarchy keeps its F1, and a single "
        "agent loses about half.",
        "source": "context overload: -52 % from 3 to 30 passages for the single agent",
        "missing": "the tiny policy has never read 30 passages, in either system",
    },
    {
        "number": 13,
        "statement": "The hierarchy is better than a single agent, the more so the more hops.",
        "source": "+21.5 % EM above three hops",
        "missing": "the two systems have different warm starts, and the tiny ones answer two hops",
    },
    {
        "number": 14,
        "statement": "The reward needs its terms for refinement and, above all, for the format.",
        "source": "ablation of the reward",
        "arms": {
            "full": arm(),
            "no refinement": arm("recipe.refinement_weight=0.0"),
            "neither": arm("recipe.refinement_weight=0.0", "recipe.format_weight=0.0"),
        },
        "pairs": (("full", "no refinement"), ("no refinement", "neither")),
    },
    {
        "number": 15,
        "statement": "Training both contexts is better than prompting them.",
        "source": "main results",
        "arms": {"trained": arm(), "untrained": arm("run.steps=0")},
        "pairs": (("trained", "untrained"),),
        "missing": "the warm start has a planted weakness, which training must remove",
    },
    {
        "number": 16,
        "statement": "Each task has a context of its own; a single agent's holds every search.",
        "source": "section 3",
        "tests": (
            "tests/systems/test_coda.py::test_contexts_only_grow_and_tasks_start_new_ones",
            "tests/systems/test_search_agent.py::test_one_context_contains_the_complete_search",
        ),
    },
    {
        "number": 17,
        "statement": "Statistics of a group over planners alone do not change if an executor's "
        "context occurs twice.",
        "source": "section 3.3",
        "tests": (
            "tests/systems/test_coda.py::test_duplicated_executor_turns_change_no_advantage",
        ),
    },
)


def get_config() -> ConfigDict:
    return ConfigDict({"claims": CLAIMS})
