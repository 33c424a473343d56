"""Every config of the project loads as the command line loads it, and its sections are read."""

import ast
import dataclasses
import pathlib
import shlex
import typing
from collections.abc import Mapping
from typing import Any

import pytest

from jax_ragrl.cli.main import CONFIGS, PAPERS, load_config, main
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.table import changed
from jax_ragrl.learner.objective import GROUPED
from jax_ragrl.run.config import FileData, load_job, system_module
from jax_ragrl.run.evaluate import METRICS
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.warmstart.demos import load_warm_start
from jax_ragrl.warmstart.finetune import load_finetune
from jax_ragrl.warmstart.warmup import load_warmup

FILES = sorted(CONFIGS.glob("**/*.py"))
FULL = (*PAPERS, "coda:code", "coda:alone", "mao_arag:code", "mmoa_rag:code", "opera:code")
TINY = [f"tiny/{file.stem}" for file in FILES if file.parent.name == "tiny"]
PRESETS = ("tiny/one_module:bgm", "tiny/search_r1:ppo")
GIVEN = {
    "policy": "models/policy",
    "index.encoder": "models/encoder",
    "data.files.corpus": "corpus.jsonl",
    "data.files.train": "train.jsonl",
    "data.files.dev": "dev.jsonl",
    "data.files.test": "test.jsonl",
}
POOL = {"recipe.pool": "pool.jsonl"}
TAUGHT = {"data.demos": "demos.jsonl"}
DEMOS = {"tiny/sft_c3po": TAUGHT, "warmup_c3po": TAUGHT | {"policy": "models/policy"}}


def given_to(name: str) -> dict[str, str]:
    """What a user has to name in a config of full size."""
    if name in DEMOS or name.startswith("tiny/"):
        return DEMOS.get(name, {})
    return GIVEN | (POOL if name.startswith("opera") else {})


def load(name: str, given: dict[str, str]) -> dict:
    file, _, preset = name.partition(":")
    config = f"--config={CONFIGS / file}.py" + (f":{preset}" if preset else "")
    return load_config(None, [config, *(f"--config.{k}={v}" for k, v in given.items())])


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_a_config_loads(file: pathlib.Path):
    name = str(file.relative_to(CONFIGS).with_suffix(""))
    values = load(name, given_to(name))
    if name in DEMOS:
        assert load_warm_start(values).data.demos == "demos.jsonl"
        return
    if file.stem.startswith("warmup"):
        config, lesson = load_warmup(values)
        assert all(lesson.teacher(stage.teacher) for stage in config.stages)
        return
    if "rows" in values:
        assert load_finetune(values).steps > 0
        return
    job = load_job(values)
    roles = job.recipe.system.roles
    assert job.temperature > 0 and job.schedule.roles(0, tuple(roles))
    assert file.read_text(encoding="utf-8").count("ragrl ") >= 1, "a config says how it is run"


def left_out(cls: type, values: Mapping[str, Any], where: str) -> list[str]:
    """The plain fields of a dataclass, and of those inside it, that a config section has not."""
    hints, missing = typing.get_type_hints(cls), list[str]()
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            missing += left_out(hint, values.get(name, {}), f"{where}.{name}")
        elif name not in values:
            missing.append(f"{where}.{name}")
    return missing


@pytest.mark.parametrize("name", (*FULL, *TINY, *PRESETS))
def test_every_choice_of_a_recipe_is_a_key_that_can_be_overridden(name):
    """A config is locked: what it does not name cannot be set on the command line."""
    values = load(name, given_to(name))
    if "run" not in values:
        return  # a warm-up, or a reader that learns from rows
    assert not left_out(system_module(values["system"]).Settings, values["recipe"], "recipe")


def test_an_experts_roles_are_set_on_the_command_line():
    roles = {"recipe.expert.roles": "('plan',)", "recipe.expert.period": "8"}
    for name in ("opera", "tiny/opera"):
        expert = load(name, given_to(name) | roles)["recipe"]["expert"]
        assert (expert["roles"], expert["period"]) == (("plan",), 8)


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
def test_an_ablation_that_a_config_names_is_another_run_than_its_own(name, overrides):
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
def test_a_change_that_a_config_names_makes_another_system_of_a_run(name, overrides):
    values = load(name, given_to(name))
    made = changed(values, overrides).recipe.evaluated
    assert made != load_job(values).recipe.evaluated
    assert {role.policy for role in made.roles.values()} <= set(load_job(values).policy_of.values())
    assert {about for about, _ in CHANGES} == {"coda", "opera"}


def test_a_tiny_config_whose_roles_the_shipped_policy_does_not_know_begins_with_a_warm_up():
    for name in set(PAPERS) - {"c3po"}:
        text = (CONFIGS / f"tiny/{name}.py").read_text(encoding="utf-8")
        assert f"configs/tiny/warmup_{name}.py" in text
        assert f"--config.policy=runs/warm-{name}/checkpoint" in text


