"""Rewards of plans, analyses and queries, and the gold that they are compared with."""

import dataclasses
import math

import pytest

from jax_ragrl.rollout.roles import invalid_action
from jax_ragrl.systems.opera.grammar import (
    Step,
    parse_analysis,
    parse_plan,
    parse_rewrite,
    render_analysis,
)
from jax_ragrl.systems.opera.rewards import (
    Gold,
    SubGoal,
    analysis_reward,
    ndcg,
    plan_efficiency,
    plan_logic,
    plan_placeholders,
    plan_potential,
    plan_reward,
    plan_reward_code,
    plan_struct,
    rewrite_reward,
    steps_gold,
)
from jax_ragrl.systems.opera.world import (
    RELATION_WORDS,
    as_query,
    comparison_answer,
    fill_answers,
    read_gold,
    subgoals,
)
from jax_ragrl.types import Passage, Question
from tests.llm.test_reader import gold, questions, world

EXAMPLE = "Where was the director of Jaws born?"
PLAN = parse_plan("1 Who directed Jaws?\n2 Where was [answer 1] born?")


@pytest.mark.parametrize(
    ("steps", "score"),
    [
        (PLAN.args, 1.0),
        ([Step("who made Jaws and Duel")], 0.8),
        ([Step("who made Jaws", (1,)), Step("born", (1, 5))], 0.7 * 0.7),
        ([Step("who made it")], 0.0),
    ],
)
def test_logic(steps, score):
    assert plan_logic(EXAMPLE, steps) == pytest.approx(score)


def test_logic_includes_the_share_of_names():
    question = "Which film is older, Dark River or Blue Lake?"
    assert plan_logic(question, [Step("year of Dark River")]) == pytest.approx(0.5)
    assert plan_logic("Who?", [Step("x")]) == plan_logic("", [Step("x")]) == 1.0


@pytest.mark.parametrize(
    "question",
    [
        "Name the seat of Acme Steel.",
        "Where is Acme Steel's seat?",
        "Where is the seat of the 'Acme Steel'?",
        "Is it Acme Steel's.",
    ],
)
def test_a_name_excludes_genitive_and_period(question):
    assert plan_logic(question, [Step("seat of Acme Steel")]) == 1.0
    assert plan_logic(question, [Step("seat of Acme")]) == 0.0


@pytest.mark.parametrize(
    ("steps", "score"),
    [
        (PLAN.args, 1.0),
        ([Step("a")], 0.7),
        ([Step("a")] * 5, 1.0),
        ([Step("a")] * 6, 0.8),
        ([Step("a", (), 2), Step("b", (), 1)], 0.8**3),
        ([Step("a [2]", (2,)), Step("b [1]", (1,))], 0.7),
        ([Step("a"), Step("b [1]")], 0.9),
        ([Step("a"), Step("b [2]", (2,))], 0.7),  # a step cannot need itself
        ([Step("a"), Step("b"), Step("c [1] [2]")], 0.9**2),
    ],
)
def test_structure(steps, score):
    assert plan_struct(steps) == pytest.approx(score)


def test_the_plan_rewards_of_paper_and_code():
    assert plan_reward(EXAMPLE, PLAN, 1.0) == pytest.approx(1.0)
    assert plan_reward(EXAMPLE, PLAN, 0.0) == pytest.approx(0.7)
    assert plan_reward(EXAMPLE, parse_plan("1 Who directed Jaws?"), 0.5) == pytest.approx(
        0.4 + 0.3 * 0.7 + 0.15
    )
    assert plan_reward(EXAMPLE, invalid_action("No Plan"), 1.0) == pytest.approx(0.3)
    assert plan_reward_code(EXAMPLE, PLAN, 1.0) == pytest.approx(1.0)
    plain = parse_plan("1 the director of Jaws\n2 birthplace of [1]")
    potential = 0.9 * 0.9  # no question word
    expected = 0.25 + 0.25 * potential + 0.3 * 0.5 + 0.1 + 0.1
    assert plan_reward_code(EXAMPLE, plain, 0.5) == pytest.approx(expected)
    assert plan_reward_code(EXAMPLE, invalid_action("No Plan"), 1.0) == pytest.approx(0.3)
    assert plan_struct([Step("a")], least=1) == 1.0


