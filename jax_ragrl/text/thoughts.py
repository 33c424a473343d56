"""Thoughts: the reasoning that may begin a model's turn.

A policy writes it as a block from `<think>` to `</think>`; `spoken_text` removes the many forms of
frozen models.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
# What Qwen3's template writes for a turn without thinking.
EMPTY_BLOCK = f"{OPEN}\n\n{CLOSE}\n\n"


def split_thought(text: str) -> tuple[str, str | None]:
    """Splits a turn into the content of its leading think block and the text after it.

    The thought is empty without a block; the text is None if the block never ends. A block
    elsewhere in the text is not the model's reasoning and stays.
    """
    start = text.lstrip()
    if not start.startswith(OPEN):
        return "", text
    thought, end, rest = start.removeprefix(OPEN).partition(CLOSE)
    return thought.strip(), rest.lstrip() if end else None


def _block(opening: str, closing: str) -> re.Pattern[str]:
    return re.compile(f"(?P<open>{opening})|(?P<close>{closing})", re.IGNORECASE)


# The tags of Qwen and DeepSeek, Seed, Reflection, Magistral, Kimi, Sky-T1, Command A and others.
_BLOCKS = (
    *(
        _block(rf"<{name}(?:\s[^<>]*)?>", rf"</{name}\s*>")
        for name in (
            *("think", "thinking", "thought", "thoughts", "seed:think", "reason", "reasoning"),
            *("reflection", "analysis", "scratchpad"),
        )
    ),
    _block(r"\[THINK\]", r"\[/THINK\]"),
    _block("◁think▷", "◁/think▷"),
    _block(r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    _block(r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
)
# Channels of gpt-oss (harmony), whose special tokens a server may have removed.
_CHANNEL = r"<\|channel\|>{}[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
_FINAL = re.compile(rf".*{_CHANNEL.format('final')}|\s*analysis.*assistantfinal", re.DOTALL)
_OTHER_CHANNEL = ("<|start|>", "<|channel|>")
_END_OF_MESSAGE = re.compile(r"<\|(?:end|return|call)\|>")


def spoken_text(reply: str) -> str:
    """Returns a reply without its reasoning; empty if the reply ends before its reasoning does.

    The reasoning is one block after the other at the beginning. A server may leave the first
    opening tag out, because the chat template has written it into the prompt.
    """
    if final := _FINAL.match(reply):
        return _END_OF_MESSAGE.split(reply[final.end() :])[0].lstrip()
    text = reply.lstrip()
    # The prompt may have opened the first block only.
    end = _end_of_blocks(text, 0) or _end_of_blocks(text, 1)
    while end:
        text = text[end:].lstrip()
        end = _end_of_blocks(text, 0)
    while text.startswith(_OTHER_CHANNEL):
        text = "".join(_END_OF_MESSAGE.split(text, maxsplit=1)[1:]).lstrip()
    return text if text != reply.lstrip() else reply


def _end_of_blocks(text: str, depth: int) -> int:
    """Returns where the block ends that begins a text; `depth` is 1 if it is open before it."""
    for block in _BLOCKS:
        tags = list(block.finditer(text))
        if not tags or bool(tags[0]["close"]) != bool(depth) or (not depth and tags[0].start()):
            continue
        end = len(text)
        for tag in tags:
            depth += 1 if tag["open"] else -1
            # A thought may mention an opening tag: then its last closing tag ends it.
            end = tag.end() if tag["close"] else end
            if not depth:
                break
        return end
    return 0


def opened_block(prompt: str) -> str:
    """Returns the end of a prompt from the think block that it leaves open; empty without one."""
    _, tag, content = prompt.rpartition(OPEN)
    return f"{tag}{content}" if tag and CLOSE not in content else ""
