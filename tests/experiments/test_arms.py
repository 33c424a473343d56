"""Laws of experiments with several arms and seeds."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.experiments import arms, stages
from jax_ragrl.experiments.arms import (
    Arm,
    Cell,
    Experiment,
    arm_key,
    cell_values,
    cells_of,
    finished_part,
    run_cells,
    share_of,
    training_cell,
)
from jax_ragrl.experiments.comparison import compare, mean_by_question, page, paired_differences
from jax_ragrl.experiments.pairs import Pair
from jax_ragrl.warmstart.make_demos import demo_settings
from jax_ragrl.warmstart.unfinished import claim_folder

TINY = str(pathlib.Path("configs/tiny/c3po.py").resolve())
SFT = str(pathlib.Path("configs/tiny/sft_c3po.py").resolve())
NO_LABELS = str(pathlib.Path("configs/tiny/tree_grpo.py").resolve())
CHAIN = (
    "recipe.tree.width=1",
    "recipe.tree.router_forcing=sampled",
    "recipe.tree.router_samples=0",
)
TWO = Experiment(
    arms={"tree": Arm(TINY), "chain": Arm(TINY, CHAIN)},
    baseline="chain",
    metrics=("cover_em", "f1"),
    training_seeds=(0, 1),
    world_seeds=(7, 8),
)


def row(scores: np.ndarray, questions: str = "q") -> dict:
    """A finished cell with the same scores in both metrics."""
    values = [None if np.isnan(x) else float(x) for x in scores]
    totals = {"llm_calls": 10.0}
    return {"scores": {"cover_em": values, "f1": values}, "questions": questions, "totals": totals}


def test_cells_are_the_product_of_arms_and_seeds():
    cells = cells_of(TWO)
    assert len(cells) == len(set(cells)) == len({cell.folder for cell in cells}) == 8
    # The baseline comes first, and all arms of a seed before the next seed.
    assert [cell.arm for cell in cells[:2]] == ["chain", "tree"]
    assert [cell.seeds for cell in cells[:3]] == [(0, 7, 0), (0, 7, 0), (0, 8, 0)]


def test_the_seeds_of_training_and_world_are_set_apart(tmp_path: pathlib.Path):
    values = cell_values(TWO, Cell("chain", 3, 9, 5), tmp_path)
    assert values["seed"] == 3 and values["data"]["world"]["seed"] == 9
    assert (
        values["recipe"]["tree"] | {"width": 1, "router_forcing": "sampled"}
        == (values["recipe"]["tree"])
    )
    assert values["run"]["test_questions"] == 400
    warm = dataclasses.replace(TWO.arms["tree"], warm_up="configs/tiny/warmup_coda.py")
    both = dataclasses.replace(TWO, arms={"a": warm, "chain": warm})
    policies = {cell_values(both, Cell(arm, 3, 9, 5), tmp_path)["policy"] for arm in both.arms}
    assert policies == {str(tmp_path / "warmup_coda-s5" / "checkpoint")}  # shared


def test_arms_that_answer_otherwise_share_one_training(tmp_path, monkeypatch):
    calls = []

    def train_and_evaluate(values, folder):
        calls.append(("train", folder.name, values["recipe"]["system"]["top_k"]))
        return row(np.zeros(3))

    def answer_again(values, strategy, run_folder, folder):
        top_k = values["recipe"]["system"]["top_k"]
        calls.append(("answer", folder.name, top_k, strategy, run_folder.name))
        return row(np.ones(3))

    monkeypatch.setattr(arms, "train_and_evaluate", train_and_evaluate)
    monkeypatch.setattr(arms, "answer_again", answer_again)
    more = Arm(TINY, CHAIN, answer_with=("recipe.system.top_k=7",))
    fixed, alone = Arm(TINY, CHAIN, strategy="Planning"), Arm(TINY, strategy="Planning")
    both = Experiment(
        {"more": more, "fixed": fixed, "chain": Arm(TINY, CHAIN), "alone": alone}, "more"
    )
    cells = [cell for cell in cells_of(both) if cell.training == 0]
    for _ in range(2):
        assert set(run_cells(both, cells, tmp_path)) == set(cells)
    of_chain, origin = cells[2].folder, f"{arm_key(Arm(TINY))}-t0-w0-s0"
    assert calls == [
        ("train", of_chain, 4),
        ("answer", cells[0].folder, 7, "", of_chain),
        ("answer", cells[1].folder, 4, "Planning", of_chain),
        ("train", origin, 4),  # an arm that the experiment does not name
        ("answer", cells[3].folder, 4, "Planning", origin),
    ]
    with pytest.raises(UserError, match="baseline is 'c': use the name of an arm"):
        Experiment({"a": Arm(TINY)}, "c")
    wrong = Experiment({"wrong": Arm(TINY, strategy="Guess")}, "wrong")
    with pytest.raises(UserError, match="no fixed strategy 'Guess': use one of 'No Retrieval'"):
        run_cells(wrong, cells_of(wrong), tmp_path / "wrong")
    odd = Experiment({"fixed": fixed, "odd": Arm(TINY, ("recipe.tree.wdth=1",))}, "fixed")
    with pytest.raises(UserError, match="wdth"):
        run_cells(odd, cells_of(odd), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists(), "mistakes cost nothing"


def test_one_share_has_all_cells_of_a_training():
    arms_of = {
        f"{name} {k}": Arm(TINY, over, answer_with=(f"recipe.system.top_k={k}",))
        for name, over in (("tree", ()), ("chain", CHAIN))
        for k in (1, 2)
    }
    experiment = Experiment(arms_of, "tree 1")
    shares = [share_of(experiment, number, 2) for number in (1, 2)]
    assert sorted(cell for share in shares for cell in share) == sorted(cells_of(experiment))
    trained = [{training_cell(experiment, cell) for cell in share} for share in shares]
    assert not trained[0] & trained[1] and len(trained[0]) == len(trained[1]) == 3
    with pytest.raises(UserError, match="share 4/3"):
        share_of(experiment, 4, 3)


def test_an_arm_that_imitates_starts_from_what_it_learned(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(arms, "ensure_warm_up", lambda *given: calls.append(("warm up", *given)))
    imitate = lambda values, *given: calls.append((values["policy"], *given))  # noqa: E731
    monkeypatch.setattr(arms, "ensure_imitation", imitate)

    def train_and_evaluate(values, folder):
        calls.append(values["policy"])
        return row(np.zeros(3))

    monkeypatch.setattr(arms, "train_and_evaluate", train_and_evaluate)
    arm = Arm(TINY, warm_up="configs/tiny/warmup_opera.py", sft=SFT, demos="labels")
    one = Experiment({"a": arm}, "a")
    run_cells(one, cells_of(one)[:1], tmp_path)
    warm, folder = tmp_path / "warmup_opera-s0", tmp_path / "a-t0-w0-s0"
    assert calls == [
        ("warm up", "configs/tiny/warmup_opera.py", 0, warm),
        (str(warm / "checkpoint"), SFT, "labels", folder),
        str(folder / "imitation" / "checkpoint"),
    ]
    with pytest.raises(UserError, match="demos is 'me': use policy or labels"):
        Arm(TINY, demos="me")


@pytest.fixture
def stages_without_training(monkeypatch):
    """Every stage saves its config as usual, and trains nothing; returns the list of the stages."""
    names = []

    def warm_up(values, out):
        names.append(out.name)
        claim_folder(values, out)
        return {}

    def make_demos(values, out, writer, count):
        save_config(out.with_suffix(".config.json"), demo_settings(values, writer), renew=True)

    def warm_start(run, out):
        names.append(out.name)
        claim_folder(dataclasses.asdict(run) | {"demos": 7}, out)
        (out / "checkpoint").mkdir()

    def evaluate(values, *rest):
        names.append(rest[-1].name)
        save_config(rest[-1] / "config.json", values, renew=True)
        return row(np.zeros(3))

    for name, stage in (("warm_up", warm_up), ("make_demos", make_demos)):
        monkeypatch.setattr(stages, name, stage)
    monkeypatch.setattr(stages, "warm_start", warm_start)
    monkeypatch.setattr(arms, "train_and_evaluate", evaluate)
    monkeypatch.setattr(arms, "answer_again", evaluate)
    return names


def copy_configs(folder: pathlib.Path) -> dict[str, str]:
    """Copies a config of each kind, and returns their paths by the key of an arm."""
    sources = {"config": "c3po", "warm_up": "warmup_opera", "sft": "sft_c3po"}
    folder.mkdir(exist_ok=True)
    for key, name in sources.items():
        text = (pathlib.Path(TINY).parent / f"{name}.py").read_text()
        (folder / f"{key}.py").write_text(text)
    return {key: str(folder / f"{key}.py") for key in sources}


def change_config(file: str, key: str, value: object) -> None:
    path = pathlib.Path(file)
    text = path.read_text().replace("def get_config", "def former_config")
    lines = ("def get_config():", "    config = former_config()", f"    config.{key} = {value!r}")
    path.write_text("\n".join([text, "", *lines, "    return config", ""]))


def one_arm(**changes) -> Experiment:
    return Experiment({"a": Arm(**changes)}, "a", training_seeds=(0,))


def check_refused(experiment: Experiment, out: pathlib.Path, key: str) -> None:
    """Asserts that both readers of finished cells refuse those in `out`, and name a key."""
    message = rf"another config \(config\.{key} differs: it is .*, and was .*\).*another --out"
    with pytest.raises(UserError, match=message):
        run_cells(experiment, cells_of(experiment), out)
    with pytest.raises(UserError, match=message):
        finished_part(experiment, out)


def test_finished_cells_of_another_config_are_refused(tmp_path, stages_without_training):
    files, out = copy_configs(tmp_path / "configs"), tmp_path / "out"
    config = files["config"]
    done = one_arm(config=config, answer_with=("recipe.system.top_k=7",))
    rows = run_cells(done, cells_of(done), out)
    stages_without_training.clear()
    # Equal configs are accepted.
    assert run_cells(done, cells_of(done), out) == finished_part(done, out)[1] == rows
    other = Arm(config, ("recipe.tree.width=1",), answer_with=("recipe.system.top_k=7",))
    check_refused(dataclasses.replace(done, arms={"a": other}), out, "recipe.tree.width")
    check_refused(dataclasses.replace(done, test_questions=5), out, "run.test_questions")
    one = Arm(config, answer_with=("recipe.system.top_k=7",), strategy="Planning")
    check_refused(dataclasses.replace(done, arms={"a": one}), out, "strategy")
    # The schedule of the training is only in its own config.
    scheduled = Arm(config, ("train_forced=False",), answer_with=("recipe.system.top_k=7",))
    check_refused(dataclasses.replace(done, arms={"a": scheduled}), out, "train_forced")
    change_config(config, "optimizer.policy_lr", 0.5)
    check_refused(done, out, "optimizer.policy_lr")
    assert not stages_without_training


@pytest.mark.parametrize(
    ("stage", "key", "value"),
    [("warm_up", "learning_rate", 0.5), ("sft", "optimizer.policy_lr", 0.5), ("demos", "", "")],
)
def test_finished_cells_of_another_warm_up_or_imitation_are_refused(
    stage, key, value, tmp_path, stages_without_training
):
    files = copy_configs(tmp_path / "configs")
    done = one_arm(**files)
    run_cells(done, cells_of(done), tmp_path / "out")
    assert stages_without_training == ["warm_up-s0", "imitation", "a-t0-w0-s0"]
    # A finished experiment may move.
    out = (tmp_path / "out").rename(tmp_path / "moved")
    assert run_cells(done, cells_of(done), out) == finished_part(done, out)[1]
    if stage == "demos":
        return check_refused(one_arm(**files, demos="labels"), out, "writer.name")
    change_config(files[stage], key, value)
    check_refused(done, out, key)
    assert len(stages_without_training) == 3


def test_an_unfinished_cell_takes_no_stage_of_another_config(tmp_path, stages_without_training):
    files, out = copy_configs(tmp_path / "configs"), tmp_path / "out"
    done = one_arm(**files)
    run_cells(done, cells_of(done), out)
    (out / "a-t0-w0-s0" / "cell.json").unlink()
    with pytest.raises(UserError, match=r"writer\.name differs"):
        run_cells(one_arm(**files, demos="labels"), cells_of(done), out)
    change_config(files["warm_up"], "learning_rate", 0.5)
    with pytest.raises(UserError, match=r"warm_up-s0 holds .*learning_rate differs"):
        run_cells(done, cells_of(done), out)


def test_warm_ups_of_equal_file_names_are_not_shared(tmp_path, stages_without_training):
    configs = [copy_configs(tmp_path / name) for name in "ab"]
    first, second = (files["warm_up"] for files in configs)
    warm_up_of = {"x": first, "y": second, "z": first}
    named = {name: Arm(TINY, warm_up=file) for name, file in warm_up_of.items()}
    both = Experiment(named, "y", training_seeds=(0,))
    run_cells(both, cells_of(both), tmp_path / "out")
    warm_ups = [name for name in stages_without_training if "-t0-" not in name]
    # The first arm has the folder of an experiment without the second one.
    assert len(warm_ups) == 2 and "warm_up-s0" in warm_ups
    policies = [cell_values(both, Cell(x, 0, 0, 0), tmp_path)["policy"] for x in named]
    assert policies[0] == policies[2] == str(tmp_path / "warm_up-s0" / "checkpoint")
    assert policies[1] != policies[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"warm_up": "nope.py"}, "nope.py"),
        ({"warm_up": TINY}, "stages"),
        ({"sft": "nope.py"}, "nope.py"),
        ({"sft": TINY}, "demos"),
        ({"sft": SFT, "demos": "labels:answer"}, "labels:answer is for system mmoa_rag"),
        ({"sft": SFT, "demos": "labels", "config": NO_LABELS}, "no rules for system"),
    ],
)
def test_files_of_all_arms_are_read_before_the_first_training(
    change, said, tmp_path, stages_without_training
):
    two = Experiment(
        {"a": Arm(TINY), "b": Arm(**{"config": TINY, **change})}, "a", training_seeds=(0,)
    )
    with pytest.raises(UserError, match=said):
        run_cells(two, cells_of(two), tmp_path)
    assert not stages_without_training


def test_seeds_that_change_no_cell_are_refused(tmp_path, stages_without_training):
    """A comparison would take the copies of one training for several."""
    copies = dataclasses.replace(one_arm(config=TINY), warm_start_seeds=(0, 1))
    with pytest.raises(UserError, match=r"\(0, 0, 0\) and \(0, 0, 1\) .* give equal cells"):
        run_cells(copies, cells_of(copies), tmp_path)
    assert not stages_without_training


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("f11", "no metric 'f11': use one of .*f1.*retrieval_calls"),
        ("mistake=misraed", "use one of .*mistake=misread"),
        ("training:los", "no metric 'training:los'"),
        ("training:reward/mean", "b shares the training of another arm"),
    ],
)
def test_metrics_of_an_experiment_are_checked_when_it_is_read(metric, said):
    shared = {"a": Arm(TINY), "b": Arm(TINY, answer_with=("recipe.system.top_k=7",))}
    with pytest.raises(UserError, match=said):
        Experiment(shared, "a", metrics=("f1", metric))


def test_the_cells_of_recorded_results_keep_their_names():
    """Those of docs/data/claims.json, computed before arms had further fields."""
    arm = Arm("configs/tiny/mao_arag.py", (), "configs/tiny/warmup_mao_arag.py")
    assert arm_key(arm) == "mao_arag-72c35321"
    assert arm_key(dataclasses.replace(arm, overrides=("run.steps=0",))) == "mao_arag-3ca07a6c"
    changed = {"sft": "a.py", "demos": "labels", "answer_with": ("a=1",), "strategy": "AG"}
    keys = [arm_key(dataclasses.replace(arm, **{name: x})) for name, x in changed.items()]
    assert len({*keys, "mao_arag-72c35321"}) == 5


def test_finished_cells_are_compared_before_the_last_one_is(tmp_path: pathlib.Path):
    odd = dataclasses.replace(TWO, arms=TWO.arms | {"later": Arm(TINY)})
    with pytest.raises(UserError, match="no finished cell of the baseline chain"):
        finished_part(odd, tmp_path)
    scores = {cell: np.full(3, cell.arm == "tree") for cell in rows_of(0.1)}
    cells = [Cell("chain", 0, 7, 0), Cell("tree", 0, 7, 0), Cell("tree", 1, 8, 0)]
    # An arm that shares no seeds with the baseline cannot be compared.
    for cell in [*cells, Cell("later", 1, 7, 0)]:
        (tmp_path / cell.folder).mkdir()
        text = json.dumps(row(scores.get(cell, np.zeros(3))))
        (tmp_path / cell.folder / "cell.json").write_text(text)
    part, rows = finished_part(odd, tmp_path)
    assert set(part.arms) == {"tree", "chain"} and set(rows) == set(cells)
    result = compare(part, rows)
    assert [c["cells"] for c in result["comparisons"]] == [1, 1]
    assert result["arms"]["tree"]["cells"] == 2


def rows_of(difference: float, seeds: int = 4, noise: float = 0.2) -> dict[Cell, dict]:
    """Cells of both arms; the tree is better by `difference` on average."""
    rng, rows = np.random.default_rng(0), {}
    for seed in range(seeds):
        base = rng.random(200)
        rows[Cell("chain", seed, 7, 0)] = row(base)
        rows[Cell("tree", seed, 7, 0)] = row(base + difference + rng.normal(0, noise, 200))
    return rows


def test_a_difference_is_found_with_an_adjusted_p_value_and_an_equal_arm_is_not():
    clear = compare(TWO, rows_of(0.1))["comparisons"][0]
    assert clear["verdict"] == "higher" and clear["mean"] == pytest.approx(10, abs=1.5)
    assert clear["ci95"][0] < 10 < clear["ci95"][1] and clear["cells"] == 4
    rows = rows_of(0.1)
    rows[Cell("tree", 0, 7, 0)]["scores"]["f1"][3] = None  # failed questions do not count
    assert compare(TWO, rows)["comparisons"][1]["verdict"] == "higher"
    assert compare(TWO, rows_of(-0.1))["comparisons"][0]["verdict"] == "lower"
    equal = compare(TWO, rows_of(0.0))["comparisons"][0]
    assert equal["verdict"] == f"undecided (could be seen: {equal['detectable']:.2f})"
    comparison = compare(TWO, rows_of(0.0, noise=0.0))["comparisons"][0]
    assert np.isnan(comparison["detectable"])
    assert comparison["verdict"] == "undecided (could be seen: unknown)"
    comparisons = compare(TWO, rows_of(0.04))["comparisons"]
    assert len(comparisons) == 2
    for comparison in comparisons:
        assert 0 < comparison["p"] < 0.1
        assert comparison["p_adjusted"] == pytest.approx(2 * comparison["p"], abs=2e-5)


@pytest.mark.parametrize(
    ("shifts", "verdict"), [((1.8, 1.9, 7.6), "undecided"), ((4.0, 4.2, 4.4), "higher")]
)
def test_three_seeds_that_agree_in_sign_alone_decide_nothing(shifts, verdict):
    """Many questions do not make up for few seeds: Student's t of the first has p = 0.19."""
    rows = {
        Cell(arm, seed, 7, 0): row(np.tile((0.4, 0.6), 100) + 0.01 * shift * (arm == "tree"))
        for seed, shift in enumerate(shifts)
        for arm in ("chain", "tree")
    }
    comparison = compare(TWO, rows)["comparisons"][0]
    assert comparison["verdict"].startswith(verdict)
    assert comparison["mean"] == pytest.approx(np.mean(shifts))


