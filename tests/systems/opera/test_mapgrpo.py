import dataclasses
import functools

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_centred
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.roles import invalid_action
from jax_ragrl.rollout.system import Execution
from jax_ragrl.rollout.tree import sibling_groups
from jax_ragrl.systems import opera
from jax_ragrl.systems.opera import Opera, Settings
from jax_ragrl.systems.opera.expert_pool import (
    Candidate,
    Pool,
    RecordingSampler,
    build_pool,
    candidates_of,
    load_pool,
    vector_cosines,
)
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE, render_analysis
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection, sibling_advantages
from jax_ragrl.systems.opera.world import WorldExpert
from jax_ragrl.types import Hits, Message, Passage, Question
from tests.rollout.tape import BOB, Tape, passage, talk

SYSTEM = Opera("opera_tiny", top_k=1)
EXAMPLE = Question("q", "What is the birthplace of Ann Lee?", ("Ulm",))
ALWAYS, OFF = Injection(), Injection("off")
CONTINUE_ALL, SEARCH_ALL = frozenset((PLAN,)), frozenset((REWRITE,))


def effect(role: str, prompt: str = "p") -> Generate:
    return Generate(role, (Message("user", prompt),))


def expert(effect: Generate, question: str) -> str | None:
    return f"best {effect.role}" if question != "unknown" else None


def groups(*trained_roles, injection=ALWAYS, size=4, source=expert) -> Groups:
    return Groups(frozenset(trained_roles), size, injection, source, CONTINUE_ALL, SEARCH_ALL)


def test_periodic_injection_takes_a_fixed_share_of_questions():
    some = Injection("periodic", period=4)
    due = [some.due(PLAN, f"question {i}") for i in range(2000)]
    assert due == [some.due(PLAN, f"question {i}") for i in range(2000)]
    assert 0.2 < np.mean(due) < 0.3


YES, ROM, NO = render_analysis("a", "Ulm"), render_analysis("a", "Rom"), render_analysis("a")
BERN = render_analysis("a", "Bern")
CHAIN = "1 birthplace of Ann Lee\n2 country of [1]"
LATER = {"sampled": "country of Rom", "expert": "country of Bern"}


def searches(role: str, injection: Injection, best: str | None, write: dict[str, list[str]]):
    """The queries if a role is in training, and the paths of its first decision."""
    expander = groups(role, injection=injection, size=3, source=lambda *_: best)
    forest, tape = talk(SYSTEM, write, EXAMPLE, expander=expander)
    group = next(g for g in sibling_groups(forest) if forest.records[g[0]].role == role)
    paths = [forest.records[node].path for node in group]
    return [entry[1] for entry in tape.log if entry[0] == "search"], paths


@pytest.mark.parametrize("continued", LATER)
def test_the_next_sub_goal_uses_the_continued_action(continued):
    write = {PLAN: [CHAIN], ANALYSIS: [ROM, NO, YES, YES], REWRITE: []}
    hits_by_query, _ = searches(ANALYSIS, Injection(continue_with=continued), BERN, write)
    assert hits_by_query == ["birthplace of Ann Lee", LATER[continued]]


def test_an_expert_query_is_searched_only_for_reward():
    write = {PLAN: ["1 a of B"], ANALYSIS: [NO, YES], REWRITE: ["rephrase: x", "rephrase: y"]}
    expander = groups(REWRITE, size=3, source=lambda *_: "rephrase: best")
    forest, tape = talk(SYSTEM, write, EXAMPLE, expander=expander)
    assert {e[1] for e in tape.log if e[0] == "search"} == {"a of B", "best", "x", "y"}
    (end,) = (record for record in forest.records if record.role == "leaf")
    assert [call.request for call in end.calls] == ["a of B", "x"]
    hits = [record.passages for record in forest.records if record.role == REWRITE]
    assert len(hits) == 3 and all(hits)


