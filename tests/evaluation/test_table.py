"""The results table: names of systems, runs, rows."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli import evaluate as evaluate_command
from jax_ragrl.cli.main import main
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.corpus.formats import save_questions
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import LEARNERS, SYSTEMS, WORKFLOWS, BuildContext
from jax_ragrl.evaluation.table import (
    RUN,
    TINY_NEW_TOKENS,
    TableModels,
    TableSettings,
    build_system,
    evaluate_row,
    load_models,
    load_run_system,
    select_systems,
    table_row,
)
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.llm.base import NoLLM
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.costs import Prices
from jax_ragrl.run import models as assemble
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.run.config import REPLY
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policies
from jax_ragrl.run.short_names import parse_llm
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.serve.app import application
from jax_ragrl.serve.replies import ServedSystem
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.systems.registry import PAPERS
from jax_ragrl.text.prompts import template
from jax_ragrl.training.setup import prepare_policies, trained_state
from jax_ragrl.types import Question
from tests.jobs import config_job, config_values
from tests.listening import listening
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, Tape, passage
from tests.tiny import policy, saved_policy, split_policy, tokenizer

NOWHERE = pathlib.Path("nowhere")


def settings(*systems: str, **changes) -> TableSettings:
    base = TableSettings(NOWHERE, NOWHERE, NOWHERE, systems, "tiny", "tiny", "tiny", 2, 0)
    return base._replace(**changes)


class Frozen(Tape):
    """A tape whose requests never exceed the token limit of a local model."""

    def complete(self, requests):
        assert all(request.sampling.max_tokens <= REPLY for request in requests)
        return super().complete(requests)


def context(style: str = "tiny", train=(ANN, BOB)) -> BuildContext:
    corpus = Corpus(tuple(passage(i) for i in range(9)))
    encoder = HashedEncoder.fit(corpus.passages)
    searcher = ExactSearcher(encoder.encode_passages(corpus.passages))
    retriever = DenseRetriever(corpus, encoder, searcher)
    tape = Frozen(lambda role, prompt, rng: {"classifier": "B"}.get(role, "[No Retrieval]"))
    return BuildContext(style, 2, Environment(tape, retriever, tape), train)


@pytest.mark.parametrize("style", ["tiny", "full"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_each_name_is_a_system_in_each_style(name, style):
    inputs = context(style)
    system = SYSTEMS[name](inputs)
    assert system.style.endswith("_tiny") == (style == "tiny") and system.top_k in (0, 2)
    assert template(system.style, "document").template
    result = evaluate(system, [ANN, BOB], inputs.environment)
    assert sum(result.finish_reasons.values()) == 2 and "failed" not in result.finish_reasons
    prompts = inputs.environment.llm.prompts
    assert ANN.text in prompts[0] and not any("$" in prompt for prompt in prompts)


def table_models() -> TableModels:
    return TableModels(NoLLM(), None, split_policy(), tokenizer())


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_action_is_truncated(name):
    """Except for the model in the package, which is trained to write no more."""
    for style in ("tiny", "full"):
        system, sampler = build_system(name, context(style), table_models())
        limits = [role.sampling.max_tokens for role in system.roles.values()]
        assert sampler.shapes.max_new_tokens == (
            TINY_NEW_TOKENS if style == "tiny" else max(limits, default=1)
        )


@pytest.mark.parametrize("style", ["tiny", "full"])
@pytest.mark.parametrize("name", PAPERS)
def test_a_table_allows_the_contexts_and_tokens_of_training(monkeypatch, name, style):
    values = config_values(f"tiny/{name}" if style == "tiny" else name)
    roles = config_job(f"tiny/{name}").recipe.system.roles.values()
    assert max(role.sampling.max_tokens for role in roles) <= TINY_NEW_TOKENS
    longest = max(values["shapes"]["prompt_lengths"])
    model = nnx.merge(*policy()), tokenizer()
    monkeypatch.setattr(assemble, "load_policy", lambda *_: model)
    loaded_models = load_models(settings(name, style=style))
    _, sampler = build_system(name, context(style), loaded_models)
    assert (
        min(sampler.shapes.prompt_lengths[-1], loaded_models.llm._shapes.prompt_lengths[-1])
        >= longest
    )


@pytest.mark.parametrize("steps", [4, 2 * REPLY])
def test_a_local_model_writes_up_to_the_limit_of_systems(monkeypatch, steps):
    model = nnx.merge(*policy()), tokenizer()
    monkeypatch.setattr(assemble, "load_policy", lambda *_: model)
    llm = assemble.load_llm(parse_llm("tiny"), None, "", Shapes(max_new_tokens=steps))
    assert llm._shapes.max_new_tokens == max(REPLY, steps)


def test_a_table_uses_the_prompt_format_of_training():
    for style, folder in (("tiny", "tiny/"), ("full", "")):
        configs = [config_values(f"{folder}{name}") for name in ("coda", "mmoa_rag")]
        coda, mmoa_rag = configs[0]["recipe"]["system"], configs[1]["recipe"]["system"]
        inputs = context(style)
        assert SYSTEMS["coda"](inputs).as_chat_turns == coda["as_chat_turns"]
        assert SYSTEMS["autorefine"](inputs).as_chat_turns == coda["as_chat_turns"]
        assert SYSTEMS["mmoa_rag"](inputs).document_word == mmoa_rag["document_word"]


def write_run(workdir: pathlib.Path, folder: pathlib.Path) -> Any:
    """Writes a run of `ragrl train` with OPERA's three policies, which have different weights."""
    changes = {"policy": folder, "recipe.system.shared_policy": False}
    values = config_values("tiny/opera", changes | {"recipe.system.max_plan_steps": 2})
    save_config(workdir / "config.json", values)
    job = load_job(values)
    policies, chat = load_policies(job, None)
    prepared = prepare_policies(job, policies, chat)
    states = {
        name: jax.tree.map(lambda x, n=n: x * n, state)
        for n, (name, state) in enumerate(trained_state(prepared).items(), start=2)
    }
    checkpoints = Checkpoints(workdir)
    checkpoints.save(1, states, {"data": {}})
    checkpoints.close()
    return job


