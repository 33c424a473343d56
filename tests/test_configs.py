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
from tests.jobs import config_job, config_values

FILES = sorted(CONFIGS.glob("**/[!_]*.py"))  # one with an underscore is a part of others
FULL = (*PAPERS, "coda:code", "coda:alone", "mao_arag:code", "mmoa_rag:code", "opera:code")
GIVEN = {"policy": "models/policy", "index.encoder": "models/encoder"}
GIVEN |= {f"data.files.{name}": f"{name}.jsonl" for name in ("corpus", "train", "dev", "test")}
GROUPS = {"objective.critic": "none", "objective.advantage": "group_normalised"}
POOL = {"recipe.expert_pool": "pool.jsonl"}
TAUGHT = {"data.demos": "demos.jsonl"}
DEMOS = {
    "tiny/sft_c3po": TAUGHT,
    "tiny/sft_mao_arag": TAUGHT,
    "warmup_c3po": TAUGHT | {"policy": "models/policy"},
    "real/warm_start": TAUGHT,
}


def given_to(name: str) -> dict[str, str]:
    """The paths that a config of full size leaves to the user."""
    if name in DEMOS or name.startswith(("tiny/", "real/")):
        return DEMOS.get(name, {})
    return GIVEN | (POOL if name.startswith("opera") else {})


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_a_config_loads(file: pathlib.Path, tmp_path: pathlib.Path):
    name = str(file.relative_to(CONFIGS).with_suffix(""))
    if name.startswith("experiments/"):
        return check_experiment(file, tmp_path)
    if name.startswith("claims/"):  # their arms: tests/experiments/test_claims.py
        return
    values = config_values(name, given_to(name))
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


GAINS = [f"gains.py:{x}" for x in ("coda", "search_r1", "real/mmoa_rag", "real/opera")]
SYSTEMS = ("c3po:roles", "mao_arag", "mmoa_rag:roles", "coda:roles", "opera:roles", "search_r1")


@pytest.mark.parametrize("name", GAINS + [f"real.py:{system}" for system in SYSTEMS])
def test_the_gain_of_any_system_over_one_warm_start_is_an_experiment(name, tmp_path):
    """From its own warm start, or with training and imitation from one policy."""
    file = CONFIGS / "experiments" / name
    check_experiment(file, tmp_path)
    arms = load_experiment(file).arms.values()
    starts = [pathlib.Path(arm.warm_up or arm.sft) for arm in arms if arm.warm_up or arm.sft]
    assert len({*starts}) <= 1 and all((CONFIGS.parent / start).is_file() for start in starts)


def test_the_roles_of_an_expert_can_be_overridden():
    roles = {"recipe.expert.roles": "('plan',)", "recipe.expert.period": "8"}
    for name in ("opera", "tiny/opera"):
        expert = config_values(name, given_to(name) | roles)["recipe"]["expert"]
        assert (expert["roles"], expert["period"]) == (("plan",), 8)


def test_the_kl_coefficient_of_mmoa_rag_stays_between_the_bounds_of_its_paper():
    paper, code = (config_values(name, GIVEN) for name in ("mmoa_rag", "mmoa_rag:code"))
    kl = load_job(paper).objective.kl
    assert (kl.coefficient, kl.max_coefficient, kl.min_coefficient) == (0.2, 0.2, 0.06)
    assert load_job(code).objective.kl.max_coefficient == 0  # as TRL's controller


TREES = {name: ast.parse((CONFIGS / f"{name}.py").read_text()) for name in PAPERS}
LINES = [(name, x) for name, t in TREES.items() for x in (ast.get_docstring(t) or "").split("\n")]
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
    values = config_values(name, given_to(name))
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
def test_a_paper_searches_exactly_and_a_path_is_its_own_key_that_is_named_if_it_is_missing(name):
    values = config_values(name, given_to(name))
    job = load_job(values)
    assert (job.policy, job.index.encoder) == ("models/policy", "models/encoder")
    files = ("corpus.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl")
    assert job.data.files == FileData(*files, max_train_per_file=6000 if name == "c3po" else 0)
    pool = "pool.jsonl" if name.startswith("opera") else None
    assert values["recipe"].get("expert_pool") == pool
    for key in given_to(name):
        rest = {k: v for k, v in given_to(name).items() if k != key}
        with pytest.raises(UserError, match=rf"config\.{key} is None.*--config\.{key}=VALUE"):
            config_job(name, rest)
    index = config_job(name, given_to(name)).index
    assert isinstance(index, VectorIndex) and index.kind == "exact"
    given = {key: value for key, value in given_to(name).items() if key != "index.encoder"}
    values = config_values(name, given | {"index.kind": "bm25"})  # as its comment says
    assert load_job(values).index == BM25Index(folder=index.folder)


