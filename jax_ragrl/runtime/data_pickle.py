"""Pickle for messages between the processes of a run and for checkpoints, restricted to data.

A pickle may name any function of any module, and reading it calls that function
(docs.python.org/3/library/pickle.html#restricting-globals). Processes exchange forests, whose
states are dataclasses of any system. So the reader accepts classes that only hold data, of modules
that this process has imported, and refuses everything else.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import io
import pickle
import sys
from typing import Any

import numpy as np

from jax_ragrl.errors import SafeError, UserError

BUILTINS = {set, frozenset, bytearray, complex, range, slice, collections.Counter}
BUILTINS |= {collections.OrderedDict, collections.deque, np.ndarray, np.dtype}


def dumps(value: Any) -> bytes:
    """Returns the bytes of a value."""
    return pickle.dumps(value)


def loads(data: bytes) -> Any:
    """Returns the value of bytes from another process or a checkpoint.

    Raises:
      UserError: the value contains something else than data.
    """
    return _DataUnpickler(io.BytesIO(data)).load()


class _DataUnpickler(pickle.Unpickler):
    """An unpickler of classes that only hold data."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class, or one of NumPy's functions that build an array."""
        value = functools.reduce(
            lambda parent, part: getattr(parent, part, None),
            name.split("."),
            sys.modules.get(module),
        )
        if _holds_data(value) or value in _array_builders():
            return value
        raise UserError(
            f"a rollout holds {module}.{name}, which is not data: states, actions and replies of "
            "a system must be dataclasses, named tuples, enums and built-in types, so that other "
            "processes and resumed runs can read them"
        )


def _holds_data(value: Any) -> bool:
    if not isinstance(value, type):
        return False
    is_tuple = issubclass(value, tuple) and hasattr(value, "_fields")
    # For example a reply with its costs, whose class is in this package.
    is_text = issubclass(value, str) and value.__module__.startswith("jax_ragrl.")
    is_plain = value in BUILTINS or issubclass(value, enum.Enum | np.generic | SafeError)
    return is_tuple or is_text or is_plain or dataclasses.is_dataclass(value)


@functools.cache
def _array_builders() -> tuple[Any, ...]:
    """The functions that NumPy's own pickles of arrays and scalars call."""
    examples = (np.zeros(1), np.float64(1))
    builders = [x.__reduce_ex__(n)[0] for x in examples for n in (2, 5)]
    return tuple(dict.fromkeys(builders))
