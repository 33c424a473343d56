"""Inspect AI: a served system answers the questions of a file (here five), and is scored."""

import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import get_model
from inspect_ai.scorer import exact, f1
from inspect_ai.solver import generate

URL = os.environ.get("RAGRL_URL", "http://localhost:8000")

fields = FieldSpec(id="id", input="question", target="golden_answers")
task = Task(json_dataset(sys.argv[1], fields, limit=5), solver=generate(), scorer=[f1(), exact()])
system = get_model("openai-api/ragrl/system", base_url=f"{URL}/v1", api_key="none")
(log,) = eval(task, model=system, display="plain")
for sample in log.samples:
    score = sample.scores["f1"].value
    print(sample.input, sample.output.completion, sample.target, score, sep=" | ")
