"""C-3PO's table of choices: tree rollouts, answer accuracy, Monte Carlo credit.

Chen et al. 2025, "C-3PO: Compact Plug-and-Play Proxy Optimization to Achieve Human-like
Retrieval-Augmented Generation". One policy plays three roles, distinguished by instruction: the
router selects a strategy, the filter selects among retrieved passages, the decision maker leads a
planned search. Search, roadmap and final answer belong to the environment.

Departures from the paper and its published code
  1. In the mode that allows only `[LLM]`, another action is overwritten in the state, and counted;
     the code corrects a local variable, so that a search still happens. The sampled tokens stay.
  2. A dead branch (malformed action, depth) counts as a leaf of reward 0; the code drops it.
  3. For the router, both forced texts and forced prefixes are available (paper: prefix, code:
     text).
  4. The router may sample in addition to its forced actions (`router_samples`); in the paper it
     does not. Without samples, training never sees a malformed route of the policy, and the
     probability that losing strategies lose may move there: a run of 48 steps on the embedded
     default ended with half of its routes malformed.
  5. Clip 0.2, gamma 1, lambda 0.95, KL in the reward and whitening are not stated; they are the
     defaults of the trainer that the authors name (OpenRLHF 0.5.6). So is the clip of values
     (eq. 10 has the plain squared error: `objective.value_loss=plain`). The temperature is not
     stated either: 0.6 is the code's, whose sampler also wrote the demonstrations.
  6. Eqs. 8 and 9 add up the tokens of all roles without a denominator. Here each role has the mean
     of its tokens, and the roles are added up (`aggregation=role_sum`): a role with few tokens
     weighs as much as one with many. `token_mean` weighs roles by their tokens. The critic's loss
     is a mean over all tokens.
  7. The definition of a right answer in training is not stated. Here it contains the tokens of a
     gold answer or, with a `judge` in the config, a language model accepts it: the paper's measure,
     by the rules of the paper's prompt in other words. The substring of tables (cover-EM) would pay
     for "I do not know." if the gold answer is "no".
  8. The code gives the router a hint about each data set; here it gets none, as in the paper.
  9. The query is the text around the bracket; in the code, the text after it. The code also reads
     `[ LLM ]` and `[1,]`, which are malformed here.
 10. Epochs and minibatches are not stated: `configs/c3po.py` takes eight optimizer steps per batch
     of rollouts, one per 128 of about 1,024 actions, as that trainer does.
 11. One roadmap per planned search, from a prompt with one example; the code has two of each.
 12. The paper's depth limit is 13, but its figure 6 shows depths up to 15, the code's limit in
     evaluation: `configs/c3po.py` has 13 in training and 15 in evaluation (`evaluation_depth`), and
     so have tables of prompted models.
 13. Eq. 5 is a mean over leaves, which is a biased estimate of the expected reward where nodes have
     different numbers of leaves below them; `credit=child_mean` is a mean over children.
 14. The paper states no limit for roadmaps and answers of the frozen model. `configs/c3po.py` has
     the code's 2,048 tokens; the default of `system.reply_tokens` is 256.
 15. The fixed strategy `Retrieval` of table 3 searches for the question itself; the policy writes
     no query, which it does in training after the forced prefix (`router_forcing="prefix"`).
 16. After an empty selection a note says that the query found nothing. The decision maker and the
     model that answers read the note, and it counts as a document (`system.max_documents`). A query
     that was made before returns the next page.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from jax_ragrl.config.ranges import Count, Natural, Positive
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import CallLLM, Done, Generate, Search
from jax_ragrl.rollout.expand import ForcedAction, Tree
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Fault, Shown, Steps, StrategyChoice, Used
from jax_ragrl.systems.base import Recipe, WrappedSystem, with_actions
from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.text.patterns import ascending, character, choice, line, visible
from jax_ragrl.text.prompts import question_turn
from jax_ragrl.types import LLMRequest, Passage, Question, Sampling

ROUTER, FILTER, DECISION = "router", "filter", "decision"
NO_RETRIEVAL, RETRIEVAL, PLANNING, LLM = "No Retrieval", "Retrieval", "Planning", "LLM"
MAX_QUERY_WORDS = 100
ROADMAP_TEMPERATURE = 0.3  # the code's

# From the start of a text to the first closed bracket: a search for the bracket alone would begin
# again at each of many opening ones.
_BRACKETS = re.compile(r"[^\[]*\[([^\]]*)\]")

# --- Grammars: total functions from text to `ParsedAction` --------------------------------------


def parse_router(text: str) -> ParsedAction:
    """Parses `[No Retrieval]`, `[Retrieval] query` or `[Planning]` from the first bracket."""
    return _bracketed(text, (NO_RETRIEVAL, RETRIEVAL, PLANNING))


def parse_decision(text: str) -> ParsedAction:
    """Parses `Thought: ...` and `Action: [Retrieval] query` or `Action: [LLM]`."""
    thought, action = _turn(text)
    if not thought:
        return invalid_action("Invalid Format")
    return _bracketed(action, (RETRIEVAL, LLM))._replace(thought=thought)


def parse_filter(text: str) -> ParsedAction:
    """Parses `Thought: ...` and `Action: [i, j]`, numbers from 1; an empty list selects nothing."""
    thought, action = _turn(text)
    brackets = _BRACKETS.match(action)
    if not thought or not brackets:
        return invalid_action("Invalid Format")
    items = [item.strip() for item in brackets[1].split(",")] if brackets[1].strip() else []
    # At most nine ASCII digits: `int` raises for very long numbers.
    if not all(re.fullmatch(r"[+-]?[0-9]{1,9}", item) for item in items):
        return invalid_action("Invalid Document Idx")
    return ParsedAction("Select", tuple(dict.fromkeys(map(int, items))), thought)


def _turn(text: str) -> tuple[str, str]:
    """Returns the thought and the action; the `Thought:` tag is optional, `Action:` is required."""
    head, tag, action = text.partition("Action:")
    thought = head.partition("Thought:")[2] if "Thought:" in head else head
    return (thought.strip(), action) if tag else ("", "")


def _bracketed(text: str, legal: tuple[str, ...]) -> ParsedAction:
    match = _BRACKETS.match(text)
    if not match:
        return invalid_action("Invalid Format")
    # The query may be before or after its bracket.
    rest = text[: match.start(1) - 1] + " " + text[match.end() :]
    query = " ".join(rest.split()[:MAX_QUERY_WORDS])
    if match[1] not in legal or (match[1] == RETRIEVAL and not query):
        return invalid_action("Invalid Action")
    return ParsedAction(match[1], (query,) if match[1] == RETRIEVAL else ())


def render_router(action: str, query: str = "") -> str:
    return f"[{action}] {query}".rstrip()


def render_filter(thought: str, numbers: tuple[int, ...]) -> str:
    return f"Thought: {thought}\nAction: [{', '.join(map(str, numbers))}]"


def render_decision(thought: str, action: str, query: str = "") -> str:
    """Renders the decision maker's text; `query` is empty for the action `LLM`."""
    return f"Thought: {thought}\nAction: {render_router(action, query)}"


