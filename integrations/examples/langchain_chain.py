"""LangChain: a served system answers a question, beside the passages that its retriever finds."""

import os
import sys

import httpx
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableParallel
from langchain_openai import ChatOpenAI

URL = os.environ.get("RAGRL_URL", "http://localhost:8000")


class Corpus(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        reply = httpx.post(f"{URL}/retrieve", json={"queries": [query], "topk": 3})
        return [Document(hit["contents"], id=hit["id"]) for hit in reply.json()["result"][0]]


system = ChatOpenAI(model="ragrl", base_url=f"{URL}/v1", api_key="none")
chain = RunnableParallel(answer=system | StrOutputParser(), passages=Corpus())
result = chain.invoke(sys.argv[1])
print(result["answer"], [document.page_content for document in result["passages"]], sep="\n")
