import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.branches import Branch
from jax_ragrl.rollout.collect import ActionRequest, collect
from jax_ragrl.rollout.expand import Branching, ForcedAction, Tree
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import TOO_LONG, ParsedAction, Role
from jax_ragrl.rollout.tree import NO_PARENT, Action, Forest
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import Hits, LLMRequest, Message, Question, Sampling
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, leaves_of, passage, play, system
from tests.tiny import split_policy, tokenizer

KEEP_1, KEEP_NONE = "Thought: t\nAction: [1]", "Thought: t\nAction: []"
HAND_OVER = "Thought: done\nAction: [LLM]"
NOTE = "Nothing relevant was found for this query."
OUT_OF_RANGE = "Hallucinate Document Idx"


def look_up(query: str) -> str:
    return f"Thought: next {query}\nAction: [Retrieval] {query}"


def plan(decisions: list[str], filters: list[str]) -> dict[str, list[str]]:
    return {"router": ["[Planning]"], "decision": decisions, "filter": filters}


def twice(effect: object, question: str) -> Branching:
    return Branching(2)


# --- The order of effects ----------------------------------------------------------------------


def test_planning_repeats_decision_search_and_filter():
    texts = plan([look_up("Ann"), look_up("Bob"), HAND_OVER], [KEEP_1, KEEP_1])
    tape = Tape(texts, {"Bob": [passage(20)]}, {"roadmap": "1. one\n2. two"})
    forest = play(tape)
    hop = [("filter",), ("decision",)]
    assert tape.log == [
        *[("router",), ("roadmap",), ("decision",)],
        *[("search", "Ann", 2), *hop, ("search", "Bob", 2), *hop, ("answer",)],
    ]
    # The k-th filter has depth 2k + 2; every decision sees the roadmap and all documents so far.
    assert [r.depth for r in forest.records] == [1, 3, 4, 5, 6, 7, 9]
    _, _, first, chosen, second, _, third, answered = tape.prompts
    assert "1. one\n2. two" in first and "title" not in first
    assert "Objective: next Ann" in chosen
    assert "title 1" in second and "title 20" not in second
    for last in (third, answered):
        assert "1 title 1: text 1\n2 title 20: text 20\n" in last


def test_a_later_success_removes_the_note_of_its_own_query_alone():
    texts = plan([look_up("Ann"), look_up("Ann"), HAND_OVER], [KEEP_NONE, KEEP_1])
    play(tape := Tape(texts))
    sibling_groups = [p for p in tape.prompts if p.startswith("decide")]
    assert [f"1 Ann: {NOTE}" in p for p in sibling_groups] == [False, True, False]
    assert "1 title 3: text 3" in sibling_groups[2]
    texts = plan([look_up("Ann"), look_up("Bob"), HAND_OVER], [KEEP_NONE, KEEP_1])
    play(tape := Tape(texts))
    assert f"1 Ann: {NOTE}\n2 title 1: text 1" in tape.prompts[-1]


def test_a_repeated_query_turns_the_page_until_none_is_left():
    texts = plan([look_up("Ann")] * 3 + [HAND_OVER], [KEEP_NONE] * 3)
    play(tape := Tape(texts))
    assert [e for e in tape.log if e[0] == "search"] == [("search", "Ann", k) for k in (2, 4, 6)]
    pages = [p for p in tape.prompts if p.startswith("filter")]
    for i, page in enumerate(pages):
        assert f"1 title {2 * i + 1}: text" in page and f"2 title {2 * i + 2}: text" in page
    texts = plan([look_up("Ann"), look_up("Ann"), HAND_OVER], [KEEP_1, KEEP_NONE])
    tape = Tape(texts, {"Ann": [passage(1)]})
    assert leaves_of(play(tape)) == [("Ulm", "answered")]