def analyses(*texts: str, injection: Injection = OFF, best: str | None = None):
    """One decision of the analysis role with these samples and the rewards of its nodes, by hand:
    1 for the right answer, 0.35 for a wrong one, 0.1 for a no."""
    expander = groups(ANALYSIS, injection=injection, size=len(texts), source=lambda *_: best)
    if best and injection.replaces == "extra":
        expander = dataclasses.replace(expander, size=len(texts) + 1)
    hits_by_query = {
        "birthplace of Ann Lee": [passage(1)._replace(text="Ann Lee was born in Ulm.")]
    }
    write = {PLAN: ["1 birthplace of Ann Lee"], ANALYSIS: [*texts, *[NO] * 9], REWRITE: ["x"] * 2}
    forest, _ = talk(SYSTEM, write, EXAMPLE, expander=expander, hits=hits_by_query)
    world = Settings(Opera("opera_tiny"), gold="world", expert=OFF)
    reward_N = opera.recipe(world).reward(forest)
    credit_N, weight_N = sibling_advantages(forest, reward_N, injection, group_centred)
    group = [n for n, r in enumerate(forest.records) if r.role == ANALYSIS and r.depth == 2]
    return [(forest.records[n].action.text, credit_N[n], weight_N[n]) for n in group]


def close(rows):
    return [(text, pytest.approx(credit, abs=1e-6), weight) for text, credit, weight in rows]


RIGHT, WRONG, REFUSAL = 1.0, 0.35, 0.1
SILENT, WORST = Injection(gradient=False), Injection(replaces="worst")


@pytest.mark.parametrize(
    ("samples", "injection", "best", "mean", "factors"),
    [
        ((YES, ROM, NO), OFF, None, (RIGHT + WRONG + REFUSAL) / 3, (1, 1, 1)),
        ((YES, YES, YES), OFF, None, RIGHT, (3,)),  # equals learn nothing
        # An expert is trained like any other.
        ((ROM, NO), ALWAYS, YES, (RIGHT + WRONG + REFUSAL) / 3, (1, 1, 1)),
        # A sample that equals the expert is trained although the expert is not.
        ((YES, NO), SILENT, YES, (2 * RIGHT + REFUSAL) / 3, (1, 1)),
        # Without a gradient it only raises the mean.
        ((ROM, NO), SILENT, YES, (RIGHT + WRONG + REFUSAL) / 3, (0, 1, 1)),
        # The expert takes the place of the worst sample, of one of several equal ones, and not its
        # own; without an expert no sample is dropped.
        ((ROM, NO, ROM), WORST, YES, (RIGHT + 2 * WRONG) / 3, (1, 2, 0)),
        ((NO, NO, NO), WORST, YES, (RIGHT + 2 * REFUSAL) / 3, (1, 2)),
        ((YES, ROM), WORST, NO, (RIGHT + REFUSAL) / 2, (1, 1, 0)),
        ((YES, NO), WORST, None, (RIGHT + REFUSAL) / 2, (1, 1)),
        # The expert of another role; the fourth sample is a no.
        (
            *((YES, ROM, NO), Injection(roles=(PLAN,)), YES),
            *((RIGHT + WRONG + 2 * REFUSAL) / 4, (1, 1, 2)),
        ),
    ],
)
def test_the_advantage_is_relative_to_the_mean_of_a_group(samples, injection, best, mean, factors):
    """A factor counts the copies of a node that are compared and trained."""
    rewards = {YES: RIGHT, ROM: WRONG, NO: REFUSAL}
    texts = [*dict.fromkeys((*([best] if best else []), *samples))]
    expected = [
        (text, factor * (rewards[text] - mean), factor > 0)
        for text, factor in zip(texts, factors, strict=True)
    ]
    assert analyses(*samples, injection=injection, best=best) == close(expected)


def test_each_decision_is_a_separate_group():
    """Two questions and two whole rollouts of each: four groups of plans, no group of analyses."""
    plans = [f"1 a of {x}" for x in "ABCDEFGH"]
    write = {PLAN: plans, ANALYSIS: [YES] * 8}
    two = groups(PLAN, injection=OFF, size=2)
    forest, _ = talk(SYSTEM, write, EXAMPLE, BOB, expander=two, rollouts=2)
    sizes = [len(group) for group in sibling_groups(forest)]
    assert sorted(sizes) == [1] * 8 + [2] * 4
    reward_N = np.arange(len(forest.records), dtype=np.float32)
    credit_N, weight_N = sibling_advantages(forest, reward_N, OFF, group_centred)
    roles = [r.role for r in forest.records]
    assert [w > 0 for w in weight_N] == [role == PLAN for role in roles]
    for group in sibling_groups(forest):
        assert credit_N[group].sum() == pytest.approx(0.0, abs=1e-5)
        assert np.abs(credit_N[group]).max() == (0.5 if len(group) == 2 else 0.0)


