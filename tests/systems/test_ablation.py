"""Ablations by config: the credit matches the objective, or the config is an error."""

import dataclasses
import functools
import re
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.credit.assign import child_mean, immediate_credit, over_rollouts
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.system import Execution
from jax_ragrl.run.config import Job
from jax_ragrl.run.load import load_job, load_recipe
from jax_ragrl.run.models import initial_models, load_policies
from jax_ragrl.systems import ablation
from jax_ragrl.systems.ablation import with_credit
from jax_ragrl.systems.base import Recipe, masked_credit
from jax_ragrl.training.setup import method_of
from jax_ragrl.training.step import turns_to_train
from tests.conftest import REPO
from tests.jobs import config_job
from tests.rollout.tape import ANN, Tape

GRPO = {
    "objective.critic": "none",
    "objective.advantage": "group_normalised",
    "objective.kl.where": "loss",
    "objective.kl.estimator": "k3",
}
PPO = {"objective.critic": "own", "objective.advantage": "whitened_gae"}


def job(system: str, changes: dict[str, object]) -> Job:
    return config_job(f"tiny/{system}", changes)


@pytest.mark.parametrize(
    ("system", "changes"),
    [
        ("c3po", GRPO | {"credit": "siblings"}),
        ("mmoa_rag", GRPO | {"credit": "rollouts", "rollouts": 4}),
        ("mao_arag", GRPO | {"credit": "rollouts", "rollouts": 4}),
        ("mao_arag", GRPO | {"credit": "roles", "rollouts": 4}),
        ("coda", PPO | {"credit": "reachable_leaves"}),
        ("c3po", {"credit": "child_mean"}),
        ("coda", {"objective.advantage": "leave_one_out", "credit": "rollouts"}),
        ("search_r1", PPO | {"credit": "earned", "objective.gae_span": "conversation"}),
        ("c3po", {"credit": "child_mean", "preference.beta": 0.1}),
    ],
)
def test_the_config_selects_credit_and_rollouts(system, changes):
    result = job(system, changes)
    assert result.recipe.rollouts == changes.get("rollouts", job(system, {}).recipe.rollouts)
    assert result.credit != job(system, {}).credit
    assert (result.preference is not None) == ("preference.beta" in changes)
    rule, name = result.recipe.compare or result.recipe.credit, changes["credit"]
    assert rule.__name__.removeprefix("over_") == name.replace("earned", "immediate_credit")


def test_a_config_names_a_credit_of_ones_own():
    assert job("mmoa_rag", {"credit": "jax_ragrl.credit.assign:child_mean"}).credit is child_mean
    groups = {"credit": "jax_ragrl.credit.assign:over_rollouts", "rollouts": 2}
    assert job("mmoa_rag", GRPO | groups).recipe.compare is over_rollouts


def test_a_credit_returns_two_numbers_per_node():
    result = job("mao_arag", {})
    tape = Tape({"planner": ["QDS"], "sub_planner": ["AG"]}, replies={"decompose_serial": "Who?"})
    forest = collect(result.recipe.system, single_chain, [ANN], tape.environment())
    ones, method = np.ones(len(forest.records), np.float32), method_of(result)
    weights = [(ones, ones * wrong) for wrong in (np.nan, np.inf, -1)]
    texts = ones.astype(str)
    wrong_types = [([*ones], [*ones]), (texts, ones), (ones, texts), (ones * 1j, ones)]
    wrong_values = [None, ones, (ones[1:], ones), (ones * np.nan, ones), *weights, *wrong_types]
    for wrong in wrong_values:
        rule = functools.partial(lambda found, *_: found, wrong)
        for credit in (rule, functools.partial(masked_credit, rule, lambda forest: forest.leaf_N)):
            with pytest.raises(UserError, match="config.credit returned .*return a tuple of two"):
                turns_to_train(method._replace(credit=credit), forest)
    for right in ((ones, ones > 0), (jax.device_put(ones), jax.device_put(ones))):
        assert turns_to_train(method._replace(credit=lambda *_, right=right: right), forest)[0]


