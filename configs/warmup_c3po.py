"""The warm start of C-3PO's policy on demonstrations (Chen et al. 2025, section 5.2, table 6).

    ragrl demos --config=configs/c3po.py --config.policy=FOLDER ... --out=demos.jsonl \
        --writer=openai:Qwen/Qwen2-72B-Instruct@http://localhost:8000/v1
    ragrl sft --config=configs/warmup_c3po.py --out=runs/warm \
        --config.policy=FOLDER --config.data.demos=demos.jsonl
    ragrl train --config=configs/c3po.py --config.policy=runs/warm/checkpoint ...

The policy is Qwen2-0.5B or 1.5B. The paper has six sets of 6,000 questions with four solutions each
(here: all right ones of a tree), and begins to reinforce the model that one of the three epochs has
made (its appendix A.2): `--config.epochs=1`, whose rate then ends at zero, too. What table 6 does
not say is the default of the trainer that its authors name. A demonstration of more than
4,096 tokens is left out, where that trainer cuts it. This config has not been run at that size
here; for a policy of another system, change nothing but the demonstrations.
"""

import functools

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    # One for each key: a placeholder under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (1, -1, 1),
            "compute": "bfloat16",
            "remat": "full",
            "data": {"demos": path()},
            "epochs": 3,
            "batch": 512,
            "save_every": 100,
            "optimizer": {
                "policy_lr": 4e-5,
                "schedule": "cosine",
                "warmup": 0.03,
                "final": 0.0,
            },
            "layout": {"lengths": (1024, 2048, 4096), "tokens": 16384, "halvings": 2},
        }
    )
