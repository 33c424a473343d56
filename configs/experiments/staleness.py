"""Does C-3PO learn as well from rollouts that are one update old?

    ragrl experiment run configs/experiments/staleness.py --out runs/staleness

With `run.staleness=1` the rollouts of a step run during the update of the step before. Truncated
importance weights correct for the older policy (`objective.importance_weight_cap`). The world and
its test questions are the same for all seeds of training, and have no seed of the configs and their
warm starts. `metrics.jsonl` of each cell holds its learning curve.
"""

from ml_collections import ConfigDict

BASE = "configs/tiny/c3po.py"
# All test questions at the end, and no evaluation before.
COMMON = ("run.dev_questions=0", "run.eval_every=100")
STALE = ("run.staleness=1", "objective.importance_weight_cap=2.0")


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "arms": {
                "fresh": {"config": BASE, "overrides": COMMON},
                "stale": {"config": BASE, "overrides": (*COMMON, *STALE)},
            },
            "baseline": "fresh",
            "metrics": ("cover_em", "f1"),
            "training_seeds": (0, 1, 2),
            "world_seeds": (100,),
            "test_questions": 400,
        }
    )
