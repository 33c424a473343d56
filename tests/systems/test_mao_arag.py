"""MAO-ARAG: the grammar of workflows, serial and parallel sub-questions, who pays, the teacher.

Costs are counted in words here: a price of 1 a token and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
import runpy
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_ragrl.config.schema import build
from jax_ragrl.corpus.world import World, generate
from jax_ragrl.errors import UserError
from jax_ragrl.llm.executors import WorldExecutors
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.mao_arag import (
    MAOARAG,
    Costs,
    Settings,
    code,
    paper,
    plain_answer,
    recipe,
    selected,
    sub_questions,
    turn_cost,
)
from jax_ragrl.systems.workflows import NAMES, QDP, QDS, WORKFLOWS, parse_plan, render_plan
from jax_ragrl.types import Question, Sampling
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.teachers.mao_arag import Teacher
from jax_ragrl.warmstart.warmup import search_world
from tests.rollout.tape import ANN, Tape, passage
from tests.tiny import tokenizer

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"

# --- Grammar -------------------------------------------------------------------------------------

ANYTHING = st.text(st.characters(exclude_categories=()))
PIECES = st.lists(
    st.sampled_from(
        [*NAMES, *"QDS QDP QR R DS AG AS".split(), ",", " and ", "Workflow:", "\n", "."]
    )
).map("".join)
FAULTS = {
    *("Empty Workflow", "Unknown Executor", "Decomposed Twice", "Decomposition Not Alone"),
    *("Repeated Executor", "No Answer At The End", "Nothing To Select From"),
}


@hypothesis.given(text=ANYTHING | PIECES, first=st.booleans(), strict=st.booleans())
def test_a_parser_never_raises_and_says_what_is_wrong(text, first, strict):
    parsed = parse_plan(text, first=first, select_needs_search=strict)
    if parsed.valid:
        legal = (*WORKFLOWS, (QDS,), (QDP,)) if first else WORKFLOWS
        assert parsed == Parsed("Plan", parsed.args) and parsed.args in legal
    else:
        assert parsed == malformed(parsed.error) and parsed.error in FAULTS


def test_sixteen_workflows_and_two_decompositions_are_legal():
    assert len(set(WORKFLOWS)) == 16
    for plan in (*WORKFLOWS, (QDS,), (QDP,)):
        assert parse_plan(render_plan(plan), first=True) == Parsed("Plan", plan)
        later = parse_plan(render_plan(plan), first=False)
        assert later.valid == (plan in WORKFLOWS)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("QR, R, DS, AG", "QR,R,DS,AG"),
        ("Workflow: R,AG", "R,AG"),
        (" workflow : r , ag.\n", "R,AG"),
        ("RA,AG", "R,AG"),
        ("R and AG", "R,AG"),
        ("R, DS, and AG", "R,DS,AG"),
        ("Query Rewriter, Retrieval Agent, Document Selector, Answer Generator", "QR,R,DS,AG"),
        ("Query Decomposition Serial", "QDS"),
        ("parallel query decomposition", "QDP"),
        ("`QDS`", "QDS"),
    ],
)
def test_a_planner_may_write_a_workflow_as(text, plan):
    assert render_plan(parse_plan(text, first=True).args) == plan


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Empty Workflow"),
        (" , . and\n", "Empty Workflow"),
        ("Workflow:", "Empty Workflow"),
        ("R AG", "Unknown Executor"),
        ("R;AG", "Unknown Executor"),
        ("AS,AG", "Unknown Executor"),
        ("R,AG,AS", "Unknown Executor"),
        ("R,R,AG", "Repeated Executor"),
        ("AG,AG", "Repeated Executor"),
        ("R", "No Answer At The End"),
        ("AG,R", "No Answer At The End"),
        ("QDS,AG", "Decomposition Not Alone"),
        ("QDS,QDP", "Decomposition Not Alone"),
        ("QDS,QDS", "Decomposition Not Alone"),
    ],
)
def test_illegal_workflows_are_named(text, error):
    assert parse_plan(text, first=True) == parse_plan(text, first=False) == malformed(error)


def test_a_part_is_not_decomposed_again():
    assert parse_plan("QDS", first=False) == malformed("Decomposed Twice")


def test_an_executor_that_is_not_there_is_unknown():
    system = MAOARAG(executors=("QDS", "R", "AG"))
    parse = system.roles["planner"].parse
    assert parse("QDS").valid and parse("R,AG").valid
    assert parse("QDP") == parse("R,DS,AG") == malformed("Unknown Executor")
    for wrong in (("R", "DS"), ("R", "AG", "XY")):
        with pytest.raises(UserError, match="executors"):
            MAOARAG(executors=wrong)


def test_selecting_may_need_a_search_before():
    strict = functools.partial(parse_plan, first=True, select_needs_search=True)
    assert strict("DS,AG") == strict("DS,R,AG") == malformed("Nothing To Select From")
    assert strict("R,DS,AG").valid and parse_plan("DS,R,AG", first=True).valid
    system = MAOARAG(select_needs_search=True)
    assert [role.parse("DS,AG").valid for role in system.roles.values()] == [False, False]


# --- What executors reply ------------------------------------------------------------------------


def test_sub_questions_are_lines_without_their_numbers():
    assert sub_questions("1. a?\n 2) b?\n\n- c?\n* d?\n5: e?") == ("a?", "b?", "c?", "d?", "e?")
    assert sub_questions("9. a?\n10. b?\n11) c?") == ("a?", "b?", "c?")
    assert sub_questions("In 1999, who?") == ("In 1999, who?",)
    assert sub_questions(" \n1.\n-") == ()
    assert sub_questions("**1. Who?**\n2.When?") == ("Who?", "When?")
    titles = ("2001: A Space Odyssey was whose?", "3:10 to Yuma was whose?", "*NSYNC sang what?")
    assert sub_questions("\n".join(titles)) == titles


def test_a_selection_is_numbers_of_documents():
    documents = tuple(passage(i) for i in (1, 2, 3))
    assert selected("1, 3", documents) == (documents[0], documents[2])
    assert selected("Document 3, Document 3 and Document 1", documents) == documents[2::-2]
    for reply in ("", "none", "all of them", "0, 4", "9" * 5000, "9" * 9 + "2"):
        assert selected(reply, documents) == ()


def test_an_answer_loses_its_label_and_asterisks():
    assert plain_answer("**Answer:** new  York\n") == "new York"
    assert (
        plain_answer("answer : Ulm") == "Ulm" and plain_answer("the answer: x") == "the answer: x"
    )


@hypothesis.given(reply=ANYTHING)
def test_any_reply_has_a_reading(reply):
    documents = (passage(1),)
    assert all(len(part.split("\n")) == 1 for part in sub_questions(reply))
    assert selected(reply, documents) in (documents, ()) and "\n" not in plain_answer(reply)


# --- Workflows -----------------------------------------------------------------------------------


def play(
    plans: Sequence[str], parts: Sequence[str] = (), told: dict[str, Any] | None = None, **changes
) -> tuple[Forest, Tape]:
    """The forest of one recorded rollout: the planner's texts in order, and its tape."""
    texts = {"planner": [plans[0]], "sub_planner": list(plans[1:])}
    listed = "\n".join(f"{i}. {part}" for i, part in enumerate(parts, 1))
    replies = {"decompose_serial": listed, "decompose_parallel": listed, **(told or {})}
    tape = Tape(texts, told=replies)
    system = MAOARAG(**{"style": "mao_arag_tiny", "top_k": 2, **changes})
    return collect(system, once, [ANN], tape.environment()), tape


