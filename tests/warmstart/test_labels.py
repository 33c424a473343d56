"""Labels of every system: the right action of each role, from the gold of a question."""

import dataclasses

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.systems.c3po import C3PO
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.systems.mao_arag import MAOARAG
from jax_ragrl.systems.opera import Opera
from jax_ragrl.types import Hits, Passage, Question
from jax_ragrl.warmstart.labels import gold
from jax_ragrl.warmstart.labels.base import gold_titles, label_demos, labeler_of
from tests.tiny import tokenizer
from tests.warmstart.test_expert_pool import ScriptedLLM

OTHER = Passage("1", "Ben", "Ben was born in Rome.")
GOLD = Passage("2", "Ada", "Ada painted. She was born in the city of Ulm in 1900.")
QUESTION = Question("q", "where was Ada born", ("the city of Ulm", "Ulm"), gold=("2",))


class Pages(Retriever):
    """Returns given passages for every query, and others for one that lacks a question word."""

    def __init__(self, passages, second=()):
        self.pages, self.queries = (tuple(passages), tuple(second or passages)), []

    def search(self, queries, k):
        self.queries += queries
        pages = [self.pages["where" not in query] for query in queries]
        return [Hits(page[:k], (1.0,) * len(page[:k])) for page in pages]


def knows() -> ScriptedLLM:
    """A language model that knows the answer."""
    return ScriptedLLM(lambda request: "It was Ulm.")


def demos(system, name, retriever, llm=None) -> list[tuple[str, str]]:
    rows = label_demos(system, labeler_of(name), [QUESTION], retriever, tokenizer(), llm)
    return [(demo.role, demo.reply) for demo in rows]


AGENT = "jax_ragrl.systems.baselines.executor"
READ = "She was born in the city of Ulm in 1900."


def test_c3po_searches_and_selects_the_gold_passage():
    assert demos(C3PO("c3po_small", 3), "c3po", Pages([OTHER, GOLD])) == [
        ("router", "[Retrieval] where was Ada born"),
        ("filter", "Thought: 2 answers the question.\nAction: [2]"),
    ]
    found = demos(C3PO("c3po_small", 3), "c3po", Pages([GOLD]), knows())
    assert found == [("router", "[No Retrieval]")], "the frozen model knows it"


@pytest.mark.parametrize(
    ("passages", "llm", "plan"),
    [
        ([GOLD, OTHER], None, "R,AG"),
        ([OTHER, GOLD], None, "R,DS,AG"),
        ([OTHER], None, "QR,R,AG"),
        ([GOLD], knows(), "AG"),
    ],
)
def test_mao_arag_plans_the_cheapest_workflow(passages, llm, plan):
    system = MAOARAG("mao_arag_small", 3, max_turns=1)
    assert demos(system, "mao_arag", Pages(passages), llm) == [("planner", plan)]


FILM = Passage("3", "Vertigo (film)", "Vertigo is a film that Alfred Hitchcock directed.")
DIRECTOR = Passage("4", "Alfred Hitchcock", "Alfred Hitchcock was born in Leytonstone.")
CHAIN = Question("c", "where was the director of Vertigo (film) born", ("Leytonstone",), ("3", "4"))


class Titles(Retriever):
    """Finds the passage whose title is the query, and OTHER for any other query."""

    def search(self, queries, k):
        found = {p.title: p for p in (FILM, DIRECTOR)}
        return [Hits((found.get(query, OTHER),), (1.0,)) for query in queries]


def chain_demos(system, name, question=CHAIN):
    titles = gold_titles([question], [OTHER, FILM, DIRECTOR])
    plans = ScriptedLLM(lambda request: "1. Who directed Vertigo?\n2. Where was #1 born?")
    return label_demos(system, labeler_of(name), [question], Titles(), tokenizer(), plans, titles)


def replies(demos):
    return [(demo.role, demo.reply) for demo in demos]


def test_c3po_searches_for_the_missing_passages_that_a_text_names_not_only_the_gold():
    one = ("filter", "Thought: 1 answers the question.\nAction: [1]")
    found = chain_demos(C3PO("c3po_small", 1), "c3po")
    assert "2. Where was #1 born?" in found[1].prompt[-1].content  # the frozen model's plan
    assert replies(found) == [
        ("router", "[Planning]"),
        ("decision", "Thought: Vertigo (film) is missing.\nAction: [Retrieval] Vertigo (film)"),
        one,
        ("decision", "Thought: Alfred Hitchcock is missing.\nAction: [Retrieval] Alfred Hitchcock"),
        one,
        ("decision", "Thought: The search is over.\nAction: [LLM]"),
    ]
    question = dataclasses.replace(CHAIN, text="where was the director born")
    found = chain_demos(C3PO("c3po_small", 1), "c3po", question)
    assert replies(found)[1:] == [("decision", "Thought: The search is over.\nAction: [LLM]")]


def test_mao_arag_decomposes_what_takes_several_searches():
    system = MAOARAG("mao_arag_small", 1, max_turns=3)
    found = replies(chain_demos(system, "mao_arag"))
    assert found == [("planner", "QDS"), ("sub_planner", "R,AG"), ("sub_planner", "R,AG")]


