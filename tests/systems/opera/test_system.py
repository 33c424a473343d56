from __future__ import annotations

import dataclasses
import json
import runpy

import numpy as np
import pytest

from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.tree import Action, Record, plant
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems.opera import system as opera
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE
from jax_ragrl.systems.opera.memory import trajectory
from jax_ragrl.systems.opera.rewards import SubGoal
from jax_ragrl.systems.opera.system import Opera, Settings
from jax_ragrl.types import Question
from tests.conftest import REPO
from tests.rollout.tape import Tape, passage
from tests.systems.talk import ends, talk

SYSTEM = Opera("opera_tiny", top_k=1)
QUESTION = Question("q", "What is the seat of the employer of Ann Lee?", ("Ulm",))
CHAIN = "1 employer of Ann Lee\n2 seat of [1]"
ACME, ULM, NOT = "a\nyes: Acme", "b\nyes: Ulm", "nothing\nno"


def play(texts, system=SYSTEM, **tape):
    return talk(system, texts, QUESTION, **tape)


def searched(tape) -> list[str]:
    return [event[1] for event in tape.log if event[0] == "search"]


# --- The order of effects -----------------------------------------------------------------------


def test_a_plan_is_carried_out_step_by_step_with_answers_in_their_places():
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
    assert ends(forest) == [("Ulm", "answered")]
    assert [r.depth for r in forest.records] == [1, 2, 3, 4]


def test_a_step_that_was_not_found_is_reworded_and_searched_again():
    words = ["rephrase: Ann Lee works", "rephrase: Ann Lee job"]
    forest, tape = play({PLAN: [CHAIN], ANALYSIS: [NOT, NOT, ACME, ULM], REWRITE: words})
    queries = ["employer of Ann Lee", "Ann Lee works", "Ann Lee job", "seat of Acme"]
    assert searched(tape) == queries
    assert tape.prompts[2] == "reword\nQuestion: employer of Ann Lee"
    assert ends(forest) == [("Ulm", "answered")]


def test_a_sub_goal_is_judged_as_the_step_it_is_of_its_plan():
    """Which gold it has depends on that: the last one's is the question's."""
    forest, _ = play({PLAN: [CHAIN], ANALYSIS: [ACME, ULM]})
    judged = [r.state.judged for r in forest.records if r.role == ANALYSIS]
    assert judged == [SubGoal("employer of Ann Lee", 0, 2), SubGoal("seat of Acme", 1, 2)]


def test_rewrites_are_counted_anew_for_every_step():
    texts = {PLAN: [CHAIN], ANALYSIS: [NOT, NOT, ACME, NOT, NOT, ULM], REWRITE: ["x"] * 4}
    assert ends(play(texts)[0]) == [("Ulm", "answered")]


@pytest.mark.parametrize("rewrites", [0, 1, 2])
def test_a_step_that_is_never_found_fails_after_its_rewrites(rewrites):
    system = dataclasses.replace(SYSTEM, max_rewrites=rewrites)
    texts = {PLAN: ["1 a of B"], ANALYSIS: [NOT] * (rewrites + 1), REWRITE: ["x"] * rewrites}
    forest, tape = play(texts, system)
    assert ends(forest) == [(None, "Out of Rewrites")]
    assert searched(tape) == ["a of B"] + ["x"] * rewrites
    assert not any(r.fault for r in forest.records if r.role in (ANALYSIS, "leaf"))


def test_a_step_that_needs_a_missing_answer_fails_without_a_search():
    texts = {PLAN: [CHAIN + "\n3 mayor of [2]"], ANALYSIS: [NOT] * 3, REWRITE: ["x"] * 2}
    forest, tape = play(texts)
    assert ends(forest) == [(None, "Missing Answer")]
    assert searched(tape) == ["employer of Ann Lee", "x", "x"]
    assert forest.records[-1].state.answers == ("", "", "")


def test_steps_that_need_no_failed_one_go_on_and_the_last_answer_counts():
    plan = "1 a of B\n2 c of [1]\n3 d of E"
    texts = {PLAN: [plan], ANALYSIS: [NOT] * 3 + [ULM], REWRITE: ["x"] * 2}
    forest, tape = play(texts)
    assert ends(forest) == [("Ulm", "answered")] and searched(tape)[-1] == "d of E"


