"""MAO-ARAG's table of choices: the answer's F1, costs per planner call, PPO.

Chen et al. 2025, "MAO-ARAG: Multi-Agent Orchestration for Adaptive Retrieval-Augmented Generation".
A trained planner answers a question with a comma-separated list of frozen executors. Query
rewriter, retriever, document selector and answer generator form a workflow; a serial or a parallel
decomposition is a complete plan, and each of its sub-questions gets a planner call and a workflow.
Every planner call earns the F1 of the final answer and pays for the effects it caused.

Departures from the paper and its published code
  1. The grammar has the 16 workflows that end in AG, and the two decompositions
     for the first plan. The code also accepts AS, which has no meaning in a plan: it runs
     automatically after sub-questions.
  2. Turn costs are the code's: 0.25 for each sub-question of QDS, 0.25 for QDP. The rows of the
     paper's table 4 are swapped, as its own text shows; `costs.turn_table=paper` has them as they
     are printed.
  3. Parallel sub-questions run at the same time; the code runs them in sequence and prices them as
     parallel.
  4. A malformed turn is trained. The code masks malformed turns before the first legal plan, as
     `train_malformed=False` does (the preset `code` of the config).
  5. A decomposition pays for the substitutions and the summary that follow, also QDP (for which the
     code reads the key of QDS).
  6. DS before any R has nothing to select from and is skipped; `select_needs_search` makes such a
     plan malformed. QR changes the search query, not the question that is answered.
  7. If no sub-question has an answer when the turns are used up, there is nothing to summarize: the
     rollout is dead.
  8. The paper states no limit for replies of executors; here it is 256 tokens
     (`system.reply_tokens`).
  9. `configs/mao_arag.py` takes one optimizer step per batch of rollouts, as the code does: 96
     rollouts in batches of 96.
 10. The paper scales the token cost to a range between 0 and 1; here a turn of many long calls may
     cost more than 1.
 11. Advantages are whitened over the batch, as in the code; eq. 8 has plain ones.
 12. References such as #1, which the serial decomposition writes, are replaced by their answers
     without a call; a frozen model of 1.5B copied the example of its prompt in their place. A
     sub-question without references is given to the model, as in the paper.
The costs have equal weights in the paper, and 1 : 0.25 : 0.5 in the code, whose unit of token costs
is 5e-4 dollars instead of 6.02e-4.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jax_ragrl.config.ranges import Count, NotNegative, Positive
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import shared_credit
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Generate, Search
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Fault, Steps, StrategyChoice, all_of
from jax_ragrl.rollout.tree import SEARCH, Call, Forest
from jax_ragrl.systems.base import Recipe, WrappedSystem, path_from_root, with_actions
from jax_ragrl.text.metrics import f1
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import LLMRequest, Passage, Question, Sampling

# The planner's roles before and after its first legal plan.
PLANNER, SUB_PLANNER = "planner", "sub_planner"

# --- Workflows in the form that the planner writes -----------------------------------------------

# QDS  serial decomposition     QR  query rewriter     DS  document selector
# QDP  parallel decomposition   R   retriever          AG  answer generator
QDS, QDP, QR, R, DS, AG = "QDS", "QDP", "QR", "R", "DS", "AG"
# Steps that are not in a plan: the planner call, substitution of earlier answers, the summary.
PLAN, FILL, AS = "plan", "fill", "AS"

# The accepted spellings of each executor, in any letter case; other words are malformed.
SPELLINGS = {
    QDS: "qds|query decomposition serial|serial query decomposition|serial decomposition"
    "|decompose serially|serial",
    QDP: "qdp|query decomposition parallel|parallel query decomposition|parallel decomposition"
    "|decompose in parallel|parallel",
    QR: "qr|query rewriter|query rewriting|query rewrite|query reformulation|rewriter|rewrite",
    R: "r|ra|retrieval agent|retriever|retrieval|retrieve|search",
    DS: "ds|document selector|document selection|selector|select",
    AG: "ag|answer generator|answer generation|generator|generate|answer",
}
EXECUTORS = tuple(SPELLINGS)
NAMES: Mapping[str, str] = {
    spelling: name for name, line in SPELLINGS.items() for spelling in line.split("|")
}

# The 16 workflows: each order of each subset of {QR, R, DS}, then AG.
WORKFLOWS = tuple(
    (*order, AG) for n in range(4) for order in itertools.permutations((QR, R, DS), n)
)


def parse_plan(
    text: str,
    *,
    first: bool,
    select_needs_search: bool = False,
    executors: Collection[str] = EXECUTORS,
) -> ParsedAction:
    """Parses a plan: a workflow such as `QR,R,DS,AG`, or a decomposition (`QDS` or `QDP` alone).

    A leading `workflow:` is ignored. Only the `first` plan may be a decomposition; with
    `select_needs_search`, `DS` without an earlier `R` is malformed.
    """
    plan_text = re.sub(r"^\s*workflow\s*:", "", text, flags=re.IGNORECASE)
    items = [item.strip(" \t\r\n.`'\"").lower() for item in re.split(r",|\band\b", plan_text)]
    items = [item for item in items if item]
    if not items:
        return invalid_action("Empty Workflow")
    if any(NAMES.get(item) not in executors for item in items):
        return invalid_action("Unknown Executor")
    plan = tuple(NAMES[item] for item in items)
    error = _plan_error(plan, first, select_needs_search)
    return invalid_action(error) if error else ParsedAction("Plan", plan)


def _plan_error(plan: tuple[str, ...], first: bool, select_needs_search: bool) -> str:
    """Returns the error of a plan of valid executors; empty if the plan is legal."""
    if plan in ((QDS,), (QDP,)):
        return "" if first else "Decomposed Twice"
    if QDS in plan or QDP in plan:
        return "Decomposition Not Alone"
    if len(set(plan)) < len(plan):
        return "Repeated Executor"
    if plan[-1] != AG:
        return "No Answer At The End"
    if select_needs_search and DS in plan and R not in plan[: plan.index(DS)]:
        return "Nothing To Select From"
    return ""


def render_plan(plan: Sequence[str]) -> str:
    """Returns the planner's text for a plan."""
    return ",".join(plan)


