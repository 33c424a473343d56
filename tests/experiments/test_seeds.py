"""Multi-seed experiments: resumption, rows, paired comparison with a baseline."""

import json
import types

import pytest

from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.experiments import seeds
from jax_ragrl.run.config import Data, FileData, WorldData
from jax_ragrl.types import Question

SUMMARY = {
    "seed": 0,
    "gains": {"f1": {"trained": 30.25, "mean": 9.75, "ci95": [5.0, 14.5]}},
    "wall_s": 600.0,
}
JOB = types.SimpleNamespace(
    data=Data(WorldData(size=40)), run=types.SimpleNamespace(test_questions=3)
)


def test_finished_trials_are_not_repeated(tmp_path, monkeypatch):
    (tmp_path / "a-0").mkdir()
    (tmp_path / "a-0" / "summary.json").write_text(json.dumps(SUMMARY))
    # The strongest row without training is in the table too.
    (tmp_path / "a-0" / "baselines.json").write_text(json.dumps({"standard_rag": {"f1": 27.123}}))
    runs = []

    def quickstart(job, workdir):
        runs.append((job, workdir.name))
        return SUMMARY | {"seed": 1}

    monkeypatch.setattr(seeds, "quickstart", quickstart)
    load = lambda system, seed, policy, workdir: (system, seed, policy)  # noqa: E731

    def warm(folder):
        warm_ups.append(folder.name)
        return {"step": 1}

    warm_ups = []
    warm_up = seeds.WarmUp(warm, {"seed": 0})
    text = seeds.run_trials(["a", "b"], [0, 1], load, {"b": warm_up}, tmp_path)
    start = str(tmp_path / "b-warm" / "checkpoint")
    assert runs == [(("a", 1, ""), "a-1"), (("b", 0, start), "b-0"), (("b", 1, start), "b-1")]
    seeds.run_trials(["b"], [0], load, {"b": warm_up}, tmp_path)
    assert warm_ups == ["b-warm"]  # a finished warm-up is not repeated
    assert text.splitlines() == [
        "| system | seed | Standard RAG F1 | warm start F1 | trained F1 | gain | 95 % | wall s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| a | 0 | 27.12 | 20.5 | 30.25 | 9.75 | 5.0 to 14.5 | 600.0 |",
        *(f"| {z} | 1 |  | 20.5 | 30.25 | 9.75 | 5.0 to 14.5 | 600.0 |" for z in "abb"),
    ]


def test_a_warm_up_of_another_config_is_refused_before_a_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "quickstart", lambda *_: SUMMARY)
    load = lambda system, seed, policy, workdir: workdir.mkdir(exist_ok=True)  # noqa: E731

    def run(**settings):
        warm = {"b": seeds.WarmUp(lambda folder: {"step": 1}, settings)}
        return seeds.run_trials(["a", "b"], [0], load, warm, tmp_path)

    table = run(seed=0)
    assert run(seed=0) == table
    monkeypatch.setattr(seeds, "quickstart", lambda *_: pytest.fail("trained"))
    with pytest.raises(UserError, match=r"b-warm holds .*config.seed differs.* another --out"):
        run(seed=1)


def test_a_trial_without_answers_is_a_row():
    none = {"trained": None, "mean": None, "ci95": [None, None], "pairs": 0}
    assert seeds.trial_row("a", SUMMARY | {"gains": {"f1": none}}, 27.12) == (
        *("a", 0, 27.12, None, None, None, "None to None", 600.0),
    )


def write_trial(folder, *scores, job=JOB):
    """Writes the files of a finished trial."""
    folder.mkdir(parents=True)
    row = {"asked": seeds.held_out_fingerprint(job), "scores": {"f1": scores}}
    (folder / "trained.json").write_text(json.dumps(row))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))


def compare(tmp_path, job=JOB):
    load = lambda system, seed, policy, workdir: job  # noqa: E731
    return seeds.run_trials(["a"], [0], load, {}, tmp_path / "line", tmp_path / "tree")


@pytest.mark.parametrize("failure", [None, float("nan")])  # as written now and formerly
def test_trials_are_compared_per_question(tmp_path, failure):
    """A question on which the environment failed in one trial is excluded."""
    write_trial(tmp_path / "line" / "a-0", 1.0, 0.5, 1.0)
    write_trial(tmp_path / "tree" / "a-0", 0.5, 0.0, failure)
    text = compare(tmp_path)
    assert text == (tmp_path / "line" / "trials.md").read_text(encoding="utf-8")
    head, _, line = text.splitlines()
    assert head.endswith(f"| wall s | over {tmp_path / 'tree'} |")
    assert line.endswith("| 600.0 | 50.0, -76.28 to 92.09 |")


