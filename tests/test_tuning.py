"""Numbers that users' data decide: the vote on the rate, and the adaptive clip norm."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_ppsgd.algorithm import FixedSize, Poisson, PrivateMetrics, Release
from flwr_ppsgd.noise import Coins, GridSum
from flwr_ppsgd.recipe import recipe, vote_noise
from flwr_ppsgd.tuning import BELOW, AdaptiveClip, SizeVote, encode_size


def vote(population: int = 1000, z: float = 0.0) -> SizeVote:
    return SizeVote(Release(Poisson(population, 1.0), 1.0, z))


def counted(wanted: SizeVote, sizes: list[float], seed: int = 0) -> np.ndarray:
    total = GridSum(wanted.powers, wanted.release)
    for size in sizes:
        total.add(encode_size(size, wanted.lowest, wanted.powers, wanted.release.clip_norm))
    return total.noisy(Coins.insecure(seed, "vote"))


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_vote_is_one_bin_or_nothing(size: float) -> None:
    """One user moves the counts by C at most, whatever the learner says."""
    one = encode_size(size, -24, 48, 2.0)
    assert np.count_nonzero(one) <= 1
    assert np.linalg.norm(one) <= 2.0
    assert (np.linalg.norm(one) == 2.0) == (0 < size < math.inf)


@pytest.mark.parametrize("size", [2.0**-23.5, 0.0116, 0.2, 1.0, 700.0])
def test_the_typical_size_is_found_within_a_factor_of_two(size: float) -> None:
    rng = np.random.default_rng(0)
    sizes = (size * np.exp(0.3 * rng.normal(size=1000))).tolist()
    found = vote().typical(counted(vote(), sizes))
    assert found is not None
    assert size / 2 < found < 2 * size


@pytest.mark.parametrize("seed", range(20))
def test_the_noise_that_the_recipe_gives_a_vote_does_not_hide_it(seed: int) -> None:
    """At ε = ½ with 580 users, as for handwriting."""
    z = vote_noise(580, 0.5, 1e-4)
    assert z is not None
    rng = np.random.default_rng(seed)
    sizes = (0.0116 * np.exp(0.25 * rng.normal(size=580))).tolist()
    wanted = vote(580, z)
    found = wanted.typical(counted(wanted, sizes, seed))
    assert found is not None
    assert 0.0116 / 4 < found < 4 * 0.0116


def test_noise_alone_is_not_taken_for_a_size() -> None:
    wanted = vote(580, 36.0)
    found = [wanted.typical(counted(wanted, [], seed)) for seed in range(200)]
    assert sum(size is not None for size in found) <= 6  # about .3 % each by the threshold


def test_nobody_who_can_answer_gives_no_size() -> None:
    assert vote().typical(counted(vote(), [0.0] * 1000)) is None


def test_a_small_population_does_not_vote() -> None:
    assert vote_noise(100, 1.0, 1e-3) is None
    assert recipe(population=100, epsilon=1.0, delta=1e-3).vote is None
    assert "too small" in recipe(population=100, epsilon=1.0, delta=1e-3).rate_from


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_the_vote_and_the_rounds_together_cost_epsilon(epsilon: float, rate: float) -> None:
    from flwr_ppsgd.privacy import Ledger

    made = recipe(population=2000, epsilon=epsilon, delta=1e-5, rate=rate)
    assert made.vote is not None
    ledger = Ledger(1e-5).record(made.vote.release).record(made.release, made.rounds)
    assert 0.99 * epsilon < ledger.epsilon() <= epsilon


def test_without_noise_the_recipe_has_none_anywhere() -> None:
    made = recipe(population=50, epsilon=math.inf, delta=1e-3)
    assert made.release.noise_multiplier == 0
    assert made.vote is not None
    assert made.vote.release.noise_multiplier == 0


@pytest.mark.parametrize(
    "release",
    [
        Release(Poisson(10, 0.5), 1.0, 1.0),
        Release(FixedSize(10, 10), 1.0, 1.0),
        Release(Poisson(10, 1.0), 1.0, 1.0, normalise=True),
        Release(Poisson(10, 1.0), 1.0, 1.0, total_batch=5),
    ],
)
def test_a_vote_asks_everybody_and_counts_users(release: Release) -> None:
    with pytest.raises(ValueError, match="vote"):
        SizeVote(release)


def test_the_clip_norm_moves_towards_the_quantile() -> None:
    adaptive = AdaptiveClip(quantile=0.5, rate=0.2)
    assert adaptive.after(1.0, bit=0.5, first=1.0) == pytest.approx(math.exp(-0.1))
    assert adaptive.after(1.0, bit=-0.5, first=1.0) == pytest.approx(math.exp(0.1))
    assert adaptive.after(1.0, bit=0.0, first=1.0) == 1.0
    assert adaptive.after(1.0, bit=900.0, first=1.0) == pytest.approx(math.exp(-0.1))


def test_the_bit_shares_the_clip_norm_with_other_measures() -> None:
    measures = AdaptiveClip(share=0.1).measures(PrivateMetrics({"loss": 2.0}, share=0.2))
    assert measures.share == pytest.approx(0.3)
    assert list(measures.bounds) == ["loss", BELOW]
    with pytest.raises(ValueError, match="below 1"):
        AdaptiveClip(share=0.5).measures(PrivateMetrics({"loss": 2.0}, share=0.6))
