"""The gain of a system over its own warm start, by training, over three seeds.

    ragrl experiment run configs/experiments/gains.py:c3po            # configs/tiny/c3po.py
    ragrl experiment run configs/experiments/gains.py:real/mmoa_rag   # configs/real/mmoa_rag.py

A tiny system starts from the warm-up of its name, or without one from the policy of its config. A
pretrained model learns from labels first; for it, `untrained` is the policy before.
"""

import pathlib

from ml_collections import ConfigDict

FOLDER = pathlib.Path(__file__).parents[1]


def get_config(name: str = "c3po") -> ConfigDict:
    folder, _, system = name.rpartition("/")
    arm, arms = {"config": f"configs/{folder or 'tiny'}/{system}.py"}, {}
    if folder:
        arms["untrained"] = {**arm, "overrides": ("run.steps=0",)}
        # Those of the published code for MMOA-RAG.
        labels = "labels:answer" if system == "mmoa_rag" else "labels"
        arm |= {"sft": f"configs/{folder}/warm_start.py", "demos": labels}
    elif (FOLDER / "tiny" / f"warmup_{system}.py").exists():
        arm["warm_up"] = f"configs/tiny/warmup_{system}.py"
    arms |= {"trained": arm, "warm start": {**arm, "overrides": ("run.steps=0",)}}
    return ConfigDict(
        {
            "arms": {f"{system} {kind}": values for kind, values in arms.items()},
            "baseline": f"{system} warm start",
            "metrics": ("f1", "em", "cover_em"),
        }
    )