@pytest.mark.slow
def test_a_run_has_its_own_system_shapes_and_policies_which_act_in_a_modified_one(tmp_path, capsys):
    """As in the paper's ablations of OPERA: roles are removed without further training."""
    folder = saved_policy(tmp_path)
    run = tmp_path / "run"
    job = write_run(run, folder)
    system, sampler = load_run_system(RunCheckpoint(run))
    assert system == job.recipe.system != SYSTEMS["opera"](context())
    assert sampler.shapes == job.shapes and sampler.greedy
    models, start = sampler.models, jax.tree.leaves(split_policy().params)[0]
    for n, name in enumerate(models, start=2):
        first = jax.tree.leaves(models[name].params)[0]
        np.testing.assert_allclose(first, start * n, rtol=1e-6)
    changes = (
        "--config.recipe.system.max_plan_steps=0",
        "--config.recipe.system.top_k=3",
        "--config.shapes.max_prompt_tokens=64",
    )
    system, sampler = load_run_system(RunCheckpoint(run), changes)
    assert set(system.roles) == {"analysis", "rewrite"} and system.top_k == 3
    assert sampler.shapes.max_prompt_tokens == 64
    for name in system.roles:
        modified, original = sampler.models[name].params, models[name].params
        assert jax.tree.all(jax.tree.map(np.array_equal, modified, original))
    row = evaluate_row(
        f"{RUN}{run}", context()._replace(overrides=changes), table_models(), [ANN, BOB]
    )
    assert sum(row["ended"].values()) == 2 and "failed" not in row["ended"]
    assert row["costs"]["policy_calls"] > 0
    with pytest.raises(UserError, match="has no policy 'policy'"):
        load_run_system(RunCheckpoint(run), ("--config.recipe.system.shared_policy=True",))
    args = ("evaluate", "--corpus", "x", "--questions", "x", "--index", "x", "--systems", "direct")
    for more, message in (
        (("--config.recipe.system.top_k=3",), "give --run"),
        (("--run", str(run), "--config.run.steps=3"), "config.recipe and config.shapes alone"),
        (("--run", str(run), "--config.recipe.system.max_plan_step=3"), "mean max_plan_steps"),
    ):
        assert main((*args, *more)) == 2 and message in capsys.readouterr().err


def test_all_names_each_system_that_can_be_built_with_what_is_given():
    assert select_systems(settings("all", train=NOWHERE)) == tuple(SYSTEMS)
    assert set(SYSTEMS) - set(select_systems(settings("all"))) == LEARNERS
    with pytest.raises(UserError, match="--train"):
        SYSTEMS["skr_knn"](context(train=()))
    assert select_systems(settings("ircot", "direct")) == ("ircot", "direct")
    names = select_systems(settings("all", "workflows", policy=""))
    assert {"direct", "standard_rag", "ircot", "workflow_ag"} <= set(names)
    assert not {"c3po", "coda", "search_r1"} & set(names)
    with pytest.raises(UserError, match="c3po has roles .* there is none: give --policy"):
        select_systems(settings("direct", "c3po", policy=""))
    assert "c3po" in select_systems(settings("all"))


