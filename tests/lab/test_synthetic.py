"""Which samples a user sees: every row once, then again; the paper's synthetic problem."""

import itertools
import math

import numpy as np
import pytest

from flwr_ppsgd.lab.synthetic import FreshSamples, Synthetic, SyntheticLearner
from flwr_ppsgd.learner import Minibatches
from tests.support.toy import Floats

USERS, FEATURES = 400, 12
PROBLEM = Synthetic.draw(USERS, FEATURES, seed=3)


def numbered(rows: int, size: int, *, seed: int = 1, user: int = 0) -> Minibatches:
    """Row i holds x = i and y = 10·i."""
    x = np.arange(float(rows))[:, None]
    return Minibatches(x, 10 * x, size, seed=seed, user=user)


def seen(batches: Minibatches, visits: int) -> list[float]:
    return [float(value) for visit in range(1, visits + 1) for value in batches(visit)[0][:, 0]]


@pytest.mark.parametrize(("rows", "size"), [(20, 5), (20, 20), (1, 10), (7, 3), (10, 4)])
def test_every_pass_uses_every_row_once(rows: int, size: int) -> None:
    """Fresh samples first, then further epochs, each in an order of its own; also where m does not
    divide n."""
    order = seen(numbered(rows, size), 3 * rows)
    for epoch in range(3):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    if rows > 10:
        assert order[:rows] != order[rows : 2 * rows] != sorted(order[:rows])


def test_x_and_y_stay_together() -> None:
    x, y = numbered(20, 7)(3)
    np.testing.assert_array_equal(y, 10 * x)


@pytest.mark.parametrize(("rows", "size", "expected"), [(20, 7, 7), (4, 10, 4), (1, 1, 1)])
def test_every_minibatch_has_size_m_i(rows: int, size: int, expected: int) -> None:
    """m_i = min(size, rows), at an epoch's end too: M = Σ m_i is public and fixed."""
    batches = numbered(rows, size)
    assert {len(batches(visit)[0]) for visit in range(1, 30)} == {expected}
    assert batches.num_examples == rows


def test_rows_depend_on_seed_user_and_visit_alone() -> None:
    """Two instances agree, and the order in which visits are asked for does not matter."""
    forward, backward = numbered(20, 7), numbered(20, 7)
    late = [backward.rows(visit).tolist() for visit in reversed(range(1, 10))]
    assert [forward.rows(visit).tolist() for visit in range(1, 10)] == late[::-1]


def test_users_and_seeds_draw_different_orders() -> None:
    places = itertools.product(range(3), range(3))
    orders = {tuple(seen(numbered(50, 10, seed=seed, user=user), 5)) for seed, user in places}
    assert len(orders) == 9


@pytest.mark.parametrize(("x", "y", "size"), [(0, 0, 1), (3, 2, 1), (3, 3, 0)])
def test_no_rows_unequal_rows_and_no_size_are_refused(x: int, y: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"got {x} and {y}, size {size}"):
        Minibatches(np.zeros((x, 2)), np.zeros((y, 1)), size, seed=0, user=0)


def check_standard(values: Floats) -> None:
    """Mean 0 and variance 1, up to five standard errors."""
    assert abs(values.mean()) < 5 / math.sqrt(values.size)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / values.size)


def test_users_share_all_but_the_last_five_coordinates() -> None:
    """θ_i* = θ_0 plus N(0, .01²) on the last 5 coordinates."""
    assert (PROBLEM.optima[:, :-5] == PROBLEM.optima[0, :-5]).all()
    last = PROBLEM.optima[:, -5:]
    assert all(len(np.unique(column)) == USERS for column in last.T)
    deviations = (last - last.mean(axis=0)) / 0.01
    freedom = 5 * (USERS - 1)
    assert abs((deviations**2).sum() / freedom - 1) < 5 * math.sqrt(2 / freedom)


