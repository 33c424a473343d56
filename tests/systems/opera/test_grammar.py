from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.opera.grammar import (
    Step,
    filled,
    parse_analysis,
    parse_plan,
    parse_rewrite,
    references,
    render_analysis,
    render_plan,
    render_rewrite,
)

# --- Plans --------------------------------------------------------------------------------------

TWO = (Step("Who made Jaws?"), Step("Where was [answer 1] born?", (1,)))
JSON = json.dumps(
    [
        {"subgoal_id": i, "subgoal": step.goal, "dependencies": list(step.declared)}
        for i, step in enumerate(TWO, start=1)
    ]
)


@pytest.mark.parametrize(
    "text",
    [
        JSON,
        f"Here is [1] my plan:\n```json\n{JSON}\n```",
        json.dumps({"sub_questions": json.loads(JSON)}),
        json.dumps({"steps": json.loads(JSON)}),
        "\n".join(json.dumps(item) for item in json.loads(JSON)),
        "```\n" + ",\n".join(json.dumps(item) for item in json.loads(JSON)) + "\n```",
        JSON[:-2] + ",},\n]",
        json.dumps({"question": "Where?", "steps": json.loads(JSON)})[:-2] + ", ]}",
        json.dumps([step.goal for step in TWO]),
        json.dumps({"plan": [step.goal for step in TWO]}),
        "".join(f"<subquestion>{step.goal}</subquestion>" for step in TWO),
        "<plan>\n<subquestion id='1'>Who made Jaws?</subquestion>\n"
        "<SUBQUESTION>\nWhere was [answer 1] born? </SUBQUESTION>",
        "1) Who made Jaws?\n2) Where was [answer 1] born?",
        "Plan\n 1. Who made Jaws?\n\n 2. Where was [answer 1] born? {deps: [1]}",
        render_plan([step.goal for step in TWO]),
    ],
)
def test_every_form_of_a_plan_reads_alike(text):
    assert parse_plan(text) == Parsed("plan", TWO)


@pytest.mark.parametrize("text", ["", "Who made Jaws?", "[1, 2]", "{}", "[{}]", '[""]', "1)", "[["])
def test_what_is_no_plan_is_refused(text):
    assert parse_plan(text) == malformed("No Plan")


@pytest.mark.parametrize(
    "text", [JSON[:-1], JSON[:-1] + ",", JSON[:-9], JSON.replace("}, {", "},\n{")[:-9]]
)
def test_a_plan_that_is_cut_off_is_none(text):
    """Its last step, the one with the answer, may be missing."""
    assert parse_plan(text) == malformed("No Plan")


def test_lines_of_json_say_which_steps_they_need():
    text = '{"id": 1, "goal": "a", "depends_on": []}\n{"id": 2, "goal": "b", "depends_on": ["1"]}'
    assert parse_plan(text).args == (Step("a"), Step("b", (1,)))


def test_a_comma_in_a_sub_goal_stays():
    assert parse_plan('["a [1,] b,]",]').args[0].goal == "a [1,] b,]"


def test_fields_that_a_sub_goal_should_have_are_counted():
    items = [{"subgoal": "a"}, {"id": 2, "question": "b", "depends_on": ["step 1", 3, None]}]
    assert parse_plan(json.dumps(items)).args == (Step("a", (), 2), Step("b", (1, 3), 0))
    assert parse_plan('[{"subgoal": "a", "subgoal_id": 1, "dependencies": 2}]').args[0].missing == 0


@pytest.mark.parametrize(
    ("goal", "steps"),
    [
        ("where [answer 1] is", (1,)),
        ("where [ANSWER_1] is", (1,)),
        ("where [Answer2] and [answer 1] are", (2, 1)),
        ("where [the city from step 3] is", (3,)),
        ("birthplace of [1]", (1,)),
        ("[1] or [1]", (1,)),
        ("where [it] is [x1] [answer] [answer 1000]", ()),
    ],
)
def test_placeholders(goal, steps):
    assert references(goal) == steps


@pytest.mark.parametrize(
    ("step", "answers", "goal"),
    [
        (Step("a"), (), "a"),
        (Step("a of [answer 1]", (1,)), ("Ulm",), "a of Ulm"),
        (Step("a of [city from step 1], [2]", ()), ("Ulm", r"\1 [1]"), r"a of Ulm, \1 [1]"),
        (Step("a", (1,)), ("Ulm",), "a (given Ulm)"),
        (Step("a [1]", (1, 2)), ("Ulm", "Rom"), "a Ulm (given Rom)"),
        (Step("a", (1, 2, 7, 0)), ("Ulm",), "a (given Ulm)"),  # itself, later ones, nothing
        (Step("a [1]", (1,)), ("",), None),  # failed
        (Step("a", (2,)), ("Ulm", ""), None),
        (Step("a [2]"), ("Ulm",), None),  # itself
        (Step("a [0]"), ("Ulm",), None),
    ],
)
def test_answers_take_the_places_of_placeholders(step, answers, goal):
    assert filled(step, answers) == goal


# --- Analysis -----------------------------------------------------------------------------------


def verdict(**fields: object) -> str:
    return json.dumps(fields)


def yes(answer: str, analysis: str = "", score: float = 1.0) -> Parsed:
    return Parsed("yes", (answer,), analysis, format_score=pytest.approx(score))


