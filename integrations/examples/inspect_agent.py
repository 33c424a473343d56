"""Inspect AI: an agent of any model (`INSPECT_EVAL_MODEL`) searches with a retriever's tool."""

import os
import sys

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import f1
from inspect_ai.tool import mcp_server_http

URL = os.environ.get("RAGRL_URL", "http://localhost:8000")

fields = FieldSpec(id="id", input="question", target="golden_answers")
agent = react(tools=[mcp_server_http(name="corpus", url=f"{URL}/mcp")])
task = Task(json_dataset(sys.argv[1], fields, limit=5), solver=agent, scorer=f1())
(log,) = eval(task, display="plain")
