"""Thinking of an exported policy: its chat template renders by default the prompts of training."""

from __future__ import annotations

import json
from pathlib import Path

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import read_object
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message

USER = (Message("user", "Where?"),)
CHATS = (USER, (*USER, Message("assistant", "Ulm"), *USER))


def thinking_of(folder: Path, thinks: bool) -> str:
    """Returns `on` or `off`; empty if the chat template of a folder does not know thinking."""
    tokenizer = ChatTokenizer.load(folder)
    off, on = (tokenizer.prompt_text(USER, thinking=thinking) for thinking in (False, True))
    return "" if off == on else "on" if thinks else "off"


def set_thinking_default(folder: Path, *, thinking: bool) -> None:
    """Changes the chat template of an exported folder so that its default is that of training.

    `thinking`: turns could begin with a think block. `UserError` if no default gives the prompts of
    training.
    """
    tokenizer = ChatTokenizer.load(folder)
    prompts = [tokenizer.prompt_text(chat, thinking=thinking) for chat in CHATS]
    plain = [tokenizer.rendered(chat, prompt=True) for chat in CHATS]
    if plain == prompts:
        return
    # 1. A template with a switch gets another default.
    word = "true" if thinking else "false"
    new = f"{{% set enable_thinking = enable_thinking | default({word}) %}}\n{tokenizer.template}"
    # 2. One that always opens a block has to close it. Jinja drops the last newline of a template.
    switched = tokenizer.rendered(USER, prompt=True, enable_thinking=thinking)
    if rest := prompts[0].removeprefix(switched):
        condition = "add_generation_prompt and not enable_thinking"
        end = f"{{% if {condition} %}}{{{{ {json.dumps(rest)} }}}}{{% endif %}}"
        new = new.removesuffix("\n") + end
    _write_template(folder, new)
    again = ChatTokenizer.load(folder)
    if [again.rendered(chat, prompt=True) for chat in CHATS] != prompts:
        _write_template(folder, tokenizer.template)
        raise UserError(
            "the export is complete, but its chat template has no default that renders the prompts "
            f"of training: pass enable_thinking={word} to it, or change its chat_template.jinja"
        )


def _write_template(folder: Path, template: str) -> None:
    config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    raw = read_object(config, "copy it again")
    stored = raw.get("chat_template")
    if isinstance(stored, list):
        named = [x | {"template": template} if x["name"] == "default" else x for x in stored]
        write_json(config, raw | {"chat_template": named})
    elif stored is not None:
        write_json(config, raw | {"chat_template": template})
    if file.is_file() or stored is None:
        file.write_text(template, encoding="utf-8")
