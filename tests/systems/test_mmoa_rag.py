"""MMOA-RAG: grammars, the modules, penalties and credit, heuristic labels, the teacher."""

import random
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.systems.mmoa_rag import (
    MMOARAG,
    Penalties,
    Settings,
    allocation,
    parse_answer,
    parse_queries,
    parse_selection,
    recipe,
    render_answer,
    render_queries,
    render_selection,
)
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Passage, Question
from jax_ragrl.warmstart.teachers import mmoa_rag
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from tests.rollout.tape import ANN, Tape, passage
from tests.systems.test_baselines_world import retriever, world
from tests.systems.test_presets import code
from tests.warmstart.test_teachers import tokenizer as tiny_tokenizer

MANY, INVALID = "Too Many Queries", "Invalid Selection"


@pytest.mark.parametrize(
    ("parse", "text", "args", "error"),
    [
        (parse_queries, " a \n\n b\n", ("a", "b"), ""),
        (parse_queries, "1\n2\n3\n4", ("1", "2", "3", "4"), ""),
        (parse_queries, "1\n2\n3\n4\n5", ("1", "2", "3", "4"), MANY),
        (parse_queries, "1\n2\n3\n4\n5\n6\n7\n8", ("1", "2", "3", "4"), MANY),
        (parse_queries, "1\n2\n3\n4\n5\n6\n7\n8\n9", (), MANY),
        (parse_queries, " \n ", (), "No Query"),
        (parse_selection, "Document4,Document0", (4, 0), ""),
        (parse_selection, " Document12 ", (12,), ""),
        (parse_selection, "", (), ""),
        (parse_selection, "Document1,Document1", (1,), "Duplicate Document"),
        (parse_selection, "Document1,Document01", (1,), "Duplicate Document"),
        (parse_selection, "Document1, Document2", (1, 2), INVALID),
        (parse_selection, "Document1,", (1,), INVALID),
        (parse_selection, "1,2", (1, 2), INVALID),
        (parse_selection, "Document,3,Document", (3,), INVALID),
        *(
            (parse_selection, t, (), INVALID)
            for t in ("Document3Document4", "none", "Document" + "9" * 5000)
        ),
        *((parse_answer, text, (), "No Answer") for text in ("", "****", " \n ", "Answer: ")),
        *((parse_answer, text, ("Ulm",), "") for text in ("Answer: Ulm", "Let me see.\n\n**Ulm**")),
    ],
)
def test_a_text_is_an_action_or_an_error(parse, text, args, error):
    action = parse(text)
    assert (action.args, action.error) == (args, error)


@pytest.mark.parametrize(
    ("text", "form"),
    [("**Ulm**", 1), (" **Ulm** ", 1), ("Ulm", 0), ("*Ulm**", 0), ("**The answer is: Ulm**", 1)],
)
def test_the_form_of_an_answer_is_graded(text, form):
    assert parse_answer(text) == ParsedAction("Answer", ("Ulm",), format_score=form)


NAMES = st.text(st.characters(categories=("L", "N")), min_size=1)


@hypothesis.given(
    queries=st.lists(NAMES, min_size=1, max_size=4),
    numbers=st.lists(st.integers(0, 999_999_999), unique=True),
    word=st.sampled_from(["Document", "D"]),
)
def test_rendered_actions_parse_back(queries, numbers, word):
    assert parse_queries(render_queries(tuple(queries))) == ParsedAction("Rewrite", tuple(queries))
    text = render_selection(tuple(numbers), word)
    assert parse_selection(text, word) == ParsedAction("Select", tuple(numbers))
    assert parse_answer(render_answer(queries[0])) == ParsedAction("Answer", (queries[0],))


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return tiny_tokenizer()


def test_the_mask_admits_selections_of_numbers_below_top_k_and_little_else(tokenizer):
    mask = MMOARAG(document_word="D").roles["selector"].allowed_token_regex
    spelling = tokenizer.encode(render_selection((0, 12, 3), "D"))
    assert all(re.fullmatch(mask, tokenizer.decode([i])) for i in spelling)
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    legal = {text for text in texts if re.fullmatch(mask, text)}
    assert legal == {*"0123456789", "D", ","}
    real = MMOARAG().roles["selector"].allowed_token_regex
    assert re.fullmatch(real, ",Document") and not re.fullmatch(real, "Doc")
    # Llama 3 has a token for every number up to 999, and for several commas (eq. 5).
    pieces = ["0", "9", "12", "99", "201", ",", ",,", "Document", "DocumentDocument"]

    def legal(top_k: int) -> list[str]:
        mask = MMOARAG(top_k=top_k).roles["selector"].allowed_token_regex
        return [piece for piece in pieces if re.fullmatch(mask, piece)]

    assert legal(10) == ["0", "9", ",", "Document"]
    assert legal(11) == ["0", "9", "12", "99", ",", "Document"]