def strict_grammars(top_k: int) -> dict[str, str]:
    """Returns the regular expression of each role's actions, in the form of the renderers.

    A filter selects from `top_k` candidates, in ascending order.
    """
    # The first bracket of a text is its action, so no other text contains one. Without a colon in
    # its first word, a thought cannot begin with the label of the action.
    search = rf"\[{RETRIEVAL}\] {line(without='[]')}"
    turn = f"Thought: {visible('[]:')}+(?: {character('[]')}*)?\nAction: "
    numbers = ascending([str(i + 1) for i in range(top_k)], ", ")
    return {
        ROUTER: choice(rf"\[{NO_RETRIEVAL}\]", search, rf"\[{PLANNING}\]"),
        FILTER: rf"{turn}\[(?:{numbers})?\]",
        DECISION: turn + choice(search, rf"\[{LLM}\]"),
    }


# --- The system --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class C3PO:
    """The system, and the config section `recipe.system`.

    Fields:
      style: the folder of the prompts.
      top_k: passages per search.
      max_depth: a branch below this depth is dead; each node kind of the paper counts as one.
      max_documents: with more documents than this, only `[LLM]` is offered.
      strict: a selection out of range ends the branch (training); otherwise it is skipped.
      max_tokens: the maximum number of new tokens per action.
      temperature: the sampling temperature of all roles.
      reply_tokens: the maximum number of tokens of a roadmap or an answer of the frozen model.
    """

    FAULTS = {
        "Invalid Format": "The text lacks the form that the prompt demands.",
        "Invalid Action": "The prompt does not offer this action.",
        "Invalid Document Idx": "The selection holds something other than numbers of documents.",
        "Hallucinate Document Idx": "The selection names a document that was not shown.",
        "Overwritten Action": "Another search was asked for when only an answer was offered.",
        "Max Depth": "The rollout reached its largest number of levels without an answer.",
    }

    style: str = "c3po"
    top_k: Count = 10
    max_depth: Count = 13
    max_documents: Count = 10
    strict: bool = True
    max_tokens: Count = 2048
    temperature: Positive = 0.6
    reply_tokens: Count = 256

    @property
    def roles(self) -> Mapping[str, Role]:
        """The three trained roles, which share one policy."""
        sampling = Sampling(self.temperature, 1.0, self.max_tokens)
        parsers = {ROUTER: parse_router, FILTER: parse_filter, DECISION: parse_decision}
        regexes = strict_grammars(self.top_k)
        return {
            name: Role(name, parse, sampling, action_regex=regexes[name], chooses=name == FILTER)
            for name, parse in parsers.items()
        }

    def steps(self, question: Question) -> Steps:
        """Answers from memory, after one search, or after a planned series of searches."""
        yield StrategyChoice("")
        documents: tuple[Passage, ...] = ()
        queries: list[str] = []
        depth = 1
        # 1. The router chooses the strategy; the frozen model plans a series of searches.
        prompt = question_turn(self.style, "router", question)
        route = yield Generate(ROUTER, prompt, depth)
        yield from _dead_unless(route.valid, route.error, depth)
        yield StrategyChoice(route.action)
        planned, roadmap = route.action == PLANNING, ""
        if planned:
            depth = yield from self._descend(depth)
            prompt = question_turn(self.style, "roadmap", question)
            sampling = Sampling(ROADMAP_TEMPERATURE, 1.0, self.reply_tokens)
            roadmap = yield CallLLM(LLMRequest("roadmap", prompt, sampling))
            depth = yield from self._descend(depth)
        while route.action != NO_RETRIEVAL:
            # 2. Each planned search is a decision, whose thought the filter reads.
            query, objective = "".join(route.args), ""
            if planned:
                # Another search (1), its filter (1) and the answer (2) take four levels.
                only_llm = len(documents) > self.max_documents or depth > self.max_depth - 4
                name = "decision_final" if only_llm else "decision"
                prompt = question_turn(self.style, name, question, documents, roadmap=roadmap)
                decision = yield Generate(DECISION, prompt, depth)
                # Where only `[LLM]` is offered, another action counts as that.
                wrong = decision.error == "Invalid Action" or decision.action == RETRIEVAL
                if only_llm and wrong:
                    yield Fault("Overwritten Action")
                    break
                yield from _dead_unless(decision.valid, decision.error, depth)
                if decision.action == LLM:
                    break
                query, objective = decision.args[0], decision.thought
            # 3. A repeated query would return the same passages, so it returns the next page.
            candidates = (yield Search(query, self.top_k, queries.count(query))).passages
            queries.append(query)
            depth = yield from self._descend(depth)
            # 4. The filter selects passages, which are numbered from 1 in the prompt.
            yield Shown(candidates)
            name = "filter_objective" if objective else "filter"
            prompt = question_turn(self.style, name, question, candidates, objective=objective)
            selection = yield Generate(FILTER, prompt, depth)
            yield from _dead_unless(selection.valid, selection.error, depth)
            legal = tuple(candidates[i - 1] for i in selection.args if 1 <= i <= len(candidates))
            if len(legal) < len(selection.args):
                yield from _dead_unless(not self.strict, "Hallucinate Document Idx", depth)
                yield Fault("Hallucinate Document Idx")
            documents = accumulate(documents, legal, query)
            yield Used(documents)
            if not planned:
                break
            depth = yield from self._descend(depth)
        # 5. The assembly of the prompt is a separate node kind in the paper's depth count.
        depth = yield from self._descend(depth, 2)
        name = "answer" if documents else "answer_direct"
        prompt = question_turn(self.style, name, question, documents)
        text = yield CallLLM(LLMRequest(name, prompt, Sampling(0.0, 1.0, self.reply_tokens)))
        yield Done(text, "answered", depth)

    def _descend(self, depth: int, levels: int = 1) -> Steps:
        """Returns the depth after some more levels; ends a branch that would be too deep."""
        yield from _dead_unless(depth + levels <= self.max_depth, "Max Depth", depth)
        return depth + levels


