"""Attention of rows that are being decoded, over two parts: the keys of a prefix, and their own.

The rows of a prompt are siblings that share a prefix, which is read once for all of them (Hydragen,
Juravsky et al. 2024, arXiv 2402.05099). Both parts keep separate scores and share maximum and sum:

  m = max(s', s''),   out = (exp(s' - m) v' + exp(s'' - m) v'') / sum(exp(s' - m), exp(s'' - m))

On an NVIDIA GPU in half precision JAX's decode kernel runs once per part: its scores never leave
the chip, and keys that no row has yet are not read. Everything else takes XLA.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.models.attention import KeysValues, on_cuda, scale_and_mask
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.matmul import einsum_f32
from jax_ragrl.runtime.sharding import axis_size, on_each_device, target_platform

# Keys of a block, of which the kernel takes the largest that divides a part and has at most
# `BLOCK_NUMBERS` numbers: any GPU's shared memory holds two blocks of keys and two of values.
KEY_BLOCKS, BLOCK_NUMBERS = (128, 64, 32, 16), 8192
# The largest block of the own keys of rows, which see few of them. On an H100 1,024 sets of 256
# keys of width 64, half of them visible, take 25 us; with blocks of 128 keys they take 53 us.
OWN_BLOCK = 64
HEAD_BLOCK, HEAD_WIDTHS = 16, (16, 32, 64, 128, 256)  # heads of a block; their widths
# Keys of a part that one block of threads visits one after the other.
KEYS_IN_TURN = 1024
# A part of the output: the weighted values, the sum of the weights, and the largest score.
Part = tuple[Array, Array, Array]


class VisibleKeys(NamedTuple):
    """The number of keys that the only query of each row attends to, the first ones of each part.

    Fields:
      prefix_B: int32 keys of the prefix, equal for siblings.
      own_B: int32 keys of the row's own cache; at least 1.
    """

    prefix_B: Array
    own_B: Array

    def mask(self, prefix: int, own: int) -> Array:
        """Returns the same as a mask, bool `[B, 1, S]`, given the slots of both parts."""
        counts_and_slots = ((self.prefix_B, prefix), (self.own_B, own))
        parts = [jnp.arange(slots)[None] < count[:, None] for count, slots in counts_and_slots]
        return jnp.concatenate(parts, axis=1)[:, None]


def uses_decode_kernel(config: DecoderConfig, prefix: int, own: int) -> bool:
    """Returns whether rows that are being decoded take the kernel.

    Blocks of keys must divide the slots `prefix` and `own` of both parts. On a mesh the tensor axis
    must split the key-value heads.
    """
    c = config
    fits = prefix % KEY_BLOCKS[-1] == 0 and own % KEY_BLOCKS[-1] == 0
    fits = fits and c.head_dim in HEAD_WIDTHS
    fits = fits and c.num_kv_heads % axis_size("tensor") == 0 and not c.sliding_layers
    is_half = c.dtype in ("bfloat16", "float16")
    return is_half and fits and c.attention_impl == "auto" and on_cuda()


def prefix_attention(
    q_BLHF: Array, prefix_kv: KeysValues, own_kv: KeysValues, visibility: Array | VisibleKeys
) -> Array:
    """Returns the `attention` of rows to their prefixes and to their own keys.

    Args:
      q_BLHF: queries; with `VisibleKeys` L is 1.
      prefix_kv: keys and values `[P, K, S', F]`, each of B / P adjacent rows.
      own_kv: keys and values `[B, K, S'', F]` of each row, which come after those of the prefix.
      visibility: a bool mask `[B, L, S]`, S = S' + S''; or the first keys of each part, which takes
        the kernel, see `uses_decode_kernel`.

    Returns:
      `[B, L, H, F]` in the dtype of `q`.
    """
    if not isinstance(visibility, VisibleKeys):
        return _by_xla(q_BLHF, prefix_kv, own_kv, visibility)
    # Prefixes that do not divide over the mesh are replicated, and their rows with them.
    divides = prefix_kv[0].shape[0] % (axis_size("data") * axis_size("fsdp")) == 0
    batch = "batch" if divides else None
    names = ((batch, None, "heads", None), *[(batch, "kv", None, None)] * 4, (batch,), (batch,))
    # Each device of a mesh runs the kernel on its own rows and heads.
    return on_each_device(_by_kernel, (q_BLHF, *prefix_kv, *own_kv, *visibility), names)


# --- XLA ------------------------------------------------------------------------------------------


def _by_xla(q_BLHF: Array, prefix_kv: KeysValues, own_kv: KeysValues, mask_BLS: Array) -> Array:
    batch, length, heads, width = q_BLHF.shape
    prompts, kv, slots = prefix_kv[0].shape[:3]
    # 1. Split rows into prompts P and their W siblings.
    by_prompt = prompts, batch // prompts
    q_PWLKGF = q_BLHF.reshape(*by_prompt, length, kv, heads // kv, width)
    k_PWKSF, v_PWKSF = (x.reshape(*by_prompt, *x.shape[1:]) for x in own_kv)
    mask_PWLS = mask_BLS.reshape(*by_prompt, length, -1)
    # 2. Scores of both parts.
    first = einsum_f32("pwlkgf,pksf->pkwlgs", q_PWLKGF, prefix_kv[0])
    first = scale_and_mask(first, mask_PWLS[:, None, :, :, None, :slots], width)
    if q_PWLKGF.shape[1] == 1:
        # Without siblings both einsums have equal shapes, and XLA would merge them into one: its
        # GPU pass first copies both sets of keys into one array, for every token.
        q_PWLKGF = jax.lax.optimization_barrier(q_PWLKGF)
    last = einsum_f32("pwlkgf,pwksf->pwklgs", q_PWLKGF, k_PWKSF)
    last = scale_and_mask(last, mask_PWLS[:, :, None, :, None, slots:], width)
    # 3. One softmax over both, `[P, W, K, L, G]`, without concatenating the scores.
    top = jnp.maximum(_swap_rows(jnp.max(first, -1)), jnp.max(last, -1))
    first, last = jnp.exp(first - _swap_rows(top)[..., None]), jnp.exp(last - top[..., None])
    total = _swap_rows(jnp.sum(first, -1)) + jnp.sum(last, -1)
    # 4. Weighted values of both parts.
    first, last = (x.astype(v_PWKSF.dtype) for x in (first, last))
    out = _swap_rows(einsum_f32("pkwlgs,pksf->pkwlgf", first, prefix_kv[1]))
    out = out + einsum_f32("pwklgs,pwksf->pwklgf", last, v_PWKSF)
    out = (out / total[..., None]).astype(q_BLHF.dtype)
    return jnp.swapaxes(out, 2, 3).reshape(q_BLHF.shape)


def _swap_rows(x: Array) -> Array:
    """Swaps axes 1 and 2: `[P, K, W, ...]`, as a matmul with a prefix has them, and back."""
    return jnp.swapaxes(x, 1, 2)


# --- The kernel -----------------------------------------------------------------------------------


def _by_kernel(
    q_B1HF: Array,
    k_PKSF: Array,
    v_PKSF: Array,
    k_BKSF: Array,
    v_BKSF: Array,
    prefix_B: Array,
    own_B: Array,
) -> Array:
    prompts, kv, width = k_PKSF.shape[0], k_PKSF.shape[1], q_B1HF.shape[-1]
    q_PWKGF = q_B1HF.reshape(prompts, -1, kv, q_B1HF.shape[2] // kv, width)
    siblings, group = q_PWKGF.shape[1], q_PWKGF.shape[3]
    # 1. The prefix: for the kernel, the queries of its rows are heads of one.
    q_NJF = jnp.swapaxes(q_PWKGF, 1, 2).reshape(prompts * kv, siblings * group, width)
    part = _attend(q_NJF, k_PKSF, v_PKSF, prefix_B[::siblings], KEY_BLOCKS[0])
    shape = prompts, kv, siblings, group
    first = [jnp.swapaxes(x.reshape(*shape, *x.shape[2:]), 1, 2) for x in part]
    # 2. Each row's own keys.
    part = _attend(q_PWKGF.reshape(-1, group, width), k_BKSF, v_BKSF, own_B, OWN_BLOCK)
    last = [x.reshape(prompts, siblings, kv, group, *x.shape[2:]) for x in part]
    return _join(first, last).astype(q_B1HF.dtype).reshape(q_B1HF.shape)


def _attend(q_NJF: Array, k_RKSF: Array, v_RKSF: Array, count_R: Array, largest: int) -> Part:
    """Attends to the first keys of rows R; J queries share each of the N = R K sets of keys.

    A block has at most `largest` keys.
    """
    # The import takes time, and only GPUs need it.
    from jax.experimental.pallas.ops.gpu.decode_attention import mqa

    rows, kv, slots, width = k_RKSF.shape
    turns = max(1, slots // KEYS_IN_TURN)
    splits = next(n for n in range(turns, 0, -1) if slots % (n * KEY_BLOCKS[-1]) == 0)
    small = [n for n in KEY_BLOCKS if n <= largest and n * width <= BLOCK_NUMBERS]
    # The kernel promotes dtypes and ranks, also if the caller forbids it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out, (total, top) = mqa(
            q_NJF,
            *(x.reshape(rows * kv, slots, width) for x in (k_RKSF, v_RKSF)),
            kv_seq_len=jnp.repeat(count_R, kv),
            block_h=HEAD_BLOCK,
            block_k=next(n for n in small if slots // splits % n == 0),
            k_splits=splits,
            interpret=target_platform() != "gpu",
            return_residuals=True,
            normalize_output=False,
        )
    return out, total, top


def _join(first: list[Array], last: list[Array]) -> Array:
    top = jnp.maximum(first[2], last[2])
    first_weight, last_weight = jnp.exp(first[2] - top), jnp.exp(last[2] - top)
    total = first[1] * first_weight + last[1] * last_weight
    first_out, last_out = (part[0].astype(jnp.float32) for part in (first, last))
    out = first_out * first_weight[..., None] + last_out * last_weight[..., None]
    return out / total[..., None]
