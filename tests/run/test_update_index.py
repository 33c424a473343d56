"""An updated index is the index of the changed corpus, whole at every moment."""

import dataclasses
import json
import pathlib
from unittest.mock import Mock

import numpy as np
import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.chunks import Chunks
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.corpus.reading import Reading, load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import embed, index, shards
from jax_ragrl.retrieval.bm25 import build_bm25
from jax_ragrl.retrieval.index import build_index, load_indexed, stored_corpus
from jax_ragrl.retrieval.kinds import BM25Index
from jax_ragrl.run import update_index as updates
from jax_ragrl.run.retrievers import open_folder
from jax_ragrl.run.update_index import update_index
from jax_ragrl.types import Passage

TINY_BERT = pathlib.Path(__file__).parents[1] / "models" / "tiny_bert"
WORDS = "harbor river mayor city film motors novel garden".split()
ALL = tuple(
    Passage(f"p{n}", "", f"{WORDS[n % 8]} {WORDS[n // 8 % 8]} of {WORDS[n % 5]}") for n in range(30)
)
FIRST, LAST, GONE = ALL[:20], ALL[20:], ("p3", "p4", "p19")
CHANGED = Corpus(tuple(p for p in FIRST if p.id not in GONE) + LAST)


class Fixed:
    dimension, asked = 8, ()

    def encode_passages(self, passages):
        Fixed.asked += tuple(passage.id for passage in passages)
        return self.encode_queries([passage.text for passage in passages])

    def encode_queries(self, queries):
        rows = [[text.split().count(word) for word in WORDS] for text in queries]
        return np.array(rows, np.float32) / 4

    def describe(self):
        return {"kind": "fixed"}

    def save(self, folder):
        pass


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 4)
    monkeypatch.setattr(embed, "BATCH", 3)
    for module in (index, updates):
        monkeypatch.setattr(module, "reload_encoder", lambda *_: Fixed())
    monkeypatch.setattr(Fixed, "asked", ())


@pytest.fixture
def files(tmp_path):
    """The files of the corpus, of the new passages and of the ids that are removed."""
    for name, passages in (("corpus", FIRST), ("new", LAST)):
        save_corpus(Corpus(passages), tmp_path / f"{name}.jsonl")
    # As an editor of Windows saves it.
    (tmp_path / "gone").write_text("\n".join(GONE), encoding="utf-8-sig")
    return tmp_path


VECTORS = [("exact", "float32"), ("exact", "int8"), ("scann", "float32")]


def build(kind, dtype, corpus, folder):
    if kind == "bm25":
        return build_bm25(corpus, BM25Index(language="none"), folder)
    return build_index(corpus, Fixed(), kind, folder, dtype=dtype)


def build_first(files, kind="exact", dtype="float32"):
    folder = files / "index"
    return build(
        kind, dtype, load_corpus(files / "corpus.jsonl", folder=folder / "passages"), folder
    )


@pytest.mark.parametrize(("kind", "dtype"), [*VECTORS, ("bm25", "")])
def test_an_updated_index_finds_what_a_new_one_finds(files, kind, dtype):
    if kind == "scann":
        pytest.importorskip("scann")
    before = build_first(files, kind, dtype)
    old_hits, Fixed.asked = before.search(WORDS, 30), ()
    report = update_index(files / "index", files / "new.jsonl", files / "gone")
    assert (report["count"], report["added"], report["removed"]) == (27, 10, 3)
    if kind != "bm25":
        assert sorted(Fixed.asked) == sorted(p.id for p in LAST), "only new passages are encoded"
    after = open_folder(files / "index")
    expected = build(kind, dtype, CHANGED, files / "fresh")
    assert after.fingerprint == expected.fingerprint == report["corpus"]
    assert after.search(WORDS, 30) == expected.search(WORDS, 30)
    assert before.search(WORDS, 30) == old_hits, "an open index remains readable"
    # Again, from a subfolder to the next one, back to the first corpus.
    save_corpus(Corpus([p for p in FIRST if p.id in GONE]), files / "back.jsonl")
    (files / "gone").write_text("\n".join(p.id for p in LAST))
    update_index(files / "index", files / "back.jsonl", files / "gone")
    (hits,) = open_folder(files / "index").search(["city"], 30)
    assert "p3" in {passage.id for passage in hits.passages}
    assert [path.name for path in (files / "index").iterdir() if path.is_dir()] == ["update-2"]


def test_a_killed_update_leaves_the_old_index_and_resumes(files, monkeypatch):
    build_first(files)
    expected = open_folder(files / "index").search(WORDS, 30)
    killed = Mock(side_effect=RuntimeError("power cut"))
    for module, name in ((Fixed, "encode_passages"), (updates, "write_json")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, killed)
            with pytest.raises(RuntimeError):
                update_index(files / "index", files / "new.jsonl")
        assert open_folder(files / "index").search(WORDS, 30) == expected
    monkeypatch.setattr(updates, "drop_versions", killed)
    with pytest.raises(RuntimeError):
        update_index(files / "index", files / "new.jsonl")
    assert len(open_folder(files / "index").corpus) == 30


