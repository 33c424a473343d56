"""The scripts of docs/lab run on the smallest work; no test asserts a duration."""

import importlib
import json
import pathlib
import runpy
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jax_ragrl.corpus.world import generate
from jax_ragrl.credit.advantages import group_centred
from jax_ragrl.experiments.arms import load_experiment
from jax_ragrl.llm.executors import WorldExecutors
from jax_ragrl.losses.policy import clipped_policy_loss
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, SEARCH, Action, Call, Record, build_forest
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.systems.mao_arag import MAOARAG, Costs
from jax_ragrl.types import LLMRequest, Passage, Question
from jax_ragrl.warmstart.teacher_examples import build_world_retriever
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.teachers.mao_arag import Teacher
from tests.tiny import tokenizer

LAB = pathlib.Path(__file__).parents[2] / "docs" / "lab"
VECTORS = ("--count=2000", "--dimension=16", "--queries=100", "--repeats=1")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script with arguments and returns the JSON that it prints."""

    def execute(name: str, *arguments: Any) -> Any:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.syspath_prepend(LAB)
        runpy.run_path(str(LAB / name), run_name="__main__")
        out = capsys.readouterr().out
        return json.loads(out[out.index("{") :])

    return execute


def test_search_prints_the_recall(run):
    result = run("search.py", *VECTORS, "--dtype=bfloat16")
    assert 0.9 <= result["recall"] < 1 and result["vector_bytes"] == 2000 * 16 * 2


def test_the_replayed_guard_counts_seen_and_missed_collapses(run, tmp_path):
    logs = {
        "climbing": [{"kl/mean": 0.1 * step, "grad_norm": 1.0} for step in range(20)],
        "exploding": [{"kl/mean": 0.1, "grad_norm": 1.0 + 49 * (x > 14)} for x in range(20)],
        "healthy": [{"kl/mean": 0.1, "grad_norm": 2.0}] * 20,
    }
    for name, rows in logs.items():
        (tmp_path / name).mkdir()
        numbered = ({"step": step, **row} for step, row in enumerate(rows, start=1))
        write_rows(tmp_path / name / "metrics.jsonl", numbered)
    collapsed = ("--collapsed", tmp_path / "climbing", tmp_path / "exploding")
    options = ("--healthy", tmp_path / "healthy", "--thresholds", "grad_norm=60")
    table = run("guard.py", *collapsed, *options)
    counts = table["runs_with_incident"]
    assert counts["any"] == counts["kl"] == {"collapsed": 1, "healthy": 0}
    assert counts["grad_norm"] == {"collapsed": 0, "healthy": 0}


def test_the_config_of_collapses_names_the_system_of_its_own_file(monkeypatch):
    monkeypatch.syspath_prepend(LAB)
    job = load_job(load_config(None, [f"--config={LAB / 'collapse.py'}:short"]))
    assert job.recipe.rollouts == 5 and job.run.steps == 10


@pytest.mark.slow
def test_the_work_of_a_tape_is_counted(run):
    result = run("tape.py", "--conversations=3", "--new=64")
    assert result["row_steps"] > result["tokens"] > 0
    assert result["prefill_tokens"] > result["distinct_tokens"] > 0


def test_common_first_tokens_are_counted_once():
    count = runpy.run_path(str(LAB / "tape.py"))["distinct_tokens"]
    assert count([(1, 2, 3), (1, 2, 4), (1, 2, 3), (5,)]) == 5


@pytest.mark.slow
def test_queries_prints_the_recall_of_gold_by_rule(run):
    tables = run("queries.py", "dev")["dev"]
    assert tables["first, all"]["questions"] == 160
    for recalls in tables.values():
        del recalls["questions"]
        assert recalls.pop("best") >= max(recalls.values()) and max(recalls.values()) <= 100
    second = tables["second 1, 2wiki"]
    assert second["label"] > second["keywords"] >= 25  # the first passage counts, too


@pytest.mark.parametrize("system, role", [("opera", "rewrite"), ("coda", "executor")])
def test_a_second_query_earns_the_gold_that_the_first_one_missed(
    monkeypatch, tmp_path, run, system, role
):
    monkeypatch.syspath_prepend(LAB)
    job = load_job(load_config(None, [f"--config={LAB / 'second_query.py'}:{system}"]))
    assert list(job.recipe.system.roles) == [role] and job.recipe.width == 8
    question = Question("q", "Who?", ("x",), gold=("A", "B"))
    first, other, second = (Passage(name, name, "text") for name in "AXB")
    records = [
        Record(NO_PARENT, 0, LEAF, 1, (n,), calls=calls, answer="")
        for n, calls in enumerate(
            (Call(SEARCH, 0, 1, "q", passages=(first,)), Call(SEARCH, 1, 2, "r", passages=last))
            for last in ((second,), (other, second), (first, other))
        )
    ]
    once = (Call(SEARCH, 0, 1, "q", passages=(first,)),)
    records.append(Record(NO_PARENT, 0, LEAF, 1, (3,), calls=once, answer=""))
    reward_N = job.recipe.reward(build_forest([question], records))
    np.testing.assert_allclose(reward_N, [1, 1 / np.log2(3), 0, 0], rtol=1e-6)
    rows = [{"id": "1", "recall": 0.75}, {"id": "2", "recall": 0.25}]
    write_rows(tmp_path / "a", (row | {"recall": row["recall"] + 0.25} for row in rows))
    results = list[dict]()
    for pairs in (rows, rows[::-1]):  # rollouts end in any order
        write_rows(tmp_path / "b", pairs)
        results.append(run("second_query.py", "compare", tmp_path / "a", tmp_path / "b"))
    assert results[0] == results[1] and results[0]["recall"] == [75.0, 50.0]
    assert results[0]["difference"][0] == 0.25


def test_the_gain_of_information_is_the_change_of_the_probability_of_the_gold_answer():
    """A chain of two searches and an answer: the last turn has the reward of the answer."""
    turn_rewards = runpy.run_path(str(LAB / "information_gain.py"))["turn_rewards"]
    question, log = Question("q", "Who?", ("x",)), np.log
    records = [
        Record(n - 1, 0, "agent", n + 1, (0,) * (n + 1), action=Action((n,), (7,), "a"))
        for n in range(3)
    ]
    records.append(Record(2, 0, LEAF, 4, (0,) * 4, answer="x"))
    logps = {(0,): [log(0.2)], (1,): [log(0.25), 0.0], (2,): [log(0.6)]}  # means, then exp
    forest = build_forest([question], records)._replace(
        scorer=lambda texts: [np.array(logps[text.prompt]) for text in texts]
    )
    reward_N = turn_rewards(forest, np.array([0, 0, 0, 1], np.float32))
    np.testing.assert_allclose(reward_N, [0.5 - 0.2, 0.6 - 0.5, 1.0, 0.0], rtol=1e-6)


def test_a_turn_of_m_ask_earns_what_it_adds_to_the_answer():
    """Two turns and the end; the second note is malformed."""
    module = runpy.run_path(str(LAB / "m_ask.py"))
    roles = (module["SEARCHER"], module["SUMMARIZER"], module["ANSWERER"]) * 2
    texts = ("q", "n", "x", "r", "", "x y", "end")
    records = [
        Record(n - 1, 0, role, n + 1, (0,) * (n + 1), parsed=module["parse"](text))
        for n, (role, text) in enumerate(zip((*roles, roles[0]), texts, strict=True))
    ]
    records.append(Record(6, 0, LEAF, 8, (0,) * 8, answer="x y"))
    forest = build_forest([Question("q", "Who?", ("x y",))], records)
    third = np.float32(1 / 3)
    expected = [2 * third, 2 * third, 2 * third, third, third - 1, 1, 0, 0]
    np.testing.assert_allclose(module["turn_rewards"](forest), expected, rtol=1e-6)


def test_calibrated_advantages_spare_turns_that_found_what_a_right_rollout_found():
    """Four rollouts, of which the first is right; the third has no answer."""
    module = runpy.run_path(str(LAB / "calibrated_advantage.py"))
    rollouts = {"x": ["ABCD", ""], "y": ["AY", "AB", ""], None: ["AB", ""], "z": ["AB", "ABC", ""]}
    records: list[Record] = []
    for i, (answer, turns) in enumerate(rollouts.items()):
        for depth, found in enumerate(turns):
            action = Action((1,), (2,) * (4, 3, 1, 2)[i], "t")  # of 4, 3, 1 and 2 tokens
            hits = tuple(Passage(name, name, "text") for name in found)
            parent = len(records) - 1 if depth else NO_PARENT
            records.append(Record(parent, 0, "agent", 1, (i,), action, passages=hits))
        records.append(Record(len(records) - 1, 0, LEAF, 1, (i,), answer=answer))
    forest = build_forest([Question("q", "Who?", ("x",), gold=tuple("ABCD"))], records)
    reward_N = np.array([record.answer == "x" for record in records], np.float32)
    credit_N, weight_N = module["calibrated"](forest, reward_N, group_centred)
    # The right rollout has advantage 3/4, the others -1/4. Its last turn gains 4 x 3/4, they lose
    # (3 + 1 + 2) x 1/4 in theirs.
    expected = [0.75, 0.75 / 2, -0.125, -0.125, -0.25, -0.25, -0.25, 0, -0.25, -0.25]
    np.testing.assert_allclose(credit_N[~forest.leaf_N], expected, atol=1e-6)
    assert weight_N.all()
    # Without a right rollout nothing is silver.
    assert not module["silver_share"](forest, 0.6 * reward_N).any()


def test_hindsight_reads_how_rollouts_ended_and_evidence_pays_who_finds_gold_first(monkeypatch):
    """Two rollouts of a search and an answer; the first finds one of two gold passages."""
    monkeypatch.syspath_prepend(LAB)
    module = runpy.run_path(str(LAB / "hindsight.py"))
    records: list[Record] = []
    for i, (found, answer) in enumerate((("AX", "x"), ("Y", "z"))):
        hits = tuple(Passage(name, name, "text") for name in found)
        actions = [Action((1,), (2,), text) for text in ("search", "answer")]
        records.append(Record(NO_PARENT, 0, "agent", 1, (i,), actions[0], passages=hits))
        records.append(Record(3 * i, 0, "agent", 2, (i, 0), actions[1], passages=hits))
        calls = (Call(SEARCH, 0, 1, f"query {i}", passages=hits),)
        records.append(Record(3 * i + 1, 0, LEAF, 3, (i, 0, 0), calls=calls, answer=answer))
    block = "query 0: right\nquery 1: wrong\n"
    logps = {(block, "search"): [-1.0, -2.0], ("", "search"): [-2.0, -2.5]}
    forest = build_forest([Question("q", "Who?", ("x",), gold=("A", "B"))], records)._replace(
        scorer=lambda texts: [np.array(logps.get((t.opening, t.text), [-1.0])) for t in texts]
    )
    reward_N = np.array([0, 0, 1, 0, 0, 0], np.float32)
    credit_N, _ = module["hindsight"](forest, reward_N, group_centred)
    np.testing.assert_allclose(credit_N[~forest.leaf_N], [0.75, 0, 0.75, 0])
    credit_N, _ = module["evidence"](forest, reward_N, group_centred)
    # Turns earn 1/2, 1, 0 and 0, less their mean; a search also has what follows.
    np.testing.assert_allclose(credit_N[~forest.leaf_N], [0.75, 0.625, -0.75, -0.375], rtol=1e-6)


def test_pooled_audits_compare_the_worth_of_rules_by_decision(tmp_path, run):
    """One rule has the advantages themselves, the other half of them with the wrong sign."""
    rng = np.random.default_rng(0)
    for seed in "01":
        rows = [{"skipped": "one action"}]
        for advantage in rng.normal(size=9).tolist():
            pair = [advantage, -advantage]
            replayed = {"value": 0, "value_error": 0, "gap_error": 0, "advantage_A": pair}
            replayed |= {"error_A": [0, 0], "shared_A": [0, 0]}
            credits = {"right": pair, "often wrong": pair if rng.random() < 0.5 else pair[::-1]}
            rules = {
                name: {"credit": [[[x] * 2] * 2 for x in credit], "tokens": 10, "actions": 1}
                for name, credit in credits.items()
            }
            rows.append({"depth": 1, "rules": rules, "replay": replayed})
        rows[-1]["depth"] = 4  # too few for an interval
        (tmp_path / seed).mkdir()
        write_rows(tmp_path / seed / "decisions.jsonl", rows)
    result = run("pool_audits.py", "often wrong", tmp_path / "0", tmp_path / "1")
    assert [result[name]["decisions"] for name in ("all", "depth 1", "depth 4")] == [18, 16, 2]
    assert result["depth 4"]["rules"]["right"]["over"][1:] == [None, None]
    right, wrong = (result["all"]["rules"][name] for name in ("right", "often wrong"))
    assert right["worth"] == [100, 100, 100] and right["agreement"] == [1, 1, 1]
    assert right["over"][0] == pytest.approx(100 - wrong["worth"][0], abs=0.01)
    assert right["over"][1] > 0 and wrong["over"] == [0, 0, 0]


def test_a_turn_that_pays_and_became_less_likely_is_pulled_back(monkeypatch):
    """LLDS by hand: of four turns, two tokens each, one has a term beside PPO's loss."""
    monkeypatch.syspath_prepend(LAB)
    loss = runpy.run_path(str(LAB / "search_methods.py"))["likelihood_preserving_loss"]
    logp = np.array([[-1.5, -0.9], [-1.5, -0.4], [-1.5, -0.9], [-1.5, -0.9]], np.float32)
    old, mask = np.full_like(logp, -1.0), np.ones(logp.shape, bool)
    gap = np.repeat((logp - old).mean(1, keepdims=True), 2, 1)
    # Less likely: turns 0, 2 and 3. The last one is not trained, the third one has a loss.
    advantage = np.repeat(np.array([[1.0], [1.0], [-1.0], [1.0]], np.float32), 2, 1)
    mask[3] = False
    own = loss(logp, old, advantage, mask, gap) - clipped_policy_loss(logp, old, advantage, mask)
    expected = np.zeros_like(logp)
    expected[0, 0] = 0.2 * 0.5  # its second token is more likely than before
    np.testing.assert_allclose(own, expected, atol=1e-6)


