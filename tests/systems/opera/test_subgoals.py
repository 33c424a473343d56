import functools

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.systems.opera.rewards import Gold
from jax_ragrl.systems.opera.world import (
    RELATION_WORDS,
    as_query,
    comparison_answer,
    fill_answers,
    read_gold,
    subgoals,
)
from jax_ragrl.types import Question


@functools.cache
def world() -> World:
    return generate(0, 120)


def questions() -> list[Question]:
    return [q for split in world().questions.values() for q in split][:400]


def gold(question: Question):
    by_id = {passage.id: passage for passage in world().passages}
    return [by_id[p] for p in question.gold]


def test_sub_goal_answers_lead_to_the_final_answer():
    for question in questions():
        answers: list[str] = []
        for goal in subgoals(question.text):
            truth = read_gold(fill_answers(goal, answers), gold(question))
            assert truth.answers
            answers += truth.answers
        assert answers[-1] in question.answers
        assert len(answers) == question.hops + (question.kind == "comparison")


def test_a_complete_question_is_a_valid_sub_goal():
    for question in questions()[:100]:
        truth = read_gold(question.text, gold(question))
        assert truth.answers[0] in question.answers
        assert all(truth.relevant) and truth.total == question.hops
        less = read_gold(question.text, gold(question)[:-1])
        assert not less.answers and less.total == question.hops


def test_the_total_counts_facts_independent_of_passages():
    question = next(q for q in questions() if q.kind == "chain" and q.hops > 1)
    for passages in ([], gold(question) * 2):
        truth = read_gold(question.text, passages)
        assert truth.total == question.hops
        assert truth.relevant == (True,) * len(passages)
    _, second = gold(question)[:2]
    blank = read_gold(subgoals(question.text)[0], [second])
    assert (blank.answers, blank.relevant) == ((), (False,))


@pytest.mark.parametrize("goal", ["", "uncle of Ann", "Who?", "birthplace", "[1]"])
def test_other_texts_have_no_truth(goal):
    assert (
        read_gold(goal, world().passages[:3]) == Gold((), (False,) * 3, 0)
        and as_query(goal) == goal
    )


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
    assert comparison_answer(goal) == answer


def test_only_single_facts_are_reworded_with_words_of_their_passages():
    text = {passage.id: passage.text.lower() for passage in world().passages}
    assert set(RELATION_WORDS) == {relation for _, relation in world().source}
    for (_, relation), passage in world().source.items():
        assert any(word in text[passage] for word in RELATION_WORDS[relation].split())
    assert as_query("birthplace of Ann Lee") == f"Ann Lee {RELATION_WORDS['birthplace']}"
    assert "born" in RELATION_WORDS["birthplace"]
    chain = next(q for q in questions() if q.hops == 2)
    assert as_query(chain.text) == chain.text
