"""Trials: finished ones are read, and each is a row."""

import json

from jax_ragrl import trials

SUMMARY = {
    "seed": 0,
    "metric": "F1, percent",
    "accuracy": {"direct": 1.0, "warm_start": 20.5, "trained": 30.25},
    "gain": {"mean": 9.75, "ci95": [5.0, 14.5]},
    "wall_s": 600.0,
}


def test_a_finished_trial_is_read_and_the_others_run(tmp_path, monkeypatch):
    (tmp_path / "a-0").mkdir()
    (tmp_path / "a-0" / "summary.json").write_text(json.dumps(SUMMARY))
    ran = []

    def quickstart(job, workdir):
        ran.append((job, workdir.name))
        return SUMMARY | {"seed": 1}

    monkeypatch.setattr(trials, "quickstart", quickstart)
    load = lambda system, seed, workdir: (system, seed)  # noqa: E731
    text = trials.run_trials(["a", "b"], [0, 1], load, tmp_path)
    assert [name for _, name in ran] == ["a-1", "b-0", "b-1"]
    assert text == (tmp_path / "trials.md").read_text() and len(text.splitlines()) == 2 + 4
    assert text.splitlines()[2] == "| a | 0 | F1 | 20.5 | 30.25 | 9.75 | 5.0 to 14.5 | 600.0 |"
