"""Laws and golden numbers of the answer metrics."""

import numpy as np
import pytest
import scipy.stats

from jax_ragrl.errors import UserError
from jax_ragrl.text import metrics

NORMALISED = [
    ("The  Quick, brown-fox!", "quick brownfox", "quick brown fox"),
    ("U.S.", "us", "u s"),
    ("An apple a day", "apple day", "apple day"),
    ("theatre and another", "theatre and another", "theatre and another"),
    ("“Röntgen”", "röntgen", "ro\u0308ntgen"),
    ("it’s 10–12", "its 1012", "it s 10 12"),
    ("北京。", "北京", "北京"),
    ("Ｕ．Ｓ．　１９", "us 19", "u s 19"),
    ("A", "", ""),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "deleted", "spaced"), NORMALISED)
def test_normalize_gives_the_golden_strings(text, deleted, spaced):
    assert metrics.normalize(text) == deleted
    assert metrics.normalize(text, punct="space") == spaced


METRICS = (metrics.exact_match, metrics.f1, metrics.cover_match, metrics.cover_match_tokens)


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_deletes_punctuation_by_default(metric):
    assert metric("the U.S.", ("US",)) == 1.0
    assert metric("the U.S.", ("US",), punct="space") == 0.0


# prediction, answers, exact, f1, cover, cover by tokens
GOLDEN = [
    ("The Eiffel Tower", ["eiffel tower"], 1, 1, 1, 1),
    ("It is the Eiffel Tower in Paris", ["Eiffel Tower"], 0, 4 / 8, 1, 1),
    ("yes", ["Yes"], 1, 1, 1, 1),
    ("yes it is", ["yes"], 0, 0, 1, 1),
    ("no", ["no way out"], 0, 0, 0, 0),
    ("north", ["no"], 0, 0, 1, 0),
    ("noanswer", ["answer"], 0, 0, 1, 0),
    ("Paris", [], 0, 0, 0, 0),
    ("Paris", [""], 0, 0, 0, 0),
    ("", [""], 0, 0, 0, 0),
    ("", ["!!!"], 0, 0, 0, 0),
    ("", ["the"], 0, 0, 0, 0),
    ("!!!", ["!!!"], 1, 1, 1, 1),
    ("!!!", ["???"], 0, 0, 0, 0),
    ("A.", ["a"], 1, 1, 1, 1),
    ("", ["Paris"], 0, 0, 0, 0),
    ("the", ["a"], 0, 0, 0, 0),
    ("Toghon Temür", ["toghon temür"], 1, 1, 1, 1),
    ("Temür", ["Temur"], 0, 0, 0, 0),
    ("日本国", ["日本"], 0, 4 / 5, 1, 1),
    ("首都北京市", ["北京市"], 0, 6 / 8, 1, 1),
    ("北京。", ["北京"], 1, 1, 1, 1),
    ("在北 京", ["北京"], 0, 4 / 5, 0, 1),
    ("哈利·波特", ["哈利波特"], 1, 1, 1, 1),
    ("BMW公司", ["BMW"], 0, 2 / 4, 1, 1),
    ("กรุงเทพ", ["กรุงเทพมหานคร"], 0, 2 * 6 / 18, 0, 0),
    ("Beyonce\u0301", ["Beyonc\u00e9"], 1, 1, 1, 1),
    ("ガ", ["カ\u3099"], 1, 1, 1, 1),
    ("서울특별시", ["서울"], 0, 0, 1, 0),
    ("−5", ["-5"], 1, 1, 1, 1),
    ("Hawaiʻi", ["Hawai'i"], 1, 1, 1, 1),
    ("a cat sat sat", ["cat sat"], 0, 2 * 2 / 5, 1, 1),
    ("cat", ["dog", "black cat"], 0, 2 / 3, 0, 0),
    ("sat sat", ["cat sat sat"], 0, 2 * 2 / 5, 0, 0),
    ("New York, London", ["York London"], 0, 4 / 5, 1, 1),
]


@pytest.mark.parametrize(("prediction", "answers", "exact", "f1", "cover", "tokens"), GOLDEN)
def test_metrics_give_the_golden_numbers(prediction, answers, exact, f1, cover, tokens):
    got = [metric(prediction, answers) for metric in METRICS]
    assert all(isinstance(x, float) for x in got)
    np.testing.assert_allclose(got, [exact, f1, cover, tokens])


