"""The warm start of C-3PO's policy on demonstrations (Chen et al. 2025, section 5.2, table 6).

    ragrl warmup demos --config=configs/c3po.py --config.policy=FOLDER ... --out=demos.jsonl \
        --writer=openai:Qwen/Qwen2-72B-Instruct@http://localhost:8000/v1
    ragrl warmup sft --config=configs/warmup_c3po.py --out=runs/warm \
        --config.policy=FOLDER --config.data.demos=demos.jsonl
    ragrl train --config=configs/c3po.py --config.policy=runs/warm/checkpoint ...

Policy: Qwen2-0.5B or 1.5B. For a policy of another system, change only the demonstrations.

Data: the paper has six sets of 6,000 questions with four solutions each; here all correct solutions
of a tree are used. A demonstration of more than 4,096 tokens is left out, while the authors'
trainer truncates it.

Epochs: the paper's reinforcement learning starts from the model after one of the three epochs
(appendix A.2). To reproduce this, use `--config.epochs=1`: the learning rate then ends at zero too.

Settings that table 6 does not list are the defaults of the trainer that the authors name. This
config has not been run at that size here.
"""

import functools

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    # A new placeholder per key: one object under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (-1, -1, 1),  # data, fsdp, tensor: fsdp as the width allows
            "compute_dtype": "bfloat16",
            "remat": "full",  # recompute activations in the backward pass: least memory
            "data": {"demos": path()},
            "epochs": 3,
            "batch_size": 512,  # demonstrations per update
            "save_every": 100,  # updates; an interrupted run resumes from the last checkpoint
            "optimizer": {
                "policy_lr": 4e-5,
                "schedule": "cosine",
                "warmup_fraction": 0.03,
                "final_lr_fraction": 0.0,
            },
            "packing": {
                "row_lengths": (1024, 2048, 4096),
                "tokens_per_device": 16384,  # tokens per forward and backward pass
                "max_batch_halvings": 2,  # the last, partly empty batch may shrink to a quarter
            },
        }
    )
