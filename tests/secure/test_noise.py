"""Shares of the noise: together the noise that is charged, on the grid, and at z = 0 nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from flwr_ppsgd import FixedSize, Poisson, PrivateMetrics, Release, SecureSum
from flwr_ppsgd.noise import GridSum, RandomStream, cut_probability, secure_input
from tests.support.secure import played

RULES = SecureSum(honest=8, colluding=1)
RELEASE = Release(Poisson(10, 1.0), 3.0, 2.0, aggregation=RULES)
SILENT = replace(RELEASE, noise_multiplier=0.0)


def inputs(release: Release, vectors: list[np.ndarray], seed: int = 0) -> np.ndarray:
    size = len(vectors[0])
    return np.array(
        [
            secure_input(vector, size, release, None, RandomStream.insecure(seed, place))
            for place, vector in enumerate(vectors)
        ]
    )


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 1e6])
def test_without_noise_the_sum_is_that_of_the_central_grid_bit_for_bit(scale: float) -> None:
    """The same integers, through masks and dropouts."""
    source = np.random.default_rng(0)
    vectors = [scale * source.normal(size=40) for _ in range(10)]
    x = inputs(SILENT, vectors)
    nine = range(9)
    total = played(RULES, x, [range(10), range(10), nine, nine]).total()
    central = GridSum(40, replace(SILENT, aggregation=None))
    for vector in vectors[:9]:
        central.add(vector)
    assert SILENT.grid == replace(SILENT, aggregation=None).grid
    assert np.array_equal(total * SILENT.grid, central.noisy(RandomStream.secret()))


def test_without_noise_private_measures_are_bounded_as_by_the_server() -> None:
    metrics = PrivateMetrics({"loss": 2.0, "hits": 1.0}, share=0.2)
    source = np.random.default_rng(1)
    gradient = source.normal(size=20) * 9
    measures = metrics.encode({"loss": 50.0, "hits": 0.3}, SILENT.clip_norm)
    vector = np.concatenate([gradient, measures])
    central = GridSum(20, replace(SILENT, aggregation=None), metrics)
    central.add(vector)
    x = secure_input(vector, 20, SILENT, metrics, RandomStream.secret())
    assert np.array_equal(x * SILENT.grid, central.noisy(RandomStream.secret()))
    assert np.linalg.norm(x[:20]) * SILENT.grid <= SILENT.clip_norm * math.sqrt(0.8)
    assert np.linalg.norm(x[20:]) * SILENT.grid <= SILENT.clip_norm * math.sqrt(0.2)


@pytest.mark.parametrize("bad", [None, np.full(5, np.nan), np.array([1, np.inf, 0, 0, 0])])
def test_a_learner_that_fails_sends_its_share_of_the_noise(bad: np.ndarray | None) -> None:
    failed = secure_input(bad, 5, RELEASE, None, RandomStream.insecure(3))
    zero = secure_input(np.zeros(5), 5, RELEASE, None, RandomStream.insecure(3))
    assert np.array_equal(failed, zero)
    assert np.all(failed != 0)


@pytest.mark.parametrize("seed", range(2))
def test_h_shares_are_the_noise_that_is_charged(seed: int) -> None:
    """Mean, variance and kurtosis of the sum of h shares, within 5 standard errors."""
    d = 50_000
    shares = inputs(RELEASE, [np.zeros(d)] * RULES.honest, seed)
    z = shares.sum(axis=0) * RELEASE.grid / RELEASE.clip_norm
    normal = z / RELEASE.noise_multiplier
    assert abs(normal.mean()) < 5 / math.sqrt(d)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / d)
    assert abs((normal**4).mean() - 3) < 5 * math.sqrt(96 / d)


def test_each_share_is_independent_of_the_others() -> None:
    d = 20_000
    shares = inputs(RELEASE, [np.zeros(d)] * 4) * RELEASE.grid / RELEASE.share_std
    for one in range(4):
        for other in range(one):
            assert abs(np.mean(shares[one] * shares[other])) < 5 / math.sqrt(d)


@pytest.mark.parametrize("z", [0.3, 1.0, 37.0, 5e3])
@pytest.mark.parametrize("honest", [2, 9, 900, 800_000])
def test_a_share_spans_2_to_the_20_to_2_to_the_26_steps(z: float, honest: int) -> None:
    rules = SecureSum(honest, 10)
    release = Release(FixedSize(1_000_000, 900_000), 0.7, z, aggregation=rules)
    steps = release.share_std / release.grid
    assert 2**20 <= steps <= 2**26
    largest = 1_000_000 * (release.clip_norm / release.grid + 14 * steps)
    assert largest < 2**63


def test_too_little_noise_for_its_shares_is_refused() -> None:
    with pytest.raises(ValueError, match=r"z/√honest = .* too small for the grid, got 0.0002"):
        Release(Poisson(1000, 1.0), 1.0, 2e-4, aggregation=SecureSum(900, 10))


def test_more_honest_clients_than_a_round_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most the 10 clients .* got 12: lower honest"):
        Release(FixedSize(100, 10), 1.0, 1.0, aggregation=SecureSum(9, 3))
    with pytest.raises(ValueError, match="at most the 20 clients"):
        Release(Poisson(20, 0.1), 1.0, 1.0, aggregation=SecureSum(19, 3))


FIVE = {"honest": 5, "colluding": 1}
BAD_RULES: list[tuple[dict[str, float], str]] = [
    ({"honest": 1}, "honest must be at least 2"),
    ({"honest": 2.5}, "honest must be a whole number"),
    ({"colluding": -1}, "colluding must be a whole number"),
    ({"colluding": True}, "colluding must be a whole number"),
    ({"failure": 0.0}, "failure must be in"),
    ({"failure": math.nan}, "failure must be in"),
    ({"neighbours": 1.5}, "neighbours must be a whole number"),
]


@pytest.mark.parametrize(("rules", "text"), BAD_RULES)
def test_rules_that_are_none_are_refused(rules: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SecureSum(**{**FIVE, **rules})  # type: ignore[arg-type]


def test_every_share_has_a_tail_to_pay_for() -> None:
    assert cut_probability(100, 10, shares=8) == 8 * cut_probability(100, 10)
    assert RELEASE.noise_shares == 8
