"""Files of one's own are read by the names in common use, or by names that are given."""

import csv
import io

import pytest

from jax_ragrl.corpus import formats
from jax_ragrl.corpus.fields import parse_fields
from jax_ragrl.corpus.formats.files import Record
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.remote import to_passage
from jax_ragrl.types import Passage
from tests.corpus.records import write

SHAPES = ("json", "jsonl", "csv", "tsv", "parquet")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("answer", ["Rome", ["Rome", "Roma"]])
@pytest.mark.parametrize(
    ("question_name", "answer_name"),
    [("question", "answer"), ("query", "answers"), ("question", "golden_answers"),
     ("input", "output"), ("Question", "Answer")],
)  # fmt: skip
def test_questions_are_read_by_the_names_in_use(
    tmp_path, shape, answer, question_name, answer_name
):
    rows = [{question_name: f"q{n}?", answer_name: answer} for n in range(2)]
    first, second = formats.load_questions(write(tmp_path / "x", rows, shape))
    assert first.text == "q0?" and first.answers == (
        tuple(answer) if answer != "Rome" else (answer,)
    )
    assert first.id != second.id


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("text_name", "more"),
    [
        *((name, {}) for name in ("text", "contents", "content", "body", "passage")),
        *(("contents", more) for more in ({"title": "T"}, {"id": 7}, {"id": 7, "title": "T"})),
    ],
)
def test_passages_are_read_by_the_names_in_use(tmp_path, shape, text_name, more):
    (passage,) = formats.load_passages(write(tmp_path / "x", [{**more, text_name: "a b"}], shape))
    key = str(more.get("id", "p0"))
    assert passage == Passage(key, str(more.get("title", "")), "a b")


