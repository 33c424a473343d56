"""Tables of the glossary: faults, and the letters of axes."""

from __future__ import annotations

import re

from jax_ragrl import types
from jax_ragrl.systems.registry import known_faults


def faults() -> str:
    """Each kind of fault with its sentence."""
    rows = (f"| {kind} | {text} |" for kind, text in known_faults().items())
    return "\n".join(["| kind | meaning |", "|---|---|", *rows, ""])


def axes() -> str:
    """Each letter with its axis, from the legend of `jax_ragrl.types`."""
    legend = re.findall(r"(?:^|  )([A-Z1](?:, [A-Z])*) (\S.*?)(?=  |$)", types.__doc__ or "", re.M)
    rows = (f"| `{letter}` | {axis} |" for letter, axis in sorted(legend))
    return "\n".join(["| letter | axis |", "|---|---|", *rows, ""])
