"""A generated encyclopedia: entities, typed relations, short passages and multi-hop questions.

The embedded default of the library. From a seed and a size it makes people, films, companies and
cities that share parts of their names, one passage a cluster of facts in one of several
phrasings, and questions of one to four hops (chains) or two (comparisons). Train, dev and test
live in separate parts of the world: no entity and no question is in two of them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

from jax_ragrl.corpus import names
from jax_ragrl.errors import UserError
from jax_ragrl.runtime.portable_random import pick, shuffled
from jax_ragrl.types import Passage, Question

SPLITS: Mapping[str, float] = {"train": 0.6, "dev": 0.1, "test": 0.3}


@dataclasses.dataclass(frozen=True)
class Relation:
    """A typed relation: how a question names it and how a question ends with it."""

    subject: str
    object: str
    noun: str
    asks: tuple[str, ...]  # the outermost hop; {} is a noun phrase


RELATIONS: Mapping[str, Relation] = {
    "director": Relation(
        "film", "person", "director", ("Who is the director of {}?", "Who directed {}?")
    ),
    "star": Relation(
        "film", "person", "star", ("Who is the star of {}?", "Who played the lead in {}?")
    ),
    "year": Relation("film", "year", "year", ("What is the year of {}?", "When was {} released?")),
    "birthplace": Relation(
        "person", "city", "birthplace", ("What is the birthplace of {}?", "Where was {} born?")
    ),
    "spouse": Relation(
        "person", "person", "spouse", ("Who is the spouse of {}?", "Whom did {} marry?")
    ),
    "employer": Relation(
        "person", "company", "employer", ("What is the employer of {}?", "Where does {} work?")
    ),
    "founder": Relation(
        "company", "person", "founder", ("Who is the founder of {}?", "Who founded {}?")
    ),
    "seat": Relation("company", "city", "seat", ("What is the seat of {}?", "Where is {} based?")),
    "mayor": Relation("city", "person", "mayor", ("Who is the mayor of {}?", "Who runs {}?")),
    "country": Relation(
        "city", "country", "country", ("What is the country of {}?", "In which country is {}?")
    ),
}

# A cluster is what one passage tells: the relations, and several ways to say them.
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
    """One encyclopedia. `facts[entity][relation]` is the object; `famous` lists known pairs."""

    passages: tuple[Passage, ...]
    questions: Mapping[str, tuple[Question, ...]]
    facts: Mapping[str, Mapping[str, str]]
    source: Mapping[tuple[str, str], str]  # (entity, relation) -> passage id
    famous: frozenset[tuple[str, str]]


def generate(
    seed: int = 0,
    size: int = 240,
    *,
    famous: float = 0.3,
    questions: int = 12,
    hops: Sequence[int] = (1, 2, 3, 4),
) -> World:
    """The encyclopedia of a seed.

    Args:
      seed: any integer; the same seed gives the same world everywhere.
      size: how many people; films are half as many, companies and cities a fifth each.
      famous: the share of facts that the frozen language model knows without reading.
      questions: how many questions are asked for each person (unique ones are kept).
      hops: the lengths of chains that are asked, each as often as comparisons are.
    """
    if size < 40:
        raise UserError(f"world size {size} is too small for three splits: use at least 40")
    rng = random.Random(f"world {seed} {size}")
    facts: dict[str, dict[str, str]] = {}
    kinds: dict[str, str] = {}
    parts = {}
    cast = {kind: iter(entity_names(rng, kind)) for kind in CLUSTERS}
    for split, share in SPLITS.items():
        part = populate(cast, max(8, round(size * share)))
        kinds |= {name: kind for kind, members in part.items() for name in members}
        facts |= relate(rng, part)
        parts[split] = part
    passages, source = write_passages(rng, facts, kinds)
    asked = {
        split: ask(rng, split, part, facts, source, questions * len(part["person"]), hops)
        for split, part in parts.items()
    }
    known = frozenset(pair for pair in source if rng.random() < famous)
    return World(tuple(shuffled(rng, passages)), asked, facts, source, known)


def entity_names(rng: random.Random, kind: str) -> list[str]:
    """Every name of a kind, in random order; names of a kind share their words."""
    banks = {
        "person": (names.GIVEN, names.FAMILY),
        "film": (names.ADJECTIVE, names.NOUN),
        "company": (names.BRAND, names.TRADE),
        "city": (names.PREFIX, names.TOWN),
    }
    first, second = banks[kind]
    return shuffled(rng, [f"{a} {b}" for a in first for b in second])


def populate(cast: Mapping[str, Iterator[str]], people: int) -> dict[str, list[str]]:
    """The entities of one split."""
    counts = {"person": people, "film": people // 2, "company": people // 5, "city": people // 5}
    try:
        return {kind: [next(cast[kind]) for _ in range(max(2, n))] for kind, n in counts.items()}
    except StopIteration:
        limit = len(names.GIVEN) * len(names.FAMILY) * 3 // 4
        raise UserError(f"the name banks are exhausted: use a world size below {limit}") from None


def relate(rng: random.Random, part: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Facts of one split: an object for every (entity, relation), spouses mutual."""
    years = [str(year) for year in range(1930, 2020)]
    objects = {**part, "year": years, "country": names.COUNTRY}
    facts: dict[str, dict[str, str]] = {name: {} for members in part.values() for name in members}
    for relation, spec in RELATIONS.items():
        for name in part[spec.subject]:
            others = [o for o in objects[spec.object] if o != name]
            facts[name][relation] = pick(rng, others)
    couples = shuffled(rng, part["person"])
    for a, b in zip(couples[::2], couples[1::2], strict=False):
        facts[a]["spouse"], facts[b]["spouse"] = b, a
    return facts