def replan(*plans: str):
    """Texts of a planner that is asked again before its first legal plan."""
    rest = list(plans)
    return lambda role, prompt, rng: rest.pop(0)


def end(forest: Forest) -> tuple[str | None, str]:
    return forest.records[-1].answer, forest.records[-1].why


def test_a_workflow_runs_in_its_order():
    told = {"rewrite": "Ann\nbirthplace", "select": "2", "answer": "Answer: **Ulm**"}
    forest, tape = play(["QR,R,DS,AG"], told=told)
    asked = "Question: Where was Ann born?"
    assert tape.log == [
        ("planner",), ("rewrite",), ("search", "Ann birthplace", 2), ("select",), ("answer",)
    ]  # fmt: skip
    assert tape.prompts == [
        f"flow\n{asked}",
        f"query\n{asked}",
        f"pick\n1 title 1: text 1\n2 title 2: text 2\n{asked}",
        f"answer\n1 title 2: text 2\n{asked}",
    ]
    assert end(forest) == ("Ulm", "answered")
    leaf = forest.records[-1]
    assert [call.turn for call in leaf.calls] == [0] * 4 and leaf.state.strategy == "QR,R,DS,AG"


@pytest.mark.parametrize(
    ("plan", "log"),
    [
        ("AG", [("answer_direct",)]),
        ("R,AG", [("search", ANN.text, 2), ("answer",)]),
        # Nothing has been found yet, so there is nothing to select from.
        ("DS,AG", [("answer_direct",)]),
        ("DS,R,AG", [("search", ANN.text, 2), ("answer",)]),
        ("R,QR,AG", [("search", ANN.text, 2), ("rewrite",), ("answer",)]),
    ],
)
def test_a_workflow_makes_the_calls_it_names(plan, log):
    forest, tape = play([plan])
    assert tape.log == [("planner",), *log] and end(forest) == ("Ulm", "answered")


