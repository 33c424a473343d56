"""`ragrl quickstart --real`: MMOA-RAG's selector and generator with SmolLM2 135M, on two CPU cores.

`mmoa_rag.py` without the rewriter, on Natural Questions alone, which one search answers. All
rollouts of a question then read the same passages, and share the keys of their prompt. The
untrained policy reads for the baselines, so that no server is needed.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

MMOA_RAG = runpy.run_path(str(pathlib.Path(__file__).with_name("mmoa_rag.py")))


def get_config() -> ConfigDict:
    config = MMOA_RAG["get_config"]()
    files = {"corpus": "nq:corpus", "train": "nq:train", "dev": "nq:dev", "test": "nq:test"}
    config.data.files.update(files)
    config.index = {"encoder": "minilm", "kind": "scann"}
    config.recipe.system.update(modules="S+G", top_k=3, selector_max_tokens=12)
    config.llm = {"kind": "local", "model": "smollm2", "dtype": "bfloat16", "max_tokens": 24}
    config.run.update(save_every=2, eval_every=8, dev_questions=32, test_questions=400)
    config.shapes = {
        # Each has a program per batch size and role: twelve lengths would save a seventh of the
        # padded prompt tokens of a rollout, and need twice as many programs.
        "prompt_lengths": (64, 256, 512, 640, 1024),
        "batch_sizes": (4, 16, 32),
        "max_new_tokens": 16,
    }
    config.packing.update(row_lengths=(256, 512, 640), tokens_per_device=2048)
    return config