def write_passages(
    rng: random.Random, facts: Mapping[str, Mapping[str, str]], kinds: Mapping[str, str]
) -> tuple[list[Passage], dict[tuple[str, str], str]]:
    """One passage a cluster, and where each fact is told."""
    passages: list[Passage] = []
    source: dict[tuple[str, str], str] = {}
    for name, known in facts.items():
        for relations, phrasings in CLUSTERS[kinds[name]]:
            text = pick(rng, phrasings).format(*(known[r] for r in relations), s=name)
            passage = Passage(f"p{len(passages):05d}", name, text)
            passages.append(passage)
            source |= {(name, relation): passage.id for relation in relations}
    return passages, source


def ask(
    rng: random.Random,
    split: str,
    part: Mapping[str, Sequence[str]],
    facts: Mapping[str, Mapping[str, str]],
    source: Mapping[tuple[str, str], str],
    count: int,
    hops: Sequence[int],
) -> tuple[Question, ...]:
    """Up to `count` distinct questions: chains of each length and comparisons, equally often."""
    asked: dict[str, Question] = {}
    for i in range(count):
        length = [*hops, 0][i % (len(hops) + 1)]
        draft = chain(rng, part, facts, length) if length else compare(rng, part, facts)
        if draft is None or draft.text in asked:
            continue
        gold = tuple(dict.fromkeys(source[pair] for pair in draft.pairs))
        asked[draft.text] = Question(
            id=f"{split}-{len(asked):05d}",
            text=draft.text,
            answers=(draft.answer,),
            gold=gold,
            steps=draft.steps,
            hops=len(draft.steps),
            kind=draft.kind,
            metadata={"pairs": [list(pair) for pair in draft.pairs]},
        )
    return tuple(asked.values())


@dataclasses.dataclass(frozen=True)
class Draft:
    """A question before it has an id: its text, its steps, and the facts it rests on."""

    kind: str
    text: str
    answer: str
    steps: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


def chain(
    rng: random.Random,
    part: Mapping[str, Sequence[str]],
    facts: Mapping[str, Mapping[str, str]],
    hops: int,
) -> Draft | None:
    """A chain of `hops` relations from a random entity; None where it runs into itself."""
    start = pick(rng, part[pick(rng, ("film", "person", "company", "city"))])
    phrase, at, seen, steps, pairs, relation = start, start, {start}, [], [], ""
    for hop in range(hops):
        options = [
            r for r in facts.get(at, {}) if hop + 1 == hops or RELATIONS[r].object in CLUSTERS
        ]
        if not options:
            return None
        if hop:
            phrase = f"the {RELATIONS[relation].noun} of {phrase}"
        relation = pick(rng, options)
        pairs.append((at, relation))
        steps.append(f"{relation} of {start if hop == 0 else f'#{hop}'}")
        at = facts[at][relation]
        if at in seen:
            return None
        seen.add(at)
    text = pick(rng, RELATIONS[relation].asks).format(phrase)
    return Draft("chain", text, at, tuple(steps), tuple(pairs))


COMPARISONS: Mapping[str, tuple[str, str]] = {
    "year": ("film", "Which film is older, {} or {}?"),
    "birthplace": ("person", "Were {} and {} born in the same city?"),
    "country": ("city", "Are {} and {} in the same country?"),
    "employer": ("person", "Do {} and {} work for the same company?"),
}


def compare(
    rng: random.Random, part: Mapping[str, Sequence[str]], facts: Mapping[str, Mapping[str, str]]
) -> Draft | None:
    """A comparison of two entities by one relation; about half of the yes/no ones are yes."""
    relation = pick(rng, tuple(COMPARISONS))
    subject, form = COMPARISONS[relation]
    a, b = pick(rng, part[subject]), pick(rng, part[subject])
    if relation != "year" and rng.random() < 0.5:
        alike = [e for e in part[subject] if facts[e][relation] == facts[a][relation]]
        b = pick(rng, alike)
    value_a, value_b = facts[a][relation], facts[b][relation]
    if a == b or (relation == "year" and value_a == value_b):
        return None
    same = "yes" if value_a == value_b else "no"
    answer = min((value_a, a), (value_b, b))[1] if relation == "year" else same
    steps = (f"{relation} of {a}", f"{relation} of {b}")
    return Draft("comparison", form.format(a, b), answer, steps, ((a, relation), (b, relation)))
