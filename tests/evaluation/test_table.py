"""The table of systems: every name is a system, bad names are refused, rows are split."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, PAPERS, load_config, main
from jax_ragrl.config.snapshot import settle
from jax_ragrl.corpus.formats import save_questions
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import LEARNERS, SYSTEMS, Bench
from jax_ragrl.evaluation.table import (
    RUN,
    TINY_STEPS,
    Actors,
    Setting,
    chosen,
    load_actors,
    measured,
    outage,
    row,
    trained,
    untrained,
)
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.llm.base import NoLLM
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.lexical import LexicalEncoder
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run import components as assemble
from jax_ragrl.run.components import load_policies, policy_folder
from jax_ragrl.run.config import REPLY, load_job, parse_llm
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.serve.app import application
from jax_ragrl.serve.replies import Served
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.systems.mmoa_rag import render_selection
from jax_ragrl.text.prompts import template
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.train.loop import prepare_policies, trained_state
from jax_ragrl.types import Question
from tests.listening import listening
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, Tape, passage
from tests.tiny import policy, tokenizer

NOWHERE = pathlib.Path("nowhere")


def setting(*systems: str, **changes) -> Setting:
    given = Setting(NOWHERE, NOWHERE, NOWHERE, systems, "tiny", "tiny", "tiny", 2, 0)
    return given._replace(**changes)


class Frozen(Tape):
    """A tape that is asked for no more than a local model may write."""

    def complete(self, requests):
        assert all(request.sampling.max_tokens <= REPLY for request in requests)
        return super().complete(requests)


def bench(style: str = "tiny", train=(ANN, BOB)) -> Bench:
    corpus = Corpus(tuple(passage(i) for i in range(9)))
    encoder = LexicalEncoder.fit(corpus.passages)
    searcher = ExactSearcher(encoder.encode_passages(corpus.passages))
    retriever = DenseRetriever(corpus, encoder, searcher)
    tape = Frozen(lambda role, prompt, rng: {"classifier": "B"}.get(role, "[No Retrieval]"))
    return Bench(style, 2, Environment(tape, retriever, tape), retriever, train)


@pytest.mark.parametrize("style", ["tiny", "full"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_name_is_a_system_in_every_style(name, style):
    table = bench(style)
    system = SYSTEMS[name](table)
    assert system.style.endswith("_tiny") == (style == "tiny") and system.top_k in (0, 2)
    assert template(system.style, "document").template
    result = evaluate(system, [ANN, BOB], table.environment)
    assert sum(result.ended.values()) == 2 and "failed" not in result.ended


def actors() -> Actors:
    return Actors(NoLLM(), None, policy(), tokenizer())


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_action_is_cut(name):
    """But those of the model in the package, which is trained to write no more."""
    for style in ("tiny", "full"):
        system, sampler = untrained(name, bench(style), actors())
        wanted = [role.sampling.max_tokens for role in system.roles.values()]
        assert sampler.shapes.steps == (TINY_STEPS if style == "tiny" else max(wanted, default=1))


def test_a_table_is_of_an_outage_where_no_system_has_answered():
    lost = {"ended": {"failed": 2}, "failed_with": "away"}
    assert outage({"questions": 2, "direct": lost, "standard_rag": lost}) == "away"
    partly = lost | {"ended": {"failed": 1, "answered": 1}}
    assert outage({"questions": 2, "direct": lost, "standard_rag": partly}) is None
    assert outage({"questions": 0}) is None


@pytest.mark.parametrize("name", PAPERS)
def test_a_tiny_policy_is_trained_within_the_tokens_that_a_table_gives_it(name):
    job = load_job(load_config(CONFIGS / "tiny" / f"{name}.py", []))
    assert max(r.sampling.max_tokens for r in job.recipe.system.roles.values()) <= TINY_STEPS


@pytest.mark.parametrize("style", ["tiny", "full"])
@pytest.mark.parametrize("name", PAPERS)
def test_no_context_ends_sooner_in_a_table_than_in_training(monkeypatch, name, style):
    file = CONFIGS / ("tiny" if style == "tiny" else "") / f"{name}.py"
    longest = max(load_config(file, [])["shapes"]["lengths"])
    loaded = nnx.merge(*policy()), tokenizer()
    for module in ("run.components", "evaluation.table"):
        monkeypatch.setattr(f"jax_ragrl.{module}.load_policy", lambda *_: loaded)
    made = load_actors(setting(name, style=style))
    _, sampler = untrained(name, bench(style), made)
    assert min(sampler.shapes.lengths[-1], made.llm._shapes.lengths[-1]) >= longest


@pytest.mark.parametrize("steps", [4, 2 * REPLY])
def test_a_local_model_writes_as_much_as_systems_ask(monkeypatch, steps):
    loaded = nnx.merge(*policy()), tokenizer()
    monkeypatch.setattr(assemble, "load_policy", lambda *_: loaded)
    llm = assemble.load_llm(parse_llm("tiny"), None, "", Shapes(steps=steps))
    assert llm._shapes.steps == max(REPLY, steps)


def test_a_table_speaks_as_the_configs_train():
    for style, folder in (("tiny", CONFIGS / "tiny"), ("full", CONFIGS)):
        configs = [load_config(folder / f"{name}.py", []) for name in ("coda", "mmoa_rag")]
        coda, mmoa_rag = configs[0]["recipe"], configs[1]["recipe"]["system"]
        table = bench(style)
        assert SYSTEMS["coda"](table).chat == coda["chat"]
        assert SYSTEMS["autorefine"](table).chat == coda["chat"]
        assert SYSTEMS["mmoa_rag"](table).word == mmoa_rag["word"]


def test_the_mask_of_the_tiny_selector_lets_it_select():
    chat = ChatTokenizer.load(policy_folder("tiny"))
    system = SYSTEMS["mmoa_rag"](bench())
    allowed_V = chat.allowed(system.roles["selector"].tokens)
    assert allowed_V[list(chat.encode(render_selection((0, 4), system.word)))].all()


def leave_a_run(workdir: pathlib.Path, folder: pathlib.Path) -> Any:
    """What `ragrl train` would leave for OPERA's three policies, each with weights of its own."""
    given = {"policy": folder, "recipe.shared": False, "recipe.max_steps": 2}
    overrides = [f"--config.{key}={value}" for key, value in given.items()]
    values = load_config(CONFIGS / "tiny" / "opera.py", overrides)
    settle(workdir / "config.json", values)
    job = load_job(values)
    policies, chat = load_policies(job, None)
    begun = prepare_policies(job, policies, chat)
    states = {
        name: jax.tree.map(lambda x, n=n: x * n, state)
        for n, (name, state) in enumerate(trained_state(begun).items(), start=2)
    }
    checkpoints = Checkpoints(workdir)
    checkpoints.save(1, states, {"data": {}})
    checkpoints.close()
    return job


