"""The stream and the grid: distribution, exactness, secrecy."""

import decimal
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_ppsgd import Poisson, PrivateMetrics, Release
from flwr_ppsgd.algorithm import BLOCK, LARGEST_NORMAL, Vector
from flwr_ppsgd.noise import (
    AT_ONCE,
    EDGES,
    TAIL,
    GridSum,
    RandomStream,
    cut_probability,
    exponentials,
)

RELEASE = Release(Poisson(100, 0.5), clip_norm=3.0, noise_multiplier=2.0)


def test_what_is_not_accepted_in_the_tail_is_drawn_anew_after_what_is() -> None:
    beyond = word(0, int(0.99 * 2**55))
    near, far = 2**60, 2**50  # the words of u = 2⁻⁴ and u = 2⁻¹⁴, by which TAIL is exceeded
    never, always = 2**64 - 1, 0  # is it accepted
    words = [beyond, beyond, 0, 0, near, far, 0, 0, never, always, 0, 0, near, 0, always, 0]
    by_near, by_far = (TAIL + bits * math.log(2) / TAIL for bits in (4, 14))
    np.testing.assert_allclose(Scripted(*words).normals(2), [by_far, by_near], rtol=1e-12)


@pytest.mark.parametrize("count", [1, 5, AT_ONCE, 2 * AT_ONCE + 3])
def test_every_word_is_overwritten_by_the_keystream(count: int) -> None:
    """By that of ChaCha20 from its beginning: no word is left, skipped or used twice."""
    key = bytes(range(32))
    expected = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    for before in (0, 2**64 - 1):
        words = np.full(count, before, np.uint64)
        RandomStream(key).fill(words)
        np.testing.assert_array_equal(words, np.frombuffer(expected, "<u8"))
    stream = RandomStream(key)
    parts = [stream.words(part) for part in (count // 2, count - count // 2)]
    np.testing.assert_array_equal(np.concatenate(parts), np.frombuffer(expected, "<u8"))


def test_normals_are_independent_within_a_pair_and_between_blocks() -> None:
    n = RandomStream.insecure(1).normals(4 * BLOCK).reshape(4, BLOCK)
    halves = n.reshape(8, BLOCK // 2)
    for a in range(8):
        for b in range(a):
            assert abs(np.mean(halves[a] * halves[b])) < 5 / math.sqrt(BLOCK // 2)
            assert abs(np.mean(halves[a] ** 2 * halves[b] ** 2) - 1) < 5 * math.sqrt(
                8 / (BLOCK // 2)
            )


class OutOfWordsError(Exception):
    pass


class Scripted(RandomStream):
    """RandomStream whose words are given."""

    def __init__(self, *words: int) -> None:
        self._words = list(words)

    def fill(self, words: NDArray[np.uint64]) -> None:
        count = len(words)
        taken, self._words = self._words[:count], self._words[count:]
        if len(taken) < count:
            raise OutOfWordsError
        words[:] = np.array(taken, dtype=np.uint64)


def word(layer: int, place: int) -> int:
    """The stream that put a normal at this place of −2⁵⁵ … 2⁵⁵ − 1 in a layer."""
    return (place % 2**56) << 8 | layer


def exact_exponential(numerator: int) -> float:
    """−ln u for u = numerator/2^129, by 60 decimal digits."""
    with decimal.localcontext(decimal.Context(prec=60)):
        return float(-(decimal.Decimal(numerator) / decimal.Decimal(2**129)).ln())


@pytest.mark.parametrize("high", [0, 1, 2**40, 2**63, 2**64 - 2**12])
@pytest.mark.parametrize("low", [0, 2**40, 2**64 - 2**12])
def test_exponentials_are_precise_however_large(high: int, low: int) -> None:
    exact = exact_exponential(2 * (high * 2**64 + low) + 1)
    halves = np.array([[high], [low]], dtype=np.uint64)
    assert exponentials(halves)[0] == pytest.approx(exact, rel=1e-15, abs=2.0**-52)


def test_the_layers_add_up_to_the_density_of_a_normal() -> None:
    """A layer i adds 1/x_i where all of it is below the curve, and the share of it that is where
    it is cut."""
    heights, at = np.exp(-(EDGES**2) / 2), np.linspace(0, TAIL, 10_001)[:-1]
    curve = np.exp(-(at**2) / 2)[:, None]
    below = np.clip((curve - heights[:-1]) / (heights[1:] - heights[:-1]), 0, 1)
    below[:, 0] = 1.0  # the lowest is a rectangle up to TAIL
    density = np.sum(below / EDGES[:-1], axis=1) / curve[:, 0]
    tail = (1 - EDGES[1] / EDGES[0]) / (math.sqrt(math.pi / 2) * math.erfc(TAIL / math.sqrt(2)))
    np.testing.assert_allclose(density, tail, rtol=1e-14)


@pytest.mark.parametrize("layer", [0, 1, 100, 254])
@pytest.mark.parametrize("sign", [1, -1])
def test_inside_a_layer_the_place_is_the_normal(layer: int, sign: int) -> None:
    inner = int(Fraction(EDGES[layer + 1]) / Fraction(EDGES[layer]) * 2**55)
    for place in (0, 1, 2**40 + 1, inner - 1000):
        expected = float(Fraction(sign * place) * Fraction(EDGES[layer]) / 2**55)
        assert Scripted(word(layer, sign * place)).normals(1)[0] == pytest.approx(
            expected, rel=1e-15
        )
    with pytest.raises(OutOfWordsError):  # a little beyond, more stream are asked for
        Scripted(word(layer, sign * (inner + 1000))).normals(1)


@pytest.mark.parametrize("layer", [1, 100, 255])
@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_the_inner_edge_a_height_decides(layer: int, sign: int) -> None:
    """Below the curve it stays; above it is drawn again."""
    place = int(2**55 * (0.7 + 0.3 * EDGES[layer + 1] / EDGES[layer]))
    at = sign * place / 2**55 * EDGES[layer]
    low, high = np.exp(-(EDGES[layer : layer + 2] ** 2) / 2)
    share = (math.exp(-(at**2) / 2) - low) / (high - low)
    assert 0.01 < share < 0.99
    under, over = (int((share + difference) * 2**64) for difference in (-1e-9, 1e-9))
    assert Scripted(word(layer, sign * place), under).normals(1)[0] == pytest.approx(at, rel=1e-15)
    again = Scripted(word(layer, sign * place), over, word(100, 12345))
    assert again.normals(1)[0] == pytest.approx(12345 / 2**55 * EDGES[100], rel=1e-15)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_tail_is_an_exponential_cut_down_to_a_normal(sign: int) -> None:
    beyond = word(0, sign * int(0.99 * 2**55))
    small, large, cut = (2**60, 0), (2**20, 0), (1, 0)  # words of u = 2⁻⁴, 2⁻⁴⁴ and 2⁻⁶⁴
    tiny = (0, 0)  # and 2⁻¹²⁹
    excess = 4 * math.log(2) / TAIL
    under, over = (
        int(2**64 * math.exp(-(excess**2) / 2) * (1 + difference)) for difference in (-1e-9, 1e-9)
    )
    found = Scripted(beyond, 0, *small, under, 0).normals(1)[0]
    assert found == pytest.approx(sign * (TAIL + excess), rel=1e-15)
    far = Scripted(beyond, 0, *small, over, 0, *large, *tiny).normals(1)[0]
    assert far == pytest.approx(sign * (TAIL + 11 * excess), rel=1e-15)
    assert 64 * math.log(2) / TAIL + TAIL > LARGEST_NORMAL
    within, without = (int(2**64 * math.exp(-TAIL * (at - TAIL))) for at in (13.99, 14.01))
    assert 13.98 < sign * Scripted(beyond, 0, within, 0, *tiny).normals(1)[0] < 14
    assert Scripted(beyond, 0, without, 0, *tiny, *small, under, 0).normals(1)[0] == found
    assert Scripted(beyond, 0, *cut, *tiny, *small, under, 0).normals(1)[0] == found


def test_every_layer_has_the_mass_it_should() -> None:
    """Between all edges, by χ² with 511 degrees of freedom; errors of a hundredth in all of them
    would be seen."""
    edges = np.concatenate([-EDGES[1:-1], EDGES[:0:-1]])
    expected = np.diff([0.0, *(0.5 * math.erfc(-x / math.sqrt(2)) for x in edges), 1.0])
    found = np.zeros(len(expected))
    draws = 4_000_000
    for seed in range(2):
        bins = np.searchsorted(edges, RandomStream.insecure(seed, "mass").normals(draws // 2))
        found += np.bincount(bins, minlength=len(expected))
    freedom = len(expected) - 1
    chi_squared = np.sum((found - draws * expected) ** 2 / (draws * expected))
    assert abs(chi_squared - freedom) < 5 * math.sqrt(2 * freedom)


def test_secret_bits_differ_and_insecure_bits_repeat() -> None:
    first = RandomStream.insecure(7, "noise", 1).words(4)
    np.testing.assert_array_equal(RandomStream.insecure(7, "noise", 1).words(4), first)
    for other in ((7, "noise", 2), (7, "cohort", 1), (8, "noise", 1)):
        assert not np.array_equal(RandomStream.insecure(*other).words(4), first)
    assert not np.array_equal(RandomStream.secret().words(4), RandomStream.secret().words(4))


def test_uniforms_lie_in_the_unit_interval_and_are_even() -> None:
    u = RandomStream.insecure(3).uniforms(100_000)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 100_000)
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert np.all(np.abs(counts - 5000) < 5 * math.sqrt(5000 * 0.95))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=30), st.floats(1e-50, 1e50))
def test_no_contribution_exceeds_the_clip_norm_in_exact_integers(
    values: list[float], clip_norm: float
) -> None:
    release = Release(Poisson(100, 0.5), clip_norm, noise_multiplier=0.0)
    total = GridSum(len(values), release)
    total.add(np.array(values))
    multiples = [int(k) for k in total.multiples]
    assert all(k == m for k, m in zip(multiples, total.multiples, strict=True))
    assert sum(k * k for k in multiples) <= (2**release.grid_bits) ** 2


def test_ten_million_coordinates_stay_within_the_clip_norm_in_exact_integers() -> None:
    total = GridSum(10**7, replace(RELEASE, noise_multiplier=0.01))  # the finest grid
    total.add(np.random.default_rng(0).normal(size=10**7))
    multiples = total.multiples.astype(np.int64)
    np.testing.assert_array_equal(multiples, total.multiples)
    squares = sum(int(np.dot(part, part)) for part in np.array_split(multiples, 1000))
    assert (1 - 1e-6) * 2**64 < squares <= 2**64


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(6)), st.integers(0, 100))
def test_the_sum_does_not_depend_on_the_order_of_replies(order: list[int], seed: int) -> None:
    gradients = np.random.default_rng(seed).normal(size=(6, 50))
    straight, shuffled = GridSum(50, RELEASE), GridSum(50, RELEASE)
    for i in range(6):
        straight.add(gradients[i])
        shuffled.add(gradients[order[i]])
    np.testing.assert_array_equal(straight.multiples, shuffled.multiples)


@pytest.mark.parametrize(
    ("vector", "error"),
    [
        (np.ones(4), ValueError),
        (np.ones(2), ValueError),
        (np.array([2**63 - 1, 0, 0]), ValueError),
        (np.ones(3, np.float16), ValueError),
        (np.array([1, np.nan, 1]), FloatingPointError),
        (np.array([1, 1, np.inf]), FloatingPointError),
    ],
)
@pytest.mark.parametrize("share", [None, 0.25])
def test_what_cannot_be_added_leaves_the_sum_as_it_was(
    vector: np.ndarray[Any, Any], error: type[Exception], share: float | None
) -> None:
    release = Release(Poisson(10, 0.5), clip_norm=1.0, noise_multiplier=0.0)
    total = GridSum(3, release)
    if share is not None:
        total = GridSum(2, release, PrivateMetrics({"loss": 1.0}, share))
    total.add(np.array([0.25, 0.5, -0.25]))
    with pytest.raises(error, match="a vector"):
        total.add(vector)
    np.testing.assert_array_equal(total.noisy(RandomStream.secret()), [0.25, 0.5, -0.25])


def test_float32_is_clipped_and_summed_as_the_same_numbers_in_float64() -> None:
    """The norm of a float32 vector in float32 would be too short by up to a thousandth."""
    single = np.random.default_rng(0).normal(size=5 * BLOCK + 7).astype(np.float32)
    release = Release(Poisson(10, 0.5), clip_norm=1.0, noise_multiplier=0.0)
    totals = GridSum(len(single), release), GridSum(len(single), release)
    totals[0].add(cast(Vector, single))
    totals[1].add(single.astype(np.float64))
    summed, expected = (total.noisy(RandomStream.secret()) for total in totals)
    assert np.linalg.norm(summed) <= 1.0
    np.testing.assert_allclose(summed, expected, rtol=0, atol=2 * release.grid)


def test_noise_is_rounded_before_it_meets_the_sum() -> None:
    """Whatever the sum is, it is a shift by whole multiples: added first, it would round some of
    the noise away."""
    size = 3 * BLOCK + 1
    bare, shifted = GridSum(size, RELEASE), GridSum(size, RELEASE)
    whole = np.random.default_rng(0).integers(-(2**46), 2**46, size).astype(np.float64)
    shifted.multiples += whole
    noise, moved = (
        total.noisy(RandomStream.insecure(1)) / RELEASE.grid for total in (bare, shifted)
    )
    np.testing.assert_array_equal(moved - whole, noise)


@pytest.mark.parametrize("z", [1e-6, 1.0, 65536.0])
def test_even_and_odd_multiples_are_as_likely(z: float) -> None:
    """A grid too fine for the noise would hold a few floats in each step, more in the even ones."""
    release, draws = Release(Poisson(2, 0.5), clip_norm=1.0, noise_multiplier=z), 1_000_000
    multiples = np.rint(
        GridSum(draws, release).noisy(RandomStream.insecure(4)) / release.grid
    ).astype(np.int64)
    assert abs(np.mean(multiples % 2) - 0.5) < 5 * 0.5 / math.sqrt(draws)
    assert np.std(multiples) <= 2**26 * 1.01


def test_zero_is_no_more_likely_than_its_neighbours() -> None:
    """Noise is rounded to the nearest multiple: truncation would double what falls on 0."""
    release, draws = Release(Poisson(2, 0.5), clip_norm=1.0, noise_multiplier=1e-6), 3_000_000
    noise = GridSum(draws, release).noisy(RandomStream.insecure(5))
    expected = draws * release.grid / release.noise_std / math.sqrt(2 * math.pi)
    assert expected > 200
    assert abs(np.count_nonzero(noise == 0) - expected) < 5 * math.sqrt(expected)


def test_no_number_comes_twice_and_the_tail_comes_anywhere() -> None:
    draws = 40 * BLOCK
    n = RandomStream.insecure(6).normals(draws)
    assert len(np.unique(n)) == draws
    far = np.flatnonzero(np.abs(n) > TAIL)
    assert len(far) > 250
    assert abs(np.corrcoef(far, np.abs(n[far]))[0, 1]) < 5 / math.sqrt(len(far))


def test_secret_bits_have_256_bits_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    monkeypatch.setattr("secrets.token_bytes", lambda count: key[:count])
    np.testing.assert_array_equal(RandomStream.secret().words(8), RandomStream(key).words(8))


def test_what_is_released_is_a_whole_multiple_of_the_grid() -> None:
    total = GridSum(1000, RELEASE)
    for i in range(5):
        total.add(np.random.default_rng(i).normal(size=1000))
    released = total.noisy(RandomStream.insecure(0))
    grid = Fraction(RELEASE.grid)
    assert grid == Fraction(3, 2**25)
    nearest = [round(Fraction(value) / grid) for value in released]
    assert all(float(k * grid) == value for k, value in zip(nearest, released, strict=True))


def test_truncation_moves_toward_zero_by_less_than_one_step_of_the_grid() -> None:
    g = np.random.default_rng(0).normal(size=500) / 100
    total = GridSum(500, RELEASE)
    total.add(g)
    kept = total.multiples * RELEASE.grid
    assert np.all(np.abs(kept) <= np.abs(g))
    assert np.all(np.abs(g - kept) < RELEASE.grid)


@pytest.mark.parametrize("seed", range(4))
def test_noise_on_the_sum_has_the_std_of_algorithm_1(seed: int) -> None:
    """The last line: std z·C on the sum. 1 % too much or too little fails."""
    d = 500_000
    noise = GridSum(d, RELEASE).noisy(RandomStream.insecure(seed)) / RELEASE.noise_std
    assert abs(noise.mean()) < 5 / math.sqrt(d)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / d)
    assert abs(np.mean(noise**4) - 3) < 5 * math.sqrt(96 / d)


def test_the_residual_is_negligible_for_the_largest_runs() -> None:
    """A billion coordinates, a million rounds; but not less than what is cut off."""
    assert cut_probability(1, 1) >= math.erfc(LARGEST_NORMAL / math.sqrt(2))
    assert cut_probability(10**9, 10**6) < 1e-22
