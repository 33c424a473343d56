"""BM25 scores words as its formula says, and its hits do not depend on the depth."""

import json
import math
import re
import sys
import typing

import numpy as np
import pytest

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.bm25 import Analyzer, best_positive, build_bm25, open_or_build_bm25
from jax_ragrl.retrieval.kinds import BM25Index, VectorIndex
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.index_folder import open_folder
from jax_ragrl.types import Passage

TEXTS = (
    ("Silent Harbor", "Silent Harbor was directed by Adela Brandt in 1971."),
    ("Adela Brandt", "Adela Brandt was born in Thornby."),
    ("Thornby", "Thornby is a city with a mayor, and the mayor directs it."),
    ("", "Nothing much of the harbors."),
    ("Twin", "the same words"),
    ("Twin", "the same words"),
)
PASSAGES = tuple(Passage(f"p{n}", title, text) for n, (title, text) in enumerate(TEXTS))
METHODS = typing.get_args(typing.get_type_hints(BM25Index)["method"])


@pytest.fixture
def corpus():
    return Corpus(PASSAGES)


def ids(hits):
    return [passage.id for passage in hits.passages]


def test_a_score_is_the_formula_of_lucene(corpus, tmp_path):
    """Sum of ln(1 + (N - n + 0.5) / (n + 0.5)) tf / (tf + k1 (1 - b + b length / mean))."""
    plain = BM25Index(language="none", k1=1.2, b=0.6)
    (hits,) = build_bm25(corpus, plain, tmp_path).search(["mayor Thornby"], 3)
    rows = [re.findall(r"\b\w\w+\b", f"{title}\n{text}".lower()) for title, text in TEXTS]
    mean = sum(map(len, rows)) / len(rows)
    expected = {}
    for n, row in enumerate(rows):
        for word in ("mayor", "thornby"):
            count, spread = row.count(word), sum(word in other for other in rows)
            idf = math.log(1 + (len(rows) - spread + 0.5) / (spread + 0.5))
            saturated = count / (count + 1.2 * (0.4 + 0.6 * len(row) / mean))
            expected[f"p{n}"] = expected.get(f"p{n}", 0) + idf * saturated
    assert ids(hits) == ["p2", "p1"]
    np.testing.assert_allclose(hits.scores, [expected[i] for i in ids(hits)], rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_passage_without_a_word_of_the_query_is_no_hit(corpus, tmp_path, method):
    retriever = build_bm25(corpus, BM25Index(method=method), tmp_path)
    mayor, unknown, stop, empty = retriever.search(["mayor", "zebra", "what is the", ""], 6)
    assert ids(mayor) == ["p2"] and mayor.scores[0] > 0
    assert unknown == stop == empty == ((), ())
    with pytest.raises(UserError, match="k=0"):
        retriever.search(["mayor"], 0)


def test_titles_and_texts_are_searched_by_their_stems(corpus, tmp_path):
    retriever = build_bm25(corpus, BM25Index(), tmp_path / "english")
    harbors, directing = retriever.search(["HARBORS", "directing"], 6)
    assert set(ids(harbors)) == {"p0", "p3"} and set(ids(directing)) == {"p0", "p2"}
    plain = build_bm25(corpus, BM25Index(language="none"), tmp_path / "none")
    assert [ids(hits) for hits in plain.search(["HARBORS", "the same"], 1)] == [["p3"], ["p4"]]


def test_the_first_hits_do_not_depend_on_the_depth():
    # Few distinct scores, so that most hits tie.
    scores_X = np.random.default_rng(0).integers(-1, 4, 300).astype(np.float32)
    whole = best_positive(scores_X, 300)
    assert (scores_X[whole] > 0).all() and len(whole) == (scores_X > 0).sum()
    expected = sorted(whole.tolist(), key=lambda n: (-scores_X[n], n))
    assert whole.tolist() == expected
    for k in range(1, 300):
        assert best_positive(scores_X, k).tolist() == expected[:k]


def test_an_opened_index_equals_the_built_one(corpus, tmp_path):
    index = BM25Index(language="german", k1=0.9, folder=str(tmp_path))
    built = load_retriever(corpus, index, tmp_path)
    queries = ["Thornby", "mayor Adela", "zebra"]
    for opened in (load_retriever(corpus, index, tmp_path), open_folder(tmp_path, corpus)):
        assert opened.search(queries, 3) == built.search(queries, 3)
        assert isinstance(opened.scores.scores["data"], np.memmap)
        assert opened.fingerprint == corpus.fingerprint
    description = json.loads((tmp_path / "index.json").read_text())
    assert (description["kind"], description["language"]) == ("bm25", "german")
    for other in ({"k1": 1.0}, {"language": "none"}, {"method": "atire"}):
        with pytest.raises(UserError, match=f"the {[*other][0]} .*use the same settings"):
            open_or_build_bm25(
                corpus, BM25Index(**{"language": "german", "k1": 0.9} | other), tmp_path
            )
    with pytest.raises(UserError, match="is of kind bm25, .* but index.kind is exact"):
        load_retriever(corpus, VectorIndex(kind="exact", folder=str(tmp_path)), tmp_path)
    with pytest.raises(UserError, match="was built for corpus"):
        open_folder(tmp_path, Corpus(PASSAGES[:3]))


def test_equal_corpora_give_equal_files(corpus, tmp_path):
    for name in ("one", "two"):
        build_bm25(corpus, BM25Index(), tmp_path / name)
    names = [path.name for path in (tmp_path / "one" / "bm25").iterdir()]
    assert len(names) == 5
    for name in names:
        first, second = ((tmp_path / n / "bm25" / name).read_bytes() for n in ("one", "two"))
        assert first == second, name
    # By their first occurrence: a set of words has another order in each process.
    numbers = json.loads((tmp_path / "one" / "bm25" / "vocab.index.json").read_text())
    assert [*numbers][:3] == ["silent", "harbor", "direct"]


def test_what_cannot_be_an_index_is_reported(corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no passage of the corpus has a word"):
        build_bm25(Corpus((Passage("1", "", "the a of"),)), BM25Index(), tmp_path / "empty")
    build_bm25(corpus, BM25Index(), tmp_path)
    (tmp_path / "bm25" / "indptr.csc.index.npy").unlink()
    with pytest.raises(UserError, match="cannot be read .*rerun 'ragrl data index'"):
        open_folder(tmp_path, corpus)
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    with pytest.raises(UserError, match="pip install bm25s PyStemmer"):
        build_bm25(corpus, BM25Index(), tmp_path)


@pytest.mark.parametrize("language", typing.get_args(typing.get_type_hints(BM25Index)["language"]))
def test_every_language_has_stop_words_and_a_stemmer(language):
    analyzer = Analyzer(language)
    assert bool(analyzer._stop_words) == (language != "none")
    assert analyzer.words("Ulm 1971 x") == ["ulm", "1971"]


# Texts without blanks, and queries that find them.
UNSPACED = {
    "乌尔姆位于多瑙河畔，是德国的一座城市。": ("乌尔姆位于哪条河畔？", "多瑙河"),
    "科隆位于莱茵河畔，以科隆大教堂闻名。": ("莱",),
    "東京は日本の首都で、隅田川が流れている。": ("日本の首都はどこですか？",),
    "กรุงเทพมหานครตั้งอยู่ริมแม่น้ำเจ้าพระยา": ("กรุงเทพตั้งอยู่ริมแม่น้ำอะไร",),
    "ວຽງຈັນເປັນນະຄອນຫຼວງຂອງລາວ": ("ນະຄອນຫຼວງ",),
    "ភ្នំពេញជារាជធានីនៃកម្ពុជា": ("រាជធានី",),
    "ရန်ကုန်မြို့သည် မြန်မာနိုင်ငံ၏ အကြီးဆုံးမြို့ဖြစ်သည်": ("ရန်ကုန်",),
}


@pytest.mark.parametrize("language", ["english", "none"])
def test_texts_without_blanks_are_found_by_their_characters(language, tmp_path):
    corpus = Corpus(tuple(Passage(text, "", text) for text in UNSPACED))
    retriever = build_bm25(corpus, BM25Index(language=language), tmp_path)
    for text, queries in UNSPACED.items():
        assert [ids(hits) for hits in retriever.search(queries, 1)] == [[text]] * len(queries)
