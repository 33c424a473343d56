"""Which credit for several agents that share one policy? Nine credits, five seeds, equal tokens.

    ragrl experiment run configs/experiments/credit_of_one_policy.py --out runs/credit_of_one_policy

The arms of `configs/experiments/credit_grid.py` with one policy for all roles, on more seeds. Their
baseline is the strongest simple one, `untrained-planning`: the policy before training, which plans
for every question. Both files give a cell the same folder, so that finished cells of the grid can
be copied into the folder of this experiment.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

FILE = pathlib.Path(__file__).with_name("credit_grid.py")


def get_config() -> ConfigDict:
    grid = runpy.run_path(str(FILE))
    config = grid["get_config"]()
    arms = {name: arm for name, arm in config.arms.items() if name.startswith("one-")}
    untrained = {"config": grid["BASE"], "overrides": (*grid["COMMON"], "run.steps=0")}
    return ConfigDict(
        {
            **config,
            "arms": {**arms, "untrained-planning": {**untrained, "strategy": "Planning"}},
            "baseline": "untrained-planning",
            "metrics": ("f1",),
            "training_seeds": tuple(range(5)),
        }
    )
