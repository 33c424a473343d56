"""The commands of launch/papers.toml parse, their configs load, and they run with stand-ins."""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import papers
import pytest
from generated import filled

from jax_ragrl.run.load import load_job
from jax_ragrl.run.metric_names import metric_of
from jax_ragrl.run.overrides import load_config
from tests.docs.pages import ROOT, commands
from tests.docs.test_blocks import check_config, files_of, parsed
from tests.flags import flags

PAPERS = papers.papers()
WHOLE = ("train", "config plan", "warmup demos", "warmup pool")  # commands with a whole config
IN_CI = ("c3po",)  # the one with all stages: a warm start, a frozen model and a judge


@pytest.mark.parametrize("toy", [False, True], ids=["paper", "toy"])
@pytest.mark.parametrize("name", PAPERS)
def test_the_commands_of_a_paper_parse_and_their_configs_load(name, toy, monkeypatch):
    # An option that names a file on the Hub downloads it.
    monkeypatch.setattr(
        "jax_ragrl.corpus.data_path.download_data_file", lambda uri: pathlib.Path("file.jsonl")
    )
    found = set()
    for stage in papers.stages(name, toy=toy, whole=True):
        for words in commands(stage.command):
            if words[0] != "ragrl":
                continue
            assert all((ROOT / file).exists() for file in files_of(words))
            arguments = parsed(words)
            check_config(arguments)
            found.add(arguments.name)
            if arguments.name in WHOLE[-1:]:  # writes the pool that the config needs
                arguments.config.append("--config.recipe.expert_pool=none")
            if arguments.name in WHOLE:
                load_job(load_config(None, arguments.config))
    assert {"data index", "train", "evaluate", "config plan"} <= found


@pytest.mark.parametrize("name", PAPERS)
def test_the_published_numbers_and_simulated_hours_of_a_paper_are_complete(name):
    paper = PAPERS[name]
    for system, numbers in paper["rows"].items():
        assert len(numbers) == len(paper["sets"]), system
        if paper["sets"][-1] == "mean":  # CoDA prints 0.407 for a mean of 0.410
            mean = sum(numbers[:-1]) / (len(numbers) - 1)
            assert mean == pytest.approx(numbers[-1], rel=1e-2), system
    steps = load_config(None, [f"--config=configs/{name}.py"])["run"]["steps"]
    page = filled(ROOT / "docs" / "papers" / f"{name}.md")
    for machine, _, seconds, hours, _ in PAPERS[name]["planned"]:
        assert f"| {machine} |" in page
        if seconds:  # of a plan that has not ended there are none
            assert hours == pytest.approx(seconds * steps / 3600, rel=0.02)


def test_every_group_of_tables_and_figures_has_a_state():
    entries = [entry for paper in PAPERS.values() for entry in paper["tables"]]
    assert len(entries) == 31
    for name, paper in PAPERS.items():
        page = filled(ROOT / "docs" / "papers" / f"{name}.md")
        assert all(entry["item"] in page for entry in paper["tables"])
        assert all(stage.command in page for stage in papers.stages(name))


def test_stages_may_follow_the_option_and_an_unknown_one_is_named():
    with pytest.raises(SystemExit, match="coda has no stage sft: use names, download, index, plan"):
        papers.script("coda", ["sft"], toy=False)
    run = [sys.executable, papers.__file__, "coda", "--toy", "index", "evaluate"]
    text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "ragrl data index" in text and "ragrl evaluate" in text and "ragrl train" not in text


def test_a_folder_whose_name_the_commands_would_split_is_refused(monkeypatch):
    monkeypatch.setenv("RUNS", "/my runs")
    with pytest.raises(SystemExit, match="RUNS is '/my runs', but the commands would split it at"):
        papers.script("coda", [], toy=True)
    monkeypatch.setenv("RUNS", "/läufe/a-1")
    assert "--out /läufe/a-1/toy/coda/index" in papers.script("coda", ["index"], toy=True)


def test_a_download_that_ended_half_way_is_completed(tmp_path):
    (tmp_path / "data").mkdir()
    for name in "ab":
        (tmp_path / "data" / f"part_a{name}").write_text(name)
    command = next(x.command for x in papers.stages("coda") if x.name == "download")
    failing = 'cat() { command cat "$1"; return 1; }'
    run = lambda first: subprocess.run(  # noqa: E731
        ["bash", "-ec", f"hf() {{ :; }}; {first}\n{command}"], cwd=tmp_path
    )
    assert run(failing).returncode == 1 and run("").returncode == run("").returncode == 0
    assert (tmp_path / "data" / "e5_Flat.index").read_text() == "ab"


def test_a_server_is_awaited_without_curl_and_past_a_proxy():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        folder = pathlib.Path(sys.executable).parent
        here = {"PATH": f"{folder}:{os.environ['PATH']}", "http_proxy": "http://127.0.0.1:9"}
        ask = papers.ASK.format(port=server.server_port).replace("v1/models", "")
        assert subprocess.run(["bash", "-c", ask], env=os.environ | here).returncode == 0
    assert subprocess.run(["bash", "-c", ask], env=os.environ | here).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_runs_to_its_table_with_stand_ins(name, tmp_path):
    """A minute of one core each; with CI set only those of `IN_CI`."""
    if os.environ.get("CI") and name not in IN_CI:
        pytest.skip("run without CI in the environment")
    (tmp_path / "bin").mkdir()
    # No link to the interpreter, which would not find the packages of its environment.
    for command, module in {"ragrl": "-m jax_ragrl.cli.main", "python": ""}.items():
        file = tmp_path / "bin" / command
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        file.chmod(0o755)
    here = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNS": str(tmp_path / "runs"),
        "XLA_FLAGS": flags(1),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # every stage compiles longer than it computes
        # The stages share their programs, as in the cache of a user.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    run = [ROOT / "launch" / "paper.sh", name, "--toy"]
    done = subprocess.run(run, env=os.environ | here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "runs" / "toy" / name
    rows = [json.loads(line) for line in (folder / "table" / "rows.jsonl").open()]
    assert len(rows) >= 3 and not [row for row in rows if "error" in row]
    assert any(row["system"].startswith("run:") for row in rows)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    assert not {key for row in steps for key in row if metric_of(key) is None} - {"step"}
    assert {"reward/mean", "time/train_s"} <= steps[-1].keys()
    assert pathlib.Path(folder / "table" / "table.md").stat().st_size > 200
