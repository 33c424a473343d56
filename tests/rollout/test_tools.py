"""Tools of a system: functions, HTTP services and MCP servers, and what their failures mean."""

import sys
import time

import numpy as np
import pytest
from starlette.responses import JSONResponse

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.costs import costs_of, step_costs
from jax_ragrl.rollout.effects import CallTool, Done, Generate
from jax_ragrl.rollout.expand import Tree, single_chain
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.tools import Tool, ToolResult, Tools
from jax_ragrl.runtime import records
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.types import Message, Question, Sampling
from tests.retrieval.engine import engine
from tests.rollout.tape import Tape

HERE = "tests.rollout.test_tools"
CALLS: list[str] = []
FAILING: set[str] = set()


def population(city: str) -> dict:
    """A table that fails for some cities, hangs for one, and refuses others."""
    CALLS.append(city)
    if city in FAILING:
        raise ConnectionError("the table is away")
    if city == "slow":
        time.sleep(5)
    if city == "?":
        raise ValueError("no such city")
    if city == "nan":
        return {"population": float("nan")}
    return {"city": city, "population": 100 * len(city)}


@pytest.fixture(autouse=True)
def clean():
    CALLS.clear()
    FAILING.clear()


class Census:
    """One action names a city; the answer is its population in the table."""

    style, top_k = "tiny", 1

    def __init__(self):
        self.roles = {"asker": Role("asker", lambda t: ParsedAction("Ask", (t,)), Sampling())}

    def steps(self, question):
        ask = yield Generate("asker", (Message("user", question.text),))
        result = yield CallTool("population", {"city": ask.args[0]})
        yield Done("unknown" if result.is_error else str(result.value["population"]))


def tools(**changes) -> Tools:
    tool = {"kind": "python", "target": f"{HERE}:population", "retries": 1, **changes}
    return Tools({"population": Tool(**tool)})


def play(tape, questions, table, expander=single_chain):
    environment = tape.environment()._replace(tools=table)
    return collect(Census(), expander, questions, environment)


def question(n, city):
    return Question(f"q{n}", city, (str(100 * len(city)),))


def test_a_result_reaches_the_system_and_counts_and_so_does_a_refusal():
    take_counts()  # of other tests
    forest = play(Tape({"asker": ["Ulm"]}), [question(0, "Ulm")], tools())
    (leaf,) = forest.leaves()
    assert leaf.answer == "300" and leaf.calls[0].request == '{"city": "Ulm"}'
    assert costs_of(forest)[0]["tool_calls"] == 1 and costs_of(forest)[0]["llm_calls"] == 0
    assert records.loads(records.dumps(leaf.state)) == leaf.state
    for names in ({"town": "Ulm"}, {"city": "Ulm", "year": 2}, {}):  # a policy may write them
        refused = tools().call("population", names)
        assert isinstance(refused, ToolResult) and refused.is_error and CALLS == ["Ulm"]
    assert take_counts() == {"tool_refusals": 3}
    in_c = tools(target="builtins:dict").call("population", {"city": "Ulm"})  # has no signature
    assert in_c == ToolResult('{"city": "Ulm"}')
    forest = play(Tape({"asker": ["?"]}), [question(0, "Ulm")], tools())
    assert forest.leaves()[0].answer == "unknown" and not forest.errors() and CALLS == ["Ulm", "?"]


def test_equal_calls_are_made_once_and_paid_by_all():
    forest = play(Tape({"asker": ["Ulm", "Ulm "]}), [question(0, "Ulm")], tools(), Tree(2, 1))
    table = tools()
    again = play(Tape({"asker": ["Ulm"] * 2}), [question(n, "Ulm") for n in (0, 1)], table)
    assert CALLS == ["Ulm", "Ulm ", "Ulm"]
    assert step_costs(forest)["tool_calls"] == step_costs(again)["tool_calls"] == 2