def test_the_terms_of_the_codes_plan_reward():
    assert plan_potential([Step("Who is"), Step("who is it", (1, 4))]) == pytest.approx(0.8 * 0.5)
    itself = [Step("Who is he", (1,)), Step("who is it", (1,))]
    assert plan_potential(itself) == pytest.approx(0.5)
    assert [plan_efficiency(n) for n in range(1, 8)] == [0.3, 1.0, 1.0, 0.8, 0.8, 0.5, 0.5]
    steps = [Step("a"), Step("b [1]"), Step("c [3]", (3,)), Step("d [1]", (1,))]
    assert plan_placeholders(steps) == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert plan_placeholders([Step("a")]) == 1.0


KNOWN_GOLD, NO_GOLD = Gold(("Ulm",), (True,), 1), Gold((), (False,), 1)
UNKNOWN = Gold(None, (True,), 1)
RIGHT, WRONG = (parse_analysis(render_analysis("a", x)) for x in ("Ulm", "Rom"))
NO_VERDICT = parse_analysis(render_analysis("a"))


@pytest.mark.parametrize(
    ("verdict", "gold", "reward"),
    [
        (RIGHT, KNOWN_GOLD, 1.0),
        (WRONG, KNOWN_GOLD, 0.25 + 0.1),
        (NO_VERDICT, KNOWN_GOLD, 0.1),
        (NO_VERDICT, NO_GOLD, 1.0),
        (RIGHT, NO_GOLD, 0.1),  # possibly right, but not in the passages
        (RIGHT, UNKNOWN, 0.1),
        (NO_VERDICT, UNKNOWN, 0.1),
        (invalid_action("No Status"), NO_GOLD, 0.9),
        (invalid_action("No Status"), KNOWN_GOLD, 0.0),
        (parse_analysis('{"status": "yes", "answer": "the Ulm"}'), KNOWN_GOLD, 0.9 + 0.07),
    ],
)
def test_a_verdict_earns_status_answer_and_form(verdict, gold, reward):
    assert analysis_reward(verdict, gold) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("relevant", "total", "gain"),
    [
        ((True, False, False), 1, 1.0),
        ((False, True, False), 1, 1 / math.log2(3)),
        ((False, False, True), 1, 1 / math.log2(4)),
        ((True, True, False), 2, 1.0),
        ((True, False, True), 2, (1 + 1 / 2) / (1 + 1 / math.log2(3))),
        ((True, True), 5, 1.0),  # at most k passages are returned
        ((False, False), 2, 0.0),
        ((), 2, 0.0),
        ((False,), 0, 0.0),
    ],
)
def test_ndcg(relevant, total, gain):
    assert ndcg(relevant, total) == pytest.approx(gain)


QUERY = parse_rewrite("expand: a b")


def test_a_query_earns_root_ndcg_and_form():
    second = Gold((), (False, True), 1)
    root = (1 / math.log2(3)) ** 0.5
    assert rewrite_reward(QUERY, second) == pytest.approx(0.9 * root + 0.1)
    assert rewrite_reward(QUERY, second, power=1.0) == pytest.approx(0.9 * root**2 + 0.1)
    assert rewrite_reward(parse_rewrite("a b"), second) == pytest.approx(0.9 * root + 0.025)
    assert rewrite_reward(QUERY, Gold((), (False,), 0)) == pytest.approx(0.45 + 0.1)


HOTPOT = Question("h", "q?", ("Ulm",), gold=("Ann Lee", "Jaws"))
JAWS, OTHER = Passage("j", "Jaws", "t"), Passage("x", "x", "t")


@pytest.mark.parametrize(
    ("texts", "gain"), [([JAWS], 1.0), ([OTHER], 0.0), ([JAWS, OTHER], 1 / (1 + 1 / math.log2(3)))]
)
def test_a_query_is_scored_without_a_gold_answer(texts, gain):
    gold = steps_gold(HOTPOT, SubGoal("g", 0, 2), texts)
    assert rewrite_reward(QUERY, gold) == pytest.approx(0.9 * gain**0.5 + 0.1)
    assert analysis_reward(RIGHT, gold) == analysis_reward(NO_VERDICT, gold) == 0.1


