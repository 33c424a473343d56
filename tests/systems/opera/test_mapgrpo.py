from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_normalised
from jax_ragrl.errors import UserError
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Forced
from jax_ragrl.rollout.roles import Parsed
from jax_ragrl.rollout.tree import NO_PARENT, Action, Record, decisions, plant
from jax_ragrl.systems.opera import system as opera
from jax_ragrl.systems.opera.expert_pool import (
    Candidate,
    Pool,
    Scribe,
    build_pool,
    candidates_of,
    cosine,
    load_pool,
)
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE, render_analysis, render_plan
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection, siblings_mean
from jax_ragrl.systems.opera.system import Opera, Settings
from jax_ragrl.systems.opera.world import WorldExpert
from jax_ragrl.types import Message, Passage, Question
from tests.rollout.tape import BOB, Tape, passage
from tests.systems.talk import talk

SYSTEM = Opera("opera_tiny", top_k=1)
ASKED = Question("q", "What is the birthplace of Ann Lee?", ("Ulm",))
ALWAYS, OFF = Injection(), Injection("off")
WHOLE, PEEKED = frozenset((PLAN,)), frozenset((REWRITE,))


def effect(role: str, prompt: str = "p") -> Generate:
    return Generate(role, (Message("user", prompt),))


def expert(effect: Generate, question: str) -> str | None:
    return f"best {effect.role}" if question != "unknown" else None


def groups(*trained: str, injection: Injection = ALWAYS, size: int = 4, known=expert) -> Groups:
    return Groups(frozenset(trained), size, injection, known, WHOLE, PEEKED)


# --- Which actions are tried --------------------------------------------------------------------


def test_only_the_role_in_training_is_tried_in_groups():
    tried = groups(ANALYSIS)
    assert tried(effect(PLAN), "q") == tried(effect(REWRITE), "q") == Branching(1)
    assert tried(effect(ANALYSIS), "q") == Branching(3, (Forced("best analysis"),), 1, skip=1)


def test_plans_are_all_carried_out_and_queries_all_searched():
    tried = groups(PLAN, REWRITE)
    assert tried(effect(PLAN), "q") == Branching(3, (Forced("best plan"),), None, skip=1)
    assert tried(effect(REWRITE), "q") == Branching(
        3, (Forced("best rewrite"),), 1, peek=True, skip=1
    )


@pytest.mark.parametrize(
    ("injection", "question", "branching"),
    [
        (ALWAYS, "q", Branching(3, (Forced("best analysis"),), 1, skip=1)),
        (ALWAYS, "unknown", Branching(4, (), 1)),  # nothing in the pool
        (OFF, "q", Branching(4, (), 1)),
        (Injection(replaces="worst"), "q", Branching(4, (Forced("best analysis"),), 1, skip=1)),
        (Injection(roles=(PLAN,)), "q", Branching(4, (), 1)),
        (Injection(carried="expert"), "q", Branching(3, (Forced("best analysis"),), 1)),
    ],
)
def test_an_expert_joins_the_group(injection, question, branching):
    assert groups(ANALYSIS, injection=injection)(effect(ANALYSIS), question) == branching


def test_a_group_without_a_pool_is_all_samples():
    assert groups(PLAN, known=None)(effect(PLAN), "q") == Branching(4, ())


def test_now_and_then_is_a_fixed_share_of_the_questions():
    some = Injection("periodic", period=4)
    due = [some.due(PLAN, f"question {i}") for i in range(2000)]
    assert due == [some.due(PLAN, f"question {i}") for i in range(2000)]
    assert 0.2 < np.mean(due) < 0.3


@pytest.mark.parametrize(
    "changes", [{"when": "never"}, {"replaces": "best"}, {"carried": "best"}, {"period": 0}]
)
def test_unknown_injections_are_refused(changes):
    with pytest.raises(UserError, match="recipe.expert"):
        Injection(**changes)