def _dead_unless(alive: bool, reason: str, depth: int) -> Steps:
    if not alive:
        yield Done(None, reason, depth)


def accumulate(
    documents: tuple[Passage, ...], selection: tuple[Passage, ...], query: str
) -> tuple[Passage, ...]:
    """Adds the selection of a filter to the documents, without duplicates.

    An empty selection adds a note instead, which a later non-empty one for the same query removes.
    """
    note = Passage("", query, "Nothing relevant was found for this query.")
    previous = tuple(d for d in documents if not (selection and d == note))
    return tuple(dict.fromkeys(previous + (selection or (note,))))


@dataclasses.dataclass(frozen=True)
class FixedStrategy(WrappedSystem):
    """C-3PO whose router always takes one strategy (Chen et al. 2025, table 3).

    `strategy` is `No Retrieval`, `Retrieval` (the question is the query) or `Planning`.
    """

    strategy: str

    @property
    def roles(self) -> Mapping[str, Role]:
        """Every role except the router."""
        return {name: role for name, role in self.system.roles.items() if name != ROUTER}

    def steps(self, question: Question) -> Steps:
        """Yields the steps after the router, as if it had written the text of the strategy."""
        query = question.text if self.strategy == RETRIEVAL else ""
        route = parse_router(render_router(self.strategy, query))
        return with_actions(
            self.system.steps(question), lambda effect: route if effect.role == ROUTER else None
        )


