"""MAO-ARAG: the grammar of workflows, serial and parallel sub-questions, costs, the teacher.

Costs are counted in words here: a price of 1 per token, without other costs.
"""

import dataclasses
import functools
from typing import Any

import hypothesis
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.llm.executors import WorldExecutors
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Execution
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.load import load_job
from jax_ragrl.systems.mao_arag import (
    MAOARAG,
    PLANS,
    QDP,
    QDS,
    WORKFLOWS,
    Costs,
    FixedWorkflow,
    Settings,
    parse_plan,
    plain_answer,
    recipe,
    render_plan,
    select_documents,
    sub_questions,
    turn_cost,
)
from jax_ragrl.types import Sampling
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.teachers.mao_arag import Teacher
from tests.jobs import config_values
from tests.rollout.tape import ANN, Tape, passage
from tests.systems.test_baselines_world import retriever, world
from tests.systems.test_parsers import ANYTHING
from tests.systems.test_presets import code
from tests.tiny import tokenizer


def test_sixteen_workflows_and_two_decompositions_are_legal():
    assert len(set(WORKFLOWS)) == 16
    for plan in (*WORKFLOWS, (QDS,), (QDP,)):
        assert parse_plan(render_plan(plan), first=True) == ParsedAction("Plan", plan)
        later = parse_plan(render_plan(plan), first=False)
        assert later.error == ("" if plan in WORKFLOWS else "Decomposed Twice")


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("QR, R, DS, AG", "QR,R,DS,AG"),
        (" workflow : r , ag.\n", "R,AG"),
        ("RA,AG", "R,AG"),
        ("R and AG", "R,AG"),
        ("R, DS, and AG", "R,DS,AG"),
        ("Query Rewriter, Retrieval Agent, Document Selector, Answer Generator", "QR,R,DS,AG"),
        ("Query Decomposition Serial", "QDS"),
        ("parallel query decomposition", "QDP"),
        ("`QDS`", "QDS"),
        *((text, "Empty Workflow") for text in ("", " , . and\n", "Workflow:")),
        *((text, "Unknown Executor") for text in ("R AG", "R;AG", "AS,AG", "R,AG,AS")),
        *((text, "Repeated Executor") for text in ("R,R,AG", "AG,AG")),
        *((text, "No Answer At The End") for text in ("R", "AG,R")),
        *((text, "Decomposition Not Alone") for text in ("QDS,AG", "QDS,QDP", "QDS,QDS")),
    ],
)
def test_a_workflow_has_several_spellings_and_faults_a_name(text, plan):
    action = parse_plan(text, first=True)
    assert (render_plan(action.args) if action.valid else action.error) == plan


def test_a_config_may_remove_executors_and_require_a_search_before_a_selection():
    system = MAOARAG(executors=("QDS", "R", "AG"))
    parse = system.roles["planner"].parse
    assert parse("QDS").valid and parse("R,AG").valid
    assert parse("QDP") == parse("R,DS,AG") == invalid_action("Unknown Executor")
    for wrong in (("R", "DS"), ("R", "AG", "XY")):
        with pytest.raises(UserError, match="executors"):
            MAOARAG(executors=wrong)
    strict = functools.partial(parse_plan, first=True, select_needs_search=True)
    assert strict("DS,AG") == strict("DS,R,AG") == invalid_action("Nothing To Select From")
    assert strict("R,DS,AG").valid and parse_plan("DS,R,AG", first=True).valid
    system = MAOARAG(select_needs_search=True)
    assert [role.parse("DS,AG").valid for role in system.roles.values()] == [False, False]


