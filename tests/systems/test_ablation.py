"""Systems are crossed by config: the credit is what the objective asks for, or it is an error."""

import dataclasses
import re

import numpy as np
import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.credit.assign import earned
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.tree import Forest, decisions
from jax_ragrl.run.components import load_policies
from jax_ragrl.run.config import Job, load_job
from jax_ragrl.systems.ablation import crossed
from tests.conftest import REPO
from tests.rollout.tape import ANN, Tape

GRPO = {
    "objective.critic": "none",
    "objective.advantage": "group_normalised",
    "objective.kl.where": "loss",
    "objective.kl.estimator": "k3",
}
PPO = {"objective.critic": "own", "objective.advantage": "whitened_gae"}


def job(system: str, given: dict[str, object]) -> Job:
    overrides = [f"--config.{key}={value}" for key, value in given.items()]
    return load_job(load_config(CONFIGS / "tiny" / f"{system}.py", overrides))


@pytest.mark.parametrize(
    ("system", "given"),
    [
        ("c3po", GRPO),
        ("mao_arag", GRPO),
        ("coda", PPO),
        ("coda", {"objective.advantage": "tree_group"}),
        ("opera", {"objective.advantage": "leave_one_out"}),
        ("tree_grpo", {"objective.advantage": "group_normalised"}),
    ],
)
def test_an_objective_that_the_credit_was_not_made_for_is_refused(system, given):
    with pytest.raises(UserError, match="the credit of this system cannot be made"):
        job(system, given)


@pytest.mark.parametrize(
    ("system", "given"),
    [
        ("c3po", GRPO | {"credit": "siblings"}),
        ("mmoa_rag", GRPO | {"credit": "rollouts", "rollouts": 4}),
        ("mao_arag", GRPO | {"credit": "rollouts", "rollouts": 4}),
        ("coda", PPO | {"credit": "reachable_leaves"}),
        ("coda", {"objective.advantage": "leave_one_out", "credit": "rollouts"}),
        ("opera", PPO | {"credit": "earned", "objective.span": "conversation"}),
    ],
)
def test_credit_and_rollouts_are_chosen_by_config(system, given):
    made = job(system, given)
    assert made.recipe.rollouts == given.get("rollouts", job(system, {}).recipe.rollouts)
    assert made.credit != job(system, {}).credit


@pytest.mark.parametrize("credit", ["rollouts", "siblings"])
def test_a_comparison_is_by_the_rule_that_is_named_and_knows_no_turns(credit):
    own = dataclasses.replace(job("mmoa_rag", {}).recipe, rollouts=4, width=4, turns=earned)
    made = crossed(own, credit, 0)
    assert made.turns is None
    assert {name: rule.keywords["rule"].__name__ for name, rule in made.advantages.items()} == {
        name: name for name in ("group_centred", "group_normalised", "leave_one_out")
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"credit": "luck"}, "use one of own"),
        ({"credit": "siblings"}, "use group_centred or group_normalised"),
        (GRPO | {"credit": "rollouts"}, "rollouts 1"),
        (PPO | {"credit": "shared", "objective.span": "conversation"}, "use span 'turn'"),
        ({"rollouts": -1}, "config.rollouts is -1"),
    ],
)
def test_what_cannot_be_crossed_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        job("c3po", given)


def test_the_strategies_of_c3po_are_compared_with_each_other():
    """One of the router's three forced routes answers right: the groups' advantages sum to 0."""
    crossed = job("c3po", GRPO | {"credit": "siblings", "objective.advantage": "group_centred"})
    recipe = crossed.recipe
    told = {"answer_direct": "Ulm", "answer": "Rom", "roadmap": "1. one step"}
    tape = Tape(lambda role, prompt, rng: "Thought: t\nAction: [LLM]", told=told)
    roles = frozenset(recipe.system.roles)
    forest = collect(recipe.system, recipe.expander(roles), [ANN], tape.environment())
    credit_N, weight_N = crossed.credit(forest, recipe.reward(forest))
    groups = [nodes for nodes in decisions(forest) if weight_N[nodes].any()]
    assert groups and any(np.abs(credit_N[nodes]).sum() > 0 for nodes in groups)
    for nodes in groups:
        assert abs(credit_N[nodes].sum()) < 1e-6


CENTRED = GRPO | {"objective.advantage": "group_centred"}
PRICE = {"recipe.costs.alpha": 1.0, "recipe.costs.dollars_unit": 1e-3}


def rolled_out(made: Job, summary: str) -> Forest:
    """Two rollouts of a question, with and without sub-questions; `summary` ends the first."""
    texts = {"planner": ["QDS", "AG"], "sub_planner": ["AG"]}
    told = {"decompose_serial": "Who?", "summarise": summary}
    tape = Tape(texts, told=told)
    return collect(made.recipe.system, once, [ANN], tape.environment(), rollouts=2)


@pytest.mark.parametrize(
    "given",
    [
        PPO | {"credit": "reachable_leaves"},
        CENTRED | {"credit": "rollouts", "rollouts": 2},
    ],
    ids=["reachable_leaves", "rollouts"],
)
def test_a_crossed_credit_does_not_ignore_the_price(given):
    """The scores of answers and the workflows are equal, the price alone is not."""
    made = job("mao_arag", given | PRICE)
    cheap, dear = (rolled_out(made, summary) for summary in ("Ulm", "The Ulm"))
    assert [r.role for r in cheap.records] == [r.role for r in dear.records]
    free = job("mao_arag", given | {"recipe.costs.alpha": 0.0})
    np.testing.assert_array_equal(*(free.recipe.reward(forest) for forest in (cheap, dear)))
    np.testing.assert_array_equal(
        *(free.credit(forest, free.recipe.reward(forest))[0] for forest in (cheap, dear))
    )
    paid = [node for node, record in enumerate(cheap.records) if record.path == (0, 0)]
    rewards = ((forest, made.recipe.reward(forest)) for forest in (cheap, dear))
    low, high = (made.credit(*both)[0][paid] for both in rewards)
    assert len(paid) == 1 and low > high + 4e-4


def test_the_crossing_of_the_readme_is_a_job():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"`(--config\.credit=siblings[^`]*)`", text)
    assert load_job(load_config(CONFIGS / "tiny" / "c3po.py", command.split())).credit


@pytest.mark.parametrize("system", ["c3po", "mmoa_rag", "coda", "mao_arag", "opera"])
def test_a_role_that_policies_name_has_one_of_its_own(system):
    roles = tuple(job(system, {}).policy_of)
    named = "(" + ",".join(f"('{role}','tiny')," for role in roles[:1]) + ")"
    first, *others = job(system, {"policies": named}).policy_of.items()
    assert first == (roles[0], roles[0])
    assert {policy for _, policy in others} == {"policy"}
    apart = job(system, {"policies": named}).recipe
    assert apart.evaluated.roles[roles[0]].policy == roles[0]
    assert apart.system.wants(apart.system.start(ANN)) == job(system, {}).recipe.system.wants(
        job(system, {}).recipe.system.start(ANN)
    )


def test_every_policy_attends_as_the_config_says():
    policies, _ = load_policies(job("mmoa_rag", {"attention": "xla"}), None)
    assert {policy.config.attention_impl for policy in policies.values()} == {"xla"}


def test_a_policy_that_no_role_can_have_is_refused():
    with pytest.raises(UserError, match="'judge': this system has policy, rewriter, selector"):
        load_policies(job("mmoa_rag", {"policies": "(('judge','tiny'),)"}), None)
