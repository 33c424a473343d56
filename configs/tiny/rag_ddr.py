"""RAG-DDR on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_mmoa_rag.py --out=runs/warm-mmoa_rag
    ragrl train --config=configs/tiny/rag_ddr.py --workdir=runs/rag_ddr \
        --config.policy=runs/warm-mmoa_rag/checkpoint

Li et al. 2025. The generator first learns from pairs of sampled answers, then the selector learns
from the answers that its selections led to. MMOA-RAG's warm-up teaches both roles.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "mesh": (),  # the first device
            "compute_dtype": "float32",
            "remat": "none",  # a small model: activations fit in memory
            "system": "jax_ragrl.systems.baselines.rag_ddr",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": "S+G",
                    "top_k": 4,
                    "document_word": "D",  # one token, as the mask needs: `D3` is `Document3`
                    "rewriter_max_tokens": 40,
                    "selector_max_tokens": 12,
                    "generator_max_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "group_size": 5,  # outputs per prompt; the best and the worst are a pair
            },
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3}},
            "index": {"encoder": "hashed", "kind": "scann"},
            "preference": {"beta": 0.1},
            # DPO reads from the objective only that there is a reference.
            "objective": {
                "critic": "none",
                "advantage": "group_centred",
                "kl": {"where": "reward"},
            },
            "schedule": {
                "phases": (
                    {"steps": 9, "roles": ("generator",)},
                    {"steps": 9, "roles": ("selector",)},
                ),
            },
            "optimizer": {"policy_lr": 1e-4, "schedule": "constant", "minibatches": 2},
            "run": {
                "steps": 18,
                "questions_per_step": 48,
                "save_every": 6,
                "eval_every": 6,
                "dev_questions": 40,
                "test_questions": 400,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 6,
                "trees_per_save": 2,
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (80, 144, 256),
                "batch_sizes": (16, 64),
                "max_new_tokens": 16,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (160, 256), "tokens_per_device": 1536},
        }
    )