def test_each_query_of_a_group_is_scored_separately():
    hits_by_query = {
        "birthplace of Ann Lee": [passage(1)],
        "Ann Lee born": [Passage("p", "Ann Lee", "Ann Lee was born in Ulm.")],
    }
    write = {
        PLAN: ["1 birthplace of Ann Lee"],
        ANALYSIS: [NO, YES],
        REWRITE: ["rephrase: Ann", "rephrase: Ann Lee born", "Ann Lee born"],
    }
    expander = groups(REWRITE, injection=OFF, size=3)
    forest, tape = talk(SYSTEM, write, EXAMPLE, expander=expander, hits=hits_by_query)
    reward_N = opera.recipe(Settings(Opera("opera_tiny"), gold="world", expert=OFF)).reward(forest)
    scores = [float(reward_N[n]) for n, r in enumerate(forest.records) if r.role == REWRITE]
    assert scores == pytest.approx([0.1, 1.0, 0.925])
    assert [r.role for r in forest.records].count("leaf") == 1


def test_the_pool_returns_the_best_candidate_and_survives_a_file(tmp_path):
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
    rows = [Candidate(PLAN, "p", "a b c d", 0.5), Candidate(PLAN, "p", "a\nb", 1.0)]
    build_pool(rows).save(tmp_path / "new" / "pool.jsonl")
    assert load_pool(tmp_path / "new" / "pool.jsonl") == build_pool(rows)


def prompt_of(style: str, role: str, goal: str, *texts: str) -> Generate:
    """A role's prompt in a style, with these documents."""
    hits_by_query = [Passage(str(i), "a title", text) for i, text in enumerate(texts)]
    # Without a planner the question is the sub-goal.
    system = Opera(style, max_plan_steps=0)
    searched = Execution(system, dataclasses.replace(EXAMPLE, text=goal))
    analysis = searched.advance(Hits(tuple(hits_by_query), ()))
    run = analysis if role == ANALYSIS else analysis.advance(invalid_action("x"))
    (effect,) = run.effects
    assert isinstance(effect, Generate)
    return effect


def pool_of(style: str, role: str, goal: str, *expert_or_none: tuple[str, str, float]) -> Pool:
    """A pool with candidates for one goal, given as (document, text, score)."""
    return build_pool(
        Candidate(role, prompt_of(style, role, goal, document).messages[-1].content, text, score)
        for document, text, score in expert_or_none
    )


STYLES = pytest.mark.parametrize("style", ["opera", "opera_tiny"])
GOAL = "birthplace of Ann Lee"
SUPPORTING, SUPPORTING_TOO, UNRELATED = (
    "Ann Lee was born in Ulm.",
    "In Ulm, Ann Lee grew up.",
    "Ulmen grow.",
)


@STYLES
def test_a_pool_query_transfers_across_documents(style):
    pool = pool_of(style, REWRITE, GOAL, ("a", "bad", 0.2), ("b", "Ann Lee born", 0.9))
    assert pool(prompt_of(style, REWRITE, "Birthplace of Ann Lee?", "Question: what?"), "q") == (
        "Ann Lee born"
    )
    assert pool(prompt_of(style, REWRITE, "spouse of Ann Lee", "a"), "q") is None
    assert pool(prompt_of(style, ANALYSIS, GOAL, "a"), "q") is None


