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

    The graph is part of the tree structure, so `jax.jit` treats it as static: two models with equal
    graphs, array shapes and dtypes share a compiled program.

    Fields:
      graph: the structure and the static attributes of the module, without arrays; hashable.
      params: the trained arrays; `dataclasses.replace(split, params=...)` exchanges them.
      frozen: all other arrays, such as the base below an adapter; empty if everything is trained.
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
        """Returns the module around the same arrays."""
        return nnx.merge(self.graph, self.params, self.frozen)
