"""Published question sets and corpora: one reader per format, after a note on its records."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    as_list,
    field,
    joined,
    optional_text,
    others,
    parts,
    question_text,
    read_json,
    read_records,
    text,
    unique,
)
from jax_ragrl.corpus.formats.look import look
from jax_ragrl.corpus.formats.own import own_fields, read_own_questions
from jax_ragrl.corpus.formats.qrels import read_qrels
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

# HotpotQA's distractor records, and their extension in 2WikiMultiHopQA.
#
# Yang et al. 2018, Ho et al. 2020: `_id, question, answer, supporting_facts [[title, sentence]],
# context [[title, [sentence, ...]]]`, and in 2Wiki `evidences [[subject, relation, object]]`. On
# the Hub these lists are also columns (`{title: [...], sentences: [...]}`) or texts of JSON.


# Supporting facts and evidences stay in the metadata: a question stores titles without sentences.
HOTPOTQA_USED_FIELDS = ("_id", "id", "question", "answer", "context", "type")


def _hotpotqa_tuples(record: Record, name: str, length: int) -> list[list[Any]]:
    """Returns the lists of a field, such as [title, value] pairs."""
    entries = [list(x.values()) if isinstance(x, dict) else x for x in as_list(record, name)]
    for n, entry in enumerate(entries, start=1):
        if not (isinstance(entry, list) and len(entry) == length and isinstance(entry[0], str)):
            raise UserError(
                f"{record.place}: {name} {n} is not a list of {length} that starts with a title: "
                "rewrite it"
            )
    return entries


def _hotpotqa_question(record: Record) -> Question:
    facts = _hotpotqa_tuples(record, "supporting_facts", 2)
    gold = unique(title for title, _ in facts)
    metadata = others(record, *HOTPOTQA_USED_FIELDS) | {"supporting_facts": facts}
    if record.fields.get("evidences"):
        metadata["evidences"] = _hotpotqa_tuples(record, "evidences", 3)
    return Question(
        # The official files have `_id`; some copies have `id`.
        id=text(record, "_id" if "_id" in record.fields else "id"),
        text=question_text(record, "question"),
        answers=answers(record, "answer"),
        gold=gold,
        hops=len(gold),  # in these data sets each hop is a fact of another article
        kind=optional_text(record, "type"),
        metadata=metadata,
    )


def _hotpotqa_contexts(record: Record) -> Iterator[tuple[str, str]]:
    for title, sentences in _hotpotqa_tuples(record, "context", 2):
        if not isinstance(sentences, list):
            raise UserError(f"{record.place}: the context {title!r} is not a list of sentences")
        yield title, joined(Record(f"{record.place}, context", {title: sentences}), title)


def passages_by_title(contexts: Iterator[tuple[str, str]]) -> list[Passage]:
    """Converts distinct (title, text) pairs to passages; the id is the title, or `title#2`."""
    texts_of: dict[str, dict[str, None]] = {}  # dicts, because they keep the order of insertion
    for title, content in contexts:
        texts_of.setdefault(title, {})[content] = None
    return [
        # Gold passages are named by title, so that the first text of a title has it as its id.
        Passage(title if n == 1 else f"{title}#{n}", title, content)
        for title, contents in texts_of.items()
        for n, content in enumerate(contents, start=1)
    ]


def read_hotpotqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with gold titles; every distinct context paragraph is a passage."""
    # A list, because the records are read twice: for questions, and for their contexts.
    records = list(read_records(path))
    contexts = (context for record in records for context in _hotpotqa_contexts(record))
    return [_hotpotqa_question(record) for record in records], passages_by_title(contexts)


# MuSiQue records, one per line.
#
# Trivedi et al. 2022: `id, question, answer, answer_aliases, paragraphs [{idx, title,
# paragraph_text, is_supporting}], question_decomposition [{question, answer,
# paragraph_support_idx}]`, where `#1` in a sub-question stands for the first answer.


MUSIQUE_USED_FIELDS = ("id", "question", "answer", "answer_aliases", "paragraphs")


