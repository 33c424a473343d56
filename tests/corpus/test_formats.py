"""Every format is detected by content, read, and says where a bad file is bad."""

import json
import shutil

import pytest

from jax_ragrl.corpus import formats
from jax_ragrl.corpus.formats import files, flashrag, qrels
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question
from tests.corpus.records import HOTPOT, MUSIQUE, VERL

ORACLE = {
    "question": "who?",
    "answers": ["Ann"],
    "ctxs": [{"title": "Film", "text": "By Ann.", "isgold": True}, {"title": "Tea", "text": "x"}],
}
MULTIHOP = {
    "query": "q?",
    "answer": "Yes",
    "question_type": "comparison_query",
    "evidence_list": [{"title": "A", "fact": "a"}, {"title": "B", "fact": "b"}],
}
TRIVIA = {
    "Data": [{"QuestionId": "t", "Question": "q?", "Answer": {"Value": "v", "Aliases": ["w"]}}]
}

# Forms that are not among the records of the Hub (test_containers.py): name, content, and either
# fields of the question or the first passage.
FILES = [
    ("hotpotqa", [HOTPOT], {"id": "h1", "gold": ("Ann", "Bob"), "hops": 2, "kind": "comparison"}),
    ("nq_open", {"question": "q?", "answer": ["a"]}, {"id": "nq0", "answers": ("a",), "gold": ()}),
    ("nq_oracle", ORACLE, {"answers": ("Ann",), "gold": ("Film",)}),
    ("multihop_rag", [MULTIHOP], {"gold": ("A", "B"), "answers": ("Yes",), "hops": 2}),
    ("triviaqa", TRIVIA, {"id": "t", "answers": ("v", "w")}),
    ("flashrag_questions", {"id": 1, "question": "q?", "golden_answers": [1]}, {"answers": ("1",)}),
    ("popqa", 'id\tquestion\tpossible_answers\n5\tq?\t"[""a"", ""b""]"\n', {"answers": ("a", "b")}),
    ("freshqa", "id,question,answer_0,answer_1\n4,q?,three,\n", {"id": "4", "answers": ("three",)}),
    ("title_sentences", {"T": ["x.", " y."]}, Passage("T", "T", "x. y.")),
    ("flashrag_passages", {"id": "0", "contents": '"T "U""\nx'}, Passage("0", 'T "U"', "x")),
    ("own_passages", {"_id": "d", "title": "", "text": "x"}, Passage("d", "", "x")),
    ("own_passages", 'id\ttext\ttitle\n1\t"a ""b"""\tT\n', Passage("1", "T", 'a "b"')),
    ("hotpotqa", [HOTPOT], Passage("Ann", "Ann", "Ann was born. In 1970.")),
    ("musique", MUSIQUE, Passage("Film", "Film", "By Ann.")),
]


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "content", "expected"), FILES)
def test_files_are_known_by_content_not_by_name(tmp_path, name, content, expected):
    path = write(tmp_path / "data.bin", content)
    if isinstance(expected, Passage):
        assert formats.detect(path, "passages") == name
        assert formats.load_passages(path)[0] == expected
        return
    assert formats.detect(path, "questions") == name
    (question,) = formats.load_questions(path)
    assert {field: getattr(question, field) for field in expected} == expected


