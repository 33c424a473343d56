r"""M-ASK: a memory of notes between searches, and rewards per turn (Chen et al. 2026, 2601.04703).

    python docs/lab/m_ask.py runs/m_ask/demos.jsonl
    ragrl warmup sft --config=configs/tiny/sft_mao_arag.py --out=runs/m_ask/warm --config.epochs=1 \
        --config.data.demos=runs/m_ask/demos.jsonl --config.optimizer.policy_lr=3e-3 \
        --config.batch_size=128
    PYTHONPATH=docs/lab ragrl experiment run docs/lab/m_ask.py --out=runs/m_ask/arms

A searcher reads the question and the notes so far and writes a query, or ends; a summarizer reads
the passages of the query alone and writes a note; an answerer reads the notes. No prompt grows with
the passages. By the published code the answerer earns the F1 of its answer, the searcher and the
summarizer of a turn the F1 that the turn added, and the end nothing; each action is a sample of
its own for PPO. The arm `outcome` is the same system with the F1 of the last answer for all.

Departures: there is no first answer from memory, which no model has here; a note is always added,
so that there is no agent which may replace an earlier one.
"""

import dataclasses
import pathlib
import random
import re
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from jax_ragrl.corpus.world import generate
from jax_ragrl.credit.assign import immediate_credit, shared_credit
from jax_ragrl.llm.reader import WorldReader, question_of
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Done, Generate, Search, Segment
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Shown, Steps
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.models import load_policy
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.systems.base import Recipe, path_from_root
from jax_ragrl.systems.opera.expert_pool import RecordingSampler
from jax_ragrl.systems.opera.world import comparison_answer, fill_answers, read_gold, subgoals
from jax_ragrl.text.metrics import f1
from jax_ragrl.text.prompts import format_passages, parse_passages
from jax_ragrl.types import Message, Passage, Question, Sampling
from jax_ragrl.warmstart.demos import Demo
from jax_ragrl.warmstart.teacher_examples import build_world_retriever
from jax_ragrl.warmstart.teachers.base import TeacherSampler

SEARCHER, SUMMARIZER, ANSWERER = "searcher", "summarizer", "answerer"
STYLE = "opera_tiny"  # how passages are shown
END, NOTHING = "end", "nothing"  # no further query; no fact in the passages, or no answer yet


def parse(text: str) -> ParsedAction:
    """Parses an action: one line."""
    text = text.strip()
    return ParsedAction("Line", (text,)) if text and "\n" not in text else invalid_action("No Line")


@dataclasses.dataclass(frozen=True)
class MASK:
    """The system, and the config section `recipe.system`."""

    FAULTS = {"No Line": "The text is not one line."}

    style: str = STYLE
    top_k: int = 3
    max_turns: int = 4
    max_tokens: int = 24

    @property
    def roles(self) -> Mapping[str, Role]:
        """Searcher, summarizer and answerer: one policy."""
        sampling = Sampling(1.0, 1.0, self.max_tokens)
        return {name: Role(name, parse, sampling) for name in (SEARCHER, SUMMARIZER, ANSWERER)}

    def steps(self, question: Question) -> Steps:
        """Searches and takes notes until the searcher ends; the last answer counts."""
        notes, answer, depth = "", None, 1

        def act(role: str, text: str, asked: str) -> Steps:
            nonlocal depth
            message = Message("user", f"{role}\n{text}Question: {asked}")
            action = yield Generate(role, (message,), depth)
            depth += 1
            return action.args[0] if action.valid else NOTHING

        for _ in range(self.max_turns):
            query = yield from act(SEARCHER, notes, question.text)
            if query in (END, NOTHING):
                break
            hits = yield Search(query, self.top_k)
            yield Shown(hits.passages)
            shown = format_passages(self.style, hits.passages) + "\n"
            note = yield from act(SUMMARIZER, shown, query)
            notes += f"{query} = {note}\n"
            answer = yield from act(ANSWERER, notes, question.text)
        yield Done(answer, "answered" if answer else "No Answer", depth)


