"""Every config of the project loads as the command line loads it, and its sections are read."""

import ast
import dataclasses
import pathlib
import shlex

import pytest

from jax_ragrl.cli.main import CONFIGS, load_config, main
from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import over_roles
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.table import job_with_overrides
from jax_ragrl.experiments.arms import cell_values, cells_of, load_experiment
from jax_ragrl.experiments.stages import fixed_strategy
from jax_ragrl.retrieval.kinds import BM25Index, VectorIndex
from jax_ragrl.run.config import FileData
from jax_ragrl.run.load import load_job
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.registry import PAPERS
from jax_ragrl.text.metrics import METRICS
from jax_ragrl.warmstart.demos import load_warm_start
from jax_ragrl.warmstart.finetune import load_finetune
from jax_ragrl.warmstart.warmup import load_warmup

FILES = sorted(CONFIGS.glob("**/[!_]*.py"))  # one with an underscore is a part of others
FULL = (*PAPERS, "coda:code", "coda:alone", "mao_arag:code", "mmoa_rag:code", "opera:code")
TINY = [f"tiny/{file.stem}" for file in FILES if file.parent.name == "tiny"]
GIVEN = {
    "policy": "models/policy",
    "index.encoder": "models/encoder",
    "data.files.corpus": "corpus.jsonl",
    "data.files.train": "train.jsonl",
    "data.files.dev": "dev.jsonl",
    "data.files.test": "test.jsonl",
}
POOL = {"recipe.expert_pool": "pool.jsonl"}
TAUGHT = {"data.demos": "demos.jsonl"}
DEMOS = {
    "tiny/sft_c3po": TAUGHT,
    "tiny/sft_mao_arag": TAUGHT,
    "warmup_c3po": TAUGHT | {"policy": "models/policy"},
    "smollm2/warm_start": TAUGHT,
    "real/warm_start": TAUGHT,
}


def given_to(name: str) -> dict[str, str]:
    """The paths that a config of full size leaves to the user."""
    if name in DEMOS or name.startswith(("tiny/", "smollm2/", "real/")):
        return DEMOS.get(name, {})
    return GIVEN | (POOL if name.startswith("opera") else {})


def load(name: str, given: dict[str, str]) -> dict:
    file, _, preset = name.partition(":")
    config = f"--config={CONFIGS / file}.py" + (f":{preset}" if preset else "")
    return load_config(None, [config, *(f"--config.{k}={v}" for k, v in given.items())])


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_a_config_loads(file: pathlib.Path, tmp_path: pathlib.Path):
    name = str(file.relative_to(CONFIGS).with_suffix(""))
    if name.startswith("experiments/"):
        return check_experiment(file, tmp_path)
    if name.startswith("claims/"):  # their arms: tests/experiments/test_claims.py
        return
    values = load(name, given_to(name))
    if name in DEMOS:
        assert load_warm_start(values).data.demos == "demos.jsonl"
        return
    if file.stem.startswith("warmup"):
        config, lesson = load_warmup(values)
        assert all(lesson.teacher(stage.teacher) for stage in config.stages)
        return
    if "examples" in values:
        assert load_finetune(values).steps > 0
        return
    job = load_job(values)
    roles = job.recipe.system.roles
    assert not (job.recipe.priced and job.objective.advantage == "group_normalised")
    assert job.temperature > 0 and job.schedule.roles(0, tuple(roles))
    assert file.read_text(encoding="utf-8").count("ragrl ") >= 1, "a config says how it is run"


def check_experiment(file: pathlib.Path, folder: pathlib.Path) -> None:
    experiment = load_experiment(file)
    for cell in cells_of(experiment):
        job = load_job(cell_values(experiment, cell, folder) | {"policy": "tiny"})
        strategy = experiment.arms[cell.arm].strategy
        assert not strategy or fixed_strategy(job, strategy)