def test_the_common_part_has_a_standard_deviation_of_ten() -> None:
    """θ_0 ~ N(0, 10² I)."""
    check_standard(Synthetic.draw(1, 20_000, seed=5).optima[0] / 10)


def test_label_noise_has_a_standard_deviation_of_a_hundredth() -> None:
    x, y = PROBLEM.batch(7, 1, 20_000)
    check_standard((y[:, 0] - x @ PROBLEM.optima[7]) / 0.01)


def test_features_have_variances_1_over_k() -> None:
    """x ~ N(0, diag(1/k)): scaled by √k, every coordinate is standard normal and uncorrelated with
    the others."""
    n = 20_000
    x, _ = PROBLEM.batch(0, 1, n)
    k = np.arange(1, FEATURES + 1)
    np.testing.assert_allclose(PROBLEM.variances, 1 / k, rtol=1e-15)
    scaled = x * np.sqrt(k)
    second_moments = scaled.T @ scaled / n
    assert (abs(scaled.mean(axis=0)) < 5 / math.sqrt(n)).all()
    assert (abs(np.diag(second_moments) - 1) < 5 * math.sqrt(2 / n)).all()
    assert (abs(second_moments - np.diag(np.diag(second_moments))) < 5 / math.sqrt(n)).all()


@pytest.mark.parametrize("user", [0, 7])
def test_excess_risk_is_the_mean_squared_error_above_the_noise(user: int) -> None:
    """‖v − θ_i*‖²_Σ = E(xᵀv − y)² − τ². The error is Gaussian, so its mean square r has standard
    error r√(2/n)."""
    n, v = 20_000, np.linspace(-1, 1, FEATURES)
    x, y = PROBLEM.batch(user, 1, n)
    closed_form = PROBLEM.excess_risk(user, v)
    sampled = float(np.mean((x @ v - y[:, 0]) ** 2))
    risk = closed_form + PROBLEM.label_noise**2
    assert abs(sampled - risk) < 5 * risk * math.sqrt(2 / n)


def test_excess_risk_by_hand() -> None:
    """Off by (1, 2, 0, 0, 0): 1·1 + ½·4 = 3; and nothing at the optimum itself."""
    problem = Synthetic(np.zeros((1, 5)), seed=0)
    assert problem.excess_risk(0, np.array([1.0, 2.0, 0, 0, 0])) == 3.0
    assert PROBLEM.excess_risk(4, PROBLEM.optima[4]) == 0.0


def test_samples_depend_on_seed_user_and_visit_alone() -> None:
    """A second draw of the problem gives the same truth and the same samples, whatever was asked
    for before."""
    again = Synthetic.draw(USERS, FEATURES, seed=3)
    np.testing.assert_array_equal(again.optima, PROBLEM.optima)
    again.batch(1, 1, 4)
    for one, other in zip(PROBLEM.batch(5, 2, 10), again.batch(5, 2, 10), strict=True):
        np.testing.assert_array_equal(one, other)


def test_users_visits_and_seeds_have_samples_of_their_own() -> None:
    other_seed = Synthetic(PROBLEM.optima, seed=4)
    sources = [(PROBLEM, 0, 1), (PROBLEM, 1, 1), (PROBLEM, 0, 2), (other_seed, 0, 1)]
    draws = {problem.batch(user, visit, 3)[0].tobytes() for problem, user, visit in sources}
    assert len(draws) == 4
    assert (Synthetic.draw(2, 6, seed=4).optima != Synthetic.draw(2, 6, seed=3).optima).all()


def test_the_stream_and_the_learner_are_those_of_their_user() -> None:
    stream = FreshSamples(PROBLEM, user=5, size=10)
    learner = SyntheticLearner(PROBLEM, user=5, batch_size=10)
    np.testing.assert_array_equal(stream(2)[0], PROBLEM.batch(5, 2, 10)[0])
    assert (stream.num_examples, learner.num_examples) == (10, 10)
    half = PROBLEM.optima[5] / 2
    assert learner.evaluate(half, half) == {"excess_risk": 0.0}