def test_one_string_for_answers_and_an_unknown_rule_of_punctuation_are_refused():
    with pytest.raises(TypeError, match="sequence of strings"):
        metrics.f1("no", "no")
    with pytest.raises(UserError, match="delete"):
        metrics.normalize("x", punct="drop")


def test_bootstrap_interval_is_deterministic_and_contains_the_mean():
    x_N = np.random.default_rng(1).random(50)
    mean, low, high = metrics.bootstrap_interval(x_N)
    assert (mean, low, high) == metrics.bootstrap_interval(x_N)
    assert low < mean < high and mean == pytest.approx(x_N.mean())


def test_a_hierarchical_interval_contains_the_variance_between_groups():
    rng = np.random.default_rng(0)
    equal = [rng.normal(size=200) for _ in range(3)]
    apart = [x_N + shift for x_N, shift in zip(equal, (-1.0, 0.0, 1.0), strict=True)]
    (mean, low, high), (_, *wide) = map(metrics.hierarchical_bootstrap, (equal, apart))
    assert low < mean < high and wide[1] - wide[0] > 4 * (high - low)
    assert metrics.hierarchical_bootstrap(apart) == metrics.hierarchical_bootstrap(apart)
    assert metrics.hierarchical_bootstrap(equal[:1]) == metrics.bootstrap_interval(equal[0])
    # A group counts once, whatever its size.
    sizes = metrics.hierarchical_bootstrap([np.ones(1), np.zeros(99)])
    assert sizes == (0.5, 0.0, 1.0)
    for groups in ([], [np.ones(2), np.ones(0)], [np.array([np.nan])]):
        with pytest.raises(UserError, match="at least one finite number"):
            metrics.hierarchical_bootstrap(groups)


def test_seeds_that_answer_the_same_questions_do_not_multiply_them():
    x_Q = np.random.default_rng(0).normal(size=400)
    one, three = (metrics.hierarchical_bootstrap([np.stack([x_Q] * n)]) for n in (1, 3))
    assert one == metrics.bootstrap_interval(x_Q)
    np.testing.assert_allclose(three, one, atol=0.01)
    # As other questions of other worlds, the same scores have a narrower interval.
    apart = metrics.hierarchical_bootstrap([x_Q] * 3)
    assert apart[2] - apart[1] < 0.7 * (one[2] - one[1])
    missing = np.stack([np.where(np.arange(400) < 7, np.nan, x_Q), x_Q])
    np.testing.assert_allclose(metrics.hierarchical_bootstrap([missing]), one, atol=0.03)


def test_the_interval_of_seeds_with_the_same_questions_covers_about_95_percent():
    rng, inside = np.random.default_rng(3), 0
    for _ in range(100):
        hardness_Q, skill_S = rng.normal(0, 4, 80), rng.normal(0, 0.2, 4)
        table_SQ = hardness_Q + skill_S[:, None] + rng.normal(0, 1, (4, 80))
        _, low, high = metrics.hierarchical_bootstrap([table_SQ], samples=500)
        inside += low <= 0 <= high
    assert 88 <= inside <= 99


@pytest.mark.parametrize("count", [1, 6, 50])
def test_equal_scores_have_the_exact_interval(count):
    """That of a binomial, which `scipy` computes in another way."""
    for wins in (0, count):
        exact = scipy.stats.binomtest(wins, count).proportion_ci(method="exact")
        actual = metrics.bootstrap_interval(np.full(count, wins / count))
        np.testing.assert_allclose(actual, [wins / count, exact.low, exact.high], atol=1e-12)
    mean, low, high = metrics.paired_bootstrap([0.3] * count, [0.3] * count)
    assert mean == 0.0 and low == -high == pytest.approx(0.025 ** (1 / count) - 1)


def test_swapping_the_systems_flips_the_sign():
    a, b = [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]
    forward, backward = metrics.paired_bootstrap(a, b), metrics.paired_bootstrap(b, a)
    np.testing.assert_allclose(forward[0], -backward[0])
    np.testing.assert_allclose(forward[1], -backward[2])


def test_scores_without_an_interval_are_refused():
    for scores in ([], [float("nan")], [[1.0]]):
        with pytest.raises(UserError, match="finite number per question"):
            metrics.bootstrap_interval(scores)
    with pytest.raises(UserError, match="same questions"):
        metrics.paired_bootstrap([1.0], [1.0, 0.0])
