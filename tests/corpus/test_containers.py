"""What is in a file does not depend on its container, and what is no text is no answer."""

import bz2
import datetime
import decimal
import gzip
import io
import json
import lzma
import os
import tracemalloc
import zipfile

import pyarrow
import pyarrow.parquet
import pytest

from jax_ragrl.corpus import formats
from jax_ragrl.corpus.formats import files
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage
from tests.corpus.records import CONTAINERS, MUSIQUE, VERL, write

# --- published sets, as the Hub stores them -------------------------------------------------------

HOTPOT = {
    "id": "5a",
    "question": "Which river crosses the town where Y was born?",
    "answer": "Danube",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": {"title": ["Y", "Ulm"], "sent_id": [0, 1]},
    "context": {
        "title": ["Y", "Ulm"],
        "sentences": [["Y was born in Ulm."], ["Ulm is a town.", " It lies on the Danube."]],
    },
}
TWO_WIKI = {
    "_id": "5a",
    "type": "compositional",
    "question": "Which river?",
    "context": json.dumps([["Y", ["Born in Ulm."]], ["Ulm", ["On the Danube."]]]),
    "supporting_facts": json.dumps([["Y", 0], ["Ulm", 0]]),
    "evidences": json.dumps([["Y", "born in", "Ulm"]]),
    "answer": "Danube",
}
FLASHRAG = {
    "id": "train_0",
    "question": "Which river?",
    "golden_answers": ["Danube"],
    "metadata": {"supporting_facts": {"title": ["Y", "Ulm"], "sent_id": [0, 1]}, "type": "bridge"},
}
TRIVIA = {
    "question": "Which river?",
    "question_id": "tc_1",
    "answer": {"aliases": ["Danube", "Donau"], "normalized_aliases": ["danube"], "value": "Danube"},
}
SQUAD = {
    "id": "5",
    "title": "Ulm",
    "context": "Ulm lies on the Danube.",
    "question": "Which river?",
    "answers": {"text": ["Danube", "the Danube", "Danube"], "answer_start": [16, 12, 16]},
}
BOOLQ = {"question": "is ulm on the danube", "answer": True, "passage": "It is."}
POPQA = {
    "id": 7,
    "question": "Which river?",
    "possible_answers": '["Danube", "Donau"]',
    "prop": "r",
}
AMBIG = {
    "id": "7",
    "question": "q?",
    "annotations": {
        "type": ["singleAnswer", "multipleQAs"],
        "answer": [["a"], []],
        "qaPairs": [
            {"question": [], "answer": []},
            {"question": ["q1?", "q2?"], "answer": [["b"], ["c", "d"]]},
        ],
    },
}
HUB = [
    ("hotpotqa", HOTPOT, {"gold": ("Y", "Ulm"), "hops": 2, "kind": "bridge"}),
    ("hotpotqa", TWO_WIKI, {"gold": ("Y", "Ulm"), "hops": 2, "answers": ("Danube",)}),
    (
        "musique",
        MUSIQUE,
        {"answers": ("Rome", "Roma"), "gold": ("Film",), "hops": 2, "kind": "2hop"},
    ),
    ("flashrag_questions", FLASHRAG, {"gold": ("Y", "Ulm"), "hops": 2, "kind": "bridge"}),
    ("nq_open", TRIVIA, {"id": "tc_1", "answers": ("Danube", "Donau")}),
    ("own_questions", SQUAD, {"answers": ("Danube", "the Danube")}),
    ("nq_open", BOOLQ, {"answers": ("yes",)}),
    ("popqa", POPQA, {"id": "7", "answers": ("Danube", "Donau"), "kind": "r"}),
    ("ambignq", AMBIG, {"answers": ("a", "b", "c", "d"), "kind": "singleAnswer+multipleQAs"}),
    ("verl", VERL, {"id": "x/3", "answers": ("a", "b"), "text": "Answer: q?"}),
]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("name", "record", "expected"), HUB)
def test_a_published_set_keeps_gold_hops_and_aliases_in_every_container(
    tmp_path, name, record, expected, container
):
    if record is BOOLQ and container in ("parquet of texts", "csv", "tsv"):
        pytest.skip("`true` is a text there")
    path = write(tmp_path / "x", [record, record], container)
    assert formats.detect(path, "questions") == name
    question, _ = load_answered(path)
    assert {field: getattr(question, field) for field in expected} == expected
    if record in (HOTPOT, TWO_WIKI, MUSIQUE):
        titles = [passage.title for passage in formats.load_passages(path)]
        assert titles == (["Film", "Tea"] if record is MUSIQUE else ["Y", "Ulm"])
        assert set(question.gold) <= {*titles}
    if record is TWO_WIKI:
        assert question.metadata["evidences"] == [["Y", "born in", "Ulm"]]


