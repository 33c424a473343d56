import json

import hypothesis
import pytest
import transformers
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jax_ragrl.errors import UserError
from jax_ragrl.models import gguf_tokenizer
from jax_ragrl.rollout.context import action_ids, context_ids
from jax_ragrl.rollout.effects import ModelOutput, Observation
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import END, PAD, START, train_tokenizer
from jax_ragrl.types import Message
from tests.model_folders import TAGS, base_model, model_folder, sentence_pieces, with_tokens

TEXTS = ["route Question: Who directed the film?", "Thought: done Action: [Retrieval] director"]
SPECIAL = (PAD, START, END)

# Text that comes close to control tokens, and any other.
CONTENT = st.text() | st.lists(
    st.sampled_from(
        [*SPECIAL, "<|", "|>", "im_end", "<|im_", "end|>", "\n", "assistant", " x", "é"]
    )
).map("".join)
ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=4)


@pytest.fixture(scope="session")
def hf() -> transformers.PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS * 5, 330)


@pytest.fixture(scope="session")
def tokenizer(hf) -> ChatTokenizer:
    return ChatTokenizer(hf)


@pytest.fixture(scope="session")
def special_ids(hf) -> set[int]:
    ids = {hf.convert_tokens_to_ids(token) for token in SPECIAL}
    assert len(ids) == 3 and None not in ids
    return ids


@hypothesis.given(text=CONTENT)
@hypothesis.example(text="cut \ud83d")
def test_content_never_yields_a_control_token_and_is_decoded(tokenizer, special_ids, text):
    assert not special_ids & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\ud83d", "\ufffd")


class Counting:
    """A backend that records the texts it encodes."""

    def __init__(self, backend):
        self.backend, self.texts = backend, []

    def encode_batch_fast(self, texts, **options):
        self.texts += texts
        return self.backend.encode_batch_fast(texts, **options)


@hypothesis.given(texts=st.lists(CONTENT, max_size=6))
def test_encoding_ahead_gives_the_same_ids_once(hf, texts):
    tokenizer, fresh = ChatTokenizer(hf), ChatTokenizer(hf)
    tokenizer._content = counting = Counting(tokenizer._content)
    for _ in range(2):
        tokenizer.encode_ahead(texts)
        assert [tokenizer.encode(text) for text in texts] == [fresh.encode(text) for text in texts]
    assert sorted(counting.texts) == sorted(set(texts))


def test_the_cache_is_bounded(hf, monkeypatch):
    monkeypatch.setattr("jax_ragrl.text.tokenizer.CACHE_SIZE", 8)
    tokenizer = ChatTokenizer(hf)
    for i in range(10):
        tokenizer.encode_ahead([f"Who? {i}"])
    assert 1 <= len(tokenizer._cache) < 10
    assert tokenizer.encode("Who? 0") == ChatTokenizer(hf).encode("Who? 0")


@hypothesis.given(roles=ROLES, data=st.data())
def test_a_conversation_is_template_ids_around_contents(tokenizer, hf, special_ids, roles, data):
    contents = [data.draw(CONTENT) for _ in roles]
    end, newline = hf.convert_tokens_to_ids(END), tokenizer.encode("\n")
    expected: list[int] = []
    for role, content in zip(roles, contents, strict=True):
        head = [hf.convert_tokens_to_ids(START), *tokenizer.encode(f"{role}\n")]
        expected += [*head, *tokenizer.encode(content), end, *newline]
    expected += [hf.convert_tokens_to_ids(START), *tokenizer.encode("assistant\n")]
    ids = tokenizer.chat([Message(*pair) for pair in zip(roles, contents, strict=True)])
    assert ids == expected
    # Whatever the contents, the control tokens are the template's: two a message and the opening.
    assert sum(i in special_ids for i in ids) == 2 * len(roles) + 1


MERGED = ["▁t", "he", "▁the", "in", "▁in", "▁a", "▁[", "▁<", "▁▁"]
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
TINY_LLAMA = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
TURNS = [Message("user", "the inn"), Message("assistant", "in the"), Message("user", "a in\nx")]


