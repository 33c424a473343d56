"""Functions that a config names: `name` in a module of the package, or `module:name` in any."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from jax_ragrl.errors import SafeError, UserError

# Folders of code that is not the user's own.
LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
PACKAGE = str(pathlib.Path(__file__).parents[1])


def own_module(name: str) -> Any:
    """Imports a module of a user.

    Raises:
      ImportError: there is none, or it fails, then with the line.
    """
    try:
        # `importlib.import_module` takes ./mine.py for a relative name, without a package.
        with own_prints():
            __import__(name)
        return sys.modules[name]
    except (ImportError, UserError):
        raise
    except Exception as error:
        raise ImportError(raised(error)) from error


def raised(error: Exception) -> str:
    """Returns an error of a user's code in words, with the last line of it that was executed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the caller's
    own = [x for x in frames if not x.filename.startswith(("<", *LIBRARIES))]
    # The call of a function of this package, rather than the line in it that refused the arguments.
    own = [x for x in own if not x.filename.startswith(PACKAGE)] or own
    # The message of a syntax error has its line.
    has_line = own and not isinstance(error, SyntaxError)
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if has_line else ""
    return f"{type(error).__name__}: {error}{place}"


@contextlib.contextmanager
def own_code(name: str) -> Iterator[None]:
    """Runs code of a user, whose errors become a `UserError` with their line; `name` is its name.

    Errors whose message is for a user pass.
    """
    try:
        yield
    except SafeError:
        raise
    except Exception as error:
        raise UserError(f"{name} raised {raised(error)}: correct it") from error


def own_prints() -> contextlib.AbstractContextManager[Any]:
    """Sends what code of a user prints to stderr: stdout holds the result of a command alone."""
    return contextlib.redirect_stdout(sys.stderr)


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
        found = getattr(own_module(module), function) if colon else own[function]
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
    """Returns the function or class of a text `module:name`, which `where` names in messages.

    Raises:
      UserError: there is no such function.
    """
    module, _, name = text.partition(":")
    try:
        found = getattr(own_module(module), name)
        if not callable(found):
            raise ValueError(f"{found!r:.60} is not a callable object")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{where} is {text!r}, which cannot be imported ({error}): give module:name, where "
            "PYTHONPATH includes the module"
        ) from error