# --- what is no text ------------------------------------------------------------------------------

NO_TEXT = [
    b"Danube", 2.5, float("nan"), float("inf"), 1e300, [["a", "b"], ["c"]], [[1, 0]], {"a": "b"},
    [None], [""], ["a", " "], [b"a"], [{"text": "a"}], datetime.date(1997, 1, 1),
    decimal.Decimal("1.5"), '{"a": "b"}', '[["a"], ["b"]]', "['a' 'b']", "['a'\n 'b']",
    "array(['a', 'b'], dtype=object)", "[np.str_('a'), np.str_('b')]", "{'text': ['a', None]}",
]  # fmt: skip


@pytest.mark.parametrize("value", NO_TEXT, ids=repr)
@pytest.mark.parametrize("container", ["parquet", "jsonl", "csv"])
def test_a_value_that_is_no_text_is_no_answer(tmp_path, value, container):
    row = {"id": "1", "question": "q?", "answer": value}
    if container != "parquet" and not isinstance(value, str):
        try:
            row["answer"] = value if container == "jsonl" else json.dumps(value)
            json.dumps(row)
        except TypeError:
            pytest.skip("JSON has no such value")
    if container == "csv" and isinstance(value, float):
        pytest.skip("a text in a table")
    path = write(tmp_path / "x", [{**row, "answer": row["answer"]}], container)
    with pytest.raises(UserError, match=r"x, (record|line) \d.*'(answer|text)'.*: \w+"):
        load_answered(path)


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        (1997, ("1997",)),
        (1997.0, ("1997",)),
        ([1997.0, "a"], ("1997", "a")),
        (True, ("yes",)),
        (False, ("no",)),
        ("[0, 1]", ("[0, 1]",)),
        ("(0, 1)", ("(0, 1)",)),
        ("{1, 2}", ("{1, 2}",)),
        ({"value": "a", "aliases": ["b", "a"]}, ("a", "b")),
        ('{"text": ["a", "b"], "answer_start": [1, 2]}', ("a", "b")),
    ],
)
def test_a_number_a_boolean_and_an_interval_are_answers(tmp_path, value, answers):
    path = write(tmp_path / "x", [{"question": "q?", "answer": value}], "json")
    assert load_answered(path)[0].answers == answers


@pytest.mark.parametrize("cell", ["[0, 1]", "(0, 1)", "[1897 1898]", "[5]", "[999" + "9" * 5000])
def test_a_cell_that_may_be_a_list_of_numbers_or_a_text_is_refused(tmp_path, cell):
    cell = cell if cell[-1] in ")]" else f"{cell}]"
    path = write(tmp_path / "x", [{"question": "q?", "answer": cell}], "csv")
    with pytest.raises(UserError, match="x, line 2: field 'answer' holds .*quotation marks"):
        load_answered(path)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": " ", "answer": "a"}, "line 2: the question in 'question' is empty"),
        ({"question": True, "answer": "a"}, "line 2: field 'question' holds bool"),
        ({"question": "q?", "answer": "a", "answerable": False}, "line 2: .*'answerable' is false"),
        ({"question": "q?", "answer": "a", "id": [1]}, "line 2: field 'id' holds list"),
        ({"question": "q?", "answer": "a", "gold": [["p1", 0]]}, "line 2: field 'gold' holds list"),
        ({"question": "q?", "answer": "a", "gold": [""]}, "line 2: field 'gold' has an empty"),
    ],
)
def test_a_bad_question_is_named_with_its_row(tmp_path, row, why):
    first = {**row, "question": "ok?", "id": "1", "gold": ["p1"], "answerable": True}
    path = write(tmp_path / "x", [first, {"id": "2", "gold": [], **row}], "jsonl")
    with pytest.raises(UserError, match=f"x, {why}"):
        formats.load_questions(path)


