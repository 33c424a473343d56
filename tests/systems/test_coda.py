import dataclasses

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_normalised
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.tree import build_forest
from jax_ragrl.systems import coda
from jax_ragrl.systems.coda import (
    EXECUTOR,
    PLANNER,
    CoDA,
    answer_reward,
    format_reward,
    refine_reward,
)
from jax_ragrl.systems.tags import render_turn, tag_contents
from jax_ragrl.text.prompts import user_turn
from tests.rollout.tape import ANN, BOB, FULL, leaves_of, passage, talk
from tests.systems.test_presets import code

SYSTEM = CoDA("coda_tiny", top_k=2, as_chat_turns=True)
PAPER, CODE = coda.Settings(), code("coda")
parse_planner, parse_executor = (SYSTEM.roles[name].parse for name in (PLANNER, EXECUTOR))

TASK = render_turn(think="1", task="birthplace of Ann")
SEARCH = render_turn(think="born", search="Ann born")
REFINED = render_turn(refine="Ann was born in Ulm", answer="Ulm")
FINAL = render_turn(think="done", answer="Ulm")
DOCUMENTS = "told 1 title 1: text 1\n2 title 2: text 2"


@pytest.mark.parametrize(
    ("parse", "text", "action"),
    [
        (parse_planner, TASK, ParsedAction("task", ("birthplace of Ann",), "1")),
        (parse_planner, FINAL, ParsedAction("answer", ("Ulm",), "done")),
        (parse_executor, SEARCH, ParsedAction("search", ("Ann born",), "born")),
        (parse_executor, REFINED, ParsedAction("answer", ("Ulm",), "")),
        (parse_planner, "<answer> two\nlines </answer>", ParsedAction("answer", ("two\nlines",))),
        (parse_planner, "<task>a</task><answer>b</answer>", ParsedAction("task", ("a",))),
        (parse_planner, "<task>a<task>b</task>", ParsedAction("task", ("a<task>b",))),
        (parse_planner, "</task><answer>b</answer>", ParsedAction("answer", ("b",))),
        (parse_planner, "<task>a</answer><answer>b</answer>", ParsedAction("answer", ("b",))),
        (parse_planner, "<search>a</search>", invalid_action("No Action")),
        (parse_executor, "<task>a</task>", invalid_action("No Action")),
        (parse_planner, "", invalid_action("No Action")),
        (parse_planner, "<task>a", invalid_action("No Action")),
        (parse_planner, "<Task>a</Task>", invalid_action("No Action")),
        (parse_planner, "<task> \n</task><answer>b</answer>", invalid_action("Empty Action")),
    ],
)
def test_a_turn_parses_as_its_first_action(parse, text, action):
    assert parse(text) == action


def test_a_task_has_its_own_context():
    texts = {PLANNER: [TASK, FINAL], EXECUTOR: [SEARCH, REFINED]}
    forest, tape = talk(SYSTEM, texts)
    assert forest.records[-1].state.faults == ()
    assert tape.log == [
        *[("planner",), ("executor",), ("search", "Ann born", 2), ("executor",), ("planner",)]
    ]
    planner, executor = "delegate\nQuestion: " + ANN.text, "search\nQuestion: birthplace of Ann"
    assert tape.contexts == [
        (PLANNER, planner, ()),
        (EXECUTOR, executor, ()),
        (EXECUTOR, executor, (SEARCH, DOCUMENTS)),
        (PLANNER, planner, (TASK, "told Result: Ulm")),
    ]
    assert leaves_of(forest) == [("Ulm", "answered")]
    assert [r.depth for r in forest.records] == [1, 2, 3, 4, 5]


def test_contexts_only_grow_and_tasks_start_new_ones():
    texts = {PLANNER: [TASK, TASK, FINAL], EXECUTOR: [SEARCH, SEARCH, REFINED] + [SEARCH, REFINED]}
    _, tape = talk(SYSTEM, texts)
    for role, turns in ((PLANNER, [0, 2, 4]), (EXECUTOR, [0, 2, 4, 0, 2])):
        afters = [after for name, _, after in tape.contexts if name == role]
        assert [len(after) for after in afters] == turns
        assert all(b[: len(a)] == a for a, b in zip(afters, afters[1:], strict=False) if b)


def test_an_invalid_turn_gets_a_message_and_counts():
    texts = {PLANNER: ["hm", TASK, "hm", "hm"], EXECUTOR: ["<task>a</task>", SEARCH, "hm"]}
    system = dataclasses.replace(SYSTEM, max_turns=4, max_executor_turns=3)
    forest, tape = talk(system, texts)
    assert tape.contexts[1][2] == ("hm", "told again")
    assert tape.contexts[3][2] == ("<task>a</task>", "told again")
    assert leaves_of(forest) == [(None, "Out of Turns")]
    errors = [r.parsed.error for r in forest.records if r.parsed]
    assert errors == ["No Action", "", "No Action", "", "No Action", "No Action", "No Action"]


