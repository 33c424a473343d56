"""C-3PO on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl train --config=configs/tiny/c3po.py --workdir=runs/c3po           (or)
    ragrl quickstart --config=configs/tiny/c3po.py                          (with baselines)
    ragrl quickstart --config=configs/tiny/c3po.py:changed      (facts have changed, see below)

Chen et al. 2025, "C-3PO". From the paper: the tree, Monte Carlo credit, PPO with a separate
critic, and the KL coefficient. Scaled to the model: learning rates and batch. Not from the paper:
the router samples an action in addition to its forced ones.
"""

from ml_collections import ConfigDict

WORLDS = {
    # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
    "stable": {"seed": 0, "size": 240, "famous_fraction": 0.3},
    # The reader also knows these relations, of which the passages are out of date: a search
    # misleads it. Each of the three strategies is the best one for some of the questions.
    "changed": {
        "seed": 0,
        "size": 240,
        "famous_fraction": 0.3,
        "hops": (1, 1, 2, 2, 3),
        "outdated_relations": ("mayor", "employer", "spouse", "seat"),
    },
}


def get_config(world: str = "stable") -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "mesh": (),  # the first device
            "compute_dtype": "float32",
            "remat": "none",  # a small model: activations fit in memory
            "data": {"world": WORLDS[world]},
            "index": {"encoder": "hashed", "kind": "scann"},
            # The rule-based reader of the synthetic corpus, in place of a frozen language model.
            "llm": {"kind": "world_reader", "max_documents": 5, "noise": 0.1, "confusion": 0.35},
            "system": "c3po",
            "recipe": {
                "system": {
                    "style": "c3po_tiny",
                    "top_k": 4,
                    "max_depth": 13,
                    "max_documents": 6,
                    "strict": True,  # a selection of a missing document fails the branch
                    "max_tokens": 40,
                    "temperature": 1.0,
                    "reply_tokens": 256,  # of a roadmap or an answer
                },
                "tree": {
                    "width": 2,
                    "branching_depth": 4,  # deeper decisions sample one action
                    "router_samples": 1,  # in addition to the three forced actions
                    "router_forcing": "prefix",  # the policy writes the query of a forced search
                },
                "evaluation_depth": 0,  # as in training
            },
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 0.95,
                "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.005},
                "aggregation": "role_sum",  # eq. 8 adds up the roles
            },
            "optimizer": {"policy_lr": 8e-4, "value_lr": 1e-3, "epochs": 1, "minibatches": 3},
            "run": {
                "steps": 28,
                "questions_per_step": 14,
                "save_every": 7,
                "eval_every": 7,
                "dev_questions": 40,
                "test_questions": 400,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 7,
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