def test_a_null_id_is_the_position(tmp_path):
    rows = [{"id": None, "question": f"{n}?", "answer": "a"} for n in range(2)]
    assert [q.id for q in formats.load_questions(write(tmp_path / "x", rows, "jsonl"))] == [
        "nq0",
        "nq1",
    ]
    rows = [{"id": None, "title": None, "text": str(n)} for n in range(2)]
    assert formats.load_passages(write(tmp_path / "y", rows, "jsonl"))[1] == Passage("p1", "", "1")


@pytest.mark.parametrize("value", [b"Ulm", ["T"], 1.5, {"a": 1}, float("nan")], ids=repr)
@pytest.mark.parametrize("name", ["id", "title", "text"])
def test_a_value_that_is_no_text_is_no_passage(tmp_path, name, value):
    if name == "text" and value == ["T"]:
        pytest.skip("a list of sentences is a text")
    path = write(tmp_path / "x", [{"id": 1.0, "title": 7, "text": "a"} | {name: value}], "parquet")
    with pytest.raises(UserError, match=f"x, record 1: field '{name}' holds"):
        formats.load_passages(path)
    path = write(tmp_path / "y", [{"id": 1.0, "title": 7, "text": "a"}], "parquet")
    assert formats.load_passages(path) == [Passage("1", "7", "a")]


# --- containers -----------------------------------------------------------------------------------

LINES = "".join(json.dumps({"id": f"p{n}", "title": "é", "text": f"x{n}"}) + "\n" for n in range(3))