def test_the_seeds_of_a_system_are_pooled_for_every_metric(tmp_path):
    """Gains of 100, 0 and 50 points; a failed question counts nowhere."""
    before, after = [[0.0, 0.0], [1.0, 1.0], [0.0, None]], [[1.0, 1.0], [1.0, 1.0], [0.5, 1.0]]
    for seed in range(3):
        folder = tmp_path / f"a-{seed}"
        write_trial(folder, *after[seed])
        row = {"asked": "", "scores": {"f1": after[seed], "em": [float(seed), 0.0]}}
        (folder / "trained.json").write_text(json.dumps(row))
        warm = {"warm_start": {"scores": {"f1": before[seed], "em": [0.0, 0.0]}}}
        (folder / "baselines.json").write_text(json.dumps(warm))
    load = lambda system, seed, policy, workdir: JOB  # noqa: E731
    text = seeds.run_trials(["a"], [0, 1, 2], load, {}, tmp_path)
    assert text == (tmp_path / "trials.md").read_text(encoding="utf-8")
    per_seed, _, pooled = text.partition("\n\n")
    assert len(per_seed.splitlines()) == 5
    head, _, f1, em = pooled.splitlines()
    assert head == "| system | metric | seeds | warm start | trained | sd | gain | 95 % |"
    assert f1.startswith("| a | F1 | 3 | 33.33 | 83.33 | 28.87 | 50.0 | 0.00 to 100.00 |")
    assert em.startswith("| a | EM | 3 | 0.0 | 50.0 | 50.0 | 50.0 |")
    one = seeds.over_seeds([("a", tmp_path / "a-1")])
    assert "| a | F1 | 1 | 100.0 | 100.0 |  | 0.0 | 0.00 to 0.00 |" in one
    over = seeds.over_seeds([("a", tmp_path / "a-0")], tmp_path)
    assert over.splitlines()[3].endswith("| 0.0, 0.00 to 0.00 |")


def test_a_metric_that_the_baseline_lacks_has_no_gain_over_it(tmp_path):
    """As when the trials have a judge and the baseline had none."""
    for out, metrics in (("line", ("f1", "judge")), ("tree", ("f1",))):
        write_trial(tmp_path / out / "a-0", 1.0, 0.0)
        row = {"asked": "", "scores": {metric: [1.0, 0.0] for metric in metrics}}
        (tmp_path / out / "a-0" / "trained.json").write_text(json.dumps(row))
        warm = json.dumps({"warm_start": row})
        (tmp_path / out / "a-0" / "baselines.json").write_text(warm)
    table = seeds.over_seeds([("a", tmp_path / "line" / "a-0")], tmp_path / "tree")
    *_, f1, judge = table.splitlines()
    assert f1.endswith("| 0.0, 0.00 to 0.00 |")
    assert "judge" in judge and judge.endswith(" to 0.00 |  |")


def test_an_invalid_baseline_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "quickstart", None)
    with pytest.raises(UserError, match=r"tree/a-0 holds no finished trial.*--out .*tree"):
        compare(tmp_path)
    fewer = types.SimpleNamespace(data=JOB.data, run=types.SimpleNamespace(test_questions=2))
    write_trial(tmp_path / "tree" / "a-0", 0.0, 1.0, job=fewer)
    with pytest.raises(UserError, match=r"tree/a-0 has other held-out questions than .*line"):
        compare(tmp_path)
    write_trial(tmp_path / "line" / "a-0", 0.0, 1.0, 1.0)
    with pytest.raises(UserError, match=r"line/a-0 has other"):  # finished before
        compare(tmp_path, fewer)
    (tmp_path / "tree" / "a-0" / "trained.json").unlink()
    with pytest.raises(UserError, match=r"stored no scores: delete its summary.json"):
        compare(tmp_path, fewer)


def test_a_fingerprint_depends_on_the_order_of_questions():
    questions = seeds.load_data(JOB.data).questions["test"]
    prints = {fingerprint(q) for q in (questions, questions[:-1], questions[::-1])}
    assert len(prints) == 3 and fingerprint(tuple(questions)) in prints


def test_a_fingerprint_needs_no_corpus(tmp_path):
    file = tmp_path / "test.jsonl"
    row = {"id": "1", "question": "who", "golden_answers": ["x"]}
    file.write_text(json.dumps(row) + "\n")
    data = Data(files=FileData(str(tmp_path / "absent"), *[str(file)] * 3))
    job = types.SimpleNamespace(data=data, run=JOB.run)
    assert seeds.held_out_fingerprint(job) == fingerprint([Question("1", "who", ("x",))])