@STYLES
def test_a_pool_analysis_transfers_if_documents_agree(style):
    pool = pool_of(
        style, ANALYSIS, GOAL, (SUPPORTING, YES, 1.0), (UNRELATED, NO, 1.0), (SUPPORTING, ROM, 0.35)
    )
    assert pool(prompt_of(style, ANALYSIS, GOAL, "Question: Why?", SUPPORTING_TOO), "q") == YES
    assert pool(prompt_of(style, ANALYSIS, GOAL, UNRELATED, "more"), "q") == NO
    assert pool(prompt_of(style, ANALYSIS, GOAL, "Ann Lee saw Rom."), "q") == NO
    assert pool(prompt_of(style, ANALYSIS, GOAL, SUPPORTING), "q") == YES  # the same prompt
    supporting = pool_of(style, ANALYSIS, GOAL, (SUPPORTING, YES, 1.0))
    assert supporting(prompt_of(style, ANALYSIS, GOAL, UNRELATED), "q") is None
    # No document contains the answers yes and no.
    closed = pool_of(
        style, ANALYSIS, "same: A, A", (SUPPORTING, same := render_analysis("a", "yes"), 1.0)
    )
    assert closed(prompt_of(style, ANALYSIS, "same: A, A", UNRELATED), "q") == same


def test_the_pool_drops_near_duplicates_by_words_or_by_meaning():
    texts = {"a b c d": 0.5, "a b c e": 0.6, "a b c d e f g h": 0.4, "x y": 0.1}
    rows = [Candidate(PLAN, "p", text, score) for text, score in texts.items()]
    assert [c.text for c in build_pool(rows, max_cosine=0.7)] == ["a b c e", "x y"]
    near = ["a b c e", "a b c d", "a b c d e f g h", "x y"]
    assert [c.text for c in build_pool(rows, max_cosine=0.76)] == near
    assert len(list(build_pool(rows * 3))) == 4  # repeated candidates are one
    equal = [Candidate(PLAN, "p", text, 1.0) for text in ("b", "a", "c")]
    assert [c.text for c in build_pool(equal)] == [c.text for c in build_pool(equal[::-1])]
    # Two texts without a common word, and two that differ in one word only.
    vectors = {"born in Ulm": (2, 0), "native of the town": (9, 1), "born in Rom": (0, 3)}
    rows = [Candidate(PLAN, "p", text, 1 - i / 9) for i, text in enumerate(vectors)]
    encode = lambda texts: np.array([vectors[text] for text in texts], np.float32)  # noqa: E731
    meaning = functools.partial(vector_cosines, encode)
    assert [c.text for c in build_pool(rows, similarity=meaning)] == ["born in Ulm", "born in Rom"]
    assert len(list(build_pool(rows, max_cosine=0.6))) == 2  # the last one, by its words
    assert not vector_cosines(np.zeros_like, np.zeros((2, 2), np.float32)).any()


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


@pytest.mark.parametrize("text", [None, "no json", '{"role": "plan"}', "[1]"])
def test_a_file_that_is_not_a_pool_is_rejected(tmp_path, text):
    if text is not None:
        (tmp_path / "pool").write_text(text)
    with pytest.raises(UserError, match="is not a pool of scored actions"):
        load_pool(tmp_path / "pool")


def test_candidates_pair_actions_with_their_prompts():
    tape = Tape({PLAN: ["1 a of B", "hm"], ANALYSIS: [YES, YES]})
    recorder, two = RecordingSampler(tape), groups(PLAN, injection=OFF, size=2)
    forest = collect(SYSTEM, two, [EXAMPLE], Environment(recorder, tape, tape))
    reward_N = np.arange(len(forest.records), dtype=np.float32)
    rows = [c for _, c in candidates_of(forest, reward_N, recorder.prompts)]
    prompt = f"steps\nQuestion: {EXAMPLE.text}"
    assert rows[:2] == [
        Candidate(PLAN, prompt, "1 a of B", 0.0),
        Candidate(PLAN, prompt, "hm", 1.0),
    ]
    assert [c.role for c in rows] == [r.role for r in forest.records if r.role != "leaf"]
    assert {c.prompt for c in rows} == set(tape.prompts)


def test_the_expert_plans_a_question_that_it_does_not_understand_as_it_is():
    assert WorldExpert()(effect(PLAN, "steps\nQuestion: Why?"), "q") == "1 Why?"
