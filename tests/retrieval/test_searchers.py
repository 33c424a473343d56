"""Every searcher is a row of the same trial, with a float64 reference as the answer."""

import jax
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import exact, int8, scann
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.scann import ScannSearcher


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def clustered(count, dimension, seed):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(4, count // 40), dimension))
    noise = 0.5 * rng.normal(size=(count, dimension))
    return unit(centres[rng.integers(len(centres), size=count)] + noise)


def reference(queries, vectors, k):
    """Order by falling score, then rising index, in float64."""
    scores = np.round(queries.astype(np.float64) @ vectors.T.astype(np.float64) * 2**20) / 2**20
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), order


SEARCHERS = [ExactSearcher, ScannSearcher.from_vectors]
VECTORS = clustered(500, 32, seed=0)
QUERIES = clustered(300, 32, seed=1)


@pytest.mark.parametrize("make", SEARCHERS)
@pytest.mark.parametrize(("queries", "k"), [(1, 1), (7, 10), (8, 500), (257, 3), (300, 100)])
def test_searchers_find_what_the_reference_finds(make, queries, k):
    scores, index = make(VECTORS).search(QUERIES[:queries], k)
    expected, order = reference(QUERIES[:queries], VECTORS, k)
    assert scores.dtype == np.float32 and index.dtype == np.int32
    np.testing.assert_allclose(scores, expected, atol=3e-6)
    steps = scores.astype(np.float64) * exact.GRID
    np.testing.assert_array_equal(steps, np.round(steps))
    # Only scores that differ by less than float32's error may change places.
    swapped = index != order
    gathered = np.take_along_axis(QUERIES[:queries] @ VECTORS.T, index, 1)
    np.testing.assert_allclose(gathered[swapped], expected[swapped], atol=3e-6)
    assert np.mean(swapped) < 0.01


@pytest.mark.parametrize("make", SEARCHERS)
def test_equal_passages_come_in_their_order(make):
    repeated = np.concatenate([VECTORS[:40]] * 5)
    _, index = make(repeated).search(QUERIES[:20], 25)
    assert (np.diff(index.reshape(20, 5, 5), axis=2) == 40).all()


def test_rounded_scores_ignore_the_last_bits():
    vectors = np.float32([[0.5 + step * 2.0**-20] for step in (0, 1 / 8, -1 / 4, 3 / 4)])
    scores, index = ExactSearcher(vectors).search(np.ones((1, 1), np.float32), 4)
    np.testing.assert_array_equal(scores[0], np.float32([0.5 + 2.0**-20, 0.5, 0.5, 0.5]))
    np.testing.assert_array_equal(index[0], [3, 0, 1, 2])


def test_inner_products_are_asked_for_in_full_precision():
    """On a TPU the default is bfloat16."""
    assert "HIGHEST" in exact.nearest.lower(*arguments(500), 8).as_text()


def arguments(passages):
    """The shapes of a call of `nearest` with 8 queries."""
    shapes = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 32), (passages, 32)))
    return *shapes, jax.ShapeDtypeStruct((), np.int32)


def test_vectors_in_whole_blocks_are_never_copied():
    """A pad of the vectors would be a copy of all of them in every call."""

    def pads(passages):
        text = exact.nearest.lower(*arguments(passages), 8).as_text()
        return [line for line in text.splitlines() if "stablehlo.pad" in line]

    blocks = 5 * exact.BLOCK * 8
    assert pads(blocks) == [] and pads(blocks + 1)
    assert len(exact.pad_to_blocks(VECTORS)) % exact.BLOCK == 0


def test_missing_scann_hits_come_last_and_a_missing_searcher_is_named(tmp_path):
    class Short:
        def search_batched_parallel(self, queries, **limits):
            del queries, limits
            nan = np.float32(np.nan)
            return np.array([[0, 0, 7, 3]], np.uint32), np.array([[nan, nan, 0.5, 0.75]], "f4")

    scores, index = ScannSearcher(Short(), 4).search(QUERIES[:1], 4)
    np.testing.assert_array_equal(scores, np.array([[0.75, 0.5, -np.inf, -np.inf]], np.float32))
    np.testing.assert_array_equal(index[0, :2], [3, 7])
    with pytest.raises(UserError, match="ragrl data index"):
        ScannSearcher.open(tmp_path / "scann", tmp_path / "vectors", scann.BRUTE_FORCE)


@pytest.mark.parametrize("make", SEARCHERS)
def test_a_longer_search_extends_a_shorter_one_and_permuted_queries_permute_the_results(make):
    searcher = make(VECTORS)
    _, longest = searcher.search(QUERIES[:9], 300)
    for k in (1, 5, 64, 65, 200):
        np.testing.assert_array_equal(searcher.search(QUERIES[:9], k)[1], longest[:, :k])
    searcher, order = make(VECTORS), np.random.default_rng(2).permutation(60)
    scores, index = searcher.search(QUERIES[:60], 10)
    permuted_scores, permuted_index = searcher.search(QUERIES[order], 10)
    np.testing.assert_array_equal(permuted_index, index[order])
    np.testing.assert_array_equal(permuted_scores, scores[order])


@pytest.mark.parametrize(
    ("room", "part", "rows"),
    [(3, 500, 2), (1, 500, 1), (0.5, 500, 1), (1000, 500, 256), (4, 250, 8)],
)
def test_score_matrices_stay_within_their_budget(monkeypatch, room, part, rows):
    """Room in queries of all vectors; where two devices hold them a query takes half of it."""
    _, whole = ExactSearcher(VECTORS).search(QUERIES[:256], 7)
    batch_sizes = set()

    def nearest(queries, passages, count, **options):
        batch_sizes.add(len(queries))
        return exact_nearest(queries, passages, count, **options)

    exact_nearest = exact.nearest
    monkeypatch.setattr(exact, "nearest", nearest)
    monkeypatch.setattr(exact, "SCORE_BYTES", int(4 * 500 * room))
    monkeypatch.setattr(exact, "PART", part)
    _, index = ExactSearcher(VECTORS).search(QUERIES[: 2 * rows][:256], 7)
    assert batch_sizes == {rows}
    np.testing.assert_array_equal(index, whole[: len(index)])