def test_a_run_is_a_row_with_its_own_system_shapes_and_policies(tmp_path):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    job = leave_a_run(tmp_path / "run", folder)
    system, sampler = trained(tmp_path / "run")
    assert system == job.recipe.system != SYSTEMS["opera"](bench())
    assert sampler.shapes == job.shapes and sampler.greedy
    first = {n: jax.tree.leaves(params)[0] for n, (_, params) in sampler.models.items()}
    start = jax.tree.leaves(policy()[1])[0]
    for n, name in enumerate(first, start=2):
        np.testing.assert_allclose(first[name], start * n, rtol=1e-6)
    made = measured(f"{RUN}{tmp_path / 'run'}", bench(), actors(), [ANN, BOB])
    assert sum(made["ended"].values()) == 2 and made["costs"]["policy_calls"] > 0


def test_what_a_run_has_learnt_may_act_in_a_changed_system(tmp_path, capsys):
    """As the paper's ablations of OPERA: roles are taken away, and nothing is trained again."""
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    run = tmp_path / "run"
    leave_a_run(run, folder)
    changes = ("--config.recipe.max_steps=0", "--config.recipe.top_k=3", "--config.shapes.slots=64")
    system, sampler = trained(run, changes)
    assert set(system.roles) == {"analysis", "rewrite"} and system.top_k == 3
    assert sampler.shapes.slots == 64
    models = trained(run)[1].models
    for name in system.roles:
        assert jax.tree.all(jax.tree.map(np.array_equal, sampler.models[name][1], models[name][1]))
    made = measured(f"{RUN}{run}", bench()._replace(changes=changes), actors(), [ANN, BOB])
    assert sum(made["ended"].values()) == 2 and "failed" not in made["ended"]
    with pytest.raises(UserError, match="has no policy 'policy'"):
        trained(run, ("--config.recipe.shared=True",))
    given = ("evaluate", "--corpus", "x", "--questions", "x", "--index", "x", "--systems", "direct")
    for more, told in (
        (("--config.recipe.top_k=3",), "give --run"),
        (("--run", str(run), "--config.run.steps=3"), "config.recipe and config.shapes alone"),
        (("--run", str(run), "--config.recipe.max_step=3"), "did you mean max_steps"),
    ):
        assert main((*given, *more)) == 2 and told in capsys.readouterr().err


