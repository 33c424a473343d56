"""The train step of other libraries, measured as `bench.train` measures this one's.

The only file of the package that imports torch, which it does not depend on.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from jax_ragrl.bench.train import Work
from jax_ragrl.errors import UserError
from jax_ragrl.models.hf_config import to_hf


def transformers_step(work: Work) -> dict[str, Any]:
    """Forward, backward and AdamW of a Transformers model, every action in a row of its own.

    Gradients are accumulated over micro-batches. Float32 weights under autocast to the compute
    dtype, gradient checkpointing where `remat` is not `none`, logits of the action's tokens only.
    Raises `UserError` where torch is missing.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError(f"{error}: install torch to measure against transformers") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    raw = to_hf(work.config(), "float32")
    config = AutoConfig.for_model(**raw)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).train()
    if work.remat != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    contexts = np.array([turn.context() for turn in work.turns()])
    rows = max(1, work.tokens // contexts.shape[1])
    parts = [torch.tensor(contexts[i : i + rows]) for i in range(0, len(contexts), rows)]
    mixed = torch.autocast(device, torch.bfloat16, enabled=work.dtype == "bfloat16")

    def step() -> None:
        for part in parts:
            ids = part.to(device)
            with mixed:
                logits = model(input_ids=ids, logits_to_keep=work.new + 1).logits[:, :-1]
            chosen = ids[:, -work.new :]
            logps = torch.log_softmax(logits.float(), -1).gather(-1, chosen[..., None])
            (-logps.sum() / len(contexts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    laps = []
    for _ in range(1 + work.repeats):
        begun = time.perf_counter()
        step()
        laps.append(time.perf_counter() - begun)
    seconds = float(np.median(laps[1:]))
    return {
        "step_s": round(seconds, 4),
        "tokens": contexts.size,
        "tokens_per_s": round(contexts.size / seconds, 1),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
