"""Tools that a system calls (`effects.CallTool`): Python functions, HTTP services, MCP servers.

A call has JSON arguments and a JSON result. Equal calls have equal results: the first result stays
in memory, and counts in the costs of every rollout that asked for it. A tool that refuses its
arguments gives a result that says so, which the system shows to its policy. A tool that fails,
after its retries, fails the question, which then earns nothing and is not trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

from jax_ragrl.config.functions import imported
from jax_ragrl.config.ranges import Natural, Positive
from jax_ragrl.config.schema import is_http
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.json_text import loads
from jax_ragrl.retrieval.http import TRANSIENT
from jax_ragrl.runtime.records import declare
from jax_ragrl.runtime.servers import (
    COUNTS,
    BoundedClient,
    Tries,
    TryFailed,
    describe,
    read_reply,
    retry_after,
    wait_for,
)

PAUSE = 0.5  # seconds before the second try
# Statuses with which a service says that the request itself is wrong, not the service.
WRONG_ARGUMENTS = (400, 404, 409, 422)


@declare
class ToolResult(NamedTuple):
    """The reply to `CallTool`: JSON text; `is_error` if the tool refused the arguments."""

    json: str
    is_error: bool = False

    @property
    def value(self) -> Any:
        """The result as a Python value."""
        return json.loads(self.json)


@dataclasses.dataclass(frozen=True)
class Tool:
    """The config of a tool, an entry of the section `tools`, whose key is its name.

    Fields:
      kind: `python`, a function that gets the arguments by name and returns a JSON value; it
        refuses names that it does not take, and by `ValueError` others. `http`, a service to which
        the arguments are posted as JSON, and which replies with JSON. `mcp`, a tool of a server of
        the Model Context Protocol (needs `pip install 'jax_ragrl[mcp]'`).
      target: `module:function`; the address of the service; the address of the MCP server, or the
        command that starts one on its standard input and output.
      name: the name of the tool on the MCP server; empty: that of the entry.
      timeout: seconds of a try.
      retries: attempts after a failed try.
    """

    kind: Literal["python", "http", "mcp"]
    target: str
    name: str = ""
    timeout: Positive = 30.0
    retries: Natural = 2


class Tools:
    """The tools of a run; from several threads, too."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._attempts = {name: _attempt(name, tool) for name, tool in tools.items()}
        self._tries = {name: Tries(tool.retries, PAUSE) for name, tool in tools.items()}
        self._results: dict[tuple[str, str], asyncio.Task[ToolResult]] = {}

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | EffectError:
        """Returns the result of a tool, or why there is none.

        Raises:
          UserError: no tool has this name, or the arguments are no JSON.
        """
        if name not in self._attempts:
            names = ", ".join(self._attempts) or "none"
            raise UserError(
                f"a system calls the tool {name!r}, but the config has {names}: add tools.{name}"
            )
        try:
            text = json.dumps(arguments, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the arguments {arguments!r:.80} of the tool {name} are no JSON ({error}): use "
                "texts, finite numbers, booleans, lists and mappings"
            ) from error
        return wait_for(self._call(name, text))

    async def _call(self, name: str, text: str) -> ToolResult | EffectError:
        # Equal calls that are in progress share one task; a failed one is asked for again.
        if (task := self._results.get((name, text))) is None:
            attempt, seconds = self._attempts[name], self._tools[name].timeout
            asked = self._tries[name].ask(lambda patience: attempt(text, patience * seconds))
            task = self._results[name, text] = asyncio.ensure_future(asked)
        try:
            result = await asyncio.shield(task)
        except (EffectError, TryFailed) as error:
            self._results.pop((name, text), None)
            return EffectError(f"the tool {name} failed: {error}")
        COUNTS["tool_refusals"] += result.is_error
        return result


Attempt = Callable[[str, float], Awaitable[ToolResult]]


