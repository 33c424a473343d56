"""MMOA-RAG's table of choices: a shared F1 reward, penalties per role, PPO.

Chen et al. 2025, "Improving Retrieval-Augmented Generation through Multi-Agent Reinforcement
Learning". One policy plays three roles. The rewriter splits the question into searches, which share
a fixed number of passages; the selector names the passages worth reading; the generator answers.
Every role earns the F1 of the answer and pays for its own faults. A module that is off passes its
input on.

Two baselines of the paper are one module before the frozen language model as reader: RRR is its
rewriter (`QR`; Ma et al. 2023, "Query Rewriting for Retrieval-Augmented Large Language Models") and
BGM its selector (`S`; Ke et al. 2024, "Bridging the Preference Gap between Retrievers and LLMs").

Departures from the paper and its published code
  1. Penalties read the raw text. The code counts sub-questions after cutting them to four, so that
     its penalty never applies; its effective rule is a limit on their characters (the preset
     `code` of the config).
  2. The selector's mask applies in scoring too; the code samples with a mask and scores without.
     The mask admits tokens that join pieces of a selection, as tokenizers merge them. With
     `grammar` set to `strict`, a selection is in ascending order; the paper allows any order.
  3. An empty line is not a query; the code searches with it.
  4. The reward is the best F1 over all gold answers, with the guard on yes and no that the code has
     only in evaluation; the code uses one gold answer per question. The reward replaces punctuation
     by a space, as the code does; tables delete it, for all systems.
  5. One user turn per role; the code puts scripted assistant turns before it.
  6. The paper states no word limit for answers and no temperature; 30 and 0.95 are the code's.
  7. RRR's hit is an answer in whole words; in its code it is any substring. BGM's bridge may repeat
     a passage; here a selection names each passage once.
  8. The paper states no epochs and no minibatches. `configs/mmoa_rag.py` takes six optimizer steps
     per batch of rollouts, as the code does: two epochs of three minibatches.
  9. The warm starts of RRR and BGM are MMOA-RAG's; each of their papers makes one from the
     successes of its frozen model. RRR and BGM have no configuration at the paper's size, only
     `configs/tiny/one_module.py`.
 10. The KL coefficient falls from a maximum of 0.2 to a minimum of 0.06 (table 6) by a rule that
     the paper does not state. `configs/mmoa_rag.py` has the code's adaptive controller between
     these bounds; the code's own has a minimum alone.
 11. Eq. 11 adds up the agents. Here the loss is one mean over the tokens of all agents, as in the
     code, so that an agent weighs as much as it writes; `objective.aggregation=role_sum` adds up
     the mean of each.
 12. Advantages are whitened over the batch, as in the code; the paper's equations have plain ones.
The paper has its KL in the reward of the last token, the code in that of every token: this and the
learning rate are settings of the objective (`configs/mmoa_rag.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

import numpy as np

from jax_ragrl.config.ranges import Count, NotPositive, Positive, Probability
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import over_roles, shared_credit
from jax_ragrl.rollout.effects import CallLLM, Done, Generate, Search
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Fault, Shown, Steps, Used, all_of
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems.base import Recipe
from jax_ragrl.text.metrics import cover_match_tokens, exact_match, f1
from jax_ragrl.text.patterns import ascending, character, line, visible
from jax_ragrl.text.prompts import question_turn
from jax_ragrl.types import LLMRequest, Question, Sampling

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
    last = re.split(r"\n\s*\n", text.replace("*", "").strip())[-1]
    for label in ("The answer is:", "Answer:"):
        last = last.rpartition(label)[2]
    if not last.strip():
        return invalid_action("No Answer")
    is_exact = re.fullmatch(r"\s*\*\*[^*]+\*\*\s*", text)
    return ParsedAction("Answer", (last.strip(),), format_score=1.0 if is_exact else 0.0)


def render_queries(queries: tuple[str, ...]) -> str:
    return "\n".join(queries)


def render_selection(numbers: tuple[int, ...], word: str = DOCUMENT) -> str:
    return ",".join(f"{word}{i}" for i in numbers)


def render_answer(answer: str) -> str:
    return f"**{answer}**"


# The strict grammars. A last colon could end a label, such as `Answer:`, which is not part of the
# answer.
QUERIES = rf"{line()}(?:\n{line()}){{0,{MAX_QUERIES - 1}}}"
ANSWER = rf"\*\*(?:{character('*')}*{visible('*:')})\*\*"


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
        # The mask admits numbers with as many digits as the last document has. One token may join
        # neighboring pieces of a selection: some tokenizers have one for `,Document`. A strict
        # selection has distinct documents in ascending order, or none.
        word, digits = re.escape(self.document_word), f"[0-9]{{1,{len(str(self.top_k - 1))}}}"
        names = [f"{self.document_word}{i}" for i in range(self.top_k)]
        parse = functools.partial(parse_selection, word=self.document_word)
        mask, legal = f",|,?{word}(?:{digits})?|{digits},?", f"(?:{ascending(names, ',')})?"
        limits = self.rewriter_max_tokens, self.selector_max_tokens, self.generator_max_tokens
        rewriting, selecting, generating = map(sampling, limits)
        selector = Role(SELECTOR, parse, selecting, allowed_token_regex=mask, action_regex=legal)
        roles = {
            "QR": Role(REWRITER, parse_queries, rewriting, action_regex=QUERIES),
            "S": dataclasses.replace(selector, chooses=True),
            "G": Role(GENERATOR, parse_answer, generating, action_regex=ANSWER),
        }
        active = self.modules.split("+")
        return {role.name: role for module, role in roles.items() if module in active}

    def steps(self, question: Question) -> Steps:
        """Rewrites the question, searches for all queries at once, selects passages, answers."""
        roles, depth = self.roles, 1  # modules that are off do not count as levels
        queries: tuple[str, ...] = (question.text,)
        if REWRITER in roles:
            messages = question_turn(self.style, "rewriter", question)
            rewriting = yield Generate(REWRITER, messages, depth)
            depth += 1
            queries = rewriting.args or queries  # without usable queries: the question
        # `allocation` drops queries without passages, which are the last ones.
        counts = allocation(len(queries), self.top_k)
        results = yield from all_of([Search(q, k) for q, k in zip(queries, counts, strict=False)])
        documents = tuple(passage for hits in results for passage in hits.passages)
        reason = "answered"
        yield Shown(documents)
        if SELECTOR in roles:
            messages = question_turn(self.style, "selector", question, documents, first=0)
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
        messages = question_turn(self.style, name, question, documents, first=0)
        if GENERATOR in roles:
            answer = yield Generate(GENERATOR, messages, depth)
        else:
            greedy = Sampling(0.0, 1.0, self.generator_max_tokens)
            answer = parse_answer((yield CallLLM(LLMRequest("answer", messages, greedy))))
        yield Done(answer.args[0], reason) if answer.args else Done(None, answer.error)


def allocation(queries: int, total: int) -> tuple[int, ...]:
    """Returns the number of passages per query: as equal as possible, earlier queries get more.

    For 10: (10), (5, 5), (4, 3, 3), (3, 3, 2, 2). Queries without passages are left out.
    """
    count, rest = divmod(total, queries)
    return tuple(n for n in (count + (i < rest) for i in range(queries)) if n)


# --- Rewards: of the answer on leaves, and each role's own penalty on its actions ----------------


@dataclasses.dataclass(frozen=True)
class Penalties:
    """The penalties of the roles for their own faults (eqs. 3, 6 and 9).

    Fields:
      rewriter: for too many queries.
      query_rule: what counts as too many: `count`, more than four queries (eq. 3), or `characters`,
        more than 300 in total (the rule of the code).
      selector: for a malformed selection, a duplicate, or a document that does not exist.
      generator: for an answer of more than `max_answer_words` words.
      max_answer_words: the limit for the generator.
    """

    rewriter: NotPositive = -0.5
    query_rule: str = "count"
    selector: NotPositive = -1.0
    generator: NotPositive = -0.5
    max_answer_words: Count = 30

    def __post_init__(self) -> None:
        one_of("recipe.penalties.query_rule", self.query_rule, ("count", "characters"))


def penalty(record: Record, penalties: Penalties) -> float:
    """Returns the penalty of an action, from its raw text; 0 for most actions."""
    action = record.parsed
    assert action is not None, "only actions are penalised"
    if record.role == REWRITER:
        lines = [line.strip() for line in action.text.split("\n")]
        by_count = penalties.query_rule == "count"
        too_many = sum(map(bool, lines)) > MAX_QUERIES if by_count else sum(map(len, lines)) > 300
        return penalties.rewriter if too_many else 0.0
    if record.role == GENERATOR:
        too_long = len(action.text.split()) > penalties.max_answer_words
        return penalties.generator if too_long else 0.0
    in_range = all(i < len(record.state.candidates) for i in action.args)
    # An empty text selects nothing, which is legal.
    wrong = bool(action.text) and not (action.valid and in_range)
    return penalties.selector if wrong else 0.0


def rewriting_rewards(forest: Forest) -> np.ndarray:
    """Returns R = EM + F1 + Hit (Ma et al. 2023) on each leaf, float32 `[N]`.

    Hit is 1 if the passages of the searches contain a gold answer, and -1 otherwise.
    """
    reward_N = answer_rewards(forest, lambda *args: exact_match(*args) + f1(*args))
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        text = "\n".join(passage.text for call in record.calls for passage in call.passages)
        # Hit is 2 [hit] - 1.
        reward_N[leaf] += 2 * cover_match_tokens(text, forest.questions[record.question].answers)
        reward_N[leaf] -= 1
    return reward_N


def reward(forest: Forest, metric: str, penalties: Penalties) -> np.ndarray:
    """Returns the answer's reward on each leaf and the penalty on each action, float32 `[N]`."""
    if metric == "em_f1_hit":
        reward_N = rewriting_rewards(forest)
    else:
        # As in the code: a space keeps the words of "U.S." apart, deletion would join them.
        reward_N = answer_rewards(forest, functools.partial(f1, punct="space"))
    for node, record in enumerate(forest.records):
        if record.parsed is not None:  # leaves keep the reward of the answer
            reward_N[node] = penalty(record, penalties)
    return reward_N


# --- The table of choices -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's.

    Fields:
      system: the steps and how actions are sampled.
      penalties: the penalties of each role.
      reward: the reward of an answer: its `f1`, or RRR's `em_f1_hit`.
      rollouts: rollouts per question; several are for a group rule, which replaces the critic.
    """

    system: MMOARAG = MMOARAG()
    penalties: Penalties = Penalties()
    reward: str = "f1"
    rollouts: Count = 1

    def __post_init__(self) -> None:
        one_of("recipe.reward", self.reward, ("f1", "em_f1_hit"))


def recipe(settings: Settings) -> Recipe:
    """Returns chains in which each role earns the answer's F1 and its own penalty."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, metric=settings.reward, penalties=settings.penalties),
        credit=shared_credit,
        compare=over_roles,  # a critic does not need a group
        rollouts=settings.rollouts,
        metric="f1",
        accepts_judge=True,
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> MMOARAG:
    """Returns the system for `ragrl evaluate`, see `systems.registry`."""
    # The mask of the selector needs a word of one token.
    return MMOARAG(style, top_k=top_k, document_word="D" if tiny else DOCUMENT)
