"""MMOA-RAG with a real policy and retriever (Chen et al. 2025, tables 1, 2 and 6).

    ragrl train --config=configs/mmoa_rag.py --workdir=runs/mmoa_rag \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.data.files.corpus=corpus.jsonl ...
    ragrl train --config=configs/mmoa_rag.py:code ...          (as the authors published it)

Policy: Llama-3-8B-Instruct after a warm start on heuristic labels: `ragrl warmup demos` with this
config and `--writer=labels`, then `ragrl warmup sft` with configs/warmup_c3po.py and the rates of
the code (`--config.optimizer.policy_lr=1e-4 --config.epochs=1 --config.batch_size=32`; it trains a
LoRA, such as `--config.lora.rank=16`). The rewriter learns only from `rewritings` in the metadata
of the questions, separated by `;`; a language model as the writer teaches all three roles.

Retriever: Contriever over Wikipedia.

Result in the paper: an F1 of 48.29 on HotpotQA, 46.40 on 2WikiMultihopQA and 48.59 on AmbigQA; the
warm start alone has 44.69, 42.97 and 46.71. This config has not been run at that size here.

Paper and code differ in the penalties (`systems/mmoa_rag`), in the place of the KL (the paper's
eq. 15: the reward of the last token; the code: the reward of each token), and in its coefficient.
The paper lowers it from a maximum of 0.2 to a minimum of 0.06 without saying how; here the
controller of the code does it, between these bounds. In the code nothing bounds it above.
Advantages are whitened, as in the code; the paper's equations have plain ones.
Temperature, epochs and minibatches are the code's, because the paper gives none: two
epochs, and as many sequences per minibatch as questions in a batch, which are a third of its
sequences (a copy of LLaMA-Factory 0.9.1.dev0 with the PPO of TRL 0.9.6). The learning rate
falls to zero, as a cosine does in the framework that the authors name. The paper's buffer of 128
has no unit: here it is questions. The code's example has 32 of them per device and trains a LoRA,
which `:code` does not: `--config.run.questions_per_step=32 --config.lora.rank=8`.

Smaller pipelines: `--config.recipe.system.modules=S+G` and `QR+G`.

Ablations: keep one role from learning (figure 2; the policy is shared, so that this role still
changes with the others), here the selector. Without penalties, and with a policy per role:
    --config.schedule.phases="({'steps':700,'roles':('rewriter','generator')},)"
    --config.recipe.penalties.rewriter=0 --config.recipe.penalties.selector=0 \
        --config.recipe.penalties.generator=0
    --config.policies="(('rewriter','FOLDER'),('selector','FOLDER'),('generator','FOLDER'))"
"""

import functools

from ml_collections import ConfigDict, config_dict

PENALTIES = {
    "paper": {
        "rewriter": -0.5,
        "query_rule": "count",  # penalize too many queries
        "selector": -1.0,
        "generator": -0.5,
        "max_answer_words": 30,  # the code's limit; the paper gives none
    },
    "code": {
        "rewriter": -0.5,
        "query_rule": "characters",  # penalize too long a text
        "selector": -1.0,
        "generator": -1.0,
        "max_answer_words": 30,
    },
}
KL = {
    "paper": {"where": "terminal", "min_coefficient": 0.06, "max_coefficient": 0.2},
    "code": {"where": "reward", "min_coefficient": 0.05, "max_coefficient": 0.0},
}
LEARNING = {
    "paper": {"policy_lr": 2e-5, "warmup_fraction": 0.0},
    "code": {"policy_lr": 1e-5, "warmup_fraction": 0.1},
}


def get_config(preset: str = "paper") -> ConfigDict:
    # A new placeholder per key: one object under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (-1, -1, 1),  # data, fsdp, tensor: fsdp as the width allows
            "compute_dtype": "bfloat16",
            "remat": "full",  # recompute activations in the backward pass: least memory
            "data": {"files": {"corpus": path(), "train": path(), "dev": path(), "test": path()}},
            # Exact search: an approximate index would lower the recall.
            # 21 million vectors of 768 numbers take 8 GB on each of eight devices.
            # Without an encoder: --config.index.kind=bm25, which searches words.
            "index": {"encoder": path(), "kind": "exact", "folder": "runs/index"},
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag",  # the folder of the prompts
                    "modules": "QR+S+G",  # query rewriter, selector, generator
                    "top_k": 10,  # passages per question, shared by its queries
                    "document_word": "Document",  # a selection reads `Document0,Document3`
                    "rewriter_max_tokens": 100,
                    "selector_max_tokens": 29,
                    "generator_max_tokens": 100,
                    "temperature": 0.95,
                    "top_p": 0.9,
                },
                "penalties": PENALTIES[preset],
                "reward": "f1",
                "rollouts": 1,  # no group: the critic is the baseline
            },
            "llm": {"kind": "none"},  # the policy answers itself
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "shared",  # a value head on the policy
                "value_coefficient": 0.1,
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 0.95,
                # The controller keeps an action's KL near the target, in nats.
                "kl": {"estimator": "k1", "coefficient": 0.2, "target": 6.0, **KL[preset]},
                "aggregation": "token_mean",
            },
            "optimizer": {
                "schedule": "cosine",
                "final_lr_fraction": 0.0,
                "epochs": 2,
                "minibatches": 3,
                **LEARNING[preset],
            },
            # (metric, lowest, highest): the run stops after 3 steps in a row outside its bounds.
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 700,  # one epoch of HotpotQA
                "questions_per_step": 128,
                "save_every": 20,
                "eval_every": 20,
                "baseline_style": "c3po",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (512, 1024, 2048, 4096),
                "batch_sizes": (16, 64),
                "max_new_tokens": 100,
                "max_prompt_tokens": 65536,  # per device
            },
            "packing": {
                "row_lengths": (512, 1024, 2048, 4096),
                "tokens_per_device": 16384,  # tokens per forward and backward pass
                "max_batch_halvings": 2,  # the last, partly empty batch may shrink to a quarter
            },
        }
    )
