"""Laws of `quickstart --real`, with a random model of two layers in the shape of SmolLM2."""

import json
import pathlib

import pytest

from configs.real import quickstart
from jax_ragrl.errors import UserError
from jax_ragrl.experiments import real
from jax_ragrl.experiments.real import equal_time_steps, real_quickstart
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.jsonl import append_row, write_json, write_rows

CONFIGS = pathlib.Path(quickstart.__file__).parent
SHAPES = {"prompt_lengths": (512,), "batch_sizes": (4,), "max_new_tokens": 16}
PACKING = {"row_lengths": (576,), "tokens_per_device": 1152}


def _small(tmp_path: pathlib.Path) -> tuple[dict, dict]:
    """The two configs with a random model, eight passages and eight questions."""
    pytest.importorskip("gguf")
    from tests.models.gguf_models import CONFIG, write_gguf

    raw = CONFIG | {"max_position_embeddings": 1024, "intermediate_size": 64}
    model = str(write_gguf(tmp_path / "random.gguf", raw=raw))
    names = [f"Person {letter}" for letter in "ABCDEFGH"]
    corpus = [
        {"id": f"{i}", "contents": f'"{n}"\n{n} was born in {1900 + i}.'}
        for i, n in enumerate(names)
    ]
    questions = [
        {"id": f"q{i}", "question": f"when was {n} born", "golden_answers": [f"{1900 + i}"]}
        for i, n in enumerate(names)
    ]
    write_rows(tmp_path / "questions.jsonl", questions)
    write_rows(tmp_path / "corpus.jsonl", corpus)
    files = dict.fromkeys(("train", "dev", "test"), str(tmp_path / "questions.jsonl"))
    files["corpus"] = str(tmp_path / "corpus.jsonl")
    values = load_config(CONFIGS / "quickstart.py", [])
    values |= {"policy": model, "data": {"files": files}, "shapes": SHAPES, "packing": PACKING}
    values |= {"index": {"encoder": "hashed", "kind": "exact"}, "compute_dtype": "float32"}
    values["llm"] = {"kind": "local", "model": model}
    values["recipe"]["rollouts"] = 2
    sizes = {"steps": 2, "questions_per_step": 2, "save_every": 1, "dev_questions": 2}
    values["run"] |= sizes | {"test_questions": 4}
    warm = load_config(CONFIGS / "warm_start.py", ["--config.data.demos=demos.jsonl"])
    warm |= {"packing": PACKING, "batch_size": 4, "compute_dtype": "float32"}
    return values, warm


@pytest.mark.slow
def test_all_stages_run_and_a_finished_run_repeats_none(tmp_path, monkeypatch):
    values, warm = _small(tmp_path)
    out = tmp_path / "run"
    monkeypatch.setattr(real, "equal_time_steps", lambda _: 2)
    summary = real_quickstart(values, warm, out, questions=4)
    rows = {"direct", "standard_rag", "warm_start", "supervised", "trained"}
    assert set(summary["accuracy"]) == rows
    assert summary["gain"]["pairs"] == summary["gain_over_supervised"]["pairs"] == 4
    assert "Supervised" in (out / "report.html").read_text()
    warm_rows = [json.loads(x) for x in (out / "warm" / "metrics.jsonl").read_text().splitlines()]
    assert len(warm_rows) == 2  # eight demonstrations of four questions, four per step
    # The demonstrations of the warm start are a subset, not all that there are.
    assert len((out / "demos-all.jsonl").read_text().splitlines()) == 16
    monkeypatch.setattr(real, "warm_start", lambda *_: pytest.fail("trained again"))
    again = real_quickstart(values, warm, out, questions=4)
    assert again["accuracy"] == summary["accuracy"]


def test_a_model_that_is_missing_ends_the_run_before_any_work(tmp_path):
    values, warm = _small(tmp_path)
    with pytest.raises(UserError, match=r"none\.gguf"):
        real_quickstart(values | {"policy": "./none.gguf"}, warm, tmp_path / "run", questions=4)
    assert not (tmp_path / "run").exists()


SUPERVISED = {"f1": 50.0, "judge": 0.0, "scores": {"f1": [1.0, 0.0], "judge": [0.0, 0.0]}}
TRAINED = {"scores": {"f1": [0.0, 0.0], "judge": [1.0, 1.0]}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns `real_quickstart` with results in place of the work of its stages."""

    def make_demos(values, file, *_):
        file.parent.mkdir(exist_ok=True)
        append_row(file, {"role": "generator"})

    def trained_on(run, demos, out):
        (out / "checkpoint").mkdir(parents=True, exist_ok=True)
        return out / "checkpoint"

    def quickstart(job, workdir):
        write_json(workdir / "trained.json", TRAINED)
        return {"accuracy": {}}

    stubs = {"make_demos": make_demos, "_trained_on": trained_on, "quickstart": quickstart}
    stubs |= {"equal_time_steps": lambda _: 1, "_supervised_row": lambda *_: SUPERVISED}
    for name in ("resolve_model", "write_results"):
        stubs[name] = lambda *_, **__: None
    for name, stub in stubs.items():
        monkeypatch.setattr(real, name, stub)
    warm = load_config(CONFIGS / "warm_start.py", ["--config.data.demos=demos.jsonl"])

    def run(questions=4, **changes):
        values = load_config(CONFIGS / "quickstart.py", []) | changes
        return real_quickstart(values, warm, tmp_path / "run", questions)

    return run


def test_the_alternative_to_a_longer_run_is_trained_longer(run, monkeypatch):
    seen = []
    stub = lambda _, model, file: seen.append((model, file)) or SUPERVISED  # noqa: E731
    monkeypatch.setattr(real, "_supervised_row", stub)
    for steps in (1, 2, 2):
        monkeypatch.setattr(real, "equal_time_steps", lambda _, steps=steps: steps)
        assert run()["supervised_steps"] == steps
    assert len(set(seen)) == 2 and len({*map(str, sum(seen, ()))}) == 4


def test_the_gain_over_supervision_has_the_metric_of_the_headline(run):
    def gain(summary):
        return summary["accuracy"]["supervised"], summary["gain_over_supervised"]["mean"]

    judge = {"kind": "openai", "model": "grader", "base_url": "http://127.0.0.1:1/v1"}
    assert gain(run()) == (50.0, -50.0)
    assert gain(run(judge=judge)) == (0.0, 100.0)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"questions": 500}, "warm_questions"), ({"policy": "Qwen/Qwen3-0.6B"}, "policy")],
)
def test_a_warm_start_of_other_settings_is_refused(changes, key, run):
    summary = run(questions=120)
    assert run(questions=120) == summary
    with pytest.raises(UserError, match=rf"config\.{key} differs.* another --workdir"):
        run(**{"questions": 120} | changes)


def test_supervision_gets_the_time_of_the_training(tmp_path):
    for step in range(4):
        row = {"step": step, "time/rollout_s": 20.0, "time/train_s": 10.0, "time/compile_s": 0.0}
        append_row(tmp_path / "metrics.jsonl", row)
    (tmp_path / "warm").mkdir()
    for seconds in (90.0, 6.0, 5.0):  # the first step compiles
        append_row(tmp_path / "warm" / "metrics.jsonl", {"step": 1, "time/step_s": seconds})
    assert equal_time_steps(tmp_path) == 20