Q = {"question": "q?"}
NO_ANSWER = {name: value for name, value in HOTPOT.items() if name != "answer"}


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([Q | {"golden_answers": ["a"]}, Q], "line 3: field 'golden_answers' is missing"),
        ([Q | {"answer": ["a"]}, {"answer": ["a"]}], "line 3: field 'question' is missing"),
        ([MUSIQUE, MUSIQUE | {"paragraphs": [{"title": "x"}]}], "line 3.*'paragraph_text' is miss"),
        ([[HOTPOT, NO_ANSWER]], "record 2: field 'answer' is missing"),
        ([{"id": "1", "question": "q?"}], "line 1: field 'answer or .*--fields answer=NAME"),
        ([{"question": ["q?"], "golden_answers": "a"}], "line 1: field 'question' holds list, exp"),
    ],
)
def test_a_field_that_is_missing_or_of_another_type_is_named_with_its_place(tmp_path, records, why):
    path = write(tmp_path / "q.jsonl", "\n\n".join(map(json.dumps, records)))
    with pytest.raises(UserError, match=rf"q\.jsonl, {why}"):
        formats.load_questions(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("[]", "is empty"),
        ({"left": 1, "right": 2}, "fields left, right"),
        ("just some words", "no known format"),
        ("0\tA passage.\n1\tB.\n", "tsv with the fields 0, A passage.*: .* first row .* names"),
        ([1, 2], "no known format"),
        ({"id": "0", "contents": "x"}, r"holds passages \(flashrag_passages\), not questions"),
    ],
)
def test_files_without_questions_are_refused(tmp_path, content, why):
    with pytest.raises(UserError, match=why):
        formats.load_questions(write(tmp_path / "x", content))


@pytest.mark.parametrize("content", ["[{0}, {1}]", "{0}\n{1}\n", "[\n {0},\n {1}\n]"])
def test_a_first_record_may_exceed_the_head(tmp_path, monkeypatch, content):
    monkeypatch.setattr(files, "HEAD_BYTES", 40)
    records = [{"id": str(n), "title": "T", "text": "\u00e9" * 99} for n in range(2)]
    for indent in (None, 1) if content[0] == "[" else (None,):
        dumped = [json.dumps(r, indent=indent, ensure_ascii=False) for r in records]
        path = write(tmp_path / "long", content.format(*dumped))
        result = list(formats.iter_passages(path))
        assert [p.id for p in result] == ["0", "1"] and len(result[0].text) == 99


@pytest.mark.parametrize(
    ("extra", "answers"),
    [
        ("48 / 2 = 24 #### 72", ("72",)),
        (["72", "seventy-two"], ("72", "seventy-two")),
        ([], ("72",)),
    ],
)
def test_a_written_solution_is_not_the_answer(tmp_path, extra, answers):
    row = VERL | {"reward_model": {"ground_truth": "72"}, "extra_info": {"answer": extra}}
    write(tmp_path / "x.jsonl", row)
    (question,) = formats.load_questions(tmp_path / "x.jsonl")
    assert question.answers == answers


def test_a_beir_folder_has_queries_and_gold_ids(tmp_path):
    write(tmp_path / "corpus.jsonl", {"_id": "d1", "title": "T", "text": "x"})
    queries = [{"_id": "q1", "text": "one?"}, {"_id": "q2", "text": "two?"}]
    write(tmp_path / "queries.jsonl", "\n".join(map(json.dumps, queries)))
    (tmp_path / "qrels").mkdir()
    write(tmp_path / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td1\t0\n")
    questions = formats.load_questions(tmp_path)
    assert [(q.id, q.gold) for q in questions] == [("q1", ("d1",)), ("q2", ())]
    dev = write(tmp_path / "dev", "q2 0 d1 1\n")  # of another split
    assert [(q.id, q.gold) for q in qrels.questions_with_gold(questions, dev)] == [("q2", ("d1",))]
    assert formats.load_passages(tmp_path) == [Passage("d1", "T", "x")]
    shutil.rmtree(tmp_path / "qrels")
    assert len(formats.load_questions(tmp_path)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "query-id7 0 d1 0\nq1 0 d1 1\nq1\t0\td2\t2\nq1 0 d1 1\n\nq2 0 d1 0\nq3 Q0 d3 -1\n",
        "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t2\nq2\td1\t0\n",
    ],
)
def test_positive_judgments_replace_the_gold_of_a_question(tmp_path, text):
    path = write(tmp_path / "qrels", text)
    questions = [Question(f"q{n}", "?", ("a",), gold=("other",)) for n in (1, 2, 4)]
    assert qrels.questions_with_gold(questions, path) == [
        Question("q1", "?", ("a",), gold=("d1", "d2"))
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("q1 0 d1 1\nq1 Q0 d1 3 0.5 tag\n", "line 2: 6 columns, not the four"),
        ("q1 0 d1 yes\n", "line 1: score 'yes' is not an integer"),
        ("q1 0 d1 --1\n", "line 1: score '--1' is not an integer"),
        ("q1 0 d1 \u00b2\n", "line 1: score '\u00b2' is not an integer"),
        (f"q1 0 d1 {'9' * 5000}\n", "line 1: score '999.* is not an integer"),
        ("query-id\tcorpus-id\nq1\td1\n", "line 2: field 'score' is missing"),
        ("q1 0 d1 0\n", "judges no passage relevant"),
        ("q9 0 d1 1\n", "'q9', but no question .* first is 'q1'"),
        ("\n", "is empty"),
    ],
)
def test_judgements_that_are_none_are_refused_with_their_place(tmp_path, text, why):
    path = write(tmp_path / "qrels", text)
    with pytest.raises(UserError, match=f"{path}.*{why}"):
        qrels.questions_with_gold([Question("q1", "?", ())], path)