def turn_rewards(forest: Forest) -> np.ndarray:
    """Returns M-ASK's rewards, float32 `[N]`: see the top of this file."""
    reward_N = malformed(forest)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        answers = forest.questions[forest.records[leaf].question].answers
        turn: list[int] = []
        before = 0.0
        for node in path_from_root(forest, leaf)[:-1]:
            record = forest.records[node]
            if record.role != ANSWERER:
                turn.append(node)
                continue
            assert record.parsed is not None, "a node above a leaf is an action"
            score = f1("".join(record.parsed.args), answers)
            reward_N[turn] += np.float32(score - before)
            reward_N[node] += np.float32(score)
            turn, before = [], score
    return reward_N


def malformed(forest: Forest) -> np.ndarray:
    """Returns -1 at malformed actions, float32 `[N]`."""
    bad = [bool(r.parsed and not r.parsed.valid) for r in forest.records]
    return -np.array(bad, np.float32)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`: M-ASK, or without `turns` the reward of the last answer."""

    system: MASK = MASK()
    turns: bool = True


def recipe(settings: Settings) -> Recipe:
    """Single rollouts, for PPO."""
    if settings.turns:
        return Recipe(settings.system, turn_rewards, immediate_credit)
    outcome = lambda forest: answer_rewards(forest, f1) + malformed(forest)  # noqa: E731
    return Recipe(settings.system, outcome, shared_credit)


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Writes by rule; after the first note it ends too soon with `p_end`."""

    p_end: float = 0.6

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        """Writes one action, see `TeacherScript`."""
        del history
        prompt = messages[-1].content
        goal = question_of(prompt)
        if role == SUMMARIZER:
            passages = [Passage("", *pair) for pair in parse_passages(STYLE, prompt)]
            return "".join(read_gold(goal, passages).answers[:1]) or NOTHING
        goals, notes = subgoals(goal), re.findall("^.* = (.*)$", prompt, re.MULTILINE)
        hops = [g for g in goals if " of " in g]
        if role == ANSWERER:
            last = comparison_answer(fill_answers(goals[-1], notes))
            return (last or notes[-1]) if len(notes) == len(hops) else NOTHING
        is_done = len(notes) == len(hops) or NOTHING in notes
        ends = is_done or (notes and rng.random() < self.p_end)
        return END if ends else fill_answers(hops[len(notes)], notes)


def write_demos(file: pathlib.Path, worlds: Sequence[int]) -> None:
    """Writes the actions of the teacher on 100 questions of each of the worlds."""
    sampler = RecordingSampler(TeacherSampler(Teacher(), load_policy("tiny")[1]))
    demos = list[Demo]()
    for seed in worlds:
        world = generate(seed, 160, hops=(1, 2))
        environment = Environment(sampler, build_world_retriever(world), WorldReader(world))
        questions = world.questions["train"][:100]
        forest = collect(MASK(), single_chain, questions, environment, seed=seed)
        for role, x in ((r.role, r.action) for r in forest.records if r.action):
            demos.append(Demo("", role, sampler.prompts[x.prompt_ids].messages, x.text))
    write_rows(file, (demo.row() for demo in demos))


def get_config(name: str = "") -> ConfigDict:
    """The experiment; `turns` and `outcome`: the configs of its arms."""
    if name:
        values = load_config(pathlib.Path("configs/tiny/mmoa_rag.py"), [])
        values |= {"system": "m_ask", "recipe": {"turns": name == "turns"}}
        values |= {"policy": "runs/m_ask/warm/checkpoint"}
        values["data"]["world"]["hops"] = (1, 2)
        values["objective"]["aggregation"] = "token_mean"
        values["optimizer"]["schedule"] = "constant"
        values["shapes"] |= {"prompt_lengths": (96, 192), "max_new_tokens": 24}
        values["packing"]["row_lengths"] = (112, 160, 224)
        return ConfigDict(values)
    ends = ("run.token_budget=24000", "run.steps=100", "run.dev_questions=0")
    file = "docs/lab/m_ask.py:"
    arms = {x: {"config": file + x, "overrides": ends} for x in ("turns", "outcome")}
    arms["before"] = {"config": f"{file}turns", "overrides": ("run.steps=0",)}
    values = {"arms": arms, "baseline": "outcome", "metrics": ("f1", "em", "retrieval_calls")}
    return ConfigDict(values | {"world_seeds": (100,)})


if __name__ == "__main__":
    write_demos(pathlib.Path(sys.argv[1]), range(9_000_000, 9_000_040))