@pytest.mark.parametrize("key", [{}, {"id": "p0"}])
@pytest.mark.parametrize(
    ("title", "contents", "expected"),
    [
        ("T", "First line.\nSecond.", ("T", "First line.\nSecond.")),
        ("T", '"T"\nx', ("T", "x")),
        ('"T"', '"T"\nx', ('"T"', "x")),
        (None, "T\nx", ("T", "x")),
    ],
)
def test_a_title_is_not_lost_to_the_first_line_of_the_contents(
    tmp_path, key, title, contents, expected
):
    row = {**key, "title": title, "contents": contents}
    assert to_passage(Record("x", {**row, "id": "p0"})) == ("p0", *expected)
    (passage,) = formats.load_passages(write(tmp_path / "x", [row], "jsonl"))
    assert passage == ("p0", *expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_given_names_replace_the_usual_ones(tmp_path, shape):
    rows = [{"Q": "q?", "A": "a", "question": "no", "key": "k", "docs": ["p1"], "answer": "no"}]
    names = parse_fields("question=Q, answer=A,id=key,gold=docs")
    (question,) = formats.load_questions(write(tmp_path / "x", rows, shape), fields=names)
    assert (question.id, question.text, question.answers) == ("k", "q?", ("a",))
    assert question.gold == ("p1",) and "question" in question.metadata
    path = write(tmp_path / "y", [{"words": "w", "text": "no", "head": "T"}], shape)
    (passage,) = formats.iter_passages(path, fields={"text": "words", "title": "head"})
    assert passage == Passage("p0", "T", "w")


def test_names_of_questions_leave_a_published_corpus_as_it_is(tmp_path):
    path = write(tmp_path / "x", [{"id": "0", "contents": '"T"\nx'}], "jsonl")
    (passage,) = formats.iter_passages(path, fields={"question": "Q", "answer": "A"})
    assert passage == Passage("0", "T", "x")


@pytest.mark.parametrize(
    ("content", "row", "name"),
    [
        ("questions", {"question": "q?", "answer": "a", "Key": "k"}, "id"),
        ("questions", {"question": "q?", "answer": "a", "id": "k", "gold": ["p1"]}, "gold"),
        ("passages", {"text": "w", "docno": "k"}, "id"),
        ("passages", {"text": "w", "title": "T"}, "title"),
    ],
)
def test_a_given_name_that_the_first_record_lacks_is_reported(tmp_path, content, row, name):
    path = write(tmp_path / "x", [row], "jsonl")
    load = formats.load_questions if content == "questions" else formats.iter_passages
    with pytest.warns(UserWarning, match=f"of {content} without {name}=typo: .* no such field"):
        list(load(path, fields={name: "typo", "text": "text"}))
    list(load(path, fields={name: [*row][-1].lower()}))  # does not warn


@pytest.mark.parametrize(
    ("cell", "answers"),
    [
        ('["Clontarf", "Dublin"]', ("Clontarf", "Dublin")),
        ("['Clontarf', 'Dublin']", ("Clontarf", "Dublin")),
        (""" ['it is', "it's"] """, ("it is", "it's")),
        ("['1897', 1897, 3.5]", ("1897", "1897", "3.5")),
        ("[]", ()),
        ("('Clontarf', 'Dublin')", ("Clontarf", "Dublin")),
        ("[sic] Clontarf", ("[sic] Clontarf",)),
        ("[Clontarf, Dublin]", ("[Clontarf, Dublin]",)),
        ("(Clontarf)", ("(Clontarf)",)),
        ("['Clontarf', open('x')]", ("['Clontarf', open('x')]",)),
        ("['Clontarf'], 'Dublin'", ("['Clontarf'], 'Dublin'",)),
        ("['Clontarf\\'", ("['Clontarf\\'",)),
    ],
)
def test_a_cell_holds_a_list_as_json_or_as_pandas_writes_it(tmp_path, cell, answers):
    path = write(tmp_path / "x", [{"question": "q?", "answer": cell}], "csv")
    (question,) = formats.load_questions(path)
    assert question.answers == answers


@pytest.mark.parametrize(("delimiter", "name"), [(",", "x.csv"), ("\t", "x.tsv")])
def test_a_row_with_more_cells_than_columns_is_refused(tmp_path, delimiter, name):
    """A comma without quotation marks shifts the cells after it."""
    rows = ["question,answer", "who?,Ann,", '"where, when?",Rome', "why, then?,because"]
    lines = [next(csv.reader([row])) for row in rows]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(lines)
    path = tmp_path / name
    path.write_text(text.getvalue())
    with pytest.raises(UserError, match=f"{name}, line 4: more cells than the 2 columns"):
        formats.load_questions(path)
    path.write_text("".join(text.getvalue().splitlines(keepends=True)[:3]))
    assert [q.answers for q in formats.load_questions(path)] == [("Ann",), ("Rome",)]


def test_a_quotation_mark_that_is_not_closed_is_refused(tmp_path):
    """Otherwise all rows up to the next mark would be one cell."""
    path = tmp_path / "x.tsv"
    path.write_text('question\tanswer\n"Open quote?\tAnn\nwho?\tsaid "hello"\n')
    with pytest.raises(UserError, match=r"x\.tsv: malformed table"):
        formats.load_questions(path)
    path.write_text('question\tanswer\nwho?\tsaid "hello"\n"a ""b""?"\tx\n')
    assert [q.text for q in formats.load_questions(path)] == ["who?", 'a "b"?']


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_a_table_that_begins_with_a_blank_line_is_refused(tmp_path, name):
    (tmp_path / name).write_text("\nquestion,answer\nq?,a\n")
    with pytest.raises(UserError, match=rf"{name}: line 1 is blank.*remove it"):
        formats.load_questions(tmp_path / name)


@pytest.mark.parametrize("files", [1, 2])
def test_each_record_is_read_by_the_names_that_it_has(tmp_path, files):
    """What the first one lacks is not lost, within a file and in the next shard."""
    passages = [{"text": "a"}, {"title": "T", "id": "p9", "text": "b"}]
    questions = [
        {"question": "q?", "answer": "x"},
        {"query": "r?", "answers": ["y"], "gold": ["p"]},
    ]

    def paths(rows):
        parts = [rows] if files == 1 else [[row] for row in rows]
        return ",".join(
            str(write(tmp_path / f"{n}.jsonl", part, "jsonl")) for n, part in enumerate(parts)
        )

    assert formats.load_passages(paths(passages)) == [
        Passage("p0", "", "a"),
        Passage("p9", "T", "b"),
    ]
    found = formats.load_questions(paths(questions))
    assert [(q.text, q.answers, q.gold) for q in found] == [
        ("q?", ("x",), ()),
        ("r?", ("y",), ("p",)),
    ]


def test_a_field_without_content_gives_way_to_one_of_another_name(tmp_path):
    rows = [{"text": "", "content": "real"}, {"text": "own", "content": "other"}]
    found = formats.load_passages(write(tmp_path / "p", rows, "jsonl"))
    assert [passage.text for passage in found] == ["real", "own"]
    rows = [{"question": "q?", "answer": None, "answers": ["x"], "gold": [], "gold_ids": ["p1"]}]
    (question,) = formats.load_questions(write(tmp_path / "q", rows, "jsonl"))
    assert (question.answers, question.gold) == (("x",), ("p1",))


def test_two_fields_with_different_answers_are_refused_until_one_is_named(tmp_path):
    path = write(
        tmp_path / "x", [{"question": "q?", "answer": "y", "answers": ["y", "z"]}], "jsonl"
    )
    with pytest.raises(UserError, match=r"x, line 1: .*'answer' has .* y, and 'answers' has y, z"):
        formats.load_questions(path)
    (question,) = formats.load_questions(path, {"answer": "answers"})
    assert question.answers == ("y", "z")
    path = write(tmp_path / "x", [{"question": "q?", "answer": "y", "answers": ["y"]}], "jsonl")
    assert formats.load_questions(path)[0].answers == ("y",)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q?", "golden_answers": ["x"]},
        {"question": "q?", "golden_answers": ["x"], "metadata": None},
        {"question": "q?", "possible_answers": '["x"]', "id": 1},
        {"query": "q?", "answer": "x", "evidence_list": []},
    ],
)
def test_a_published_format_with_gold_of_ones_own(tmp_path, row):
    (question,) = formats.load_questions(write(tmp_path / "x", [row | {"gold": ["p1"]}], "jsonl"))
    assert question.gold == ("p1",) and question.answers == ("x",)
    formats.save_questions([question], tmp_path / "saved.jsonl")
    assert formats.load_questions(tmp_path / "saved.jsonl")[0].gold == ("p1",)


