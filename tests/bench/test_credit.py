"""The audit replays a system of two roles of which the values are known."""

import numpy as np
import pytest

from jax_ragrl.bench.credit import Audit, Auditor, page, rules_of, table
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.effects import Done, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.systems.base import Recipe
from jax_ragrl.types import Message, Question
from tests.rollout.tape import Tape

VALUE = {"A": 0.8, "B": 0.2}


class TwoRoles:
    """The first role chooses a chance, the second draws against it."""

    roles = {name: Role(name, ParsedAction) for name in ("first", "second")}

    def steps(self, question: Question):
        chance = yield Generate("first", (Message("user", "choose"),))
        yield Search(chance.text, 2)
        draw = yield Generate("second", (Message("user", chance.text),), 2)
        yield Done(chance.text + draw.text)


def won(forest):
    texts = [record.answer or "" for record in forest.records]
    return np.array([float(t[1:]) < VALUE[t[0]] if t else 0.0 for t in texts], np.float32)


def auditor(rules=()):
    tape = Tape(
        lambda role, prompt, rng: rng.choice("AB") if role == "first" else f"{rng.random()}"
    )
    recipe = Recipe(TwoRoles(), won)
    audit = Audit(rules=rules, error=0.05, repeats=3, group=3, widths=(2,))
    return Auditor(recipe, Environment(tape, tape, tape), audit, rules_of(audit, recipe), 0)


@pytest.fixture(scope="module")
def rows():
    questions = [Question(f"q{n}", "?", ("x",)) for n in range(12)]
    return auditor().rows(questions)


def test_the_replayed_gap_is_the_difference_of_the_values(rows):
    first = [row for row in rows if row["role"] == "first"]
    assert len(first) > 2 and {row["depth"] for row in first} == {1}
    for row in first:
        replay, (one, two) = row["replay"], row["actions"]
        gap = replay["advantage_A"][0] - replay["advantage_A"][1]
        assert abs(gap - (VALUE[one] - VALUE[two])) < 4 * replay["gap_error"] < 0.3
    # The last action decides alone: its continuations are all equal.
    second = [row for row in rows if row["role"] == "second"]
    assert second and all(row["replay"]["gap_error"] == 0 for row in second)


def test_luck_of_the_other_role_changes_the_credit_of_the_first_alone(rows):
    """Nothing follows the second role, so that its return is its own; the first waits for it."""

    def changed(role):
        draws = [np.array(r["rules"]["3 chains, shared"]["credit"]) for r in rows
                 if r["role"] == role]  # fmt: skip
        return np.mean([np.mean(x[..., 0] != x[..., 1]) for x in draws])

    assert changed("second") == 0 < changed("first")


def test_a_return_is_the_reward_of_the_rollout_through_the_action(rows):
    for row in (row for row in rows if row["role"] == "second"):
        for name in ("3 chains, shared", "tree of 2, child_mean"):
            draws_ARL = np.array(row["rules"][name]["credit"])
            value = row["replay"]["value"]
            expected_A = np.array(row["replay"]["advantage_A"]) + value
            assert draws_ARL.mean((1, 2)) == pytest.approx(expected_A)


def test_a_sibling_group_holds_the_action_and_the_others_that_the_policy_samples(rows):
    name = "tree of 2, siblings, leave_one_out"
    first = [row["rules"][name]["credit"] for row in rows if row["role"] == "first"]
    draws = np.array(first, np.float64)
    # Equal siblings are merged, so that there is nothing to compare in about half of the draws.
    assert 0.2 < np.isnan(draws).mean() < 0.8
    assert np.nanmax(np.abs(draws)) > 0.4


def test_the_table_has_all_decisions_roles_and_depths_and_the_page_shows_them(rows):
    own = auditor()
    result = table(rows, own.rules, own.audit)
    assert {row["group"] for row in result["rows"]} == {
        "all", "role first", "role second", "depth 1", "depth 2"
    }  # fmt: skip
    assert all(set(row["cells"]) == set(result["columns"]) for row in result["rows"])
    text = page(result, rows, own.rules)
    assert text.count("<svg") >= 3 + len(own.rules) and "tree of 2, siblings" in text


def test_a_rule_of_ones_own_is_audited_on_chains_and_trees():
    own = auditor(("jax_ragrl.credit.assign:child_mean",))
    (row, *_) = own.rows([Question("q0", "?", ("x",))])
    assert {*row["rules"]} == {
        f"{shape}, jax_ragrl.credit.assign:child_mean" for shape in ("3 chains", "tree of 2")
    }


def test_an_unknown_rule_is_an_error():
    with pytest.raises(UserError, match="--rules has 'silbings'"):
        auditor(("silbings",))
