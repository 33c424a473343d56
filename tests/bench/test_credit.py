"""The audit of credit, on a system and on a decision process of which the values are known."""

import dataclasses
import re
import types

import numpy as np
import pytest

from jax_ragrl.bench import credit
from jax_ragrl.bench.credit import Audit, Auditor, _intervals, page, rules_of, table
from jax_ragrl.bench.fidelity import Replay, measures, moments_of, replay_of, with_intervals
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.credit.assign import over_siblings
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.effects import Done, Generate, Search
from jax_ragrl.rollout.expand import ForcedAction, Tree, single_chain
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.systems.base import Recipe
from jax_ragrl.types import Message, Passage, Question
from tests.jobs import config_values
from tests.rollout.tape import Tape

VALUE = {"A": 0.8, "B": 0.2}


class TwoRoles:
    """The first role chooses a chance, the second draws against it."""

    style = "c3po_tiny"
    roles = {name: Role(name, ParsedAction) for name in ("first", "second")}

    def steps(self, question: Question):
        chance = yield Generate("first", (Message("user", "choose"),))
        yield Search(chance.text, 2)
        draw = yield Generate("second", (Message("user", chance.text),), 2)
        yield Done(chance.text + draw.text)


def won(forest):
    texts = [record.answer or "" for record in forest.records]
    return np.array([float(t[1:]) < VALUE[t[0]] if t else 0.0 for t in texts], np.float32)


def above_forced(forest, reward_N, rule):
    return over_siblings(forest, reward_N, lambda value_K: value_K - value_K[0])


def of(credit, weight):
    return lambda forest, reward_N: (np.full(len(reward_N), credit), np.full(len(reward_N), weight))


NAN, INF, WEIGHTS, NUMBER = of(np.nan, 1.0), of(np.inf, 1.0), of(1.0, -1.0), 3.0


def nothing(forest, reward_N):
    return None


def short(forest, reward_N):
    return np.zeros(1), np.ones(1)


def write(role, prompt, rng):
    return rng.choice("AB") if role == "first" else f"{rng.random()}"


class Outage(Tape):
    """Searches fail in the calls with the numbers of `down`; each call has a round's queries."""

    down: tuple[int, ...] | range = ()
    calls = 0

    def search(self, queries, k):
        self.calls += 1
        found = super().search(queries, k)
        return [EffectError("HTTP 503")] * len(found) if self.calls in self.down else found


def auditor(rules=(), expander=single_chain, down=()):
    tape = Outage(write)
    tape.down = down
    recipe = Recipe(TwoRoles(), won, expander=lambda roles: expander)
    audit = Audit(rules=rules, error=0.05, repeats=3, group=3, widths=(2,))
    return Auditor(recipe, Environment(tape, tape, tape), audit, rules_of(audit, recipe), 0)


QUESTIONS = [Question(f"q{n}", "?", ("x",)) for n in range(12)]


@pytest.fixture(scope="module")
def rows():
    return auditor().rows(QUESTIONS)


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


def test_a_return_and_a_sibling_group_hold_the_action(rows):
    for row in (row for row in rows if row["role"] == "second"):
        for name in ("3 chains, shared", "tree of 2, child_mean"):
            draws_ARL = np.array(row["rules"][name]["credit"])
            value = row["replay"]["value"]
            expected_A = np.array(row["replay"]["advantage_A"]) + value
            assert draws_ARL.mean((1, 2)) == pytest.approx(expected_A)
    name = "tree of 2, siblings, leave_one_out"
    first = [row for row in rows if row["role"] == "first"]
    draws = np.array([row["rules"][name]["credit"] for row in first], np.float64)
    # The other sample is equal in about half of the draws, which teach nothing.
    assert 0.2 < (draws == 0).mean() < 0.8
    sign = np.array([[1 if text == "A" else -1 for text in row["actions"]] for row in first])
    gap = 2 * (draws.mean((2, 3)) * sign).mean()
    assert gap == pytest.approx(VALUE["A"] - VALUE["B"], abs=0.2)


def test_an_outage_is_no_result_wherever_it_occurs():
    """A failed draw is not one that is not trained, and a failed rollout has no decision."""
    questions, own = QUESTIONS[:4], auditor(("shared", "child_mean"))
    whole = own.rows(questions)
    assert any("rules" in row for row in whole) and not any("error" in row for row in whole)
    for call in range(1, own.environment.retriever.calls + 1):
        rows = auditor(("shared", "child_mean"), down=(call,)).rows(questions)
        failed = [row for row in rows if "error" in row]
        expected = [{"question": r["question"], "skipped": "failed", "error": "HTTP 503"}
                    for r in failed]  # fmt: skip
        assert failed == expected and failed, call
        assert all(row == old for row, old in zip(rows, whole, strict=True) if "error" not in row)
    assert all("error" in row for row in auditor(down=range(99)).rows(questions))