@pytest.mark.parametrize(
    "args, policy, style, systems",
    [
        ([], "tiny", "tiny", ("direct", "standard_rag", "c3po")),
        (["--llm", "world:w"], "tiny", "tiny", ("direct", "standard_rag", "c3po")),
        (["--llm", "openai:m"], "", "full", ("direct", "standard_rag")),
        (["--llm", "smollm2", "--policy", "p"], "p", "full", ("direct", "standard_rag", "c3po")),
        (["--llm", "smollm2", "--policy", "tiny", "--style", "tiny"], "tiny", "tiny", None),
        (["--llm", "smollm2", "--systems", "coda"], "", "full", ("coda",)),
    ],
)
def test_policy_and_style_follow_the_language_model(args, policy, style, systems, monkeypatch):
    calls = []
    monkeypatch.setattr(evaluate_command, "_evaluate_set", lambda *a, **_: calls.append(a[0]))
    assert main(["evaluate", "--questions", "q", *args]) == 0
    (actual,) = calls
    assert (actual.policy, actual.style) == (policy, style)
    assert systems is None or actual.systems == systems


def test_fixed_workflows_are_named_apart_from_all_and_unknown_names_refused():
    assert "workflow_qds_r_ag" in WORKFLOWS and not set(WORKFLOWS) & set(SYSTEMS)
    both = select_systems(settings("workflow_ag", "workflows", "direct"))
    assert both == ("workflow_ag", *(name for name in WORKFLOWS if name != "workflow_ag"), "direct")
    system, _ = build_system("workflow_r_ag", context(), table_models())
    row = table_row(evaluate(system, [ANN], context().environment, prices=Prices(1, 1)), [ANN])
    assert row["costs"]["dollars"] > 0 and row["strategies"] == {"R,AG": 1}
    with pytest.raises(UserError, match=r"'nope'.*direct.*ircot.*c3po"):
        select_systems(settings("direct", "nope"))
    with pytest.raises(UserError, match="nowhere/config.json does not exist.*--workdir"):
        select_systems(settings("direct", f"{RUN}nowhere"))
    with pytest.raises(UserError, match="style is 'c3po_tiny': use one of tiny, full"):
        select_systems(settings("direct", style="c3po_tiny"))


def test_rows_have_scores_per_hop_count_and_kind():
    inputs = context()
    plain = [dataclasses.replace(q, hops=0) for q in (ANN, BOB)]
    result = evaluate(SYSTEMS["direct"](inputs), plain, inputs.environment)
    assert {"hops", "kinds"} & set(table_row(result, plain)) == set()
    assert table_row(result, plain)["mistakes"] == {"never_searched": 1}
    mixed = [dataclasses.replace(ANN, kind="chain"), dataclasses.replace(BOB, hops=2)]
    split = table_row(result, mixed)
    assert set(split["hops"]) == {"1", "2"} and set(split["kinds"]) == {"chain", ""}
    assert split["hops"]["1"]["em"][0] == 100.0 and split["hops"]["2"]["em"][0] == 0.0


def test_a_search_server_excludes_a_corpus_and_an_index(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    save_questions([ANN, BOB], file)
    for args, message in (
        (["--questions", str(file), "--corpus", str(file)], "--retriever alone"),
        (["--questions", str(file), "--systems=skr_knn", f"--train={file}"], "not --retriever"),
        (["--data", f"{file}@{file}"], "--retriever searches for all sets"),
        (["--data", f"{file}@{file}", "--json"], "--json is for one question set"),
        (["--data", f"{file}@{file}", "--out", "t.json"], "--out is for one question set"),
    ):
        assert main(["evaluate", "--retriever", "http://localhost:1", *args]) == 2
        assert message in capsys.readouterr().err


def test_a_served_index_is_a_retriever(tmp_path, capsys):
    """A reader that repeats its prompt knows the first five passages only."""
    file, tape = tmp_path / "q.jsonl", Tape({}, replies={"answer": "x"})
    questions = [Question(text, text, (text,), gold=("p2",)) for text in ("text 5", "text 6")]
    save_questions(questions, file)
    system = StandardRAG("c3po_tiny", 2)
    served = application(ServedSystem("tape", "a stub", system, tape.environment(), ANN.text))

    def repeat(body):
        print("what code of a user prints is no part of the table")
        return body["messages"][-1]["content"].partition("Question:")[0]

    with listening(served) as index, serving(repeat) as (llm, _):
        args = ["--questions", str(file), "--retriever", index, "--llm", f"openai:m@{llm}"]
        args += ["--out", f"{tmp_path}/new/folder/table.json"]
        assert main(["evaluate", "--systems", "standard_rag", "--json", *args]) == 0
    lines = capsys.readouterr().out.splitlines()  # some are of the server
    table = json.loads("\n".join(line for line in lines if not line.startswith("ragrl: ")))
    row = table["standard_rag"]
    assert json.loads((tmp_path / "new" / "folder" / "table.json").read_text()) == table
    assert row["cover_em"] == 50.0 and row["costs"]["passages"] == 5.0
    assert table["mrr@10"] == 0.5 and row["retrieval"]["mrr@10"] == 50.0