def no(analysis: str = "", score: float = 1.0) -> Parsed:
    return Parsed("no", (), analysis, format_score=pytest.approx(score))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (verdict(status="yes", answer="Ulm", analysis="a"), yes("Ulm", "a")),
        (verdict(status="YES", answer=1950, analysis="a"), yes("1950", "a")),
        ("so [1] " + verdict(status="no", answer="", analysis="a"), no("a")),
        (verdict(status="no", answer="Ulm", analysis="a"), no("a", 0.9)),
        (verdict(status="yes", answer="", analysis="a"), no("a", 0.8)),
        (verdict(status="yes", answer=None, analysis="a"), no("a", 0.8)),
        (verdict(status="yes", answer="Ulm"), yes("Ulm", "", 0.7)),
        ('{"status": "yes", "answer": "Ulm", "ana', yes("Ulm", "", 0.7)),
        ("Status: no, since nothing is there", no("", 0.7)),
        ("Ann is from Ulm\nyes: Ulm", yes("Ulm", "Ann is from Ulm")),
        ("a\nyes: b\nc\nYes, Ulm", yes("Ulm", "a\nyes: b\nc")),
        ("same: a, a is no\nyes: no", yes("no", "same: a, a is no")),
        ("nothing\nno", no("nothing")),
        ("no, nothing there", no("nothing there")),
        ("Nobody knows\nno", no("Nobody knows")),
        ("yes", no("", 0.7 * 0.8)),
    ],
)
def test_a_verdict_reads(text, parsed):
    assert parse_analysis(text) == parsed


@pytest.mark.parametrize(
    ("text", "action", "score"),
    [
        (verdict(answer="Ulm", analysis="a"), "yes", 0.7),
        (verdict(answer="", analysis="a"), "no", 0.7),
        (verdict(status="maybe", answer="Ulm", analysis="a"), "yes", 0.5),
        (verdict(status="maybe", answer="", analysis="a"), "no", 0.5),
    ],
)
def test_a_status_that_says_neither_is_repaired_from_the_answer_and_counted(text, action, score):
    parsed = parse_analysis(text)
    assert (parsed.action, parsed.error, parsed.valid) == (action, "No Status", False)
    assert parsed.format_score == pytest.approx(score)


@pytest.mark.parametrize("text", ["", "Ulm", "{}", "nothing is known", "yesterday", "[]"])
def test_what_is_no_verdict_is_refused(text):
    assert parse_analysis(text) == malformed("No Status")


# --- Rewritten queries --------------------------------------------------------------------------


def query(text: str, **fields: object) -> str:
    return json.dumps({"rewritten_query": text, **fields})


@pytest.mark.parametrize(
    ("text", "written", "strategy", "score", "error"),
    [
        (query("a b", strategy="expand", keywords=[]), "a b", "expand", 1, ""),
        (query("a b", strategy="Odd", keywords=[]), "a b", "Odd", 0.9, ""),
        (query("a b", strategy="expand"), "a b", "expand", 0.5, ""),
        (query("a b"), "a b", "", 0.25, ""),
        (query("", strategy="expand", keywords=[]), "", "expand", 0.3, "Empty Query"),
        ("rephrase: a b", "a b", "rephrase", 1, ""),
        ("Rephrase: a b\nand more", "a b", "rephrase", 1, ""),
        ("rephrase:", "", "rephrase", 0.3, "Empty Query"),
        ('I would ask "a b".', "a b", "", 0.25, "No JSON"),
        ("a b\nc", "a b", "", 0.25, "No JSON"),
        (
            '{"rewritten_query": "who "X" is", "strategy": "expand"}',
            'who "X" is',
            "",
            0.25,
            "No JSON",
        ),
        ('{"rewritten_query": "Ann\'s film, 19', "Ann's film, 19", "", 0.25, "No JSON"),
        ("{'rewritten_query': 'Ann film'}", "Ann film", "", 0.25, "No JSON"),
        ('{\n"rewritten_query": "a b",\n"keywords": ["c",]}', "a b", "", 0.25, "No JSON"),
        ("note: a b", "note: a b", "", 0.25, "No JSON"),
        ("", "", "", 0.25 * 0.3, "Empty Query"),
    ],
)
def test_a_rewritten_query_reads(text, written, strategy, score, error):
    args = (written,) if written else ()
    score = pytest.approx(score)
    assert parse_rewrite(text) == Parsed("rewrite", args, strategy, not error, error, score)


# --- All of them --------------------------------------------------------------------------------

PIECES = ["[", "]", "{", "}", '"', ":", ",", "status", "answer", "yes", "no", "1", ") ", "\n", "a",
          "[answer 1]", "<subquestion>", "</subquestion>", "rewritten_query"]  # fmt: skip


@hypothesis.given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_any_text_has_a_parse(text):
    plan = parse_plan(text)
    assert plan.valid == bool(plan.args) and all(step.goal for step in plan.args)
    assert parse_analysis(text).action in ("yes", "no", "")
    assert 0 <= parse_rewrite(text).format_score <= 1


@pytest.mark.parametrize("parse", [parse_plan, parse_analysis, parse_rewrite])
@pytest.mark.parametrize("text", ["[" * 20000, '{"a":' * 20000, f"[{'9' * 5000}]", "\ud800"])
def test_hostile_texts_have_a_parse(parse, text):
    assert isinstance(parse(text), Parsed)


def test_what_is_rendered_reads_back():
    steps = Step("a of B"), Step("c of [1]", (1,))
    assert parse_plan(render_plan(["a of B", "c of [1]"])).args == steps
    assert parse_analysis(render_analysis("a of B is C", "C")) == yes("C", "a of B is C")
    assert parse_analysis(render_analysis("nothing")) == no("nothing")
    assert parse_rewrite(render_rewrite("expand", "a b")).args == ("a b",)