# --- The table of choices -----------------------------------------------------------------------

NO_PLANNING, SAMPLED_ROUTER = "no_planning", "sampled"
SEARCHES = {
    # The policy continues a prefix, here with the query; a complete text stays as it is.
    "prefix": ForcedAction(f"[{RETRIEVAL}]", complete=False),
    "text": ForcedAction(f"[{RETRIEVAL}] $question"),
    NO_PLANNING: ForcedAction(f"[{RETRIEVAL}]", complete=False),
}


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The rollout (section 5.1) and its credit.

    Fields:
      width: actions sampled per decision.
      branching_depth: decisions down to this depth branch; deeper ones sample one action.
      router_samples: actions that the router samples in addition to its three forced ones.
      router_forcing: how the router's search is forced: `prefix` (the policy writes the query, as
        in the paper), `text` (the question is the query, as in the code), or `no_planning`: as
        `prefix`, but planning is not forced, for questions that one search answers. With `sampled`
        nothing is forced and the router samples `width` actions like any role; with a width of 1
        this is the single trajectory of the paper's ablation (section 6.4).
    """

    width: Count = 2
    branching_depth: Natural = 4
    router_samples: Natural = 0
    router_forcing: str = "prefix"

    def __post_init__(self) -> None:
        one_of("tree.router_forcing", self.router_forcing, (*SEARCHES, SAMPLED_ROUTER))
        if self.router_samples and self.router_forcing == SAMPLED_ROUTER:
            raise UserError(
                f"tree.router_samples is {self.router_samples}, but tree.router_forcing is "
                f"{SAMPLED_ROUTER!r}, so that the router samples `width` actions: set "
                "router_samples to 0"
            )

    def expander(self, roles: frozenset[str] = frozenset()) -> Tree:
        """Returns the tree, the same for any `roles` in training."""
        del roles
        if self.router_forcing == SAMPLED_ROUTER:
            return Tree(self.width, self.branching_depth)
        # All strategies are tried at every root, so that their leaves can be compared.
        planning = () if self.router_forcing == NO_PLANNING else (ForcedAction(f"[{PLANNING}]"),)
        strategies = ForcedAction(f"[{NO_RETRIEVAL}]"), SEARCHES[self.router_forcing], *planning
        return Tree(self.width, self.branching_depth, {ROUTER: strategies}, self.router_samples)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's.

    Fields:
      system: the steps and how actions are sampled.
      tree: the rollouts and their credit.
      evaluation_depth: the depth limit in evaluation; 0: that of training.
    """

    system: C3PO = C3PO()
    tree: TreeShape = TreeShape()
    evaluation_depth: Natural = 0


def recipe(settings: Settings) -> Recipe:
    """Returns tree rollouts with the accuracy of leaves, averaged over reachable leaves."""
    tree, depth = settings.tree, settings.evaluation_depth or settings.system.max_depth
    inference = dataclasses.replace(settings.system, strict=False, max_depth=depth)
    return Recipe(
        system=settings.system,
        reward=functools.partial(answer_rewards, metric=cover_match_tokens),
        credit=reachable_leaves,
        expander=tree.expander,
        # Forced actions are not sampled, so they do not count for the batch size.
        width=max(tree.width, tree.router_samples),
        inference=inference,
        metric="cover_em",
        accepts_judge=True,
        fixed_strategies={
            name: FixedStrategy(inference, name) for name in (NO_RETRIEVAL, RETRIEVAL, PLANNING)
        },
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> C3PO:
    """Returns the system for `ragrl evaluate`, see `systems.registry`."""
    return C3PO(style, top_k, max_depth=13 if tiny else 15, strict=False)