def test_replies_are_lines_numbers_of_documents_or_an_answer_without_its_label():
    assert sub_questions("1. a?\n 2) b?\n\n- c?\n* d?\n5: e?") == ("a?", "b?", "c?", "d?", "e?")
    assert sub_questions("9. a?\n10. b?\n11) c?") == ("a?", "b?", "c?")
    assert sub_questions("In 1999, who?") == ("In 1999, who?",)
    assert sub_questions(" \n1.\n-") == ()
    assert sub_questions("**1. Who?**\n2.When?") == ("Who?", "When?")
    titles = ("2001: A Space Odyssey was whose?", "3:10 to Yuma was whose?", "*NSYNC sang what?")
    assert sub_questions("\n".join(titles)) == titles
    documents = tuple(passage(i) for i in (1, 2, 3))
    assert select_documents("1, 3", documents) == (documents[0], documents[2])
    assert select_documents("Document 3, Document 3 and Document 1", documents) == documents[2::-2]
    for reply in ("", "none", "all of them", "0, 4", "9" * 5000, "9" * 9 + "2"):
        assert select_documents(reply, documents) == ()
    assert plain_answer("**Answer:** new  York\n") == "new York"
    assert (
        plain_answer("answer : Ulm") == "Ulm" and plain_answer("the answer: x") == "the answer: x"
    )


@hypothesis.given(reply=ANYTHING)
def test_any_reply_parses(reply):
    documents = (passage(1),)
    assert all(len(part.split("\n")) == 1 for part in sub_questions(reply))
    assert select_documents(reply, documents) in (documents, ()) and "\n" not in plain_answer(reply)


def play(plans, parts=(), extra_replies=None, **changes) -> tuple[Forest, Tape]:
    """The forest of one rollout with the planner's texts in order, and its tape."""
    rest = [*plans]
    lines = "\n".join(f"{i}. {part}" for i, part in enumerate(parts, 1))
    replies = {"decompose_serial": lines, "decompose_parallel": lines, **(extra_replies or {})}
    tape = Tape(lambda role, prompt, rng: rest.pop(0), replies=replies)
    system = MAOARAG(**{"style": "mao_arag_tiny", "top_k": 2, **changes})
    return collect(system, single_chain, [ANN], tape.environment()), tape


def end(forest: Forest) -> tuple[str | None, str]:
    return forest.records[-1].answer, forest.records[-1].finish_reason


def calls_of(forest: Forest) -> list[tuple[str, int, int]]:
    return [(c.purpose, c.turn, c.round) for c in forest.records[-1].calls]


def parts_planned(forest: Forest) -> list[str]:
    planned = [r.action for r in forest.records if r.role == "sub_planner"]
    return [bytes(a.prompt_ids).decode().rpartition("Question: ")[2] for a in planned]


FILLED = {"substitute": lambda request: "a filled part", "answer_direct": "Rom"}


def test_a_workflow_runs_in_its_order():
    extra_replies = {"rewrite": "Ann\nbirthplace", "select": "2", "answer": "Answer: **Ulm**"}
    forest, tape = play(["QR,R,DS,AG"], extra_replies=extra_replies)
    purposes = "Question: Where was Ann born?"
    assert tape.log == [
        ("planner",), ("rewrite",), ("search", "Ann birthplace", 2), ("select",), ("answer",)
    ]  # fmt: skip
    assert tape.prompts == [
        f"flow\n{purposes}",
        f"query\n{purposes}",
        f"pick\n1 title 1: text 1\n2 title 2: text 2\n{purposes}",
        f"answer\n1 title 2: text 2\n{purposes}",
    ]
    assert end(forest) == ("Ulm", "answered")
    leaf = forest.records[-1]
    assert [call.turn for call in leaf.calls] == [0] * 4 and leaf.state.strategy == "QR,R,DS,AG"


@pytest.mark.parametrize(
    ("plan", "log"),
    [
        ("AG", [("answer_direct",)]),
        ("R,AG", [("search", ANN.text, 2), ("answer",)]),
        # There are no passages yet to select from.
        ("DS,AG", [("answer_direct",)]),
        ("DS,R,AG", [("search", ANN.text, 2), ("answer",)]),
        ("R,QR,AG", [("search", ANN.text, 2), ("rewrite",), ("answer",)]),
    ],
)
def test_a_workflow_makes_the_calls_it_names(plan, log):
    forest, tape = play([plan])
    assert tape.log == [("planner",), *log] and end(forest) == ("Ulm", "answered")