def test_an_agent_searches_for_a_missing_passage_that_the_question_names():
    system = SearchAgent("search_r1", "coda_small", 1, max_turns=3, as_chat_turns=True)
    question = dataclasses.replace(CHAIN, answers=("Alfred Hitchcock",), gold=("3",))
    assert replies(chain_demos(system, AGENT, question)) == [
        ("agent", f"<think>I search for it.</think><search>{CHAIN.text}</search>"),
        ("agent", "<think>Vertigo (film) is missing.</think><search>Vertigo (film)</search>"),
        ("agent", f"<think>{FILM.text}</think><answer>Alfred Hitchcock</answer>"),
    ]


class Chain(Titles):
    """The question finds its first passage."""

    def search(self, queries, k):
        return super().search([{CHAIN.text: FILM.title}.get(q, q) for q in queries], k)


def test_an_executor_searches_for_what_a_passage_names_though_it_has_an_answer():
    system = CoDA("coda_small", 1, max_turns=2, max_executor_turns=3, as_chat_turns=True)
    question = dataclasses.replace(CHAIN, answers=("film", "Leytonstone"))
    titles = gold_titles([question], [FILM, DIRECTOR])
    labeler = labeler_of("coda")
    found = label_demos(system, labeler, [question], Chain(), tokenizer(), None, titles)
    think = "<think>Alfred Hitchcock is missing.</think>"
    search = f"<refine>{FILM.text}</refine><search>Alfred Hitchcock</search>"
    assert replies(found)[2] == ("executor", think + search)


@pytest.mark.parametrize("style", ["opera", "opera_small"])
def test_opera_shows_the_rewriter_the_passage_that_names_the_title(style):
    system = Opera(style, 1, max_plan_steps=2, max_rewrites=1)
    titles = gold_titles([CHAIN], [FILM, DIRECTOR])
    found = label_demos(system, labeler_of("opera"), [CHAIN], Chain(), tokenizer(), None, titles)
    (rewrite,) = (demo for demo in found if demo.role == "rewrite")
    assert "Alfred Hitchcock" in rewrite.reply
    assert "Alfred Hitchcock" not in CHAIN.text
    assert "Alfred Hitchcock" in rewrite.prompt[-1].content


def test_an_agent_searches_again_with_keywords_then_answers_from_a_passage():
    system = SearchAgent("search_r1", "coda_small", 3, max_turns=3, as_chat_turns=True)
    retriever = Pages([OTHER], [GOLD])
    assert demos(system, AGENT, retriever) == [
        ("agent", "<think>I search for it.</think><search>where was Ada born</search>"),
        ("agent", "<think>It is not here.</think><search>Ada born</search>"),
        ("agent", f"<think>{READ}</think><answer>Ulm</answer>"),
    ]
    assert len(demos(system, AGENT, Pages([OTHER]))) == 2, "it is not taught to guess"


def test_coda_delegates_refines_and_reads_the_result():
    system = CoDA("coda_small", 3, max_turns=2, max_executor_turns=3, as_chat_turns=True)
    assert demos(system, "coda", Pages([GOLD])) == [
        ("planner", "<think>I ask an assistant.</think><task>where was Ada born</task>"),
        ("executor", "<think>I search for it.</think><search>where was Ada born</search>"),
        ("executor", f"<think>I read it.</think><refine>{READ}</refine><answer>Ulm</answer>"),
        ("planner", "<think>The result is the answer.</think><answer>Ulm</answer>"),
    ]


def test_opera_rewrites_the_query_of_a_search_without_an_answer():
    system = Opera("opera_small", 3, max_plan_steps=2, max_rewrites=1)
    assert demos(system, "opera", Pages([OTHER], [GOLD])) == [
        ("plan", "1 where was Ada born"),
        ("analysis", "No document has the answer.\nno"),
        ("rewrite", "rephrase: Ada born"),
        ("analysis", f"{READ}\nyes: Ulm"),
    ]


def test_a_system_without_labels_is_refused():
    with pytest.raises(UserError, match="use a config of c3po.*mmoa_rag"):
        labeler_of("jax_ragrl.systems.baselines.replug")


def test_without_a_gold_passage_the_first_one_with_an_answer_is_useful():
    copy = GOLD._replace(id="3", title="x")
    assert gold.useful_numbers(QUESTION, [OTHER, copy, copy]) == (2,)
    assert gold.useful_numbers(QUESTION, [copy, GOLD]) == (2,)
    assert gold.useful_numbers(QUESTION, [OTHER]) == ()


def test_a_quote_is_short_with_the_answer_and_keywords_are_never_none():
    long = "start " + "word " * 60 + "Ulm " + "word " * 60
    text = gold.quote("Ulm", [Passage("4", "", long)])
    assert text.endswith(" Ulm") and len(text.split()) == gold.MAX_QUOTE_WORDS
    assert gold.keywords("who was it") == "who was it", "only common words"
