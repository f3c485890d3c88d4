"""The paper's lines as functions: equations, limits, properties, refusals."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike

from flwr_ppsgd import FixedSize, Poisson, Release, Steps
from flwr_ppsgd.algorithm import clip_scale, clip_scales, length


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1.0, 1e160, 1e300])
def test_a_norm_neither_overflows_nor_underflows(size: float) -> None:
    assert length(np.array([3.0, 4.0]) * size) == pytest.approx(5.0 * size)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_norm_of_a_vector_that_is_not_finite_is_not_finite(bad: float) -> None:
    assert not math.isfinite(length(np.array([1.0, bad])))


def test_poisson_members_are_those_whose_uniform_is_below_the_rate() -> None:
    assert Poisson(4, 0.3).members(np.array([0.1, 0.3, 0.29, 0.9])).tolist() == [0, 2]


def test_fixed_size_draws_that_many_different_users_with_equal_chances() -> None:
    cohort, source = FixedSize(20, 5), np.random.default_rng(0)
    draws = [cohort.members(source.random(20)) for _ in range(4000)]
    assert {len(set(draw.tolist())) for draw in draws} == {5}
    shares = np.bincount(np.concatenate(draws), minlength=20) / 4000
    assert np.all(np.abs(shares - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000))


BAD: list[tuple[Callable[[], object], str]] = [  # more in contract/test_algorithm.py
    (lambda: Steps.from_ratio(0.1, -1.0), "alpha_q"),
    (lambda: Steps.from_ratio(math.nan, 1.0), "step"),
    (lambda: Steps.from_paper(0.1, math.nan, 10), "alpha"),
    (lambda: FixedSize(10, 0), "size"),
    (lambda: Release(Poisson(10, 0.5), math.nan, 1.0), "clip_norm"),
    (lambda: Release(Poisson(10, 0.5), 1.0, math.inf), "noise_multiplier"),
    (lambda: Release(Poisson(10, 0.5), 1.0, 1e9), "2^53"),
    (lambda: Release(Poisson(2**40, 0.5), 1.0, 1.0), "2^53"),
]


@pytest.mark.parametrize(("make", "names"), BAD)
def test_bad_values_get_one_line_that_names_them(make: Callable[[], object], names: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        make()
    assert names in str(error.value)
    assert "\n" not in str(error.value)


@given(st.integers(1, 2**31), st.one_of(st.just(0.0), st.floats(1e-6, 1e7)))
def test_no_reachable_sum_leaves_the_whole_numbers_of_float64(population: int, z: float) -> None:
    """The largest |Σ| is N·2ᵇ and the largest noise 13.4·z·2ᵇ; together they stay below 2⁵³."""
    release = Release(Poisson(population, 0.5), clip_norm=3.0, noise_multiplier=z)
    assert (population + 13.4 * z) * 2.0**release.grid_bits < 2.0**53
    assert release.grid == 3.0 * 2.0**-release.grid_bits


@pytest.mark.parametrize(
    ("z", "bits"), [(0.0, 32), (0.01, 32), (0.5, 27), (1.0, 26), (1.1, 25), (1000.0, 16)]
)
def test_the_grid_is_as_fine_as_the_noise_allows(z: float, bits: int) -> None:
    """At most 2²⁶ steps in a standard deviation of noise, and never more than 2³² in C."""
    assert Release(Poisson(10**5, 0.01), 1.0, noise_multiplier=z).grid_bits == bits


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=20), st.floats(1e-90, 1e90))
def test_many_vectors_are_scaled_as_each_of_them(lengths: list[float], norm: float) -> None:
    scales = [clip_scale(np.array([length]), norm) for length in lengths]
    np.testing.assert_array_equal(clip_scales(np.array(lengths), norm), scales)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_length_that_is_no_number_never_counts_as_short(dtype: DTypeLike) -> None:
    """NaN stays NaN, infinity becomes zero, and zero is left alone, all without a warning."""
    lengths: np.ndarray = np.array([0.0, np.nan, np.inf, 2.0, 8.0], dtype)
    scales = clip_scales(lengths, 4.0)
    np.testing.assert_allclose(scales, [1.0, np.nan, 0.0, 1.0, 0.5], rtol=1e-6)
    assert scales.dtype == dtype