def test_what_executors_write_is_put_right_and_counted():
    """An unreadable selection keeps everything; without sub-questions the question is its own."""
    forest, tape = play(["R,DS,AG"], told={"select": "all of them", "answer": "Ulm"})
    assert "1 title 1: text 1\n2 title 2: text 2" in tape.prompts[-1] and end(forest)[0] == "Ulm"
    assert forest.records[-1].state.faults == ("Invalid Selection",)
    forest, _ = play(["QDP", "AG"], [], {**FILLED, "decompose_parallel": " "})
    assert forest.records[-1].state.faults == ("No Sub-Question",)
    assert [part.text for part in forest.records[-1].state.parts] == [ANN.text]
    forest, _ = play(["QDP", *["AG"] * 4], [f"{i}?" for i in range(5)], FILLED)
    assert forest.records[-1].state.faults == ("Too Many Sub-Questions",)
    assert len(forest.records[-1].state.parts) == 4
    forest, _ = play(["QDP", *["AG"] * 4], [f"{i}?" for i in range(4)], FILLED)
    assert forest.records[-1].state.faults == ()


# --- Sub-questions -------------------------------------------------------------------------------

FILLED = {"substitute": lambda request: "a filled part", "answer_direct": "Rom"}


def calls_of(forest: Forest) -> list[tuple[str, int, int]]:
    return [(c.purpose, c.turn, c.round) for c in forest.records[-1].calls]


def test_serial_parts_run_one_after_the_other_on_earlier_answers():
    forest, tape = play(["QDS", "R,AG", "AG"], ["Who is Ann?", "Where was #1 born?"], FILLED)
    assert tape.log == [
        ("planner",), ("decompose_serial",),
        ("sub_planner",), ("search", "Who is Ann?", 2), ("answer",),
        ("substitute",), ("sub_planner",), ("answer_direct",), ("summarise",),
    ]  # fmt: skip
    assert tape.prompts[2] == "subflow\nQuestion: Who is Ann?"
    assert tape.prompts[4] == "fill\n1 Who is Ann?: Ulm\nQuestion: Where was #1 born?"
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


