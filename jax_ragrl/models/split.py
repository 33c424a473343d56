"""A model split for jitted functions: a static graph, trained arrays and frozen arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("params", "frozen"), meta_fields=("graph",)
)
@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A Flax NNX module as a pytree whose leaves are its arrays.

    `jax.jit` treats the graph as static: two models with equal graphs, array shapes and dtypes
    share a compiled program. `params` are the trained arrays, and `frozen` all others, such as the
    base below an adapter.
    """

    graph: nnx.GraphDef[Any]
    params: nnx.State[Any, Any]
    frozen: nnx.State[Any, Any]

    @classmethod
    def from_model(cls, model: nnx.Module, trained_filter: Any = nnx.Param) -> SplitModel:
        """Splits a module, which shares its arrays with the result.

        The NNX filter says which variables are in `params`: `nnx.Param` for all parameters
        (adapters included), `nnx.LoRAParam` for an adapter alone.
        """
        # `...` collects the rest, so an empty `frozen` and a filled one merge the same way.
        return cls(*nnx.split(model, trained_filter, ...))

    def merge(self) -> Any:
        return nnx.merge(self.graph, self.params, self.frozen)
