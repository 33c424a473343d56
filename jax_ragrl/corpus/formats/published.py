"""Published question sets and corpora: one reader per format."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from jax_ragrl.corpus.fields import NAMES
from jax_ragrl.corpus.formats.files import (
    Record,
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
    texts,
    unique,
)
from jax_ragrl.corpus.formats.flashrag import id_in_source, own_id
from jax_ragrl.corpus.formats.look import look
from jax_ragrl.corpus.formats.own import own_fields, read_own_questions
from jax_ragrl.corpus.formats.qrels import read_qrels
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

Files: TypeAlias = Sequence[pathlib.Path]  # read as one
# Large corpora are read lazily, so that 21 million passages never share the memory.
Reader: TypeAlias = Callable[[Files], tuple[list[Question], Iterable[Passage]]]
ReadQuestion: TypeAlias = Callable[[Record, int], Question]  # a record and its number, from 0


def questions_of(read: ReadQuestion) -> Reader:
    """Returns the reader of a format whose records are questions.

    A file may also have gold passages in a field of one's own, see `own.py`.
    """

    def read_all(files: Files) -> tuple[list[Question], list[Passage]]:
        questions = []
        for n, record in enumerate(read_records(files)):
            question = read(record, n)
            name = next((x for x in NAMES["questions"]["gold"] if record.fields.get(x)), "")
            if name and not question.gold:
                metadata = {k: v for k, v in question.metadata.items() if k != name}
                gold = unique(texts(record, name))
                question = dataclasses.replace(question, gold=gold, metadata=metadata)
            questions.append(question)
        return questions, []

    return read_all


def with_contexts(
    read: ReadQuestion, contexts: Callable[[Record], Iterable[tuple[str, str]]]
) -> Reader:
    """Returns the reader of a format whose records are questions with (title, text) contexts.

    Every distinct context is a passage; the id is its title, or `title#2`.
    """

    def read_both(files: Files) -> tuple[list[Question], list[Passage]]:
        records = list(read_records(files))
        questions = [read(record, n) for n, record in enumerate(records)]
        texts_of: dict[str, dict[str, None]] = {}  # dicts, because they keep the order of insertion
        for record in records:
            for title, content in contexts(record):
                texts_of.setdefault(title, {})[content] = None
        return questions, [
            # Gold passages are named by title, so that the first text of a title has it as its id.
            Passage(title if n == 1 else f"{title}#{n}", title, content)
            for title, contents in texts_of.items()
            for n, content in enumerate(contents, start=1)
        ]

    return read_both


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


def hotpotqa(record: Record, _: int) -> Question:
    """Reads a distractor record of HotpotQA, or of its extension in 2WikiMultiHopQA.

    Yang et al. 2018, Ho et al. 2020: `_id, question, answer, supporting_facts [[title, sentence]],
    context [[title, [sentence, ...]]]`, and in 2Wiki `evidences [[subject, relation, object]]`. On
    the Hub these lists are also columns (`{title: [...], sentences: [...]}`) or texts of JSON.
    """
    facts = _hotpotqa_tuples(record, "supporting_facts", 2)
    gold = unique(title for title, _ in facts)
    # Supporting facts and evidences stay: a question stores titles without sentences.
    metadata = others(record, "_id", "id", "question", "answer", "context", "type")
    metadata["supporting_facts"] = facts
    if record.fields.get("evidences"):
        metadata["evidences"] = _hotpotqa_tuples(record, "evidences", 3)
    return Question(
        id=text(record, "_id" if "_id" in record.fields else "id"),
        text=question_text(record, "question"),
        answers=answers(record, "answer"),
        gold=gold,
        hops=len(gold),  # in these data sets each hop is a fact of another article
        kind=optional_text(record, "type"),
        metadata=metadata,
    )


def hotpotqa_contexts(record: Record) -> Iterator[tuple[str, str]]:
    """Yields the articles of a record of `hotpotqa`."""
    for title, sentences in _hotpotqa_tuples(record, "context", 2):
        if not isinstance(sentences, list):
            raise UserError(f"{record.place}: the context {title!r} is not a list of sentences")
        yield title, joined(Record(f"{record.place}, context", {title: sentences}), title)


def musique(record: Record, _: int) -> Question:
    """Reads a record of MuSiQue; gold titles are in the order of the hops.

    Trivedi et al. 2022: `id, question, answer, answer_aliases, paragraphs [{idx, title,
    paragraph_text, is_supporting}], question_decomposition [{question, answer,
    paragraph_support_idx}]`, where `#1` in a sub-question stands for the first answer.
    """
    key = text(record, "id")
    decomposition = list(parts(record, "question_decomposition"))
    steps = tuple(text(step, "question") for step in decomposition)
    hop_of = {
        step.fields.get("paragraph_support_idx"): hop for hop, step in enumerate(decomposition)
    }
    found = [p for p in parts(record, "paragraphs") if p.fields.get("is_supporting")]
    # Stable: paragraphs that no step names keep their order, after the others.
    found.sort(key=lambda p: hop_of.get(p.fields.get("idx"), len(hop_of)))
    metadata = others(record, "id", "question", "answer", "answer_aliases", "paragraphs")
    return Question(
        id=key,
        text=question_text(record, "question"),
        answers=answers(record, "answer"),
        gold=unique(text(paragraph, "title") for paragraph in found),
        steps=steps,
        hops=len(steps),
        # Ids begin with the structure of the question, such as `2hop__` or `3hop1__`.
        kind=key.partition("__")[0],
        # The intermediate answers of the decomposition have no other field.
        metadata=metadata | {"question_decomposition": [dict(p.fields) for p in decomposition]},
    )


def musique_contexts(record: Record) -> Iterator[tuple[str, str]]:
    """Yields the paragraphs of a record of `musique`."""
    return ((text(p, "title"), text(p, "paragraph_text")) for p in parts(record, "paragraphs"))


def read_nq_open(files: Files) -> tuple[list[Question], list[Passage]]:
    """Reads `{question, answer}` of open Natural Questions, Kwiatkowski et al. 2019.

    A file may also have ids and gold passages, see `own.py`; else an id is the position.
    """
    own = own_fields("questions", look(files).fields)
    return read_own_questions(files, own, prefix="nq"), []


def nq_oracle(record: Record, number: int) -> Question:
    """Reads `{question, answers, ctxs [{title, text, isgold}]}`, Liu et al. 2023."""
    return Question(
        id=own_id(record, f"nq{number}"),
        text=question_text(record, "question"),
        answers=answers(record, "answers"),
        gold=unique(text(c, "title") for c in parts(record, "ctxs") if c.fields.get("isgold")),
        metadata=others(record, "question", "answers", "ctxs"),
    )


def nq_oracle_contexts(record: Record) -> Iterator[tuple[str, str]]:
    """Yields the passages of a record of `nq_oracle`."""
    return ((text(c, "title"), text(c, "text")) for c in parts(record, "ctxs"))


def _objects(files: Files, form: str) -> Iterator[Record]:
    """Yields files that hold one JSON object each; `form` describes it."""
    for file in files:
        value = read_json(file)
        if not isinstance(value, dict):
            raise UserError(f"{file}: the file must be one JSON object {form}")
        yield Record(str(file), value)


def read_triviaqa(files: Files) -> tuple[list[Question], list[Passage]]:
    """Reads `{"Data": [{QuestionId, Question, Answer {Value, Aliases}, ...}]}`, Joshi et al. 2017.

    The separate evidence files are not read, so the pages that a question cites are not gold.
    """
    names = ("QuestionId", "Question", "Answer")
    rows = (row for file in _objects(files, "with the field 'Data'") for row in parts(file, "Data"))
    return [
        Question(
            id=text(row, "QuestionId"),
            text=question_text(row, "Question"),
            answers=answers(row, "Answer"),
            metadata=others(row, *names),
        )
        for row in rows
    ], []


def popqa(record: Record, _: int) -> Question:
    """Reads `id, question, possible_answers` (a JSON list in a text), Mallen et al. 2023."""
    listed = Record(record.place, {"possible_answers": field(record, "possible_answers", list)})
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=answers(listed, "possible_answers"),
        kind=optional_text(record, "prop"),  # the relation that the question asks for
        metadata=others(record, "id", "question", "possible_answers"),
    )


def _ambignq_answers(record: Record) -> Iterator[str]:
    for annotation in parts(record, "annotations"):
        # `multipleQAs` has a list of answers per reading, `singleAnswer` has its answers directly.
        # On the Hub each annotation has both fields, and one is empty.
        if annotation.fields.get("qaPairs") is not None:
            for pair in parts(annotation, "qaPairs"):
                yield from answers(pair, "answer")
        if "answer" in annotation.fields or "qaPairs" not in annotation.fields:
            yield from answers(annotation, "answer")


def ambignq(record: Record, _: int) -> Question:
    """Reads `{id, question, annotations [{type, answer | qaPairs}]}`, Min et al. 2020.

    An ambiguous question has one answer list per reading; an answer of any reading is correct.
    """
    kinds = unique(text(a, "type") for a in parts(record, "annotations"))
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=unique(_ambignq_answers(record)),
        kind="+".join(kinds),
        metadata=others(record, "id", "question"),
    )


FRESHQA_ANSWERS = tuple(f"answer_{n}" for n in range(10))


def freshqa(record: Record, _: int) -> Question:
    """Reads `id, question, source, num_hops, fact_type, answer_0 ... answer_9`, Vu et al. 2023.

    The answers change over time: a file is valid for the date of its release.
    """
    cells = (optional_text(record, name).strip() for name in FRESHQA_ANSWERS)
    found = unique(filter(None, cells))
    if not found:
        raise UserError(f"{record.place}: fields 'answer_0' to 'answer_9' are empty: add an answer")
    return Question(
        id=text(record, "id"),
        text=question_text(record, "question"),
        answers=found,
        kind=optional_text(record, "fact_type"),  # how fast the answer changes
        metadata=others(record, "id", "question", *FRESHQA_ANSWERS),
    )


def multihop_rag(record: Record, number: int) -> Question:
    """Reads `{query, answer, question_type, evidence_list [{title, ...}]}`, Tang and Yang 2024.

    Null queries have no evidence, and therefore no gold.
    """
    gold = unique(text(part, "title") for part in parts(record, "evidence_list"))
    return Question(
        id=own_id(record, f"multihop_rag{number}"),
        text=question_text(record, "query"),
        answers=answers(record, "answer"),
        gold=gold,
        hops=len(gold),  # one article per hop
        kind=optional_text(record, "question_type"),
        metadata=others(record, "query", "answer", "question_type"),
    )


def _beir_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    candidates = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not candidates:
        raise UserError(f"{folder} has no {name}: give the folder of a BEIR data set")
    return candidates[0]


def read_beir(files: Files) -> tuple[list[Question], Iterator[Passage]]:
    """Reads a folder of BEIR, Thakur et al. 2021: `corpus.jsonl, queries.jsonl, qrels/*.tsv`.

    Passages with a score above 0 are gold, by id; of several splits test is read before dev and
    train. BEIR has no answers: its questions measure retrieval only.
    """
    folder = files[0]
    judged = (folder / "qrels" / f"{split}.tsv" for split in ("test", "dev", "train"))
    gold = next((read_qrels(file) for file in judged if file.is_file()), {})
    queries = [
        Question(
            id=(key := text(record, "_id")),
            text=question_text(record, "text"),
            answers=(),
            gold=tuple(gold.get(key, ())),
            metadata=others(record, "_id", "text"),
        )
        for record in read_records(_beir_file(folder, "queries.jsonl"))
    ]
    return queries, (
        Passage(text(record, "_id"), optional_text(record, "title"), text(record, "text"))
        for record in read_records(_beir_file(folder, "corpus.jsonl"))
    )


def verl(record: Record, number: int) -> Question:
    """Reads a row of the RL trainers verl and Search-R1.

    `{data_source, prompt [{role, content}], reward_model {ground_truth}, extra_info {question,
    answer}}`; `ground_truth` is a text, a list, or Search-R1's `{target: [...]}`.
    """
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
    index = optional_text(extra, "index", str(number))
    return Question(
        id=id_in_source(record, own_id(record, index)),
        text=asked,
        answers=correct,
        metadata=others(record, "id", "prompt", "reward_model"),
    )


def read_title_sentences(files: Files) -> tuple[list[Question], list[Passage]]:
    """Reads passages of one object `{title: [sentence, ...]}`: HippoRAG's HotpotQA collection."""
    passages = []
    for file in _objects(files, "of title: [sentence, ...]"):
        names = own_fields("passages", file.fields).names
        sizes = {len(x) if isinstance(x, list) else -1 for x in file.fields.values()}
        if "text" in names and len(sizes) == 1:  # as `Dataset.to_dict` gives them
            raise UserError(
                f"{file.place} holds columns ({', '.join(file.fields)}), and no list of records: "
                "write each record on a line of its own, as `Dataset.to_json` does"
            )
        for title, sentences in file.fields.items():
            # Any object of lists has this format, such as one with records under a single key.
            if not isinstance(sentences, list) or not all(isinstance(x, str) for x in sentences):
                raise UserError(
                    f"{file.place}: {title!r} is not a list of sentences: if it holds records, "
                    "give a file with that list alone"
                )
            passages.append(Passage(title, title, joined(file, title)))
    return [], passages