@pytest.mark.parametrize("name", FULL)
def test_what_a_user_names_lands_under_its_own_key(name):
    values = load(name, given_to(name))
    job = load_job(values)
    assert (job.policy, job.index.encoder) == ("models/policy", "models/encoder")
    files = ("corpus.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl")
    assert job.data.files == FileData(*files, train_each=6000 if name == "c3po" else 0)
    pool = "pool.jsonl" if name.startswith("opera") else None
    assert values["recipe"].get("pool") == pool


@pytest.mark.parametrize(
    ("name", "end"), [("c3po", 0.1), ("mmoa_rag", 0.0), ("mmoa_rag:code", 0.0), ("mao_arag", 1.0)]
)
def test_a_papers_rate_ends_where_that_of_its_framework_does(name, end):
    job = load_job(load(name, given_to(name)))
    choices = job.optimizer
    taken = job.run.steps * choices.epochs * choices.minibatches
    rate = choices.rate(choices.policy_lr, job.run.steps)(taken)
    assert float(rate) == pytest.approx(end * choices.policy_lr)


def test_what_c3po_leaves_open_is_the_default_of_its_trainer():
    """OpenRLHF at the time: train_ppo.py."""
    job = load_job(load("c3po", GIVEN))
    choices, o = job.optimizer, job.objective
    assert (choices.b1, choices.b2, choices.max_grad_norm, choices.epochs) == (0.9, 0.95, 1.0, 1)
    assert (o.eps_low, o.eps_high, o.value_loss, o.value_clip) == (0.2, 0.2, "clipped", 0.2)
    assert (o.gamma, o.lam, o.kl.where, o.kl.target) == (1.0, 0.95, "reward", 0.0)
    for peak in (choices.policy_lr, choices.value_lr):
        rate, risen = choices.rate(peak, 1000), 30
        assert [float(rate(i)) for i in (risen // 2, risen)] == pytest.approx([peak / 2, peak])


@pytest.mark.parametrize("name", FULL)
def test_what_a_user_leaves_out_is_named(name):
    for key in given_to(name):
        rest = {k: v for k, v in given_to(name).items() if k != key}
        with pytest.raises(UserError, match=rf"config\.{key} is None.*--config\.{key}=VALUE"):
            load_job(load(name, rest))


def test_demonstrations_that_a_user_leaves_out_are_named():
    with pytest.raises(UserError, match=r"data\.demos is None.*--config\.data\.demos=VALUE"):
        load_warm_start(load("warmup_c3po", {"policy": "models/policy"}))


def test_the_warm_start_of_c3po_is_that_of_its_table_6():
    run = load_warm_start(load("warmup_c3po", DEMOS["warmup_c3po"]))
    peak, steps = run.optimizer.policy_lr, 1000
    assert (run.epochs, run.batch, peak, run.layout.lengths[-1]) == (3, 512, 4e-5, 4096)
    rate = run.optimizer.rate(peak, steps)
    assert [float(rate(i)) for i in (15, 30, steps)] == pytest.approx([peak / 2, peak, 0.0])


def test_a_judge_that_no_reward_would_hear_is_refused():
    values = load("tiny/coda", {}) | {"judge": {"kind": "local"}}
    with pytest.raises(UserError, match=r"judge.kind is 'local'.*takes no judge's verdict"):
        load_job(values)


def test_shapes_that_would_cut_an_action_are_refused():
    values = load("tiny/coda", {"shapes.steps": "55"})
    with pytest.raises(UserError, match=r"role planner may write 56 tokens.*steps is 55.*raise"):
        load_job(values)


def test_a_missing_path_is_one_line_and_exit_code_2(tmp_path, capsys):
    given = [f"--config.{k}={v}" for k, v in GIVEN.items() if k != "policy"]
    workdir = f"--workdir={tmp_path / 'w'}"
    assert main(["train", f"--config={CONFIGS / 'c3po.py'}", workdir, *given]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ragrl: config key config.policy is None") and "\n" not in line
    assert not (tmp_path / "w").exists()


def test_a_pool_is_made_before_there_is_one(tmp_path, capsys):
    """The command gets as far as the questions, which are not there."""
    given = [f"--config.{k}={tmp_path / v}" for k, v in GIVEN.items()]
    out = f"--out={tmp_path / 'pool.jsonl'}"
    assert main(["pool", f"--config={CONFIGS / 'opera.py'}", out, *given]) == 2
    line = capsys.readouterr().err.strip()
    assert str(tmp_path / "train.jsonl") in line and "recipe.pool" not in line


@pytest.mark.parametrize("name", ["tiny/coda", "tiny/opera", "tiny/search_r1", "tiny/tree_grpo"])
def test_a_group_rule_is_applied_or_refused(name):
    known = load_job(load(name, {})).recipe.advantages
    for rule in GROUPED:
        values = load(name, {"objective.advantage": rule})
        if rule in known:
            job = load_job(values)
            assert job.credit is job.recipe.advantages[rule]
            continue
        with pytest.raises(UserError, match=rf"advantage is '{rule}'.*use {' or '.join(known)}"):
            load_job(values)


@pytest.mark.parametrize("name", ["tiny/c3po", "tiny/mao_arag"])
def test_a_return_is_no_advantage(name):
    values = load(name, {"objective.critic": "none", "objective.advantage": "group_normalised"})
    with pytest.raises(UserError, match="use gae or whitened_gae"):
        load_job(values)
    critic = {"objective.critic": "own", "objective.advantage": "gae"}
    with pytest.raises(UserError, match="advantage is 'gae'"):
        load_job(load("tiny/coda", critic))


def test_a_rollout_without_a_critic_needs_another():
    """Search-R1: groups for GRPO, a critic for PPO, one after the other or over conversations."""
    with pytest.raises(UserError, match=r"rollouts 1.*use 2 or more"):
        load_job(load("tiny/search_r1", {"recipe.rollouts": "1"}))
    job = load_job(load("tiny/search_r1:ppo", {}))
    assert job.recipe.rollouts == 1 and job.credit is job.recipe.turns
    turn = load_job(load("tiny/search_r1:ppo", {"objective.span": "turn"}))
    assert turn.credit is turn.recipe.advantages["whitened_gae"]


def test_a_role_of_mmoa_rag_is_compared_where_there_are_several_rollouts():
    groups = {"objective.critic": "none", "objective.advantage": "group_normalised"}
    job = load_job(load("tiny/mmoa_rag", {**groups, "recipe.rollouts": "4"}))
    assert job.credit is job.recipe.advantages["group_normalised"]
    with pytest.raises(UserError, match=r"rollouts 1.*use 2 or more"):
        load_job(load("tiny/mmoa_rag", groups))


@pytest.mark.parametrize(
    ("preset", "role", "reward"), [("rrr", "rewriter", "em_f1_hit"), ("bgm", "selector", "f1")]
)
def test_one_module_is_trained_before_a_frozen_reader(preset, role, reward):
    values = load(f"tiny/one_module:{preset}", {})
    assert values["recipe"]["reward"] == reward and set(load_job(values).policy_of) == {role}


def test_turns_that_continue_none_are_no_conversation():
    values = load("tiny/mao_arag", {})
    values["objective"]["span"] = "conversation"
    with pytest.raises(UserError, match=r"no turn of this system continues another"):
        load_job(values)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"system": "json"}, "no Settings"),
        ({"run.save_every": 0}, "run.save_every is 0"),
        ({"run.eval_every": 0}, "run.eval_every is 0"),
        ({"run.questions": 0}, "run.questions is 0"),
        ({"run.steps": -1}, "run.steps is -1"),
    ],
)
def test_what_no_run_can_do_is_refused_before_it_begins(given, said):
    with pytest.raises(UserError, match=said):
        load_job(load("tiny/c3po", given))


