"""Think blocks: the reasoning between `<think>` and `</think>` that may begin a model's turn."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
# What Qwen3's template writes for a turn without thinking.
EMPTY_BLOCK = f"{OPEN}\n\n{CLOSE}\n\n"


def split_thought(text: str) -> tuple[str, str | None]:
    """Splits a turn into the content of its leading think block and the text after it.

    A block elsewhere in the text is not the model's reasoning and stays.

    Returns:
      The thought, empty without a block; and the text after the block, None if the block never
      ends, as in a turn that was cut at its maximum length.
    """
    start = text.lstrip()
    if not start.startswith(OPEN):
        return "", text
    thought, end, rest = start.removeprefix(OPEN).partition(CLOSE)
    return thought.strip(), rest.lstrip() if end else None


def spoken_text(text: str) -> str:
    """Returns a reply without its reasoning; empty if the reply ends before its reasoning does.

    A server may leave the opening tag out, because the chat template has written it into the
    prompt: then everything up to the closing tag is reasoning.
    """
    before, end, after = text.partition(CLOSE)
    if end and OPEN not in before:
        return after.lstrip()
    return split_thought(text)[1] or ""


def opened_block(prompt: str) -> str:
    """Returns the end of a prompt from the think block that it leaves open; empty without one."""
    _, tag, content = prompt.rpartition(OPEN)
    return f"{tag}{content}" if tag and CLOSE not in content else ""