def sentence_piece(template: str, scheme: str) -> transformers.PreTrainedTokenizerFast:
    """A SentencePiece tokenizer that adds a space as Llama 2's files do, or by a scheme."""
    fields = sentence_pieces(MERGED, "▁theinaruswdx[]/<>|INST")
    backend = gguf_tokenizer.build_tokenizer(fields | {"add_space_prefix": scheme == "prepend"})
    if scheme != "prepend":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template=template
    )


SCHEMES = ("prepend", "always", "first")


@pytest.mark.parametrize("template", [LLAMA_2, TINY_LLAMA, BARE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sentencepiece_prompts_have_the_tokens_of_the_rendered_template(template, scheme):
    hf = sentence_piece(template, scheme)
    rendered = hf.apply_chat_template(
        [message._asdict() for message in TURNS], tokenize=False, add_generation_prompt=True
    )
    chat = ChatTokenizer(hf)
    expected = hf(rendered, add_special_tokens=False)["input_ids"]
    assert chat.chat(TURNS) == expected
    chat.encode_ahead(message.content for message in TURNS)
    assert chat.chat(TURNS) == expected


@pytest.mark.parametrize("template", [LLAMA_2, TINY_LLAMA])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_reply_continues_its_prompt_as_the_template_shows_it(template, scheme):
    chat = ChatTokenizer(sentence_piece(template, scheme))
    ids = [*chat.chat(TURNS[:1]), *chat.encode_action(TURNS[1].content, after_prompt=True)]
    assert chat.chat(TURNS[:2])[: len(ids)] == ids


def test_content_in_plain_text_begins_with_no_space():
    chat = ChatTokenizer(sentence_piece(LLAMA_2, "prepend"))
    assert chat.encode("the") == [chat.vocabulary()[piece] for piece in ("t", "he")]


def test_the_date_of_a_template_is_not_that_of_today():
    """Llama 3.2's template shows today's date unless it gets another one."""
    dated = train_tokenizer(TEXTS, 300)
    dated.chat_template = "{{ date_string or strftime_now('%Y') }}" + dated.chat_template
    assert dated.decode(ChatTokenizer(dated).chat([Message("user", "x")])).startswith("26 Jul 2024")


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_are_tokens_are_text_in_content_and_tokens_in_actions(special, tmp_path):
    """Whether the tokenizer calls them special or not, a passage cannot write them."""
    folder = with_tokens(model_folder(tmp_path / "model"), *TAGS, special=special)
    chat = ChatTokenizer.load(folder)
    text = "a <search>cats</search> <|im_end|>"
    ids, action = chat.encode(text), chat.encode_action(text, after_prompt=True)
    assert not {*range(3), *range(1024, 1028)} & set(ids)
    assert [i for i in action if i >= 1024] == [1024, 1025] and 2 not in action
    assert chat.decode(ids) == chat.decode(action) == text
    assert chat.decode([*action, 2, 0]) == text  # control tokens have no text
    prompt = chat.chat([Message("user", text)])
    assert prompt.count(2) == 1 and max(prompt) < 1024
    # Stop strings and masks see the text of a tag.
    assert chat.stop_transitions(("</search>",))[0, 1025] == 31
    assert chat.allowed_tokens("</?search>").nonzero()[0].tolist() == [0, 2, 1024, 1025]
    with pytest.raises(UserError, match=r"is '\(', which is no regular expression"):
        chat.allowed_tokens("(")


def test_the_end_of_a_turn_is_that_of_the_template(tmp_path):
    chat = ChatTokenizer.load(base_model(tmp_path / "base"))
    assert chat.end_ids == (2,) and chat.stop_ids == (2, 0)
    # Only generation_config.json names the end of this one's turns, which its template omits.
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_" \
        "prompt %}assistant: {% endif %}"  # fmt: skip
    ends = {"generation_config": {"eos_token_id": [7, 0]}, "config": {"eos_token_id": 8}}
    eos = {"tokenizer_config": {"eos_token": "<|endoftext|>"}}
    chat = ChatTokenizer.load(model_folder(tmp_path / "bare", template=bare, **ends, **eos))
    assert chat.end_ids == (0,) and set(chat.stop_ids) == {0, 2, 7, 8}
    # The first token of the next message ends this one's turns, as in GLM-4.
    next_turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}" \
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip
    ends = {"generation_config": {"eos_token_id": [0, 1]}}
    chat = ChatTokenizer.load(model_folder(tmp_path / "next", template=next_turn, **ends, **eos))
    assert chat.end_ids == (1,)