@pytest.mark.parametrize(
    ("name", "end"), [("c3po", 0.1), ("mmoa_rag", 0.0), ("mmoa_rag:code", 0.0), ("mao_arag", 1.0)]
)
def test_the_learning_rate_ends_as_in_the_framework(name, end):
    job = config_job(name, given_to(name))
    choices = job.optimizer
    taken = job.run.steps * choices.epochs * choices.minibatches
    rate = choices.rate(choices.policy_lr, job.run.steps)(taken)
    assert float(rate) == pytest.approx(end * choices.policy_lr)


@pytest.mark.parametrize("name", ["mmoa_rag", "tiny/mmoa_rag", "real/mmoa_rag", "real/quickstart"])
def test_the_penalty_for_long_answers_can_fire(name):
    """A word needs at least one token, and the stop token is one too."""
    values = config_values(name, given_to(name))["recipe"]
    assert values["penalties"]["max_answer_words"] + 1 < values["system"]["generator_max_tokens"]


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
        job = config_job(name, {"objective.advantage": rule.__name__})
        assert job.credit.func is job.recipe.compare and job.credit.keywords == {"rule": rule}


def test_a_critic_takes_one_rollout_and_a_role_is_compared_across_several():
    job = config_job("tiny/search_r1:ppo")
    assert job.recipe.rollouts == 1 and job.credit is job.recipe.turn_credit
    turn = config_job("tiny/search_r1:ppo", {"objective.gae_span": "turn"})
    assert turn.credit is turn.recipe.credit
    job = config_job("tiny/mmoa_rag", {**GROUPS, "recipe.rollouts": "4"})
    assert job.credit.func is over_roles


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("tiny/c3po:other", {}, r"c3po.py:other: get_config\(\) has no 'other'"),
        ("tiny/c3po", {"system": "json"}, "no Settings"),
        ("tiny/mao_arag", {"objective.gae_span": "conversation"}, "no turn .* continues another"),
        ("tiny/mmoa_rag", GROUPS, r"rollouts 1.*use 2 or more"),
        ("tiny/search_r1", {"recipe.rollouts": "1"}, r"rollouts 1.*use 2 or more"),
        ("tiny/coda", {"judge.kind": "local"}, r"judge.kind is 'local'.* read a judge's verdict"),
        ("tiny/coda", {"shapes.max_new_tokens": "55"}, r"planner .* 56 tokens.*is 55.*raise"),
        ("tiny/opera", {"recipe.system.max_plan_steps": "0"}, r"'plan'.*of analysis, rew"),
        ("tiny/opera", {"schedule.phases": "({'steps':1,'roles':('planner',)},)"}, "'planner'"),
        ("mmoa_rag", GIVEN | {"objective.kl.max_coefficient": "0.01"}, r"0.01, below min_.* 0.06"),
    ],
)
def test_a_choice_that_does_not_fit_the_others_is_refused(name, given, said):
    with pytest.raises(UserError, match=said):
        config_job(name, given)


@pytest.mark.parametrize("name", ["c3po", "coda", "mao_arag", "mmoa_rag", "opera"])
def test_every_batch_size_of_a_config_is_used(name: str):
    shapes = Shapes(**config_values(name)["shapes"])
    used = {shapes.max_batch_size(length) for length in shapes.prompt_lengths}
    assert max(shapes.batch_sizes) in used


def test_an_unknown_metric_is_refused_unless_registered(monkeypatch):
    job = config_job("tiny/coda")
    recipe = dataclasses.replace(job.recipe, metric="mine")
    with pytest.raises(UserError, match=r"metric is 'mine': use one of cover_em, .*METRICS"):
        dataclasses.replace(job, recipe=recipe)
    monkeypatch.setitem(METRICS, "mine", lambda answer, answers: 1.0)
    assert dataclasses.replace(job, recipe=recipe).recipe.metric == "mine"


def test_the_real_configs_train_the_subject_of_each_paper():
    """What configs that only train a reader leave out."""
    jobs = {name: config_job(f"real/{name}") for name in (*PAPERS, "search_r1")}
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
