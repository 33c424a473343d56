from __future__ import annotations

import functools

import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.errors import UserError
from jax_ragrl.llm.reader import WorldReader, facts_of
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Passage, Question

CHANGED = ("mayor", "employer", "spouse", "seat")


@functools.cache
def world() -> World:
    return generate(0, 120, hops=(1, 1, 2, 2, 3), outdated_relations=CHANGED)


def relations(question: Question) -> list[str]:
    return [relation for _, relation in question.metadata["pairs"]]


def answers(question: Question, passages: list[Passage]) -> bool:
    """Returns whether a reader that no document distracts answers correctly."""
    reader = WorldReader(world(), noise=0.0, confusion=0.0)
    shown = format_passages("c3po_tiny", passages)
    name = "answer" if passages else "answer_direct"
    messages = user_turn("c3po_tiny", name, question=question.text, documents=shown)
    return reader.complete([LLMRequest("answer", messages)])[0] in question.answers


def test_changed_facts_differ_between_the_passages_and_the_world():
    texts = {passage.id: passage.text for passage in world().passages}
    for (name, relation), source in world().source.items():
        stated = facts_of(texts[source])[name, relation]
        assert (stated != world().facts[name][relation]) == (relation in CHANGED)


def test_the_reader_knows_every_changed_fact():
    changed = {pair for pair in world().source if pair[1] in CHANGED}
    assert changed < world().famous


def test_a_search_spoils_an_answer_that_has_changed():
    """No document is best if all facts have changed, the first hop's if the last one has."""
    by_id = {passage.id: passage for passage in world().passages}
    spoiled = 0
    for question in world().questions["test"]:
        stated = [by_id[world().source[tuple(p)]] for p in question.metadata["pairs"]]
        if question.kind == "chain" and relations(question)[-1] in CHANGED:
            assert answers(question, stated[:-1])
            spoiled += 1
            assert not answers(question, stated)
    assert spoiled > 20


def test_a_changed_relation_only_ends_a_chain_and_its_passage_is_not_gold():
    asked = [question for part in world().questions.values() for question in part]
    ends = [q for q in asked if q.kind == "chain" and relations(q)[-1] in CHANGED]
    assert len(ends) > len(asked) / 5
    for question in asked:
        names = relations(question)
        if question.kind == "chain":
            assert not set(names[:-1]) & set(CHANGED)
        stated = [tuple(p) for p in question.metadata["pairs"] if p[1] not in CHANGED]
        assert set(question.gold) == {world().source[pair] for pair in stated}


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


@pytest.mark.parametrize("relation", ["year", "owner", ""])
def test_a_relation_that_cannot_change_is_refused(relation):
    with pytest.raises(UserError, match="cannot be out of date: use some of director"):
        generate(0, 80, outdated_relations=(relation,))
