"""Laws of the packaged data: names resolve, splits are disjoint, and gold is in the corpus."""

import pytest

from jax_ragrl.corpus.builtin import data_file
from jax_ragrl.corpus.formats import load_passages, load_questions
from jax_ragrl.corpus.mixture import load_mixture
from jax_ragrl.errors import UserError


def test_every_name_is_a_file_and_every_gold_passage_is_in_the_corpus():
    ids = {passage.id for passage in load_passages(data_file("nq:corpus"))}
    sizes = {}
    for split in ("train", "dev", "test"):
        questions = load_questions(data_file(f"nq:{split}"))
        sizes[split] = len(questions)
        assert all(q.answers and q.gold and set(q.gold) <= ids for q in questions)
    assert sizes == {"train": 1112, "dev": 100, "test": 400}
    assert len(ids) == 7359


def test_no_question_is_in_two_splits():
    texts = [
        {" ".join(q.text.lower().split()) for q in load_questions(data_file(f"nq:{split}"))}
        for split in ("train", "dev", "test")
    ]
    assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])


def test_a_name_is_accepted_where_a_question_file_is():
    assert [q.id for q in load_mixture("nq:dev")][:2] == ["dev0", "dev1"]


def test_an_unknown_name_names_those_that_exist():
    with pytest.raises(UserError, match="nq:test"):
        data_file("nq:validation")


def test_any_other_text_is_a_path():
    assert data_file("folder/nq.jsonl").name == "nq.jsonl"
