"""The claims of CoDA (Liu et al. 2025), see `jax_ragrl.experiments.claims`.

ragrl experiment reproduce --claims 12-17
"""

from ml_collections import ConfigDict


def arm(*overrides: str) -> dict:
    return {
        "config": "configs/tiny/coda.py",
        "overrides": overrides,
        "warm_up": "configs/tiny/warmup_coda.py",
    }


# AutoRefine is CoDA without its hierarchy, the paper's single agent. It is trained as CoDA is here.
AS_CODA = (
    "recipe.rollouts=6",
    "objective.loss=dual_clipped_policy_loss",
    "objective.kl.coefficient=0.01",
    "objective.entropy_coefficient=0.001",
    "optimizer.policy_lr=6e-4",
    "optimizer.schedule=cosine",
    "optimizer.minibatches=5",
    "run.questions_per_step=10",
)
# The one context holds the passages of all searches.
LONG_CONTEXT = (
    "recipe.system.max_turns=6",
    "shapes.prompt_lengths=(80,160,288,544)",
    "packing.row_lengths=(160,352,640)",
    "packing.tokens_per_device=2560",
)


def single_agent(**answers: object) -> dict:
    """AutoRefine: one agent with one context, trained in the same world from the same policy."""
    return {
        "config": "configs/tiny/search_r1.py",
        "overrides": ("recipe.system.kind=autorefine", *AS_CODA, *LONG_CONTEXT),
        "warm_up": "configs/tiny/warmup_auto_rag.py:autorefine",
        **answers,
    }


# Three times the passages per search of the training, for the test questions alone.
MORE_PASSAGES = ("recipe.system.top_k=9", "shapes.prompt_lengths=(80,160,288,640,1280)")

CLAIMS = (
    {
        "number": 12,
        "statement": "With more passages per search the hierarchy keeps its F1, and a single "
        "agent loses about half.",
        "source": "context overload: -52 % from 3 to 30 passages for the single agent",
        "arms": {
            "hierarchy, 3 passages": arm(),
            "hierarchy, 9 passages": arm() | {"answer_with": MORE_PASSAGES},
            "single agent, 3 passages": single_agent(),
            "single agent, 9 passages": single_agent(answer_with=MORE_PASSAGES),
        },
        "pairs": (
            {
                "first": "hierarchy, 9 passages",
                "second": "hierarchy, 3 passages",
                "kind": "not lower",
                "margin": 5.0,
            },
            ("single agent, 3 passages", "single agent, 9 passages"),
        ),
        "missing": "30 passages: the tiny policy has never read more than three; the two systems "
        "have different warm starts",
    },
    {
        "number": 13,
        "statement": "The hierarchy is as good as a single agent on questions of one hop, and "
        "better on those of several.",
        "source": "section 4.2; +21.5 % EM above three hops (table 5)",
        "arms": {"hierarchy": arm(), "single agent": single_agent()},
        "pairs": (
            {
                "first": "hierarchy",
                "second": "single agent",
                "kind": "not lower",
                "among": "hops=1",
            },
            {"first": "hierarchy", "second": "single agent", "among": "hops=2"},
        ),
        "metric": "em",
        "missing": "the two systems have different warm starts, and the tiny ones answer two hops; "
        "the growth of the difference with the hops is not tested",
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