def test_a_declared_need_without_a_placeholder_is_appended():
    plan = json.dumps(
        [
            {"subgoal_id": 1, "subgoal": "a", "dependencies": []},
            {"subgoal_id": 2, "subgoal": "b", "dependencies": [1, 2]},
        ]
    )
    assert searched(play({PLAN: [plan], ANALYSIS: [ACME, ULM]})[1]) == ["a", "b (given Acme)"]


def test_what_is_no_plan_becomes_one_step():
    forest, tape = play({PLAN: ["no idea"], ANALYSIS: [ULM]})
    assert searched(tape) == [QUESTION.text] and ends(forest) == [("Ulm", "answered")]
    assert forest.records[0].fault == "No Plan"


def test_a_plan_is_cut_to_its_first_steps():
    plan = "\n".join(f"{i} a of {i}" for i in range(1, 9))
    _, tape = play({PLAN: [plan], ANALYSIS: [ULM] * 6})
    assert searched(tape) == [f"a of {i}" for i in range(1, 7)]


@pytest.mark.parametrize(("steps", "malformed"), [(6, {}), (7, {"Cut Plan": 1})])
def test_a_cut_plan_is_counted_as_malformed(steps, malformed):
    plan = "\n".join(f"{i} a of {i}" for i in range(1, steps + 1))
    tape = Tape({PLAN: [plan], ANALYSIS: [ULM] * 6})
    result = evaluate(SYSTEM, [QUESTION], tape.environment())
    assert result.malformed == malformed and result.answers == ("Ulm",)


def test_what_is_no_verdict_counts_as_no_and_what_is_no_query_repeats_the_last():
    texts = {PLAN: ["1 a of B"], ANALYSIS: ["hm", NOT, ULM], REWRITE: ["expand: c", "expand:"]}
    forest, tape = play(texts)
    assert searched(tape) == ["a of B", "c", "c"] and ends(forest) == [("Ulm", "answered")]
    assert [r.fault for r in forest.records[:-1]] == ["", "No Status", "", "", "Empty Query", ""]


def test_a_role_that_cannot_write_is_taken_for_malformed():
    texts = {PLAN: [""], ANALYSIS: ["", ULM], REWRITE: [""]}
    forest, tape = play(texts)
    assert ends(forest) == [("Ulm", "answered")] and searched(tape) == [QUESTION.text] * 2


def test_the_full_style_previews_the_failed_search_and_says_what_is_missing():
    long = passage(1)._replace(text="x" * 200)
    found = {"a of B": [long, *(passage(i) for i in range(2, 6))]}
    texts = {PLAN: ["1 a of B"], ANALYSIS: ["no job is told\nno", ULM], REWRITE: ["c"]}
    _, tape = play(texts, Opera("opera", top_k=5), found=found)
    analysis, rewrite = tape.prompts[1], tape.prompts[2]
    assert "x" * 200 in analysis and "Document 5 (Title: title 5): text 5" in analysis
    assert "x" * 150 in rewrite and "x" * 151 not in rewrite and "title 4" not in rewrite
    assert "no job is told" in rewrite and "a of B" in rewrite


def test_without_steps_or_rewrites_there_is_no_planner_or_rewriter():
    alone = Opera("opera_tiny", top_k=1, max_steps=0)
    assert tuple(alone.roles) == (ANALYSIS, REWRITE)
    forest, tape = play({ANALYSIS: [NOT, ULM], REWRITE: ["rephrase: Ann Lee seat"]}, alone)
    assert searched(tape) == [QUESTION.text, "Ann Lee seat"]
    assert ends(forest) == [("Ulm", "answered")]
    bare = dataclasses.replace(alone, max_rewrites=0)
    assert tuple(bare.roles) == (ANALYSIS,)
    assert ends(play({ANALYSIS: [NOT]}, bare)[0]) == [(None, "Out of Rewrites")]


def test_a_group_of_one_compares_whole_rollouts_by_their_answers():
    recipe = opera.recipe(dataclasses.replace(WORLD, group=1, expert=opera.Injection("off")))
    texts = {PLAN: [CHAIN, CHAIN + " "], ANALYSIS: [ACME, ACME, ULM, "b\nyes: Rom"]}
    forest, _ = talk(
        recipe.system, texts, QUESTION, expander=recipe.expander(frozenset(opera.ROLES)), rollouts=2
    )
    credit_N, weight_N = recipe.advantages["group_centred"](forest, recipe.reward(forest))
    right = [r.path[:1] == forest.records[0].path[:1] for r in forest.records]
    np.testing.assert_allclose(credit_N, np.where(right, 0.5, -0.5))
    assert weight_N.all()


