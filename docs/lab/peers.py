"""Measures this library and another one with the same work: updates, sampling and embedding.

    python docs/lab/peers.py train transformers [options of ragrl bench train]
    python docs/lab/peers.py train tunix
    python docs/lab/peers.py sample transformers [options of ragrl bench sample]
    python docs/lab/peers.py embed sentence-transformers --corpus FILE [--count 1000]

The other libraries put each action into its own row; they are measured in a process of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import pathlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import numpy as np

from jax_ragrl.bench.sample import SampleWork, bench_sample, sampling_speed
from jax_ragrl.bench.train import (
    Timing,
    TrainWork,
    bench_train,
    peak_bytes,
    time_step,
    update_times,
)
from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.encoder import load_encoder, read_config
from jax_ragrl.models.hf_config import to_hf
from jax_ragrl.models.published import published_config


def transformers_step(work: TrainWork) -> dict[str, Any]:
    """Measures a plain PyTorch update of GRPO with a Transformers model.

    It is reference scoring, then a step of forward, backward and AdamW. Gradients are accumulated
    over micro-batches. Weights are float32 under autocast to the compute dtype; gradients are
    checkpointed unless `remat` is `none`; logits are computed for the tokens of actions only.

    """
    torch, device = _torch()
    model = _transformers_model(work.config(), work.remat).to(device).train()
    # Learning rate 0, as in `bench.train`: all steps do the same work.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    contexts, arrays = _micro_batches(work)
    batches = [torch.tensor(array).to(device) for array in arrays]

    def logps_of(ids: Any) -> Any:
        # Autocast keeps the weights in float32, as this library's training does.
        with torch.autocast(device, torch.bfloat16, enabled=work.dtype == "bfloat16"):
            # One position more than the action has tokens, because each position predicts the next
            # token.
            logits = model(input_ids=ids, logits_to_keep=work.new + 1).logits[:, :-1]
        targets = ids[:, -work.new :]
        return torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None])[..., 0]

    def score() -> list[Any]:
        with torch.no_grad():
            return [logps_of(ids) for ids in batches]

    def step(references: list[Any]) -> None:
        for ids, reference in zip(batches, references, strict=True):
            # Each micro-batch frees its activations before the next one; gradients are summed.
            (_grpo_loss(torch, logps_of(ids), reference) / len(contexts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    references = score()
    return _update_speed(
        contexts,
        reference=time_step(_synchronized(torch, device, score), work.repeats),
        step=time_step(_synchronized(torch, device, lambda: step(references)), work.repeats),
    ) | {"peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None}


def _grpo_loss(torch: Any, logps: Any, reference: Any) -> Any:
    """The clipped loss with advantage 1 and the KL estimator k3, summed over tokens."""
    ratio, difference = torch.exp(logps - logps.detach()), reference - logps
    kl = torch.exp(difference) - difference - 1
    return (0.04 * kl - torch.minimum(ratio, ratio.clamp(0.8, 1.2))).sum()


def transformers_sample(work: SampleWork) -> dict[str, Any]:
    """Measures `generate` of a Transformers model with the work of `bench.sample`.

    Siblings are `num_return_sequences`; all rows of a batch have the new tokens of its longest
    prompt, and those beyond the limit of a prompt are not counted. With several turns and one
    sibling, `kept_cache` has the same with the keys and values of a conversation passed on from
    turn to turn.
    """
    torch, device = _torch()
    config = published_config(work.shape)
    model = _transformers_model(config, "none").to(device, getattr(torch, work.dtype)).eval()

    def measure(keep_cache: bool) -> dict[str, Any]:
        def rollout() -> None:
            for start in range(0, work.prompts, work.batch):
                _generate_turns(torch, model, work, start, keep_cache)

        timing = time_step(_synchronized(torch, device, rollout), work.repeats)
        return sampling_speed(timing, work.tokens)

    result = measure(keep_cache=False)
    if work.turns > 1 and work.siblings == 1:
        result |= {"kept_cache": measure(keep_cache=True)}
    return result


def _generate_turns(torch: Any, model: Any, work: SampleWork, start: int, keep_cache: bool) -> None:
    """Generates all turns of a batch of prompts.

    Args:
      torch: the module.
      model: a Transformers model.
      work: the work.
      start: the first prompt of the batch.
      keep_cache: whether each turn gets the keys and values of the turn before.
    """
    from transformers import DynamicCache

    batch = slice(start, start + work.batch)
    jobs = work.jobs(model.config.vocab_size)[batch]
    longest = max(job.limit for job in jobs)
    ids = torch.tensor([job.ids for job in jobs]).to(model.device)
    cache = {"past_key_values": DynamicCache()} if keep_cache else {}
    for observations in [*work.observations(model.config.vocab_size), None]:
        rows = model.generate(
            ids,
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            num_return_sequences=work.siblings,
            pad_token_id=0,
            **cache,
        )
        if observations is not None:
            more = torch.tensor(observations[batch]).to(model.device)
            ids = torch.cat([rows[:: work.siblings], more], dim=1)


def _torch() -> tuple[Any, str]:
    """Returns torch and the name of its device."""
    import torch

    return torch, "cuda" if torch.cuda.is_available() else "cpu"


def _synchronized(torch: Any, device: str, step: Callable[[], Any]) -> Callable[[], None]:
    """Returns a step that waits for its kernels; without this, only their launch is timed."""

    def run() -> None:
        step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def _transformers_model(config: DecoderConfig, remat: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.for_model(**to_hf(config, "float32"))
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa")
    if remat != "none":
        # PyTorch recommends the variant without reentrance.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _micro_batches(work: TrainWork) -> tuple[np.ndarray, list[np.ndarray]]:
    """All contexts, one per row, and their split into batches of at most `work.tokens` tokens."""
    # All contexts have equal length, so that no row needs padding.
    contexts = np.array([turn.context() for turn in work.turns()])
    rows = max(1, work.tokens // contexts.shape[1])
    return contexts, [contexts[i : i + rows] for i in range(0, len(contexts), rows)]


def _update_speed(contexts: np.ndarray, reference: Timing, step: Timing) -> dict[str, Any]:
    return {
        **update_times(reference, step),
        "tokens": contexts.size,
        "tokens_per_s": round(contexts.size / step.seconds, 1),
    }


IDS = {"pad_id": -1, "eos_id": -1}  # never occur: no token is padding, no action ends early


def tunix_step(work: TrainWork) -> dict[str, Any]:
    """Measures reference scoring, then forward, backward and AdamW of Tunix's GRPO.

    Uses Tunix's compiled training step (`rl.trainer.Trainer`), which accumulates gradients over
    micro-batches, and its `compute_per_token_logps`, one micro-batch at a time. Weights are
    float32, computation has the dtype of the work, and layers are recomputed in the backward pass
    unless `remat` is `none`.
    """
    from flax import nnx
    from tunix.rl import common

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
    reference = time_step(lambda: [score(batch) for batch in batches], work.repeats)
    train = _tunix_train(work, model, len(batches))
    examples = [_tunix_example(work, batch, score(batch)) for batch in batches]
    step = time_step(lambda: [train(example) for example in examples], work.repeats)
    return _update_speed(contexts, reference, step) | {
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


def sentence_transformers_embed(work: EmbedWork) -> dict[str, Any]:
    """Measures `SentenceTransformer.encode` in batches of 32 texts, its default.

    Returns the fields of `embedding_speed`, `peak_bytes` and the vectors, float32 `vectors_XD`.
    """
    torch, device = _torch()
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(read_config(work.encoder, weights=True)[0]), device=device)
    texts = work.texts()
    timing = time_step(_synchronized(torch, device, lambda: model.encode(texts)), work.repeats)
    speed = embedding_speed(timing, work.count)
    return {**speed, "peak_bytes": peak_bytes(), "vectors_XD": model.encode(texts)}


def measure_peer(name: str, work: TrainWork | SampleWork | EmbedWork) -> dict[str, Any]:
    """Measures another library in a new process, so that its peak memory is its own."""
    peers: Mapping[str, Any] = PEERS_OF[type(work)]
    # "spawn" instead of "fork": a forked process would inherit the state of JAX.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        result: dict[str, Any] = pool.submit(peers[name], work).result()
        return result


def compare_steps(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compares two measurements of the same update.

    Returns:
      `times_faster`: their seconds over ours, reference scoring included if both measured it;
      `times_faster_cpu`: the same of CPU seconds, None if unknown;
      `memory_share`: our peak memory over theirs, None if unknown.
    """
    # Sums instead of a mean of ratios: a training step takes the time of both.
    seconds = _ratio(ours, theirs, ("step_s", "reference_s"))
    cpu = _ratio(ours, theirs, ("step_cpu_s", "reference_cpu_s"))
    share = ours["peak_bytes"] / theirs["peak_bytes"] if theirs["peak_bytes"] else None
    return {
        "times_faster": seconds,
        "times_faster_cpu": cpu,
        "memory_share": share and round(share, 4),
    }


