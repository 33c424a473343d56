"""MMOA-RAG's grammars and steps; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from jax_ragrl.config.ranges import Count, Positive, Probability
from jax_ragrl.config.schema import one_of
from jax_ragrl.rollout.effects import CallLLM, Done, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Fault, Shown, Steps, Used, all_of
from jax_ragrl.text.patterns import ascending, character, line, visible
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

REWRITER, SELECTOR, GENERATOR = "rewriter", "selector", "generator"
MODULES = ("QR+S+G", "S+G", "QR+G", "G", "QR", "S")
MAX_QUERIES = 4  # queries that are searched
MANY_QUERIES = 8  # with more queries, the question itself is searched
DOCUMENT = "Document"
NUMBER = "[0-9]{1,9}"  # `int` raises for very long numbers


# --- Grammars: total functions; a malformed action has the arguments that are used instead ------


def parse_queries(text: str) -> ParsedAction:
    """Parses one sub-question per line.

    More than four are malformed: of up to eight the first four are used, of more none.
    """
    lines = tuple(line.strip() for line in text.split("\n") if line.strip())
    if not lines:
        return invalid_action("No Query")
    if len(lines) > MAX_QUERIES:
        queries = lines[:MAX_QUERIES] if len(lines) <= MANY_QUERIES else ()
        return invalid_action("Too Many Queries")._replace(args=queries)
    return ParsedAction("Rewrite", lines)


def parse_selection(text: str, word: str = DOCUMENT) -> ParsedAction:
    """Parses `Document0,Document4`, counted from 0; an empty text selects nothing.

    Of a malformed list the readable numbers are used.
    """
    if not text.strip():
        return ParsedAction("Select")
    # Numbers without the word are readable, though malformed.
    items = [item.strip().removeprefix(word).strip() for item in text.split(",")]
    numbers = [int(item) for item in items if re.fullmatch(NUMBER, item)]
    distinct = tuple(dict.fromkeys(numbers))
    one = re.escape(word) + NUMBER
    if not re.fullmatch(f"{one}(,{one})*", text.strip()):
        return invalid_action("Invalid Selection")._replace(args=distinct)
    if len(distinct) < len(numbers):
        return invalid_action("Duplicate Document")._replace(args=distinct)
    return ParsedAction("Select", distinct)


def parse_answer(text: str) -> ParsedAction:
    """Parses `**answer**`: the text after the last blank line and any label, without asterisks.

    The format score is 1 only if the whole text has that form.
    """
    # Reasoning before the answer is separated by a blank line.
    last = re.split(r"\n\s*\n", text.replace("*", "").strip())[-1]
    for label in ("The answer is:", "Answer:"):
        last = last.rpartition(label)[2]
    if not last.strip():
        return invalid_action("No Answer")
    is_exact = re.fullmatch(r"\s*\*\*[^*]+\*\*\s*", text)
    return ParsedAction("Answer", (last.strip(),), format_score=1.0 if is_exact else 0.0)


def render_queries(queries: tuple[str, ...]) -> str:
    """Renders the rewriter's text for some queries."""
    return "\n".join(queries)


def render_selection(numbers: tuple[int, ...], word: str = DOCUMENT) -> str:
    """Renders the selector's text for some documents."""
    return ",".join(f"{word}{i}" for i in numbers)


def render_answer(answer: str) -> str:
    """Renders the generator's text for an answer."""
    return f"**{answer}**"


# --- Strict grammars ------------------------------------------------------------------------------

QUERIES = rf"{line()}(?:\n{line()}){{0,{MAX_QUERIES - 1}}}"
# A last colon could end a label, such as `Answer:`, which is not part of the answer.
ANSWER = rf"\*\*(?:{character('*')}*{visible('*:')})\*\*"


def selection_regex(word: str, top_k: int) -> str:
    """Returns the regular expression of selections: distinct documents in ascending order, or none.

    Args:
      word: the word before the number of a document.
      top_k: the number of documents, counted from 0.
    """
    return f"(?:{ascending([f'{word}{i}' for i in range(top_k)], ',')})?"