def test_every_role_has_parameters_of_its_own_unless_shared():
    assert {r.name: r.policy for r in SYSTEM.roles.values()} == {r: r for r in SYSTEM.roles}
    shared = dataclasses.replace(SYSTEM, shared=True)
    assert {r.policy for r in shared.roles.values()} == {"policy"}
    assert [r.sampling.max_tokens for r in SYSTEM.roles.values()] == [512, 512, 256]


# --- Trajectory memory --------------------------------------------------------------------------


def test_the_trajectory_tells_every_event_in_order():
    texts = {PLAN: [CHAIN], ANALYSIS: [NOT, ACME, NOT, NOT, NOT], REWRITE: ["expand: job"] * 3}
    forest, _ = play(texts)
    events = trajectory(forest, len(forest.records) - 1)
    again = ["rewrite", "retrieval", "decision"]
    assert [event.kind for event in events] == [
        *["plan", "retrieval", "decision", *again, "step"],
        *["retrieval", "decision", *again, *again, "step", "final"],
    ]
    assert [event.round for event in events] == sorted(event.round for event in events)
    plan, search, decision, rewrite = events[0], events[1], events[5], events[3]
    assert plan.details == {"steps": ["employer of Ann Lee", "seat of [1]"]}
    assert search.details == {"query": "employer of Ann Lee", "found": (passage(1),)}
    assert decision.details == {
        "goal": "employer of Ann Lee", "status": "yes", "answer": "Acme", "analysis": "a"
    }  # fmt: skip
    assert rewrite.details == {
        "goal": "employer of Ann Lee", "query": "job", "strategy": "expand"
    }  # fmt: skip
    steps = [event.details for event in events if event.kind == "step"]
    assert steps == [{"number": 1, "answer": "Acme"}, {"number": 2, "answer": ""}]
    assert events[-1].details == {"answer": None, "why": "Out of Rewrites"}


def test_the_trajectory_names_faults_and_steps_that_failed_unsearched():
    texts = {PLAN: ["1 a of [1]\n2 b"], ANALYSIS: ["hm", ULM], REWRITE: ["c"]}
    forest, _ = play(texts)
    events = trajectory(forest, len(forest.records) - 1)
    assert [event.details["number"] for event in events if event.kind == "step"] == [1, 2]
    assert [e.details["fault"] for e in events if "fault" in e.details] == ["No Status", "No JSON"]


# --- The recipe ---------------------------------------------------------------------------------


def test_the_recipe_is_the_table_of_the_paper():
    recipe = opera.recipe(opera.paper())
    assert (recipe.rollouts, recipe.metric, recipe.system.top_k) == (1, "em", 5)
    assert opera.paper().group == 8
    code = opera.code()
    assert code.expert == opera.Injection("periodic", "worst", False, roles=(PLAN,))
    assert code.plan_reward == "code"


def test_the_groups_of_the_recipe_carry_plans_out_and_search_for_every_query():
    tried = opera.recipe(WORLD).expander(frozenset((PLAN, REWRITE)))
    assert tried.trained == {PLAN, REWRITE} and tried.size == 8
    assert tried.whole == {PLAN} and tried.peeked == {REWRITE}


def test_an_expert_that_is_wanted_and_not_there_is_an_error_when_training_starts():
    recipe = opera.recipe(Settings())
    with pytest.raises(UserError, match=r"recipe.pool, or set recipe.expert.when=off"):
        recipe.expander(frozenset((PLAN,)))
    off = opera.recipe(Settings(expert=opera.Injection("off")))
    assert off.expander(frozenset((PLAN,))).expert is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gold": "x"}, "recipe.gold is 'x': use steps or world"),
        ({"plan_reward": "x"}, "recipe.plan_reward is 'x': use paper or code"),
        ({"group": 1}, "group is 1 .*use 2 or more"),
        ({"max_steps": -1}, "max_steps is -1 .*at least 0"),
        ({"expert": opera.Injection(roles=("planner",))}, "names 'planner': use plan, analysis"),
    ],
)
def test_unknown_choices_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Settings(**changes)


def test_the_config_holds_the_published_code_too():
    config = runpy.run_path(str(REPO / "configs/opera.py"))["get_config"]("code")
    config.recipe.pool = ""
    assert build(Settings, config.recipe.to_dict()) == opera.code() != opera.paper()


