"""A decoder's shape and numerics, and its parameters as a table.

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (2505.09388), Llama 3 (2407.21783), as in Transformers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError
from jax_ragrl.models.attention import IMPLEMENTATIONS
from jax_ragrl.models.rope import RopeScaling

KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper")  # splash and cuDNN


def _dots(primitive: Any, *given: Any, **params: Any) -> Any:
    """Products with weights, and of an attention kernel its output and one sum a query and head."""
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name in KERNELS or products(primitive, *given, **params)


# What a layer keeps for the backward pass.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _dots,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape and numerics; static and hashable.

    `sliding_layers` are the indices of layers limited to the last `sliding_window` positions.
    `dtype` is the compute dtype, `param_dtype` the storage dtype. `remat` says what of a layer the
    backward pass computes again: `none`, `full`, or all but the products with weights and the
    kernels of attention (`dots`). `scan_unroll` layers are written out in each step of the layer
    scan; `attention_impl` is that of `models/attention.py`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    max_positions: int = 32768
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    scan_unroll: int = 1
    attention_impl: str = "auto"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly: "
                "choose num_kv_heads that divides num_heads"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        one_of("remat", self.remat, REMAT)
        one_of("attention", self.attention_impl, IMPLEMENTATIONS)
        if self.sliding_layers and self.sliding_window is None:
            raise UserError(f"layers {self.sliding_layers} slide but sliding_window is not set")


class Weight(NamedTuple):
    """One parameter: its shape, its logical axes, and `fill + std * normal` to begin with."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    std: float = 0.0
    fill: float = 0.0


# Projections back into the residual stream start smaller, so that depth does not inflate it.
RESIDUAL_SCALE = 0.4


def weights(config: DecoderConfig) -> dict:
    """Every parameter of a decoder as a nested dict of `Weight`, in a fixed order."""
    c, width = config, config.hidden_size
    tree = {
        "embed": Weight((c.vocab_size, width), ("vocab", "embed"), std=width**-0.5),
        "final_norm": Weight((width,), (None,), fill=1.0),
        "layers": {name: _stack(w, c.num_layers) for name, w in layer_weights(c).items()},
    }
    if not c.tie_embeddings:
        tree["lm_head"] = Weight((c.vocab_size, width), ("vocab", "embed"), std=width**-0.5)
    return tree


def layer_weights(config: DecoderConfig) -> dict[str, Weight]:
    """The parameters of one layer. Kernels are `[in, out]`, with heads as axes of their own."""
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


def _stack(weight: Weight, num_layers: int) -> Weight:
    return weight._replace(shape=(num_layers, *weight.shape), axes=("layers", *weight.axes))


def _is_weight(x: object) -> bool:
    return isinstance(x, Weight)


def logical_axes(config: DecoderConfig) -> dict:
    """The logical axes of every parameter, in the tree of `weights`."""
    return jax.tree.map(lambda w: w.axes, weights(config), is_leaf=_is_weight)


def abstract_params(config: DecoderConfig) -> dict:
    """`ShapeDtypeStruct` of every parameter, in the tree of `weights`."""
    dtype = jnp.dtype(config.param_dtype)
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, dtype), weights(config), is_leaf=_is_weight
    )


def param_count(config: DecoderConfig) -> int:
    """Number of parameters; a tied head counts once."""
    flat = jax.tree.leaves(weights(config), is_leaf=_is_weight)
    return sum(math.prod(w.shape) for w in flat)


def init_params(config: DecoderConfig, key: Array) -> dict:
    """Initial parameters in the tree of `weights`; consumes `key`."""
    dtype = jnp.dtype(config.param_dtype)
    flat, treedef = jax.tree.flatten(weights(config), is_leaf=_is_weight)
    keys = jax.random.split(key, len(flat))

    def draw(weight: Weight, key: Array) -> Array:
        if weight.std == 0.0:
            return jnp.full(weight.shape, weight.fill, dtype)
        noise = jax.random.normal(key, weight.shape, jnp.float32)
        return (weight.fill + weight.std * noise).astype(dtype)

    return jax.tree.unflatten(treedef, [draw(w, keys[i]) for i, w in enumerate(flat)])


def used_as(path: Any, x: Any, compute: str) -> Any:
    """The dtype that a forward pass takes a parameter in, by its place in a tree: kept in it, the
    results are the same. The gains of norms, and a head for values, multiply in float32."""
    name = jax.tree_util.keystr(path)
    wide = "_norm" in name or "['head']" in name
    return x.dtype if wide else jnp.dtype(compute)