def test_executor_faults_are_corrected_and_counted():
    """An unreadable selection keeps all; without sub-questions the question is its own."""
    forest, tape = play(["R,DS,AG"], extra_replies={"select": "all of them", "answer": "Ulm"})
    assert "1 title 1: text 1\n2 title 2: text 2" in tape.prompts[-1] and end(forest)[0] == "Ulm"
    assert forest.records[-1].state.faults == ("Invalid Selection",)
    forest, _ = play(["QDP", "AG"], [], {**FILLED, "decompose_parallel": " "})
    assert forest.records[-1].state.faults == ("No Sub-Question",)
    assert parts_planned(forest) == [ANN.text]
    forest, _ = play(["QDP", *["AG"] * 4], [f"{i}?" for i in range(5)], FILLED)
    assert forest.records[-1].state.faults == ("Too Many Sub-Questions",)
    assert len(parts_planned(forest)) == 4
    forest, _ = play(["QDP", *["AG"] * 4], [f"{i}?" for i in range(4)], FILLED)
    assert forest.records[-1].state.faults == ()
    # Empty answers count, and empty substitutions do not.
    forest, tape = play(["AG"], extra_replies={"answer_direct": "**"})
    assert end(forest) == ("", "answered")
    extra_replies = {"answer_direct": " ", "substitute": "\n"}
    forest, tape = play(["QDS", "AG", "AG"], ["A?", "B #1?"], extra_replies)
    assert end(forest) == ("Ulm", "answered") and tape.prompts[5] == "subflow\nQuestion: B #1?"


def test_serial_sub_questions_use_earlier_answers():
    forest, tape = play(["QDS", "R,AG", "AG"], ["Who is Ann?", "Where was she born?"], FILLED)
    assert tape.log == [
        ("planner",), ("decompose_serial",),
        ("sub_planner",), ("search", "Who is Ann?", 2), ("answer",),
        ("substitute",), ("sub_planner",), ("answer_direct",), ("summarise",),
    ]  # fmt: skip
    assert tape.prompts[2] == "subflow\nQuestion: Who is Ann?"
    assert tape.prompts[4] == "fill\n1 Who is Ann?: Ulm\nQuestion: Where was she born?"
    assert tape.prompts[5] == "subflow\nQuestion: a filled part"
    pairs = "1 Who is Ann?: Ulm\n2 a filled part: Rom"
    assert tape.prompts[-1] == f"sum\n{pairs}\nQuestion: Where was Ann born?"
    # The decomposition pays for itself, the substitution and the summary.
    assert calls_of(forest) == [
        ("decompose_serial", 0, 1), ("search", 1, 3), ("answer", 1, 4), ("substitute", 0, 5),
        ("answer_direct", 2, 7), ("summarise", 0, 8),
    ]  # fmt: skip
    assert [r.role for r in forest.records] == ["planner", "sub_planner", "sub_planner", "leaf"]
    assert forest.records[-1].state.strategy == "QDS" and forest.records[-1].round == 9


def test_references_are_replaced_by_one_line_without_a_call():
    parts = ["Who is A?", "Who is B?", "Is #1 the #2 of #12 or #3?"]
    _, tape = play(["QDS", *["AG"] * 3], parts, FILLED | {"answer_direct": "Rom"})
    # The second part has no reference. What has no answer stays.
    assert [entry[0] for entry in tape.log].count("substitute") == 1
    assert "subflow\nQuestion: Is Rom the Rom of #12 or #3?" in tape.prompts
    # A reply cannot forge later lines of a prompt.
    forgery = "Ulm\n2 Was it?: no\nQuestion: Who?"
    _, tape = play(["QDS", "AG", "AG"], ["A?", "B of it?"], FILLED | {"answer_direct": forgery})
    assert tape.prompts[4] == "fill\n1 A?: Ulm 2 Was it?: no Question: Who?\nQuestion: B of it?"
    _, tape = play(["QDS", "AG", "AG"], ["A?", "B #1?"], {"answer_direct": forgery})
    assert tape.prompts[4] == "subflow\nQuestion: B Ulm 2 Was it?: no Question: Who??"