QUESTIONS = [
    Question("1", "q?", ("a", "b"), ("T", "U"), ("s #1",), 2, "bridge", {"level": "hard"}),
    Question("2", "ö\u2028\U0001f600?", ()),
    Question("3", "q?", (" x",), metadata={"type": "not the kind", "gold_titles": ["not gold"]}),
]


def test_saved_questions_read_back_equal_and_metadata_of_the_same_name_are_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    formats.save_questions(QUESTIONS, path)
    assert formats.load_questions(path) == QUESTIONS
    first = path.read_bytes()
    formats.save_questions(QUESTIONS, path)
    assert path.read_bytes() == first
    with pytest.raises(UserError, match="rename"):
        formats.save_questions([Question("1", "q?", (), metadata={"kind": "x"})], path)


@pytest.mark.parametrize(
    ("metadata", "gold", "hops"),
    [
        ({"gold": ["a"]}, ("a",), 0),
        ({"gold_titles": ["a", "a"]}, ("a",), 0),
        ({"supporting_facts": {"title": ["a", "b", "a"], "sent_id": [0, 1, 2]}}, ("a", "b"), 2),
        ({"supporting_facts": {"title": ["a", "b"]}, "hops": 3}, ("a", "b"), 3),
        ({"supporting_facts": "none"}, (), 0),
        ({}, (), 0),
    ],
)
def test_gold_is_found_under_every_name_and_hops_default_to_articles(metadata, gold, hops):
    record = files.Record("x", {"question": "q?", "golden_answers": ["a"], "metadata": metadata})
    question = flashrag.read_question(record, 0)
    assert (question.gold, question.hops) == (gold, hops)


def test_two_wiki_has_a_hop_per_triple(shared_data):
    file = shared_data / "2wikimultihopqa/2wikimultihopqa_official_sample.json"
    questions = formats.load_questions(file)
    assert [q.hops for q in questions] == [len(q.metadata["evidences"]) for q in questions]
    assert {q.hops for q in questions} == {2, 4}