# --- Which of them is carried on ------------------------------------------------------------------

YES, ROM, NO = render_analysis("a", "Ulm"), render_analysis("a", "Rom"), render_analysis("a")
BERN = render_analysis("a", "Bern")
CHAIN = "1 birthplace of Ann Lee\n2 country of [1]"
LATER = {"sampled": "country of Rom", "expert": "country of Bern"}


def searches(role: str, injection: Injection, best: str | None, write: dict[str, list[str]]):
    """What is searched for when a role is in training, and the paths of its first decision."""
    tried = groups(role, injection=injection, size=3, known=lambda *_: best)
    forest, tape = talk(SYSTEM, write, ASKED, expander=tried)
    group = next(g for g in decisions(forest) if forest.records[g[0]].role == role)
    paths = [forest.records[node].path for node in group]
    return [entry[1] for entry in tape.log if entry[0] == "search"], paths


@pytest.mark.parametrize("carried", LATER)
def test_the_next_sub_goal_is_made_of_the_action_that_is_carried_on(carried):
    write = {PLAN: [CHAIN], ANALYSIS: [ROM, NO, YES, YES], REWRITE: []}
    found, _ = searches(ANALYSIS, Injection(carried=carried), BERN, write)
    assert found == ["birthplace of Ann Lee", LATER[carried]]


def test_without_an_expert_the_same_action_is_carried_on():
    write = {PLAN: [CHAIN], ANALYSIS: [ROM, NO, YES, YES, YES, YES], REWRITE: []}
    alone, paths = searches(ANALYSIS, OFF, None, write)
    assert alone == ["birthplace of Ann Lee", LATER["sampled"]]
    assert paths == [(0, 0), (0, 1), (0, 2)]


def test_an_expert_that_the_first_sample_agrees_with_is_carried_on_as_one_node():
    write = {PLAN: [CHAIN], ANALYSIS: [BERN, ROM, YES, YES], REWRITE: []}
    found, paths = searches(ANALYSIS, ALWAYS, BERN, write)
    assert found == ["birthplace of Ann Lee", "country of Bern"]
    assert paths == [(0, 0), (0, 2)]


def test_the_query_of_an_expert_is_searched_for_its_reward_alone():
    write = {PLAN: ["1 a of B"], ANALYSIS: [NO, YES], REWRITE: ["rephrase: x", "rephrase: y"]}
    tried = groups(REWRITE, size=3, known=lambda *_: "rephrase: best")
    forest, tape = talk(SYSTEM, write, ASKED, expander=tried)
    assert {e[1] for e in tape.log if e[0] == "search"} == {"a of B", "best", "x", "y"}
    (end,) = (record for record in forest.records if record.role == "leaf")
    assert [call.asked for call in end.calls] == ["a of B", "x"]
    hits = [record.found for record in forest.records if record.role == REWRITE]
    assert len(hits) == 3 and all(hits)


# --- What they learn ----------------------------------------------------------------------------


def analyses(*texts: str, injection: Injection = OFF, best: str | None = None):
    """One decision of the analysis role with these samples, and what each node earned: by hand,
    1 for the right answer, 0.35 for a wrong one, 0.1 for a no."""
    tried = groups(ANALYSIS, injection=injection, size=len(texts), known=lambda *_: best)
    if best and injection.replaces == "extra":
        tried = dataclasses.replace(tried, size=len(texts) + 1)
    found = {"birthplace of Ann Lee": [passage(1)._replace(text="Ann Lee was born in Ulm.")]}
    write = {PLAN: ["1 birthplace of Ann Lee"], ANALYSIS: [*texts, *[NO] * 9], REWRITE: ["x"] * 2}
    forest, _ = talk(SYSTEM, write, ASKED, expander=tried, found=found)
    world = Settings(style="opera_tiny", gold="world", expert=OFF)
    reward_N = opera.reward(forest, world)
    credit_N, weight_N = siblings_mean(forest, reward_N, injection)
    group = [n for n, r in enumerate(forest.records) if r.role == ANALYSIS and r.depth == 2]
    return [(forest.records[n].action.text, credit_N[n], weight_N[n]) for n in group]