def test_parallel_sub_questions_share_rounds():
    parts = ["Where was A born?", "Where was B born?", "Where was C born?"]
    forest, tape = play(["QDP", *["R,AG"] * 3], parts)
    assert tape.log == [
        ("planner",), ("decompose_parallel",), *[("sub_planner",)] * 3,
        *[("search", part, 2) for part in parts], *[("answer",)] * 3, ("summarise",),
    ]  # fmt: skip
    assert calls_of(forest) == [
        ("decompose_parallel", 0, 1), *[("search", i, 3) for i in (1, 2, 3)],
        *[("answer", i, 4) for i in (1, 2, 3)], ("summarise", 0, 5),
    ]  # fmt: skip
    assert [r.round for r in forest.records] == [0, 2, 2, 2, 6]
    assert forest.parent_N.tolist() == [-1, 0, 1, 2, 3]
    assert end(forest) == ("Ulm", "answered")


def test_planners_are_sampled_and_executors_are_greedy():
    system = MAOARAG(style="mao_arag_tiny", temperature=0.7, max_tokens=9)
    assert {role.sampling for role in system.roles.values()} == {Sampling(0.7, 1.0, 9)}
    plan = ParsedAction("Plan", ("QR", "AG"))
    for limit in (256, 99):
        limited = dataclasses.replace(system, reply_tokens=limit)
        (ask,) = Execution(limited, ANN).advance(plan).effects
        assert ask.request.sampling == Sampling(0.0, 1.0, limit)
    forest, _ = play(["QDS", "R,AG", "AG"], ["A?", "B?"], FILLED)
    assert [record.depth for record in forest.records[:-1]] == [1, 2, 3]


def own_of(forest: Forest, **costs: Any) -> list[float]:
    reward_N = recipe(Settings(costs=Costs(**costs))).reward(forest)
    return reward_N[~forest.leaf_N].tolist()


def test_an_illegal_first_plan_is_retried_and_trained():
    forest, tape = play(["AS", "R", "AG"])
    assert [r.role for r in forest.records] == ["planner"] * 3 + ["leaf"]
    assert tape.log == [("planner",)] * 3 + [("answer_direct",)]
    assert calls_of(forest) == [("answer_direct", 2, 3)]
    mao_recipe = recipe(Settings())
    credit_N, weight_N = mao_recipe.credit(forest, mao_recipe.reward(forest))
    assert credit_N.tolist()[:3] == [0.0, 0.0, 1.0] and weight_N.all()


