"""Privacy loss distributions against numerical integrals, plain convolution and dp-accounting."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from flwr_ppsgd import loss_distribution as distribution
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.epsilon import Priced, Relation, _by_pld_near, _interval, by_pld
from flwr_ppsgd.loss_distribution import Losses

NEIGHBOURS = {
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}


def one_way(kind: str, rate: float, z: float, spacing: float) -> Losses:
    if kind == "with user":
        return distribution.zero_out(rate, z, spacing)[0]
    if kind == "without user":
        return distribution.zero_out(rate, z, spacing)[1]
    if kind == "gaussian":
        return distribution.gaussian(z, spacing)
    return distribution.replace_one(rate, z, spacing)


def densities(kind: str, rate: float, z: float, x: Vector) -> tuple[Vector, Vector]:
    """P and Q, from their definition."""

    def mixture(shift: float, weight: float) -> Vector:
        drawn = norm.pdf(x, loc=shift, scale=z)
        mixed: Vector = (1 - weight) * norm.pdf(x, scale=z) + weight * drawn
        return mixed

    if kind == "with user":
        return mixture(1.0, rate), mixture(0.0, 1.0)
    if kind == "without user":
        return mixture(0.0, 1.0), mixture(1.0, rate)
    if kind == "gaussian":
        return mixture(1.0, 1.0), mixture(0.0, 1.0)
    return mixture(1.0, rate), mixture(-1.0, rate)


def exact_delta(kind: str, rate: float, z: float, epsilon: float) -> float:
    """∫ max(0, P − e^ε·Q), by the trapezoid rule."""
    x = np.linspace(-1 - 10 * z, 1 + 10 * z, 200_001)
    p, q = densities(kind, rate, z, x)
    return float(np.trapezoid(np.maximum(0.0, p - math.exp(epsilon) * q), x))


def delta_of(losses: Losses, spacing: float, epsilon: float) -> float:
    """δ(ε) of masses on the grid, from its definition."""
    gaps = epsilon - spacing * losses.indices
    return losses.infinite + float(np.sum(losses.masses * np.maximum(0.0, -np.expm1(gaps))))


KINDS = ["with user", "without user", "replaced", "gaussian"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rate", "z"), [(0.01, 1.0), (0.3, 0.5), (0.9, 4.0)])
def test_delta_is_exact_on_the_grid_and_an_upper_bound_between(
    kind: str, rate: float, z: float
) -> None:
    spacing = 0.01
    losses = one_way(kind, rate, z, spacing)
    assert losses.masses.min() >= 0
    assert losses.masses.sum() + losses.infinite == pytest.approx(1.0, abs=1e-12)
    for step in (-7, 0, 1, 5, 20):
        on_grid = exact_delta(kind, rate, z, step * spacing)
        assert delta_of(losses, spacing, step * spacing) == pytest.approx(on_grid, abs=1e-9)
        between = exact_delta(kind, rate, z, (step + 0.4) * spacing)
        found = delta_of(losses, spacing, (step + 0.4) * spacing)
        assert between - 1e-9 <= found <= between + spacing


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(
    rate=st.floats(1e-5, 1 - 1e-9),
    z=st.floats(0.05, 1000.0),
    fineness=st.floats(0.01, 2.0),
)
def test_no_round_loses_mass(kind: str, rate: float, z: float, fineness: float) -> None:
    """Masses sum to one under P, and under Q to one or to less by what P never gives."""
    share = 1.0 if kind == "gaussian" else rate
    spacing = min(1.0, fineness * Priced(share, z, 1).spread)
    losses = one_way(kind, rate, z, spacing)
    assert losses.masses.sum() + losses.infinite == pytest.approx(1.0, abs=1e-12)
    under_q = np.sum(losses.masses * np.exp(-spacing * losses.indices))
    assert under_q == pytest.approx(1.0, abs=1e-7)
    assert losses.infinite < 1e-20


def small(first: int, masses: list[float], infinite: float) -> Losses:
    return Losses(first, np.array(masses), infinite)


def test_a_composition_is_the_convolution_of_its_parts() -> None:
    """Two of one kind and three of another, by hand."""
    one = small(-1, [0.3, 0.2, 0.4], 0.1)
    other = small(2, [0.5, 0.48], 0.02)
    direct = np.array([1.0])
    for part in (one, one, other, other, other):
        direct = np.convolve(direct, part.masses)
    found = distribution.composed([(one, 2), (other, 3)], tail=1e-6)
    assert found.first == -2 + 6
    assert found.masses == pytest.approx(direct, abs=1e-14)
    assert found.infinite == pytest.approx(1 - 0.9**2 * 0.98**3 + 1e-6, abs=1e-14)


@pytest.mark.parametrize("times", [1, 10, 1000, 100_000])
@pytest.mark.parametrize("rare", [1e-6, 0.01, 0.5])
@pytest.mark.parametrize("tail", [1e-4, 1e-12])
def test_what_lies_outside_the_window_is_at_most_what_is_charged(
    times: int, rare: float, tail: float
) -> None:
    """Losses of −1 and +1 are a binomial variable, whose tails are known."""
    losses = small(-1, [1 - rare, 0.0, rare], 0.0)
    lowest, highest = distribution._window([(losses, times)], tail)
    above = binom.sf((highest + times) / 2, times, rare)
    below = binom.cdf((lowest + times) / 2 - 0.5, times, rare)
    assert above <= tail
    assert below <= tail
    expected = times * (2 * rare - 1)
    spread = math.sqrt(4 * times * rare * (1 - rare))
    widths = 4 * math.sqrt(-2 * math.log(tail)) * (spread + 2)
    assert highest - expected <= widths
    assert expected - lowest <= widths


def test_epsilon_is_where_delta_reaches_its_target() -> None:
    losses = small(-2, [0.2, 0.2, 0.3, 0.2, 0.05], 0.05)
    for delta in (0.051, 0.06, 0.08, 0.1, 0.12):
        epsilon = distribution.epsilon_of(losses, 0.5, delta)
        assert delta_of(losses, 0.5, epsilon) == pytest.approx(delta, rel=1e-9)
    assert distribution.epsilon_of(losses, 0.5, 0.049) == math.inf
    assert distribution.epsilon_of(losses, 0.5, 0.3) == 0.0


def theirs(releases: tuple[Priced, ...], delta: float, relation: Relation, spacing: float) -> float:
    accountant = pld.PLDAccountant(NEIGHBOURS[relation], spacing)
    for priced in releases:
        noise = GaussianDpEvent(priced.noise_multiplier)
        event = PoissonSampledDpEvent(priced.rate, noise) if priced.rate < 1 else noise
        accountant.compose(event, priced.times)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    "releases",
    [
        (Priced(0.01, 1.0, 1000),),
        (Priced(0.5, 10.0, 100),),
        (Priced(0.01, 0.3, 100),),
        (Priced(1e-4, 0.733, 10**6),),
        (Priced(0.2, 0.2, 3),),
        (Priced(1 - 1e-9, 50.0, 1000),),
        (Priced(0.05, 2.0, 300), Priced(1.0, 7.0, 1)),
        (Priced(1e-6, 0.5, 10), Priced(0.1, 3.0, 200), Priced(0.3, 20.0, 77)),
    ],
    ids=str,
)
def test_epsilon_agrees_with_dp_accounting_at_the_same_spacing(
    releases: tuple[Priced, ...], relation: Relation
) -> None:
    """Both are upper bounds by the same construction; what differs is rounding and the window."""
    rough = 1.0
    spacing = _interval(releases, rough)
    found = _by_pld_near(rough, releases, 1e-6, relation)
    assert found == pytest.approx(theirs(releases, 1e-6, relation, spacing), rel=2e-4)


def test_a_ledger_of_fifty_releases_agrees_with_dp_accounting() -> None:
    releases = tuple(Priced(0.01, 1 + 0.02 * k, 20) for k in range(50))
    spacing = _interval(releases, 1.0)
    found = _by_pld_near(1.0, releases, 1e-5, "zero-out")
    assert found == pytest.approx(theirs(releases, 1e-5, "zero-out", spacing), rel=1e-4)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    "releases",
    [
        (Priced(0.001, 0.6, 3000), Priced(0.1, 3.0, 50)),
        (Priced(1e-5, 1.0, 20_000), Priced(0.3, 6.0, 100)),
        (Priced(0.02, 0.8, 2), Priced(0.1, 30.0, 4000), Priced(1.0, 12.0, 1)),
    ],
    ids=str,
)
def test_a_mix_of_unlike_releases_is_within_one_percent_of_a_fine_spacing(
    releases: tuple[Priced, ...], relation: Relation
) -> None:
    """The spacing follows the mean variance of a round, not the finest release."""
    finest = theirs(releases, 1e-5, relation, _interval(releases, 1.0) / 8)
    found = by_pld(releases, 1e-5, relation)
    assert finest * (1 - 1e-4) < found < finest * 1.01