def zipped(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file.getvalue()


PACKED = {
    "gzip": gzip.compress(LINES.encode()),
    "bzip2": bz2.compress(LINES.encode()),
    "xz": lzma.compress(LINES.encode()),
    "zip": zipped(a=LINES),
    "utf-16": LINES.encode("utf-16"),
    "utf-16 big": b"\xfe\xff" + LINES.encode("utf-16-be"),
    "gzip with a mark": gzip.compress(b"\xef\xbb\xbf" + LINES.encode()),
    "gzip of utf-16": gzip.compress(LINES.encode("utf-16")),
    "list": json.dumps([json.loads(x) for x in LINES.splitlines()]).encode("utf-16"),
    "semicolons": "id;title;text\np0;é;x0\np1;é;x1\np2;é;x2\n".encode("utf-16"),
}


@pytest.mark.parametrize("content", PACKED.values(), ids=PACKED)
def test_compressions_and_utf_16_are_read(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    passages = formats.load_passages(tmp_path / "x")
    assert passages == [Passage(f"p{n}", "é", f"x{n}") for n in range(3)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (zipped(a="x", b="y"), "zip archive of 2 files"),
        (zipped(a=LINES)[:40], "unreadable zip archive"),
        (gzip.compress(LINES.encode())[:40], "damaged gzip file"),
        (gzip.compress(LINES.encode())[:10] + b"\xff" * 9, "damaged gzip file"),
        (bz2.compress(LINES.encode())[:40], "damaged bzip2 file"),
        (lzma.compress(LINES.encode())[:40], "damaged xz file"),
        (b"\x28\xb5\x2f\xfd" + bytes(9), "is a zstd file"),
        (b"\xff\xff\xff\xff\x88\x02" + bytes(9), "is an Arrow file"),  # of `datasets`
        (b"question,answer\n" + b"q,a\n" * 99_999 + b"\xe9", "line 100001, byte 1: not UTF-8"),
        ("question,answer\nq?,a\n".encode("utf-16-le"), "zero bytes"),
        (gzip.compress(b"a.jsonl" + bytes(99)), r"an archive \(unpack it\)"),  # of tar
        (b"question,answer,answer\nq?,a,b\n", "two columns are named 'answer'"),
    ],
    # The bytes of an archive have its time.
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_another_container_is_named(tmp_path, content, why):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=f"x.*{why}.*: "):
        formats.load_questions(tmp_path / "x")


def test_a_column_twice_in_parquet_and_a_damaged_file_are_refused(tmp_path):
    table = pyarrow.table([["q?"], ["a"], ["b"]], names=["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "x")
    with pytest.raises(UserError, match="two columns are named 'answer'"):
        formats.load_questions(tmp_path / "x")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-200])
    with pytest.raises(UserError, match="damaged parquet"):
        formats.load_questions(tmp_path / "x")


BOMBS = {
    "a.txt": b"word " * (1 << 21),
    "a.md": b"x y\n" * (1 << 21),
    "a.json": b"[" + b'{"question": "q?", "answer": "a"},' * (1 << 18) + b"{}]",
    "b.json": b'{"a": ["' + b"x" * (8 << 20) + b'"]}',
    "a.jsonl": (b'{"question": "q?", "answer": "a", "x": "' + b"x" * 4000 + b'"}\n') * (1 << 11),
    "a.csv": b"question,answer\n" + b"q" * (8 << 20),
}


@pytest.mark.parametrize(
    ("name", "compress"), [*((name, gzip.compress) for name in BOMBS), ("b.json", bz2.compress)]
)
def test_a_file_that_unzips_to_far_more_than_its_size_is_refused(
    tmp_path, monkeypatch, name, compress
):
    monkeypatch.setattr(files, "MIN_UNZIPPED", 1 << 19)
    monkeypatch.setattr(files, "HEAD_BYTES", 1 << 16)
    path = tmp_path / name
    path.write_bytes(compress(BOMBS[name]))
    limit = max(1 << 19, files.MAX_RATIO * path.stat().st_size)
    assert limit < len(BOMBS[name]) / 5
    load = formats.load_passages if name in ("a.txt", "a.md") else formats.load_questions
    tracemalloc.start()
    with pytest.raises(UserError, match=f"{name}: this .* holds more than .*unzip it first"):
        load(path)
    assert tracemalloc.get_traced_memory()[1] < 16 * limit
    tracemalloc.stop()


# --- damage and extremes, with the row ------------------------------------------------------------

DIGITS = "9" * 5000
DEEP = "[" * 5000


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("x.json", '[\n {"question": "q?", "answer": ["a"]},\n {"question": }\n]', "line 3: malf"),
        ("x.json", '[\n {"question": \n', "line 3: malformed JSON"),
        ("x.json", '{\n "Data": [\n', "line 3: malformed JSON"),
        ("x.json", '{"id": 1, "question"\n{"id": 2}\n', "line 1: malformed JSON"),
        ("x.json", '{"question": "q?", "answer": ["a"]}\n{"id": 2,\n', "line 2: malformed JSON"),
        ("x.json", f'[{{"question": "q?", "answer": {DIGITS}}}]', "record 1: malformed JSON"),
        ("x.json", f'[{{"question": "q?"}},\n {{"answer": {DIGITS}}}]', "record 2: malformed JSON"),
        ("x.json", f'[{{"question": "q?"}}, {{"answer": {DEEP}}}]', "record 2: malformed JSON"),
        ("x.jsonl", f'{{"question": "q?", "answer": {DIGITS}}}', "line 1: malformed JSON"),
        ("x.csv", f"question,answer\nq?,{DEEP}\n", "line 2: field 'answer' .*nested"),
        ("x.csv", f"question,answer\nq?,[{DIGITS}]\n", "line 2: field 'answer'"),
        ("x.csv", f'question,answer\nq?,"[""a"", {DIGITS}]"\n', "line 2: field 'answer' .*digits"),
        ("x.csv", f"id,question,golden_answers,metadata\n1,q?,a,{DEEP}\n", "line 2: .*'metadata'"),
    ],
)
def test_malformed_json_deep_lists_and_long_numbers_are_refused_with_their_row(
    tmp_path, name, text, why
):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}, {why}.*: "):
        formats.load_questions(tmp_path / name)


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([0, 2**31 - 1], pyarrow.int32()).cast(pyarrow.date32()),
        pyarrow.array([0, 2**62], pyarrow.int64()).cast(pyarrow.timestamp("us")),
        pyarrow.array([0, 1], pyarrow.int64()).cast(pyarrow.timestamp("ns")),
        pyarrow.array([0, 2**62], pyarrow.int64()).cast(pyarrow.duration("s")),
        pyarrow.array([b"a", b"\xff\xfe"]).view(pyarrow.string()),
    ],
    ids=lambda column: str(column.type),
)
def test_a_value_of_parquet_that_python_cannot_hold_is_named_or_read(tmp_path, column):
    table = pyarrow.table({"question": ["q?", "r?"], "answer": ["a", "b"], "x": column})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", store_schema=True)
    try:
        questions = formats.load_questions(tmp_path / "x.parquet")
    except UserError as error:
        assert "x.parquet, record 2: field 'x' holds a" in str(error)
    else:
        assert str(column.type) == "timestamp[ns]" and len(questions) == 2