def close(rows):
    return [(text, pytest.approx(credit, abs=1e-6), weight) for text, credit, weight in rows]


def test_the_advantage_is_the_reward_against_the_mean_of_the_siblings():
    mean = (1.0 + 0.35 + 0.1) / 3
    assert analyses(YES, ROM, NO) == close(
        [(YES, 1 - mean, 1), (ROM, 0.35 - mean, 1), (NO, 0.1 - mean, 1)]
    )


def test_an_action_counts_as_often_as_it_was_written():
    mean = (1.0 + 3 * 0.1) / 4
    assert analyses(YES, NO, NO, NO) == close([(YES, 1 - mean, 1), (NO, 3 * (0.1 - mean), 1)])


def test_merged_actions_are_pushed_as_far_as_their_copies_would_be():
    """Seven of one text and one of another, as two nodes and as eight."""

    def pushed(*counts: tuple[int, int]) -> dict[tuple[int, ...], float]:
        records = [
            Record(
                *(NO_PARENT, 0, PLAN, 1, (i,)),
                Action((1, 2), (token, 9), "t", (0.0, 0.0)),
                multiplicity=count,
                parsed=Parsed(PLAN),
            )
            for i, (token, count) in enumerate(counts)
        ]
        forest = plant([ASKED], records)
        reward_N = np.array([token == 5 for token, _ in counts], np.float32)
        credit_N, weight_N = siblings_mean(forest, reward_N, OFF)
        sums = collections.Counter()
        for turn in turns_of(forest, weight_N):
            sums[turn.ids] += float(credit_N[turn.node])
        return dict(sums)

    apart = pushed(*[(5, 1)] * 7, (6, 1))
    assert pushed((5, 7), (6, 1)) == apart == {(5, 9): 0.875, (6, 9): -0.875}


def test_a_group_of_equals_learns_nothing():
    assert analyses(YES, YES, YES) == close([(YES, 0.0, 1)])


def test_a_normalised_group_is_divided_by_the_deviation_of_all_that_was_written():
    """Three of one text and one of another, merged: GRPO's numbers for four samples."""
    records = [
        Record(NO_PARENT, 0, PLAN, 1, (i,), Action((1,), (i, 9), "t"), multiplicity=count)
        for i, count in enumerate((3, 1))
    ]
    reward_N = np.array([0.2, 0.8], np.float32)
    credit_N, _ = siblings_mean(plant([ASKED], records), reward_N, OFF, normalised=True)
    reward_X = np.array([0.2, 0.2, 0.2, 0.8], np.float32)
    expected_X = group_normalised(reward_X, np.zeros(4, np.int32), np.ones(4, bool), 1)
    np.testing.assert_allclose(credit_N / [3, 1], expected_X[2:], rtol=1e-5)


def test_an_expert_is_trained_like_any_other():
    mean = (1.0 + 0.35 + 0.1) / 3
    rows = analyses(ROM, NO, injection=ALWAYS, best=YES)
    assert rows == close([(YES, 1 - mean, 1), (ROM, 0.35 - mean, 1), (NO, 0.1 - mean, 1)])


def test_an_expert_without_a_gradient_only_raises_the_mean():
    mean = (1.0 + 0.35 + 0.1) / 3
    rows = analyses(ROM, NO, injection=Injection(gradient=False), best=YES)
    assert rows == close([(YES, 0.0, 0), (ROM, 0.35 - mean, 1), (NO, 0.1 - mean, 1)])
    assert sum(credit for _, credit, _ in rows) < 0


