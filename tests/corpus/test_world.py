import collections
import functools
import hashlib
import json

import pytest

from jax_ragrl.corpus.world import SPLITS, World, generate
from jax_ragrl.errors import UserError
from jax_ragrl.llm.reader import WorldReader, facts_of
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Passage, Question

# SHA-256 of `canonical(generate(0, 120))`. A change here is a change of every recorded result:
#   python -m tests.corpus.test_world
WORLD_0_120 = "8d34b535d05ade0870120ff155932d4823b87c1ea38c8c1a8e4edc9ea29055f8"


@functools.cache
def world(seed: int = 0, size: int = 120) -> World:
    return generate(seed, size)


def canonical(world: World) -> str:
    """A world as JSON that tells everything and does not depend on the order of sets."""
    parts = {
        "passages": world.passages,
        "questions": {k: [vars(q) for q in questions] for k, questions in world.questions.items()},
        "facts": world.facts,
        "source": sorted([*pair, p] for pair, p in world.source.items()),
        "famous": sorted(world.famous),
    }
    return json.dumps(parts, sort_keys=True, default=dict)


def digest(world: World) -> str:
    return hashlib.sha256(canonical(world).encode()).hexdigest()


def everything(world: World) -> list[Question]:
    return [question for split in world.questions.values() for question in split]


def test_chains_have_the_requested_lengths():
    asked = generate(0, 120, hops=(2, 3)).questions["train"]
    forms = collections.Counter((q.kind, q.hops) for q in asked)
    assert set(forms) == {("chain", 2), ("chain", 3), ("comparison", 2)}
    assert max(forms.values()) < 1.5 * min(forms.values())


def test_a_seed_gives_the_committed_world():
    assert digest(world()) == WORLD_0_120


def entities(world: World, split: str) -> set[str]:
    """All that a split's questions touch, years and countries aside."""
    pairs = [tuple(pair) for q in world.questions[split] for pair in q.metadata["pairs"]]
    passed = {name for name, _ in pairs} | {world.facts[name][relation] for name, relation in pairs}
    return passed & set(world.facts)


@pytest.mark.parametrize("which", [(0, 120), (7, 40)])
def test_splits_share_no_entity_no_question_and_no_passage(which):
    splits = list(SPLITS)
    for i, a in enumerate(splits):
        for b in splits[i + 1 :]:
            here, there = (world(*which).questions[s] for s in (a, b))
            assert here and there
            assert not entities(world(*which), a) & entities(world(*which), b)
            assert not {q.text for q in here} & {q.text for q in there}
            assert not {q.id for q in here} & {q.id for q in there}
            gold = [{p for q in part for p in q.gold} for part in (here, there)]
            assert not gold[0] & gold[1]


def follow(question: Question, told: dict[tuple[str, str], str]) -> str:
    """The answer by the question's steps from what was told alone."""
    values: list[str] = []
    for step in question.steps:
        relation, _, subject = step.partition(" of ")
        at = values[int(subject[1:]) - 1] if subject.startswith("#") else subject
        values.append(told[at, relation])
    if question.kind == "chain":
        return values[-1]
    if question.steps[0].startswith("year"):
        names = [step.removeprefix("year of ") for step in question.steps]
        return names[values.index(min(values))]
    return "yes" if values[0] == values[1] else "no"


@pytest.mark.parametrize("which", [(0, 120), (5, 60)])
def test_gold_passages_tell_the_facts_and_the_answer_follows(which):
    text = {passage.id: passage.text for passage in world(*which).passages}
    for question in everything(world(*which)):
        told = {pair: v for p in question.gold for pair, v in facts_of(text[p]).items()}
        assert set(map(tuple, question.metadata["pairs"])) <= set(told)
        assert (follow(question, told),) == question.answers
        assert question.hops == len(question.steps) and len(question.gold) <= question.hops


def test_every_fact_is_in_exactly_its_source_passage():
    told: dict[tuple[str, str], list[str]] = {}
    for passage in world().passages:
        for pair, value in facts_of(passage.text).items():
            assert world().facts[pair[0]][pair[1]] == value
            told.setdefault(pair, []).append(passage.id)
    assert told == {pair: [passage] for pair, passage in world().source.items()}
    assert set(told) == {(name, r) for name, relations in world().facts.items() for r in relations}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_the_famous_share_is_the_one_asked_for(share):
    made = generate(3, 80, famous=share)
    facts = len(made.source)
    tolerance = 4 * (share * (1 - share) / facts) ** 0.5
    assert abs(len(made.famous) / facts - share) <= tolerance
    assert made.famous <= set(made.source)