# --- several files --------------------------------------------------------------------------------


def shards(folder, container="jsonl", names=("a", "b"), **more):
    folder.mkdir(exist_ok=True)
    for n, name in enumerate(names):
        rows = [
            {"text": f"{name}{i}", **{k: f"{v}{n}{i}" for k, v in more.items()}} for i in (0, 1)
        ]
        write(folder / f"{name}.{container}", rows, container)
    return folder


@pytest.mark.parametrize("container", ["jsonl", "parquet", "csv", "json"])
def test_a_folder_a_pattern_and_a_list_are_one_corpus(tmp_path, container):
    folder = shards(tmp_path / "s", container)
    (folder / "README.md").write_text("# About\n\nthe set.\n")
    texts = ["a0", "a1", "b0", "b1"]
    listed = f"{folder}/a.{container}, {folder}/b.{container}"
    for path in (folder, f"{folder}/*.{container}", listed):
        passages = formats.load_passages(path)
        assert [(p.id, p.text) for p in passages] == [(f"p{n}", t) for n, t in enumerate(texts)]
    backwards = f"{folder}/b.{container},{folder}/a.{container}"
    assert formats.load_passages(backwards)[0].text == "b0"


def test_shards_with_contexts_share_their_passages(tmp_path):
    (tmp_path / "s").mkdir()
    for name in "ab":
        write(tmp_path / "s" / f"train-{name}.parquet", [HOTPOT | {"id": name}], "parquet")
    path = f"{tmp_path}/s/train-*.parquet"
    assert [p.id for p in formats.load_passages(path)] == ["Y", "Ulm"]
    assert [q.id for q in formats.load_questions(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "path", "why"),
    [
        ("c.jsonl", "{}", "c.jsonl does not exist"),  # a link to nothing
        ("notes.md", "{}", "notes.md does not exist"),
        ("c.jsonl.zst", "{}", "c.jsonl.zst is a zstd file"),
        ("c.csv", "{}", "data files of several kinds, such as b.jsonl and c.csv"),
        ("c.ndjson", "{}", "several kinds, such as b.jsonl and c.ndjson"),
        ("c.csv", "{}/*.none", "no file matches"),
        ("c.csv", "{}/a.jsonl,{}/none.jsonl", r"none\.jsonl does not exist"),
    ],
)
def test_a_shard_that_is_not_read_is_named(tmp_path, name, path, why):
    folder = shards(tmp_path / "s")
    if path == "{}" and "exist" in why:
        (folder / name).symlink_to("gone")
    else:
        (folder / name).write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(UserError, match=why):
        formats.load_passages(path.format(folder, folder))


def test_a_pipe_is_named(tmp_path):
    os.mkfifo(tmp_path / "p")
    with pytest.raises(UserError, match="p is a pipe, which can be read only once: give the path"):
        formats.load_passages(tmp_path / "p")


def test_a_changed_shard_is_read_again(tmp_path):
    folder, cache = shards(tmp_path / "s", id="i"), tmp_path / "cache"
    for path in (folder, f"{folder}/*.jsonl", f"{folder}/a.jsonl,{folder}/b.jsonl"):
        first = load_corpus(path, folder=cache)
        assert len(first) == 4
        stamp = (cache / "corpus.json").stat().st_mtime_ns
        assert load_corpus(path, folder=cache).fingerprint == first.fingerprint
        assert (cache / "corpus.json").stat().st_mtime_ns == stamp
    with (folder / "b.jsonl").open("a") as file:
        file.write('\n{"id": "new", "text": "new"}\n')
    assert len(load_corpus(f"{folder}/*.jsonl", folder=cache)) == 5