def test_a_failed_tool_fails_its_question_alone_and_is_never_a_reward():
    """With 3 of 10 calls that fail, the other rewards are those of a run without failures."""
    cities = [f"city{'x' * n}" for n in range(10)]
    asked = [cities[n] if n % 2 else "other" for n in range(10)]  # half of the answers are wrong
    questions = [question(n, city) for n, city in enumerate(cities)]

    def rewards(failing):
        FAILING.clear()
        FAILING.update(failing)
        forest = play(Tape({"asker": [*asked]}), questions, tools(retries=0))
        leaves = np.flatnonzero(forest.leaf_N)
        reward_N = answer_rewards(forest, lambda answer, golds: float(answer in golds))
        return dict(zip(forest.question_N[leaves].tolist(), reward_N[leaves].tolist(), strict=True))

    without, failing = rewards([]), rewards([cities[1], cities[3], cities[5]])
    assert set(without) - set(failing) == {1, 3, 5}
    assert failing == {n: without[n] for n in failing} and 0 < sum(failing.values()) < 7


def test_a_failed_call_is_retried_asked_again_later_and_ends_at_its_deadline():
    FAILING.add("Ulm")
    table = tools()
    assert "the tool population failed: ConnectionError" in str(
        table.call("population", {"city": "Ulm"})
    )
    assert CALLS == ["Ulm", "Ulm"]
    FAILING.clear()
    assert table.call("population", {"city": "Ulm"}) == ToolResult(
        '{"city": "Ulm", "population": 300}'
    )
    assert isinstance(tools().call("population", {"city": "nan"}), EffectError)  # no refusal
    failed = tools(timeout=0.05, retries=0).call("population", {"city": "slow"})
    assert isinstance(failed, EffectError) and "no result within 0.05 s" in str(failed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tools().call("area", {}), "calls the tool 'area', but the config has population"),
        (lambda: tools().call("population", {"city": {1}}), "are no JSON .* use texts"),
        (lambda: tools(target="nowhere:f"), "tools.population.target is 'nowhere:f'"),
        (lambda: tools(kind="http", target="host:1"), "is 'host:1': give http://"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


def census(asked: dict) -> JSONResponse:
    """The population of a city after one outage, and status 422 for an unknown city."""
    CALLS.append(asked["city"])
    status = 503 if len(CALLS) == 1 else 422 if asked["city"] == "?" else 200
    return JSONResponse({"population": 100 * len(asked["city"])}, status)


def test_a_service_gets_json_and_is_tried_again():
    with engine(census, "/population") as (address, _):
        url = f"{address}/population"
        table = tools(kind="http", target=url)
        assert table.call("population", {"city": "Ulm"}) == ToolResult('{"population": 300}')
        refused = table.call("population", {"city": "?"})
        assert refused.is_error and "status 422" in refused.value and len(CALLS) == 3
    away = tools(kind="http", target=url).call("population", {"city": "Rom"})
    assert isinstance(away, EffectError)


SERVER = '''
import os, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("census")

@server.tool()
def population(city: str) -> int:
    """The population of a city."""
    if city == "crash":
        os._exit(1)
    return 100 * len(city)

server.run(*sys.argv[1:])
'''


def test_a_tool_of_an_mcp_server_survives_a_crash_of_the_server(tmp_path):
    pytest.importorskip("mcp")
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    table = tools(kind="mcp", target=f"{sys.executable} {file}", retries=0, timeout=60)
    assert table.call("population", {"city": "Ulm"}).value == {"result": 300}
    assert table.call("population", {"town": "Ulm"}).is_error
    assert isinstance(table.call("population", {"city": "crash"}), EffectError)
    assert table.call("population", {"city": "Roma"}).value == {"result": 400}
    with pytest.raises(UserError, match="has no tool 'populatoin', but population: set"):
        other = tools(kind="mcp", target=f"{sys.executable} {file}", name="populatoin", timeout=60)
        other.call("population", {"city": "Ulm"})
