"""MMOA-RAG: query rewriter, selector and generator in a line, trained towards one answer.

Chen et al. 2025, "Improving Retrieval-Augmented Generation through Multi-Agent Reinforcement
Learning". One policy plays three roles. The rewriter splits the question into searches, which share
a fixed number of passages; the selector names those worth reading; the generator answers. Every
role earns the F1 of the answer and pays for its own faults. A module that is off passes through.

Two baselines of the paper are one module alone, before the frozen language model as reader: RRR its
rewriter (`QR`; Ma et al. 2023, "Query Rewriting for Retrieval-Augmented Large Language Models") and
BGM its selector (`S`; Ke et al. 2024, "Bridging the Preference Gap between Retrievers and LLMs").

Departures from the paper and its published code
  1. Penalties read the raw text. The code counts sub-questions after cutting them to four, so that
     its penalty never fires; what works there is a limit on their characters (`code()`).
  2. The selector's mask holds in scoring too; the code samples with a mask and scores without.
     The mask admits tokens that join pieces of a selection, as tokenizers merge them.
  3. An empty line is no query; the code searches with it.
  4. The reward is the best F1 over all gold answers, with the guard on yes and no that the code has
     in evaluation only; the code knows one gold answer a question. The reward puts a space in the
     place of punctuation, as the code does; tables delete it, for all systems alike.
  5. One user turn a role; the code precedes it with scripted assistant turns.
  6. The paper gives no word limit for answers and no temperature; 30 and 0.95 are the code's.
  7. RRR's hit is an answer in whole words, its code's any substring. BGM's bridge may repeat a
     passage; here a selection names each once.
The paper has its KL in the reward of the last token, the code in that of every token: that, and the
learning rate, are settings of the objective (`configs/mmoa_rag.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import over_roles, shared
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Ask, Done, Effect, Generate, Search
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import Parsed, Role, malformed
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems.base import Credit, Recipe
from jax_ragrl.text.metrics import cover_match_tokens, exact_match, f1
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question, Sampling

REWRITER, SELECTOR, GENERATOR = "rewriter", "selector", "generator"
MODULES = ("QR+S+G", "S+G", "QR+G", "G", "QR", "S")
MAX_QUERIES = 4  # searched at most
MANY_QUERIES = 8  # beyond, a rewriting is not used at all
DOCUMENT = "Document"
NUMBER = "[0-9]{1,9}"  # `int` itself refuses astronomically long numbers


# --- Grammars: total; what is malformed carries what is used in its place --------


def parse_queries(text: str) -> Parsed:
    """One sub-question a line: of five to eight the first four count, of more than eight none."""
    lines = tuple(line.strip() for line in text.split("\n") if line.strip())
    if not lines:
        return malformed("No Query")
    if len(lines) > MAX_QUERIES:
        kept = lines[:MAX_QUERIES] if len(lines) <= MANY_QUERIES else ()
        return malformed("Too Many Queries")._replace(args=kept)
    return Parsed("Rewrite", lines)


def parse_selection(text: str, word: str = DOCUMENT) -> Parsed:
    """`Document0,Document4`, counted from 0; no text selects nothing.

    Of a malformed list, the numbers that can be read are used.
    """
    if not text.strip():
        return Parsed("Select")
    items = [item.strip().removeprefix(word).strip() for item in text.split(",")]
    numbers = [int(item) for item in items if re.fullmatch(NUMBER, item)]
    chosen = tuple(dict.fromkeys(numbers))
    one = re.escape(word) + NUMBER
    if not re.fullmatch(f"{one}(,{one})*", text.strip()):
        return malformed("Invalid Selection")._replace(args=chosen)
    if len(chosen) < len(numbers):
        return malformed("Duplicate Document")._replace(args=chosen)
    return Parsed("Select", chosen)


def parse_answer(text: str) -> Parsed:
    """`**answer**`: what follows the last blank line and any label, asterisks removed."""
    last = re.split(r"\n\s*\n", text.replace("*", "").strip())[-1]
    for label in ("The answer is:", "Answer:"):
        last = last.rpartition(label)[2]
    if not last.strip():
        return malformed("No Answer")
    marked = re.fullmatch(r"\s*\*\*[^*]+\*\*\s*", text)
    return Parsed("Answer", (last.strip(),), format_score=1.0 if marked else 0.0)


def render_queries(queries: tuple[str, ...]) -> str:
    """The rewriter's text for some queries."""
    return "\n".join(queries)


def render_selection(numbers: tuple[int, ...], word: str = DOCUMENT) -> str:
    """The selector's text for some documents."""
    return ",".join(f"{word}{i}" for i in numbers)


def render_answer(answer: str) -> str:
    """The generator's text for an answer."""
    return f"**{answer}**"


