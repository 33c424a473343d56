"""What queries by rule find on the mixture: is there anything for a rewriter to learn?

    python docs/lab/queries.py test            # or train, dev; a minute on one core

Prints JSON: the mean recall of gold passages, in percent, by data set. `first`: four passages of
one query, or two of each of two. `second N`: N passages of a search for the question and N more of
another query, for questions of which the first N miss some gold. `best` takes the best rule of each
question, which needs its gold: the most that a choice among these rules could find.
"""

import json
import pathlib
import re
import sys
import tempfile
from collections import defaultdict

import numpy as np

from jax_ragrl.retrieval.base import search_all
from jax_ragrl.retrieval.measures import recall_at
from jax_ragrl.run.data import load_data
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.systems.opera.system import previews
from jax_ragrl.warmstart.labels.base import gold_titles
from jax_ragrl.warmstart.labels.gold import Evidence, keywords

NAME = re.compile(r"[A-Z][\w'.-]*(?: (?:of|the|and|de|in|for|[A-Z0-9][\w'.-]*))*")

job = load_job(load_config("configs/real/opera.py", []))
data = load_data(job.data)
split = sys.argv[1]
questions = [question for question in data.questions[split] if question.gold]
with tempfile.TemporaryDirectory() as folder:
    retriever = load_retriever(data.corpus, job.index, pathlib.Path(folder))
    titles = gold_titles(questions, data.corpus.passages)
    hits = search_all(retriever, [question.text for question in questions], 4)

    found = defaultdict(lambda: defaultdict(list))  # recalls by table and data set, and by rule
    for question, hit in zip(questions, hits, strict=True):
        text, words = question.text, keywords(question.text)
        # The first word of a question is capitalized without being a name.
        names = [*dict.fromkeys(NAME.findall(text[:1].lower() + text[1:]))]
        # By table: passages read before, how many the queries add, and the queries of each rule.
        tables = {
            "first": (
                (),
                4,
                {
                    "question": [text],
                    "keywords": [words],
                    "names": names[:2] or [words],
                    "question and name": [text, *names[-1:]],
                    "keywords and name": [words, *names[-1:]],
                },
            )
        }
        for size in (1, 2):
            read = hit.passages[:size]
            if recall_at(question.gold, read, size) < 1:
                label = Evidence(question, titles=titles).missing_title(previews(read))
                rules = {"keywords": [words], "title of the first passage": [read[0].title]}
                tables[f"second {size}"] = (read, size, rules | {"label": [label or words]})
        for table, (read, size, rules) in tables.items():
            recalls = {}
            if read:
                recalls["more passages of the question"] = recall_at(
                    question.gold, hit.passages, 2 * size
                )
            for rule, queries in rules.items():
                new = search_all(retriever, queries, size // len(queries))
                passages = [*read, *(p for h in new for p in h.passages)]
                recalls[rule] = recall_at(question.gold, passages, len(passages))
            recalls["best"] = max(recalls.values())
            for kind in (question.id.split("/")[0], "all"):
                for rule, recall in recalls.items():
                    found[f"{table}, {kind}"][rule].append(100 * recall)

rows = {
    table: {"questions": len(rules["best"])} | {r: round(np.mean(v), 1) for r, v in rules.items()}
    for table, rules in sorted(found.items())
}
print(json.dumps({split: rows}, indent=1))