@pytest.mark.parametrize("name", ["coda", "search_r1", "smollm2/mmoa_rag", "smollm2/opera"])
def test_the_gain_of_any_system_over_its_warm_start_is_an_experiment(name, tmp_path):
    file = CONFIGS / "experiments" / f"gains.py:{name}"
    check_experiment(file, tmp_path)
    arms = load_experiment(file).arms.values()
    starts = [pathlib.Path(arm.warm_up or arm.sft) for arm in arms if arm.warm_up or arm.sft]
    assert len({*starts}) <= 1 and all((CONFIGS.parent / start).is_file() for start in starts)


@pytest.mark.parametrize(
    "name", ["c3po:roles", "mao_arag", "mmoa_rag:roles", "coda:roles", "opera:roles", "search_r1"]
)
def test_training_and_imitation_from_one_policy_is_an_experiment(name, tmp_path):
    check_experiment(CONFIGS / "experiments" / f"real.py:{name}", tmp_path)


@pytest.mark.parametrize("name", FULL)
def test_a_config_of_a_paper_searches_exactly(name):
    index = load_job(load(name, given_to(name))).index
    assert isinstance(index, VectorIndex) and index.kind == "exact"
    given = {key: value for key, value in given_to(name).items() if key != "index.encoder"}
    values = load(name, given | {"index.kind": "bm25"})  # as its comment says
    assert load_job(values).index == BM25Index(folder=index.folder)


def test_the_roles_of_an_expert_can_be_overridden():
    roles = {"recipe.expert.roles": "('plan',)", "recipe.expert.period": "8"}
    for name in ("opera", "tiny/opera"):
        expert = load(name, given_to(name) | roles)["recipe"]["expert"]
        assert (expert["roles"], expert["period"]) == (("plan",), 8)


def test_the_kl_coefficient_of_mmoa_rag_stays_between_the_bounds_of_its_paper():
    paper, code = (load(name, GIVEN) for name in ("mmoa_rag", "mmoa_rag:code"))
    kl = load_job(paper).objective.kl
    assert (kl.coefficient, kl.max_coefficient, kl.min_coefficient) == (0.2, 0.2, 0.06)
    assert load_job(code).objective.kl.max_coefficient == 0  # as TRL's controller
    with pytest.raises(UserError, match=r"max_coefficient is 0.01, below min_coefficient 0.06"):
        load_job(load("mmoa_rag", GIVEN | {"objective.kl.max_coefficient": "0.01"}))


LINES = [
    (name, line)
    for name in PAPERS
    for line in (ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text())) or "").split(
        "\n"
    )
]
ABLATIONS = [(name, tuple(shlex.split(s))) for name, s in LINES if s.startswith("    --config.")]
CHANGES = [
    (name, tuple(word for word in shlex.split(line) if word.startswith("--config.")))
    for name, line in LINES
    if line.startswith("    ragrl evaluate --run")
]


@pytest.mark.parametrize(("name", "overrides"), ABLATIONS)
def test_a_documented_ablation_changes_the_run(name, overrides):
    given = [f"--config.{k}={v}" for k, v in given_to(name).items()]
    own, other = (
        load_job(load_config(CONFIGS / f"{name}.py", [*given, *more])) for more in ((), overrides)
    )
    assert {ablated for ablated, _ in ABLATIONS} == set(PAPERS)
    for job in (own, other):
        roles = tuple(job.recipe.system.roles)
        assert all(job.schedule.roles(step, roles) for step in (0, job.run.steps - 1))
        named = {policy for policy, _ in job.policies}
        assert named <= set(job.policy_of.values()), "load_policies refuses others"
    assert str(own) != str(other)


@pytest.mark.parametrize(("name", "overrides"), CHANGES)
def test_a_documented_change_modifies_the_system(name, overrides):
    values = load(name, given_to(name))
    made = job_with_overrides(values, overrides).recipe.evaluation_system
    assert made != load_job(values).recipe.evaluation_system
    assert {role.policy for role in made.roles.values()} <= set(load_job(values).policy_of.values())
    assert {about for about, _ in CHANGES} == {"coda", "opera"}


def test_a_tiny_config_documents_its_warm_up():
    for name in set(PAPERS) - {"c3po"}:
        text = (CONFIGS / f"tiny/{name}.py").read_text(encoding="utf-8")
        assert f"configs/tiny/warmup_{name}.py" in text
        assert f"--config.policy=runs/warm-{name}/checkpoint" in text


