import dataclasses

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_centred
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.tree import Action, Record, build_forest
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems import opera
from jax_ragrl.systems.ablation import with_credit
from jax_ragrl.systems.opera import Opera, Settings
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE
from jax_ragrl.systems.opera.rewards import SubGoal
from jax_ragrl.types import Question
from tests.rollout.tape import FULL, Tape, leaves_of, passage, talk

SYSTEM = Opera("opera_tiny", top_k=1)
QUESTION = Question("q", "What is the seat of the employer of Ann Lee?", ("Ulm",))
CHAIN = "1 employer of Ann Lee\n2 seat of [1]"
ACME, ULM, NOT = "a\nyes: Acme", "b\nyes: Ulm", "nothing\nno"


def play(texts, system=SYSTEM, **tape):
    return talk(system, texts, QUESTION, **tape)


def queries_of(tape) -> list[str]:
    return [event[1] for event in tape.log if event[0] == "search"]


def test_steps_run_in_order_with_earlier_answers():
    forest, tape = play({PLAN: [CHAIN], ANALYSIS: [ACME, ULM]})
    assert tape.log == [
        *[("plan",), ("search", "employer of Ann Lee", 1), ("analysis",)],
        *[("search", "seat of Acme", 1), ("analysis",)],
    ]
    assert tape.prompts == [
        f"steps\nQuestion: {QUESTION.text}",
        "check\n1 title 1: text 1\nQuestion: employer of Ann Lee",
        "check\n1 title 1: text 1\nQuestion: seat of Acme",
    ]
    assert leaves_of(forest) == [("Ulm", "answered")]
    assert [r.depth for r in forest.records] == [1, 2, 3, 4]
    # The gold depends on the number: the last step has the gold of the question.
    goals = [r.state.latest(SubGoal) for r in forest.records if r.role == ANALYSIS]
    assert goals == [SubGoal("employer of Ann Lee", 0, 2), SubGoal("seat of Acme", 1, 2)]


def test_an_unanswered_step_is_rewritten_and_searched_again():
    """Twice for each step."""
    words = [f"rephrase: {word}" for word in ("Ann Lee works", "Ann Lee job", "x", "y")]
    texts = {PLAN: [CHAIN], ANALYSIS: [NOT, NOT, ACME, NOT, NOT, ULM], REWRITE: words}
    forest, tape = play(texts)
    queries = ["employer of Ann Lee", "Ann Lee works", "Ann Lee job", "seat of Acme", "x", "y"]
    assert queries_of(tape) == queries
    assert tape.prompts[2] == "reword\nQuestion: employer of Ann Lee"
    assert leaves_of(forest) == [("Ulm", "answered")]


@pytest.mark.parametrize("rewrites", [0, 1, 2])
def test_a_step_fails_after_its_last_rewrite(rewrites):
    system = dataclasses.replace(SYSTEM, max_rewrites=rewrites)
    texts = {PLAN: ["1 a of B"], ANALYSIS: [NOT] * (rewrites + 1), REWRITE: ["x"] * rewrites}
    forest, tape = play(texts, system)
    assert leaves_of(forest) == [(None, "Out of Rewrites")]
    assert queries_of(tape) == ["a of B"] + ["x"] * rewrites
    assert not any(r.parse_error for r in forest.records if r.role in (ANALYSIS, "leaf"))


def test_a_step_without_its_need_fails_unsearched_and_independent_ones_continue():
    texts = {PLAN: [CHAIN + "\n3 mayor of [2]"], ANALYSIS: [NOT] * 3, REWRITE: ["x"] * 2}
    forest, tape = play(texts)
    assert leaves_of(forest) == [(None, "Missing Answer")]
    assert queries_of(tape) == ["employer of Ann Lee", "x", "x"]
    plan = "1 a of B\n2 c of [1]\n3 d of E"
    texts = {PLAN: [plan], ANALYSIS: [NOT] * 3 + [ULM], REWRITE: ["x"] * 2}
    forest, tape = play(texts)
    assert leaves_of(forest) == [("Ulm", "answered")] and queries_of(tape)[-1] == "d of E"


