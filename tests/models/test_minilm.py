"""A published encoder, all-MiniLM-L6-v2, equals sentence-transformers; skipped without either."""

import json
import pathlib

import numpy as np
import pytest

from jax_ragrl.corpus.passages import passage_text
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.models import encoder

pytestmark = pytest.mark.optimized
EXPECTED = json.loads((pathlib.Path(__file__).parent / "minilm.json").read_text())


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip(encoder.MINILM_PACKAGE)
    return encoder.load_encoder(encoder.MINILM)


def cosines(one, other):
    return np.sum(one * other, axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(minilm):
    vectors = minilm.encode(EXPECTED["texts"])
    np.testing.assert_allclose(vectors, EXPECTED["vectors"], atol=1e-5)


@pytest.mark.slow
def test_passages_have_the_same_direction(minilm, shared_data):
    reference = pytest.importorskip("sentence_transformers")
    corpus = load_corpus(shared_data / "hotpotqa" / "hotpotqa_corpus.json.gz")
    passages = corpus.passages[::45][:200]
    assert len(passages) == 200
    model = reference.SentenceTransformer(str(encoder.minilm_folder()), device="cpu")
    expected = model.encode([passage_text(passage) for passage in passages])
    vectors = minilm.encode_passages(passages)
    cosine_X = cosines(vectors, expected)
    assert np.min(cosine_X) >= 0.9999, np.sort(cosine_X)[:5]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