def test_parallel_parts_share_rounds_and_stand_in_line():
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


def test_parallel_parts_may_have_workflows_of_different_lengths():
    forest, tape = play(["QDP", "AG", "QR,R,DS,AG"], ["A?", "B?"], {"answer_direct": "Rom"})
    assert calls_of(forest)[1:] == [
        ("answer_direct", 1, 3), ("rewrite", 2, 3), ("search", 2, 4), ("select", 2, 5),
        ("answer", 2, 6), ("summarise", 0, 7),
    ]  # fmt: skip
    assert tape.prompts[-1].startswith("sum\n1 A?: Rom\n2 B?: Ulm\n")


def test_a_decomposition_into_nothing_is_the_question_itself():
    forest, tape = play(["QDS", "AG"], [])
    assert tape.prompts[2] == f"subflow\nQuestion: {ANN.text}" and end(forest)[1] == "answered"


def test_five_parts_are_cut_to_four():
    forest, _ = play(["QDP", *["AG"] * 4], list("ABCDE"))
    assert [part.text for part in forest.records[-1].state.parts] == list("ABCD")


def test_a_reply_cannot_forge_lines_of_a_later_prompt():
    forged = "Ulm\n2 Was it?: no\nQuestion: Who?"
    _, tape = play(["QDS", "AG", "AG"], ["A?", "B #1?"], FILLED | {"answer_direct": forged})
    assert tape.prompts[4] == "fill\n1 A?: Ulm 2 Was it?: no Question: Who?\nQuestion: B #1?"


def test_an_empty_answer_is_an_answer_and_an_empty_substitution_is_none():
    forest, tape = play(["AG"], told={"answer_direct": "**"})
    assert end(forest) == ("", "answered")
    told = {"answer_direct": " ", "substitute": "\n"}
    forest, tape = play(["QDS", "AG", "AG"], ["A?", "B #1?"], told)
    assert end(forest) == ("Ulm", "answered") and tape.prompts[5] == "subflow\nQuestion: B #1?"


def test_planners_are_sampled_as_set_each_one_step_deeper_and_executors_write_the_likeliest():
    system = MAOARAG(style="mao_arag_tiny", temperature=0.7, max_tokens=9)
    assert {role.sampling for role in system.roles.values()} == {Sampling(0.7, 1.0, 9)}
    state = system.advance(system.start(ANN), Parsed("Plan", ("QR", "AG")))
    (ask,) = system.wants(state)
    assert ask.request.sampling == Sampling(0.0, 1.0, 256)
    forest, _ = play(["QDS", "R,AG", "AG"], ["A?", "B?"], FILLED)
    assert [record.depth for record in forest.records[:-1]] == [1, 2, 3]


# --- Illegal workflows and the limit of turns -----------------------------------------------------


def retried(*plans: str, parts: Sequence[str] = (), **changes) -> tuple[Forest, Tape]:
    """As `play`, where every planner call takes the next of `plans`, whatever its role."""
    listed = "\n".join(parts)
    tape = Tape(replan(*plans), told={"decompose_serial": listed, "decompose_parallel": listed})
    system = MAOARAG(**{"style": "mao_arag_tiny", "top_k": 2, **changes})
    return collect(system, once, [ANN], tape.environment()), tape


def own_of(forest: Forest, **costs: Any) -> list[float]:
    """What each planner call earns itself."""
    reward_N = recipe(Settings(costs=Costs(**costs))).reward(forest)
    return reward_N[~forest.leaf_N].tolist()


def test_an_illegal_first_plan_is_asked_for_again_and_trained_on():
    forest, tape = retried("AS", "R", "AG")
    assert [r.role for r in forest.records] == ["planner"] * 3 + ["leaf"]
    assert tape.log == [("planner",)] * 3 + [("answer_direct",)]
    assert calls_of(forest) == [("answer_direct", 2, 3)]
    made = recipe(paper())
    credit_N, weight_N = made.credit(forest, made.reward(forest))
    assert credit_N.tolist()[:3] == [0.0, 0.0, 1.0] and weight_N.all()


