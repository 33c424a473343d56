"""A generated encyclopedia: entities, typed relations, short passages and multi-hop questions.

It is the library's default data set, so that a first run downloads nothing. A seed and a size
determine people, films, companies and cities that share parts of their names, one passage per
cluster of facts in one of several phrasings, and questions of one to four hops (chains) or of two
(comparisons). No entity and no question occurs in two of train, dev and test.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax_ragrl.corpus import names
from jax_ragrl.errors import UserError
from jax_ragrl.runtime.portable_random import pick, shuffled
from jax_ragrl.types import Passage, Question

Facts: TypeAlias = Mapping[str, Mapping[str, str]]  # objects by entity and relation
Part: TypeAlias = Mapping[str, Sequence[str]]  # the entities of a split, by kind
# Dev has the smallest share: it is only used for evaluations during a run.
SPLITS: Mapping[str, float] = {"train": 0.6, "dev": 0.1, "test": 0.3}


class Relation(NamedTuple):
    """A typed relation: the kinds of its subjects and objects, and the questions for it."""

    subject: str
    object: str
    asks: tuple[str, ...]  # phrasings of the outermost hop; {} is a noun phrase


# The key of a relation is its noun in a question, so that the reader can parse nested noun phrases.
# The order determines the draws of `relate`.
RELATIONS: Mapping[str, Relation] = {
    "director": Relation("film", "person", ("Who is the director of {}?", "Who directed {}?")),
    "star": Relation("film", "person", ("Who is the star of {}?", "Who played the lead in {}?")),
    "year": Relation("film", "year", ("What is the year of {}?", "When was {} released?")),
    "birthplace": Relation(
        "person", "city", ("What is the birthplace of {}?", "Where was {} born?")
    ),
    "spouse": Relation("person", "person", ("Who is the spouse of {}?", "Whom did {} marry?")),
    "employer": Relation(
        "person", "company", ("What is the employer of {}?", "Where does {} work?")
    ),
    "founder": Relation("company", "person", ("Who is the founder of {}?", "Who founded {}?")),
    "seat": Relation("company", "city", ("What is the seat of {}?", "Where is {} based?")),
    "mayor": Relation("city", "person", ("Who is the mayor of {}?", "Who runs {}?")),
    "country": Relation(
        "city", "country", ("What is the country of {}?", "In which country is {}?")
    ),
}

# A cluster is the content of one passage: its relations, and several phrasings of them.
CLUSTERS: Mapping[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    "film": (
        (("director", "year"), ("{s} was directed by {0} in {1}.", "{0} directed {s} in {1}.")),
        (("star",), ("The lead role in {s} was played by {0}.", "{s} starred {0}.")),
    ),
    "person": (
        (("birthplace",), ("{s} was born in {0}.", "{0} is where {s} was born.")),
        (
            ("spouse", "employer"),
            ("{s} married {0} and works for {1}.", "{s} works for {1} and is married to {0}."),
        ),
    ),
    "company": (
        (
            ("founder", "seat"),
            ("{s} was founded by {0} and is based in {1}.", "{0} founded {s}, based in {1}."),
        ),
    ),
    "city": (
        (
            ("mayor", "country"),
            ("{s} is a city in {1} run by mayor {0}.", "{0} is the mayor of {s}, a city in {1}."),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class World:
    """One encyclopedia. `facts[entity][relation]` is the current object of a fact.

    `famous` holds the facts, as (entity, relation), that the rule-based reader knows.
    """

    passages: tuple[Passage, ...]
    questions: Mapping[str, tuple[Question, ...]]
    facts: Facts
    source: Mapping[tuple[str, str], str]  # (entity, relation) -> passage id
    famous: frozenset[tuple[str, str]]


def generate(
    seed: int = 0,
    size: int = 240,
    *,
    famous: float = 0.3,
    questions: int = 12,
    hops: Sequence[int] = (1, 2, 3, 4),
    outdated_relations: Sequence[str] = (),
) -> World:
    """Generates the encyclopedia of a seed, the same on every platform.

    Args:
      size: number of people; there are half as many films, and a fifth as many companies and
        cities.
      famous: share of facts that the frozen language model knows without reading, 0 to 1.
      questions: number of questions drawn per person; duplicates are removed.
      hops: lengths of the chains; each length is as frequent as the comparisons.
      outdated_relations: relations whose passages are out of date (`former_facts`): the frozen
        language model knows their current facts, and in a chain they come last.

    Raises:
      UserError: the size is too small for three splits, or exceeds the name banks; or a relation
        cannot change.
    """
    allowed = [relation for relation, spec in RELATIONS.items() if spec.object in CLUSTERS]
    for relation in outdated_relations:
        if relation not in allowed:
            raise UserError(
                f"the relation {relation!r} of the generated world cannot be out of date: use "
                f"some of {', '.join(allowed)}"
            )
    if size < 40:
        raise UserError(f"world size {size} is too small for three splits: use at least 40")
    # A string seed is hashed with SHA-512: equal seeds of different sizes give unrelated worlds.
    # All draws share this generator, so that the order of the calls below determines the world.
    rng = random.Random(f"world {seed} {size}")
    # The splits share these iterators, so that no name is taken twice.
    cast = {kind: iter(entity_names(rng, kind)) for kind in CLUSTERS}
    # 1. Entities and facts of each split. A fact never refers to an entity of another split.
    parts = {split: populate(cast, max(8, round(size * x))) for split, x in SPLITS.items()}
    kinds = {name: kind for part in parts.values() for kind in part for name in part[kind]}
    facts = {name: own for part in parts.values() for name, own in relate(rng, part).items()}
    written = former_facts(seed, facts, tuple(parts.values()), outdated_relations)
    # 2. The passages of all splits form one corpus.
    passages, source = write_passages(rng, written, kinds)
    # 3. Questions, each from the facts of one split.
    questions_of = {
        split: ask(
            *(rng, split, part, facts, source),
            *(questions * len(part["person"]), hops, outdated_relations),
        )
        for split, part in parts.items()
    }
    # 4. `source` keeps the order of insertion, so that equal seeds draw equal famous facts.
    # One draw per fact in any case: outdated relations change no other famous fact.
    known_facts = [x for x in source if rng.random() < famous or x[1] in outdated_relations]
    # Without the shuffle, passages of one entity and of one split would be neighbors in the corpus.
    corpus = tuple(shuffled(rng, passages))
    return World(corpus, questions_of, facts, source, frozenset(known_facts))


def entity_names(rng: random.Random, kind: str) -> list[str]:
    """Returns every name of a kind of entity in random order; names share their words."""
    banks = {
        "person": (names.FIRST_NAME, names.LAST_NAME),
        "film": (names.ADJECTIVE, names.NOUN),
        "company": (names.BRAND, names.TRADE),
        "city": (names.PREFIX, names.TOWN),
    }
    first, second = banks[kind]
    return shuffled(rng, [f"{a} {b}" for a in first for b in second])


def populate(cast: Mapping[str, Iterator[str]], people: int) -> dict[str, list[str]]:
    """Takes the entities of one split from the iterators over names, by kind."""
    counts = {"person": people, "film": people // 2, "company": people // 5, "city": people // 5}
    try:
        # At least two entities of each kind: a comparison needs two, and nobody marries themselves.
        return {kind: [next(cast[kind]) for _ in range(max(2, n))] for kind, n in counts.items()}
    except StopIteration:
        # The person names suffice for this limit; films and companies are exhausted soon above it.
        limit = len(names.FIRST_NAME) * len(names.LAST_NAME) * 3 // 4
        raise UserError(f"the name banks are exhausted: use a world size below {limit}") from None


def relate(rng: random.Random, part: Part) -> dict[str, dict[str, str]]:
    """Draws the facts of one split: an object per (entity, relation); spouses are mutual."""
    years = [str(year) for year in range(1930, 2020)]
    objects = {**part, "year": years, "country": names.COUNTRY}
    facts: dict[str, dict[str, str]] = {name: {} for members in part.values() for name in members}
    for relation, spec in RELATIONS.items():
        for name in part[spec.subject]:
            others = [o for o in objects[spec.object] if o != name]
            facts[name][relation] = pick(rng, others)
    # Marriage is mutual. With an odd number of people the last one keeps the spouse drawn above.
    couples = shuffled(rng, part["person"])
    for a, b in zip(couples[::2], couples[1::2], strict=False):
        facts[a]["spouse"], facts[b]["spouse"] = b, a
    return facts


def former_facts(
    seed: int, facts: Facts, parts: Sequence[Part], outdated_relations: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Returns the facts as the passages state them, of which those of some relations have changed.

    The reader knows the current values: a search for a changed one makes the answer wrong. The
    words of a question tell which relations change, so that the best strategy depends on it. A
    former object is of the split of its entity.
    """
    # Drawn apart from the values of the world.
    rng = random.Random(f"former facts {seed}")
    former = {name: dict(of_name) for name, of_name in facts.items()}
    for part in parts:
        for name in (name for members in part.values() for name in members):
            for relation in [r for r in facts[name] if r in outdated_relations]:
                # Nobody is married to themselves, and a former value is not the current one.
                not_former = {name, facts[name][relation]}
                others = [x for x in part[RELATIONS[relation].object] if x not in not_former]
                former[name][relation] = pick(rng, others)
    return former


