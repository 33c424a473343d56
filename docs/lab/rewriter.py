"""A second query alone, trained by reinforcement learning: OPERA's rewriter on several hops.

The question is searched first. The policy, which reads the beginnings of the passages, writes one
more query. Its reward is the nDCG at 10 of the gold passages that the first search missed (the
reward of rewrites in the paper), so that it needs no reader.

    ragrl warmup demos --config=configs/real/opera.py --writer=labels --out=runs/rewriter/all.jsonl
    grep '"role": "rewrite"' runs/rewriter/all.jsonl > runs/rewriter/labels.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/rewriter/S --config.epochs=3 \
        --config.data.demos=runs/rewriter/labels.jsonl
    python docs/lab/rewriter.py questions runs/rewriter     # files of questions of several hops
    PYTHONPATH=docs/lab ragrl train --config=docs/lab/rewriter.py --workdir=runs/rewriter/R \
        --config.policy=runs/rewriter/S/checkpoint
    ragrl export runs/rewriter/R --out=runs/rewriter/policy
    python docs/lab/rewriter.py recall test runs/rewriter/policy R.jsonl    # per question
    python docs/lab/rewriter.py compare R.jsonl S.jsonl                     # JSON

Imitation of the best own queries is `ragrl train ... --config.objective.advantage=best_of_group
--config.objective.loss=policy_gradient_loss`.
"""

import dataclasses
import json
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from jax_ragrl.corpus.questions import SPLITS
from jax_ragrl.credit.assign import child_mean
from jax_ragrl.retrieval.base import search_all
from jax_ragrl.retrieval.measures import names_of, ndcg_at, recall_at
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Done, Search
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
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.opera.grammar import REWRITE
from jax_ragrl.systems.opera.mapgrpo import Injection, sibling_advantages
from jax_ragrl.systems.opera.system import Opera, previews
from jax_ragrl.text.metrics import paired_bootstrap
from jax_ragrl.types import Passage, Question

OPERA = pathlib.Path(__file__).parents[2] / "configs" / "real" / "opera.py"
READ, DEPTH = 2, 10  # passages that count for recall, and for the reward


@dataclasses.dataclass(frozen=True)
class OneRewrite(Opera):
    """A search for the question, and one for a query that the policy writes."""

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


def missing(question: Question, passages: Sequence[Passage]) -> tuple[str, ...]:
    """The gold names that no passage has."""
    return tuple(set(question.gold) - names_of(passages))


def reward(forest: Forest) -> np.ndarray:
    """nDCG of the missing gold passages in the second search, float32 `[N]`; 0 but at leaves."""
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N):
        first, second = search_turns(forest.records[leaf])
        gold = missing(forest.questions[forest.question_N[leaf]], first)
        reward_N[leaf] = ndcg_at(gold, second, DEPTH)
    return reward_N


def compare(forest: Forest, reward_N: np.ndarray, rule) -> tuple[np.ndarray, np.ndarray]:
    """MAPGRPO: each query against the others of its question, as often as it was sampled."""
    return sibling_advantages(forest, child_mean(forest, reward_N)[0], Injection(), rule)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`."""

    system: OneRewrite = OneRewrite()
    width: int = 8


def recipe(settings: Settings) -> Recipe:
    return Recipe(
        settings.system,
        reward,
        compare=compare,
        expander=lambda roles: Tree(settings.width, 1),
        width=settings.width,
    )


def get_config() -> ConfigDict:
    config = runpy.run_path(str(OPERA))["get_config"]()
    files = {split: f"runs/rewriter/{split}.jsonl" for split in SPLITS}
    config.update(
        {
            "system": "rewriter",
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
    config.recipe = {
        "system": {
            "style": "opera_small",
            "top_k": READ,
            "max_plan_steps": 0,
            "max_rewrites": 1,
            "temperature": 1.0,
            "max_tokens": (64, 64, 24),
            "shared_policy": True,
        },
        "width": 8,
    }
    return config


def main(command: str, *arguments: str) -> None:
    if command == "compare":
        rows = [[row["recall"] for row in read_rows(pathlib.Path(name))] for name in arguments]
        means = [round(100 * float(np.mean(row)), 1) for row in rows]
        print(json.dumps({"recall": means, "difference": paired_bootstrap(*rows)}))
        return
    config = get_config()
    if command == "questions":
        config.data.files = {"corpus": "mixture:corpus", **{s: f"mixture:{s}" for s in SPLITS}}
    else:
        config.policy = arguments[1]
    job = load_job(config.to_dict())
    data = load_data(job.data)
    retriever = load_retriever(data.corpus, job.index, pathlib.Path(tempfile.mkdtemp()))
    if command == "questions":
        write_questions(pathlib.Path(arguments[0]), data.questions, retriever)
        return
    questions, out = data.questions[arguments[0]], pathlib.Path(arguments[2])
    policies, tokenizer = load_policies(job, mesh_for(job))
    sampler = PolicySampler(for_sampling(policies), tokenizer, job.shapes, greedy=True)
    environment = Environment(sampler, retriever, None, tokenizer.count)
    forest = collect(job.recipe.system, single_chain, questions, environment)
    with out.open("w") as file:
        for leaf in np.flatnonzero(forest.leaf_N):
            record, question = forest.records[leaf], questions[forest.question_N[leaf]]
            first, second = search_turns(record)
            query = [call.request for call in record.calls if call.purpose == SEARCH][1]
            recall = recall_at(question.gold, [*first, *second[:READ]], 2 * READ)
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