@pytest.fixture
def audited(tmp_path, monkeypatch):
    """The command in one folder; it returns the table of the two roles' system, without models."""
    corpus = Corpus((Passage("p", "", "x"),))
    searcher = types.SimpleNamespace(corpus=corpus, fingerprint=corpus.fingerprint)
    values = config_values("tiny/c3po")
    for name in ("PolicySampler", "prepare_policies", "method_of"):
        monkeypatch.setattr(credit, name, lambda *_: None)
    claim = credit.claim_workdir

    def run(questions=QUESTIONS, count=2, down=(), **changes):
        own = auditor(down=down)

        def claimed(*args):
            job = claim(*args)
            names = ("seed", "lora", "policy", "policies", "policy_of", "llm", "judge")
            values = {name: getattr(job, name) for name in names}
            return types.SimpleNamespace(recipe=own.recipe, shapes=None, **values)

        parts = types.SimpleNamespace(
            questions={"train": questions, "dev": ()},
            retriever=searcher,
            models=lambda: None,
            environment=lambda _: own.environment,
            policies={},
            tokenizer=None,
        )
        monkeypatch.setattr(credit, "claim_workdir", claimed)
        monkeypatch.setattr(credit, "build_components", lambda *_: parts)
        audit = Audit(("shared",), error=0.2, repeats=2, group=2, questions=count)
        return credit.bench_credit({**values, **changes}, audit, tmp_path)

    return run


def test_failed_decisions_are_asked_again_and_an_outage_is_an_error(audited, tmp_path, capsys):
    with pytest.raises(UserError, match="2 of 2 questions failed, the first with: HTTP 503"):
        audited(down=range(99))
    file = tmp_path / "decisions.jsonl"
    assert not [*read_rows(file)]
    found = audited(count=6, down=(1,))
    assert "4 of 6 questions failed" in capsys.readouterr().err and len(found["errors"]) == 4
    assert "2 decisions (4 left out: failed)" in found["title"] and len([*read_rows(file)]) == 2
    found = audited(count=6)
    assert "6 decisions" in found["title"] and not found["errors"] and len([*read_rows(file)]) == 6


def test_an_audit_is_continued_with_its_questions_config_and_whole_lines_alone(
    audited, tmp_path, monkeypatch
):
    file = tmp_path / "decisions.jsonl"
    audited()
    with file.open("a") as out:
        out.write('{"question": "q')  # killed while writing
    audited(count=3)
    assert [len([*read_rows(file)]), len(file.read_text().splitlines())] == [3, 3]
    others = [dataclasses.replace(q, answers=("y",)) for q in QUESTIONS]
    with pytest.raises(UserError, match="begun with other train questions"):
        audited(others, count=4)
    with pytest.raises(UserError, match=r"another config \(config.seed differs.* --folder"):
        audited(seed=5)
    monkeypatch.setattr("jax_ragrl.run.claims.weights_checksum", lambda _: "others")
    with pytest.raises(UserError, match="begun with the weights"):
        audited(count=4)


def test_the_table_has_all_decisions_roles_and_depths_and_the_page_shows_them(rows):
    own = auditor()
    result = table(rows, own.rules, own.audit)
    assert {row["group"] for row in result["rows"]} == {
        "all", "role first", "role second", "depth 1", "depth 2"
    }  # fmt: skip
    assert all(set(row["cells"]) == set(result["columns"]) for row in result["rows"])
    text = page(result, rows, own.rules)
    assert text.count("<svg") >= 3 + len(own.rules) and "tree of 2, siblings" in text


def test_a_chart_shows_values_of_any_size_and_cuts_an_interval_without_end():
    cells = [("20.00 [14.00, 27.00]", "a"), ("5.00 [-900.00, 9.00]", "b")]
    chart = _intervals([{"Rule": rule, "Worth": text} for text, rule in cells], "Worth")
    x20, x5 = (float(x) for x in re.findall(r'<circle cx="([0-9.]+)', chart))
    ends = [float(x) for x in re.findall(r'x[12]="([0-9.]+)"[^>]*class="whisker"', chart)]
    scale = (x20 - x5) / 15
    assert scale > 2 and min(ends) >= x5 - 46 * scale