def test_only_equal_seeds_and_equal_questions_are_paired_in_the_rows_of_a_page():
    rows = rows_of(0.1)
    del rows[Cell("tree", 3, 7, 0)]
    assert len(paired_differences(Pair("tree", "chain"), rows)) == 3
    for arm in ("tree", "chain"):  # one of them, and then both: the file changed between two seeds
        rows[Cell(arm, 0, 7, 0)]["questions"] = "others"
        with pytest.raises(UserError, match="tree and chain answered other test questions"):
            compare(TWO, rows)
    with pytest.raises(UserError, match="no metric 'em': use one of cover_em, f1"):
        paired_differences(Pair("tree", "chain", "em"), rows_of(0.1))
    result = compare(TWO, rows_of(0.1))
    text = page(json.loads(json.dumps(result)))
    assert "| arm | cells | cover-EM | F1 | llm_calls |" in text
    assert "| F1 | tree over chain | +" in text and text.count("\n| ") == 2 + 1 + 2 + 1 + 1


def test_questions_of_different_worlds_are_different_units():
    nan = float("nan")
    differences = {
        (0, 7, 0): np.array([1.0, 0.0, nan]),
        (1, 7, 0): np.array([0.0, 0.0, 1.0]),
        (0, 8, 0): np.array([0.5, nan, 0.25]),
    }
    np.testing.assert_array_equal(mean_by_question(differences), [0.5, 0.0, 0.5, 0.25])
