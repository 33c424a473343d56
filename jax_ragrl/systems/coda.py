"""CoDA: a planner and an executor on one policy, each with a context of its own.

"CoDA: A Context-Decoupled Hierarchical Agent with Reinforcement Learning" (WSDM 2026). The planner
hands out sub-questions and sees results alone; an executor sees its sub-question and what it found,
and nothing else. One reward for the whole rollout trains every turn of both.

Departures from the paper and its published code
  1. Turns are cut by ids, at the shortest prefix that holds a closing tag; the code decodes, cuts
     and encodes again, so that other ids are scored than were sampled.
  2. Observations are never cut, where the code keeps 512 tokens of each (1,024 in evaluation). A
     context that no longer fits the sampler ends its rollout (an executor's: with an empty result);
     the code drops its beginning.
  3. A task or a search in the last turn is not carried out, since nobody would read the outcome.
  4. An empty action is refused like a missing one: a message, and a turn is gone.
  5. `paper()`: the executors earn their point for format together, and the refined texts are
     joined; `code()`: each is judged by itself (the mean, any). Without an executor there is no
     such point in either. The format of a planner is the code's: think, task and answer.
  6. The instructions pass through the chat template; with `chat` off (as in the paper) everything
     after them is plain text in one long turn of the assistant.
  7. Groups are questions of the batch; the code's row numbers let two data sets share a group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import over_rollouts
from jax_ragrl.rollout.effects import Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems.base import Recipe, Reply, path_to, two_or_more
from jax_ragrl.systems.tags import (
    ANSWER,
    REFINE,
    SEARCH,
    TASK,
    THINK,
    Context,
    Errand,
    closing,
    contents,
    parse_turn,
    well_formed,
)
from jax_ragrl.text.metrics import cover_match, f1
from jax_ragrl.text.prompts import numbered, template, user_turn
from jax_ragrl.types import Hits, Passage, Question, Sampling

PLANNER, EXECUTOR = "planner", "executor"
PLANNER_ACTIONS, EXECUTOR_ACTIONS = (TASK, ANSWER), (SEARCH, ANSWER)
# What each has to have written at least once, opened as often as closed.
PLANNER_TAGS, EXECUTOR_TAGS = (THINK, TASK, ANSWER), (THINK, SEARCH, REFINE, ANSWER)

parse_planner = functools.partial(parse_turn, actions=PLANNER_ACTIONS)
parse_executor = functools.partial(parse_turn, actions=EXECUTOR_ACTIONS)


# --- The state machine --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State:
    """A planner's context, and that of the executor at work on its last task, if any.

    `candidates` are the passages that were found last; `why` is set at the end; `faults` are those
    of executors that came to no answer.
    """

    question: Question
    planner: Context
    executor: Errand | None = None
    candidates: tuple[Passage, ...] = ()
    depth: int = 1
    answer: str | None = None
    why: str = ""
    faults: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CoDA:
    """The system. A planner has `max_turns` turns, each of its executors `executor_turns`, and a
    `prompt` with refinement (`executor`) or without (`search`)."""

    style: str = "coda"
    top_k: int = 3
    max_turns: int = 6
    executor_turns: int = 6
    sampling: Sampling = Sampling(1.0, 1.0, 512)
    chat: bool = False
    prompt: str = "executor"

    @property
    def roles(self) -> Mapping[str, Role]:
        """Planner and executor; one shared policy."""
        return {
            PLANNER: self._role(PLANNER, parse_planner, PLANNER_ACTIONS),
            EXECUTOR: self._role(EXECUTOR, parse_executor, EXECUTOR_ACTIONS),
        }

    def start(self, question: Question) -> State:
        """The planner, alone with the question."""
        return State(question, Context(question.text))

    def wants(self, state: State) -> Effect:
        """What the state waits for; an executor at work goes first."""
        if state.why:
            return Done(state.answer, state.why)
        if state.executor is None:
            about = user_turn(self.style, "planner", question=state.planner.about)
            return Generate(PLANNER, about, state.depth, state.planner.after)
        if state.executor.query:
            return Search(state.executor.query, self.top_k)
        context = state.executor.context
        about = user_turn(self.style, self.prompt, task=context.about)
        return Generate(EXECUTOR, about, state.depth, context.after)

    def advance(self, state: State, reply: Reply) -> State:
        """The state after an action or a search."""
        if isinstance(reply, Hits):
            assert state.executor is not None, "only executors search"
            shown = self._observe("documents", documents=numbered(self.style, reply.passages))
            executor = state.executor.found(shown)
            return dataclasses.replace(state, executor=executor, candidates=reply.passages)
        assert isinstance(reply, Parsed)
        state = dataclasses.replace(state, depth=state.depth + 1)
        if state.executor is None:
            return self._planned(state, reply)
        retry = self._observe("retry_executor")
        executor = state.executor.acted(reply, self.executor_turns, retry)
        if not executor.why:
            return dataclasses.replace(state, executor=executor)
        planner = state.planner.told(self._observe("result", result=executor.result))
        faults = state.faults + ((f"Executor {executor.why}",) if not executor.result else ())
        return dataclasses.replace(state, planner=planner, executor=None, faults=faults)

    def _planned(self, state: State, parsed: Parsed) -> State:
        planner = state.planner.said(parsed)
        state = dataclasses.replace(state, planner=planner)
        if parsed.action == ANSWER:
            return dataclasses.replace(state, answer=parsed.args[0], why="answered")
        if not parsed.ids or planner.turns >= self.max_turns:
            return dataclasses.replace(state, why="Out of Turns" if parsed.ids else parsed.error)
        if parsed.action == TASK:
            return dataclasses.replace(state, executor=Errand(Context(parsed.args[0])))
        return dataclasses.replace(state, planner=planner.told(self._observe("retry_planner")))

    def _observe(self, name: str, **values: str) -> str:
        return observation(self.style, name, self.chat, **values)

    def _role(self, name: str, parse: functools.partial[Parsed], actions: Sequence[str]) -> Role:
        return Role(name, parse, self.sampling, stops=closing(actions), chat=self.chat)


def observation(style: str, name: str, chat: bool, **values: str) -> str:
    """What a context is told: a user's turn, or lines of their own in the assistant's."""
    text = template(style, name).substitute(values)
    return text if chat else f"\n{text}\n"


# --- Reward and credit --------------------------------------------------------------------------


def written(path: Sequence[Record]) -> tuple[str, list[str]]:
    """What a rollout's planner wrote, and each of its executors: their own words alone."""
    runs = itertools.groupby((r for r in path if r.parsed), key=lambda record: record.role)
    texts = [(role, "\n".join(r.parsed.text for r in run if r.parsed)) for role, run in runs]
    planner = "\n".join(text for role, text in texts if role == PLANNER)
    return planner, [text for role, text in texts if role == EXECUTOR]