def test_a_rule_of_ones_own_is_audited_on_chains_and_trees():
    own = auditor(("jax_ragrl.credit.assign:child_mean",))
    (row, *_) = own.rows(QUESTIONS[:1])
    assert {*row["rules"]} == {
        f"{shape}, jax_ragrl.credit.assign:child_mean" for shape in ("3 chains", "tree of 2")
    }
    with pytest.raises(UserError, match="--rules has 'silbings'"):
        auditor(("silbings",))


def test_a_rule_of_ones_own_is_audited_beside_the_forced_actions_of_the_recipe():
    """`A` is forced: a sampled `A` is the same node, and `B` is worth less by a known number."""
    tree = Tree(forced_actions={"first": (ForcedAction("A"),)}, free_samples=2)
    own = auditor(("tests.bench.test_credit:above_forced",), tree)
    rows = own.rows(QUESTIONS)
    name = "the recipe, tests.bench.test_credit:above_forced, group_centred"
    first = [row for row in rows if row["role"] == "first"]
    credits = {"A": [], "B": []}
    for row in first:
        for action, draws in zip(row["actions"], row["rules"][name]["credit"], strict=True):
            credits[action] += np.ravel(draws).tolist()
    assert set(credits["A"]) == {0.0}
    assert np.mean(credits["B"]) == pytest.approx(VALUE["B"] - VALUE["A"], abs=0.3)
    assert len(credits["B"]) > 20


@pytest.mark.parametrize("name", ["NAN", "INF", "WEIGHTS", "nothing", "short"])
def test_a_rule_that_returns_no_credits_is_refused_before_the_replay(name):
    own = auditor((f"tests.bench.test_credit:{name}",))
    with pytest.raises(UserError, match=rf"--rules: .*:{name} returned .*return a tuple of two"):
        own.check_own_rules(QUESTIONS[0])
    assert own.environment.retriever.calls == 1  # for whole rollouts of one question


def test_rules_are_functions_of_rollouts_and_rewards_and_audited_once():
    for name in ("NUMBER", "won", "no_such_rule"):
        with pytest.raises(UserError, match=f"--rules is .*:{name}'"):
            auditor((f"tests.bench.test_credit:{name}",))
    audit = Audit(rules=("shared", "siblings", "shared"), widths=(2, 2))
    names = [rule.name for rule in rules_of(audit, Recipe(TwoRoles(), won))]
    assert len(names) == len({*names}) == 4


DECISIONS, DRAWS, CONTINUATIONS, REPEATS = 400, 8, 24, 16


def decision(rng):
    """Actions with known values, a policy over them, and the returns that a reader would see.

    Two levels: an action leads to one of two states by chance, and that to a reward of 0 or 1.
    """
    policy_U = rng.dirichlet(np.ones(4))
    reached_U, low, high = rng.uniform(size=4), rng.uniform(0, 0.5), rng.uniform(0.5, 1)
    value_U = reached_U * high + (1 - reached_U) * low
    first, second = rng.choice(4, 2, replace=False)
    order = [first, second, *({*range(4)} - {first, second})]
    return policy_U[order], reached_U[order], (low, high), value_U[order]


def play(rng, reached_U, ends, shape):
    """Returns after each action, `[U, *shape]`; the same uniform numbers serve all actions."""
    state, reward = rng.uniform(size=(2, *shape))
    is_high = state < reached_U.reshape(-1, *(1 for _ in shape))
    return (reward < np.where(is_high, ends[1], ends[0])).astype(np.float64)


