"""MAO-ARAG on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_mao_arag.py --out=runs/warm-mao_arag
    ragrl train --config=configs/tiny/mao_arag.py --workdir=runs/mao_arag \
        --config.policy=runs/warm-mao_arag/checkpoint

Chen et al. 2025, "MAO-ARAG: Multi-Agent Orchestration for Adaptive Retrieval-Augmented Generation".
The rule-based reader of the synthetic corpus plays the executors. From the paper: rewards, the
limit of turns and the equal weights of costs. Scaled to the model: learning rates, lengths and
batch. The unit of token costs is, as in the paper, the cost of the most expensive workflow:
rewriter, selector and answer cost 5.1e-5 dollars here, a summary 1.4e-5 to 2.1e-5.
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
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3}},
            "index": {"encoder": "hashed", "kind": "scann"},
            # The rule-based reader of the synthetic corpus, in place of a frozen language model.
            "llm": {"kind": "world_reader", "max_documents": 5, "noise": 0.1, "confusion": 0.35},
            "system": "mao_arag",
            "recipe": {
                "system": {
                    "style": "mao_arag_tiny",
                    "top_k": 4,
                    "max_turns": 5,  # planner calls: one plan, and one per sub-question
                    "max_tokens": 16,  # a workflow is a short list of names
                    "temperature": 1.0,
                    "select_needs_search": False,
                    "executors": ("QDS", "QDP", "QR", "R", "DS", "AG"),
                    "reply_tokens": 256,  # of an executor
                },
                "costs": {
                    "alpha": 0.1,  # the weight of all costs
                    "token_weight": 1.0,
                    "retrieval_weight": 1.0,
                    "turn_weight": 1.0,
                    "dollars_per_1k_prompt_tokens": 0.000225,
                    "dollars_per_1k_completion_tokens": 0.0009,
                    "dollars_per_cost_unit": 7e-5,
                    "turn_table": "code",
                },
                "train_malformed": True,
            },
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 1.0,
                "kl": {"where": "terminal", "estimator": "k1", "coefficient": 0.001},
                "aggregation": "token_mean",
            },
            "optimizer": {
                "policy_lr": 8e-4,
                # Without a slow rise some seeds end with one search for every question.
                "warmup_fraction": 0.4,
                "value_lr": 1e-3,
                "epochs": 1,
                "minibatches": 2,
            },
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
                "prompt_lengths": (80,),
                "batch_sizes": (16, 64),
                "max_new_tokens": 16,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (112,), "tokens_per_device": 1536},
        }
    )
