"""A second query alone, trained by reinforcement learning: OPERA's rewriter, or CoDA's executor.

The question is searched first. The policy, which reads the passages (OPERA's: their beginnings),
writes one more query. Its reward is the nDCG at 10 of the gold passages that the first search
missed (the reward of rewrites in OPERA's paper), so that it needs no reader.

    ragrl warmup demos --config=configs/real/opera.py --writer=labels --out=runs/second/all.jsonl
    grep '"role": "rewrite"' runs/second/all.jsonl > runs/second/labels.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/second/S --config.epochs=3 \
        --config.data.demos=runs/second/labels.jsonl
    python docs/lab/second_query.py questions runs/second      # files of questions of several hops
    PYTHONPATH=docs/lab ragrl train --config=docs/lab/second_query.py:opera \
        --workdir=runs/second/R --config.policy=runs/second/S/checkpoint
    ragrl export runs/second/R --out=runs/second/policy
    python docs/lab/second_query.py recall opera test runs/second/policy R.jsonl    # per question
    python docs/lab/second_query.py compare R.jsonl S.jsonl                         # JSON

Of CoDA the labels are the second turns of executors, whose prompts have three messages. Imitation
of the best own queries is `ragrl train ... --config.objective.advantage=best_of_group
--config.objective.loss=policy_gradient_loss`.
"""

import dataclasses
import json
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Sequence
from typing import Literal

import numpy as np
from ml_collections import ConfigDict

from jax_ragrl.corpus.questions import SPLITS
from jax_ragrl.credit.assign import over_siblings
from jax_ragrl.retrieval.base import search_all
from jax_ragrl.retrieval.measures import names_of, ndcg_at, recall_at
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Done, Generate, Search
from jax_ragrl.rollout.expand import Tree, single_chain
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.searches import search_turns
from jax_ragrl.rollout.system import Shown, Steps
from jax_ragrl.rollout.tree import SEARCH, Forest
from jax_ragrl.run.data import load_data
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policies, mesh_for
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.systems import tags
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.coda import EXECUTOR, CoDA
from jax_ragrl.systems.opera.grammar import REWRITE
from jax_ragrl.systems.opera.system import Opera, previews
from jax_ragrl.text.metrics import paired_bootstrap
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import Message, Passage, Question

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "real"
READ, DEPTH = 2, 10  # passages that count for recall, and for the reward


@dataclasses.dataclass(frozen=True)
class SecondQuery(Opera):
    """A search for the question, and one for a query that OPERA's rewriter writes."""

    kind: Literal["opera"] = "opera"

    @property
    def roles(self):
        return {REWRITE: super().roles[REWRITE]}

    def steps(self, question: Question) -> Steps:
        text = question.text
        first = (yield Search(text, READ)).passages
        yield Shown(first)
        values = {"goal": text, "query": text, "failure": "No document has the answer."}
        reply = yield self._generate(REWRITE, 1, previews(first), **values)
        yield Search(reply.args[0] if reply.args else text, DEPTH)
        yield Done("")


@dataclasses.dataclass(frozen=True)
class SecondTurn(CoDA):
    """A search for the question, and one that CoDA's executor makes in its second turn."""

    kind: Literal["coda"] = "coda"

    @property
    def roles(self):
        return {EXECUTOR: super().roles[EXECUTOR]}

    def steps(self, question: Question) -> Steps:
        text = question.text
        first = (yield Search(text, READ)).passages
        yield Shown(first)
        turn = tags.render_turn(think="I search for it.", search=text)  # as in the labels
        documents = format_passages(self.style, first)
        messages = (
            *user_turn(self.style, "executor", task=text),
            Message("assistant", turn),
            Message("user", tags.observation(self.style, "documents", True, documents=documents)),
        )
        reply = yield Generate(EXECUTOR, messages, 1)
        if reply.action == tags.SEARCH:  # it may answer, or be malformed
            yield Search(reply.args[0], DEPTH)
        yield Done("")


def missing(question: Question, passages: Sequence[Passage]) -> tuple[str, ...]:
    """The gold names that no passage has."""
    return tuple(set(question.gold) - names_of(passages))