@pytest.mark.parametrize("credit", ["rollouts", "roles", "siblings"])
def test_a_comparison_replaces_the_returns(credit):
    own = dataclasses.replace(
        job("mmoa_rag", {}).recipe, rollouts=4, width=4, turn_credit=immediate_credit
    )
    result = with_credit(own, credit, 0)
    assert result.turn_credit is None
    assert result.compare.__name__ == f"over_{credit}" and result.credit is None


CREDIT, RETURNS = "the credit of this system is not made for", "jax_ragrl.credit.returns"
THINK = {"grammar": "strict", "thinking": "on"}


@pytest.mark.parametrize(
    ("system", "changes", "message"),
    [
        *((x, GRPO, f"{CREDIT} it: use gae or whitened_gae") for x in ("c3po", "mao_arag")),
        *((x, PPO, f"is 'whitened_gae', but {CREDIT}") for x in ("coda", "opera", "tree_grpo")),
        ("c3po", {"credit": "luck"}, "use one of own"),
        ("mmoa_rag", {"credit": "nowhere:rule"}, "credit is 'nowhere:rule'.*give module:name"),
        ("mmoa_rag", {"credit": f"{RETURNS}:monte_carlo"}, "called .*parameters are forest and r"),
        ("mmoa_rag", {"credit": f"{RETURNS}:__name__"}, "is not a callable object"),
        ("coda", {"grammar": "tight"}, "one of loose, strict"),
        ("c3po", THINK, "role router has no think tags.*'loose', or thinking 'of"),
        ("mao_arag", THINK, "role planner has no think tags"),
        ("mmoa_rag", THINK, "role rewriter has no think tags"),
        ("opera", THINK, "role plan has no think tags"),
        ("c3po", {"credit": "siblings"}, "use a group rule"),
        ("c3po", GRPO | {"credit": "rollouts"}, "rollouts 1"),
        ("c3po", GRPO | {"credit": "roles"}, "rollouts 1"),
        ("c3po", PPO | {"credit": "shared", "objective.gae_span": "conversation"}, "use 'turn'"),
        ("c3po", PPO | {"credit": "earned", "objective.gae_span": "conversation"}, "use 'turn'"),
        ("c3po", {"rollouts": -1}, "config.rollouts is -1"),
        ("c3po", {"rollouts": True}, "config.rollouts is True"),
        # Preferences need decisions, a reference and the credit of the config.
        ("mmoa_rag", {"preference.beta": 0.1}, "tries one action per decision"),
        ("c3po", {"preference.beta": 0.1, "objective.kl.where": "none"}, "needs a reference"),
        ("c3po", {"preference.beta": 0.1, "credit": "siblings"}, "use a group rule"),
        ("rag_ddr", {"run.role_gradients_every": 2}, "preference pairs is not a sum over roles"),
        *((x, {"run.refill": 1}, "refill is 1, but only with a") for x in ("c3po", "rag_ddr")),
        *((x, {"run.prefer_signal": True}, "but only with a group") for x in ("c3po", "rag_ddr")),
        ("c3po", {"run.staleness": 1}, "staleness is 1, but .*importance_weight_cap is 0"),
        ("c3po", {"run.staleness": 2}, "staleness is 2: use .* at most 1"),
        *((x, {"recipe.rollouts": 1}, "rollouts 1.*use 2 or more") for x in ("coda", "tree_grpo")),
        ("rag_ddr", {"recipe.group_size": 1}, "group_size 1.*use 2 or more"),
        ("search_r1", {"recipe.system.kind": "x"}, "recipe.system.kind is 'x': use one of autor"),
        ("mao_arag", {"recipe.costs.turn_table": "x"}, "turn_table is 'x': use one of code, paper"),
        ("mmoa_rag", {"recipe.penalties.query_rule": "x"}, "'x': use one of count, characters"),
        ("mmoa_rag", {"recipe.reward": "em"}, r"recipe\.reward is 'em': use one of f1, em_f1_hit"),
        ("mmoa_rag", {"recipe.system.modules": "QR+S"}, r"is 'QR\+S': use one of QR\+S\+G"),
        ("opera", {"recipe.gold": "x"}, "recipe.gold is 'x': use one of steps, world"),
        ("opera", {"recipe.plan_reward": "x"}, "plan_reward is 'x': use one of paper, code"),
        ("opera", {"recipe.group_size": 1}, "group_size is 1 .*use 2 or more"),
        ("opera", {"recipe.expert.roles": ("x",)}, "expert.roles is 'x': use one of plan, analy"),
        ("opera", {"recipe.expert.when": "x"}, "expert.when is 'x': use one of always"),
        ("opera", {"recipe.expert.replaces": "x"}, "expert.replaces is 'x': use one of extra"),
        ("opera", {"recipe.expert.continue_with": "x"}, "continue_with is 'x': use one of sampled"),
    ],
)
def test_invalid_choices_and_combinations_are_rejected(system, changes, message):
    with pytest.raises(UserError, match=message):
        job(system, changes)


