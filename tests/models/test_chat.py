"""A model's tokenizer, template, generation config and weights are compared where it is named."""

import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.errors import UserError
from jax_ragrl.models.chat import ChatFinding, compare_chat
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policies, load_policy
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message
from jax_ragrl.validation.models import check_tokenizers
from tests.model_folders import TAGS, base_model, model_folder, with_rows, with_tokens
from tests.thinking import ALWAYS, SWITCHED

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(turn: str = TURN, before: str = "", prompt: str = PROMPT) -> str:
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + prompt


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
ERRORS = {
    "does not parse": "{% for m in messages %}{{ m.role }",
    "fails for a conversation that begins with system, user .*No system": template(
        before=NO_SYSTEM
    ),
    "no generation prompt": template(prompt=""),
    "not show each message once": template("{% for c in m.content %}{{ c.text }}{% endfor %}"),
    "loops too often": "{{ 'a' * 10**10 }}",
}
WARNINGS = {
    "removes the thoughts of earlier": template(
        TURN.replace("m.content", "m.content.split('</think>')[-1]")
    ),
    "removes the thoughts": SWITCHED,
    "writes a think block before a reply": ALWAYS,
    "shows a date": template(before="{{ strftime_now('%Y') }}"),
    "writes no token after a reply": template("{{ m.role }}: {{ m.content }}\n", prompt="{% if "
                                              "add_generation_prompt %}assistant: {% endif %}"),
    "are changed by the chat template": template(TURN.replace("m.content", "m.content | trim")),
    "in another way than its prompt began": template(prompt=PROMPT.replace(
        "{% endif %}", "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        "{% endif %}")),
}  # fmt: skip


def job_of(folder):
    # C-3PO's style with a system message.
    overrides = [f"--config.policy={folder}", "--config.recipe.system.style=c3po"]
    return load_job(load_config(CONFIGS / "tiny" / "c3po.py", overrides))


@pytest.mark.parametrize("text", ERRORS)
def test_a_template_that_cannot_play_the_roles_is_an_error_in_every_command(text, tmp_path):
    folder = model_folder(tmp_path / "model", template=ERRORS[text])
    (finding,) = check_tokenizers(job_of(folder))
    assert finding.level == "error" and "\n" not in finding.text
    with pytest.raises(UserError, match=text) as caught:
        load_policies(job_of(folder), None)
    assert finding.text in str(caught.value) or str(caught.value) in finding.text


def findings(folder, **options) -> list[ChatFinding]:
    prompts = {"route": [Message("user", " Who?\n")]}
    return list(compare_chat(folder, ChatTokenizer.load(folder), prompts, **options))


@pytest.mark.parametrize("text", WARNINGS)
def test_a_template_that_changes_prompts_is_named_in_one_line(text, tmp_path):
    (*_, finding) = findings(model_folder(tmp_path / "model", template=WARNINGS[text]))
    others = findings(tmp_path / "model")
    assert any(text in finding.text for finding in others), others
    assert not any(finding.is_error or "\n" in finding.text for finding in others)


def test_loading_a_model_prints_what_changes_its_prompts(tmp_path, capsys):
    folder = model_folder(tmp_path / "model", template=WARNINGS["shows a date"])
    load_policy(str(folder))
    assert capsys.readouterr().err.count("shows a date: it is always 26 Jul 2024") == 1


@pytest.mark.parametrize("name", ["tiny", "base"])
def test_models_whose_parts_fit_have_no_findings(name, tmp_path):
    make = {"tiny": model_folder, "base": base_model}[name]
    assert findings(make(tmp_path / "model")) == []


def test_a_token_without_a_row_in_the_embeddings_is_an_error(tmp_path):
    folder = with_tokens(model_folder(tmp_path / "model"), *TAGS)
    with pytest.raises(UserError, match="'<search>' as id 1024 and 3 more beyond the 1024 rows"):
        load_policy(str(folder))
    assert load_policy(str(with_rows(folder, 1032)))[0].config.num_tokens == 1028


@pytest.mark.parametrize("eos", [1024, [2, 5000]])
def test_an_end_token_without_a_row_in_the_embeddings_is_an_error(eos, tmp_path):
    folder = model_folder(tmp_path / "model", generation_config={"eos_token_id": eos})
    assert [finding.is_error for finding in findings(folder)] == [True]


def test_weights_that_contradict_the_config_are_found_without_loading(tmp_path):
    folder = model_folder(tmp_path / "model", config={"tie_word_embeddings": False})
    (finding,) = findings(folder)
    assert finding.is_error and "lacks lm_head.weight" in finding.text


def test_a_tag_that_ends_turns_cannot_be_part_of_an_action(tmp_path):
    folder = with_tokens(model_folder(tmp_path / "model"), *TAGS, special=True)
    with_rows(folder, 1032)
    assert findings(folder, grammars=TAGS) == []
    changed = model_folder(tmp_path / "eos", tokenizer_config={"eos_token": "</answer>"})
    with_rows(with_tokens(changed, *TAGS, special=True), 1032)
    (finding,) = findings(changed, grammars=TAGS)
    assert finding.is_error and "actions contain '</answer>'" in finding.text


def test_a_prompt_that_spells_a_token_is_named(tmp_path):
    folder = with_rows(with_tokens(model_folder(tmp_path / "model"), *TAGS), 1032)
    prompts = {"agent": [Message("user", "Write <search>query</search>.")]}
    (finding,) = compare_chat(folder, ChatTokenizer.load(folder), prompts)
    assert finding.text.startswith("the prompts agent spell the token '<search>'")
