"""Search-R1 on NQ and HotpotQA with a 3B base model (Jin et al. 2025, arXiv 2503.09516).

    launch/paper.sh search_r1                    (from the downloads to the table, on eight GPUs)
    ragrl train --config=configs/search_r1.py --workdir=runs/search_r1 --config.policy=FOLDER \
        --config.index.encoder=FOLDER --config.index.folder=FOLDER \
        --config.data.files.corpus=corpus.jsonl \
        --config.data.files.train=nq/train.jsonl,hotpotqa/train.jsonl ...
    ragrl train --config=configs/search_r1.py:ppo ...                  (with a critic, no groups)

Policy: Qwen2.5-3B (base). One agent thinks, searches and answers; retrieved text is read and never
trained. The reward is the exact match of the answer alone.

Retriever: e5-base-v2 over the Wikipedia of December 2018, top 3; the authors publish its vectors.

From the authors' script for GRPO with this model: 512 questions per step, minibatches of 256, five
rollouts per question, rate 1e-6 with a warm-up of 28.5 %, KL (k3, 0.001) in the loss, at most two
searches, 500 new tokens per turn, temperature 1. From that for PPO: one rollout per question, KL
(0.001) in the reward, a critic with rate 1e-5; gamma and lambda are 1.

Departures
  1. The prompt is in our words, and documents come between <documents> tags.
  2. Passages are never cut; the code keeps 500 tokens of an observation.
  3. 500 steps; the script for GRPO ends after 1,005.
  4. A minibatch is half of the questions; the script's 256 may count rollouts.
  5. PPO has the warm-up of GRPO, its critic too; the script for PPO has others.
This config has not been run at that size here.
"""

import functools

from ml_collections import ConfigDict, config_dict

ROLLOUTS = {"grpo": 5, "ppo": 1}
OBJECTIVE = {
    "grpo": {
        "critic": "none",
        "advantage": "group_normalised",
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
    },
    "ppo": {
        "critic": "own",
        "advantage": "whitened_gae",
        "gae_span": "conversation",
        "gamma": 1.0,
        "lam": 1.0,
        "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
    },
}


def get_config(preset: str = "grpo") -> ConfigDict:
    # A new placeholder per key: one object under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (-1, -1, 1),  # data, fsdp, tensor: fsdp as the width allows
            "compute_dtype": "bfloat16",
            "remat": "full",  # recompute activations in the backward pass: least memory
            "system": "jax_ragrl.systems.baselines.executor",
            "recipe": {
                "system": {
                    "kind": "search_r1",
                    "style": "coda",  # the folder of the prompts
                    "top_k": 3,
                    "max_turns": 3,  # two searches, and the answer
                    "max_tokens": 500,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": False,  # a base model: observations are plain text
                },
                "rollouts": ROLLOUTS[preset],
            },
            "data": {"files": {"corpus": path(), "train": path(), "dev": path(), "test": path()}},
            # Exact search, as in the paper: 21 million vectors of 768 numbers take 8 GB on each of
            # eight devices. Without an encoder: --config.index.kind=bm25, which searches words.
            "index": {"encoder": path(), "kind": "exact", "folder": "runs/index"},
            "llm": {"kind": "none"},  # the policy answers itself
            "objective": {
                "loss": "clipped_policy_loss",
                "eps_low": 0.2,
                "eps_high": 0.2,
                "aggregation": "token_mean",
                **OBJECTIVE[preset],
            },
            "optimizer": {
                "policy_lr": 1e-6,
                "value_lr": 1e-5,
                "schedule": "constant",
                "warmup_fraction": 0.285,
                "max_grad_norm": 1.0,
                "epochs": 1,
                "minibatches": 2,
            },
            # (metric, lowest, highest): the run stops after 3 steps in a row outside its bounds.
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 500,
                "questions_per_step": 512,
                "save_every": 50,
                "eval_every": 50,
                "baseline_style": "c3po",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (256, 1024, 2048, 4096),  # the code's longest prompt
                "batch_sizes": (16, 64),
                "max_new_tokens": 500,
                "max_prompt_tokens": 65536,  # per device
            },
            "packing": {
                "row_lengths": (1024, 2048, 4608),
                "tokens_per_device": 18432,  # tokens per forward and backward pass
                "max_batch_halvings": 2,  # the last, partly empty batch may shrink to a quarter
            },
        }
    )