@pytest.mark.parametrize(("steps", "faults"), [(0, {"No Plan": 1}), (6, {}), (7, {"Cut Plan": 1})])
def test_a_missing_plan_is_the_question_and_a_long_one_is_cut(steps, faults):
    plan = "\n".join(f"{i} a of {i}" for i in range(1, steps + 1))
    tape = Tape({PLAN: [plan], ANALYSIS: [ULM] * 6})
    result = evaluate(SYSTEM, [QUESTION], tape.environment())
    assert result.invalid_actions == faults and result.answers == ("Ulm",)
    queries = [f"a of {i}" for i in range(1, min(steps, 6) + 1)] or [QUESTION.text]
    assert queries_of(tape) == queries


def test_malformed_and_failed_actions_have_fallbacks():
    texts = {PLAN: ["1 a of B"], ANALYSIS: ["hm", NOT, ULM], REWRITE: ["expand: c", "expand:"]}
    forest, tape = play(texts)
    assert queries_of(tape) == ["a of B", "c", "c"] and leaves_of(forest) == [("Ulm", "answered")]
    errors = [r.parse_error for r in forest.records[:-1]]
    assert errors == ["", "No Status", "", "", "Empty Query", ""]
    texts = {PLAN: [FULL], ANALYSIS: [FULL, ULM], REWRITE: [FULL]}
    forest, tape = play(texts)
    assert leaves_of(forest) == [("Ulm", "answered")] and queries_of(tape) == [QUESTION.text] * 2


def test_the_full_style_previews_the_failed_search():
    long = passage(1)._replace(text="x" * 200)
    hits = {"a of B": [long, *(passage(i) for i in range(2, 6))]}
    texts = {PLAN: ["1 a of B"], ANALYSIS: ["no job is told\nno", ULM], REWRITE: ["c"]}
    _, tape = play(texts, Opera("opera", top_k=5), hits=hits)
    analysis, rewrite = tape.prompts[1], tape.prompts[2]
    assert "x" * 200 in analysis and "Document 5 (Title: title 5): text 5" in analysis
    assert "x" * 150 in rewrite and "x" * 151 not in rewrite and "title 4" not in rewrite
    assert "no job is told" in rewrite and "a of B" in rewrite


def test_planner_and_rewriter_can_be_off():
    alone = Opera("opera_tiny", top_k=1, max_plan_steps=0)
    assert tuple(alone.roles) == (ANALYSIS, REWRITE)
    forest, tape = play({ANALYSIS: [NOT, ULM], REWRITE: ["rephrase: Ann Lee seat"]}, alone)
    assert queries_of(tape) == [QUESTION.text, "Ann Lee seat"]
    assert leaves_of(forest) == [("Ulm", "answered")]
    bare = dataclasses.replace(alone, max_rewrites=0)
    assert tuple(bare.roles) == (ANALYSIS,)
    assert leaves_of(play({ANALYSIS: [NOT]}, bare)[0]) == [(None, "Out of Rewrites")]


def test_a_group_of_one_compares_whole_rollouts():
    recipe = opera.recipe(dataclasses.replace(WORLD, group_size=1, expert=opera.Injection("off")))
    texts = {PLAN: [CHAIN, CHAIN + " "], ANALYSIS: [ACME, ACME, ULM, "b\nyes: Rom"]}
    forest, _ = talk(
        recipe.system, texts, QUESTION, expander=recipe.expander(frozenset(opera.ROLES)), rollouts=2
    )
    credit_N, weight_N = recipe.compare(forest, recipe.reward(forest), rule=group_centred)
    right = [r.path[:1] == forest.records[0].path[:1] for r in forest.records]
    np.testing.assert_allclose(credit_N, np.where(right, 0.5, -0.5))
    assert weight_N.all()


def test_every_role_has_its_own_policy_unless_shared():
    assert {r.name: r.policy for r in SYSTEM.roles.values()} == {r: r for r in SYSTEM.roles}
    shared_system = dataclasses.replace(SYSTEM, shared_policy=True)
    assert {r.policy for r in shared_system.roles.values()} == {"policy"}
    assert [r.sampling.max_tokens for r in SYSTEM.roles.values()] == [512, 512, 256]


def test_a_missing_expert_pool_and_a_credit_by_leaves_are_errors():
    recipe = opera.recipe(Settings())
    with pytest.raises(UserError, match=r"recipe.expert_pool, or set recipe.expert.when=off"):
        recipe.expander(frozenset((PLAN,)))
    off = opera.recipe(Settings(expert=opera.Injection("off")))
    assert off.expander(frozenset((PLAN,))).expert is None
    # A rollout continues after one action of a group: the others would never be trained.
    with pytest.raises(UserError, match="continue after one action of a group"):
        with_credit(opera.recipe(Settings()), "siblings", 0)


