"""The config of a decoder, its sizes and numerics, and the table of its parameters.

`layer_weights` is the one place that lists every array of a layer with shape, logical axes and
initialization; shardings, abstract arrays, counts and Hugging Face layouts derive from it.

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (2505.09388), Llama 3 (2407.21783), as in Transformers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.config.ranges import Count, Natural, Positive
from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError
from jax_ragrl.models.attention import IMPLEMENTATIONS
from jax_ragrl.models.rope import RopeScaling
from jax_ragrl.models.saveable import PRODUCT, STREAM

TINY = "tiny"  # the name of the warm-started policy that ships with the package

# On a CPU a product in bfloat16 is inside a custom_vjp, where only its name is visible.
_is_matmul = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(PRODUCT, STREAM),
)


def _dots(primitive: Any, *args: Any, **params: Any) -> Any:
    """Saves matmuls with weights and, of an attention kernel, its output and log-sum-exp."""
    is_kernel = primitive.name == "dot_product_attention_fwd_wrapper"  # cuDNN's attention
    return is_kernel or _is_matmul(primitive, *args, **params)


# Gradient checkpointing: which activations of a layer are saved for the backward pass.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.save_only_these_names(STREAM),
    "dots": _dots,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The sizes and numerics of a decoder; static and hashable.

    Fields:
      vocab_size: V, rows of the embeddings.
      hidden_size: D, the width of the residual stream.
      intermediate_size: the width of the MLP.
      num_layers, num_heads, num_kv_heads, head_dim: layers, H, K and F.
      rope_theta: the base of the rotary frequencies.
      rms_norm_eps: added to the mean square of a norm.
      tie_embeddings: whether the head is the embeddings.
      qkv_bias: whether q, k and v have biases (Qwen2).
      qk_norm: whether q and k are normalized per head (Qwen3).
      rope_scaling: how the frequencies are stretched beyond the trained length.
      sliding_window: positions that the layers `sliding_layers` (indices) are limited to.
      max_positions: the trained length in tokens.
      dtype: the compute dtype.
      param_dtype: the storage dtype.
      remat: activations that the backward pass recomputes: `none`, `full`, or `dots`, all except
        matmuls with weights and attention kernels.
      attention_impl: see `models/attention.py`.
      num_tokens: ids that the tokenizer has; the rows after them are padding, which is neither
        sampled nor part of a probability. 0: all rows are tokens.
    """

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    rope_theta: Positive = 1e6
    rms_norm_eps: Positive = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True
    rope_scaling: RopeScaling | None = None
    sliding_window: Count | None = None
    sliding_layers: tuple[Natural, ...] = ()
    max_positions: Count = 32768
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    attention_impl: str = "auto"
    num_tokens: Natural = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly: "
                "choose num_kv_heads that divides num_heads"
            )
        if self.head_dim < 1 or self.head_dim % 2:
            raise UserError(
                f"head_dim is {self.head_dim}, but rotary embedding needs pairs: give an even "
                "number from 2"
            )
        one_of("remat", self.remat, REMAT)
        one_of("attention", self.attention_impl, IMPLEMENTATIONS)
        if self.sliding_layers and self.sliding_window is None:
            raise UserError(
                f"sliding_layers is {self.sliding_layers}, but sliding_window is not set: "
                "give the window in positions"
            )


