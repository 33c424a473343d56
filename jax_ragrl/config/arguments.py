"""Argument types and help text that several commands share."""

from __future__ import annotations

import math

CONFIG_HELP = (
    "--config=FILE[:ARGUMENT] selects the configuration; --config.a.b=VALUE overrides a key of it."
)


# argparse shows the name of this function in its message: "invalid natural value".
def natural(text: str) -> int:
    """Parses an integer of at least 0; argparse reports any other text."""
    if (number := int(text)) < 0:
        raise ValueError(text)
    return number


def positive(text: str) -> int:
    """Parses an integer of at least 1; argparse reports any other text."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def amount(text: str) -> float:
    """Parses a finite number of at least 0; argparse reports any other text."""
    if not 0 <= (number := float(text)) < math.inf:
        raise ValueError(text)
    return number