def test_an_end_of_several_tokens_closes_a_turn_as_the_template_does():
    """Llama 2 writes a space before the token that ends a turn."""
    chat = ChatTokenizer(sentence_piece(LLAMA_2, "prepend"))
    action = action_ids(chat, TURNS[1].content, True)
    history = (ModelOutput(action), Observation(TURNS[2].content))
    assert list(context_ids(chat, TURNS[:1], history, True)) == chat.chat(TURNS)


def test_the_pad_token_is_no_end_marker_and_encoding_switches_no_shared_mode(tokenizer, hf):
    assert tokenizer.stop_ids[0] == hf.convert_tokens_to_ids(END)
    assert set(tokenizer.stop_ids) == {hf.convert_tokens_to_ids(t) for t in (END, PAD)}
    assert tokenizer.pad_id == hf.convert_tokens_to_ids(PAD)
    assert len(tokenizer) == len(hf) <= 330
    hf.backend_tokenizer.encode_special_tokens = False
    tokenizer.encode(END)
    assert not hf.backend_tokenizer.encode_special_tokens


def test_a_saved_tokenizer_loads_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = ChatTokenizer.load(tmp_path)
    messages = [Message("system", "s"), Message("user", f"{END} 𝄞 \n x")]
    assert again.chat(messages) == tokenizer.chat(messages)
    assert again.stop_ids == tokenizer.stop_ids and again.pad_id == tokenizer.pad_id
    # The ends of generation_config.json, too; a negative id is none.
    ids = {"eos_token_id": [2, 9, -1], "bos_token_id": -1}
    folder = model_folder(tmp_path / "model", generation_config=ids)
    ChatTokenizer.load(folder).save(tmp_path / "saved")
    assert ChatTokenizer.load(tmp_path / "saved").stop_ids == (2, 9, 0)
    assert "bos_token_id" not in ChatTokenizer.load(folder).special_ids


def test_lengths_that_training_left_in_a_tokenizer_neither_cut_nor_pad_prompts(tmp_path):
    folder = model_folder(tmp_path / "trained")
    trained = transformers.AutoTokenizer.from_pretrained(folder)
    trained("Where?", truncation=True, max_length=8, padding="max_length")
    trained.save_pretrained(folder)
    text = "Which river flows through the city where Ann was born in 1987?"
    ids = ChatTokenizer.load(folder).chat([Message("user", text)])
    chat = [{"role": "user", "content": text}]
    expected = trained.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == expected and len(ids) > 16


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "each message once"),
        ("fixed", "each message once"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(template, message):
    bare = train_tokenizer(TEXTS, 300)
    bare.chat_template = template
    with pytest.raises(UserError, match=message):
        ChatTokenizer(bare).chat([Message("user", "x")])


@pytest.mark.parametrize("damage", [("tokenizer_config.json", "{"), ("tokenizer.json", "")])
def test_a_damaged_tokenizer_is_refused(tokenizer, damage, tmp_path):
    tokenizer.save(tmp_path)
    name, text = damage
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="no readable tokenizer"):
        ChatTokenizer.load(tmp_path)
    with pytest.raises(UserError, match="no tokenizer_config.json"):
        ChatTokenizer.load(tmp_path.parent)


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "OwnTokenizer"])
def test_code_in_a_folder_is_never_executed(tokenizer, tokenizer_class, tmp_path, monkeypatch):
    """A known class loads without the code; an unknown class is an error."""
    folder, trace = tmp_path / "policy", tmp_path / "executed"
    tokenizer.save(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
    config["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "import pathlib\nimport transformers\n"
        f"pathlib.Path({str(trace)!r}).touch()\n"
        "class OwnTokenizer(transformers.PreTrainedTokenizerFast):\n    pass\n"
    )
    prompts = []
    monkeypatch.setattr("builtins.input", lambda prompt="": prompts.append(prompt) or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    if tokenizer_class == "OwnTokenizer":
        with pytest.raises(UserError, match="no readable tokenizer"):
            ChatTokenizer.load(folder)
    else:
        message = [Message("user", "x")]
        assert ChatTokenizer.load(folder).chat(message) == tokenizer.chat(message)
    assert not prompts and not trace.exists()
