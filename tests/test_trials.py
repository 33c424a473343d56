"""Trials: finished ones are read, and each is a row."""

import json

from jax_ragrl import trials

SUMMARY = {
    "seed": 0,
    "gains": {"f1": {"trained": 30.25, "mean": 9.75, "ci95": [5.0, 14.5]}},
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
    load = lambda system, seed, policy, workdir: (system, seed, policy)  # noqa: E731

    def warm(system, folder):
        folder.mkdir(parents=True, exist_ok=True)
        warmed.append(system)
        return {"step": 1} if system == "b" else None

    warmed = []
    text = trials.run_trials(["a", "b"], [0, 1], load, warm, tmp_path)
    start = str(tmp_path / "b-warm" / "checkpoint")
    assert ran == [(("a", 1, ""), "a-1"), (("b", 0, start), "b-0"), (("b", 1, start), "b-1")]
    trials.run_trials(["b"], [], load, warm, tmp_path)
    assert warmed == ["a", "b"]  # a finished warm-up is not repeated
    assert text == (tmp_path / "trials.md").read_text() and len(text.splitlines()) == 2 + 4
    assert text.splitlines()[2] == "| a | 0 | 20.5 | 30.25 | 9.75 | 5.0 to 14.5 | 600.0 |"