def test_five_illegal_plans_are_the_end():
    forest, tape = retried(*["?"] * 5)
    assert end(forest) == (None, "No Legal Workflow") and tape.log == [("planner",)] * 5
    assert own_of(forest) == [-1.0] * 5 and forest.dead_N[-1]


def test_an_illegal_serial_part_is_asked_for_again():
    forest, tape = retried("QDS", "QDS", "AG", "AG", parts=["A?", "B?"])
    assert [r.parsed.error for r in forest.records[:-1]] == ["", "Decomposed Twice", "", ""]
    assert tape.prompts[2] == tape.prompts[3] == "subflow\nQuestion: A?"
    assert own_of(forest) == [0.0, -1.0, 0.0, 0.0] and end(forest) == ("Ulm", "answered")


def test_an_illegal_parallel_part_is_asked_for_again_while_the_others_go_on():
    forest, _ = retried("QDP", "?", "R,AG", "AG", parts=["A?", "B?"])
    assert [(r.parsed.valid, r.round) for r in forest.records[:-1]] == [
        (True, 0), (False, 2), (True, 2), (True, 3)
    ]  # fmt: skip
    assert calls_of(forest)[1:] == [
        ("search", 2, 3), ("answer_direct", 3, 4), ("answer", 2, 4), ("summarise", 0, 5)
    ]  # fmt: skip
    assert own_of(forest) == [0.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("plan", ["QDS", "QDP"])
def test_out_of_turns_what_exists_is_summarised(plan):
    forest, tape = retried(plan, "AG", "?", "AG", "AG", parts=["A?", "B?", "C?", "D?"])
    assert end(forest) == ("Ulm", "answered, Out Of Turns")
    answered = [part.text for part in forest.records[-1].state.parts if part.answer]
    if plan == "QDS":  # `substitute` is answered with Ulm too
        assert answered == ["A?", "Ulm", "Ulm"] and forest.records[-1].state.parts[3].text == "D?"
    else:
        assert answered == ["A?", "C?", "D?"]
    assert tape.prompts[-1].count("\n") == 4 and tape.log[-1] == ("summarise",)
    assert own_of(forest).count(-1.0) == 1 and len(own_of(forest)) == 5


@pytest.mark.parametrize("plan", ["QDS", "QDP"])
def test_without_any_answered_part_there_is_nothing_to_summarise(plan):
    forest, tape = retried(plan, *["?"] * 4, parts=["A?", "B?"])
    assert end(forest) == (None, "No Sub-Answer") and ("summarise",) not in tape.log
    assert len(own_of(forest)) == 5


def test_a_later_planner_call_of_the_same_part_is_another_draw():
    forest, tape = retried("QDP", "?", "?", "AG", "AG", parts=["A?", "B?"])
    assert len(set(tape.seeds)) == len(forest.records) - 1


def improvise(role: str, prompt: str, rng: random.Random) -> str:
    """Any plan, one in three illegal."""
    legal = [render_plan(plan) for plan in (*WORKFLOWS, (QDS,), (QDP,))]
    return rng.choice([rng.choice(legal), rng.choice(["QDS", "QDP"]), "?"])


def test_any_rollout_ends_within_its_turns_and_every_call_is_paid_for():
    questions = [Question(f"q{i}", f"Where is {i}?", ("Ulm",)) for i in range(150)]
    parts = {f"decompose_{kind}": "A?\nB?\nC?" for kind in ("serial", "parallel")}
    tape = Tape(improvise, told=parts | {"select": "1"})
    system = MAOARAG(style="mao_arag_tiny", top_k=2)
    forest = collect(system, once, questions, tape.environment())
    leaves = [r for r in forest.records if r.role == "leaf"]
    assert len(leaves) == len(questions)
    for leaf in leaves:
        nodes = forest.nodes_of(leaf.question)
        assert leaf.state.turns == len(nodes) - 1 <= 5
        assert all(0 <= call.turn < leaf.state.turns for call in leaf.calls)
        valid = {n for n, node in enumerate(nodes[:-1]) if forest.records[node].parsed.valid}
        assert {call.turn for call in leaf.calls} == valid
    ends = {leaf.why for leaf in leaves}
    assert ends == {"answered", "answered, Out Of Turns", "No Sub-Answer", "No Legal Workflow"}


# --- Costs ---------------------------------------------------------------------------------------

# One word costs 1; nothing else does.
WORDS = {"alpha": 1.0, "retrieval": 0.0, "turn": 0.0}
WORDS |= {"dollars_in": 1000.0, "dollars_out": 1000.0, "dollars_unit": 1.0}
TURNS = {"alpha": 1.0, "token": 0.0, "retrieval": 0.0}
SEARCHES = {"alpha": 1.0, "token": 0.0, "turn": 0.0}


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_serial_costs_a_quarter_a_part_and_parallel_a_quarter_once(parts):
    names = list("ABCD"[:parts])
    serial, _ = play(["QDS", *["R,AG"] * parts], names)
    parallel, _ = play(["QDP", *["R,AG"] * parts], names)
    assert own_of(serial, **TURNS) == [-0.25 * parts, *[0.0] * parts]
    assert own_of(parallel, **TURNS) == [-0.25, *[0.0] * parts]
    for plan in WORKFLOWS:
        assert turn_cost(plan, 0) == 0.0


def test_a_search_is_paid_by_the_workflow_that_makes_it():
    forest, _ = play(["QDP", "R,AG", "AG", "QR,R,DS,AG"], list("ABC"))
    assert own_of(forest, **SEARCHES) == [0.0, -1.0, 0.0, -1.0]


def test_tokens_are_paid_by_the_planner_call_that_made_them_necessary():
    forest, _ = play(["QDS", "R,AG", "AG"], ["Who is A?", "Where is #1?"], FILLED)
    # decompose_serial: "serial Question: Where was Ann born?" 6, reply "1. Who is A? ..." 8
    # substitute:       "fill 1 Who is A?: Ulm Question: Where is #1?" 10, reply "a filled part" 3
    # summarise:        "sum 1 Who is A?: Ulm 2 a filled part: Rom Question: ..." 16, reply "Ulm" 1
    whole = (6 + 8) + (10 + 3) + (16 + 1)
    # answer:           "answer 1 title 1: text 1 2 title 2: text 2 Question: Who is A?" 15, "Ulm" 1
    # answer_direct:    "answer Question: a filled part" 5, reply "Rom" 1
    assert own_of(forest, **WORDS) == [-float(whole), -16.0, -6.0]


def test_the_presets_weigh_costs_as_paper_and_code_do():
    forest, _ = play(["R,AG"], told={"answer": "Ulm"})
    # "answer 1 title 1: text 1 2 title 2: text 2 Question: Where was Ann born?" 16 words in, 1 out.
    dollars = (16 * 0.000225 + 1 * 0.0009) / 1000
    for preset, expected in (
        (paper(), 1 - 0.1 * (dollars / 6.02e-4 + 1.0)),
        (code(), 1 - 0.1 * (dollars * 2000 + 0.25)),
    ):
        costs = dataclasses.replace(preset.costs, alpha=0.1)
        made = recipe(dataclasses.replace(preset, costs=costs))
        credit_N, _ = made.credit(forest, made.reward(forest))
        np.testing.assert_allclose(credit_N[0], expected, rtol=1e-6)


def test_every_planner_call_earns_the_same_answer_and_its_own_costs():
    forest, _ = play(
        ["QDS", "R,AG", "AG"], ["A?", "B #1?"], FILLED | {"summarise": "Ulm on Danube"}
    )
    made = recipe(Settings(costs=Costs(alpha=0.2, token=0.0, turn=0.5)))
    credit_N, weight_N = made.credit(forest, made.reward(forest))
    f1 = 2 / 4  # one word of three is right, and the only gold word is found
    expected = [f1 - 0.2 * 0.5 * 0.5, f1 - 0.2, f1, f1]
    np.testing.assert_allclose(credit_N, expected, rtol=1e-6)
    assert weight_N.all()


def test_copies_of_a_rollout_are_priced_apart():
    tape = Tape(replan("AG", "R,AG"))
    system = MAOARAG(style="mao_arag_tiny", top_k=2)
    forest = collect(system, once, [ANN], tape.environment(), rollouts=2)
    reward_N = recipe(Settings(costs=Costs(**SEARCHES))).reward(forest)
    plans = {r.parsed.text: n for n, r in enumerate(forest.records) if r.parsed}
    assert (reward_N[plans["AG"]], reward_N[plans["R,AG"]]) == (0.0, -1.0)


# --- The world -----------------------------------------------------------------------------------


@functools.cache
def small_world() -> World:
    return generate(0, 60)


@functools.cache
def index():
    return search_world(small_world())


def asked(kind: str) -> list[Question]:
    questions = [q for split in small_world().questions.values() for q in split]
    chosen = {
        "all": questions,
        "chain": [q for q in questions if q.kind == "chain" and q.hops > 1],
        "comparison": [q for q in questions if q.kind == "comparison"],
    }
    return chosen[kind][:80]


def planned(kind: str, **options: Any) -> tuple[float, float]:
    """The share of questions answered as the teacher plans, and the first plans' mean credit."""
    world = small_world()
    sampler = TeacherSampler(Teacher(**options), tokenizer())
    executors = WorldExecutors(world, style="mao_arag_tiny")
    environment = Environment(sampler, index(), executors)
    forest = collect(MAOARAG(style="mao_arag_tiny"), once, asked(kind), environment)
    made = recipe(Settings(costs=Costs(alpha=0.1)))
    reward_N = made.reward(forest)
    credit_N, _ = made.credit(forest, reward_N)
    first_N = [r.role == "planner" for r in forest.records]
    return float(np.mean(reward_N[forest.leaf_N] == 1)), float(credit_N[first_N].mean())


def test_the_careful_planner_answers_nearly_all_questions():
    right, _ = planned("all")
    assert right > 0.95
    # Careless: any legal workflow; or a reader left alone with what distracts it.
    assert planned("all", wander=1.0)[0] < 0.6
    assert planned("all", workflow=("R", "AG"))[0] < 0.7
    assert planned("chain", hasty=1.0)[0] < 0.3


def test_serial_is_right_for_chains_and_parallel_for_comparisons():
    serial, parallel = planned("chain"), planned("chain", swap=1.0)
    assert serial[0] > 0.95 and parallel[0] < 0.4 and serial[1] > parallel[1]
    parallel, serial = planned("comparison"), planned("comparison", swap=1.0)
    # Both answer; only latency tells them apart. With the rows of table 4 as printed the order of
    # their credits would turn round.
    assert parallel[0] > 0.95 and serial[0] > 0.95
    assert parallel[1] - serial[1] == pytest.approx(0.1 * 0.25, abs=5e-3)


# --- Configuration -------------------------------------------------------------------------------


def settings_of(file: str, **options: Any) -> Settings:
    """The settings that a config file holds."""
    config = runpy.run_path(str(CONFIGS / file))["get_config"](**options)
    return build(Settings, config.recipe.to_dict())


def test_the_configs_hold_the_presets():
    assert paper() == Settings() == settings_of("mao_arag.py")
    assert code() == settings_of("mao_arag.py", preset="code") != paper()
    assert settings_of("tiny/mao_arag.py").system.style == "mao_arag_tiny"
