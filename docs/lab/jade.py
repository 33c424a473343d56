r"""JADE against MAO-ARAG: executors that learn with their planner, at equal generated tokens.

    python docs/lab/jade.py runs/jade/demos.jsonl
    ragrl warmup sft --config=configs/tiny/sft_mao_arag.py --out=runs/jade/warm --config.steps=240 \
        --config.data.demos=runs/jade/demos.jsonl --config.optimizer.policy_lr=2e-3
    PYTHONPATH=docs/lab ragrl experiment run docs/lab/jade.py --out=runs/jade/cells

Chen et al. 2026, 2601.21916: MAO-ARAG whose executors are roles of the planner's policy. PPO trains
them all on the outcome; the numbers are the published code's (`verl/trainer/ppo/ray_trainer.py`):

  R_i = F1 - alpha min(turns - 1, 3) / 3 - beta min(searches, 3) / 3 - 2 [action i is malformed]

Turns - 1 is the number of parts of QDS, 1 for QDP, else 0. All actions pay for both costs, and
tokens are free. As in the code, alpha = beta = 0; it has the exact match for yes-no questions.
As in `MAOARAG`, a malformed plan is written again, earlier answers are filled in for references,
and replies have no tags. The warm start imitates readers, and a planner that mostly searches once;
the arm `planner` is MAO-ARAG with the executors of the warm start.
"""

import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from jax_ragrl.corpus.world import generate
from jax_ragrl.llm.executors import WorldExecutors
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import CallLLM, Generate, Search
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Steps, all_of
from jax_ragrl.rollout.tree import SEARCH, Forest
from jax_ragrl.run.models import load_policy
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.systems import mao_arag
from jax_ragrl.systems.base import Recipe, WrappedSystem, path_from_root
from jax_ragrl.systems.mao_arag import MAOARAG, MAX_PARTS, Settings, parts_of, sub_questions
from jax_ragrl.systems.opera.expert_pool import RecordingSampler
from jax_ragrl.text.metrics import f1
from jax_ragrl.types import Question, Sampling
from jax_ragrl.warmstart.demos import Demo
from jax_ragrl.warmstart.teacher_examples import RecordingLLM, build_world_retriever
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.teachers.mao_arag import Teacher

SERIAL, PARALLEL = mao_arag.DECOMPOSITIONS


def parse_reply(role: str, text: str) -> ParsedAction:
    """Parses distinct sub-questions, numbers of documents or `none`, or any text."""
    parts, is_valid = sub_questions(text), bool(text.strip())
    if role in (SERIAL, PARALLEL):
        is_valid = 0 < len({*parts}) == len(parts) <= MAX_PARTS
    elif role == "select":
        is_valid = bool(re.fullmatch(r"[1-9](, [1-9])*|none", text))
    return ParsedAction("Reply") if is_valid else invalid_action("Malformed Reply")


class JADE(WrappedSystem):
    """MAO-ARAG whose executors are roles, named by the purposes of their calls."""

    system: MAOARAG

    @property
    def roles(self) -> Mapping[str, Role]:
        sampling = Sampling(self.system.temperature, 1.0, self.system.reply_tokens)
        names = (*mao_arag.PURPOSES.values(), "answer_direct")
        own = {x: Role(x, functools.partial(parse_reply, x), sampling) for x in names}
        return {**self.system.roles, **own}

    def steps(self, question: Question) -> Steps:
        """Yields the effects of MAO-ARAG, an action in place of each call."""
        steps = self.system.steps(question)
        value = next(steps)
        while True:
            # An effect or note is a named tuple, several effects are a plain one.
            effects = (value,) if hasattr(value, "_fields") else value
            # The latest action pays for a search: turns no longer count planner calls alone.
            own = [e._replace(turn=-1) if isinstance(e, Search) else e for e in effects]
            for i, (request, turn) in ((i, e) for i, e in enumerate(own) if isinstance(e, CallLLM)):
                own[i] = Generate(request.purpose, request.messages, turn + 2)
            pairs = zip(effects, (yield from all_of(own)), strict=True)
            sent = [reply.text if isinstance(e, CallLLM) else reply for e, reply in pairs]
            value = steps.send(tuple(sent) if len(sent) > 1 else sent[0])


