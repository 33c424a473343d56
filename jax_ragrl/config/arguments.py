"""Argument types and help text that several commands share."""

from __future__ import annotations

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
