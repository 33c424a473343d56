"""Functions that a config names: `name` in a module of the package, or `module:name` in any."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

from jax_ragrl.errors import UserError


@functools.cache
def named_function(
    key: str, name: str, home: types.ModuleType, inputs: tuple[str, ...]
) -> Callable[..., Any]:
    """Returns the function that a config names.

    Args:
      key: the dotted key, for messages.
      name: its value: a function of `home`, or `module:function`.
      home: the module of the functions that need no module name.
      inputs: the names that the parameters of a function may have.

    Raises:
      UserError: there is no such function, or it has a parameter that no input gives.
    """
    # Without what `home` imports, and its functions for other purposes.
    own = {
        function.__name__: function
        for function in vars(home).values()
        if inspect.isfunction(function)
        and function.__module__ == home.__name__
        and not function.__name__.startswith("_")
        and not _without_input(function, inputs)
    }
    module, colon, function = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), function) if colon else own[function]
        unknown = _without_input(found, inputs)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        reason = f" ({error})" if colon else ""
        raise UserError(
            f"{key} is {name!r}: use one of {', '.join(own)}, or module:function for one of your "
            f"own{reason}"
        ) from error
    if unknown:
        raise UserError(
            f"{key} is {name!r}, whose parameter {unknown[0]} nothing has a value for: give it a "
            f"default, or a name among {', '.join(inputs)}"
        )
    return found


def _without_input(function: Any, inputs: tuple[str, ...]) -> list[str]:
    """The parameters without a default that are not among `inputs`."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name not in inputs]


def imported(where: str, text: str) -> Any:
    """Returns the object that a text `module:name` names; `where` names the text in messages.

    Raises:
      UserError: there is no such object.
    """
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{where} is {text!r}, which cannot be imported ({error}): give module:name, where "
            "PYTHONPATH includes the module"
        ) from error