@pytest.mark.parametrize("name", FULL)
def test_a_path_overrides_only_its_own_key(name):
    values = load(name, given_to(name))
    job = load_job(values)
    assert (job.policy, job.index.encoder) == ("models/policy", "models/encoder")
    files = ("corpus.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl")
    assert job.data.files == FileData(*files, max_train_per_file=6000 if name == "c3po" else 0)
    pool = "pool.jsonl" if name.startswith("opera") else None
    assert values["recipe"].get("expert_pool") == pool


@pytest.mark.parametrize(
    ("name", "end"), [("c3po", 0.1), ("mmoa_rag", 0.0), ("mmoa_rag:code", 0.0), ("mao_arag", 1.0)]
)
def test_the_learning_rate_ends_as_in_the_framework(name, end):
    job = load_job(load(name, given_to(name)))
    choices = job.optimizer
    taken = job.run.steps * choices.epochs * choices.minibatches
    rate = choices.rate(choices.policy_lr, job.run.steps)(taken)
    assert float(rate) == pytest.approx(end * choices.policy_lr)


STEPS = {"c3po": (1, 8), "mmoa_rag": (2, 3), "coda": (1, 8), "mao_arag": (1, 1), "opera": (1, 1)}


@pytest.mark.parametrize("name", FULL)
def test_a_paper_config_sets_its_optimizer_steps(name):
    """A default of one step would remove the clip without a word."""
    values = load(name, given_to(name))["optimizer"]
    assert (values["epochs"], values["minibatches"]) == STEPS[name.partition(":")[0]]


def test_opera_has_the_divergence_of_its_equation_4():
    kl = {p: load_job(load(p, given_to(p))).objective.kl for p in ("opera", "opera:code")}
    assert (kl["opera"].where, kl["opera"].estimator) == ("loss", "k2")
    assert kl["opera:code"].estimator == "k3"


def test_c3po_trains_on_every_question_once():
    run = load_job(load("c3po", GIVEN)).run
    assert run.steps * run.questions_per_step == 6 * 6000


@pytest.mark.parametrize("name", ["mmoa_rag", "tiny/mmoa_rag", "smollm2/mmoa_rag", "real/mmoa_rag"])
def test_the_penalty_for_long_answers_can_fire(name):
    """A word needs at least one token, and the stop token is one too."""
    values = load(name, given_to(name))["recipe"]
    assert values["penalties"]["max_answer_words"] + 1 < values["system"]["generator_max_tokens"]