def write_passages(
    rng: random.Random, facts: Facts, kinds: Mapping[str, str]
) -> tuple[list[Passage], dict[tuple[str, str], str]]:
    """Writes a passage per cluster of facts; returns them, and the passage id of each fact."""
    passages: list[Passage] = []
    source: dict[tuple[str, str], str] = {}
    for name, objects in facts.items():
        for relations, phrasings in CLUSTERS[kinds[name]]:
            text = pick(rng, phrasings).format(*(objects[r] for r in relations), s=name)
            passage = Passage(f"p{len(passages):05d}", name, text)
            passages.append(passage)
            source |= {(name, relation): passage.id for relation in relations}
    return passages, source


def ask(
    rng: random.Random,
    split: str,
    part: Part,
    facts: Facts,
    source: Mapping[tuple[str, str], str],
    count: int,
    hops: Sequence[int],
    outdated_relations: Sequence[str] = (),
) -> tuple[Question, ...]:
    """Draws up to `count` distinct questions: chains of each length and comparisons in turn.

    Passages of `outdated_relations` are out of date, and therefore not gold.
    """
    questions: dict[str, Question] = {}
    for i in range(count):
        # Length 0 stands for a comparison.
        length = [*hops, 0][i % (len(hops) + 1)]
        draw = functools.partial(chain, hops=length, last=outdated_relations) if length else compare
        draft = draw(rng, part, facts)
        if draft is None or draft.text in questions:
            continue
        # Two facts may be in one passage, such as the director and the year of a film.
        pairs = [(name, relation) for name, relation in draft.metadata["pairs"]]
        stated = [source[pair] for pair in pairs if pair[1] not in outdated_relations]
        questions[draft.text] = dataclasses.replace(
            draft, id=f"{split}-{len(questions):05d}", gold=tuple(dict.fromkeys(stated))
        )
    return tuple(questions.values())


