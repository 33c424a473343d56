from __future__ import annotations

import functools

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.systems.opera.subgoals import WORDS, compared, filled, reworded, subgoals, truth
from jax_ragrl.types import Question


@functools.cache
def world() -> World:
    return generate(0, 120)


def questions() -> list[Question]:
    return [q for split in world().questions.values() for q in split][:400]


def gold(question: Question):
    by_id = {passage.id: passage for passage in world().passages}
    return [by_id[p] for p in question.gold]


def test_answers_of_sub_goals_from_gold_passages_lead_to_the_answer():
    for question in questions():
        answers: list[str] = []
        for goal in subgoals(question.text):
            found = truth(filled(goal, answers), gold(question))
            assert found is not None and found.answer
            answers.append(found.answer)
        assert answers[-1] in question.answers
        assert len(answers) == question.hops + (question.kind == "comparison")


def test_a_whole_question_is_a_sub_goal_too():
    for question in questions()[:100]:
        found = truth(question.text, gold(question))
        assert found is not None and found.answer in question.answers
        assert all(found.relevant) and found.total == question.hops
        less = truth(question.text, gold(question)[:-1])
        assert less is not None and not less.answer and less.total == question.hops


def test_the_total_of_a_sub_goal_is_its_facts_however_few_or_often_they_are_told():
    question = next(q for q in questions() if q.kind == "chain" and q.hops > 1)
    for passages in ([], gold(question) * 2):
        found = truth(question.text, passages)
        assert found is not None and found.total == question.hops
        assert found.relevant == (True,) * len(passages)


def test_other_passages_tell_nothing_of_a_sub_goal():
    question = next(q for q in questions() if q.kind == "chain" and q.hops == 2)
    first, second = gold(question)
    found = truth(subgoals(question.text)[0], [second, first])
    assert found is not None and found.relevant == (False, True) and found.total == 1
    blank = truth(subgoals(question.text)[0], [second])
    assert blank is not None and (blank.answer, blank.relevant) == ("", (False,))


@pytest.mark.parametrize("goal", ["", "uncle of Ann", "Who?", "birthplace", "[1]"])
def test_nothing_is_true_of_other_texts(goal):
    assert truth(goal, world().passages[:3]) is None and reworded(goal) == goal


@pytest.mark.parametrize(
    ("goal", "answer"),
    [
        ("older: Dark River 1950, Blue Lake 1949", "Blue Lake"),
        ("older: Dark River 1950, Blue Lake 1951", "Dark River"),
        ("older: Dark River 1950, Blue Lake 1950", "Dark River"),
        (f"older: A {'9' * 5000}, B 1", "B"),
        ("same: Ulm, Ulm", "yes"),
        ("same: Ulm, Rom", "no"),
        ("older: Dark River , Blue Lake 1951", ""),
        ("older: Dark River 1950, Blue Lake 1949 or so", ""),
        ("birthplace of Ann", ""),
    ],
)
def test_a_comparison_with_both_values_answers_itself(goal, answer):
    assert compared(goal) == answer


def test_passages_hold_the_words_of_their_relations():
    text = {passage.id: passage.text.lower() for passage in world().passages}
    assert set(WORDS) == {relation for _, relation in world().source}
    for (_, relation), passage in world().source.items():
        assert any(word in text[passage] for word in WORDS[relation].split())


def test_the_words_of_a_relation_are_none_that_any_sentence_has():
    assert {"birthplace", "mayor"} <= set(WORDS)
    assert not {w for words in WORDS.values() for w in words.split()} & {"a", "by", "in", "the"}


def test_a_single_fact_is_reworded_and_nothing_else():
    assert reworded("birthplace of Ann Lee") == f"Ann Lee {WORDS['birthplace']}"
    assert "born" in WORDS["birthplace"]
    chain = next(q for q in questions() if q.hops == 2)
    assert reworded(chain.text) == chain.text