def reward(forest: Forest) -> np.ndarray:
    """nDCG of the missing gold passages in the second search, float32 `[N]`; 0 but at leaves."""
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N):
        first, *second = search_turns(forest.records[leaf])
        gold = missing(forest.questions[forest.question_N[leaf]], first)
        reward_N[leaf] = ndcg_at(gold, second[0], DEPTH) if second else 0
    return reward_N


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`."""

    system: SecondQuery | SecondTurn = SecondQuery()
    width: int = 8


def recipe(settings: Settings) -> Recipe:
    return Recipe(
        settings.system,
        reward,
        compare=over_siblings,
        expander=lambda roles: Tree(settings.width, 1),
        width=settings.width,
    )


def get_config(name: str = "opera") -> ConfigDict:
    config = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    files = {split: f"runs/second/{split}.jsonl" for split in SPLITS}
    config.update(
        {
            "system": "second_query",
            "data": {"files": {"corpus": "mixture:corpus", **files}},
            "run": {
                "steps": 40,
                "questions_per_step": 8,
                "eval_every": 20,
                "dev_questions": 43,
                "test_questions": 0,
                "eval_before_training": False,
            },
            "schedule": {"phases": ()},
        }
    )
    system = {**config.recipe.system.to_dict(), "kind": name, "top_k": READ}
    if name == "opera":
        system |= {"max_plan_steps": 0, "max_rewrites": 1}
    else:  # a turn is four times as long as a query
        config.run.steps = 20
        config.shapes.update(prompt_lengths=(384, 512, 640, 768, 1184), batch_sizes=(4,))
        config.packing.update(row_lengths=(640, 768, 896, 1280), tokens_per_device=2560)
    config.recipe = {"system": system, "width": 8}
    return config


def main(command: str, *arguments: str) -> None:
    if command == "compare":
        files = [{x["id"]: x["recall"] for x in read_rows(pathlib.Path(f))} for f in arguments]
        # By question: a file has them in the order in which their rollouts ended.
        rows = [[recalls[id] for id in files[0]] for recalls in files]
        means = [round(100 * float(np.mean(row)), 1) for row in rows]
        print(json.dumps({"recall": means, "difference": paired_bootstrap(*rows)}))
        return
    # Questions are the same for both systems.
    config = get_config("opera" if command == "questions" else arguments[0])
    if command == "questions":
        config.data.files = {"corpus": "mixture:corpus", **{s: f"mixture:{s}" for s in SPLITS}}
    else:
        config.policy = arguments[2]
    job = load_job(config.to_dict())
    data = load_data(job.data)
    retriever = load_retriever(data.corpus, job.index, pathlib.Path(tempfile.mkdtemp()))
    if command == "questions":
        write_questions(pathlib.Path(arguments[0]), data.questions, retriever)
        return
    questions, out = data.questions[arguments[1]], pathlib.Path(arguments[3])
    policies, tokenizer = load_policies(job, mesh_for(job))
    sampler = PolicySampler(for_sampling(policies), tokenizer, job.shapes, greedy=True)
    environment = Environment(sampler, retriever, None, tokenizer.count)
    forest = collect(job.recipe.system, single_chain, questions, environment)
    with out.open("w") as file:
        for leaf in np.flatnonzero(forest.leaf_N):
            record, question = forest.records[leaf], questions[forest.question_N[leaf]]
            searches = [call for call in record.calls if call.purpose == SEARCH]
            seen = [passage for call in searches for passage in call.passages[:READ]]
            recall = recall_at(question.gold, seen, 2 * READ)
            query = searches[1].request if len(searches) > 1 else ""
            row = {"id": question.id, "query": query, "recall": recall}
            file.write(json.dumps(row) + "\n")


def write_questions(folder: pathlib.Path, splits, retriever) -> None:
    """Writes the questions of several hops of which the first search misses some gold."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, questions in splits.items():
        found = search_all(retriever, [question.text for question in questions], READ)
        with (folder / f"{split}.jsonl").open("w") as file:
            for q, hits in zip(questions, found, strict=True):
                if not q.id.startswith("nq/") and missing(q, hits.passages):
                    row = {"id": q.id, "question": q.text, "answers": q.answers, "gold": q.gold}
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