# --- The state machine ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State:
    """Where a rollout stands. `phase` names what it waits for."""

    question: Question
    phase: str
    queries: tuple[str, ...] = ()
    candidates: tuple[Passage, ...] = ()
    documents: tuple[Passage, ...] = ()
    answer: str | None = None
    why: str = "answered"


@dataclasses.dataclass(frozen=True)
class MMOARAG:
    """The system. `top_k` passages are shared by the searches; `word` precedes their numbers.

    Without `G` among the `modules` the frozen language model answers in its place.
    """

    style: str = "mmoa_rag"
    modules: str = "QR+S+G"
    top_k: int = 10
    word: str = DOCUMENT
    rewriter_tokens: int = 100
    selector_tokens: int = 29
    generator_tokens: int = 100
    temperature: float = 0.95
    top_p: float = 0.9

    def __post_init__(self) -> None:
        one_of("modules", self.modules, MODULES)

    @property
    def roles(self) -> Mapping[str, Role]:
        """The roles of the modules that are on; one shared policy."""
        sampling = functools.partial(Sampling, self.temperature, self.top_p)
        selection = functools.partial(parse_selection, word=self.word)
        # Digits of no more places than the documents' numbers have. A token may join what stands
        # side by side in a selection: some tokenizers have one for `,Document`.
        digits = f"[0-9]{{1,{len(str(self.top_k - 1))}}}"
        spelled = f",|,?{re.escape(self.word)}(?:{digits})?|{digits},?"
        roles = {
            "QR": Role(REWRITER, parse_queries, sampling(self.rewriter_tokens)),
            "S": Role(SELECTOR, selection, sampling(self.selector_tokens), tokens=spelled),
            "G": Role(GENERATOR, parse_answer, sampling(self.generator_tokens)),
        }
        on = self.modules.split("+")
        return {role.name: role for module, role in roles.items() if module in on}

    def start(self, question: Question) -> State:
        """The question, on its way to the rewriter or straight to the retriever."""
        if REWRITER in self.roles:
            return State(question, "rewrite")
        return State(question, "search", (question.text,))

    def wants(self, state: State) -> Effect | tuple[Effect, ...]:
        """What the state waits for; the searches of all queries at once."""
        match state.phase:
            case "rewrite":
                return self._generate(REWRITER, "rewriter", state)
            case "search":
                shares = allocation(len(state.queries), self.top_k)
                return tuple(Search(q, k) for q, k in zip(state.queries, shares, strict=False))
            case "select":
                return self._generate(SELECTOR, "selector", state, state.candidates)
            case "generate":
                name = "generator" if state.documents else "generator_direct"
                if GENERATOR in self.roles:
                    return self._generate(GENERATOR, name, state, state.documents)
                greedy = Sampling(0.0, 1.0, self.generator_tokens)
                asked = self._messages(name, state, state.documents)
                return Ask(LLMRequest("answer", asked, greedy))
            case _:
                return Done(state.answer, state.why)

    def advance(self, state: State, reply: Any) -> State:
        """The state after an action or a reply, or after the hits of all searches."""
        steps: dict[str, Any] = {
            "rewrite": self._rewritten,
            "search": self._found,
            "select": self._selected,
            "generate": self._answered,
        }
        return steps[state.phase](state, reply)

    def _rewritten(self, state: State, parsed: Parsed) -> State:
        queries = parsed.args or (state.question.text,)
        return dataclasses.replace(state, phase="search", queries=queries)

    def _found(self, state: State, reply: Hits | tuple[Hits, ...]) -> State:
        several = (reply,) if isinstance(reply, Hits) else reply
        found = tuple(passage for hits in several for passage in hits.passages)
        phase = "select" if SELECTOR in self.roles else "generate"
        return dataclasses.replace(state, phase=phase, candidates=found, documents=found)

    def _selected(self, state: State, parsed: Parsed) -> State:
        legal = [i for i in parsed.args if i < len(state.candidates)]
        chosen = tuple(state.candidates[i] for i in legal)
        why = state.why if len(legal) == len(parsed.args) else "answered, Unknown Document"
        return dataclasses.replace(state, phase="generate", documents=chosen, why=why)

    def _answered(self, state: State, reply: Parsed | str) -> State:
        parsed = parse_answer(reply) if isinstance(reply, str) else reply
        if not parsed.args:
            return dataclasses.replace(state, phase="done", why=parsed.error)
        return dataclasses.replace(state, phase="done", answer=parsed.args[0])

    def _generate(
        self, role: str, name: str, state: State, passages: tuple[Passage, ...] = ()
    ) -> Generate:
        depth = 1 + list(self.roles).index(role)
        return Generate(role, self._messages(name, state, passages), depth)

    def _messages(
        self, name: str, state: State, passages: tuple[Passage, ...]
    ) -> tuple[Message, ...]:
        documents = numbered(self.style, passages, first=0)
        return user_turn(self.style, name, question=state.question.text, documents=documents)