def test_a_merged_file_of_search_r1_has_one_id_per_question(tmp_path):
    """Its published training file repeats `train_0` of Natural Questions and of HotpotQA."""
    more = {"golden_answers": ["x"], "prompt": [], "reward_model": {}}
    rows = [
        {"id": "train_0", "question": f"{s}?", "data_source": s, **more} for s in ("nq", "hpqa")
    ]
    found = formats.load_questions(write(tmp_path / "x", rows, "jsonl"))
    assert [question.id for question in found] == ["nq/train_0", "hpqa/train_0"]


@pytest.mark.parametrize("name", ["id", "qid", "question_id"])
@pytest.mark.parametrize(
    "row",
    [
        {"question": "q?", "golden_answers": ["x"]},
        {"question": "q?", "answers": ["x"], "ctxs": []},
        {"query": "q?", "answer": "x", "evidence_list": []},
        {"question": "q?", "prompt": [], "reward_model": {"ground_truth": "x"}},
    ],
)
def test_a_published_format_without_ids_may_have_them(tmp_path, row, name):
    path = write(tmp_path / "x", [{"_id": None, name: "a7", **row}], "jsonl")
    assert formats.load_questions(path)[0].id == "a7"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["answer", "golden_answers"])
def test_aliases_of_an_answer_are_answers(tmp_path, shape, name):
    """MuSiQue without its paragraphs: a reply with an alias would score 0."""
    row = {"question": "q?", name: ["Rome"], "answer_aliases": ["Roma", "Rome"]}
    (question,) = formats.load_questions(write(tmp_path / "x", [row], shape))
    assert question.answers == ("Rome", "Roma")


Q, P, ROW = "questions", "passages", {"question": "q?", "answer": "a"}


@pytest.mark.parametrize(
    ("rows", "content", "fields", "why"),
    [
        ([{"question": "q?", "reply": "a"}], Q, {}, "--fields answer=NAME"),
        ([{"ask": "q?", "reply": "a"}], Q, {}, "fields ask, reply: .*question=NAME,answer=NAME"),
        ([{"words": "w", "head": "h"}], P, {}, "--fields text=NAME"),
        ([ROW], Q, {"question": "qestion"}, r"1: .*'qestion' .*\(fields: question, answer\)"),
        ([ROW, {"question": "r?"}], Q, {}, r"x, line 2: field 'answer' .*--fields answer=NAME"),
        ([{"text": "a"}, {"title": "b"}], P, {}, "line 2: field 'text' is missing"),
        ([{"text": "a"}], Q, {}, r"holds passages \(own_passages\), not .*--fields question=NAME"),
        ([{"turn": "q?"}], Q, {"text": "body"}, "no known format of questions"),
        ([{"text": "a"}], P, {"txt": "a"}, "fields has txt=a"),
    ],
)
def test_an_error_names_the_file_the_record_its_fields_and_the_remedy(
    tmp_path, rows, content, fields, why
):
    path = write(tmp_path / "x", rows, "jsonl")
    load = formats.load_questions if content == Q else formats.iter_passages
    with pytest.raises(UserError, match=why) as error:
        list(load(path, fields=fields))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["question", "question=", "asked=Q", "=Q"])
def test_names_of_unknown_fields_are_refused(text):
    with pytest.raises(UserError, match="give FIELD=NAME, for the fields question, answer"):
        parse_fields(text)