@pytest.mark.parametrize(
    ("queries", "total", "counts"),
    [
        (1, 10, (10,)),
        (2, 10, (5, 5)),
        (3, 10, (4, 3, 3)),
        (4, 10, (3, 3, 2, 2)),
        (3, 4, (2, 1, 1)),
        (4, 3, (1, 1, 1)),
    ],
)
def test_a_fixed_number_of_passages_is_shared(queries, total, counts):
    assert allocation(queries, total) == counts


def play(texts, question: Question = ANN, tape: Tape | None = None, **changes):
    """The forest of one recorded rollout and its tape; each role writes one text."""
    tape = tape or Tape({})
    tape.texts = {role: [text] for role, text in texts.items()}
    system = MMOARAG(**{"style": "mmoa_rag_tiny", **changes})
    forest = collect(system, single_chain, [question], tape.environment())
    return forest, tape


def test_modules_act_in_sequence_and_searches_together():
    tape = Tape({}, {"a": [passage(i) for i in range(9)], "b": [passage(i) for i in range(20, 29)]})
    texts = {"rewriter": "a\nb", "selector": "Document3,Document0", "generator": "**Ulm**"}
    forest, tape = play(texts, tape=tape, top_k=5)
    assert tape.log == [
        ("rewriter",), ("search", "a", 3), ("search", "b", 3), ("selector",), ("generator",)
    ]  # fmt: skip
    assert tape.prompts == [
        "rewrite\nQuestion: Where was Ann born?",
        "select\n0 title 0: text 0\n1 title 1: text 1\n2 title 2: text 2\n"
        "3 title 20: text 20\n4 title 21: text 21\nQuestion: Where was Ann born?",
        "answer **\n0 title 20: text 20\n1 title 0: text 0\nQuestion: Where was Ann born?",
    ]
    assert [r.role for r in forest.records] == ["rewriter", "selector", "generator", "leaf"]
    leaf = forest.records[-1]
    assert (leaf.answer, leaf.finish_reason, leaf.round) == ("Ulm", "answered", 4)
    assert [(c.purpose, c.turn, c.round) for c in leaf.calls] == [("search", 0, 1)] * 2


ALL = {"rewriter": "a", "selector": "Document1", "generator": "**Ulm**"}


@pytest.mark.parametrize(
    ("modules", "log", "prompt_documents"),
    [
        ("QR+S+G", [("rewriter",), ("search", "a", 2), ("selector",), ("generator",)], [2]),
        ("S+G", [("search", ANN.text, 2), ("selector",), ("generator",)], [2]),
        ("QR+G", [("rewriter",), ("search", "a", 2), ("generator",)], [1, 2]),
        ("G", [("search", ANN.text, 2), ("generator",)], [1, 2]),
        ("QR", [("rewriter",), ("search", "a", 2), ("answer",)], [1, 2]),
        ("S", [("search", ANN.text, 2), ("selector",), ("answer",)], [2]),
    ],
)
def test_a_module_that_is_off_passes_through(modules, log, prompt_documents):
    """Without a generator the frozen reader answers."""
    forest, tape = play(ALL, tape=Tape({}, replies={"answer": "**Ulm**"}), modules=modules, top_k=2)
    assert tape.log == log and forest.records[-1].answer == "Ulm"
    lines = [f"{i} title {n}: text {n}" for i, n in enumerate(prompt_documents)]
    assert tape.prompts[-1] == "\n".join(["answer **", *lines, f"Question: {ANN.text}"])
    roles = [name for (name, *_) in log if name not in ("search", "answer")]
    assert list(MMOARAG(modules=modules).roles) == roles