def _musique_gold(record: Record) -> tuple[str, ...]:
    """Returns the titles of supporting paragraphs, in the order of the hops."""
    hop_of = {
        step.fields.get("paragraph_support_idx"): hop
        for hop, step in enumerate(parts(record, "question_decomposition"))
    }
    paragraphs = [p for p in parts(record, "paragraphs") if p.fields.get("is_supporting")]
    # Stable: paragraphs that no step names keep their order, after the others.
    paragraphs.sort(key=lambda p: hop_of.get(p.fields.get("idx"), len(hop_of)))
    return unique(text(paragraph, "title") for paragraph in paragraphs)


def _musique_question(record: Record) -> Question:
    key = text(record, "id")
    decomposition = list(parts(record, "question_decomposition"))
    steps = tuple(text(step, "question") for step in decomposition)
    return Question(
        id=key,
        text=question_text(record, "question"),
        answers=answers(record, "answer", "answer_aliases"),
        gold=_musique_gold(record),
        steps=steps,
        hops=len(steps),
        # Ids begin with the structure of the question, such as `2hop__` or `3hop1__`.
        kind=key.partition("__")[0],
        # The decomposition stays in the metadata, because its intermediate answers have no other
        # field.
        metadata=others(record, *MUSIQUE_USED_FIELDS)
        | {"question_decomposition": [dict(p.fields) for p in decomposition]},
    )


def read_musique(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with sub-questions and gold titles, and paragraphs as passages."""
    records = list(read_records(path))
    paragraphs = (paragraph for record in records for paragraph in parts(record, "paragraphs"))
    contexts = ((text(p, "title"), text(p, "paragraph_text")) for p in paragraphs)
    return [_musique_question(record) for record in records], passages_by_title(contexts)


# Natural Questions, open: `{question, answer}`, and the oracle form with gold passages.
#
# Kwiatkowski et al. 2019, Lee et al. 2019; the oracle form `{question, answers, ctxs [{title, text,
# isgold}]}` is that of Liu et al. 2023. Neither has ids: the id of a question is its position.


def read_nq_open(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; a file may also have ids and gold passages, see `own.py`."""
    own = own_fields("questions", look(path).fields)
    return read_own_questions(path, own, prefix="nq"), []


def _nq_open_oracle_question(record: Record, number: int) -> Question:
    contexts = parts(record, "ctxs")
    return Question(
        id=f"nq{number}",
        text=question_text(record, "question"),
        answers=answers(record, "answers"),
        gold=unique(text(c, "title") for c in contexts if c.fields.get("isgold")),
        metadata=others(record, "question", "answers", "ctxs"),
    )


def read_nq_oracle(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with gold titles, and their passages."""
    records = list(read_records(path))
    found = (context for record in records for context in parts(record, "ctxs"))
    contexts = ((text(c, "title"), text(c, "text")) for c in found)
    return [
        _nq_open_oracle_question(record, n) for n, record in enumerate(records)
    ], passages_by_title(contexts)


# TriviaQA's official JSON: `{"Data": [{QuestionId, Question, Answer {Value, Aliases}, ...}]}`.
#
# Joshi et al. 2017. The separate evidence files are not read, so the pages that a question cites
# are not gold passages.


def _triviaqa_question(record: Record) -> Question:
    return Question(
        id=text(record, "QuestionId"),
        text=question_text(record, "Question"),
        answers=answers(record, "Answer"),
        metadata=others(record, "QuestionId", "Question", "Answer"),
    )


def read_triviaqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; the first answer is the value, its aliases follow."""
    questions = list[Question]()
    for file in [path] if isinstance(path, str | pathlib.Path) else path:
        value = read_json(file)
        if not isinstance(value, dict):
            raise UserError(f"{file}: the file must be one JSON object with the field 'Data'")
        questions += map(_triviaqa_question, parts(Record(str(file), value), "Data"))
    return questions, []


# PopQA: `id, question, possible_answers` (a JSON list in a text) and more.
#
# Mallen et al. 2023. The published file is a TSV.


def _popqa_question(record: Record) -> Question:
    listed = Record(record.place, {"possible_answers": field(record, "possible_answers", list)})
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=answers(listed, "possible_answers"),
        kind=optional_text(record, "prop"),
        metadata=others(record, "id", "question", "possible_answers"),
    )


def read_popqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; `kind` is the relation that the question asks for."""
    return [_popqa_question(record) for record in read_records(path)], []


# AmbigNQ, full or light: `{id, question, annotations [{type, answer | qaPairs}]}`.
#
# Min et al. 2020. An ambiguous question has one answer list per reading; an answer of any reading
# is correct.


def _ambignq_answers(record: Record) -> Iterator[str]:
    for annotation in parts(record, "annotations"):
        # `multipleQAs` has a list of answers per reading, `singleAnswer` has its answers directly.
        # On the Hub each annotation has both fields, and one is empty.
        if annotation.fields.get("qaPairs") is not None:
            for pair in parts(annotation, "qaPairs"):
                yield from answers(pair, "answer")
        if "answer" in annotation.fields or "qaPairs" not in annotation.fields:
            yield from answers(annotation, "answer")


def _ambignq_question(record: Record) -> Question:
    kinds = unique(text(a, "type") for a in parts(record, "annotations"))
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=unique(_ambignq_answers(record)),
        kind="+".join(kinds),
        metadata=others(record, "id", "question"),
    )


def read_ambignq(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions with the answers of all their readings."""
    return [_ambignq_question(record) for record in read_records(path)], []


# FreshQA's table: CSV with `id, question, source, num_hops, fact_type, answer_0 ... answer_9`.
#
# Vu et al. 2023. The answers change over time: a file is valid for the date of its release.


FRESHQA_ANSWERS = tuple(f"answer_{n}" for n in range(10))


def _freshqa_question(record: Record) -> Question:
    # Questions with fewer than ten answers have empty cells.
    cells = (optional_text(record, name).strip() for name in FRESHQA_ANSWERS)
    answers = unique(filter(None, cells))
    if not answers:
        raise UserError(f"{record.place}: fields 'answer_0' to 'answer_9' are empty: add an answer")
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=answers,
        kind=optional_text(record, "fact_type"),
        metadata=others(record, "id", "question", *FRESHQA_ANSWERS),
    )


