"""Haystack: a pipeline of a served system and its retriever."""

import os
import sys

import httpx
from haystack import Document, Pipeline, component
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

URL = os.environ.get("RAGRL_URL", "http://localhost:8000")


@component
class Corpus:
    @component.output_types(documents=list[Document])
    def run(self, query: str):
        reply = httpx.post(f"{URL}/retrieve", json={"queries": [query], "topk": 3})
        hits = reply.json()["result"][0]
        return {"documents": [Document(id=hit["id"], content=hit["contents"]) for hit in hits]}


key = Secret.from_token("none")
system = OpenAIChatGenerator(model="ragrl", api_base_url=f"{URL}/v1", api_key=key)
pipeline = Pipeline()
pipeline.add_component("system", system)
pipeline.add_component("corpus", Corpus())
question = ChatMessage.from_user(sys.argv[1])
result = pipeline.run({"system": {"messages": [question]}, "corpus": {"query": sys.argv[1]}})
answer, passages = result["system"]["replies"][0].text, result["corpus"]["documents"]
print(answer, [document.content for document in passages], sep="\n")