@pytest.mark.parametrize(
    ("role", "text", "search_queries", "documents", "end"),
    [
        ("rewriter", "", [ANN.text], 1, ("Ulm", "answered")),
        ("rewriter", "1\n2\n3\n4\n5", ["1", "2", "3", "4"], 1, ("Ulm", "answered")),
        ("rewriter", "\n".join("123456789"), [ANN.text], 1, ("Ulm", "answered")),
        ("selector", "", ["a"], 0, ("Ulm", "answered")),
        ("selector", "nothing", ["a"], 0, ("Ulm", "answered")),
        ("selector", "Document1,Document1", ["a"], 1, ("Ulm", "answered")),
        ("selector", "Document9", ["a"], 0, ("Ulm", "answered, Unknown Document")),
        ("selector", "Document9,Document0", ["a"], 1, ("Ulm", "answered, Unknown Document")),
        ("generator", "**", ["a"], 1, (None, "No Answer")),
    ],
)
def test_malformed_actions_have_fallbacks_and_names(role, text, search_queries, documents, end):
    forest, tape = play(ALL | {role: text}, top_k=4)
    assert [entry[1] for entry in tape.log if entry[0] == "search"] == search_queries
    assert tape.prompts[-1].count("title") == documents
    direct = user_turn("mmoa_rag_tiny", "generator_direct", question=ANN.text)[-1].content
    assert (tape.prompts[-1] == direct) == (documents == 0)
    leaf = forest.records[-1]
    assert (leaf.answer, leaf.finish_reason) == end and forest.unanswered_N[-1] == (end[0] is None)
    assert leaf.state.faults == ("Unknown Document",) * end[1].endswith("Unknown Document")


def credit_of(texts, settings: Settings, question: Question = ANN):
    forest, _ = play(texts, question, top_k=4)
    mmoa_recipe = recipe(settings)
    credit_N, weight_N = mmoa_recipe.credit(forest, mmoa_recipe.reward(forest))
    assert weight_N.all() and credit_N.dtype == np.float32
    return credit_N[:-1].tolist()


LONG = "**" + " ".join(["Ulm"] * 31) + "**"
THIRTY = "**" + " ".join(["Ulm"] * 30) + "**"


@pytest.mark.parametrize(
    ("changes", "by_paper", "by_code"),
    [
        ({}, [1, 1, 1], [1, 1, 1]),
        ({"rewriter": "1\n2\n3\n4"}, [1, 1, 1], [1, 1, 1]),
        # Five are cut to four before the code counts; the paper's penalty reads the raw text.
        ({"rewriter": "1\n2\n3\n4\n5"}, [0.5, 1, 1], [1, 1, 1]),
        ({"rewriter": "\n".join("123456789")}, [0.5, 1, 1], [1, 1, 1]),
        ({"rewriter": "x" * 301}, [1, 1, 1], [0.5, 1, 1]),
        ({"rewriter": "x" * 300}, [1, 1, 1], [1, 1, 1]),
        ({"selector": ""}, [1, 1, 1], [1, 1, 1]),
        ({"selector": "Document1,Document1"}, [1, 0, 1], [1, 0, 1]),
        ({"selector": "Document1 Document2"}, [1, 0, 1], [1, 0, 1]),
        ({"selector": "Document4"}, [1, 0, 1], [1, 0, 1]),
        ({"generator": "**Rom**"}, [0, 0, 0], [0, 0, 0]),
        ({"generator": ""}, [0, 0, 0], [0, 0, 0]),
        # 31 words, one of them right: F1 = 2 / 32; 30 words have no penalty.
        ({"generator": LONG}, [0.0625, 0.0625, -0.4375], [0.0625, 0.0625, -0.9375]),
        ({"generator": THIRTY}, [2 / 31] * 3, [2 / 31] * 3),
        (
            {"rewriter": "1\n2\n3\n4\n5", "selector": "x", "generator": "**in Ulm**"},
            [2 / 3 - 0.5, 2 / 3 - 1, 2 / 3],
            [2 / 3, 2 / 3 - 1, 2 / 3],
        ),
    ],
)
def test_each_role_earns_f1_minus_its_penalty(changes, by_paper, by_code):
    for settings, expected in ((Settings(), by_paper), (code("mmoa_rag"), by_code)):
        np.testing.assert_allclose(credit_of(ALL | changes, settings), expected, atol=1e-6)


def test_punctuation_is_a_space_in_this_papers_f1():
    question = Question("q", "Where?", ("U S",))
    texts = ALL | {"generator": "**U.S.**"}
    assert credit_of(texts, Settings(), question) == [1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "passage_text", "score"),
    [
        ("Ulm", "In Ulm.", 3.0),
        ("Ulm", "Ulmer", 1.0),  # right without the search
        ("in Ulm", "In Ulm.", 2 / 3 + 1),
        ("Rom", "In Ulm.", 1.0),
        ("Rom", "", -1.0),
        (" ", "In Ulm.", 1.0),  # no answer, although the passages contain it
    ],
)
def test_a_single_rewriter_earns_em_f1_hit(answer, passage_text, score):
    tape = Tape({}, {"a": [Passage("1", "t", passage_text)]}, {"answer": answer})
    forest, _ = play(ALL, tape=tape, modules="QR")
    mmoa_recipe = recipe(Settings(penalties=Penalties(rewriter=0.0), reward="em_f1_hit"))
    credit_N, _ = mmoa_recipe.credit(forest, mmoa_recipe.reward(forest))
    assert credit_N[0] == pytest.approx(score)


