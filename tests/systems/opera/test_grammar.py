import json

import pytest

from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.systems.opera.grammar import (
    Step,
    fill_placeholders,
    parse_analysis,
    parse_plan,
    parse_rewrite,
    references,
    render_plan,
)

TWO = (Step("Who made Jaws?"), Step("Where was [answer 1] born?", (1,)))
JSON = json.dumps(
    [
        {"subgoal_id": i, "subgoal": step.goal, "dependencies": list(step.declared_needs)}
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
def test_all_forms_of_a_plan_parse_equally(text):
    assert parse_plan(text) == ParsedAction("plan", TWO)


@pytest.mark.parametrize(
    "text",
    [
        *("", "Who made Jaws?", "[1, 2]", "{}", "[{}]", '[""]', "1)", "[["),
        # Of a truncated plan the last step, which gives the answer, may be missing.
        *(JSON[:-1], JSON[:-1] + ",", JSON[:-9], JSON.replace("}, {", "},\n{")[:-9]),
    ],
)
def test_text_without_a_whole_plan_is_malformed(text):
    assert parse_plan(text) == invalid_action("No Plan")


def test_json_may_be_lines_have_a_comma_too_many_or_lack_fields():
    text = '{"id": 1, "goal": "a", "depends_on": []}\n{"id": 2, "goal": "b", "depends_on": ["1"]}'
    assert parse_plan(text).args == (Step("a"), Step("b", (1,)))
    assert parse_plan('["a, ]", "b",]').args == (Step("a, ]"), Step("b"))
    # A quote that is never closed begins no string.
    assert parse_plan('He said "no: \\" [3, "c",\n]').args == (Step("c"),)
    assert parse_plan('["a [1,] b,]",]').args[0].goal == "a [1,] b,]"
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
def test_answers_replace_placeholders(step, answers, goal):
    assert fill_placeholders(step, answers) == goal


def verdict(**fields: object) -> str:
    return json.dumps(fields)


def yes(answer: str, analysis: str = "", score: float = 1.0) -> ParsedAction:
    return ParsedAction("yes", (answer,), analysis, format_score=pytest.approx(score))


def no(analysis: str = "", score: float = 1.0) -> ParsedAction:
    return ParsedAction("no", (), analysis, format_score=pytest.approx(score))


@pytest.mark.parametrize(
    ("text", "result"),
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
def test_a_verdict_parses(text, result):
    assert parse_analysis(text) == result


@pytest.mark.parametrize(
    ("text", "action", "score"),
    [
        (verdict(answer="Ulm", analysis="a"), "yes", 0.7),
        (verdict(answer="", analysis="a"), "no", 0.7),
        (verdict(status="maybe", answer="Ulm", analysis="a"), "yes", 0.5),
        (verdict(status="maybe", answer="", analysis="a"), "no", 0.5),
        *((text, "", 0.0) for text in ("", "Ulm", "{}", "nothing is known", "yesterday", "[]")),
    ],
)
def test_an_unknown_status_is_inferred_from_the_answer(text, action, score):
    result = parse_analysis(text)
    assert (result.action, result.error, result.valid) == (action, "No Status", False)
    assert result.format_score == pytest.approx(score)


def query(text: str, **fields: object) -> str:
    return json.dumps({"rewritten_query": text, **fields})


@pytest.mark.parametrize(
    ("text", "text_back", "strategy", "score", "error"),
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
        ('{"rewritten_query": "a "X" is", "strategy": ""}', 'a "X" is', "", 0.25, "No JSON"),
        ('{"rewritten_query": "Ann\'s film, 19', "Ann's film, 19", "", 0.25, "No JSON"),
        ("{'rewritten_query': 'Ann film'}", "Ann film", "", 0.25, "No JSON"),
        ('{\n"rewritten_query": "a b",\n"keywords": ["c",]}', "a b", "", 0.25, "No JSON"),
        ("note: a b", "note: a b", "", 0.25, "No JSON"),
        ("", "", "", 0.25 * 0.3, "Empty Query"),
    ],
)
def test_a_rewritten_query_parses(text, text_back, strategy, score, error):
    args = (text_back,) if text_back else ()
    score = pytest.approx(score)
    assert parse_rewrite(text) == ParsedAction("rewrite", args, strategy, not error, error, score)