WORLD = Settings(Opera("opera_tiny"), gold="world", expert_pool="world", min_plan_steps=1)
ANN = passage(1)._replace(text="Ann Lee married Bob Ray and works for Acme Steel.")
BORN = passage(2)._replace(text="Ann Lee was born in Ulm.")
SEAT = passage(3)._replace(text="Acme Steel was founded by Cid Poe and is based in Ulm.")


def test_every_role_earns_its_own_reward():
    """By hand: the plan is right and executed; a right NO; a query that ranks the passage
    second of two; a YES with the right fact; a YES with a wrong one."""
    hits = {
        "employer of Ann Lee": [BORN],
        "Ann Lee works": [BORN, ANN],
        "seat of Acme Steel": [SEAT],
    }
    texts = {
        PLAN: [CHAIN],
        ANALYSIS: [NOT, "a\nyes: Acme Steel", "b\nyes: Rom"],
        REWRITE: ["rephrase: Ann Lee works"],
    }
    forest, _ = play(texts, dataclasses.replace(SYSTEM, top_k=2), hits=hits)
    reward_N = opera.recipe(WORLD).reward(forest)
    second = 0.9 * (1 / np.log2(3)) ** 0.5 + 0.1
    expected = [0.4 + 0.3, 0.9 + 0.1, second, 0.25 + 0.65 + 0.1, 0.25 + 0.1, 0.0]
    np.testing.assert_allclose(reward_N, expected, rtol=1e-6)
    right = dataclasses.replace(forest.records[-1], answer="Ulm")
    right_forest = forest._replace(records=(*forest.records[:-1], right))
    assert opera.recipe(WORLD).reward(right_forest)[[0, -1]].tolist() == [1.0, 1.0]
    # The first answer is wrong; the second is right for its own sub-goal.
    hits = {"employer of Ann Lee": [ANN], "seat of Cid Poe": [BORN]}
    texts = {PLAN: [CHAIN], ANALYSIS: ["a\nyes: Cid Poe", NOT, NOT, NOT], REWRITE: ["x"] * 2}
    reward_N = opera.recipe(WORLD).reward(play(texts, hits=hits)[0])
    np.testing.assert_allclose(reward_N[1:3], [0.25 + 0.1, 0.9 + 0.1], rtol=1e-6)


@pytest.mark.parametrize("gradient", [True, False])
def test_the_settings_select_whether_experts_are_trained(gradient):
    settings = Settings(expert=opera.Injection(gradient=gradient))
    records = [
        Record(-1, 0, PLAN, 1, (k,), Action((1,), (k,), "x"), is_forced=k == 0) for k in range(2)
    ]
    forest = build_forest((QUESTION,), records)
    reward_N = np.array([1.0, 0.0], np.float32)
    opera_recipe = opera.recipe(settings)
    advantage_N, weight_N = opera_recipe.compare(forest, reward_N, rule=group_centred)
    assert weight_N.tolist() == [float(gradient), 1.0] and advantage_N[1] == -0.5
    # Another credit has no setting for experts: it needs the nodes that may be trained.
    leaves = with_credit(opera_recipe, "reachable_leaves", 0)
    trainable = None if leaves.trainable is None else leaves.trainable(forest).tolist()
    assert trainable == (None if gradient else [False, True])


def test_a_plan_earns_its_rollouts_reward():
    plans = ["1 seat of Acme Steel", "1 birthplace of Ann Lee", "hm"]
    write = {PLAN: list(plans), ANALYSIS: ["b\nyes: Ulm", "b\nyes: Rom", "b\nyes: Ulm"]}
    three = lambda effect, question: Branching(3 if effect.role == PLAN else 1)  # noqa: E731
    forest, _ = talk(SYSTEM, write, QUESTION, expander=three)
    reward_N = opera.recipe(WORLD).reward(forest)
    plans_N = [n for n, r in enumerate(forest.records) if r.role == PLAN]
    # Neither plan has both names: Ann Lee is the question's only one after its first word.
    np.testing.assert_allclose(reward_N[plans_N], [0.3 + 0.3, 0.4 + 0.3, 0.3], rtol=1e-6)
