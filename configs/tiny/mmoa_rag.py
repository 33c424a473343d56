"""MMOA-RAG on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_mmoa_rag.py --out=runs/warm-mmoa_rag
    ragrl train --config=configs/tiny/mmoa_rag.py --workdir=runs/mmoa_rag \
        --config.policy=runs/warm-mmoa_rag/checkpoint

Chen et al. 2025, "Improving Retrieval-Augmented Generation through Multi-Agent Reinforcement
Learning". From the paper: modules, penalties, shared reward and the KL of the last token. Scaled to
the model: learning rates, lengths (also the limit of words for the generator's penalty), batch and
a constant KL coefficient. A separate critic replaces the value head, which a model of this size
cannot share.

All searches of a question are made at once, which finds single facts and both sides of a
comparison, but not the second link of a chain: there are no such questions here. The loss sums over
roles, because their answers differ in length.

Without a critic, with GRPO's groups per role, and a quarter of the questions:
    --config.recipe.rollouts=4 --config.objective.critic=none \
        --config.objective.advantage=group_normalised --config.run.questions_per_step=16
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
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3, "hops": (1,)}},
            "index": {"encoder": "hashed", "kind": "scann"},
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": "QR+S+G",
                    "top_k": 4,
                    "document_word": "D",  # one token, as the mask needs: `D3` is `Document3`
                    "rewriter_max_tokens": 40,
                    "selector_max_tokens": 12,
                    "generator_max_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "penalties": {
                    "rewriter": -0.5,
                    "query_rule": "count",
                    "selector": -1.0,
                    "generator": -0.5,
                    "max_answer_words": 8,  # 16 tokens cannot hold the 30 words of the code
                },
                "reward": "f1",
                "rollouts": 1,
            },
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 0.95,
                "kl": {"where": "terminal", "estimator": "k1", "coefficient": 0.01},
                "aggregation": "role_sum",
            },
            "optimizer": {"policy_lr": 8e-4, "value_lr": 1e-3, "epochs": 1, "minibatches": 4},
            "run": {
                "steps": 30,
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