# --- Replies of executors -------------------------------------------------------------------------

PURPOSES = {
    QDS: "decompose_serial",
    QDP: "decompose_parallel",
    FILL: "substitute",
    QR: "rewrite",
    DS: "select",
    AG: "answer",
    AS: "summarise",
}
MAX_PARTS = 4  # sub-questions; further ones are dropped


def sub_questions(reply: str) -> tuple[str, ...]:
    """Parses one sub-question per line, without list marks; "1.5 million" keeps its number."""
    lines = (line.replace("**", "").strip() for line in reply.split("\n"))
    bare = (re.sub(r"^(\d{1,2}[.):](?!\d)|[-*](?=\s|$))\s*", "", line) for line in lines)
    return tuple(line for line in bare if line)


def parts_of(reply: str, question: str) -> tuple[str, ...]:
    """Returns the sub-questions to answer; without any, the question itself is the only one."""
    return sub_questions(reply)[:MAX_PARTS] or (question,)


def select_documents(reply: str, documents: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """Returns the documents whose numbers (from 1) occur in the reply, in its order."""
    # At most nine digits: `int` raises for very long numbers. Duplicates are dropped.
    numbers = dict.fromkeys(int(i) for i in re.findall(r"(?<![0-9])[0-9]{1,9}(?![0-9])", reply))
    return tuple(documents[i - 1] for i in numbers if 1 <= i <= len(documents))


def one_line(reply: str) -> str:
    """Returns a reply on one line, so that it cannot imitate further lines of a prompt."""
    return " ".join(reply.split())


def plain_answer(reply: str) -> str:
    """Returns an answer without asterisks and a leading `answer:`."""
    return re.sub(r"^answer\s*:\s*", "", one_line(reply.replace("*", "")), flags=re.IGNORECASE)


# --- The system -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Item:
    """A question or sub-question, and the steps that remain for it."""

    text: str
    todo: tuple[str, ...] = (PLAN,)  # the remaining steps
    turn: int = -1  # the number of the planner call that wrote its workflow, and that pays for it
    query: str = ""  # the rewritten query
    documents: tuple[Passage, ...] = ()  # for the answer
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class MAOARAG:
    """The system, and the config section `recipe.system`.

    Fields:
      style: the folder of the prompts. The prompt lists the executors: with fewer `executors` a
        trained planner learns from the penalty, an untrained one needs another style.
      top_k: passages per search.
      max_turns: planner calls: one for the question, and one per sub-question.
      max_tokens: the maximum number of new tokens per plan.
      temperature: the sampling temperature of the planner.
      select_needs_search: whether DS without an earlier R is malformed.
      executors: the executors that a plan may contain; without `QDP`, for example, sub-questions
        are always serial.
      reply_tokens: the maximum number of tokens of an executor's reply.
    """

    FAULTS = {
        "Empty Workflow": "The workflow lists no executor.",
        "Unknown Executor": "The workflow names an executor that does not exist.",
        "Repeated Executor": "The workflow lists the same executor twice.",
        "Decomposed Twice": "A sub-question was decomposed again, which is allowed once.",
        "Decomposition Not Alone": "A workflow lists a decomposition and other executors.",
        "Nothing To Select From": "The workflow selects documents before it has searched for any.",
        "No Answer At The End": "The workflow does not end with the executor that answers.",
        "No Legal Workflow": "The planner wrote no workflow that can be executed.",
        "No Sub-Question": "The decomposition holds no sub-question.",
        "Too Many Sub-Questions": "The decomposition has more sub-questions than are accepted.",
        "Invalid Selection": "None of the selected documents was shown.",
        "No Sub-Answer": "No sub-question has an answer.",
        "Out Of Turns": "The planner's turns were spent before every sub-question had an answer.",
    }

    style: str = "mao_arag"
    top_k: Count = 5
    max_turns: Count = 5
    max_tokens: Count = 16
    temperature: Positive = 1.0
    select_needs_search: bool = False
    executors: tuple[str, ...] = EXECUTORS
    reply_tokens: Count = 256

    def __post_init__(self) -> None:
        if AG not in self.executors or (unknown := sorted({*self.executors} - {*EXECUTORS})):
            problem = f"lacks {AG}" if AG not in self.executors else f"names {unknown[0]!r}"
            raise UserError(
                f"recipe.system.executors {problem}: use {AG}, which ends every workflow, and "
                f"some of {', '.join(EXECUTORS)}"
            )

    @property
    def roles(self) -> Mapping[str, Role]:
        """The planner before and after its first legal plan, as two roles of one policy."""
        sampling, roles = Sampling(self.temperature, 1.0, self.max_tokens), {}
        for name in (PLANNER, SUB_PLANNER):
            parse = functools.partial(
                parse_plan,
                first=name == PLANNER,
                select_needs_search=self.select_needs_search,
                executors=self.executors,
            )
            texts = map(render_plan, ((QDS,), (QDP,), *WORKFLOWS))
            legal = "|".join(text for text in texts if parse(text).valid)
            roles[name] = Role(name, parse, sampling, action_regex=legal)
        return roles

    def steps(self, question: Question) -> Steps:
        """Carries out the workflow of the question, or those of its sub-questions."""
        yield StrategyChoice("")
        strategy, turns = "", 0  # the first legal plan, and the number of planner calls
        items = [Item(question.text)]  # the question, then its sub-questions
        while active := active_items(items, strategy):
            # Answers replace references such as #1 without a call.
            for item in (item for item in active if item.todo[0] == FILL):
                text = fill_references(item.text, items)
                if text != item.text:
                    item.text, item.todo = text, item.todo[1:]
            # 1. One effect per item that can proceed.
            replies = yield from all_of([self._effect(i, items, strategy, turns) for i in active])
            for item, reply in zip(active, replies, strict=True):
                # 2. A plan; after a malformed one the item keeps its step, and tries again.
                if item.todo[0] == PLAN:
                    if reply.valid and reply.args[0] in (QDS, QDP):
                        item.turn, item.todo = turns, (*reply.args, AS)
                    elif reply.valid:
                        # DS before any R has nothing to select from.
                        steps = enumerate(reply.args)
                        todo = (s for n, s in steps if s != DS or R in reply.args[:n])
                        item.turn, item.todo = turns, tuple(todo)
                    if reply.valid and not strategy:
                        strategy = render_plan(reply.args)
                        yield StrategyChoice(strategy)
                    turns += 1
                    continue
                # 3. Or the reply of an executor.
                step, item.todo = item.todo[0], item.todo[1:]
                if step == R:
                    item.documents = reply.passages
                elif step == QR:
                    item.query = one_line(reply)
                elif step == FILL:
                    item.text = one_line(reply) or item.text
                elif step in (AG, AS):
                    item.answer = plain_answer(reply)
                elif step == DS:
                    documents = select_documents(reply, item.documents)
                    if not documents:
                        yield Fault("Invalid Selection")
                    item.documents = documents or item.documents
                else:
                    texts = sub_questions(reply)
                    if not 0 < len(texts) <= MAX_PARTS:
                        yield Fault("Too Many Sub-Questions" if texts else "No Sub-Question")
                    # Later sub-questions of a series start with the substitution of answers.
                    later = (FILL, PLAN) if step == QDS else (PLAN,)
                    parts = parts_of(reply, item.text)
                    items += [Item(part, later if n else (PLAN,)) for n, part in enumerate(parts)]
            # 4. Items that no planner call is left for have no steps, the last items first.
            planned = [item for item in items if PLAN in item.todo]
            for item in planned[max(self.max_turns - turns, 0) :]:
                item.todo = ()
        answer = items[0].answer
        if answer is None:
            yield Done(None, "No Sub-Answer" if strategy else "No Legal Workflow")
        is_complete = all(item.answer is not None for item in items)
        yield Done(answer, "answered" if is_complete else "answered, Out Of Turns")

    def _effect(self, item: Item, items: Sequence[Item], strategy: str, turns: int) -> Effect:
        """Returns the effect of the next step of an item."""
        step = item.todo[0]
        if step == R:
            return Search(item.query or item.text, self.top_k, turn=item.turn)
        planner = SUB_PLANNER if strategy else PLANNER
        executor = PURPOSES.get(step, "") if step != AG or item.documents else "answer_direct"
        name = planner if step == PLAN else executor
        # Answered sub-questions are shown as numbered pairs, like documents.
        pairs = [Passage("", part.text, part.answer or "") for part in answered(items)]
        answers = format_passages(self.style, pairs, form="pair")
        documents = format_passages(self.style, item.documents)
        values = {"question": item.text, "documents": documents, "answers": answers}
        messages = user_turn(self.style, name, **values)
        if step == PLAN:
            return Generate(name, messages, turns + 1)
        request = LLMRequest(name, messages, Sampling(0.0, 1.0, self.reply_tokens))
        # A substitution serves the decomposition, so the question's planner call pays for it.
        return CallLLM(request, turn=items[0].turn if step == FILL else item.turn)


def active_items(items: Sequence[Item], strategy: str) -> list[Item]:
    """Returns the items whose next step can be performed.

    Sub-questions come before the remaining steps of the question: one after the other, or all at
    once after a parallel decomposition.
    """
    waiting = [item for item in items[1:] if item.todo]
    if waiting:
        return waiting if strategy == QDP else waiting[:1]
    todo = items[0].todo
    return [items[0]] if todo and (todo[0] != AS or answered(items)) else []


def fill_references(text: str, items: Sequence[Item]) -> str:
    """Returns a sub-question with the answers of earlier ones in place of #1, #2, ...

    A reference to a sub-question without an answer stays. `items` are the question and its parts.
    """

    def answer(match: re.Match[str]) -> str:
        number = int(match[1])
        return (items[number].answer if 0 < number < len(items) else None) or match[0]

    return re.sub(r"#([0-9]{1,2})(?![0-9])", answer, text)


def answered(items: Sequence[Item]) -> list[Item]:
    """Returns the sub-questions with an answer."""
    return [item for item in items[1:] if item.answer is not None]


# --- Fixed workflows: one for every question (Chen et al. 2025, figure 3) -------------------------

# Each workflow alone, and for the sub-questions of each decomposition.
PLANS: tuple[tuple[str, ...], ...] = tuple(
    (*decomposition, *workflow) for decomposition in ((), (QDS,), (QDP,)) for workflow in WORKFLOWS
)
# Plans of increasing cost, the baselines of a trained planner. Of the last two, which select from
# the passages of each sub-question, the serial one is the best plan of all in the generated world.
USUAL_PLANS = (
    (AG,),
    (R, AG),
    (R, DS, AG),
    (QDS, R, AG),
    (QDP, R, AG),
    (QDS, R, DS, AG),
    (QDP, R, DS, AG),
)


@dataclasses.dataclass(frozen=True)
class FixedWorkflow(WrappedSystem):
    """MAO-ARAG whose planner always writes `plan`, an element of `PLANS` such as `("R", "AG")`.

    After `QDS` or `QDP` the rest of the plan is the workflow of every sub-question.
    """

    system: MAOARAG
    plan: tuple[str, ...]

    @property
    def roles(self) -> Mapping[str, Role]:
        """No roles: the planner writes nothing."""
        return {}

    def steps(self, question: Question) -> Steps:
        """Yields the steps of the workflow, without the planner calls."""
        start = 1 if self.plan[0] in (QDS, QDP) else 0
        first, rest = ParsedAction("Plan", self.plan[:1]), ParsedAction("Plan", self.plan[start:])
        return with_actions(
            self.system.steps(question), lambda e: first if start and e.role == PLANNER else rest
        )


# --- Rewards: the answer's F1 on leaves, format and costs on planner calls ------------------------

DECOMPOSITIONS = (PURPOSES[QDS], PURPOSES[QDP])
# The decomposition that waits for each of its sub-questions, by table; the other one waits once.
SERIAL: Mapping[str, str] = {"code": QDS, "paper": QDP}


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost of a planner call: `alpha` times the weighted sum of three terms (eqs. 4 and 6).

    Fields:
      alpha: the weight of all costs; 0 removes them.
      token_weight, retrieval_weight, turn_weight: the weights of the three terms.
      dollars_per_1k_prompt_tokens: the price of the frozen model for the text that it reads.
      dollars_per_1k_completion_tokens: its price for the text that it writes.
      dollars_per_cost_unit: the price that counts as a token cost of 1.
      turn_table: `code` charges 0.25 per sub-question of QDS and 0.25 for QDP, as the code and the
        text of the paper do; `paper` swaps both rows, as its table 4 is printed.
    """

    alpha: NotNegative = 0.0
    token_weight: NotNegative = 1.0
    retrieval_weight: NotNegative = 1.0
    turn_weight: NotNegative = 1.0
    dollars_per_1k_prompt_tokens: NotNegative = 0.000225
    dollars_per_1k_completion_tokens: NotNegative = 0.0009
    dollars_per_cost_unit: Positive = 6.02e-4
    turn_table: str = "code"

    def __post_init__(self) -> None:
        one_of("recipe.costs.turn_table", self.turn_table, SERIAL)


def turn_cost(plan: Sequence[str], parts: int, table: str = "code") -> float:
    """Returns the latency of a plan: 0.25 per serial sub-question, 0.25 for all parallel ones."""
    if tuple(plan) not in ((QDS,), (QDP,)):
        return 0.0
    return 0.25 * parts if plan[0] == SERIAL[table] else 0.25


def own_reward(action: ParsedAction, calls: Sequence[Call], parts: int, costs: Costs) -> float:
    """Returns the immediate reward of a planner call: -1 for an illegal workflow, minus its costs.

      R_i = -FP_i - alpha (w_token Token_i + w_retrieval 1[S_i] + w_turn Turn_i)

    Eqs. 4 to 6 without the F1, which is the reward of the leaf. The call pays for some `calls` to
    the environment; the rollout has some `parts`, its sub-questions.
    """
    dollars = (
        sum(call.prompt_tokens for call in calls) * costs.dollars_per_1k_prompt_tokens
        + sum(call.completion_tokens for call in calls) * costs.dollars_per_1k_completion_tokens
    ) / 1000
    price = (
        costs.token_weight * (dollars / costs.dollars_per_cost_unit)
        + costs.retrieval_weight * float(any(call.purpose == SEARCH for call in calls))
        + costs.turn_weight * turn_cost(action.args, parts, costs.turn_table)
    )
    return -float(not action.valid) - costs.alpha * price


def follows_grammar(forest: Forest) -> np.ndarray:
    """Returns False at malformed planner calls before the first legal plan, bool `[N]`."""
    return np.array([r.role != PLANNER or not r.parse_error for r in forest.records], bool)


def reward(forest: Forest, costs: Costs) -> np.ndarray:
    """Returns the F1 of answers on leaves and `own_reward` on planner calls, float32 `[N]`."""
    reward_N = answer_rewards(forest, f1)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        end = forest.records[leaf]
        # The frozen model decomposes at most once per rollout.
        texts = [call.reply for call in end.calls if call.purpose in DECOMPOSITIONS]
        parts = sum(len(parts_of(text, "")) for text in texts)
        for turn, node in enumerate(path_from_root(forest, leaf)[:-1]):
            action = forest.records[node].parsed
            assert action is not None, "a node above a leaf is an action"
            # The leaf records all calls, each with the number of the planner call that pays.
            calls = [call for call in end.calls if call.turn == turn]
            reward_N[node] = own_reward(action, calls, parts, costs)
    return reward_N


# --- The table of choices -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's main result, without costs.

    Fields:
      system: the steps and how actions are sampled.
      costs: weights and prices of the costs of a planner call.
      train_malformed: whether malformed planner calls before the first legal plan are trained.
    """

    system: MAOARAG = MAOARAG()
    costs: Costs = Costs()
    train_malformed: bool = True


def recipe(settings: Settings) -> Recipe:
    """Returns single rollouts in which each planner call earns the answer's F1 minus its costs."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, costs=settings.costs),
        credit=shared_credit,
        metric="f1",
        accepts_judge=True,
        fixed_strategies={
            render_plan(plan): FixedWorkflow(settings.system, plan) for plan in USUAL_PLANS
        },
        trainable=None if settings.train_malformed else follows_grammar,
        priced=settings.costs.alpha > 0,
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> MAOARAG:
    """Returns the system for `ragrl evaluate`, see `systems.registry`; `tiny` changes nothing."""
    del tiny
    return MAOARAG(style, top_k)
