"""The warm start of a SmolLM2 135M policy on demonstrations, on two CPU cores.

    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "smollm2",
            "mesh": (),  # the first device
            "compute_dtype": "bfloat16",
            "remat": "dots",  # recomputes all but matmuls: less memory, and faster on a CPU
            "data": {"demos": config_dict.placeholder(str)},
            "epochs": 1,
            "batch_size": 16,
            "save_every": 10,
            "lora": {"rank": 16},
            "optimizer": {"policy_lr": 3e-4, "schedule": "constant"},
            "packing": {
                "row_lengths": (256, 512, 1024, 1792),
                "tokens_per_device": 2048,
                "max_batch_halvings": 2,
            },
        }
    )