def test_a_document_chosen_twice_is_shown_once():
    texts = plan(
        [look_up("Ann"), look_up("Bob"), HAND_OVER], [KEEP_1, "Thought: t\nAction: [1, 2, 1]"]
    )
    play(tape := Tape(texts))
    assert tape.prompts[-1].count("title") == 2


# --- What ends a branch ------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["[Retrieval] more", "[Retrieval]", "[Planning]", "[LLM]"])
def test_llm_only_mode_overwrites_every_action_and_counts_it(action):
    texts = plan([look_up("Ann"), f"Thought: t\nAction: {action}"], ["Thought: t\nAction: [1, 2]"])
    forest = play(tape := Tape(texts), max_documents=1)
    assert leaves_of(forest) == [("Ulm", "answered")] and tape.log[-1] == ("answer",)
    assert forest.records[-2].action.text.endswith(action)
    wrong = ("Overwritten Action",) if action != "[LLM]" else ()
    assert forest.records[-1].state.faults == wrong


def test_llm_only_mode_still_requires_thought_and_action():
    sibling_groups = [look_up("Ann"), "[Retrieval] Bob"]
    texts = plan(sibling_groups, ["Thought: t\nAction: [1, 2]"])
    assert leaves_of(play(Tape(texts), max_documents=1)) == [(None, "Invalid Format")]


@pytest.mark.parametrize(("max_depth", "rounds"), [(13, 4), (12, 3), (15, 5), (9, 2), (7, 1)])
def test_llm_only_mode_bounds_the_rounds_of_search(max_depth, rounds):
    texts = plan([look_up(str(i)) for i in range(9)], [KEEP_1] * 9)
    tape = Tape(texts)
    assert leaves_of(play(tape, max_depth=max_depth)) == [("Ulm", "answered")]
    assert sum(e[0] == "search" for e in tape.log) == rounds


@pytest.mark.parametrize(("text", "max_depth"), [("[No Retrieval]", 2), ("[Retrieval] Ann", 3)])
def test_a_branch_below_max_depth_ends_unanswered(text, max_depth):
    tape = Tape({"router": [text], "filter": [KEEP_1]})
    assert leaves_of(play(tape, max_depth=max_depth + 1)) == [("Ulm", "answered")]
    tape = Tape({"router": [text], "filter": [KEEP_1]})
    forest = play(tape, max_depth=max_depth)
    assert leaves_of(forest) == [(None, "Max Depth")]
    assert forest.unanswered_N.tolist()[-1] and forest.reward_N.sum() == 0
    assert not any(e[0].startswith("answer") for e in tape.log)


def test_in_evaluation_an_index_out_of_range_is_skipped_and_counted():
    tape = Tape({"router": ["[Retrieval] Ann"], "filter": ["Thought: t\nAction: [7, 2, 0]"]})
    forest = play(tape, strict=False)
    assert leaves_of(forest) == [("Ulm", "answered")]
    assert forest.records[-1].state.faults == (OUT_OF_RANGE,)
    assert "1 title 2: text 2" in tape.prompts[-1] and "title 1:" not in tape.prompts[-1]
    assert "1 title 1: text 1" in tape.prompts[1] and "Objective" not in tape.prompts[1]
    tape = Tape({"router": ["[Retrieval] Ann"], "filter": ["Thought: t\nAction: [7, 2]"]})
    forest = play(tape, strict=False, max_depth=3)
    assert leaves_of(forest) == [(None, "Max Depth")]
    end = forest.records[-1].state
    assert (end.faults, end.strategy) == ((OUT_OF_RANGE,), "Retrieval")
    assert end.documents == (passage(2),)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ({"router": ["no bracket"]}, "Invalid Format"),
        ({"router": ["[Retrieval] a"], "filter": ["t\nAction: [one]"]}, "Invalid Document Idx"),
        ({"router": ["[Planning]"], "decision": ["t\nAction: [Retrieval]"]}, "Invalid Action"),
        *(
            ({"router": ["[Retrieval] a"], "filter": [f"t\nAction: [{n}]"]}, OUT_OF_RANGE)
            for n in ("1, 3", "0", "-1", "999999999")
        ),
    ],
)
def test_in_training_an_invalid_text_ends_in_an_unanswered_leaf(texts, why):
    forest = play(Tape({role: list(lines) for role, lines in texts.items()}))
    assert leaves_of(forest) == [(None, why)]
    assert forest.parent_N[-1] == len(forest.records) - 2
    assert forest.unanswered_N.tolist() == [False] * (len(forest.records) - 1) + [True]


