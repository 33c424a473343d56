"""Tiny Transformers models of every family, and the references that tests compare with."""

import contextlib
from pathlib import Path

import numpy as np

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}

# Name: class, and the differences from `BASE`. They cover widths that heads do not divide, tied and
# untied embeddings, from one key-value head to one per query head, every rope scaling and a sliding
# window.
CASES = {
    "qwen2": ("Qwen2", {}),
    "qwen2_tied_mha": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2_yarn": ("Qwen2", {"rope_scaling": YARN}),
    "qwen2_sliding": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 12}),
    "qwen3_linear_mha": (
        "Qwen3",
        {"num_key_value_heads": 4, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    ),
    "llama": ("Llama", {"num_key_value_heads": 1}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
}
BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# The comparison with PyTorch and the golden files share one shape, which is compiled once.
LENGTH, NEW_TOKENS = 40, 64


def make_model(name: str, seed: int = 0):
    """Returns a model whose parameters all matter.

    With its default initialization biases are zero, norms are one, and logits are so small that
    any implementation is within the tolerance.
    """
    import torch
    import transformers

    torch.set_num_threads(1)  # tests run in parallel, one process per core
    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**(BASE | changes))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if "norm" in key else noise * 1.5 * p.shape[-1] ** -0.5)
    return model


def padded_batch(length: int, vocab: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and mask `[3, length]`: a full row, one padded on the left, one on the right."""
    ids_BL = np.random.default_rng(length).integers(1, vocab, (3, length), np.int32)
    mask_BL = np.ones((3, length), bool)
    mask_BL[1, : length // 3] = False
    mask_BL[2, length - length // 3 :] = False
    return np.where(mask_BL, ids_BL, 0).astype(np.int32), mask_BL


def positions_of(mask_BL: np.ndarray) -> np.ndarray:
    return np.maximum(np.cumsum(mask_BL, axis=1) - 1, 0).astype(np.int32)


def _inputs(ids_BL: np.ndarray, mask_BL: np.ndarray) -> dict:
    import torch

    return {
        "input_ids": torch.tensor(ids_BL, dtype=torch.long),
        "attention_mask": torch.tensor(mask_BL, dtype=torch.long),
        "position_ids": torch.tensor(positions_of(mask_BL), dtype=torch.long),
    }


def logits(model, ids_BL: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(**_inputs(ids_BL, mask_BL)).logits.numpy()


def greedy(model, ids_BL: np.ndarray, mask_BL: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns ids `[B, num_tokens]` that Transformers generates after left-padded prompts."""
    inputs = _inputs(ids_BL, mask_BL)
    del inputs["position_ids"]
    out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return out[:, ids_BL.shape[1] :].numpy().astype(np.int32)


def gradients(model, ids_BL: np.ndarray, mask_BL: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the gradient of the mean log-probability of real tokens, by parameter name."""
    import torch

    model.zero_grad()
    logp = torch.log_softmax(model(**_inputs(ids_BL, mask_BL)).logits[:, :-1], dim=-1)
    next_ids = torch.tensor(ids_BL[:, 1:, None], dtype=torch.long)
    real = torch.tensor(mask_BL[:, 1:] & mask_BL[:, :-1])
    logp.gather(-1, next_ids)[..., 0][real].mean().backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def save(model, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return Path(folder)


@contextlib.contextmanager
def quiet():
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
