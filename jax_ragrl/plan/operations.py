"""Operations (FLOPs) of forward and backward passes, and the time that a program takes at least.

Counted are matrix products, two operations per multiplication; XLA's own count takes the body of a
loop once. N is the number of weights in the layers' matrices, a layer's attention over S keys has
`4 H F S` operations per query, and the head `2 V D` per scored token:

  forward = 2 N + 4 H F S layers + 2 V D
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.runtime.topology import Ceilings


def layer_weight_count(c: DecoderConfig) -> int:
    """Returns N, the weights in the matrices of all layers."""
    # Queries and the output have all heads, keys and values the fewer key-value heads.
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def layers_flops(c: DecoderConfig, keys: float) -> float:
    """Returns the operations of all layers for one token that attends to a number of keys."""
    attention = 4 * c.num_heads * c.head_dim * keys * c.num_layers
    return 2 * layer_weight_count(c) + attention


def head_flops(c: DecoderConfig) -> int:
    """Returns the operations of the head for one token."""
    return 2 * c.vocab_size * c.hidden_size


def score_flops(c: DecoderConfig, length: int) -> float:
    """Returns the operations of scoring one token of a row; on average it attends to half of it."""
    return layers_flops(c, length / 2) + head_flops(c)


def gradient_flops(c: DecoderConfig, length: int, *, adapters: bool) -> float:
    """Returns the operations of the gradient of one token of a row.

    A backward pass has a product for the inputs and one for the weights of each matrix; without
    the latter for a base that only adapters change. `remat=full` adds a forward pass of the layers.
    `length` are the tokens of a row, all of them scored.
    """
    # The products of an adapter itself are too small to count.
    backward = 1 if adapters else 2
    attention = layers_flops(c, length / 2) - layers_flops(c, 0)
    passes = 1 + backward + (c.remat == "full")
    # Attention has no weights: its backward pass always has two products for each one forward.
    layers = passes * layers_flops(c, 0) + (3 + (c.remat == "full")) * attention
    return layers + (1 + backward) * head_flops(c)


def time_at_least(work: Mapping[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """Returns the seconds of a program that uses one of the ceilings fully.

      seconds = max(flops / peak, hbm bytes / bandwidth, collective bytes / link)

    Source: Williams et al. 2009 (roofline). Real programs are slower: they overlap imperfectly.
    `work` has `flops`, `hbm_bytes` and `collectives` per device; the result `seconds_at_least`, and
    `bound`: compute, memory or network.
    """
    # Kinds of collectives share the links of a device, so their bytes add.
    network = sum(kind["bytes"] for kind in work["collectives"].values())
    seconds = {
        "compute": work["flops"] / ceilings.flops,
        "memory": work["hbm_bytes"] / ceilings.bandwidth,
        "network": network / ceilings.link,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return {"seconds_at_least": seconds[bound], "bound": bound}