def test_what_the_policy_wrote_itself_is_trained_though_the_expert_wrote_it_too():
    rows = analyses(YES, NO, injection=Injection(gradient=False), best=YES)
    mean = (2 * 1.0 + 0.1) / 3
    assert rows == close([(YES, 1 - mean, 1), (NO, 0.1 - mean, 1)])


def test_an_expert_in_place_of_the_worst_sample_drops_it():
    mean = (1.0 + 0.35 + 0.35) / 3
    rows = analyses(ROM, NO, ROM, injection=Injection(replaces="worst"), best=YES)
    assert rows == close([(YES, 1 - mean, 1), (ROM, 2 * (0.35 - mean), 1), (NO, 0.0, 0)])


def test_one_of_several_equal_worst_samples_is_dropped():
    mean = (1.0 + 2 * 0.1) / 3
    rows = analyses(NO, NO, NO, injection=Injection(replaces="worst"), best=YES)
    assert rows == close([(YES, 1 - mean, 1), (NO, 2 * (0.1 - mean), 1)])


def test_the_expert_itself_is_never_dropped():
    rows = analyses(YES, ROM, injection=Injection(replaces="worst"), best=NO)
    mean = (1.0 + 0.1) / 2
    assert rows == close([(NO, 0.1 - mean, 1), (YES, 1 - mean, 1), (ROM, 0.0, 0)])


def test_without_an_expert_no_sample_is_dropped():
    mean = (1.0 + 0.1) / 2
    rows = analyses(YES, NO, injection=Injection(replaces="worst"), best=None)
    assert rows == close([(YES, 1 - mean, 1), (NO, 0.1 - mean, 1)])


def test_decisions_are_compared_apart_and_lone_ones_not_at_all():
    """Two questions and two whole rollouts of each: four groups of plans, no group of analyses."""
    plans = [f"1 a of {x}" for x in "ABCDEFGH"]
    write = {PLAN: plans, ANALYSIS: [YES] * 8}
    two = groups(PLAN, injection=OFF, size=2)
    forest, _ = talk(SYSTEM, write, ASKED, BOB, expander=two, rollouts=2)
    sizes = [len(group) for group in decisions(forest)]
    assert sorted(sizes) == [1] * 8 + [2] * 4
    reward_N = np.arange(len(forest.records), dtype=np.float32)
    credit_N, weight_N = siblings_mean(forest, reward_N, OFF)
    roles = [r.role for r in forest.records]
    assert [w > 0 for w in weight_N] == [role == PLAN for role in roles]
    for group in decisions(forest):
        assert credit_N[group].sum() == pytest.approx(0.0, abs=1e-5)
        assert np.abs(credit_N[group]).max() == (0.5 if len(group) == 2 else 0.0)


def test_every_rewritten_query_of_a_group_is_scored_by_its_own_search():
    found = {
        "birthplace of Ann Lee": [passage(1)],
        "Ann Lee born": [Passage("p", "Ann Lee", "Ann Lee was born in Ulm.")],
    }
    write = {
        PLAN: ["1 birthplace of Ann Lee"],
        ANALYSIS: [NO, YES],
        REWRITE: ["rephrase: Ann", "rephrase: Ann Lee born", "Ann Lee born"],
    }
    tried = groups(REWRITE, injection=OFF, size=3)
    forest, tape = talk(SYSTEM, write, ASKED, expander=tried, found=found)
    reward_N = opera.reward(forest, Settings(style="opera_tiny", gold="world", expert=OFF))
    scores = [float(reward_N[n]) for n, r in enumerate(forest.records) if r.role == REWRITE]
    assert scores == pytest.approx([0.1, 1.0, 0.925])
    assert [r.role for r in forest.records].count("leaf") == 1


# --- The pool -----------------------------------------------------------------------------------