@pytest.mark.parametrize("last", [SEARCH, "hm"])
def test_an_executor_that_never_answers_returns_nothing(last):
    texts = {PLANNER: [TASK, FINAL], EXECUTOR: [SEARCH, SEARCH, last]}
    system = dataclasses.replace(SYSTEM, max_executor_turns=3)
    forest, tape = talk(system, texts)
    assert tape.contexts[-1][2] == (TASK, "told Result: ")
    assert forest.records[-1].state.faults == ("Executor Out of Turns",)
    assert tape.log.count(("search", "Ann born", 2)) == 2  # a third could not be read


@pytest.mark.parametrize("last", [TASK, "hm"])
def test_a_planner_without_an_answer_in_its_last_turn_is_out_of_turns(last):
    texts = {PLANNER: [TASK, last], EXECUTOR: [SEARCH, REFINED]}
    forest, tape = talk(dataclasses.replace(SYSTEM, max_turns=2), texts)
    assert leaves_of(forest) == [(None, "Out of Turns")] and forest.unanswered_N.tolist()[-1]
    assert tape.log[-1] == ("planner",)
    faults = [r.parse_error for r in forest.records[-2:]]
    assert faults == (["", ""] if last == TASK else ["No Action", ""])
    system = dataclasses.replace(SYSTEM, max_turns=2, max_executor_turns=2)
    answers = {PLANNER: [TASK, FINAL], EXECUTOR: [SEARCH, REFINED]}
    assert leaves_of(talk(system, answers)[0]) == [("Ulm", "answered")], "in the last turns"


@pytest.mark.parametrize(
    ("full", "end"), [(PLANNER, (None, "Prompt Too Long")), (EXECUTOR, ("Ulm", "answered"))]
)
def test_a_full_context_ends_its_agent(full, end):
    texts = {PLANNER: [TASK, FINAL], EXECUTOR: [SEARCH, REFINED], full: [FULL]}
    forest, tape = talk(SYSTEM, texts)
    assert leaves_of(forest) == [end]
    assert tape.contexts[-1][2] == ((TASK, "told Result: ") if full == EXECUTOR else ())


def test_plain_text_continues_and_stops_at_tags():
    system = dataclasses.replace(SYSTEM, style="coda", as_chat_turns=False)
    _, tape = talk(system, {PLANNER: [TASK, FINAL], EXECUTOR: [SEARCH, REFINED]})
    observation = tape.contexts[2][2][1], tape.contexts[3][2][1]
    documents = "Doc 1 (Title: title 1) text 1\n\nDoc 2 (Title: title 2) text 2"
    assert observation[0] == f"told \n<documents>\n{documents}\n</documents>\n"
    assert observation[1] == "told \n<result>Ulm</result>\n"
    assert {r.stop_strings for r in system.roles.values()} == {
        *[("</task>", "</answer>"), ("</search>", "</answer>")]
    }
    assert not any(role.as_chat_turns for role in system.roles.values())


def test_the_answer_reward_is_six_f1_minus_three():
    assert answer_reward("Ulm", ("Ulm",)) == 3.0
    assert answer_reward("Rom", ("Ulm",)) == answer_reward(None, ("Ulm",)) == -3.0
    assert answer_reward("old Ulm", ("Ulm",)) == pytest.approx(6 * 2 / 3 - 3)


GOOD, BAD = SEARCH + REFINED, SEARCH + render_turn(answer="Ulm")


@pytest.mark.parametrize(
    ("planner", "executors", "together", "apart"),
    [
        (TASK + FINAL, [GOOD], 2.0, 2.0),
        (TASK + FINAL, [GOOD, BAD], 1.0, 1.5),
        (TASK + FINAL, [BAD], 1.0, 1.0),
        (FINAL, [], 0.0, 0.0),  # an answer without a task
        (TASK, [GOOD], 1.0, 1.0),  # no answer
        (render_turn(task="a") + render_turn(answer="b"), [GOOD], 1.0, 1.0),  # without a thought
    ],
)
def test_format_points(planner, executors, together, apart):
    assert format_reward(planner, executors, True) == together
    assert format_reward(planner, executors, False) == apart