def test_the_famous_share_changes_neither_facts_nor_questions():
    some, all_ = generate(3, 80, famous=0.3), generate(3, 80, famous=1.0)
    assert some.famous < all_.famous
    assert (some.passages, some.questions, some.facts) == (
        all_.passages,
        all_.questions,
        all_.facts,
    )


@pytest.mark.parametrize(
    ("size", "outdated", "message"),
    [(size, (), f"size {size} is too small.*at least 40") for size in (39, 1, 0, -5)]
    + [(80, (x,), "cannot be out of date: use some of director") for x in ("year", "owner", "")],
)
def test_a_world_too_small_or_with_a_relation_that_cannot_change_is_refused(
    size, outdated, message
):
    with pytest.raises(UserError, match=message):
        generate(0, size, outdated_relations=outdated)


def test_the_largest_advertised_world_size_works():
    with pytest.raises(UserError, match="exhausted.*below") as error:
        generate(0, 5000)
    limit = int(str(error.value).split()[-1])
    assert generate(0, limit - 1, questions=1).passages


CHANGED = ("mayor", "employer", "spouse", "seat")


@functools.cache
def changed_world() -> World:
    return generate(0, 120, hops=(1, 1, 2, 2, 3), outdated_relations=CHANGED)


def relations(question: Question) -> list[str]:
    return [relation for _, relation in question.metadata["pairs"]]


def answers(question: Question, passages: list[Passage]) -> bool:
    """Returns whether a reader that no document distracts answers correctly."""
    reader = WorldReader(changed_world(), noise=0.0, confusion=0.0)
    shown = format_passages("c3po_tiny", passages)
    name = "answer" if passages else "answer_direct"
    messages = user_turn("c3po_tiny", name, question=question.text, documents=shown)
    return reader.complete([LLMRequest("answer", messages)])[0] in question.answers


def test_changed_facts_differ_between_the_passages_and_the_changed_world():
    texts = {passage.id: passage.text for passage in changed_world().passages}
    for (name, relation), source in changed_world().source.items():
        stated = facts_of(texts[source])[name, relation]
        assert (stated != changed_world().facts[name][relation]) == (relation in CHANGED)


def test_a_search_spoils_an_answer_that_has_changed():
    """No document is best if all facts have changed, the first hop's if the last one has."""
    by_id = {passage.id: passage for passage in changed_world().passages}
    spoiled = 0
    for question in changed_world().questions["test"]:
        stated = [by_id[changed_world().source[tuple(p)]] for p in question.metadata["pairs"]]
        if question.kind == "chain" and relations(question)[-1] in CHANGED:
            assert answers(question, stated[:-1])
            spoiled += 1
            assert not answers(question, stated)
    assert spoiled > 20


def test_a_changed_relation_only_ends_a_chain_and_its_passage_is_not_gold():
    asked = [question for part in changed_world().questions.values() for question in part]
    ends = [q for q in asked if q.kind == "chain" and relations(q)[-1] in CHANGED]
    assert len(ends) > len(asked) / 5
    for question in asked:
        names = relations(question)
        if question.kind == "chain":
            assert not set(names[:-1]) & set(CHANGED)
        stated = [tuple(p) for p in question.metadata["pairs"] if p[1] not in CHANGED]
        assert set(question.gold) == {changed_world().source[pair] for pair in stated}


def test_other_relations_keep_the_world_as_it_was():
    same, changed = generate(3, 80), generate(3, 80, outdated_relations=("mayor",))
    assert same.facts == changed.facts
    texts = {passage.id: passage for passage in changed.passages}
    different = {
        passage.title
        for passage in same.passages
        if facts_of(passage.text) != facts_of(texts[passage.id].text)
    }
    assert different == {name for name, relation in same.source if relation == "mayor"}


if __name__ == "__main__":
    print(digest(generate(0, 120)))