@pytest.mark.parametrize("k", [1, 7, 500])
def test_vectors_on_several_devices_are_searched_as_on_one(monkeypatch, k):
    repeated = np.concatenate([VECTORS, VECTORS[::-1]])  # equal ones lie on different devices
    expected = ExactSearcher(repeated).search(QUERIES, k)
    monkeypatch.setattr(exact, "PART", 150)
    searcher = ExactSearcher(repeated)
    assert [int(n) for _, n in searcher._parts] == [167, 167, 167, 167, 166, 166]
    assert len({x.device for x, _ in searcher._parts}) == 6
    for result, x in zip(searcher.search(QUERIES, k), expected, strict=True):
        np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("size", [3000, 3072])
def test_block_top_k_equals_top_k_with_ties_in_order(size):
    """Few distinct scores: most are equal to many others."""
    scores_QX = np.random.default_rng(0).integers(0, 40, (20, size)).astype(np.float32)
    scores_QX[0], scores_QX[1] = 0.0, -np.arange(size)
    # The block of the best holds an equal of one in an earlier block.
    scores_QX[2], scores_QX[2, [300, 2600, 2601]] = 0.0, (1, 2, 1)
    for k in (1, 3, 10):
        result = jax.device_get(jax.jit(exact.top, static_argnums=1)(jax.device_put(scores_QX), k))
        order = np.argsort(-scores_QX, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(result[1], order)
        np.testing.assert_array_equal(result[0], np.take_along_axis(scores_QX, order, 1))


def place(*arrays):
    return [jax.device_put(x) for x in arrays]


@pytest.mark.parametrize("k", [1, 8, 200])
def test_a_scan_over_blocks_finds_what_one_product_finds(k):
    """To the last bit: equal passages lie in different blocks, and one block is partial."""
    repeated = exact.pad_to_blocks(np.concatenate([VECTORS, VECTORS[::-1], VECTORS[:100]]))
    queries, vectors, count = place(QUERIES[:32], repeated, np.int32(1100))
    whole = jax.device_get(exact.nearest(queries, vectors, count, k, stream=2048))
    for stream in (256, 384):
        scanned = jax.device_get(exact.nearest(queries, vectors, count, k, stream=stream))
        jax.tree.map(np.testing.assert_array_equal, scanned, whole)


def test_scanning_needs_no_scores_of_the_whole_corpus():
    def temporary(passages):
        program = exact.nearest.lower(*arguments(passages), 8, stream=1024).compile()
        return program.memory_analysis().temp_size_in_bytes

    scores = 4 * 8 * 16 * 1024
    assert temporary(16 * 1024) - temporary(2 * 1024) < scores / 8


@pytest.mark.parametrize("k", [1, 10, 500])
def test_eight_bits_with_second_scores_find_what_float32_finds(k):
    codes, scales = int8.quantize(VECTORS)
    assert codes.dtype == np.int8 and np.abs(codes * scales - VECTORS).max() <= scales.max() / 2
    searcher = int8.Int8Searcher(codes, scales, lambda index: VECTORS[index])
    scores, index = searcher.search(QUERIES, k)
    expected = ExactSearcher(VECTORS).search(QUERIES, k)
    np.testing.assert_allclose(scores, expected[0], atol=3e-6)
    assert np.mean(index != expected[1]) < 0.01  # equal to the last bits


def test_eight_bits_alone_find_nearly_all():
    _, index = int8.Int8Searcher(*int8.quantize(VECTORS)).search(QUERIES, 10)
    _, expected = ExactSearcher(VECTORS).search(QUERIES, 10)
    shares = [len(set(a) & set(b)) / 10 for a, b in zip(index, expected, strict=True)]
    assert 0.95 < np.mean(shares) < 1


def test_exact_search_copies_nothing_silently(no_transfers):
    searcher = ExactSearcher(VECTORS)
    expected = searcher.search(QUERIES[:3], 5)
    with no_transfers():
        result = searcher.search(QUERIES[:3], 5)
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def hashed(tmp_path_factory):
    """Vectors enough for the tree, and the searcher built, written and opened over them."""
    pytest.importorskip("scann")
    folder = tmp_path_factory.mktemp("hashed")
    vectors = clustered(scann.BRUTE_FORCE, 24, seed=3)
    scann.build_scann(vectors, folder / "scann")
    return vectors, ScannSearcher.open(folder / "scann", folder / "vectors", len(vectors))


def test_tree_and_hashing_find_nine_in_ten(hashed):
    vectors, searcher = hashed
    queries = clustered(200, 24, seed=4)
    queries = unit(vectors[:200] + 0.3 * queries)
    scores, index = searcher.search(queries, 10)
    _, order = reference(queries, vectors, 10)
    shares = [len(set(a) & set(b)) / 10 for a, b in zip(index, order, strict=True)]
    assert np.mean(shares) >= 0.9
    assert (np.diff(scores, axis=1) <= 0).all()


def test_pages_of_an_approximate_search_agree(hashed):
    vectors, searcher = hashed
    _, longest = searcher.search(vectors[:20], 64)
    for k in (1, 10, 63):
        np.testing.assert_array_equal(searcher.search(vectors[:20], k)[1], longest[:, :k])
