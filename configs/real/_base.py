"""What the configs of this folder share: policy, data, search, and the frozen model.

The policy is SmolLM2 135M. The frozen model reads what the policy's choices lead to, and is never
trained. It is Qwen2.5-Coder 1.5B (qwen2.5-coder-1.5b-instruct-q4_k_m.gguf, Apache-2.0, SHA-256
cc324af070c2ecbf...) behind an OpenAI-compatible server on this machine, for example llama.cpp's:

    llama-server --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --alias qwen2.5-coder-1.5b \
        --port 8080 --ctx-size 8192 --parallel 2

Questions of one hop and of several share one index of words (jax_ragrl/data/mixture/README.md).
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

FILES = {
    "corpus": "mixture:corpus",
    "train": "mixture:train",
    "dev": "mixture:dev",
    "test": "mixture:test",
}
# One request at a time per slot of a server on few cores, where a reply may take a minute.
FROZEN = {
    "kind": "openai",
    "model": "qwen2.5-coder-1.5b",
    "base_url": "http://127.0.0.1:8080/v1",
    # Of fixed strategies, with the prompts of `c3po_real` and `mao_arag_real`; others are sent.
    "replies": "mixture:replies",
    "concurrency": 2,
    "timeout": 600.0,
}


def with_base(sections: Mapping[str, Any]) -> ConfigDict:
    """Returns the shared config with the sections of a system, whose keys replace shared ones."""
    config = ConfigDict(
        {
            "seed": 0,
            "policy": "smollm2",
            "mesh": (),  # the first device
            "compute_dtype": "bfloat16",
            "remat": "dots",  # recomputes all but matmuls: less memory, and faster on a CPU
            "data": {"files": FILES},
            "index": {"kind": "bm25"},
            "llm": FROZEN,
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_centred",
                "kl": {"where": "none"},
                "skip_zero_advantage": True,  # half of the groups at times
                "aggregation": "token_mean",
            },
            # A low-rank adapter: half the arithmetic of the update, and little memory.
            "lora": {"rank": 16},
            "optimizer": {"policy_lr": 1e-4, "schedule": "constant"},
            "run": {
                "steps": 24,
                "questions_per_step": 8,
                "save_every": 4,
                "eval_every": 12,
                "dev_questions": 160,
                "test_questions": 1204,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 6,
                "trees_per_save": 2,
                "baseline_style": "c3po_real",
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {
                "row_lengths": (512, 1024),
                "tokens_per_device": 3072,
                "max_batch_halvings": 2,
            },
        }
    )
    config.update(ConfigDict(sections))
    return config