def _attempt(name: str, tool: Tool) -> Attempt:
    """Returns the function that makes one try, from the arguments as JSON and its seconds."""
    if tool.kind == "python":
        function = imported(f"tools.{name}.target", tool.target)
        return lambda text, seconds: _run(function, text, seconds)
    if tool.kind == "mcp":
        return MCPTool(tool.target, tool.name or name).call
    if not is_http(tool.target):
        raise UserError(f"tools.{name}.target is {tool.target!r}: give http://HOST:PORT/PATH")
    client = BoundedClient(tool.timeout)
    return lambda text, seconds: _post(client, tool.target, text, seconds)


async def _run(function: Callable[..., Any], text: str, seconds: float) -> ToolResult:
    def result() -> ToolResult:
        arguments = json.loads(text)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:  # a policy may have written the names of the arguments
            return ToolResult(json.dumps(str(error)), is_error=True)
        except ValueError:  # a function in C may have no signature
            pass
        try:
            value = function(**arguments)
        except ValueError as error:
            return ToolResult(json.dumps(str(error)), is_error=True)
        return ToolResult(json.dumps(value, allow_nan=False))

    try:
        # A thread cannot be stopped: a function that hangs keeps one until the process ends.
        return await asyncio.wait_for(asyncio.to_thread(result), seconds)
    except TimeoutError:
        raise TryFailed(f"no result within {seconds:g} s", is_late=True) from None
    except Exception as error:
        raise TryFailed(f"{type(error).__name__}: {error}") from error


async def _post(client: BoundedClient, url: str, text: str, seconds: float) -> ToolResult:
    headers = {"Content-Type": "application/json"}
    reply = await client.ask("POST", url, content=text, headers=headers, timeout=seconds)
    if reply.status_code == 200:
        return read_reply(reply, lambda body: ToolResult(json.dumps(loads(body))))
    if reply.status_code in WRONG_ARGUMENTS:
        return ToolResult(json.dumps(describe(reply)), is_error=True)
    if reply.status_code in TRANSIENT or reply.status_code >= 500:
        raise TryFailed(describe(reply), retry_after(reply.headers), reply)
    raise EffectError(describe(reply))


class MCPTool:
    """A session with an MCP server, which begins with the first call and again after a failure."""

    def __init__(self, target: str, name: str) -> None:
        self._target, self._name = target, name
        self._session: asyncio.Future[Any] | None = None
        self._end = asyncio.Event()

    async def call(self, text: str, seconds: float) -> ToolResult:
        """Makes one try; `TryFailed` ends the session. `UserError`: the server has no such tool."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS, TextContent

        if self._session is None:
            self._session, self._end = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.ensure_future(self._hold(self._session, self._end))
        session, end = self._session, self._end
        try:
            async with asyncio.timeout(seconds):
                client = await asyncio.shield(session)
                reply = await client.call_tool(self._name, json.loads(text))
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                return ToolResult(json.dumps(str(error)), is_error=True)
            end.set()
            if self._session is session:
                self._session = None
            why = str(error) or f"no result within {seconds:g} s"  # a time-out has no text
            is_late = isinstance(error, TimeoutError)
            raise TryFailed(f"{self._target}: {why}", is_late=is_late) from error
        texts = [part.text for part in reply.content if isinstance(part, TextContent)]
        has_value = reply.structured_content is not None
        value = reply.structured_content if has_value else "\n".join(texts)
        return ToolResult(json.dumps(value), reply.is_error)

    async def _hold(self, session: asyncio.Future[Any], end: asyncio.Event) -> None:
        """Opens a session, and closes it in the same task, as the library demands."""
        from mcp import Client, StdioServerParameters

        try:
            command, *rest = shlex.split(self._target)
            process = StdioServerParameters(command=command, args=rest)
            async with Client(self._target if is_http(self._target) else process) as client:
                # A server refuses a misspelled tool as it refuses arguments.
                names = [tool.name for tool in (await client.list_tools()).tools]
                if self._name in names:
                    session.set_result(client)
                    await end.wait()
                else:  # not raised: the library would wrap it
                    session.set_exception(
                        UserError(
                            f"{self._target} has no tool {self._name!r}, but {', '.join(names)}: "
                            "set the field 'name' of the tool in the config"
                        )
                    )
        except Exception as error:
            if not session.done():
                session.set_exception(error)