def test_passages_of_one_gold_article_count_once():
    first, *rest = (Passage(f"p{i}", "Ann Lee", "t") for i in range(4))

    def gain(*texts):
        gold = steps_gold(HOTPOT, SubGoal("g", 0, 1), texts)
        return ndcg(gold.relevant, gold.total)

    assert gain(first, *rest) == gain(first, OTHER, OTHER, OTHER) < 1.0
    assert gain(first, JAWS, *rest) == 1.0


BORN = Passage("p1", "Ann Lee", "Ann Lee was born in Ulm.")
WORKS = Passage("p2", "Ann Lee", "Ann Lee married Bob Ray and works for Acme Steel.")
JAWS_IN_ULM = Passage("p3", "Jaws", "Jaws was shown in Ulm.")
MUSIQUE = Question(
    "m",
    "q?",
    ("Ulm", "City of Ulm"),
    gold=("Ann Lee", "Jaws"),
    metadata={"question_decomposition": [{"answer": "Ann Lee"}, {"answer": "Ulm"}]},
)


def test_synthetic_gold_comes_from_the_passages():
    def gold(goal):
        return read_gold(goal, [WORKS, BORN])

    assert gold("birthplace of Ann Lee") == Gold(("Ulm",), (False, True), 1)
    assert gold("birthplace of Bob Ray") == Gold((), (False, False), 1)
    assert gold("Where was Ann Lee born?") == Gold(("Ulm",), (False, True), 1)
    assert gold("same: Ulm, Ulm") == Gold(("yes",), (False, False), 0)
    for other in ("what now", "", "uncle of Ann", "Who?", "birthplace", "[1]"):
        assert gold(other) == Gold((), (False, False), 0) and as_query(other) == other


def test_gold_comes_from_the_data_sets_decomposition():
    def gold(number, steps, *passages):
        return steps_gold(MUSIQUE, SubGoal("as put", number, steps), passages)

    assert gold(0, 2, WORKS) == Gold(("Ann Lee",), (True,), 2)
    assert gold(0, 2, Passage("p", "x", "Joann Leeds")) == Gold((), (False,), 2)
    assert gold(1, 2, WORKS, BORN) == Gold(("Ulm", "City of Ulm"), (True, False), 2)
    # A plan of another length has gold only at its last step.
    assert gold(2, 3, BORN) == Gold(("Ulm", "City of Ulm"), (True,), 2)
    assert gold(1, 3, WORKS, BORN) == gold(0, 3, WORKS, BORN) == Gold(None, (True, False), 2)


@pytest.mark.parametrize(
    ("support", "steps", "relevant", "total"),
    [
        ((3, 7), 2, (False, True), 1),
        ((3, 7), 3, (True, True), 2),  # another plan
        ((3, None), 2, (True, True), 2),  # no passage for a step
    ],
)
def test_each_step_of_a_musique_question_has_its_own_passage(support, steps, relevant, total):
    answers = ({"answer": "Ann Lee"}, {"answer": "Ulm"})
    decomposition = [
        {**step, "paragraph_support_idx": idx} for step, idx in zip(answers, support, strict=True)
    ]
    question = dataclasses.replace(MUSIQUE, metadata={"question_decomposition": decomposition})
    gold = steps_gold(question, SubGoal("as put", 1, steps), [BORN, JAWS_IN_ULM])
    assert (gold.relevant, gold.total) == (relevant, total)


TRIPLES = [
    ["Jaws", "director", "Ann Lee"],
    ["Duel", "director", "Bob Ray"],
    ["Ann Lee", "date of birth", "May 1, 1950"],
    ["Bob Ray", "date of birth", "1 June 1940"],
]
WIKI = Question("w", "q?", ("Duel",), gold=("Jaws", "Ann Lee"), metadata={"evidences": TRIPLES})
DIRECTED = Passage("p1", "Jaws", "Jaws was directed by Ann Lee.")


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("number", [0, 2])
def test_gold_of_triples_is_found_by_subject(steps, number):
    """The plan may have any order and may end with a comparison."""

    def answers(goal, *passages):
        return steps_gold(WIKI, SubGoal(goal, number, steps), passages).answers

    assert answers("Who made Jaws?", DIRECTED) == ("Ann Lee",)
    assert answers("Who made Jaws?", OTHER) == ()
    assert answers("Who made Jaws and Duel?", DIRECTED) is None
    assert answers("Who made it?", DIRECTED) is None