def test_open_choices_of_c3po_are_its_trainers_defaults():
    """OpenRLHF 0.5.6: train_ppo_ray.py."""
    job = load_job(load("c3po", GIVEN))
    choices, o = job.optimizer, job.objective
    assert (choices.b1, choices.b2, choices.max_grad_norm, choices.epochs) == (0.9, 0.95, 1.0, 1)
    assert choices.minibatches == 1024 // 128, "rollout_batch_size, train_batch_size"
    assert (o.eps_low, o.eps_high, o.value_loss, o.value_clip) == (0.2, 0.2, "clipped", 0.2)
    assert (o.gamma, o.lam, o.kl.where, o.kl.target) == (1.0, 0.95, "reward", 0.0)
    for peak in (choices.policy_lr, choices.value_lr):
        rate, risen = choices.rate(peak, 1000), 240
        assert [float(rate(i)) for i in (risen // 2, risen)] == pytest.approx([peak / 2, peak])


@pytest.mark.parametrize("name", FULL)
def test_a_missing_path_is_named(name):
    for key in given_to(name):
        rest = {k: v for k, v in given_to(name).items() if k != key}
        with pytest.raises(UserError, match=rf"config\.{key} is None.*--config\.{key}=VALUE"):
            load_job(load(name, rest))


def test_missing_demonstrations_are_named():
    with pytest.raises(UserError, match=r"data\.demos is None.*--config\.data\.demos=VALUE"):
        load_warm_start(load("warmup_c3po", {"policy": "models/policy"}))


def test_the_warm_start_of_c3po_matches_table_6():
    run = load_warm_start(load("warmup_c3po", DEMOS["warmup_c3po"]))
    peak, steps = run.optimizer.policy_lr, 1000
    assert (run.epochs, run.batch_size, peak, run.packing.row_lengths[-1]) == (3, 512, 4e-5, 4096)
    rate = run.optimizer.rate(peak, steps)
    assert [float(rate(i)) for i in (15, 30, steps)] == pytest.approx([peak / 2, peak, 0.0])


def test_a_judge_without_a_judged_reward_is_refused():
    values = load("tiny/coda", {}) | {"judge": {"kind": "local"}}
    with pytest.raises(UserError, match=r"judge.kind is 'local'.*does not read a judge's verdict"):
        load_job(values)


def test_shapes_that_truncate_an_action_are_refused():
    values = load("tiny/coda", {"shapes.max_new_tokens": "55"})
    with pytest.raises(
        UserError, match=r"role planner may write 56 tokens.*max_new_tokens is 55.*raise"
    ):
        load_job(values)


def test_a_missing_path_is_a_one_line_error(tmp_path, capsys):
    given = [f"--config.{k}={v}" for k, v in GIVEN.items() if k != "policy"]
    workdir = f"--workdir={tmp_path / 'w'}"
    assert main(["train", f"--config={CONFIGS / 'c3po.py'}", workdir, *given]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ragrl: config key config.policy is None") and "\n" not in line
    assert not (tmp_path / "w").exists()


def test_ragrl_pool_needs_no_pool(tmp_path, capsys):
    """The command gets as far as the questions, which are not there."""
    given = [f"--config.{k}={tmp_path / v}" for k, v in GIVEN.items()]
    out = f"--out={tmp_path / 'pool.jsonl'}"
    assert main(["warmup", "pool", f"--config={CONFIGS / 'opera.py'}", out, *given]) == 2
    line = capsys.readouterr().err.strip()
    assert str(tmp_path / "train.jsonl") in line and "recipe.expert_pool" not in line


@pytest.mark.parametrize("name", ["tiny/coda", "tiny/search_r1", "tiny/tree_grpo"])
def test_every_group_rule_is_applied(name):
    for rule in (group_centred, group_normalised, leave_one_out):
        job = load_job(load(name, {"objective.advantage": rule.__name__}))
        assert job.credit.func is job.recipe.compare and job.credit.keywords == {"rule": rule}


@pytest.mark.parametrize("name", ["tiny/c3po", "tiny/mao_arag"])
def test_a_return_is_no_advantage(name):
    values = load(name, {"objective.critic": "none", "objective.advantage": "group_normalised"})
    with pytest.raises(UserError, match="use gae or whitened_gae"):
        load_job(values)
    critic = {"objective.critic": "own", "objective.advantage": "gae"}
    with pytest.raises(UserError, match="advantage is 'gae'"):
        load_job(load("tiny/coda", critic))


def test_a_group_rule_needs_several_rollouts():
    """Search-R1: groups for GRPO, a critic for PPO, one after the other or over conversations."""
    with pytest.raises(UserError, match=r"rollouts 1.*use 2 or more"):
        load_job(load("tiny/search_r1", {"recipe.rollouts": "1"}))
    job = load_job(load("tiny/search_r1:ppo", {}))
    assert job.recipe.rollouts == 1 and job.credit is job.recipe.turn_credit
    turn = load_job(load("tiny/search_r1:ppo", {"objective.gae_span": "turn"}))
    assert turn.credit is turn.recipe.credit


def test_a_role_of_mmoa_rag_is_compared_across_rollouts():
    groups = {"objective.critic": "none", "objective.advantage": "group_normalised"}
    job = load_job(load("tiny/mmoa_rag", {**groups, "recipe.rollouts": "4"}))
    assert job.credit.func is over_roles
    with pytest.raises(UserError, match=r"rollouts 1.*use 2 or more"):
        load_job(load("tiny/mmoa_rag", groups))


@pytest.mark.parametrize(
    ("preset", "role", "reward"), [("rrr", "rewriter", "em_f1_hit"), ("bgm", "selector", "f1")]
)
def test_one_module_is_trained_before_a_frozen_reader(preset, role, reward):
    values = load(f"tiny/one_module:{preset}", {})
    assert values["recipe"]["reward"] == reward and set(load_job(values).policy_of) == {role}


def test_gae_over_conversations_needs_continued_turns():
    values = load("tiny/mao_arag", {})
    values["objective"]["gae_span"] = "conversation"
    with pytest.raises(UserError, match=r"no turn of this system continues another"):
        load_job(values)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"system": "json"}, "no Settings"),
        ({"run.save_every": 0}, "run.save_every is 0"),
        ({"run.eval_every": 0}, "run.eval_every is 0"),
        ({"run.questions_per_step": 0}, "run.questions_per_step is 0"),
        ({"run.steps": -1}, "run.steps is -1"),
    ],
)
def test_impossible_runs_are_refused(given, said):
    with pytest.raises(UserError, match=said):
        load_job(load("tiny/c3po", given))


