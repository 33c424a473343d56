r"""Reinforcement learning against imitation, from the same supervised policy, on real questions.

    ragrl warmup demos --config=configs/real/c3po.py --writer=labels --out=runs/c3po/all.jsonl
    ragrl warmup demos --config=configs/real/c3po.py --writer=labels --out=runs/c3po/few.jsonl \
        --limit 120
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/c3po/W \
        --config.data.demos=runs/c3po/few.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/c3po/S \
        --config.data.demos=runs/c3po/all.jsonl --config.epochs=3
    ragrl experiment run configs/experiments/real.py:c3po --out runs/c3po/arms

  W    supervised on the labels of 120 questions
  S    supervised on all labels; the number of epochs was chosen on dev
  R0   reinforcement learning from W
  R    reinforcement learning from S
  E    expert iteration from S: imitation of the best own rollouts, as many of them as in R
  S: always STRATEGY    one strategy for all questions

With the argument `c3po:roles` there is also an arm per role: R, of that role alone.
The claim that reinforcement learning is worth its rollouts is R - S > 0 and R - E > 0.
"""

from ml_collections import ConfigDict

STRATEGIES = {
    "c3po": ("No Retrieval", "Retrieval", "Planning"),
    "mao_arag": ("AG", "R,AG", "QDS,R,AG"),
}
ROLES = {
    "c3po": ("router", "filter", "decision"),
    "mmoa_rag": ("rewriter", "selector", "generator"),
    "coda": ("planner", "executor"),
    "opera": ("plan", "analysis", "rewrite"),
}
IMITATION = ("objective.advantage=best_of_group", "objective.loss=policy_gradient_loss")


def get_config(name: str = "c3po") -> ConfigDict:
    system, _, kind = name.partition(":")

    def arm(start: str, *overrides: str, **fields) -> dict:
        policy = f"policy=runs/{system}/{start}/checkpoint"
        return {"config": f"configs/real/{system}.py", "overrides": (policy, *overrides), **fields}

    still = "run.steps=0"
    arms = {
        "S": arm("S", still),
        "W": arm("W", still),
        "R0": arm("W"),
        "R": arm("S"),
        "E": arm("S", *IMITATION),
    }
    for strategy in STRATEGIES.get(system, ()):
        arms[f"S: always {strategy}"] = arm("S", still, strategy=strategy)
    if kind == "roles":
        for role in ROLES[system]:
            phase = f"schedule.phases=({{'steps':1,'roles':('{role}',)}},)"
            arms[f"R, {role} alone"] = arm("S", phase)
    return ConfigDict(
        {
            "arms": arms,
            "baseline": "S",
            "metrics": ("f1", "cover_em", "em"),
            "test_questions": 1204,
        }
    )