@pytest.mark.parametrize("name", ["c3po", "coda", "mao_arag", "mmoa_rag", "opera"])
def test_a_papers_config_has_no_batch_size_that_is_never_used(name: str):
    values = load_config(CONFIGS / f"{name}.py", [])["shapes"]
    shapes = Shapes(**values)
    used = {shapes.most(length) for length in shapes.lengths}
    assert max(shapes.batches) in used


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recipe.max_steps": "0"}, "schedule names role 'plan': use some of analysis, rewrite"),
        ({"schedule.phases": "({'steps':1,'roles':('planner',)},)"}, "names role 'planner'"),
        (
            {"objective.aggregation": "role_sum", "objective.role_weights": "(('x',1.0),)"},
            "role_weights is 'x'",
        ),
    ],
)
def test_a_role_that_is_not_there_is_refused_before_anything_is_loaded(given, said):
    with pytest.raises(UserError, match=said):
        load_job(load("tiny/opera", given))


@pytest.mark.parametrize("key", ["compute", "remat", "attention", "llm.kind"])
def test_a_word_that_is_none_of_those_known_is_refused_before_anything_is_made(key):
    with pytest.raises(UserError, match=rf"{key} is 'ful': use one of \w+, \w+"):
        load_job(load("tiny/c3po", {key: "ful"}))


def test_a_metric_that_is_not_there_is_refused_before_training_and_may_be_ones_own(monkeypatch):
    job = load_job(load("tiny/coda", {}))
    recipe = dataclasses.replace(job.recipe, metric="mine")
    with pytest.raises(UserError, match=r"metric is 'mine': use one of cover_em, .*METRICS"):
        dataclasses.replace(job, recipe=recipe)
    monkeypatch.setitem(METRICS, "mine", lambda answer, answers: 1.0)
    assert dataclasses.replace(job, recipe=recipe).recipe.metric == "mine"