@pytest.mark.parametrize("name", ["c3po", "coda", "mao_arag", "mmoa_rag", "opera"])
def test_every_batch_size_of_a_config_is_used(name: str):
    values = load_config(CONFIGS / f"{name}.py", [])["shapes"]
    shapes = Shapes(**values)
    used = {shapes.max_batch_size(length) for length in shapes.prompt_lengths}
    assert max(shapes.batch_sizes) in used


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"recipe.system.max_plan_steps": "0"},
            r"schedule names role 'plan'.*: use some of analysis, rewrite",
        ),
        ({"schedule.phases": "({'steps':1,'roles':('planner',)},)"}, "names role 'planner'"),
    ],
)
def test_an_unknown_role_is_refused_before_loading(given, said):
    with pytest.raises(UserError, match=said):
        load_job(load("tiny/opera", given))


@pytest.mark.parametrize("key", ["compute_dtype", "remat", "attention", "llm.kind"])
def test_an_unknown_choice_is_refused_before_loading(key):
    with pytest.raises(UserError, match=rf"{key} is 'ful': use one of \w+, \w+"):
        load_job(load("tiny/c3po", {key: "ful"}))


def test_an_unknown_metric_is_refused_unless_registered(monkeypatch):
    job = load_job(load("tiny/coda", {}))
    recipe = dataclasses.replace(job.recipe, metric="mine")
    with pytest.raises(UserError, match=r"metric is 'mine': use one of cover_em, .*METRICS"):
        dataclasses.replace(job, recipe=recipe)
    monkeypatch.setitem(METRICS, "mine", lambda answer, answers: 1.0)
    assert dataclasses.replace(job, recipe=recipe).recipe.metric == "mine"


def test_the_real_configs_train_the_subject_of_each_paper():
    """What configs that only train a reader leave out."""
    jobs = {name: load_job(load(f"real/{name}", {})) for name in (*PAPERS, "search_r1")}
    assert {(job.index.kind, job.data.files.train) for job in jobs.values()} == {
        ("bm25", "mixture:train")
    }
    system = {name: job.recipe.system for name, job in jobs.items()}
    forced = jobs["c3po"].recipe.expander(frozenset()).forced_actions["router"]
    assert [action.text for action in forced] == ["[No Retrieval]", "[Retrieval]", "[Planning]"]
    assert {"rewriter", "selector", "generator"} == set(system["mmoa_rag"].roles)
    assert system["coda"].max_turns > 2, "several tasks"
    assert {"QDS", "R", "DS", "AG"} == set(system["mao_arag"].executors)
    assert jobs["mao_arag"].objective.advantage == "group_centred"
    assert system["opera"].max_plan_steps > 1 and {"plan", "rewrite"} < set(system["opera"].roles)


def test_a_preset_that_does_not_exist_is_named():
    with pytest.raises(UserError, match=r"c3po.py:other: get_config\(\) has no 'other'"):
        load("tiny/c3po:other", {})