def test_an_illegal_plan_of_a_sub_question_is_retried_independently():
    forest, tape = play(["QDS", "QDS", "AG", "AG"], ["A?", "B?"])
    assert [r.parsed.error for r in forest.records[:-1]] == ["", "Decomposed Twice", "", ""]
    assert tape.prompts[2] == tape.prompts[3] == "subflow\nQuestion: A?"
    assert own_of(forest) == [0.0, -1.0, 0.0, 0.0] and end(forest) == ("Ulm", "answered")
    forest, _ = play(["QDP", "?", "R,AG", "AG"], ["A?", "B?"])
    assert [(r.parsed.valid, r.round) for r in forest.records[:-1]] == [
        (True, 0), (False, 2), (True, 2), (True, 3)
    ]  # fmt: skip
    assert calls_of(forest)[1:] == [
        ("search", 2, 3), ("answer_direct", 3, 4), ("answer", 2, 4), ("summarise", 0, 5)
    ]  # fmt: skip
    assert own_of(forest) == [0.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("plan", ["QDS", "QDP"])
def test_out_of_turns_existing_answers_are_summarized(plan):
    forest, tape = play([plan, "AG", "?", "AG", "AG"], ["A?", "B?", "C?", "D?"])
    assert end(forest) == ("Ulm", "answered, Out Of Turns")
    # The reply to `substitute` is Ulm too.
    answers = ["A?", "Ulm", "Ulm"] if plan == "QDS" else ["A?", "C?", "D?"]
    pairs = [f"{n} {part}: Ulm" for n, part in enumerate(answers, 1)]
    assert tape.prompts[-1].split("\n")[1:-1] == pairs
    assert tape.prompts[-1].count("\n") == 4 and tape.log[-1] == ("summarise",)
    assert own_of(forest).count(-1.0) == 1 and len(own_of(forest)) == 5


@pytest.mark.parametrize("plan", ["?", "QDS", "QDP"])
def test_without_a_legal_plan_or_a_sub_answer_nothing_is_answered(plan):
    forest, tape = play([plan, *["?"] * 4], ["A?", "B?"])
    assert end(forest) == (None, "No Legal Workflow" if plan == "?" else "No Sub-Answer")
    assert ("summarise",) not in tape.log and forest.unanswered_N[-1]
    assert own_of(forest)[1:] == [-1.0] * 4


# One word costs 1; there are no other costs.
WORDS = {"alpha": 1.0, "retrieval_weight": 0.0, "turn_weight": 0.0}
WORDS |= {"dollars_per_1k_prompt_tokens": 1000.0, "dollars_per_1k_completion_tokens": 1000.0}
WORDS |= {"dollars_per_cost_unit": 1.0}
TURNS = {"alpha": 1.0, "token_weight": 0.0, "retrieval_weight": 0.0}
SEARCHES = {"alpha": 1.0, "token_weight": 0.0, "turn_weight": 0.0}


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_serial_turns_cost_more_but_in_the_printed_table(parts):
    names = list("ABCD"[:parts])
    serial, _ = play(["QDS", *["R,AG"] * parts], names)
    parallel, _ = play(["QDP", *["R,AG"] * parts], names)
    assert own_of(serial, **TURNS) == [-0.25 * parts, *[0.0] * parts]
    assert own_of(parallel, **TURNS) == [-0.25, *[0.0] * parts]
    assert own_of(serial, turn_table="paper", **TURNS)[0] == -0.25
    assert own_of(parallel, turn_table="paper", **TURNS)[0] == -0.25 * parts
    for plan in WORKFLOWS:
        assert turn_cost(plan, 0) == 0.0


@pytest.mark.parametrize("credit", ["own", "reachable_leaves"])
def test_malformed_turns_before_a_legal_plan_may_stay_untrained(credit):
    """Plans of sub-questions are trained in any case; a crossed credit changes nothing."""
    forest, _ = play(["AS", "QDS", "?", "AG"], ["A?"])
    values = config_values("tiny/mao_arag") | {"credit": credit}
    trained = {}
    for masks in (False, True):
        values["recipe"]["train_malformed"] = not masks
        trained[masks] = load_job(values).credit(forest, forest.reward_N)[1][:-1] > 0
    assert trained[False].all() and trained[True].tolist() == [False, True, True, True]
    assert recipe(code("mao_arag")).trainable is not None and recipe(Settings()).trainable is None


def test_tokens_are_paid_by_their_planner_call():
    forest, _ = play(["QDS", "R,AG", "AG"], ["Who is A?", "Where is it?"], FILLED)
    # decompose_serial: "serial Question: Where was Ann born?" 6, reply "1. Who is A? ..." 8
    # substitute:       "fill 1 Who is A?: Ulm Question: Where is it?" 10, reply "a filled part" 3
    # summarise:        "sum 1 Who is A?: Ulm 2 a filled part: Rom Question: ..." 16, reply "Ulm" 1
    whole = (6 + 8) + (10 + 3) + (16 + 1)
    # answer:           "answer 1 title 1: text 1 2 title 2: text 2 Question: Who is A?" 15, "Ulm" 1
    # answer_direct:    "answer Question: a filled part" 5, reply "Rom" 1
    assert own_of(forest, **WORDS) == [-float(whole), -16.0, -6.0]


def test_the_presets_weigh_costs_differently():
    forest, _ = play(["R,AG"], extra_replies={"answer": "Ulm"})
    # "answer 1 title 1: text 1 2 title 2: text 2 Question: Where was Ann born?" 16 words in, 1 out.
    dollars = (16 * 0.000225 + 1 * 0.0009) / 1000
    for preset, expected in (
        (Settings(), 1 - 0.1 * (dollars / 6.02e-4 + 1.0)),
        (code("mao_arag"), 1 - 0.1 * (dollars * 2000 + 0.25)),
    ):
        costs = dataclasses.replace(preset.costs, alpha=0.1)
        mao_recipe = recipe(dataclasses.replace(preset, costs=costs))
        credit_N, _ = mao_recipe.credit(forest, mao_recipe.reward(forest))
        np.testing.assert_allclose(credit_N[0], expected, rtol=1e-6)


def test_planner_calls_share_the_answer_reward():
    forest, _ = play(
        ["QDS", "R,AG", "AG"], ["A?", "B #1?"], FILLED | {"summarise": "Ulm on Danube"}
    )
    mao_recipe = recipe(Settings(costs=Costs(alpha=0.2, token_weight=0.0, turn_weight=0.5)))
    credit_N, weight_N = mao_recipe.credit(forest, mao_recipe.reward(forest))
    f1 = 2 / 4  # one word of three is right, and the only gold word is among them
    expected = [f1 - 0.2 * 0.5 * 0.5, f1 - 0.2, f1, f1]
    np.testing.assert_allclose(credit_N, expected, rtol=1e-6)
    assert weight_N.all()


def test_copies_of_a_rollout_are_priced_separately():
    tape = Tape({"planner": ["AG", "R,AG"]})
    system = MAOARAG(style="mao_arag_tiny", top_k=2)
    forest = collect(system, single_chain, [ANN], tape.environment(), rollouts=2)
    reward_N = recipe(Settings(costs=Costs(**SEARCHES))).reward(forest)
    plans = {r.parsed.text: n for n, r in enumerate(forest.records) if r.parsed}
    assert (reward_N[plans["AG"]], reward_N[plans["R,AG"]]) == (0.0, -1.0)


@pytest.mark.parametrize("plan", [render_plan(plan) for plan in PLANS if len(plan) < 4])
def test_a_fixed_workflow_acts_as_a_planner_that_always_writes_it(plan):
    first, _, rest = plan.partition(",")
    plans = [first, *[rest] * 2] if first in (QDS, QDP) else [plan]
    planned, tape = play(plans, ["A?", "B #1?"], FILLED | {"select": "1"})
    other = Tape({}, replies=tape.replies)
    system = FixedWorkflow(MAOARAG("mao_arag_tiny", 2), tuple(plan.split(",")))
    fixed = collect(system, single_chain, [ANN], other.environment())
    assert other.log == [entry for entry in tape.log if entry[0] not in ("planner", "sub_planner")]
    assert end(fixed) == end(planned) and fixed.records[-1].state.strategy == plans[0]
    assert len(fixed.records) == 1, "no role acts"


def score_plans(kind: str = "", **options: Any) -> tuple[float, float]:
    """The share of right answers with the teacher's plans, and the first plans' mean credit."""
    questions = [q for split in world().questions.values() for q in split]
    questions = [q for q in questions if not kind or (q.kind == kind and q.hops > 1)][:80]
    sampler = TeacherSampler(Teacher(**options), tokenizer())
    executors = WorldExecutors(world(), style="mao_arag_tiny")
    environment = Environment(sampler, retriever(), executors)
    forest = collect(MAOARAG(style="mao_arag_tiny"), single_chain, questions, environment)
    mao_recipe = recipe(Settings(costs=Costs(alpha=0.1)))
    reward_N = mao_recipe.reward(forest)
    credit_N, _ = mao_recipe.credit(forest, reward_N)
    first_N = [r.role == "planner" for r in forest.records]
    return float(np.mean(reward_N[forest.leaf_N] == 1)), float(credit_N[first_N].mean())


def test_the_careful_planner_answers_nearly_all_questions():
    right, _ = score_plans()
    assert right > 0.95
    # Careless: any legal workflow, or a reader with irrelevant passages.
    assert score_plans("", p_random_plan=1.0)[0] < 0.6
    assert score_plans("", workflow=("R", "AG"))[0] < 0.7
    assert score_plans("chain", p_single_search=1.0)[0] < 0.3


def test_serial_fits_chains_and_parallel_fits_comparisons():
    serial, parallel = score_plans("chain"), score_plans("chain", p_swap_decomposition=1.0)
    assert serial[0] > 0.95 and parallel[0] < 0.4 and serial[1] > parallel[1]
    parallel = score_plans("comparison")
    serial = score_plans("comparison", p_swap_decomposition=1.0)
    # Both answer; only the latency differs. With the rows of table 4 as printed, the order of their
    # credits would be reversed.
    assert parallel[0] > 0.95 and serial[0] > 0.95
    assert parallel[1] - serial[1] == pytest.approx(0.1 * 0.25, abs=5e-3)