def test_refinement_is_judged_jointly_or_separately():
    halves = [render_turn(refine="in New"), render_turn(refine="York it is")]
    assert refine_reward(halves, ("New York",), True) == 1.0
    assert refine_reward(halves, ("New York",), False) == 0.0
    assert refine_reward([*halves, render_turn(refine="new york")], ("New York",), False) == 1.0
    assert refine_reward(["New York"], ("New York",), True) == 0.0  # written, but not refined
    assert refine_reward([], ("New York",), True) == refine_reward([""], ("",), True) == 0.0
    assert tag_contents("<refine> a\n</refine>x<refine>b</refine><refine>c", "refine") == "a b"


@pytest.mark.parametrize("text", ["It lies in North Dakota.", "I do not know.", "Yesterday."])
@pytest.mark.parametrize("together", [False, True])
def test_a_closed_answer_is_a_whole_word_of_a_refinement(text, together):
    executors = [render_turn(refine=text)]
    assert refine_reward(executors, ("no", "yes"), together) == 0.0
    assert refine_reward([*executors, render_turn(refine="So: no.")], ("no",), together) == 1.0


def test_executors_without_refinement_earn_none():
    settings = dataclasses.replace(PAPER, system=dataclasses.replace(SYSTEM, refinement=False))
    system = coda.recipe(settings).system
    answer_turn = render_turn(think="so", answer="Ulm")
    for observation, is_refined in ((answer_turn, False), (REFINED, True)):
        texts = {PLANNER: [TASK, FINAL], EXECUTOR: [SEARCH, observation]}
        forest, log = talk(system, texts)
        assert coda.reward(forest, settings)[-1] == 5.0
        assert coda.reward(forest, PAPER)[-1] == (5.5 if is_refined else 4.0)
        prompts = {prompt for role, prompt, _ in log.contexts if role == EXECUTOR}
        assert prompts == {user_turn("coda_tiny", "search", task="birthplace of Ann")[-1].content}


def test_one_reward_for_the_whole_rollout():
    """By hand: F1 1, the planner's point, two refining executors, one without its search."""
    texts = {PLANNER: [TASK, TASK, FINAL], EXECUTOR: [SEARCH, REFINED, REFINED]}
    forest, _ = talk(SYSTEM, texts)
    for settings, expected in ((PAPER, 3 + 1 + 0 + 0.5), (CODE, 3 + 1 + 0.5 + 0.5)):
        reward_N = coda.reward(forest, settings)
        assert reward_N.tolist() == [0.0] * 6 + [expected]
        terms = {name: x_N[6] for name, x_N in coda.terms(forest, settings).items()}
        assert terms == {"answer": 3.0, "format": expected - 3.5, "refine": 0.5}
    planner, executors = coda.role_texts(forest.records)
    assert planner == f"{TASK}\n{TASK}\n{FINAL}"
    assert executors == [f"{SEARCH}\n{REFINED}", REFINED]  # each text belongs to one executor
    bare = dataclasses.replace(PAPER, format_weight=0.0, refinement_weight=0.0)
    assert coda.reward(forest, bare)[-1] == 3.0


def test_observations_earn_no_format_point():
    """Tags in a passage or in the prompt do not count."""
    text = "<think>a</think><search>b</search><refine>Ulm</refine><answer>c</answer>"
    hits = {"Ann born": [passage(1)._replace(text=text)]}
    texts = {PLANNER: [TASK, FINAL], EXECUTOR: [SEARCH, render_turn(answer="Ulm")]}
    forest, _ = talk(SYSTEM, texts, hits=hits)
    assert coda.reward(forest, PAPER)[-1] == 3.0 + 1.0


def group(rollouts=6):
    """Rollouts of two questions, with tasks and without, right and wrong."""
    choices = {PLANNER: [TASK, FINAL, render_turn(answer="Rom")], EXECUTOR: [SEARCH, REFINED]}
    write = lambda role, prompt, rng: rng.choice(choices[role])  # noqa: E731
    return talk(SYSTEM, write, ANN, BOB, rollouts=rollouts)[0]


def advantages(forest, reward_N, rule=group_normalised):
    return coda.recipe(PAPER).compare(forest, reward_N, rule=rule)


def test_duplicated_executor_turns_change_no_advantage():
    forest = group()
    reward_N = coda.reward(forest, PAPER)
    before_N, _ = advantages(forest, reward_N)
    nodes = [n for n, r in enumerate(forest.records) if r.role == EXECUTOR][:2]
    twice = build_forest(
        forest.questions, [*forest.records, *(forest.records[n] for n in nodes * 5)]
    )
    after_N, _ = advantages(twice, np.append(reward_N, np.zeros(10, np.float32)))
    assert len(nodes) == 2 and after_N[: len(before_N)].tolist() == before_N.tolist()
    assert after_N[len(before_N) :].tolist() == before_N[nodes * 5].tolist()
