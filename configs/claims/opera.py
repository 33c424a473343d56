"""The claims of OPERA (Liu et al. 2025), see `jax_ragrl.experiments.claims`.

ragrl reproduce --claims 23-29
"""

from ml_collections import ConfigDict

NO_EXPERT = ("recipe.expert.when=off", "recipe.expert_pool=''")
STAGES = {"plan": 6, "analysis": 20, "rewrite": 4}  # steps


def arm(*overrides: str) -> dict:
    return {
        "config": "configs/tiny/opera.py",
        "overrides": overrides,
        "warm_up": "configs/tiny/warmup_opera.py",
    }


def phases(*roles: str) -> str:
    stages = tuple({"steps": STAGES[role], "roles": (role,)} for role in roles)
    return f"schedule.phases={stages}"


CLAIMS = (
    {
        "number": 23,
        "statement": "MAPGRPO is better than GRPO with one reward at the end.",
        "source": "main results",
        "arms": {
            "MAPGRPO": arm(),
            "GRPO": arm(
                *NO_EXPERT,
                "recipe.group_size=1",
                "rollouts=6",
                "schedule.phases=()",
                "objective.advantage=group_normalised",
            ),
        },
        "pairs": (("MAPGRPO", "GRPO"),),
        "missing": "supervised training and prompting: an arm cannot begin with 'ragrl sft'",
    },
    {
        "number": 24,
        "statement": "Without the planner the trained system loses most, without the rewriter "
        "less.",
        "source": "ablation of agents",
        "missing": "roles are removed without training: 'ragrl evaluate --run RUN "
        "--config.recipe.system.max_plan_steps=0' (or max_rewrites=0)",
    },
    {
        "number": 25,
        "statement": "Actions of an expert speed up training; without their gradient they only "
        "lower the advantage of the others.",
        "source": "section 3",
        "arms": {"expert": arm(), "no expert": arm(*NO_EXPERT)},
        "pairs": (("expert", "no expert"),),
        "tests": (
            "tests/systems/opera/test_mapgrpo.py::"
            "test_an_expert_without_gradient_only_raises_the_mean",
        ),
        "missing": "the variance of the gradient is not a metric",
    },
    {
        "number": 26,
        "statement": "Plan, analysis, rewrite is a better order of training than all at once or "
        "the reverse.",
        "source": "staged training",
        "arms": {
            "in order": arm(phases("plan", "analysis", "rewrite")),
            "all at once": arm("schedule.phases=()"),
            "reverse": arm(phases("rewrite", "analysis", "plan")),
        },
        "pairs": (("in order", "all at once"), ("in order", "reverse")),
        "missing": "the tiny roles share a policy, which a later stage may overwrite",
    },
    {
        "number": 27,
        "statement": "The square root of NDCG starts the rewriter sooner than NDCG.",
        "source": "equation of the rewriter's reward",
        "arms": {
            "root": arm("recipe.system.top_k=4"),
            "plain": arm("recipe.system.top_k=4", "recipe.ndcg_power=1.0"),
        },
        "pairs": (("root", "plain"),),
    },
    {
        "number": 28,
        "statement": "EM rises up to five or ten passages per search, then falls a little.",
        "source": "passages per search",
        "missing": "the tiny policy has never read that many passages",
    },
    {
        "number": 29,
        "statement": "Most failures on easy questions are wrong decisions to answer, on hard ones "
        "failed searches.",
        "source": "error analysis",
        "missing": "no command classifies the errors of a trace",
    },
)


def get_config() -> ConfigDict:
    return ConfigDict({"claims": CLAIMS})