def answer_reward(answer: str | None, answers: Sequence[str]) -> float:
    """R_ans = 6 F1 - 3 (eq. 4 and 5); no answer counts as a wrong one."""
    return 6.0 * (0.0 if answer is None else f1(answer, answers)) - 3.0


def format_reward(
    planner: str, executors: Sequence[str], together: bool, tags: Sequence[str] = EXECUTOR_TAGS
) -> float:
    """R_format = I_P + I_E (eq. 6): I_E says whether all executors are well formed, or what share.

    `tags` are an executor's. An answer without any task costs the planner's point.
    """
    right = [well_formed(text, tags) for text in executors] or [False]
    share = float(all(right)) if together else float(np.mean(right))
    return float(well_formed(planner, PLANNER_TAGS)) + share


def refine_reward(executors: Sequence[str], answers: Sequence[str], together: bool) -> float:
    """I(s != "") I(G in s) (eq. 7 and 8): some gold answer stands in what was refined.

    `s` joins the refined texts of all executors (`together`), or is looked at for each.
    """
    refined = [contents(text, REFINE) for text in executors]
    looked_at = [" ".join(refined)] if together else refined
    return float(any(cover_match(s, answers) for s in looked_at if s.strip()))


# A_i = (R_i - mean_j R_j) / std_j R_j over the rollouts j of the same question (eq. 2), the same
# number for every turn of planner and executors: how many tasks a rollout hands out cannot weigh.
rollout_advantages = functools.partial(over_rollouts, rule=group_normalised)
# What `Objective.advantage` may name instead: without the division, or against the others alone.
ROLLOUT_ADVANTAGES = {"group_normalised": rollout_advantages} | {
    rule.__name__: functools.partial(over_rollouts, rule=rule)
    for rule in (group_centred, leave_one_out)
}


# --- The recipe ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of a CoDA run; the defaults are the paper's.

    `together` judges the executors as one (see departure 5). `formats` and `refine` weigh those
    terms: 0 leaves one out. Executors without `refining` are Search-R1 in the hierarchy (table 3):
    they are not asked for refinement, and earn nothing by it.
    """

    style: str = "coda"
    top_k: int = 3
    max_turns: int = 6
    executor_turns: int = 6
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    chat: bool = False
    rollouts: int = 8
    formats: float = 1.0
    refine: float = 0.5
    together: bool = True
    refining: bool = True

    def __post_init__(self) -> None:
        two_or_more("rollouts", self.rollouts)


def paper() -> Settings:
    """As the paper says; the weight 0.5 of the refinement is the code's."""
    return Settings()


def code() -> Settings:
    """As the code does: nucleus sampling in training, and each executor judged by itself."""
    return Settings(top_p=0.95, together=False)


def terms(forest: Forest, settings: Settings) -> dict[str, np.ndarray]:
    """What is added up to a rollout's reward on its leaf (eq. 9), by name, float64 `[N]`."""
    tags = [tag for tag in EXECUTOR_TAGS if settings.refining or tag != REFINE]
    found = {name: np.zeros(len(forest.records)) for name in ("answer", "format", "refine")}
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        answers = forest.questions[record.question].answers
        planner, executors = written(path_to(forest, leaf))
        form = format_reward(planner, executors, settings.together, tags)
        refined = settings.refining and refine_reward(executors, answers, settings.together)
        found["answer"][leaf] = answer_reward(record.answer, answers)
        found["format"][leaf] = settings.formats * form
        found["refine"][leaf] = settings.refine * refined
    return found


def reward(forest: Forest, settings: Settings) -> np.ndarray:
    """R = R_ans + R_format + 0.5 R_refine (eq. 9) on each rollout's leaf, float32 `[N]`."""
    answer_N, format_N, refine_N = terms(forest, settings).values()
    return (answer_N + format_N + refine_N).astype(np.float32)


def recipe(settings: Settings) -> Recipe:
    """PECO: whole rollouts in groups, one advantage for every turn of a rollout."""
    system = CoDA(
        settings.style,
        settings.top_k,
        settings.max_turns,
        settings.executor_turns,
        Sampling(settings.temperature, settings.top_p, settings.max_tokens),
        settings.chat,
        "executor" if settings.refining else "search",
    )
    return Recipe(
        system,
        functools.partial(reward, settings=settings),
        rollout_advantages,
        rollouts=settings.rollouts,
        metric="em",
        advantages=ROLLOUT_ADVANTAGES,
        terms=functools.partial(terms, settings=settings),
    )