@pytest.mark.parametrize(
    "name, style", [("search_methods", "coda"), ("jade", "mao_arag"), ("m_ask", "opera")]
)
def test_the_methods_of_2026_are_configs(monkeypatch, name, style):
    monkeypatch.syspath_prepend(LAB)
    for arm in load_experiment(LAB / f"{name}.py").arms.values():
        overrides = [f"--config.{change}" for change in arm.overrides]
        job = load_job(load_config(pathlib.Path(arm.config), overrides))
        assert job.credit and job.recipe.system.style == f"{style}_tiny"


def test_executors_that_repeat_the_reader_are_those_of_mao_arag_and_all_pay_for_costs(monkeypatch):
    monkeypatch.syspath_prepend(LAB)
    jade, world = importlib.import_module("jade"), generate(0, 60)
    reader, wrote = WorldExecutors(world, style="mao_arag_tiny"), Counter()

    class Script(Teacher):
        def write(self, role, messages, history, rng):
            if role in ("planner", "sub_planner"):
                return super().write(role, messages, history, rng)
            (reply,) = reader.complete([LLMRequest(role, messages)])
            wrote[role, messages[-1].content, reply] += 1
            return reply

    questions, inner = world.questions["test"][:40], MAOARAG("mao_arag_tiny", top_k=4)
    sampler = TeacherSampler(Script(), tokenizer())
    environment = Environment(sampler, build_world_retriever(world), reader)
    forests = [collect(x, single_chain, questions, environment) for x in (jade.JADE(inner), inner)]
    calls = [call for leaf in forests[1].leaves() for call in leaf.calls if call.is_of_llm]
    assert wrote == Counter((call.purpose, call.request, call.reply) for call in calls)
    for own, other in zip(*(forest.leaves() for forest in forests), strict=True):
        assert (own.answer, own.finish_reason) == (other.answer, other.finish_reason)
        assert own.state.strategy == other.state.strategy
        found = [call.passages for call in other.calls if call.purpose == SEARCH]
        assert [call.passages for call in own.calls] == found
    # The leaf has the costs of the rollout, so that every action pays for them.
    forest, hops = forests[0], [q.hops - (q.hops == 1) for q in questions]
    free_N, paid_N = (
        jade.reward(forest, Costs(alpha, retrieval_weight=2.0)) for alpha in (0.0, 0.3)
    )
    waits = [
        min(3, n if q.kind == "chain" else n // 2) for n, q in zip(hops, questions, strict=True)
    ]
    costs = [
        0.1 * n + 0.2 * min(3, len(x.calls)) for n, x in zip(waits, forest.leaves(), strict=True)
    ]
    leaves = np.flatnonzero(forest.leaf_N)
    by_question = leaves[np.argsort(forest.question_N[leaves])]
    np.testing.assert_allclose((free_N - paid_N)[by_question], costs, atol=1e-6)
    assert len({*costs}) > 3 and not paid_N[~forest.leaf_N].any()
    for role, text in {"decompose_serial": "1. a?\n2. a?", "select": "all", "answer": " "}.items():
        node = next(n for n, record in enumerate(forest.records) if record.role == role)
        forest.records[node].parsed = jade.parse_reply(role, text)
        assert jade.reward(forest, Costs())[node] == -2