def test_ids_that_cannot_be_changed_are_named(files):
    build_first(files)
    (files / "gone").write_text("p1\nabsent\n")
    with pytest.raises(UserError, match=r"no passage 'absent' \(1 of 2 ids are unknown\)"):
        update_index(files / "index", None, files / "gone")
    with pytest.raises(UserError, match="'p0' occurs 2 times"):
        update_index(files / "index", files / "corpus.jsonl")
    (files / "gone").write_text("\n".join(p.id for p in FIRST))
    with pytest.raises(UserError, match="every passage of .* is removed"):
        update_index(files / "index", None, files / "gone")
    assert len(open_folder(files / "index").corpus) == 20
    # A run takes the passages of the folder.
    (files / "gone").write_text("\n".join(GONE))
    update_index(files / "index", None, files / "gone")
    corpus = load_indexed(files / "index", files / "index")
    assert len(corpus) == 17 and corpus.fingerprint == open_folder(files / "index").fingerprint


LONG = "One two three. Four five six. Seven eight nine."


def write_long(path, *names):
    rows = ({"key": name, "body": LONG} for name in names)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "options", [("--kind", "bm25"), ("--encoder", "hashed", "--kind", "exact")]
)
def test_new_passages_are_read_and_divided_as_the_others(tmp_path, capsys, options):
    out, fields = ["--out", str(tmp_path / "index")], ["--chunk", "4,0", "--fields", "id=key"]
    corpus = write_long(tmp_path / "first", "a")
    assert main(["data", "index", *out, "--corpus", corpus, *fields, *options]) == 0
    # Twice, because an update must keep how the index was read.
    for name in ("b", "c"):
        assert main(["data", "index", *out, "--add", write_long(tmp_path / name, name)]) == 0
    passages = stored_corpus(tmp_path / "index").passages
    assert [(p.id[0], p.text) for p in passages] == [
        (name, part) for name in "abc" for part in LONG.replace(". ", ".\n").split("\n")
    ]
    for option in (["--chunk", "4"], ["--fields", "id=other"]):
        assert main(["data", "index", *out, "--add", write_long(tmp_path / "d", "d"), *option]) == 2
        assert f"{option[0]} is {option[1]}, but --add" in capsys.readouterr().err


def test_the_units_of_chunks_are_those_of_the_encoder_of_the_index(tmp_path):
    """The path of the encoder was relative to another folder when the index was built."""
    reading = {"chunk": {"size": 4, "overlap": 0, "units": "models/tiny_bert"}}
    encoder = {"kind": "bert", "source": str(TINY_BERT)}
    facts = {"corpus": "f", "kind": "exact", "count": 1, "dimension": 16, "encoder": encoder}
    (tmp_path / "index.json").write_text(json.dumps(facts))
    former = updates.former_reading(Corpus(FIRST, reading=reading), tmp_path)
    assert former.chunks == Chunks(4, 0) and former.units.name == str(TINY_BERT)


def test_chunks_of_an_unknown_size_get_no_further_ones(tmp_path):
    corpus = load_corpus(
        write_long(tmp_path / "first", "a"),
        folder=tmp_path / "index" / "passages",
        reading=Reading({"id": "key"}, Chunks(4, 0)),
    )
    build("exact", "float32", dataclasses.replace(corpus, reading=None), tmp_path / "index")
    with pytest.raises(UserError, match=r"does not say how they were divided.* with --chunk"):
        update_index(tmp_path / "index", tmp_path / "first")
    (tmp_path / "gone").write_text(corpus.passages[0].id)
    assert update_index(tmp_path / "index", None, tmp_path / "gone")["count"] == 2
    with pytest.raises(UserError, match="does not say how they were divided"):
        update_index(tmp_path / "index", tmp_path / "first")


def test_the_command_updates_words_whose_weights_depend_on_the_corpus(files, capsys):
    out = ["--out", str(files / "index")]
    corpus = ["--corpus", str(files / "corpus.jsonl")]
    assert main(["data", "index", *out, *corpus, "--encoder", "hashed", "--kind", "exact"]) == 0
    capsys.readouterr()
    assert main(["data", "index", *out, "--add", str(files / "new.jsonl")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["count"], report["added"], report["removed"]) == (30, 10, 0)
    for options, message in ((corpus, "--corpus is"), (["--kind", "bm25"], "--kind is bm25")):
        assert main(["data", "index", *out, "--add", str(files / "new.jsonl"), *options]) == 2
        assert message in capsys.readouterr().err
    assert main(["data", "index", *out]) == 2
    assert "give --corpus, or --add" in capsys.readouterr().err
