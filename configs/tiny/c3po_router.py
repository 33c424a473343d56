"""C-3PO's router alone, on a synthetic corpus in which each strategy is best for some questions.

    ragrl quickstart                                          (or)
    ragrl train --config=configs/tiny/c3po_router.py --workdir=runs/router

Some relations have changed since the passages were written, and the reader knows their current
facts: a search misleads it. For other questions one search or a plan of searches is best. Only the
router is trained: a rollout branches at the router, whose actions are compared with each other
(`credit=siblings`), without a critic. The router has a policy of its own, so that the other roles
remain as they are: its gain over the best fixed strategy is what routing is worth.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            # With the weights of the others, what it learns may make their actions malformed.
            "policies": (("router", ""),),
            "mesh": (),  # the first device
            "compute_dtype": "float32",
            "remat": "none",  # a small model: activations fit in memory
            "data": {
                "world": {
                    "seed": 0,
                    "size": 240,
                    "famous_fraction": 0.3,
                    "hops": (1, 1, 2, 2, 3),
                    "outdated_relations": ("mayor", "employer", "spouse", "seat"),
                }
            },
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
                    "branching_depth": 1,  # the router only
                    "router_samples": 1,  # in addition to the three forced actions
                    "router_forcing": "prefix",  # the policy writes the query of a forced search
                },
                "evaluation_depth": 0,  # as in training
            },
            "credit": "siblings",
            "objective": {
                # Strategies that win are imitated, in three passes over the rollouts: forced
                # actions are off-policy, and pushing losers down has no bound.
                "loss": "policy_gradient_loss",
                "critic": "none",
                "advantage": "above_mean",
                "kl": {"where": "none"},
                "aggregation": "role_sum",
                "skip_zero_advantage": True,  # every role but the router
            },
            "optimizer": {"policy_lr": 8e-4, "epochs": 3, "minibatches": 2},
            "run": {
                "steps": 30,
                "questions_per_step": 24,
                "save_every": 15,
                "eval_every": 15,
                "dev_questions": 40,
                "test_questions": 400,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 15,
                "trees_per_save": 2,
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (80, 144, 256),
                "batch_sizes": (4, 8),
                "max_new_tokens": 40,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (112, 160, 256), "tokens_per_device": 448},
        }
    )