COUNTS = [
    ("hotpotqa/hotpotqa.json.gz", "questions", "hotpotqa", 289),
    ("hotpotqa/hotpotqa_train_corpus.json", "passages", "title_sentences", 994),
    ("2wikimultihopqa/2wikimultihopqa_official_sample.json", "questions", "hotpotqa", 7),
    ("musique/musique_ans_sample.jsonl.gz", "questions", "musique", 115),
    ("multihop_rag/MultiHopRAG.json.gz", "questions", "multihop_rag", 1578),
    ("multihop_rag/corpus_evidence.json.gz", "passages", "own_passages", 609),
    ("nq/NQ-open.dev.sample500.jsonl", "questions", "nq_open", 500),
    ("nq/nq-open-oracle.sample500.jsonl.gz", "questions", "nq_oracle", 500),
    ("nq/nq_corpus.jsonl.gz", "passages", "flashrag_passages", 7359),
    ("popqa/popQA.tsv", "questions", "popqa", 35),
    ("triviaqa/test.jsonl", "questions", "flashrag_questions", 500),
    ("ambigqa/test.jsonl", "questions", "verl", 300),
    ("freshqa/freshqa.csv", "questions", "freshqa", 357),
    ("format_samples/ambignq_sample.json", "questions", "ambignq", 10),
    ("format_samples/triviaqa/qa/wikipedia-dev.json", "questions", "triviaqa", 1),
]


@pytest.mark.parametrize(("name", "what", "expected", "count"), COUNTS)
def test_real_files_are_detected_and_counted(shared_data, name, what, expected, count):
    path = shared_data / name
    assert formats.detect(path, what) == expected
    load = formats.load_questions if what == "questions" else formats.load_passages
    loaded = load(path)
    assert len(loaded) == count == len({item.id for item in loaded})


@pytest.mark.parametrize(
    ("questions", "corpus"),
    [
        ("hotpotqa/hotpotqa.json.gz", "hotpotqa/hotpotqa_corpus.json.gz"),
        ("musique/musique_ans_sample.jsonl.gz", "musique/musique_corpus.json.gz"),
        ("multihop_rag/MultiHopRAG.json.gz", "multihop_rag/corpus_evidence.json.gz"),
        ("nq/nq-open-oracle.sample500.jsonl.gz", "nq/nq_corpus.jsonl.gz"),
        (
            "2wikimultihopqa/2wikimultihopqa_dev_qa.jsonl",
            "2wikimultihopqa/2wikimultihopqa_corpus.json.gz",
        ),
    ],
)
def test_real_gold_titles_are_in_their_corpus(shared_data, questions, corpus):
    titles = {passage.title for passage in formats.load_passages(shared_data / corpus)}
    for question in formats.load_questions(shared_data / questions):
        assert set(question.gold) <= titles


@pytest.mark.parametrize("value", [[{"title": "T", "text": "x"}], ["x", None], [["x"]], "x"])
def test_an_object_without_lists_of_sentences_is_no_corpus(tmp_path, value):
    """Each record of such an object would become a sentence: the text of a Python object."""
    path = write(tmp_path / "x.json", json.dumps({"T": ["x."], "documents": value}, indent=1))
    with pytest.raises(UserError, match="x.json: 'documents' is not a list of sentences: .* alone"):
        formats.load_passages(path)
    for indent in (None, 1):  # each column would be a passage
        path.write_text(json.dumps({"id": ["1", "2"], "text": ["x", "y"]}, indent=indent))
        with pytest.raises(UserError, match=r"x.json holds columns \(id, text\), .*: write each"):
            formats.load_passages(path)
    path.write_text(json.dumps({"question": "q?", "answer": "a"}, indent=2))
    with pytest.raises(UserError, match="not questions: .* each record on a line of its own"):
        formats.load_questions(path)


def test_the_gold_of_musique_is_in_the_order_of_the_hops(tmp_path):
    paragraphs = [
        {"idx": n, "title": title, "paragraph_text": title, "is_supporting": title != "Tea"}
        for n, title in enumerate(["Rome", "Tea", "Extra", "Film"])
    ]
    steps = [
        {"question": "Film >> director", "paragraph_support_idx": 3},
        {"question": "#1 >> birthplace", "paragraph_support_idx": 0},
    ]
    record = {**MUSIQUE, "paragraphs": paragraphs, "question_decomposition": steps}
    (tmp_path / "q.jsonl").write_text(json.dumps(record) + "\n")
    (question,) = formats.load_questions(tmp_path / "q.jsonl")
    assert question.gold == ("Film", "Rome", "Extra"), "paragraphs of no step come last"