@pytest.mark.parametrize("file", ["configs/opera.py", "configs/tiny/opera.py"])
def test_the_configs_hold_settings_of_the_recipe(file):
    config = runpy.run_path(str(REPO / file))["get_config"]()
    config.recipe.pool = "world"
    settings = build(Settings, config.recipe.to_dict())
    assert file == "configs/tiny/opera.py" or dataclasses.replace(settings, pool="") == Settings()
    recipe = opera.recipe(settings)
    assert config.system == "opera" and list(recipe.system.roles) == [PLAN, ANALYSIS, REWRITE]
    assert isinstance(recipe.expander(frozenset((PLAN,))), opera.Groups)


# --- Rewards of a whole rollout -----------------------------------------------------------------

WORLD = Settings(style="opera_tiny", gold="world", pool="world", least_steps=1)
ANN = passage(1)._replace(text="Ann Lee married Bob Ray and works for Acme Steel.")
BORN = passage(2)._replace(text="Ann Lee was born in Ulm.")
SEAT = passage(3)._replace(text="Acme Steel was founded by Cid Poe and is based in Ulm.")


def test_every_role_earns_its_own_reward():
    """By hand: the plan is right and carried out; a NO in place; a query that finds the passage
    second of two; a YES with the right fact; a YES with a wrong one."""
    found = {
        "employer of Ann Lee": [BORN],
        "Ann Lee works": [BORN, ANN],
        "seat of Acme Steel": [SEAT],
    }
    texts = {
        PLAN: [CHAIN],
        ANALYSIS: [NOT, "a\nyes: Acme Steel", "b\nyes: Rom"],
        REWRITE: ["rephrase: Ann Lee works"],
    }
    forest, _ = play(texts, dataclasses.replace(SYSTEM, top_k=2), found=found)
    reward_N = opera.reward(forest, WORLD)
    second = 0.9 * (1 / np.log2(3)) ** 0.5 + 0.1
    expected = [0.4 + 0.3, 0.9 + 0.1, second, 0.25 + 0.65 + 0.1, 0.25 + 0.1, 0.0]
    np.testing.assert_allclose(reward_N, expected, rtol=1e-6)
    right = dataclasses.replace(forest.records[-1], answer="Ulm")
    won = forest._replace(records=(*forest.records[:-1], right))
    assert opera.reward(won, WORLD)[[0, -1]].tolist() == [1.0, 1.0]


def test_a_wrong_entity_is_judged_by_what_is_told_of_it():
    """The first answer is wrong; the second is right for the sub-goal as it was put."""
    found = {"employer of Ann Lee": [ANN], "seat of Cid Poe": [BORN]}
    texts = {PLAN: [CHAIN], ANALYSIS: ["a\nyes: Cid Poe", NOT, NOT, NOT], REWRITE: ["x"] * 2}
    reward_N = opera.reward(play(texts, found=found)[0], WORLD)
    np.testing.assert_allclose(reward_N[1:3], [0.25 + 0.1, 0.9 + 0.1], rtol=1e-6)


@pytest.mark.parametrize("gradient", [True, False])
def test_an_expert_is_trained_where_the_settings_say_so(gradient):
    settings = Settings(expert=opera.Injection(gradient=gradient))
    records = [
        Record(-1, 0, PLAN, 1, (k,), Action((1,), (k,), "x"), forced=k == 0) for k in range(2)
    ]
    forest = plant((QUESTION,), records)
    reward_N = np.array([1.0, 0.0], np.float32)
    made = opera.recipe(settings)
    for credit in (made.credit, made.advantages["group_centred"]):
        advantage_N, weight_N = credit(forest, reward_N)
        assert weight_N.tolist() == [float(gradient), 1.0] and advantage_N[1] == -0.5


def test_a_plan_earns_what_the_rollout_that_carries_it_out_earns():
    plans = ["1 seat of Acme Steel", "1 birthplace of Ann Lee", "hm"]
    write = {PLAN: list(plans), ANALYSIS: ["b\nyes: Ulm", "b\nyes: Rom", "b\nyes: Ulm"]}
    three = lambda effect, question: Branching(3 if effect.role == PLAN else 1)  # noqa: E731
    forest, _ = talk(SYSTEM, write, QUESTION, expander=three)
    reward_N = opera.reward(forest, WORLD)
    plans_N = [n for n, r in enumerate(forest.records) if r.role == PLAN]
    # Neither mentions both names: Ann Lee is the question's only one after its first word.
    np.testing.assert_allclose(reward_N[plans_N], [0.3 + 0.3, 0.4 + 0.3, 0.3], rtol=1e-6)
