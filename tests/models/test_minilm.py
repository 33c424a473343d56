"""A published encoder, all-MiniLM-L6-v2, equals sentence-transformers; skipped without either."""

import json
import pathlib

import numpy as np
import pytest

from jax_ragrl.models import encoder

pytestmark = pytest.mark.optimized
EXPECTED = json.loads((pathlib.Path(__file__).parent / "minilm.json").read_text())


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip(encoder.MINILM_PACKAGE)
    return encoder.load_encoder(encoder.MINILM)


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(minilm):
    vectors = minilm.encode(EXPECTED["texts"])
    np.testing.assert_allclose(vectors, EXPECTED["vectors"], atol=1e-5)
