"""Measures the training step of other libraries with the work of `bench.train`.

These libraries put each action into its own row. This is the only file of the package that imports
torch and tunix, which the package does not depend on.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from jax_ragrl.bench.train import TrainWork, peak_bytes, time_step
from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.hf_config import to_hf


def transformers_step(work: TrainWork) -> dict[str, Any]:
    """Measures forward, backward and AdamW of a Transformers model.

    Gradients are accumulated over micro-batches. Weights are float32 under autocast to the compute
    dtype; gradients are checkpointed unless `remat` is `none`; logits are computed for the tokens
    of actions only. Raises `UserError` if torch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{error}: install torch to measure against transformers") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _transformers_model(work).to(device).train()
    # Learning rate 0, as in `bench.train`: all steps do the same work.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    contexts, arrays = _micro_batches(work)
    batches = [torch.tensor(array) for array in arrays]
    # Autocast keeps the weights in float32, as this library's training does.
    autocast = torch.autocast(device, torch.bfloat16, enabled=work.dtype == "bfloat16")

    def step() -> None:
        for batch in batches:
            ids = batch.to(device)
            with autocast:
                # One position more than the action has tokens, because each position predicts the
                # next token.
                logits = model(input_ids=ids, logits_to_keep=work.new + 1).logits[:, :-1]
            targets = ids[:, -work.new :]
            logps = torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None])
            # Each micro-batch frees its activations before the next one; gradients are summed.
            (-logps.sum() / len(contexts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # Kernels run asynchronously: without this, only their launch is timed.
        if device == "cuda":
            torch.cuda.synchronize()

    seconds, _ = time_step(step, work.repeats)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return _speed(contexts, seconds) | {"peak_bytes": peak}


def _transformers_model(work: TrainWork) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**to_hf(work.config(), "float32"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if work.remat != "none":
        # PyTorch recommends the variant without reentrance.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _micro_batches(work: TrainWork) -> tuple[np.ndarray, list[np.ndarray]]:
    """All contexts, one per row, and their split into batches of at most `work.tokens` tokens."""
    # All contexts have equal length, so that no row needs padding.
    contexts = np.array([turn.context() for turn in work.turns()])
    rows = max(1, work.tokens // contexts.shape[1])
    return contexts, [contexts[i : i + rows] for i in range(0, len(contexts), rows)]


def _speed(contexts: np.ndarray, seconds: float) -> dict[str, Any]:
    return {
        "step_s": round(seconds, 4),
        "tokens": contexts.size,
        "tokens_per_s": round(contexts.size / seconds, 1),
    }


IDS = {"pad_id": -1, "eos_id": -1}  # never occur: no token is padding, no action ends early


def tunix_step(work: TrainWork) -> dict[str, Any]:
    """Measures reference scoring, then forward, backward and AdamW of Tunix's GRPO.

    Uses Tunix's compiled training step (`rl.trainer.Trainer`), which accumulates gradients over
    micro-batches, and its `compute_per_token_logps`, one micro-batch at a time. Weights are
    float32, computation has the dtype of the work, and layers are recomputed in the backward pass
    unless `remat` is `none`. Raises `UserError` if Tunix is missing.
    """
    import jax
    from flax import nnx

    try:
        from tunix.rl import common
    except ImportError as error:
        raise UserError(
            f"{error}: install google-tunix to measure against tunix; it is not in the lock files"
        ) from error
    contexts, arrays = _micro_batches(work)
    batches = jax.device_put([array.astype(np.int32) for array in arrays])
    model = _tunix_model(work)

    def score(batch: jax.Array) -> jax.Array:
        prompt, action = batch[:, : work.prompt], batch[:, work.prompt :]
        logps = common.compute_per_token_logps(
            *nnx.split(model), prompt_tokens=prompt, completion_tokens=action, **IDS
        )
        # Depending on the options of Tunix, a tuple that begins with the log-probabilities.
        return logps[0] if isinstance(logps, tuple) else logps

    # Timed separately, as in `bench.train`, because not every objective needs it.
    reference, _ = time_step(lambda: [score(batch) for batch in batches], work.repeats)
    train = _tunix_train(work, model, len(batches))
    examples = [_tunix_example(work, batch, score(batch)) for batch in batches]
    seconds, first = time_step(lambda: [train(example) for example in examples], work.repeats)
    return _speed(contexts, seconds) | {
        "first_step_s": round(first, 2),
        "reference_s": round(reference, 4),
        "micro_batches": len(batches),
        "peak_bytes": peak_bytes(),
    }


def _tunix_train(work: TrainWork, model: Any, batches: int) -> Callable[[Any], Any]:
    """Tunix's compiled training step with its GRPO loss; `batches` calls make one update."""
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
        # Learning rate 0, as for the other libraries.
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.0)),
        # Never evaluates: only the compiled training step is called.
        TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=batches),
        custom_checkpoint_metadata_fn=dict,
    )
    trainer = trainer.with_loss_fn(loss, has_aux=True)
    trainer = trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
    train: Callable[[Any], Any] = trainer.jit_train_and_eval_step()[0]
    return train


def _tunix_example(work: TrainWork, batch: Any, ref_logps: Any) -> Any:
    import jax.numpy as jnp
    from tunix.rl import common

    return common.TrainExample(
        prompt_ids=batch[:, : work.prompt],
        prompt_mask=jnp.ones((len(batch), work.prompt), bool),
        completion_ids=batch[:, work.prompt :],
        completion_mask=jnp.ones((len(batch), work.new), bool),
        advantages=jnp.ones(len(batch)),
        ref_per_token_logps=ref_logps,
        # Without old log-probabilities the loss uses its own, as in a first update on new rollouts.
        old_per_token_logps=None,
    )


def _tunix_model(work: TrainWork) -> Any:
    """Tunix's model of the work's architecture: Qwen2 has biases, Qwen3 normalized heads."""
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


def measure_peer(name: str, work: TrainWork) -> dict[str, Any]:
    """Measures another library in a new process, so that its peak memory is its own."""
    # "spawn" instead of "fork": a forked process would inherit the state of JAX.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(PEERS[name], work).result()


def compare_steps(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compares two measurements of the same work.

    Returns:
      `times_faster`: their seconds over ours, reference scoring included if both measured it;
      `memory_share`: our peak memory over theirs, None if unknown.
    """
    keys = [key for key in ("step_s", "reference_s") if key in theirs]
    # Sums instead of a mean of ratios: a training step takes the time of both.
    ratio = sum(theirs[key] for key in keys) / sum(ours[key] for key in keys)
    share = ours["peak_bytes"] / theirs["peak_bytes"] if theirs["peak_bytes"] else None
    return {"times_faster": round(ratio, 3), "memory_share": share and round(share, 4)}


PEERS: dict[str, Callable[[TrainWork], dict[str, Any]]] = {
    "transformers": transformers_step,
    "tunix": tunix_step,
}
