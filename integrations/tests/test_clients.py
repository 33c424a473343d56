"""LangChain, LlamaIndex, Haystack and a client of MCP get what the server's own paths return."""

from __future__ import annotations

import ast

from jax_ragrl.corpus.world import generate
from serving import answer, contents, example, post

QUESTION = generate().questions["test"][0].text


def test_a_chain_of_langchain():
    assert example("langchain_chain.py", QUESTION) == [answer(QUESTION), str(contents(QUESTION, 3))]


def test_a_pipeline_of_haystack():
    lines = example("haystack_pipeline.py", QUESTION)
    assert lines == [answer(QUESTION), str(contents(QUESTION, 3))]


def test_a_query_of_llama_index():
    text, passages = example("llama_index_query.py", QUESTION)
    body = {"queries": [QUESTION], "topk": 3, "return_scores": True}
    hits = post("/retrieve", body)["result"][0]
    expected = [(hit["document"]["contents"], hit["score"]) for hit in hits]
    assert (text, ast.literal_eval(passages)) == (answer(QUESTION), expected)


def test_a_client_of_mcp():
    names, reply, passages = map(ast.literal_eval, example("mcp_client.py", QUESTION))
    assert names == ["search", "answer"]
    assert (reply["question"], reply["answer"]) == (QUESTION, answer(QUESTION))
    assert [f'"{p["title"]}"\n{p["text"]}' for p in passages] == contents(QUESTION, 1)