def audit(rule, *, is_return=False):
    """The measures of a rule: from returns and the other returns of its group to credits."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(DECISIONS):
        policy_U, reached_U, ends, value_U = decision(rng)
        share_U = rng.multinomial(DRAWS, policy_U) / DRAWS
        replay = replay_of(play(rng, reached_U, ends, (CONTINUATIONS,)), share_U, DRAWS)
        own = np.stack([play(rng, reached_U, ends, (REPEATS, 2))[a] for a in (0, 1)])
        # Three more members of the group, of actions that the policy draws in the same state.
        others = rng.choice(4, 3, p=policy_U)
        rest = np.stack([play(rng, reached_U, ends, (REPEATS, 2))[u] for u in others])
        credit = rule(own, rest, value_U)
        rows.append(moments_of(credit, replay, is_return=is_return, tokens=40, actions=2))
    return with_intervals(rows)


def holds(interval, value):
    return interval[1] <= value <= interval[2]


def test_an_unbiased_rule_has_no_bias():
    found = audit(lambda own, rest, value_U: own - rest.mean(0))
    assert holds(found["agreement"], 1) and holds(found["scale"], 1), found
    assert found["bias"][0] < 0.06 and abs(found["offset"][0]) < 0.02
    assert 0.2 < found["correlation"][0] < 0.6 and found["tokens"][0] == 20
    assert found["worth"][0] == pytest.approx(50 * found["correlation"][0] ** 2)
    # A mean that holds the action itself has a smaller scale and no other bias.
    found = audit(lambda own, rest, value_U: own - (own + rest.sum(0)) / 4)
    assert holds(found["scale"], 0.75) and not holds(found["scale"], 1)
    assert holds(found["agreement"], 1)


def test_a_baseline_that_depends_on_the_action_is_found():
    """The first action counts nine times in the mean, as if its role acted nine times."""

    def rule(own, rest, value_U):
        times = np.array([9.0, 1.0])[:, None, None]
        return own - (times * own + rest.sum(0)) / (times + 3)

    found = audit(rule)
    assert found["agreement"][2] < 0.95, found["agreement"]
    assert found["bias"][1] > 0.05


@pytest.mark.parametrize("shares", [(1, 1), (0.5, 0.5), (0.1, 0.1), (0.9, 0.3)])
def test_returns_are_compared_without_the_error_of_the_value_however_often_trained(shares):
    """Replays with errors measure what exact ones do, on the same credits."""
    rng, rows, exact = np.random.default_rng(0), [], []
    for _ in range(4000):
        policy_U, reached_U, ends, value_U = decision(rng)
        credit = np.stack([play(rng, reached_U, ends, (REPEATS, 2))[a] for a in (0, 1)])
        is_trained = rng.random(credit.shape) < np.array(shares)[:, None, None]
        credit = np.where(is_trained, credit, np.nan)
        share_U = rng.multinomial(4, policy_U) / 4
        found = replay_of(play(rng, reached_U, ends, (CONTINUATIONS,)), share_U, 4)
        value, zero_A = policy_U @ value_U, np.zeros(2)
        known = Replay(value_U[:2] - value, zero_A, 0.0, value, 0.0, zero_A)
        for moments, replay in ((rows, found), (exact, known)):
            moments.append(moments_of(credit, replay, is_return=True, tokens=40, actions=2))
    found, expected = (measures(np.mean(moments, 0)) for moments in (rows, exact))
    assert found["trained"] == pytest.approx(np.mean(shares), abs=0.01)
    for name in ("agreement", "scale", "correlation", "noise", "luck"):
        assert found[name] == pytest.approx(expected[name], rel=0.04), name


def test_a_rule_that_trains_nothing_has_no_correlation_and_no_worth():
    """0 / 0: nan, since a constant credit correlates with nothing, and 0 would be a measurement."""
    # The errors exceed the advantages, so that the estimated square of these is negative.
    replay = Replay(np.array([0.1, -0.1]), np.full(2, 0.2), 0.1, 0.5, 0.2, np.full(2, 0.01))
    credit = np.full((2, 4, 2), np.nan)
    found = measures(moments_of(credit, replay, is_return=True, tokens=40, actions=0))
    assert found["trained"] == 0 and np.isnan([found["correlation"], found["worth"]]).all()


def test_luck_of_others_is_the_share_of_the_noise_in_which_the_two_draws_differ():
    def rule(own, rest, value_U):
        return 3 * own[..., :1] + own  # 9 and 16 parts of own luck are shared by both draws

    # Var = Var(4 x) in the first draw, Var(3 x + y) = 10 Var in the second; half the mean square
    # of x - y is one part of these.
    found = audit(rule)
    assert found["luck"][0] == pytest.approx(1 / 13, abs=0.015)


def test_errors_are_those_of_means():
    """Over many replays the advantage scatters by its error, and its mean is the advantage."""
    rng = np.random.default_rng(3)
    policy_U, reached_U, ends, value_U = decision(rng)
    replays = []
    for _ in range(2000):
        share_U = rng.multinomial(DRAWS, policy_U) / DRAWS
        replays.append(replay_of(play(rng, reached_U, ends, (64,)), share_U, DRAWS))
    advantages = np.array([r.advantage_A for r in replays])
    expected = value_U[:2] - policy_U @ value_U
    assert advantages.mean(0) == pytest.approx(expected, abs=0.01)
    error_A = np.sqrt(np.mean([r.error_A**2 for r in replays], axis=0))
    assert error_A == pytest.approx(advantages.std(0), rel=0.1)
