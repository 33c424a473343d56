"""An exported policy thinks by default exactly if it was trained to."""

import json

import pytest
import transformers

from jax_ragrl.errors import UserError
from jax_ragrl.export.thinking import CHATS, set_thinking_default, thinking_of
from jax_ragrl.text.tokenizer import ChatTokenizer
from tests.model_folders import model_folder
from tests.thinking import ALWAYS, SWITCHED


@pytest.mark.parametrize("place", ["file", "config", "list"])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("template", [SWITCHED, ALWAYS, ALWAYS + "\n", None])
def test_a_server_without_variables_renders_the_prompts_of_training(
    template, thinking, place, tmp_path
):
    folder = model_folder(
        tmp_path / "policy", **({} if template is None else {"template": template})
    )
    if place != "file":
        file = folder / "chat_template.jinja"
        text = file.read_text()
        named = [{"name": "default", "template": text}, {"name": "tool_use", "template": "x"}]
        config = folder / "tokenizer_config.json"
        stored = {"chat_template": text if place == "config" else named}
        config.write_text(json.dumps(json.loads(config.read_text()) | stored))
        file.unlink()
    before = ChatTokenizer.load(folder)
    assert thinking_of(folder, thinking) == (
        "" if template is None else "on" if thinking else "off"
    )
    set_thinking_default(folder, thinking=thinking)
    # As a server does, by Transformers' own renderer.
    hf = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for chat in CHATS:
        messages = [message._asdict() for message in chat]
        served = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert hf(served, add_special_tokens=False)["input_ids"] == before.chat(
            chat, thinking=thinking
        )
    if template is None:
        assert ChatTokenizer.load(folder).template == before.template


def test_a_template_without_such_a_default_is_named_and_stays(tmp_path):
    """It opens blocks of two kinds, so that no one text closes them."""
    kind = "<think>{% if messages | length == 1 %}{{ '\\n' }}{% endif %}"
    template = ALWAYS.replace(
        "'<|im_start|>assistant\\n<think>\\n' -}}", "'<|im_start|>assistant\\n' -}}" + kind
    )
    assert template != ALWAYS
    folder = model_folder(tmp_path / "policy", template=template)
    with pytest.raises(UserError, match="no default that renders the prompts of training"):
        set_thinking_default(folder, thinking=False)
    assert (folder / "chat_template.jinja").read_text() == template