# --- The system ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MMOARAG:
    """The system, and the config section `recipe.system`.

    Fields:
      style: the folder of the prompts.
      modules: the modules that are on. Without `G` the frozen language model answers.
      top_k: passages in total, which the searches share.
      document_word: the word before the number of a document in a selection.
      rewriter_max_tokens, selector_max_tokens, generator_max_tokens: new tokens per action.
      temperature, top_p: how each action is sampled.
    """

    FAULTS = {
        "No Query": "The text holds no query.",
        "Too Many Queries": "The text holds more queries than the system accepts.",
        "Invalid Selection": "None of the selected documents was shown.",
        "Duplicate Document": "The same document is selected more than once.",
        "Unknown Document": "The selection also names a document that was not shown.",
        "No Answer": "The text holds no answer.",
    }

    style: str = "mmoa_rag"
    modules: str = "QR+S+G"
    top_k: Count = 10
    document_word: str = DOCUMENT
    rewriter_max_tokens: Count = 100
    selector_max_tokens: Count = 29
    generator_max_tokens: Count = 100
    temperature: Positive = 0.95
    top_p: Probability = 0.9

    def __post_init__(self) -> None:
        one_of("modules", self.modules, MODULES)

    @property
    def roles(self) -> Mapping[str, Role]:
        """The roles of the modules that are on, which share one policy."""
        sampling = functools.partial(Sampling, self.temperature, self.top_p)
        selection = functools.partial(parse_selection, word=self.document_word)
        # The mask admits numbers with as many digits as the last document has. One token may join
        # neighboring pieces of a selection: some tokenizers have one for `,Document`.
        word, digits = re.escape(self.document_word), f"[0-9]{{1,{len(str(self.top_k - 1))}}}"
        mask = f",|,?{word}(?:{digits})?|{digits},?"
        ordered = selection_regex(self.document_word, self.top_k)
        tokens = sampling(self.rewriter_max_tokens)
        roles = {"QR": Role(REWRITER, parse_queries, tokens, action_regex=QUERIES)}
        tokens = sampling(self.selector_max_tokens)
        roles["S"] = Role(
            SELECTOR,
            selection,
            tokens,
            allowed_token_regex=mask,
            action_regex=ordered,
            chooses=True,
        )
        tokens = sampling(self.generator_max_tokens)
        roles["G"] = Role(GENERATOR, parse_answer, tokens, action_regex=ANSWER)
        active = self.modules.split("+")
        return {role.name: role for module, role in roles.items() if module in active}

    def steps(self, question: Question) -> Steps:
        """Rewrites the question, searches for all queries at once, selects passages, answers."""
        roles, depth = self.roles, 1  # modules that are off do not count as levels
        queries: tuple[str, ...] = (question.text,)
        if REWRITER in roles:
            rewriting = yield Generate(REWRITER, self._messages("rewriter", question, ()), depth)
            depth += 1
            queries = rewriting.args or queries  # without usable queries: the question
        # `allocation` drops queries without passages, which are the last ones.
        counts = allocation(len(queries), self.top_k)
        results = yield from all_of([Search(q, k) for q, k in zip(queries, counts, strict=False)])
        documents = tuple(passage for hits in results for passage in hits.passages)
        reason = "answered"
        yield Shown(documents)
        if SELECTOR in roles:
            messages = self._messages("selector", question, documents)
            selection = yield Generate(SELECTOR, messages, depth)
            depth += 1
            legal = [i for i in selection.args if i < len(documents)]
            # The text alone does not show how many documents there are.
            if len(legal) < len(selection.args):
                yield Fault("Unknown Document")
                reason = "answered, Unknown Document"
            documents = tuple(documents[i] for i in legal)
        yield Used(documents)
        name = "generator" if documents else "generator_direct"
        messages = self._messages(name, question, documents)
        if GENERATOR in roles:
            answer = yield Generate(GENERATOR, messages, depth)
        else:
            # The frozen model answers in place of the generator.
            greedy = Sampling(0.0, 1.0, self.generator_max_tokens)
            answer = parse_answer((yield CallLLM(LLMRequest("answer", messages, greedy))))
        yield Done(answer.args[0], reason) if answer.args else Done(None, answer.error)

    def _messages(
        self, name: str, question: Question, passages: tuple[Passage, ...]
    ) -> tuple[Message, ...]:
        documents = format_passages(self.style, passages, first=0)
        return user_turn(self.style, name, question=question.text, documents=documents)


def allocation(queries: int, total: int) -> tuple[int, ...]:
    """Returns the number of passages per query: as equal as possible, earlier queries get more.

    For 10: (10), (5, 5), (4, 3, 3), (3, 3, 2, 2). Queries without passages are left out.
    """
    count, rest = divmod(total, queries)
    return tuple(n for n in (count + (i < rest) for i in range(queries)) if n)
