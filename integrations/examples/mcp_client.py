"""A client of the Model Context Protocol: the tools of a server with `--mcp`."""

import asyncio
import os
import sys

from mcp import Client

URL = os.environ.get("RAGRL_URL", "http://localhost:8000")


async def main(question):
    async with Client(f"{URL}/mcp") as client:
        print([tool.name for tool in (await client.list_tools()).tools])
        answer = await client.call_tool("answer", {"question": question})
        search = await client.call_tool("search", {"query": question, "k": 1})
        print(answer.structured_content, search.structured_content["result"], sep="\n")


asyncio.run(main(sys.argv[1]))
