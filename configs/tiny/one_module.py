"""RRR and BGM on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_mmoa_rag.py --out=runs/warm-mmoa_rag
    ragrl train --config=configs/tiny/one_module.py:rrr --workdir=runs/rrr \
        --config.policy=runs/warm-mmoa_rag/checkpoint
    ragrl train --config=configs/tiny/one_module.py:bgm --workdir=runs/bgm ...

One module is trained in front of a frozen reader, here the rule-based one. RRR (Ma et al. 2023)
trains MMOA-RAG's query rewriter on exact match, F1 and whether the search found an answer; BGM (Ke
et al. 2024) trains its selector on the F1. Both are PPO with the KL in the reward, without
MMOA-RAG's penalties. The warm start is MMOA-RAG's; each paper builds its own from successes of its
frozen model.
"""

from ml_collections import ConfigDict

MODULES = {"rrr": "QR", "bgm": "S"}
REWARD = {"rrr": "em_f1_hit", "bgm": "f1"}


def get_config(preset: str = "rrr") -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "mesh": (),  # the first device
            "compute_dtype": "float32",
            "remat": "none",  # a small model: activations fit in memory
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3, "hops": (1,)}},
            "index": {"encoder": "hashed", "kind": "scann"},
            # The rule-based reader of the synthetic corpus, in place of a frozen language model.
            "llm": {"kind": "world_reader", "max_documents": 5, "noise": 0.1, "confusion": 0.35},
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": MODULES[preset],
                    "top_k": 4,
                    "document_word": "D",  # one token, as the mask needs: `D3` is `Document3`
                    "rewriter_max_tokens": 40,
                    "selector_max_tokens": 12,
                    "generator_max_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "penalties": {
                    "rewriter": 0.0,
                    "query_rule": "count",
                    "selector": 0.0,
                    "generator": 0.0,
                    "max_answer_words": 30,
                },
                "reward": REWARD[preset],
                "rollouts": 1,
            },
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 0.95,
                "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.01},
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 8e-4, "value_lr": 1e-3, "epochs": 1, "minibatches": 4},
            "run": {
                "steps": 18,
                "questions_per_step": 64,
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
                "max_new_tokens": 40,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (112, 160, 256), "tokens_per_device": 1536},
        }
    )
