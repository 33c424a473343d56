"""A warm start of MAO-ARAG on demonstrations, with the tiny policy, on two CPU cores.

    ragrl warmup demos --config=configs/tiny/mao_arag.py --writer=labels --limit=400 \
        --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/tiny/sft_mao_arag.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl

The shipped policy was never taught workflows: three epochs of 400 demonstrations leave a loss of
3.2, and no plan is legal. Twenty epochs leave 0.05.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "data": {"demos": config_dict.placeholder(str)},
            "epochs": 20,
            "batch_size": 32,  # demonstrations per update
            "optimizer": {"policy_lr": 1e-3, "warmup_fraction": 0.03, "final_lr_fraction": 0.0},
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (112, 160, 256), "tokens_per_device": 1536},
        }
    )