# --- Failures of the environment ---------------------------------------------------------------


def test_a_failed_search_excludes_its_question_alone_which_makes_no_further_calls():
    def search(role: str, prompt: str, rng: random.Random) -> str:
        asked = "Bob" if "Bob" in prompt else "Ann"
        return KEEP_1 if role == "filter" else f"[Retrieval] {asked}"

    forest = play(Tape(search, {"Bob": EffectError("timeout")}), ANN, BOB)  # type: ignore[dict-item]
    assert forest.failed_questions == (1,) and forest.failures == ("timeout",)
    assert set(forest.question_N.tolist()) == {0} and forest.reward_N.max() == 1.0
    tape = Tape({"router": ["[Retrieval] Bob", "[Planning]"]}, {"Bob": EffectError("timeout")})  # type: ignore[dict-item]
    forest = play(tape, expander=twice)
    assert forest.failed_questions == (0,)
    # The other branch has already received its roadmap, but no decision follows.
    assert sorted(tape.log) == [("roadmap",), ("router",), ("search", "Bob", 2)]


@pytest.mark.parametrize("route", ["[No Retrieval]", "[Planning]", "[Retrieval] a"])
def test_a_server_that_raises_excludes_all_of_its_questions(route):
    class Down(Tape):
        def search(self, queries, k):
            raise EffectError("down")

        def complete(self, requests):
            raise EffectError("down")

    forest = play(Down(lambda role, prompt, rng: route), ANN, BOB)
    assert forest.failed_questions == (0, 1) and forest.failures == ("down",) * 2
    assert forest.parent_N.shape == (0,) and forest.parent_N.dtype == np.int32


def test_an_action_of_a_role_that_the_system_lacks_is_named():
    class Lacking(type(system())):
        roles = {}

    with pytest.raises(UserError, match="Generate of role 'router', but has the roles none: add"):
        collect(Lacking(), twice, [ANN], Tape({}).environment())
    misspelled = Tree(forced_actions={"ruoter": (ForcedAction("[Retrieval] a"),)})
    with pytest.raises(UserError, match="forces actions of role 'ruoter'.* some of router, "):
        collect(system(), misspelled, [ANN], Tape({}).environment())


@pytest.mark.parametrize("route, kind", [("[No Retrieval]", "str"), ("[Retrieval] a", "Hits")])
@pytest.mark.parametrize(
    "reply, given",
    [(None, "NoneType"), ([], "0 replies"), ([None, None], "a reply of type NoneType")],
)
def test_a_wrong_reply_of_an_own_retriever_or_model_is_named(route, kind, reply, given):
    class Wrong(Tape):
        def search(self, queries, k):
            return reply[: len(queries)] if reply else reply

        def complete(self, requests):
            return reply

    with pytest.raises(UserError, match=rf"^Wrong returned {given} for \d requests: .* one {kind}"):
        play(Wrong(lambda role, prompt, rng: route), ANN, BOB)


def test_hits_of_an_own_retriever_have_one_score_for_each_passage():
    class Uneven(Tape):
        def search(self, queries, k):
            return [Hits(hits.passages, ()) for hits in super().search(queries, k)]

    with pytest.raises(UserError, match="^Uneven returned 2 passages with 0 scores: give each"):
        play(Uneven(lambda role, prompt, rng: "[Retrieval] a"), ANN)


# --- Branches ----------------------------------------------------------------------------------