def reward(forest: Forest, costs: mao_arag.Costs) -> np.ndarray:
    """The F1 minus the costs on leaves, the format on actions; float32 `[N]`."""
    reward_N = answer_rewards(forest, f1)
    for n, record in enumerate(forest.records):
        if record.action is not None:
            reward_N[n] = -2.0 * bool(record.parse_error)
            continue
        actions = [forest.records[node] for node in path_from_root(forest, n)[:-1]]
        texts = {action.role: action.parsed.text for action in actions if action.parsed}
        waits = len(parts_of(texts[SERIAL], "")) if SERIAL in texts else int(PARALLEL in texts)
        searches = sum(call.purpose == SEARCH for call in record.calls)
        price = costs.turn_weight * min(waits, 3) + costs.retrieval_weight * min(searches, 3)
        reward_N[n] -= costs.alpha * price / 3
    return reward_N


def recipe(settings: Settings) -> Recipe:
    """MAO-ARAG's recipe with the executors in training; it has no costs of tokens."""
    own = {"system": JADE(settings.system), "fixed_strategies": {}}
    own["reward"] = functools.partial(reward, costs=settings.costs)
    return dataclasses.replace(mao_arag.recipe(settings), **own)


def write_demos(file: pathlib.Path, worlds: Sequence[int]) -> None:
    """Writes the distinct actions of planner and readers on 120 training questions per world."""
    teacher = Teacher(p_single_search=0.6, p_random_plan=0.4, p_swap_decomposition=0.5)
    sampler = RecordingSampler(TeacherSampler(teacher, load_policy("tiny")[1]))
    system, demos = MAOARAG("mao_arag_tiny", top_k=4), dict[Demo, None]()
    for seed in worlds:
        world = generate(seed, famous=0.0)  # no policy can learn what one reader knows
        reader = WorldExecutors(world, style=system.style)
        llm = RecordingLLM(reader)
        environment = Environment(sampler, build_world_retriever(world), llm)
        forest = collect(system, single_chain, world.questions["train"][:120], environment)
        for role, x in ((r.role, r.action) for r in forest.records if r.action):
            demos[Demo("", role, sampler.prompts[x.prompt_ids].messages, x.text)] = None
        for x, reply in zip(llm.requests, reader.complete(llm.requests), strict=True):
            demos[Demo("", x.purpose, x.messages, reply)] = None
    write_rows(file, (demo.row() for demo in demos))


def get_config() -> ConfigDict:
    start = """system=jade policy=runs/jade/warm/checkpoint recipe.system.reply_tokens=72
        shapes.prompt_lengths=(80,160,224) shapes.max_new_tokens=72 packing.row_lengths=(112,256)
        optimizer.schedule=constant optimizer.warmup_fraction=0 optimizer.policy_lr=4e-4
        run.dev_questions=0 recipe.costs.alpha=0 data.world.hops=(1,2)""".split()
    ends = ["run.steps=100", "run.token_budget=24000"]
    only = "schedule.phases=({'steps':1,'roles':('planner','sub_planner')},)"
    own = {"JADE": ends, "planner": [*ends, only], "before": ["run.steps=0"]}
    file = "configs/tiny/mao_arag.py"
    arms = {name: {"config": file, "overrides": (*start, *x)} for name, x in own.items()}
    metrics = ("f1", "em", "policy_tokens", "policy_calls", "retrieval_calls", "malformed")
    values = {"arms": arms, "baseline": "planner", "metrics": metrics, "world_seeds": (100,)}
    return ConfigDict(values)


if __name__ == "__main__":
    write_demos(pathlib.Path(sys.argv[1]), range(7_100_000, 7_100_025))
