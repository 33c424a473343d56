"""The generated reference is complete, and the committed files are current."""

import json
import pathlib
import re

import api
import commands
import config_keys
import metrics
import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.run.metric_names import METRICS, metric_of

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Keys that only their class describes, if anything: lower this when you describe one.
UNDESCRIBED = 13


def test_few_config_keys_are_without_a_description_of_their_own():
    missing = config_keys.undescribed()
    assert len(missing) <= UNDESCRIBED, missing


def test_the_config_reference_has_every_key_once():
    text = config_keys.markdown("run")
    # A key that several kinds of a section have is a target once.
    once = re.sub(r"^:::\{config-key\}.*\n:no-index:$", "", text, flags=re.MULTILINE)
    targets = re.findall(r"^:::\{config-key\} (\S+) \|", once, re.MULTILINE)
    assert len(targets) == len(set(targets))
    assert {"objective.kl.coefficient", "run.steps", "mesh"} <= set(targets)


def test_the_command_reference_has_every_option():
    text = commands.markdown()
    for name, sub in commands.commands(commands.parser()):
        if name == "ragrl":
            continue
        assert f"`{name}`" in text
        for action in sub._actions:
            if action.option_strings and commands.is_shown(action):
                assert action.option_strings[0] in text


def test_every_package_has_a_page():
    pages = {file.stem for file in (DOCS / "reference" / "api").glob("*.md")}
    packages = {name for name in api.packages() if any(map(api.documented, api.modules(name)))}
    assert pages == packages


def test_every_metric_has_a_page_entry():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(x.unit and x.meaning and metric_of(x.name) == x for x in METRICS)
    assert all(f":::{{metric}} {name} | " in metrics.markdown() for name in names)


@pytest.mark.parametrize("file", sorted((DOCS / "data").glob("*.json")), ids=lambda f: f.stem)
def test_every_measurement_says_how_it_was_made(file):
    data = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(data, list):  # the results of `ragrl experiment reproduce`
        data = {"rows": data, "columns": ()}
    assert data["rows"]
    for row in data["rows"]:
        assert row["command"] and re.fullmatch(r"[0-9a-f]{7,40}", row["commit"])
        assert row.get("device") or data["device"]
        assert set(row.get("cells", ())) <= set(data["columns"])


def test_the_figures_are_those_that_the_script_draws(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "images"))
    import draw

    for name, figure in draw.FIGURES.items():
        assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == figure().svg()


SMALL = ["run.steps=1", "run.questions_per_step=2", "run.dev_questions=2", "data.world.size=60"]
# One length and one batch size: few programs.
SMALL += ["shapes.prompt_lengths=(288,)", "shapes.batch_sizes=(16,)", "packing.row_lengths=(352,)"]
SMALL += ["packing.tokens_per_device=2112"]


@pytest.mark.slow
def test_every_metric_that_a_run_writes_is_in_the_table(tmp_path):
    """Of groups; of a critic: test_papers.py; of any rollout: test_indicators.py."""
    config = DOCS.parent / "configs" / "tiny" / "opera.py"
    changes = [f"--config.{change}" for change in SMALL]
    assert main(["train", f"--config={config}", f"--workdir={tmp_path}", *changes]) == 0
    before, row = map(json.loads, (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines())
    assert {"reward/mean", "time/train_s"} <= row.keys()
    assert {key for key in before | row if metric_of(key) is None} == {"step"}