def compare_rollouts(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns their seconds and CPU seconds over ours, for the same rollout.

    `kept_cache` has their rollout with a cache per conversation, and its ratios, if measured.
    """
    ratios: dict[str, Any] = _times_faster(ours, theirs, "rollout")
    if "kept_cache" in theirs:
        with_cache = theirs["kept_cache"]
        ratios |= {"kept_cache": with_cache | compare_rollouts(ours, with_cache)}
    return ratios


def compare_embeddings(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns their seconds and CPU seconds over ours, for the same passages."""
    return _times_faster(ours, theirs, "embed")


def _times_faster(
    ours: dict[str, Any], theirs: dict[str, Any], work: str
) -> dict[str, float | None]:
    return {
        "times_faster": _ratio(ours, theirs, (f"{work}_s",)),
        "times_faster_cpu": _ratio(ours, theirs, (f"{work}_cpu_s",)),
    }


def _ratio(ours: dict[str, Any], theirs: dict[str, Any], keys: tuple[str, ...]) -> float | None:
    """Returns the sum of their values over ours, of the keys that both have; None without any."""
    keys = tuple(key for key in keys if key in theirs and key in ours)
    if not keys:
        return None
    return round(float(sum(theirs[key] for key in keys) / sum(ours[key] for key in keys)), 3)


@dataclasses.dataclass(frozen=True)
class EmbedWork:
    """The measured work: one call that embeds `count` passages.

    Fields:
      corpus: file of passages in a known format.
      encoder: `minilm`, a folder, or a name on the Hugging Face Hub.
      count: number of passages, from the start of the corpus.
      repeats: number of timed calls, after one that compiles; the fastest counts.
    """

    corpus: pathlib.Path
    encoder: str = "minilm"
    count: int = 1000
    repeats: int = 2

    def texts(self) -> list[str]:
        """Returns the texts to embed, as an index embeds them but for the prefix of the encoder."""
        return [passage_text(x) for x in load_corpus(self.corpus).passages[: self.count]]


def bench_embed(work: EmbedWork, reference_XD: np.ndarray | None = None) -> dict[str, Any]:
    """Measures `TextEncoder.encode`, tokenization included.

    Args:
      work: the work.
      reference_XD: vectors of the same passages by another library.

    Returns:
      The work, its `tokens` without padding, the fields of `embedding_speed`, and with a reference
      `smallest_cosine` of a vector with its reference.
    """
    texts, encoder = work.texts(), load_encoder(work.encoder)
    timing = time_step(lambda: encoder.encode(texts), work.repeats)
    result = {
        "device": jax.devices()[0].device_kind,
        **dataclasses.asdict(work),
        "corpus": work.corpus.name,
        "tokens": sum(map(len, encoder.tokenize(texts))),
        **embedding_speed(timing, work.count),
        "first_s": round(timing.first, 2),
        "peak_bytes": peak_bytes(),
    }
    if reference_XD is not None:
        result["smallest_cosine"] = smallest_cosine(encoder.encode(texts), reference_XD)
    return result


def embedding_speed(timing: Timing, count: int) -> dict[str, float]:
    """Returns the seconds and CPU seconds of a call, and its passages per second."""
    return {
        "embed_s": round(timing.seconds, 3),
        "embed_cpu_s": round(timing.cpu, 3),
        "passages_per_s": round(count / timing.seconds, 1),
    }


def smallest_cosine(x_XD: np.ndarray, y_XD: np.ndarray) -> float:
    """Returns the smallest cosine of two vectors in the same row."""
    norms_X = np.linalg.norm(x_XD, axis=1) * np.linalg.norm(y_XD, axis=1)
    return round(float(np.min(np.sum(x_XD * y_XD, axis=1) / norms_X)), 6)


PEERS_OF: dict[type, Mapping[str, Callable[..., dict[str, Any]]]] = {
    TrainWork: {"transformers": transformers_step, "tunix": tunix_step},
    SampleWork: {"transformers": transformers_sample},
    EmbedWork: {"sentence-transformers": sentence_transformers_embed},
}


def compare(work: TrainWork | SampleWork | EmbedWork, name: str) -> dict[str, Any]:
    """Returns the measurement of this library with that of another one below its name."""
    # The peer runs first, while this process has not allocated device memory yet.
    theirs = measure_peer(name, work)
    if isinstance(work, TrainWork):
        result = bench_train(work)
        return result | {name: theirs | compare_steps(result["grouped"], theirs)}
    if isinstance(work, SampleWork):
        ours = bench_sample(work)
        return ours | {name: theirs | compare_rollouts(ours, theirs)}
    ours = bench_embed(work, theirs.pop("vectors_XD"))
    return ours | {name: theirs | compare_embeddings(ours, theirs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(required=True)
    for kind, work in (("train", TrainWork), ("sample", SampleWork), ("embed", EmbedWork)):
        sub = kinds.add_parser(kind)
        sub.set_defaults(work=work)
        sub.add_argument("library", choices=PEERS_OF[work])
        for field in dataclasses.fields(work):
            name, is_path = f"--{field.name.replace('_', '-')}", field.name == "corpus"
            value = pathlib.Path if is_path else type(field.default)
            default = None if is_path else field.default
            sub.add_argument(name, type=value, default=default, required=is_path)
    options = vars(parser.parse_args())
    work, library = options.pop("work"), options.pop("library")
    print(json.dumps(compare(work(**options), library)))


if __name__ == "__main__":
    main()
