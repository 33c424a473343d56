"""LlamaIndex: a served system as a language model, and its retriever."""

import os
import sys

import httpx
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

URL = os.environ.get("RAGRL_URL", "http://localhost:8000")


class Corpus(BaseRetriever):
    def _retrieve(self, query_bundle):
        body = {"queries": [query_bundle.query_str], "topk": 3, "return_scores": True}
        (hits,) = httpx.post(f"{URL}/retrieve", json=body).json()["result"]
        return [
            NodeWithScore(node=TextNode(text=hit["document"]["contents"]), score=hit["score"])
            for hit in hits
        ]


system = OpenAILike(model="ragrl", api_base=f"{URL}/v1", api_key="none", is_chat_model=True)
answer = system.complete(sys.argv[1]).text
passages = Corpus().retrieve(sys.argv[1])
print(answer, [(node.text, node.score) for node in passages], sep="\n")