def allocation(queries: int, total: int) -> tuple[int, ...]:
    """How many passages each query may bring: as equal as can be, earlier ones first.

    For 10: (10), (5, 5), (4, 3, 3), (3, 3, 2, 2). Queries that would bring none are left out.
    """
    share, rest = divmod(total, queries)
    return tuple(n for n in (share + (i < rest) for i in range(queries)) if n)


# --- Rewards -------------------------------------------------------------------------------------


def many_queries(text: str) -> bool:
    """More than four sub-questions (paper, eq. 3)."""
    return sum(bool(line.strip()) for line in text.split("\n")) > MAX_QUERIES


def long_queries(text: str) -> bool:
    """Sub-questions of more than 300 characters together (the code's effective rule)."""
    return sum(len(line.strip()) for line in text.split("\n")) > 300


QUERY_RULES = {"count": many_queries, "characters": long_queries}


@dataclasses.dataclass(frozen=True)
class Penalties:
    """What a role's own faults cost it (eqs. 3, 6 and 9).

    `queries` names the rule for the rewriter: `count` or `characters`. The selector pays for a
    wrong form, a duplicate, or a document that is not there; the generator for too many words.
    """

    rewriter: float = -0.5
    queries: str = "count"
    selector: float = -1.0
    generator: float = -0.5
    words: int = 30

    def __post_init__(self) -> None:
        if self.queries not in QUERY_RULES:
            raise UserError(
                f"penalties.queries is {self.queries!r}: use {' or '.join(QUERY_RULES)}"
            )


def penalty(record: Record, penalties: Penalties) -> float:
    """What an action is penalised with, by its raw text; 0 for most."""
    parsed = record.parsed
    assert parsed is not None, "only actions are penalised"
    if record.role == REWRITER:
        return penalties.rewriter if QUERY_RULES[penalties.queries](parsed.text) else 0.0
    if record.role == GENERATOR:
        return penalties.generator if len(parsed.text.split()) > penalties.words else 0.0
    known = all(i < len(record.state.candidates) for i in parsed.args)
    wrong = bool(parsed.text) and not (parsed.valid and known)
    return penalties.selector if wrong else 0.0


def f1_rewards(forest: Forest) -> np.ndarray:
    """float32 `[N]`: the F1 of each answer on its leaf."""
    return answer_rewards(forest, functools.partial(f1, punct="space"))


def rewriting_rewards(forest: Forest) -> np.ndarray:
    """R = EM + F1 + Hit (Ma et al. 2023) on each leaf, float32 `[N]`.

    Hit is 1 where what was searched holds a gold answer, and -1 elsewhere.
    """
    reward_N = answer_rewards(forest, lambda *said: exact_match(*said) + f1(*said))
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        found = "\n".join(passage.text for call in record.calls for passage in call.found)
        reward_N[leaf] += 2 * cover_match_tokens(found, forest.questions[record.question].answers)
        reward_N[leaf] -= 1
    return reward_N


REWARDS = {"f1": f1_rewards, "em_f1_hit": rewriting_rewards}


def reward(forest: Forest, settings: Settings) -> np.ndarray:
    """float32 `[N]`: the answer's reward on its leaf, each action's penalty on the action."""
    reward_N = REWARDS[settings.reward](forest)
    for node, record in enumerate(forest.records):
        if record.parsed is not None:
            reward_N[node] = penalty(record, settings.penalties)
    return reward_N


# --- The recipe -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's.

    `reward` is what an answer earns: its `f1`, or RRR's `em_f1_hit`. Several `rollouts` of a
    question are for a group rule, which takes the place of the critic.
    """

    system: MMOARAG = MMOARAG()
    penalties: Penalties = Penalties()
    reward: str = "f1"
    rollouts: int = 1

    def __post_init__(self) -> None:
        given = {"penalties.queries": self.penalties.queries, "reward": self.reward}
        for name, choices in (("penalties.queries", QUERY_RULES), ("reward", REWARDS)):
            if given[name] not in choices:
                raise UserError(f"recipe.{name} is {given[name]!r}: use {' or '.join(choices)}")


def paper() -> Settings:
    """The paper's choices."""
    return Settings()


def code() -> Settings:
    """The published code's choices."""
    return Settings(penalties=Penalties(queries="characters", generator=-1.0))


ADVANTAGES: Mapping[str, Credit] = {"gae": shared, "whitened_gae": shared} | {
    rule.__name__: functools.partial(over_roles, rule=rule)
    for rule in (group_normalised, group_centred, leave_one_out)
}


def recipe(settings: Settings) -> Recipe:
    """To each role the answer's F1 and its own penalty: a return, or compared with its group's."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, settings=settings),
        credit=shared,
        rollouts=settings.rollouts,
        metric="f1",
        judged=True,
        advantages=ADVANTAGES,
    )
