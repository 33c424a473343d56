"""The train step of other libraries, measured as `bench.train` measures this one's.

Every action is in a row of its own, as these libraries have it. The only file of the package that
imports torch and tunix, which it does not depend on.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from jax_ragrl.bench.train import Work, peak_bytes, timed
from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.hf_config import to_hf


def transformers_step(work: Work) -> dict[str, Any]:
    """Forward, backward and AdamW of a Transformers model.

    Gradients are accumulated over micro-batches. Float32 weights under autocast to the compute
    dtype, gradient checkpointing where `remat` is not `none`, logits of the action's tokens only.
    Raises `UserError` where torch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{error}: install torch to measure against transformers") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _transformers_model(work).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    contexts, arrays = _micro_batches(work)
    parts = [torch.tensor(array) for array in arrays]
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

    seconds, _ = timed(step, work.repeats)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return _speed(contexts, seconds) | {"peak_bytes": peak}


def _transformers_model(work: Work) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**to_hf(work.config(), "float32"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if work.remat != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _micro_batches(work: Work) -> tuple[np.ndarray, list[np.ndarray]]:
    """All contexts, a row each, and the same in parts of at most `work.tokens` tokens."""
    contexts = np.array([turn.context() for turn in work.turns()])
    rows = max(1, work.tokens // contexts.shape[1])
    return contexts, [contexts[i : i + rows] for i in range(0, len(contexts), rows)]


def _speed(contexts: np.ndarray, seconds: float) -> dict[str, Any]:
    return {
        "step_s": round(seconds, 4),
        "tokens": contexts.size,
        "tokens_per_s": round(contexts.size / seconds, 1),
    }


IDS = {"pad_id": -1, "eos_id": -1}  # ids that do not occur: nothing is padding, nothing ends


def tunix_step(work: Work) -> dict[str, Any]:
    """Reference scoring, then forward, backward and AdamW of a Tunix model with its GRPO loss.

    Tunix's own compiled train step (`rl.trainer.Trainer`), which accumulates over micro-batches,
    and its own `compute_per_token_logps`, a micro-batch at a time. Float32 weights, the compute
    dtype of the work, each layer computed again in the backward pass where `remat` is not `none`.
    Raises `UserError` where Tunix is missing.
    """
    import jax
    from flax import nnx

    try:
        from tunix.rl import common
    except ImportError as error:
        raise UserError(
            f"{error}: install google-tunix to measure against tunix, beside this package and not "
            "in its lock"
        ) from error
    contexts, arrays = _micro_batches(work)
    parts = jax.device_put([array.astype(np.int32) for array in arrays])
    model = _tunix_model(work)

    def scored(part: jax.Array) -> jax.Array:
        prompt, action = part[:, : work.prompt], part[:, work.prompt :]
        logps = common.compute_per_token_logps(
            *nnx.split(model), prompt_tokens=prompt, completion_tokens=action, **IDS
        )
        return logps[0] if isinstance(logps, tuple) else logps

    reference, _ = timed(lambda: [scored(part) for part in parts], work.repeats)
    train = _tunix_train(work, model, len(parts))
    examples = [_tunix_example(work, part, scored(part)) for part in parts]
    seconds, first = timed(lambda: [train(example) for example in examples], work.repeats)
    return _speed(contexts, seconds) | {
        "first_step_s": round(first, 2),
        "reference_s": round(reference, 4),
        "micro_batches": len(parts),
        "peak_bytes": peak_bytes(),
    }


def _tunix_train(work: Work, model: Any, parts: int) -> Callable[[Any], Any]:
    """Tunix's compiled train step with its GRPO loss; every `parts` calls are one update."""
    import optax
    from tunix.rl.algo_core import grpo_loss_fn
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.rl.trainer import Trainer
    from tunix.sft.peft_trainer import TrainingConfig

    config = GRPOConfig(num_generations=max(work.siblings, 2), beta=0.04)
    config.temperature = 1.0

    def loss(model: Any, train_example: Any) -> Any:
        return grpo_loss_fn(model, train_example, algo_config=config, **IDS)

    trainer = Trainer(
        model,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.0)),
        TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=parts),
        custom_checkpoint_metadata_fn=dict,
    )
    trainer = trainer.with_loss_fn(loss, has_aux=True)
    trainer = trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
    train: Callable[[Any], Any] = trainer.jit_train_and_eval_step()[0]
    return train


def _tunix_example(work: Work, part: Any, ref_logps: Any) -> Any:
    import jax.numpy as jnp
    from tunix.rl import common

    return common.TrainExample(
        prompt_ids=part[:, : work.prompt],
        prompt_mask=jnp.ones((len(part), work.prompt), bool),
        completion_ids=part[:, work.prompt :],
        completion_mask=jnp.ones((len(part), work.new), bool),
        advantages=jnp.ones(len(part)),
        ref_per_token_logps=ref_logps,
        old_per_token_logps=None,
    )


def _tunix_model(work: Work) -> Any:
    """Tunix's model of the work's shape: its Qwen2 has biases, its Qwen3 normalised heads."""
    import jax.numpy as jnp
    from flax import nnx

    c: DecoderConfig = work.config()
    if c.qkv_bias:
        from tunix.models.qwen2 import model as family

        make = family.Qwen2
    else:
        from tunix.models.qwen3 import model as family

        make = family.Qwen3
    remat = family.RematConfig.NONE if work.remat == "none" else family.RematConfig.DECODER
    config = family.ModelConfig(
        num_layers=c.num_layers,
        vocab_size=c.vocab_size,
        embed_dim=c.hidden_size,
        hidden_dim=c.intermediate_size,
        num_heads=c.num_heads,
        head_dim=c.head_dim,
        num_kv_heads=c.num_kv_heads,
        rope_theta=int(c.rope_theta),
        norm_eps=c.rms_norm_eps,
        use_tied_embedding=c.tie_embeddings,
        remat_config=remat,
        dtype=jnp.dtype(c.dtype),
        param_dtype=jnp.float32,
    )
    return make(config, rngs=nnx.Rngs(0))


def measure_peer(name: str, work: Work) -> dict[str, Any]:
    """A peer's step, in a process of its own: its peak memory is nobody else's."""
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=alone) as pool:
        return pool.submit(PEERS[name], work).result()


def beside(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """How many times faster our step is, with the scoring by a reference where a peer has it, and
    what share of a peer's peak memory it takes, where that is known."""
    parts = [part for part in ("step_s", "reference_s") if part in theirs]
    ratio = sum(theirs[part] for part in parts) / sum(ours[part] for part in parts)
    share = ours["peak_bytes"] / theirs["peak_bytes"] if theirs["peak_bytes"] else None
    return {"times_faster": round(ratio, 3), "memory_share": share and round(share, 4)}


PEERS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "transformers": transformers_step,
    "tunix": tunix_step,
}
