"""`ragrl quickstart --real`: MMOA-RAG's selector and generator with SmolLM2 135M, on two CPU cores.

`mmoa_rag.py` made small. Without the rewriter all rollouts of a question read the same passages,
and share the keys of their prompt; there are two of them, and 12 steps at twice the rate. The
untrained policy reads for the baselines, so that no server is needed.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

MMOA_RAG = runpy.run_path(str(pathlib.Path(__file__).with_name("mmoa_rag.py")))


def get_config() -> ConfigDict:
    config = MMOA_RAG["get_config"]()
    config.recipe.system.update(modules="S+G", top_k=2, selector_max_tokens=12)
    config.llm = {"kind": "local", "model": "smollm2", "dtype": "bfloat16", "max_tokens": 24}
    config.optimizer.policy_lr = 2e-4
    config.run.update(steps=12, save_every=2, eval_every=12, dev_questions=32, test_questions=150)
    config.shapes = {
        "prompt_lengths": (64, 256, 448, 640),
        "batch_sizes": (8, 32),
        "max_new_tokens": 16,
    }
    config.packing.update(row_lengths=(256, 512, 704), tokens_per_device=2112)
    return config
