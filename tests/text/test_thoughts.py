"""Think blocks: split from texts, and rendered by templates that know thinking."""

import pytest

from jax_ragrl.text.thoughts import EMPTY_BLOCK, split_thought, spoken_text
from jax_ragrl.types import Message
from tests.thinking import ALWAYS, SWITCHED, thinking_tokenizer
from tests.tiny import tokenizer

USER = (Message("user", "Who?"),)
CHAT = (Message("system", "Be brief."), *USER, Message("assistant", "Ann"), Message("user", "Why?"))


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("<think>\nTwo hops.\n</think>\n\n[Planning]", "Two hops.", "[Planning]"),
        (f"{EMPTY_BLOCK}[LLM]", "", "[LLM]"),
        ("\n<think>a</think>b", "a", "b"),
        ("<think>never ends", "never ends", None),
        ("[LLM] <think>x</think>", "", "[LLM] <think>x</think>"),
        ("a </think> b", "", "a </think> b"),
        ("", "", ""),
    ],
)
def test_only_a_leading_block_is_a_thought(text, thought, rest):
    assert split_thought(text) == (thought, rest)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("Ulm", "Ulm"),
        ("<think>Ann</think>\n\nUlm", "Ulm"),
        ("Ann was born\n</think>\n\nUlm", "Ulm"),  # the prompt has the opening tag
        ("<think>cut", ""),
        ("Use <think>x</think> tags", "Use <think>x</think> tags"),
        ("", ""),
        *(
            case
            for start, end in (
                *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "THOUGHT")),
                *(("<reasoning effort='low'>", "</reasoning>"), ("<reflection>", "</reflection>")),
                *(("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")),
                *(("◁think▷", "◁/think▷"), ("<|begin_of_thought|>", "<|end_of_thought|>")),
                ("<|START_THINKING|>", "<|END_THINKING|>"),
            )
            for case in (
                (f"\n{start}is it true?{end}\n\nFalse", "False"),
                (f"is it true?{end}False", "False"),  # the prompt has the opening tag
                (f"{start}is it true?", ""),
                (f"{start}{end}", ""),
                (f"{start}a{start}b{end}c{end}False", "False"),
                (f"{start}a{end}{start}b{end} False", "False"),
                (f"{start}the tag {start} opens{end}False", "False"),
                (f"Use {start}x{end} tags", f"Use {start}x{end} tags"),
            )
        ),
        ("<thinking>a<reflection>b</reflection></thinking>Ulm", "Ulm"),
        ("<think>a</think><reflection>b</reflection>Ulm", "Ulm"),
        ("<think>a</think>Use </think> to end it", "Use </think> to end it"),
        ("<thinker>Rodin</thinker>", "<thinker>Rodin</thinker>"),
        (
            "<|channel|>analysis<|message|>Is it true?<|end|><|start|>assistant"
            "<|channel|>final<|message|>False<|return|>",
            "False",
        ),
        ("Is it true?<|end|><|start|>assistant<|channel|>final<|message|>No", "No"),
        ('<|channel|>final <|constrain|>JSON<|message|>{"a": 1}<|return|>', '{"a": 1}'),
        ("<|channel|>analysis<|message|>Is it true?<|end|>False", "False"),
        ("<|channel|>analysis<|message|>Is it true?", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary", ""),
        ("analysisIs it true?assistantfinalFalse", "False"),
        ("Ulm<|end|>", "Ulm<|end|>"),
    ],
)
def test_a_reply_is_what_follows_the_reasoning(reply, text):
    assert spoken_text(reply) == text


@pytest.mark.parametrize("messages", [USER, CHAT])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_prompt_is_that_of_the_template_with_its_switch(messages, thinking):
    chat = thinking_tokenizer(SWITCHED)
    expected = chat._hf.apply_chat_template(
        [message._asdict() for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    ids = chat.chat(messages, thinking=thinking)
    assert chat._hf.decode(ids) == expected
    assert expected.endswith(EMPTY_BLOCK) == (not thinking)


def test_a_template_without_the_switch_renders_the_same_prompt_one_that_thinks_is_closed():
    assert tokenizer().chat(CHAT) == tokenizer().chat(CHAT, thinking=True)
    assert tokenizer().opened_thought(tokenizer().chat(CHAT)) == ""
    chat = thinking_tokenizer(ALWAYS)
    off, on = (chat._hf.decode(chat.chat(USER, thinking=t)) for t in (False, True))
    assert off.endswith(f"assistant\n{EMPTY_BLOCK}") and on.endswith("assistant\n<think>\n")


@pytest.mark.parametrize("messages", [USER, CHAT])
def test_the_block_that_a_prompt_opens_is_known_by_its_ids(messages):
    chat = thinking_tokenizer(ALWAYS)
    assert chat.opened_thought(chat.chat(messages, thinking=True)) == "<think>\n"
    assert chat.opened_thought(chat.chat(messages)) == ""
    assert chat.opened_thought([*chat.chat(messages, thinking=True), 7]) == ""
    switched = thinking_tokenizer(SWITCHED)
    assert switched.opened_thought(switched.chat(messages, thinking=True)) == ""


@pytest.mark.parametrize("thinking", [False, True])
def test_a_later_turn_ends_as_the_first_one(thinking):
    chat = thinking_tokenizer(SWITCHED)
    reply = chat._hf.decode(chat.user_reply("Why?", ended=True, thinking=thinking))
    start = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert reply == start + ("" if thinking else EMPTY_BLOCK)
