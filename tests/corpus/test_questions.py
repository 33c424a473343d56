"""Laws of the question pipeline."""

import collections
import json
import math

import pytest

from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.mixture import load_answered, load_mixture
from jax_ragrl.corpus.questions import QuestionStream, sample_in_order, split_questions
from jax_ragrl.errors import UserError
from jax_ragrl.types import Question

ANSWERS = (["a", "b"], [], None)

QUESTIONS = [Question(str(n), f"q{n}?", ()) for n in range(10)]


def ids(questions):
    return [question.id for question in questions]


@pytest.mark.parametrize("count", [1, 3, 5, 10, 25])
def test_every_question_is_seen_once_an_epoch(count):
    stream = QuestionStream(QUESTIONS, seed=0)
    seen = ids(question for _ in range(100 // count) for question in stream.draw(count))
    epochs = [seen[start : start + 10] for start in range(0, len(seen) - 9, 10)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    with pytest.raises(UserError, match="needs at least one"):
        QuestionStream([], seed=0)


@pytest.mark.slow
def test_a_question_without_a_signal_is_asked_less_often_but_asked():
    """Its weight halves with each time, down to an eighth, and rises with a signal."""
    stream = QuestionStream(QUESTIONS, seed=0)
    asked = collections.Counter()
    first = stream.draw(10)
    assert {*ids(first)} == {q.id for q in QUESTIONS}, "all are asked before an outcome counts"
    for _ in range(4):
        stream.note({q.id: float(q.id in ("0", "1")) for q in QUESTIONS})
    assert stream.get_state()["weights"] == {
        q.id: 1.0 if q.id in "01" else 1 / 8 for q in QUESTIONS
    }
    for _ in range(900):
        asked.update(ids(stream.draw(1)))
    # Per epoch 1 of each of the two, and 1/8 of each of the eight.
    for question in QUESTIONS:
        assert asked[question.id] == pytest.approx(
            900 * (1 / 3, 1 / 24)[question.id > "1"], rel=0.4
        )
    stream.note({"5": 1.0})
    assert stream.get_state()["weights"]["5"] == 9 / 16


def test_draws_are_a_function_of_seed_position_and_outcomes_also_when_they_are_resumed():
    def drawn(seed, outcomes, done=10):
        stream = QuestionStream(QUESTIONS, seed)
        stream.draw(done)
        stream.note(outcomes)
        state = json.loads(json.dumps(stream.get_state()))
        resumed = QuestionStream(QUESTIONS, seed)
        resumed.set_state(state)
        parts = [q for count in (3, 1, 16) for q in resumed.draw(count)]
        assert ids(parts) == ids(stream.draw(20)) and resumed.get_state() == stream.get_state()
        return ids(parts)

    dead = dict.fromkeys("0123456", 0.0)
    assert drawn(0, dead) == drawn(0, dead)
    for done in (0, 4, 8, 28):
        drawn(3, {}, done)
    assert len({(*drawn(seed, outcomes),) for seed in (0, 1) for outcomes in (dead, {})}) == 4


def test_a_question_without_an_answer_is_refused(tmp_path):
    rows = [{"id": f"q{i}", "question": "?", "golden_answers": a} for i, a in enumerate(ANSWERS)]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    assert [question.id for question in load_answered(file)] == ["q0"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="2 of 3 questions have no answer.* 'q1' .record 2."):
        load_answered(file)


@pytest.mark.parametrize("ids", [("1", "1"), (1, "1"), (None, "nq0")], ids=str)
def test_different_questions_of_one_id_are_refused(ids, tmp_path):
    """Weights, run files and results are kept by id; a copy of a question has the same ones."""
    rows = [{"id": i, "question": t, "answer": ["a"]} for i, t in zip(ids, "bc", strict=True)]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for load in (load_questions, load_answered, lambda path: load_mixture(str(path))):
        with pytest.raises(UserError, match=f"q.jsonl: .*the id {ids[1]!r}, 'b' and 'c': make the"):
            load(file)
    file.write_text("".join(json.dumps(rows[1]) + "\n" for _ in range(2)))
    assert [question.text for question in load_mixture(str(file))] == ["c", "c"]


def sets_of(folder, **counts):
    """Files whose questions have the same numbers."""
    for name, count in counts.items():
        (folder / name).mkdir()
        rows = [
            {"id": f"train_{i}", "question": "?", "golden_answers": ["a"]} for i in range(count)
        ]
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ", ".join(str(folder / name / "train.jsonl") for name in counts)


def test_several_sets_are_interleaved_and_prefix_their_ids(tmp_path):
    mixed = [q.id for q in load_mixture(sets_of(tmp_path, nq=3, hotpotqa=1))]
    assert mixed == ["nq/train_0", "hotpotqa/train_0", "nq/train_1", "nq/train_2"]
    assert [q.id for q in load_mixture(str(tmp_path / "hotpotqa/train.jsonl"))] == ["train_0"]


def test_a_large_set_is_sampled_and_a_small_one_kept(tmp_path):
    paths = sets_of(tmp_path, nq=50, hotpotqa=2)
    ids = [q.id for q in load_mixture(paths, each=5)]
    drawn = [i for i in ids if i.startswith("nq/")]
    assert len(ids) == 7 and len(set(drawn)) == 5 and drawn != [f"nq/train_{i}" for i in range(5)]
    assert ids == [q.id for q in load_mixture(paths, each=5)]


def test_a_mixture_has_a_number_of_questions_per_file(tmp_path):
    paths = sets_of(tmp_path, nq=9, hotpotqa=9, musique=4)
    mixture = [q.id for q in load_mixture(paths, each=1, counts=(2, 5, 0))]
    sizes = {name: sum(i.startswith(name) for i in mixture) for name in ("nq", "hotpotqa", "mus")}
    assert sizes == {"nq": 2, "hotpotqa": 5, "mus": 4}
    for counts, said in (((2, 5), "names 3 files"), ((2, 10, 0), "asks for 10 .*which has 9")):
        with pytest.raises(UserError, match=said):
            load_mixture(paths, counts=counts)


def test_a_limit_draws_one_sample_in_order():
    drawn, again = ([q.id for q in sample_in_order(QUESTIONS, 4)] for _ in range(2))
    assert drawn == again == sorted(drawn)
    assert drawn != ["0", "1", "2", "3"] and len(set(drawn)) == 4
    for count in (0, 10, 99):
        assert sample_in_order(QUESTIONS, count) == QUESTIONS


def test_a_split_depends_on_ids_alone_and_divides_all_questions():
    questions = [Question(f"id{n}", f"{n}?", ("a",)) for n in range(50)]
    parts = split_questions(questions, (0.7, 0.1, 0.2))
    assert {split: len(part) for split, part in parts.items()} == {
        "train": 35,
        "dev": 5,
        "test": 10,
    }
    assert sorted(sum(parts.values(), []), key=questions.index) == questions
    again = split_questions(questions[::-1], (0.7, 0.1, 0.2))
    assert {split: part[::-1] for split, part in again.items()} == parts
    assert parts["test"] != questions[40:], "the order of the file does not decide"
    copies = [Question(f"id{n}", f"{n % 5}?", ("a",)) for n in range(50)]
    halves = split_questions(copies, (0.6, 0, 0.4)).values()
    train, dev, test = ({q.text for q in part} for part in halves)
    assert not dev and not train & test, "copies stay together"


@pytest.mark.parametrize(
    "shares", [(math.nan, 0, 1), (0.5, 0.5), (0.7, 0.2, 0.2), (1.1, -0.1, 0), (0.9, 0.05, 0.05)]
)
def test_shares_that_cannot_be_are_refused(shares):
    with pytest.raises(UserError, match="0.7,0.1,0.2|leave none for test"):
        split_questions(QUESTIONS, shares)