def test_identical_siblings_are_one_node_with_a_multiplicity():
    tape = Tape({"router": ["[No Retrieval]"] * 3})
    forest = play(tape, expander=lambda effect, question: Branching(3))
    assert forest.multiplicity_N.tolist() == [3, 1]
    assert tape.log == [("router",), ("answer_direct",)]


def test_only_actions_that_were_not_sampled_are_forced():
    def expander(effect, question):
        return (
            Branching(1, (ForcedAction("[Planning]"),)) if effect.role == "router" else Branching(1)
        )

    forest = play(Tape({"router": ["[No Retrieval]"], "decision": [HAND_OVER]}), expander=expander)
    forced = {r.action.text: f for r, f in zip(forest.records, forest.forced_N, strict=True)
              if r.action}  # fmt: skip
    assert forced == {"[Planning]": True, "[No Retrieval]": False, HAND_OVER: False}


# --- Independence ------------------------------------------------------------------------------

QUESTIONS = tuple(
    dataclasses.replace(ANN, id=f"q{i}", text=f"Where was {name} born?")
    for i, name in enumerate(("Ann", "Bob", "Cid", "Dea", "Eve", "Fay"))
)


def canonical(forest, question: Question):
    """Returns the tree of a question without node numbers: paths, texts, answers, rewards."""
    rows = []
    for n in forest.nodes_of(forest.questions.index(question)):
        record = forest.records[n]
        parent = () if record.parent == NO_PARENT else forest.records[record.parent].path
        rows.append(
            (record.path, record.role, parent, record.action, record.answer, record.finish_reason,
             record.multiplicity, float(forest.reward_N[n]))
        )  # fmt: skip
    return rows


def test_permuting_questions_permutes_results():
    forest = play(Tape(improvise), *QUESTIONS, expander=twice)
    turned = play(Tape(improvise), *QUESTIONS[3:], *reversed(QUESTIONS[:3]), expander=twice)
    assert len(forest.records) > 40
    for question in QUESTIONS:
        assert canonical(forest, question) == canonical(turned, question)


def test_a_seed_names_run_question_and_path():
    names = {
        Branch(None, 0, path=path).seed(run, question)
        for run in (0, 1)
        for question in (ANN, BOB)
        for path in ((1, 0), (10,), (1,))
    }
    assert len(names) == 12 and all(0 <= seed < 2**32 for seed in names)
    # The seed reads neither batch position nor node number: both depend on other questions.
    assert Branch(None, 5, 7, (1,)).seed(0, ANN) == Branch(None, 0, 0, (1,)).seed(0, ANN)


def test_one_round_searches_each_query_once_for_the_branches_that_asked():
    tape = Tape(lambda role, prompt, rng: KEEP_1 if role == "filter" else "[Retrieval] same")
    play(tape, *QUESTIONS)
    assert [e for e in tape.log if e[0] == "search"] == [("search", "same", 2)]

    def by_name(role, prompt, rng):
        return KEEP_1 if role == "filter" else f"[Retrieval] {prompt.split()[-2]}"

    forest = play(Tape(by_name, {"Ann": [passage(31)], "Bob": [passage(32)]}), ANN, BOB)
    read = {r.question: r.state.documents for r in forest.records if r.role == "filter"}
    assert read == {0: (passage(31),), 1: (passage(32),)}


def test_the_last_action_before_a_call_pays_for_it():
    texts = {"router": ["[Planning]"], "decision": [look_up("Ann"), HAND_OVER], "filter": [KEEP_1]}
    leaf = play(Tape(texts)).records[-1]
    paid = [(call.purpose, call.turn) for call in leaf.calls]
    assert paid == [("roadmap", 0), ("search", 1), ("answer", 3)]