def test_the_pool_gives_the_best_candidate_of_a_prompt():
    pool = build_pool(
        [
            Candidate(PLAN, "p", "bad plan", 0.2),
            Candidate(PLAN, "p", "good idea", 0.9),
            Candidate(ANALYSIS, "p", "other role", 1.0),
            Candidate(PLAN, "r", "another prompt", 1.0),
        ]
    )
    assert pool(effect(PLAN, "p"), "q") == "good idea"
    assert pool(effect(PLAN, "r"), "q") == "another prompt"
    assert pool(effect(PLAN, "x"), "q") is None and pool(effect(REWRITE, "p"), "q") is None


def shown(style: str, role: str, goal: str, *texts: str) -> Generate:
    """A role's prompt in a style, with these documents."""
    found = [Passage(str(i), "a title", text) for i, text in enumerate(texts)]
    state = opera.State(ASKED, goal=goal, query=goal, failure="x", candidates=tuple(found))
    phase = {ANALYSIS: "analyse", REWRITE: "rewrite"}[role]
    return Opera(style).wants(dataclasses.replace(state, phase=phase))


def scored(style: str, role: str, goal: str, *known: tuple[str, str, float]) -> Pool:
    """A pool of a goal's candidates: the document each was written for, text and score."""
    return build_pool(
        Candidate(role, shown(style, role, goal, document).messages[-1].content, text, score)
        for document, text, score in known
    )


STYLES = pytest.mark.parametrize("style", ["opera", "opera_tiny"])
GOAL = "birthplace of Ann Lee"
TOLD, TOLD_TOO, UNTOLD = "Ann Lee was born in Ulm.", "In Ulm, Ann Lee grew up.", "Ulmen grow."


@STYLES
def test_a_query_of_the_pool_is_for_its_sub_goal_whatever_was_found_before(style):
    pool = scored(style, REWRITE, GOAL, ("a", "bad", 0.2), ("b", "Ann Lee born", 0.9))
    assert pool(shown(style, REWRITE, "Birthplace of Ann Lee?", "Question: what?"), "q") == (
        "Ann Lee born"
    )
    assert pool(shown(style, REWRITE, "spouse of Ann Lee", "a"), "q") is None
    assert pool(shown(style, ANALYSIS, GOAL, "a"), "q") is None


@STYLES
def test_an_analysis_of_the_pool_is_for_other_documents_that_tell_the_same(style):
    pool = scored(style, ANALYSIS, GOAL, (TOLD, YES, 1.0), (UNTOLD, NO, 1.0), (TOLD, ROM, 0.35))
    assert pool(shown(style, ANALYSIS, GOAL, "Question: Why?", TOLD_TOO), "q") == YES
    assert pool(shown(style, ANALYSIS, GOAL, UNTOLD, "more"), "q") == NO
    assert pool(shown(style, ANALYSIS, GOAL, "Ann Lee saw Rom."), "q") == NO
    assert pool(shown(style, ANALYSIS, GOAL, TOLD), "q") == YES  # as it stands
    told = scored(style, ANALYSIS, GOAL, (TOLD, YES, 1.0))
    assert told(shown(style, ANALYSIS, GOAL, UNTOLD), "q") is None


def test_a_closed_answer_of_the_pool_needs_no_document():
    same = render_analysis("a", "yes")
    pool = scored("opera_tiny", ANALYSIS, "same: Ulm, Ulm", (TOLD, same, 1.0))
    assert pool(shown("opera_tiny", ANALYSIS, "same: Ulm, Ulm", UNTOLD), "q") == same


def test_the_pool_leaves_out_what_a_better_candidate_says_alike():
    texts = {"a b c d": 0.5, "a b c e": 0.6, "a b c d e f g h": 0.4, "x y": 0.1}
    rows = [Candidate(PLAN, "p", text, score) for text, score in texts.items()]
    assert [c.text for c in build_pool(rows, alike=0.7)] == ["a b c e", "x y"]
    near = ["a b c e", "a b c d", "a b c d e f g h", "x y"]
    assert [c.text for c in build_pool(rows, alike=0.76)] == near
    assert len(list(build_pool(rows * 3))) == 4  # repeated candidates are one