class Weight(NamedTuple):
    """One parameter: its shape, its logical axes and its initial value `fill + std * normal`."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float = 0.0
    fill: float = 0.0


# Projections back into the residual stream start smaller, because its variance grows with depth.
RESIDUAL_SCALE = 0.4


def weights(config: DecoderConfig) -> dict:
    """Returns every parameter of a decoder as a nested dict of `Weight`, in a fixed order."""
    c, width = config, config.hidden_size
    tree = {
        "embed": Weight((c.vocab_size, width), ("vocab", "embed"), std=width**-0.5),
        "final_norm": Weight((width,), (None,), fill=1.0),
        "layers": {
            name: w._replace(shape=(c.num_layers, *w.shape), axes=("layers", *w.axes))
            for name, w in layer_weights(c).items()
        },
    }
    if not c.tie_embeddings:
        tree["lm_head"] = Weight((c.vocab_size, width), ("vocab", "embed"), std=width**-0.5)
    return tree


def layer_weights(config: DecoderConfig) -> dict[str, Weight]:
    """Returns the parameters of one layer; kernels are `[in, out]`, heads are a separate axis."""
    c, width, mlp, head = config, config.hidden_size, config.intermediate_size, config.head_dim
    q, kv, into = (c.num_heads, head), (c.num_kv_heads, head), width**-0.5
    attn_out = RESIDUAL_SCALE * (c.num_heads * head) ** -0.5
    table = {
        "attn_norm": Weight((width,), (None,), fill=1.0),
        "q_proj": Weight((width, *q), ("embed", "heads", None), std=into),
        "k_proj": Weight((width, *kv), ("embed", "kv", None), std=into),
        "v_proj": Weight((width, *kv), ("embed", "kv", None), std=into),
        "o_proj": Weight((*q, width), ("heads", None, "embed"), std=attn_out),
        "mlp_norm": Weight((width,), (None,), fill=1.0),
        "gate_proj": Weight((width, mlp), ("embed", "mlp"), std=into),
        "up_proj": Weight((width, mlp), ("embed", "mlp"), std=into),
        "down_proj": Weight((mlp, width), ("mlp", "embed"), std=RESIDUAL_SCALE * mlp**-0.5),
    }
    if c.qkv_bias:
        table["q_bias"] = Weight(q, ("heads", None))
        table["k_bias"] = Weight(kv, ("kv", None))
        table["v_bias"] = Weight(kv, ("kv", None))
    if c.qk_norm:
        table["q_norm"] = Weight((head,), (None,), fill=1.0)
        table["k_norm"] = Weight((head,), (None,), fill=1.0)
    return table


def input_axes(name: str) -> int:
    """Returns how many leading axes of a parameter of a layer are its inputs; 0 for vectors."""
    return 0 if not name.endswith("_proj") else 2 if name == "o_proj" else 1


def logical_axes(config: DecoderConfig) -> dict:
    """Returns the logical axes of every parameter, in the tree of `weights`."""
    return jax.tree.map(lambda w: w.axes, weights(config), is_leaf=lambda x: isinstance(x, Weight))


def abstract_params(config: DecoderConfig) -> dict:
    """Returns a `ShapeDtypeStruct` of every parameter, in the tree of `weights`."""
    dtype = jnp.dtype(config.param_dtype)
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, dtype),
        weights(config),
        is_leaf=lambda x: isinstance(x, Weight),
    )


def param_count(config: DecoderConfig) -> int:
    """Returns the number of parameters; a tied head counts once."""
    flat = jax.tree.leaves(weights(config), is_leaf=lambda x: isinstance(x, Weight))
    return sum(math.prod(w.shape) for w in flat)


def init_params(config: DecoderConfig, key: Array) -> dict:
    """Returns initial parameters in the tree of `weights`; consumes `key`."""
    dtype = jnp.dtype(config.param_dtype)
    flat, treedef = jax.tree.flatten(weights(config), is_leaf=lambda x: isinstance(x, Weight))
    # One key per parameter, in the fixed order of `weights`: the same draws on any mesh.
    keys = jax.random.split(key, len(flat))

    def draw(weight: Weight, key: Array) -> Array:
        if weight.std == 0.0:
            return jnp.full(weight.shape, weight.fill, dtype)
        # Noise is float32, so equal keys give equal weights up to rounding in every storage dtype.
        noise = jax.random.normal(key, weight.shape, jnp.float32)
        return (weight.fill + weight.std * noise).astype(dtype)

    return jax.tree.unflatten(treedef, [draw(w, keys[i]) for i, w in enumerate(flat)])


def compute_dtype_of(path: Any, x: Any, compute: str) -> Any:
    """Returns the dtype in which a forward pass reads a parameter with a key path."""
    name = jax.tree_util.keystr(path)
    # Gains of norms and value heads multiply in float32, so they keep their storage dtype.
    is_wide = "_norm" in name or "['head']" in name
    return x.dtype if is_wide else jnp.dtype(compute)
