"""The closed form on the device against the accountant that servers use."""

import math

import dp_accounting
import pytest

from flwr_ppsgd.client.account import delta_of, epsilon_of, largest_mu


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


def test_the_ends() -> None:
    assert epsilon_of(0.0, 1e-6) == pytest.approx(0.0, abs=1e-12)
    assert epsilon_of(1e9, 1e-6) == math.inf
    assert largest_mu(0.0, 1e-6) > 0
