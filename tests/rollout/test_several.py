"""States that wait for several effects at once, contexts of several turns, whole copies."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from jax_ragrl.rollout.collect import ActionRequest, Environment, collect
from jax_ragrl.rollout.context import context_ids, told, written_ids
from jax_ragrl.rollout.effects import Ask, Done, Generate, Said, Search, Told
from jax_ragrl.rollout.expand import Branching, Forced, once
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.tree import NO_PARENT
from jax_ragrl.run.components import policy_folder
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest, Message, Question
from tests.rollout.tape import ANN, BOB, Tape, action, passage

ASKED = (Message("user", "go"),)


@dataclasses.dataclass(frozen=True)
class Fan:
    """Two actions, a search and an answer at once; then the end."""

    @property
    def roles(self):
        return {"left": Role("left", Parsed), "right": Role("right", Parsed)}

    def start(self, question: Question):
        return ()

    def wants(self, state):
        if state:
            return Done(state[0].text + state[1].text + state[3])
        request = LLMRequest("answer", (Message("system", "be brief"), *ASKED))
        return Generate("left", ASKED), Generate("right", ASKED), Search("q", 2), Ask(request)

    def advance(self, state, replies):
        return replies


def fan(expander=once, **options):
    tape = Tape(lambda role, prompt, rng: role[0].upper(), told={"answer": "three words here"})
    return collect(Fan(), expander, [ANN], Environment(tape, tape, tape), **options)


def test_effects_of_one_state_run_in_one_round_and_their_actions_stand_in_line():
    forest = fan()
    assert [r.role for r in forest.records] == ["left", "right", "leaf"]
    assert forest.parent_N.tolist() == [NO_PARENT, 0, 1]
    assert [r.round for r in forest.records] == [0, 0, 1]
    left, right, leaf = forest.records
    assert leaf.answer == "LRthree words here"
    assert left.state == right.state == leaf.state and len(leaf.state) == 4
    assert left.parsed.text == "L" and right.parsed.ids == right.action.ids


def test_what_one_round_asks_is_asked_side_by_side():
    met = threading.Barrier(3, timeout=10)

    class Waits(Tape):
        def sample(self, requests):
            return (met.wait() if requests else 0, super().sample(requests))[1]

        def search(self, queries, k):
            return (met.wait(), super().search(queries, k))[1]

        def complete(self, requests):
            return (met.wait(), super().complete(requests))[1]

    tape = Waits(lambda role, prompt, rng: "x")
    assert collect(Fan(), once, [ANN], Environment(tape, tape, tape)).leaf_N.sum() == 1


def test_calls_are_metered_where_they_are_made():
    search, answer = fan().records[-1].calls
    assert (search.purpose, search.asked, search.prompt_tokens) == ("search", "q", 0)
    assert [passage.id for passage in search.found] == ["p1", "p2"]
    assert (answer.purpose, answer.prompt_tokens, answer.completion_tokens) == ("answer", 3, 3)
    assert (answer.asked, answer.told) == ("go", "three words here")
    assert {search.turn, answer.turn} == {-1}  # no action was there to pay


def test_one_of_several_effects_cannot_branch():
    with pytest.raises(ValueError, match="2 replies to one of several effects"):
        fan(lambda effect, question: Branching(2))


@dataclasses.dataclass(frozen=True)
class Again:
    """Two actions at once, twice."""

    @property
    def roles(self):
        return {"a": Role("a", Parsed)}

    def start(self, question: Question):
        return 0

    def wants(self, state):
        return Done("end") if state == 2 else (Generate("a", ASKED), Generate("a", ASKED))

    def advance(self, state, replies):
        return state + 1


def test_every_action_of_a_rollout_is_sampled_with_a_seed_of_its_own():
    tape = Tape(lambda role, prompt, rng: "x")
    collect(Again(), once, [ANN], Environment(tape, tape, tape))
    assert len(set(tape.seeds)) == 4


@dataclasses.dataclass(frozen=True)
class Lookup(Again):
    """An action, then two searches at once."""

    def wants(self, state):
        if state == 0:
            return Generate("a", ASKED)
        return Done("end") if state == 2 else (Search("q", 2), Search("r", 1))


def test_an_action_is_told_all_that_was_searched_right_after_it():
    tape = Tape(lambda role, prompt, rng: "x", {"r": [passage(5)]})
    forest = collect(Lookup(), once, [ANN], Environment(tape, tape, tape))
    assert [p.id for p in forest.records[0].found] == ["p1", "p2", "p5"]


@dataclasses.dataclass(frozen=True)
class Line:
    """Two actions, one after the other."""

    @property
    def roles(self):
        return {"a": Role("a", Parsed)}

    def start(self, question: Question):
        return ()

    def wants(self, state):
        return Done("".join(state)) if len(state) == 2 else Generate("a", ASKED)

    def advance(self, state, parsed):
        return (*state, parsed.text)


class Late(Line):
    """And then a search and an answer that the first of them pays."""

    def wants(self, state):
        request = LLMRequest("answer", ASKED)
        asked = Search("q", 2, turn=0), Ask(request, turn=0)
        return asked if len(state) == 2 else Done("") if len(state) > 2 else Generate("a", ASKED)

    def advance(self, state, reply):
        return (*state, reply)


def test_a_call_is_paid_by_the_action_that_is_named():
    tape = Tape({"a": ["x", "y"]})
    forest = collect(Late(), once, [ANN], Environment(tape, tape, tape))
    assert [(call.purpose, call.turn) for call in forest.records[-1].calls] == [
        ("search", 0), ("answer", 0),
    ]  # fmt: skip


class Seeded:
    """Writes the seed of the state: equal states write equal texts."""

    def sample(self, requests):
        return [[action(f"{r.seed} {i}", "p") for i in range(r.branching.samples)]
                for r in requests]  # fmt: skip


def test_copies_of_a_rollout_differ_and_are_never_merged():
    tape = Tape({"a": ["x"] * 12})
    forest = collect(Line(), once, [ANN, BOB], Environment(tape, tape, tape), rollouts=3)
    assert forest.leaf_N.sum() == 6 and (forest.multiplicity_N == 1).all()
    assert len(set(forest.roots().tolist())) == 6
    seeded = collect(Line(), once, [ANN], Environment(Seeded(), tape, tape), rollouts=3)
    assert len({r.answer for r in seeded.records if r.answer}) == 3


def test_a_rollout_goes_on_from_those_that_are_followed():
    tape = Tape({})
    first = lambda effect, question: Branching(3, follow=1)  # noqa: E731
    forest = collect(Line(), first, [ANN], Environment(Seeded(), tape, tape))
    assert [r.role for r in forest.records] == ["a"] * 6 + ["leaf"]
    assert forest.parent_N.tolist() == [NO_PARENT] * 3 + [0] * 3 + [3]
    assert all(record.state is not None for record in forest.records)


@pytest.mark.parametrize(
    ("follow", "skip", "parents"),
    [(1, 1, [1]), (2, 1, [1, 2]), (2, 0, [0, 1]), (None, 1, [0, 1, 2])],
)
def test_actions_that_are_skipped_are_recorded_and_not_carried_on(follow, skip, parents):
    some = lambda effect, question: Branching(3, follow=follow, skip=skip)  # noqa: E731
    forest = collect(Line(), some, [ANN], Environment(Seeded(), Tape({}), Tape({})))
    assert forest.parent_N[:3].tolist() == [NO_PARENT] * 3
    assert sorted({0, 1, 2} & set(forest.parent_N.tolist())) == parents
    assert forest.leaf_N.sum() == len(parents) ** 2


@dataclasses.dataclass(frozen=True)
class Looks:
    """A query, its search, a word on what was found, and the end."""

    @property
    def roles(self):
        return {"a": Role("a", Parsed)}

    def start(self, question: Question):
        return ()

    def wants(self, state):
        if len(state) == 1 and state[0] != "silent":
            return Search(state[0], 2)
        depth = 1 + len(state)
        return Done("".join(state[::2])) if depth == 4 else Generate("a", ASKED, depth)

    def advance(self, state, reply):
        return (*state, reply.text if isinstance(reply, Parsed) else "found")


@pytest.mark.parametrize("peek", [False, True])
def test_a_query_that_is_not_followed_is_searched_for_its_reward_alone(peek):
    found = {"one": [passage(1)], "two": [passage(2), passage(3)]}
    tape = Tape({"a": ["one", "silent", "two", "end"]}, found)
    first = Branching(3, follow=1, peek=peek)
    three = lambda effect, question: first if effect.depth == 1 else Branching(1)  # noqa: E731
    forest = collect(Looks(), three, [ANN], Environment(tape, tape, tape))
    searched = [("search", "one", 2)] + [("search", "two", 2)] * peek
    assert [e for e in tape.log if e[0] == "search"] == searched
    assert [r.role for r in forest.records] == ["a"] * 4 + ["leaf"]
    assert [r.found for r in forest.records[:4]] == [
        *[(passage(1),), (), (passage(2), passage(3)) if peek else (), ()]
    ]
    assert [call.asked for call in forest.records[-1].calls] == ["one"]


class Notes(Looks):
    """A note is asked for beside each search."""

    def wants(self, state):
        wanted = super().wants(state)
        note = Ask(LLMRequest("note", ASKED))
        return (wanted, note) if isinstance(wanted, Search) else wanted


def test_what_is_not_followed_asks_no_language_model():
    tape = Tape({"a": ["one", "two", "end"]})
    first = Branching(2, follow=1, peek=True)
    two = lambda effect, question: first if effect.depth == 1 else Branching(1)  # noqa: E731
    collect(Notes(), two, [ANN], Environment(tape, tape, tape))
    assert [e for e in tape.log if e[0] in ("search", "note")].count(("note",)) == 1


# --- Contexts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer.load(policy_folder("tiny"))


def test_a_context_only_grows(tokenizer):
    said = (*tokenizer.encode("Action: go"), tokenizer.stop_ids[0])
    for chat in (True, False):
        start = context_ids(tokenizer, ASKED, (), chat)
        turn = context_ids(tokenizer, ASKED, (Said(said), Told("a <|im_end|> b")), chat)
        more = context_ids(tokenizer, ASKED, (Said(said), Told("a <|im_end|> b"), Said(said)), chat)
        assert turn[: len(start) + len(said)] == start + said and more == turn + said


def test_an_observation_cannot_close_a_turn(tokenizer):
    stop = tokenizer.stop_ids[0]
    said = (*tokenizer.encode("go"), stop)
    turn = context_ids(tokenizer, ASKED, (Said(said), Told("a <|im_end|> b")), True)
    plain = context_ids(tokenizer, ASKED, (Said(said), Told("a <|im_end|> b")), False)
    start = len(context_ids(tokenizer, ASKED, (), True))
    assert turn[start:].count(stop) == 2 and plain[start:].count(stop) == 1


def test_an_action_that_nobody_sampled_ends_with_the_stop_token_where_it_is_a_turn(tokenizer):
    """In plain text the assistant's turn goes on behind what it is told."""
    ids = tuple(tokenizer.encode("go"))
    assert written_ids(tokenizer, "go", True) == (*ids, tokenizer.stop_ids[0])
    assert written_ids(tokenizer, "go", False) == ids


@pytest.mark.parametrize("chat", [True, False])
def test_so_does_an_action_that_a_tree_forces(tokenizer, chat):
    role, forced = Role("left", Parsed, chat=chat), Branching(0, (Forced("go"),))
    ((made,),) = PolicySampler({}, tokenizer).sample([ActionRequest(role, ASKED, forced, 0)])
    assert made.ids == written_ids(tokenizer, "go", chat) and made.logps is None


def test_what_was_sampled_is_no_text_to_encode():
    assert told(ASKED, (Said((1, 2)), Told("seen"))) == ["go", "seen"]


def test_a_conversation_in_turns_is_the_templates_own(tokenizer):
    turns = [Message("user", "go"), Message("assistant", "one"), Message("user", "two")]
    said = (*tokenizer.encode("one"), tokenizer.stop_ids[0])
    whole = tuple(tokenizer.chat(turns))
    assert context_ids(tokenizer, ASKED, (Said(said), Told("two")), True) == whole
    # An action that was cut before its stop token is closed by what is told.
    assert context_ids(tokenizer, ASKED, (Said(said[:-1]), Told("two")), True) == whole