def test_gold_of_triples_needs_a_matching_plan_length_and_spelling():
    goal = "Who made Jaws?"
    assert steps_gold(WIKI, SubGoal(goal, 0, 3), [DIRECTED]).answers is None
    assert steps_gold(WIKI, SubGoal(goal, 0, 6), [DIRECTED]).answers is None
    last = steps_gold(WIKI, SubGoal(goal, 4, 5), [DIRECTED, Passage("p", "x", "Duel")])
    assert last.answers == ("Duel",)
    goal = SubGoal("When was Ann Lee's birth?", 1, 5)
    supporting = Passage("p", "Ann Lee", "She was born on 1 May 1950.")
    assert steps_gold(WIKI, goal, [supporting]).answers is None
    assert steps_gold(WIKI, goal, [OTHER]).answers == ()


def test_gold_without_decomposition_is_the_questions_answer_unless_it_is_yes_or_no():
    bare = Question("b", "q?", ("Ulm",))
    assert steps_gold(bare, SubGoal("g", 0, 1), [BORN]) == Gold(("Ulm",), (False,), 0)
    assert steps_gold(bare, SubGoal("g", 0, 2), [BORN]) == Gold(None, (False,), 0)
    question = Question("c", "Are A and B Dutch?", ("yes",))
    gold = steps_gold(question, SubGoal(question.text, 0, 1), [BORN])
    assert gold == Gold(None, (False,), 0)


@pytest.mark.parametrize(
    ("visible", "number", "steps", "rewards"),
    [  # of the right answer, and of a refusal
        ("AB", 0, 1, (1.0, 0.1)),
        ("A", 0, 1, (0.1, 1.0)),
        ("AA", 0, 1, (0.1, 1.0)),
        ("AB", 2, 3, (1.0, 0.1)),
        ("A", 2, 3, (0.1, 0.1)),  # earlier answers may decide it
    ],
)
@pytest.mark.parametrize("answer", ["yes", "No"])
def test_yes_and_no_depend_on_gold_passages(answer, visible, number, steps, rewards):
    question = Question("c", "Are A and B Dutch?", (answer,), gold=("A", "B"))
    texts = [Passage(str(i), title, f"{title} is Dutch.") for i, title in enumerate(visible)]
    gold = steps_gold(question, SubGoal(question.text, number, steps), texts)
    right = parse_analysis(render_analysis("a", answer))
    expected_scores = analysis_reward(right, gold), analysis_reward(NO_VERDICT, gold)
    assert expected_scores == pytest.approx(rewards)


def test_sub_goal_answers_lead_to_the_final_answer():
    for question in questions(400):
        answers: list[str] = []
        for goal in subgoals(question.text):
            truth = read_gold(fill_answers(goal, answers), gold(question))
            assert truth.answers
            answers += truth.answers
        assert answers[-1] in question.answers
        assert len(answers) == question.hops + (question.kind == "comparison")


def test_a_complete_question_is_a_sub_goal_whose_total_counts_facts():
    for question in questions(100):
        truth = read_gold(question.text, gold(question))
        assert truth.answers[0] in question.answers
        assert all(truth.relevant) and truth.total == question.hops
        less = read_gold(question.text, gold(question)[:-1])
        assert not less.answers and less.total == question.hops
    question = next(q for q in questions(400) if q.kind == "chain" and q.hops > 1)
    for passages in ([], gold(question) * 2):
        truth = read_gold(question.text, passages)
        assert truth.total == question.hops
        assert truth.relevant == (True,) * len(passages)
    _, second = gold(question)[:2]
    blank = read_gold(subgoals(question.text)[0], [second])
    assert (blank.answers, blank.relevant) == ((), (False,))


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
    chain = next(q for q in questions(400) if q.hops == 2)
    assert as_query(chain.text) == chain.text