def test_a_document_with_a_word_of_question_or_answer_is_useful():
    question = Question("q", "Who directed the film Jaws?", ("Steven Spielberg",))
    assert mmoa_rag.words_of_both(question) == ["directed", "film", "jaws", "steven", "spielberg"]
    assert mmoa_rag.words_of_answer(question) == ["steven", "spielberg"]
    assert mmoa_rag.words_of_answer(Question("q", "Is it in Rome?", ("No",))) == ["rome"]
    passages = [
        Passage("1", "Jaws", "A fish."),
        Passage("2", "Duel", "Spielbergs first."),
        Passage("3", "Rome", "A city."),
    ]
    assert mmoa_rag.useful(["spielberg", "jaws"], passages) == (0, 1)
    assert mmoa_rag.useful([], passages) == ()


def test_heuristic_examples_pair_prompts_with_labels(tokenizer):
    question = next(q for q in world().questions["train"] if q.hops == 1)
    blank = Question("none", "Who knows?", ())
    rewritings = {question.id: "one search; another "}

    def rows(**changes):
        system = MMOARAG(style="mmoa_rag_tiny", top_k=4, document_word="D", **changes)
        overrides = {"rewritings": rewritings, "label": "answer"}
        chance = random.Random(0)
        demos = mmoa_rag.heuristic_demos(
            system, [question, blank], retriever(), chance, **overrides
        )
        assert {demo.question for demo in demos} == {question.id}
        return [demo.example(tokenizer) for demo in demos]

    texts = {e.role: (tokenizer.decode(e.prompt), tokenizer.decode(e.target)) for e in rows()}
    assert list(texts) == ["rewriter", "selector", "generator"]
    assert texts["rewriter"][1] == "one search\nanother"
    assert texts["generator"][1] == f"**{question.answers[0]}**"
    selection = parse_selection(texts["selector"][1], "D").args
    prompt_documents, labels = (
        re.findall(r"^\d (.*)$", texts[r][0], re.M) for r in ("selector", "generator")
    )
    assert len(prompt_documents) == 4 and labels == [prompt_documents[i] for i in selection]
    assert any(question.answers[0] in document for document in labels)
    assert all(e.target[-1] == tokenizer.stop_ids[0] for e in rows())
    assert [e.role for e in rows(modules="QR+G")] == ["rewriter", "generator"]
    with pytest.raises(UserError, match="label is 'x': use one of both, answer"):
        mmoa_rag.heuristic_demos(MMOARAG(), [], None, random.Random(0), label="x")


def accuracy_of(tokenizer, questions, **options) -> float:
    system = MMOARAG(style="mmoa_rag_tiny", top_k=4, document_word="D")
    sampler = TeacherSampler(mmoa_rag.Teacher(document_word="D", **options), tokenizer)
    environment = Environment(sampler, retriever(), Tape({}))
    forest = collect(system, single_chain, questions, environment)
    mmoa_recipe = recipe(Settings(system))
    reward_N = mmoa_recipe.reward(forest)
    assert (reward_N >= 0).all(), "the teacher breaks no rule"
    return float(np.mean(reward_N[forest.leaf_N] == 1))


def test_one_search_answers_independent_questions(tokenizer):
    questions = [q for split in world().questions.values() for q in split]
    flat = [q for q in questions if q.hops == 1 or q.kind == "comparison"]
    chains = [q for q in questions if q.hops == 2 and q.kind == "chain"]
    assert accuracy_of(tokenizer, flat) > 0.97
    # The second hop of a chain needs the answer of the first, unless it is famous.
    famous = {pair: world().facts[pair[0]][pair[1]] for pair in world().famous}
    assert accuracy_of(tokenizer, chains) < 0.1 < accuracy_of(tokenizer, chains, known=famous) < 0.6
    # Careless: a copied question is a worse query for two facts at once.
    assert accuracy_of(tokenizer, flat, p_copy_question=1.0, p_keep_related=1.0) < 0.97
    assert accuracy_of(tokenizer, flat, p_keep_first=1.0) < 0.8