def test_equal_scores_are_ordered_by_text_whatever_the_order_given():
    rows = [Candidate(PLAN, "p", text, 1.0) for text in ("b", "a", "c")]
    assert [c.text for c in build_pool(rows)] == [c.text for c in build_pool(rows[::-1])]


def test_cosine():
    assert cosine({"a": 1, "b": 1}, {"b": 2, "c": 2}) == pytest.approx(0.5)
    assert cosine({}, {}) == 1.0 and cosine({"a": 1}, {}) == 0.0


def test_the_summary_of_a_pool():
    scores = {"one": 1.0, "two": 0.6, "three": 0.2, "four": 0.6}
    pool = build_pool([Candidate(PLAN, t, t, s) for t, s in scores.items()])
    assert pool.summary() == pytest.approx(
        {
            "instances": 4,
            "candidates": 4,
            "mean": 0.6,
            "deviation": 0.08**0.5,
            "high": 0.25,
            "low": 0.25,
        }
    )


def test_a_pool_survives_its_file(tmp_path):
    rows = [Candidate(PLAN, "p", "a b c d", 0.5), Candidate(PLAN, "p", "a\nb", 1.0)]
    build_pool(rows).save(tmp_path / "new" / "pool.jsonl")
    assert load_pool(tmp_path / "new" / "pool.jsonl") == build_pool(rows)


@pytest.mark.parametrize("text", [None, "no json", '{"role": "plan"}', "[1]"])
def test_a_file_that_is_no_pool_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "pool").write_text(text)
    with pytest.raises(UserError, match="is no pool of scored actions"):
        load_pool(tmp_path / "pool")


def test_candidates_are_the_actions_of_a_forest_with_the_prompts_of_its_scribe():
    tape = Tape({PLAN: ["1 a of B", "hm"], ANALYSIS: [YES, YES]})
    scribe, two = Scribe(tape), groups(PLAN, injection=OFF, size=2)
    forest = collect(SYSTEM, two, [ASKED], Environment(scribe, tape, tape))
    reward_N = np.arange(len(forest.records), dtype=np.float32)
    rows = [c for _, c in candidates_of(forest, reward_N, scribe.prompts)]
    asked = f"steps\nQuestion: {ASKED.text}"
    assert rows[:2] == [Candidate(PLAN, asked, "1 a of B", 0.0), Candidate(PLAN, asked, "hm", 1.0)]
    assert [c.role for c in rows] == [r.role for r in forest.records if r.role != "leaf"]
    assert {c.prompt for c in rows} == set(tape.prompts)


# --- The expert of the generated encyclopedia ---------------------------------------------------


@pytest.mark.parametrize(
    ("role", "prompt", "text"),
    [
        (PLAN, "steps\nQuestion: Who directed Jaws?", "1 director of Jaws"),
        (PLAN, "steps\nQuestion: Why?", "1 Why?"),
        (
            PLAN,
            "steps\nQuestion: Were A B and C D born in the same city?",
            render_plan(["birthplace of A B", "birthplace of C D", "same: [1], [2]"]),
        ),
        (
            ANALYSIS,
            "check\n1 Ann Lee: Ann Lee was born in Ulm.\nQuestion: birthplace of Ann Lee",
            render_analysis("birthplace of Ann Lee is Ulm", "Ulm"),
        ),
        (
            ANALYSIS,
            "check\n1 Ann Lee: Ann Lee was born in Ulm.\nQuestion: spouse of Ann Lee",
            render_analysis("nothing"),
        ),
        (REWRITE, "reword\nQuestion: birthplace of Ann Lee", "rephrase: Ann Lee born where"),
    ],
)
def test_the_expert_of_the_encyclopedia(role, prompt, text):
    assert WorldExpert()(effect(role, prompt), "q") == text
