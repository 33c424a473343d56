"""What options of commands share: kinds of numbers, and how a config is given."""

from __future__ import annotations

CONFIG_HELP = (
    "--config=FILE[:ARGUMENT] is the configuration, and --config.a.b=VALUE overrides a key of it."
)


def natural(text: str) -> int:
    """A whole number, at least 0; argparse says what was given instead."""
    if (number := int(text)) < 0:
        raise ValueError(text)
    return number


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number