def _draft(
    kind: str, text: str, answer: str, steps: Sequence[str], pairs: Sequence[Sequence[str]]
) -> Question:
    """A question without id and gold; `pairs` are the facts, (entity, relation), that it needs."""
    facts = {"pairs": [list(pair) for pair in pairs]}
    return Question("", text, (answer,), (), tuple(steps), len(steps), kind, facts)


def chain(
    rng: random.Random, part: Part, facts: Facts, hops: int, last: Sequence[str] = ()
) -> Question | None:
    """Draws a chain of `hops` relations; None if it visits an entity twice. `last` ones end it."""
    start = pick(rng, part[pick(rng, ("film", "person", "company", "city"))])
    phrase, at, visited, steps, pairs, relation = start, start, {start}, [], [], ""
    for hop in range(hops):
        # Only entities have facts: a year or a country can only end a chain.
        options = [
            r
            for r in facts.get(at, {})
            if hop + 1 == hops or (RELATIONS[r].object in CLUSTERS and r not in last)
        ]
        if not options:
            return None
        if hop:
            phrase = f"the {relation} of {phrase}"
        relation = pick(rng, options)
        pairs.append((at, relation))
        steps.append(f"{relation} of {start if hop == 0 else f'#{hop}'}")
        at = facts[at][relation]
        # The spouse of the spouse is the first person again, which gives the answer away.
        if at in visited:
            return None
        visited.add(at)
    text = pick(rng, RELATIONS[relation].asks).format(phrase)
    return _draft("chain", text, at, steps, pairs)


COMPARISONS: Mapping[str, tuple[str, str]] = {
    "year": ("film", "Which film is older, {} or {}?"),
    "birthplace": ("person", "Were {} and {} born in the same city?"),
    "country": ("city", "Are {} and {} in the same country?"),
    "employer": ("person", "Do {} and {} work for the same company?"),
}


def compare(rng: random.Random, part: Part, facts: Facts) -> Question | None:
    """Draws a comparison of two entities by one relation; about half the yes/no answers are yes."""
    relation = pick(rng, tuple(COMPARISONS))
    subject, form = COMPARISONS[relation]
    a, b = pick(rng, part[subject]), pick(rng, part[subject])
    # Two random entities rarely share a value: without this, almost every answer would be no.
    if relation != "year" and rng.random() < 0.5:
        alike = [e for e in part[subject] if facts[e][relation] == facts[a][relation]]
        b = pick(rng, alike)
    value_a, value_b = facts[a][relation], facts[b][relation]
    # Of two films of one year neither is older.
    if a == b or (relation == "year" and value_a == value_b):
        return None
    same = "yes" if value_a == value_b else "no"
    # All years have four digits, so that strings compare like numbers.
    answer = min((value_a, a), (value_b, b))[1] if relation == "year" else same
    steps = (f"{relation} of {a}", f"{relation} of {b}")
    return _draft("comparison", form.format(a, b), answer, steps, ((a, relation), (b, relation)))