def test_an_export_needs_neither_data_nor_servers_nor_devices_of_its_run(tmp_path, capsys):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    leave_a_run(tmp_path / "run", folder)
    file = tmp_path / "run" / "config.json"
    values, gone = json.loads(file.read_text()), str(tmp_path / "gone")
    values["data"] = {"files": dict.fromkeys(("corpus", "train", "dev", "test"), gone)}
    values["mesh"] = (64, 4, 1)
    file.write_text(json.dumps(values))
    given = ("export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "float32")
    assert main(given) == 2 and "--policy is None" in capsys.readouterr().err
    assert main([*given, "--policy", "analysis"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_all_is_every_system_that_can_be_built():
    assert chosen(setting("all", train=NOWHERE)) == tuple(SYSTEMS)
    assert set(SYSTEMS) - set(chosen(setting("all"))) == LEARNERS
    assert chosen(setting("ircot", "direct")) == ("ircot", "direct")


def test_unknown_names_and_styles_are_refused():
    with pytest.raises(UserError, match=r"'nope'.*direct.*ircot.*c3po"):
        chosen(setting("direct", "nope"))
    with pytest.raises(UserError, match="nowhere/config.json does not exist.*--workdir"):
        chosen(setting("direct", f"{RUN}nowhere"))
    with pytest.raises(UserError, match="style is 'c3po_tiny': use one of tiny, full"):
        chosen(setting("direct", style="c3po_tiny"))


def test_what_learns_from_questions_asks_for_them():
    with pytest.raises(UserError, match="--train"):
        SYSTEMS["skr_knn"](bench(train=()))


def test_the_command_refuses_before_it_reads_anything(capsys):
    given = ("--corpus", "x", "--questions", "x", "--index", "x", "--systems", "direct,nope")
    assert main(("evaluate", *given)) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ragrl: unknown system 'nope'") and "\n" not in line
    assert main(("evaluate", *given[:-2], "--run", "nowhere")) == 2
    assert "nowhere/config.json does not exist" in capsys.readouterr().err


def test_rows_are_split_by_hops_and_kind_where_these_are_known():
    table = bench()
    plain = [dataclasses.replace(q, hops=0) for q in (ANN, BOB)]
    result = evaluate(SYSTEMS["direct"](table), plain, table.environment)
    assert {"hops", "kinds"} & set(row(result, plain)) == set()
    mixed = [dataclasses.replace(ANN, kind="chain"), dataclasses.replace(BOB, hops=2)]
    split = row(result, mixed)
    assert set(split["hops"]) == {"1", "2"} and set(split["kinds"]) == {"chain", ""}
    assert split["hops"]["1"]["em"][0] == 100.0 and split["hops"]["2"]["em"][0] == 0.0


def test_a_server_stands_for_the_corpus_and_index_of_one_set(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    save_questions([ANN, BOB], file)
    for given, told in (
        (["--questions", str(file), "--corpus", str(file)], "--retriever alone"),
        (
            ["--questions", str(file), "--systems", "skr_knn", "--train", str(file)],
            "not --retriever",
        ),
        (["--data", f"{file}@{file}"], "--retriever searches for all sets"),
    ):
        assert main(["evaluate", "--retriever", "http://localhost:1", *given]) == 2
        assert told in capsys.readouterr().err


def test_systems_are_compared_over_a_served_index(tmp_path, capsys, monkeypatch):
    """A reader that repeats its prompt knows what is in the first five passages, and no more."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    file, tape = tmp_path / "q.jsonl", Tape({}, told={"answer": "x"})
    save_questions([Question(text, text, (text,)) for text in ("text 5", "text 6")], file)
    made = StandardRAG("c3po_tiny", 2)
    served = application(Served("tape", "a stub", made, tape.environment(), ANN.text))
    prompt = serving(lambda body: body["messages"][-1]["content"].partition("Question:")[0])
    with listening(served) as index, prompt as (llm, _):
        given = ["--questions", str(file), "--retriever", index, "--llm", f"openai:m@{llm}"]
        assert main(["evaluate", "--systems", "standard_rag", *given]) == 0
    row = json.loads(capsys.readouterr().out)["standard_rag"]
    assert row["cover_em"] == 50.0 and row["costs"]["passages"] == 5.0