def test_the_documented_combinations_are_valid():
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    text = "\n".join([ablation.__doc__, *(page.read_text(encoding="utf-8") for page in pages)])
    commands = re.findall(r"--config\.credit=siblings(?:[\s\\]+--config\.[^\s`]+)+", text)
    assert commands
    for command in commands:
        overrides = command.replace("\\", " ").split()
        assert load_job(load_config(CONFIGS / "tiny" / "c3po.py", overrides)).credit


@pytest.mark.parametrize("system", ["c3po", "mmoa_rag", "coda", "mao_arag", "opera"])
def test_a_named_role_has_its_own_policy(system):
    roles = tuple(job(system, {}).policy_of)
    pairs = "(" + ",".join(f"('{role}','tiny')," for role in roles[:1]) + ")"
    first, *others = job(system, {"policies": pairs}).policy_of.items()
    assert first == (roles[0], roles[0])
    assert {policy for _, policy in others} == {"policy"}
    apart = job(system, {"policies": pairs}).recipe
    assert apart.evaluation_system.roles[roles[0]].policy == roles[0]
    shared = job(system, {}).recipe.system
    assert Execution(apart.system, ANN).effects == Execution(shared, ANN).effects


def test_a_policy_without_a_model_starts_from_that_of_the_others():
    router = job("c3po_router", {"policy": "other"})
    assert initial_models(router) == {"policy": "other", "router": "other"}
    assert initial_models(job("c3po_router", {"policies": "(('router','own'),)"})) == {
        "policy": "tiny",
        "router": "own",
    }


def test_every_policy_uses_the_configured_attention_and_needs_a_role():
    policies, _ = load_policies(job("mmoa_rag", {"attention": "xla"}), None)
    assert {policy.config.attention_impl for policy in policies.values()} == {"xla"}
    with pytest.raises(UserError, match="'judge': this system has policy, rewriter, selector"):
        load_policies(job("mmoa_rag", {"policies": "(('judge','tiny'),)"}), None)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (lambda settings: None, "whose recipe returned None: return a Recipe"),
        (lambda settings: 1 / 0, "whose recipe raised ZeroDivisionError.*test_ablation.py, line"),
        (lambda: None, "whose recipe raised TypeError"),
        (lambda settings: Recipe(None, len), "the system NoneType has no style, roles, steps"),
    ],
)
def test_a_module_that_makes_no_recipe_is_named(recipe, message: str, monkeypatch):
    module = SimpleNamespace(Settings=dataclasses.make_dataclass("Settings", ()), recipe=recipe)
    monkeypatch.setitem(sys.modules, "own", module)
    with pytest.raises(UserError, match=message):
        load_recipe({"system": "own"})