def read_freshqa(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; `kind` states how fast the answer changes."""
    return [_freshqa_question(record) for record in read_records(path)], []


# MultiHop-RAG: questions over news, and its corpus of articles.
#
# Tang and Yang 2024: questions `{query, answer, question_type, evidence_list [{title, ...}]}`;
# articles `{title, body, ...}`. Null queries have no evidence, and therefore no gold.


def _multihop_rag_question(record: Record, number: int) -> Question:
    gold = unique(text(part, "title") for part in parts(record, "evidence_list"))
    return Question(
        id=f"multihop_rag{number}",
        text=question_text(record, "query"),
        answers=answers(record, "answer"),
        gold=gold,
        # One article per hop.
        hops=len(gold),
        kind=optional_text(record, "question_type"),
        metadata=others(record, "query", "answer", "question_type"),
    )


def read_multihop_rag(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads questions; titles of the quoted articles are gold, the id is the position."""
    return [_multihop_rag_question(record, n) for n, record in enumerate(read_records(path))], []


# A BEIR folder: `corpus.jsonl`, `queries.jsonl`, `qrels/*.tsv`.
#
# Thakur et al. 2021. Passages with a score above 0 are gold, by id. BEIR has no answers: its
# questions measure retrieval only.


# BEIR measures retrieval on test, if a set has judgments for it.
BEIR_SPLITS = ("test", "dev", "train")


def _beir_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file in the folder, plain or gzipped."""
    candidates = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not candidates:
        raise UserError(f"{folder} has no {name}: give the folder of a BEIR data set")
    return candidates[0]


def _beir_question(record: Record, gold: dict[str, list[str]]) -> Question:
    key = text(record, "_id")
    return Question(
        id=key,
        text=question_text(record, "text"),
        answers=(),
        gold=tuple(gold.get(key, ())),
        metadata=others(record, "_id", "text"),
    )


def read_beir(path: Source) -> tuple[list[Question], Iterator[Passage]]:
    """Reads all queries (without judgments they have no gold) and the passages."""
    folder = pathlib.Path(path if isinstance(path, str | pathlib.Path) else path[0])
    # The judgments of the first split that exists.
    judged = (folder / "qrels" / f"{split}.tsv" for split in BEIR_SPLITS)
    gold = next((read_qrels(file) for file in judged if file.is_file()), {})
    queries = [
        _beir_question(record, gold) for record in read_records(_beir_file(folder, "queries.jsonl"))
    ]
    # Lazy, although the queries are not: only the corpus is large.
    _, passages = read_beir_corpus(_beir_file(folder, "corpus.jsonl"))
    return queries, passages


def read_beir_corpus(path: Source) -> tuple[list[Question], Iterator[Passage]]:
    """Reads passages `{_id, title, text}` lazily; the title may be missing."""
    return [], (
        Passage(text(record, "_id"), optional_text(record, "title"), text(record, "text"))
        for record in read_records(path)
    )


# Rows of the RL trainers verl and Search-R1.
#
# `{data_source, prompt [{role, content}], reward_model {ground_truth}, extra_info {question,
# answer}}`; `ground_truth` is a text, a list, or Search-R1's `{target: [...]}`.


def _verl_question(record: Record, number: int) -> Question:
    extra = Record(f"{record.place}, extra_info", {})
    if record.fields.get("extra_info"):
        extra = extra._replace(fields=field(record, "extra_info", dict))
    reward = Record(f"{record.place}, reward_model", field(record, "reward_model", dict))
    truth = field(reward, "ground_truth", object)
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = field(reward, "ground_truth", dict)
    if isinstance(truth, dict):
        names = [name for name in ("target", "answer") if name in truth]
        reward = Record(f"{reward.place}, ground_truth", truth)
        correct = answers(reward, names[0] if names else "target")
    else:
        correct = answers(reward, "ground_truth")
    # A list of answers has more of them than the ground truth; a text may be a whole solution.
    if isinstance(extra.fields.get("answer"), list):
        correct = answers(extra, "answer") or correct
    # Preferred to the prompt, which wraps the question in the instructions of another library.
    asked = optional_text(record, "question") or optional_text(extra, "question")
    if not asked:
        users = [m for m in parts(record, "prompt") if m.fields.get("role") == "user"]
        if not users:
            raise UserError(f"{record.place}: field 'prompt' has no user message: add the question")
        asked = question_text(users[-1], "content")  # earlier user messages may be examples
    return Question(
        id=optional_text(record, "id", optional_text(extra, "index", str(number))),
        text=asked,
        answers=correct,
        metadata=others(record, "id", "prompt", "reward_model"),
    )


def read_verl(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads the questions of a file."""
    return [_verl_question(record, n) for n, record in enumerate(read_records(path))], []


# Passages in one object `{title: [sentence, ...]}`: HippoRAG's HotpotQA collection.


def read_title_sentences(path: Source) -> tuple[list[Question], list[Passage]]:
    """Reads passages: the title is the id, the sentences are joined."""
    passages = []
    for file in [path] if isinstance(path, str | pathlib.Path) else path:
        value = read_json(file)
        if not isinstance(value, dict):
            raise UserError(f"{file}: the file must be one JSON object of title: [sentence, ...]")
        for title, sentences in value.items():
            # Any object of lists has this format, such as one with records under a single key.
            if not isinstance(sentences, list) or not all(isinstance(x, str) for x in sentences):
                raise UserError(
                    f"{file}: {title!r} is not a list of sentences: if it holds records, give a "
                    "file with that list alone"
                )
            passages.append(Passage(title, title, joined(Record(str(file), value), title)))
    return [], passages
