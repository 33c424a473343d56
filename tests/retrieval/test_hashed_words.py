"""Laws of the weight-free encoder."""

import math

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.types import Passage

PASSAGES = [
    Passage("0", "Cypress", "Cypress is a conifer tree."),
    Passage("1", "Ajuga", "Ajuga is a genus of plants, plants of the mint family."),
    Passage("2", "Röntgen", "RÖNTGEN was a physicist."),
]


@pytest.fixture
def fitted():
    return HashedEncoder.fit(PASSAGES, dimension=256)


def test_vectors_are_the_same_on_every_machine(fitted):
    vector = fitted.encode_queries(["cypress mint plants plants"])[0]
    (places,) = np.nonzero(vector)
    assert places.tolist() == [38, 79, 96]
    assert vector[places].tolist() == [
        -0.45329466462135315,
        -0.7674945592880249,
        0.45329466462135315,
    ]


def test_passages_have_length_one_and_unknown_words_case_and_order_count_nothing(fitted):
    vectors = fitted.encode_passages(PASSAGES)
    assert vectors.dtype == np.float32 and vectors.shape == (3, 256)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
    known, padded = fitted.encode_queries(["mint family", "mint family zebra quagga"])
    np.testing.assert_array_equal(known, padded)
    np.testing.assert_array_equal(fitted.encode_queries(["zebra", ""]), np.zeros((2, 256)))
    everywhere = HashedEncoder.fit(PASSAGES[:2]).encode_queries(["is a"])
    assert not everywhere.any(), "a word of every passage weighs nothing"
    left, right = fitted.encode_queries(["Conifer TREE, physicist", "physicist tree conifer"])
    np.testing.assert_allclose(left, right, atol=1e-7)


def test_inner_products_estimate_the_tf_idf_cosine():
    wide = HashedEncoder.fit(PASSAGES, dimension=1 << 20)
    query, passage = wide.encode_queries(["plants tree"]), wide.encode_passages(PASSAGES[1:2])
    once, mint = math.log(4 / 2), 1 + math.log(2)
    # ajuga (twice), genus, plants (twice), mint and family are of one passage each; a and is of
    # two or all, of and the of one (of twice).
    weights = (mint, 1, mint, mint, 1, 1, 1)  # ajuga, genus, of, plants, the, mint, family
    squares = sum((once * w) ** 2 for w in weights) + math.log(4 / 3) ** 2
    expected = (once * mint * once) / (math.sqrt(2 * once**2) * math.sqrt(squares))
    assert float(np.vdot(query, passage)) == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(UserError, match="dimension is 0"):
        HashedEncoder.fit(PASSAGES, dimension=0)
    with pytest.raises(UserError, match="ragrl data index"):
        HashedEncoder.load(tmp_path)
