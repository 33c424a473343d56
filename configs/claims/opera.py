"""The claims of OPERA (Liu et al. 2025), see `jax_ragrl.experiments.claims`.

ragrl experiment reproduce --claims 23-29
"""

from ml_collections import ConfigDict

NO_EXPERT = ("recipe.expert.when=off", "recipe.expert_pool=''")
STAGES = {"plan": 6, "analysis": 20, "rewrite": 4}  # steps
REVERSE = dict(reversed(STAGES.items()))
FOUR = "recipe.system.top_k=4"


def arm(*overrides: str, **answers: object) -> dict:
    return {
        "config": "configs/tiny/opera.py",
        "overrides": overrides,
        "warm_up": "configs/tiny/warmup_opera.py",
        **answers,
    }


def answering(*overrides: str, **system: int) -> dict:
    """The trained system, with other settings for the test questions alone."""
    answers = tuple(f"recipe.system.{name}={x}" for name, x in system.items())
    return arm(*overrides, answer_with=answers)


# With a rate that decays over the run, the order of the stages would also decide their rates.
CONSTANT = "optimizer.schedule=constant"
RATES = {"plan": 1e-3, "analysis": 1e-3, "rewrite": 1e-4}


def phases(**steps: int) -> tuple[str, str]:
    """Changes that train one role after another, each for a number of steps at its own rate."""
    stages = tuple(
        {"steps": count, "roles": (role,), "policy_lr": RATES[role]}
        for role, count in steps.items()
    )
    return CONSTANT, f"schedule.phases={stages}"


def mistakes(more: str, fewer: str, questions: str) -> dict:
    """One kind of mistake of the trained system is more frequent than another one."""
    return {
        "first": "trained",
        "second": "trained",
        "metric": f"mistake={more}",
        "second_metric": f"mistake={fewer}",
        "among": questions,
    }


CLAIMS = (
    {
        "number": 23,
        "statement": "MAPGRPO is better than GRPO with one reward at the end, than supervised "
        "training, and than none.",
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
            "supervised": arm("run.steps=0", sft="configs/tiny/sft_c3po.py"),
            "untrained": arm("run.steps=0"),
        },
        "pairs": (("MAPGRPO", "GRPO"), ("MAPGRPO", "supervised"), ("MAPGRPO", "untrained")),
    },
    {
        "number": 24,
        "statement": "Without the planner the trained system loses most, without the rewriter "
        "less.",
        "source": "ablation of agents",
        "arms": {
            "all roles": arm(),
            "no rewriter": answering(max_rewrites=0),
            "no planner": answering(max_plan_steps=0),
        },
        "pairs": (("all roles", "no rewriter"), ("no rewriter", "no planner")),
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
            "test_the_advantage_is_relative_to_the_mean_of_a_group",
        ),
        "missing": "the variance of the gradient is not a metric",
    },
    {
        "number": 26,
        "statement": "Plan, analysis, rewrite is a better order of training than all at once or "
        "the reverse.",
        "source": "staged training",
        "arms": {
            "in order": arm(*phases(**STAGES)),
            "all at once": arm(CONSTANT, "schedule.phases=()"),
            "reverse": arm(*phases(**REVERSE)),
        },
        "pairs": (("in order", "all at once"), ("in order", "reverse")),
        "missing": "the tiny roles share a policy, which a later stage may overwrite; all at once, "
        "each step samples groups of all roles, and costs more",
    },
    {
        "number": 27,
        "statement": "The square root of NDCG starts the rewriter sooner than NDCG.",
        "source": "eq. 10; the paper does not compare it with NDCG",
        "arms": {
            "root": arm(FOUR, *phases(rewrite=30)),
            "plain": arm(FOUR, "recipe.ndcg_power=1.0", *phases(rewrite=30)),
        },
        # The mean over the steps is higher if the same gain comes sooner.
        "pairs": (
            {
                "first": "root",
                "second": "plain",
                "metric": "training:retrieval/recall_per_rollout",
            },
        ),
    },
    {
        "number": 28,
        "statement": "EM rises up to five or ten passages per search, then falls a little.",
        "source": "table 10",
        # As in the paper's table: the analysis answers the question, without plan and rewrites.
        "arms": {
            f"{k} passages": answering(FOUR, max_plan_steps=0, max_rewrites=0, top_k=k)
            for k in (1, 2, 4)
        },
        "pairs": tuple(
            {"first": f"{2 * k} passages", "second": f"{k} passages", "among": "hops=1"}
            for k in (1, 2)
        ),
        "metric": "em",
        "missing": "the fall: the tiny policy has never read more than four passages",
    },
    {
        "number": 29,
        "statement": "Most failures on easy questions are wrong decisions to answer, on hard ones "
        "failed searches.",
        "source": "table 11: 42 % of the failures on HotpotQA, 48 % of those on MuSiQue",
        "arms": {"trained": arm()},
        "pairs": (
            # The paper's easy sets have two hops.
            mistakes("premature", "search_failed", "hops=2"),
            mistakes("search_failed", "premature", "hops=3,4"),
        ),
    },
)


def get_config() -> ConfigDict:
    return ConfigDict({"claims": CLAIMS})
