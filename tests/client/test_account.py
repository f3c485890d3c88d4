"""The closed form on the device against the accountant that servers use."""

import math

import dp_accounting
import pytest

from flwr_ppsgd import Order, Poisson, Release, SecureSum
from flwr_ppsgd.client.account import Agreement, DeviceAccount, delta_of, epsilon_of, largest_mu
from flwr_ppsgd.client.policy import Policy
from flwr_ppsgd.client.refusal import RefusedError
from flwr_ppsgd.secure.terms import SecureTerms


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_the_largest_mu_is_that_of_the_exact_noise(epsilon: float, delta: float) -> None:
    sigma = dp_accounting.get_sigma_gaussian(epsilon, delta)
    mu = largest_mu(epsilon, delta)
    assert mu == pytest.approx(1 / sigma, rel=1e-4)
    assert delta_of(mu, epsilon) <= delta
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 3.0, 20.0])
def test_epsilon_is_never_below_the_exact_one(mu: float) -> None:
    exact = dp_accounting.get_epsilon_gaussian(1 / mu, 1e-6)
    assert epsilon_of(mu, 1e-6) == pytest.approx(exact, rel=1e-4)
    assert epsilon_of(mu, 1e-6) >= exact * (1 - 1e-6)


def test_delta_is_never_below_the_exact_one_where_its_terms_cancel() -> None:
    """μ = 1e-3: both terms are near ½, and leave few digits. By 60-digit arithmetic."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 60
    for step in range(100):
        mu, epsilon = mpmath.mpf(1e-3), mpmath.mpf(7e-3 + 1e-5 * step)
        above = mpmath.ncdf(mu / 2 - epsilon / mu)
        exact = above - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        assert delta_of(float(mu), float(epsilon)) >= exact


def test_the_ends() -> None:
    assert epsilon_of(0.0, 1e-6) == pytest.approx(0.0, abs=1e-12)
    assert epsilon_of(1e9, 1e-6) == math.inf
    assert largest_mu(0.0, 1e-6) > 0


POLICY = Policy(max_own_epsilon=5.0, delta=1e-5)


def in_graphs(failure: float, times: int) -> Order:
    """A secure sum of 300 clients, whose neighbours are drawn at random."""
    rules = SecureSum(honest=200, colluding=5, failure=failure)
    summed = Release(Poisson(300, 1.0), 1.0, 20.0, aggregation=rules)
    terms = SecureTerms.of(summed, None)
    plan = {"gradient": (20.0, times)}
    return Order(1, 0.1, 1.0, "mean", True, terms=terms, stage=3, plan=plan, training=3)


def test_what_random_neighbours_take_from_delta_stays_within_a_tenth_of_it() -> None:
    """η = 4e-7, and a tenth of δ is 1e-6: two sums fit, a third does not."""
    order = in_graphs(4e-7, 3)
    agreement = Agreement().with_order(order, POLICY)
    account = DeviceAccount()
    for _ in range(2):
        account = account.with_charge(order, agreement, POLICY, size=10)
    with pytest.raises(RefusedError, match=r"secure sums would take 1.2e-06 from δ"):
        account.with_charge(order, agreement, POLICY, size=10)


def test_what_is_cut_from_the_noise_counts_too() -> None:
    """(1 + e^ε)·h·d·2⁻¹⁴⁵, at the ε of the limit, however it was counted before."""
    order = in_graphs(1e-12, 9)
    account = DeviceAccount().with_charge(
        order, Agreement().with_order(order, Policy()), Policy(), size=10
    )
    wide = Policy(max_own_epsilon=79.0, delta=1e-5)
    account.admit(order, Agreement().with_order(order, wide), wide)
    wider = Policy(max_own_epsilon=79.2, delta=1e-5)
    with pytest.raises(RefusedError, match="from δ, more than a tenth"):
        account.admit(order, Agreement().with_order(order, wider), wider)