def judged_forest(reply_of: dict) -> tuple[Forest, Tape]:
    """Returns the paper's tree of two questions in an environment with a judge."""
    texts = {"filter": "Thought: t\nAction: [1]", "decision": "Thought: t\nAction: [LLM]"}
    tape = Tape(lambda role, *_: texts[role], replies=reply_of)
    environment = tape.environment()._replace(judge=tape)
    return collect(system(), PAPER, (ANN, BOB), environment), tape


def test_the_reward_is_the_verdict_of_the_judge():
    def verdict(request: LLMRequest) -> str:
        return str("Answer: in Ulm" in request.messages[-1].content)

    forest, tape = judged_forest({"answer": "in Ulm", "answer_direct": "Wien", "judge": verdict})
    reward_N = answer_rewards(forest, lambda *_: pytest.fail("the judge replaces the metric"))
    ends = [(r.answer, reward) for r, reward in zip(forest.records, reward_N, strict=True)]
    assert {end for end in ends if end[0]} == {("in Ulm", 1.0), ("Wien", 0.0)}
    assert tape.log.count(("judge",)) == 4 < int(forest.leaf_N.sum())


@pytest.mark.parametrize("reply", [EffectError("down"), "I cannot judge."])
def test_a_question_without_a_readable_verdict_fails(reply):
    def verdict(request: LLMRequest) -> str | EffectError:
        return reply if "Ann" in str(request.messages) else "Not true."

    forest, _ = judged_forest({"judge": verdict})
    assert forest.failed_questions == (0,) and set(forest.question_N.tolist()) == {1}
    assert "tape" in forest.failures[0] and str(reply) in forest.failures[0]
    assert not answer_rewards(forest, lambda *_: pytest.fail("the judge replaces the metric")).any()


def test_a_judge_never_grades_a_failed_question():
    """The first answer of the question succeeded, a later one failed."""
    asked = []

    def answer(request: LLMRequest) -> str | EffectError:
        return EffectError("down") if "Ann" in request.messages[-1].content else "Ulm"

    def verdict(request: LLMRequest) -> str:
        asked.append(request.messages[-1].content)
        return "True"

    forest, tape = judged_forest({"answer": answer, "judge": verdict})
    assert forest.failed_questions == (0,) and ("answer_direct",) in tape.log
    assert asked and not any("Ann" in text for text in asked)


SHAPES = Shapes((64, 256), (4,), max_new_tokens=32)
ASK = Role("ask", ParsedAction, sampling=Sampling(max_tokens=32))
JUDGE = Role("judge", ParsedAction, sampling=Sampling(max_tokens=6), policy="other")


def sampler() -> PolicySampler:
    models = {"policy": split_policy(), "other": split_policy(1)}
    return PolicySampler(models, tokenizer(), SHAPES)


def request(text: str, role: Role = ASK, seed: int = 0, samples: int = 1) -> ActionRequest:
    return ActionRequest(role, (Message("user", text),), Branching(samples=samples), seed)


def forced(*actions: ForcedAction) -> ActionRequest:
    return request("who?")._replace(branching=Branching(forced_actions=actions, samples=2))


def assert_equal_actions(actual: Sequence[Action], expected: Sequence[Action]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one._replace(logps=None) == other._replace(logps=None)
        assert (one.logps is None) == (other.logps is None)
        assert one.logps is None or pytest.approx(one.logps, abs=1e-5) == other.logps


def test_requests_of_several_policies_have_the_actions_of_each_alone():
    """Forced ones, and a prompt that is too long, among them."""
    requests = [
        request("who directed the film?", seed=1),
        request("route", JUDGE, 2, 2),
        forced(ForcedAction("[LLM]"), ForcedAction("[Ret", complete=False)),
        request("w" * 400),
        *(request("film", seed=seed) for seed in range(4)),
    ]
    actions = sampler().sample(requests)
    for own, together in zip(requests, actions, strict=True):
        assert_equal_actions(together, sampler().sample([own])[0])
    assert [len(own) for own in actions] == [1, 2, 4, 1, 1, 1, 1, 1]
    assert actions[3][0].error == TOO_LONG
