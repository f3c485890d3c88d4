"""The paper's lines as functions, and the noise of Algorithm 1's last line as it is released."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from hypothesis import given
from hypothesis import strategies as st

from flwr_ppsgd import PPSGD, FixedSize, Poisson, Release, Steps, client_app
from flwr_ppsgd.algorithm import client_step, clip
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.targets import Floats, Target, flat, user_of
from tests.support.steps import noisy_step


def test_a_vector_inside_the_ball_is_left_alone() -> None:
    np.testing.assert_array_equal(clip(np.array([3.0, 3.9]), 5.0), [3.0, 3.9])


def test_a_longer_vector_is_scaled_to_the_clip_norm() -> None:
    """Algorithm 1, line 8: (30, 40) has norm 50."""
    np.testing.assert_allclose(clip(np.array([30.0, 40.0]), 5.0), [3.0, 4.0], rtol=1e-9)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=40), st.floats(1e-90, 1e90))
def test_a_clipped_norm_never_exceeds_the_clip_norm(values: list[float], norm: float) -> None:
    clipped = clip(np.array(values), norm)
    exact = math.hypot(*clipped.tolist())
    assert exact <= norm
    np.testing.assert_allclose(clip(clipped, norm), clipped, rtol=1e-12)


def test_a_client_sends_the_clipped_gradient_and_steps_theta_by_the_whole_one() -> None:
    """θ's own gradient is not clipped: θ − .1·(30, 40)."""
    g = np.array([30.0, 40.0])
    sent, theta = client_step(np.ones(2), g, g, clip_norm=5.0, step=0.1)
    np.testing.assert_allclose(sent, [3.0, 4.0], rtol=1e-9)
    np.testing.assert_allclose(theta, [-2.0, -3.0])


def test_the_server_divides_by_the_expected_cohort_and_not_by_the_replies() -> None:
    """One reply of four enrolled users at rate 1: D stays 4."""
    four = Release(Poisson(4, 1.0), clip_norm=5.0, noise_multiplier=0.0)
    w = noisy_step(np.zeros(2), [np.array([3.0, 4.0])], four, step=1.0, noise=0.0)
    np.testing.assert_allclose(w, [-0.75, -1.0])


@pytest.mark.parametrize(
    ("release", "denominator"),
    [
        (Release(Poisson(50, 1.0), 1.0, 1.0), 50.0),  # Algorithm 1: N
        (Release(Poisson(50, 0.1), 1.0, 1.0, total_batch=700), 70.0),  # Algorithm 2: qM
        (Release(Poisson(50, 0.1), 1.0, 1.0), 5.0),  # Algorithm 3: qN
        (Release(FixedSize(50, 7), 1.0, 1.0), 7.0),  # the experiments: Q
        (Release(FixedSize(50, 5), 1.0, 1.0, total_batch=700), 70.0),
    ],
)
def test_the_divisor_is_the_expected_weight_of_a_cohort(
    release: Release, denominator: float
) -> None:
    assert release.denominator == pytest.approx(denominator)


@pytest.mark.parametrize(
    ("alpha_q", "shared", "personal"),
    [(0.0, 0.0, 0.4), (0.3, 0.12, 0.4), (1.0, 0.4, 0.4), (4.0, 0.4, 0.1), (math.inf, 0.4, 0.0)],
)
def test_from_ratio_gives_the_larger_step_and_the_ratio(
    alpha_q: float, shared: float, personal: float
) -> None:
    steps = Steps.from_ratio(0.4, alpha_q)
    assert [steps.shared, steps.personal] == pytest.approx([shared, personal])


def test_from_paper_is_alpha_eta_and_eta_over_d() -> None:
    steps = Steps.from_paper(eta=2.0, alpha=0.3, denominator=10.0)
    assert [steps.shared, steps.personal] == pytest.approx([0.6, 0.2])


def test_an_infinite_alpha_is_referred_to_from_ratio() -> None:
    with pytest.raises(ValueError, match=r"Steps\.from_ratio"):
        Steps.from_paper(eta=1.0, alpha=math.inf, denominator=10.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Steps.from_ratio(0.1, math.nan), "alpha_q"),
        (lambda: Steps.from_ratio(-0.1, 1.0), "step"),
        (lambda: Steps.from_paper(0.1, 1.0, 0.0), "denominator"),
        (lambda: Steps(shared=math.inf, personal=0.0), "shared"),
        (lambda: Poisson(10, 0.0), "rate"),
        (lambda: Poisson(10, 1.0001), "rate"),
        (lambda: Poisson(10, math.nan), "rate"),
        (lambda: Poisson(0, 0.5), "population"),
        (lambda: FixedSize(10, 11), "size"),
        (lambda: Release(Poisson(10, 0.5), 0.0, 1.0), "clip_norm"),
        (lambda: Release(Poisson(10, 0.5), math.inf, 1.0), "clip_norm"),
        (lambda: Release(Poisson(10, 0.5), 1.0, -1.0), "noise_multiplier"),
        (lambda: Release(Poisson(10, 0.5), 1.0, math.nan), "noise_multiplier"),
        (lambda: Release(Poisson(10, 0.5), 1.0, 1.0, total_batch=0), "total_batch"),
    ],
)
def test_a_bad_value_gets_one_line_that_names_it(make: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        make()
    assert "\n" not in str(error.value)


# What is released. Secret noise: the bounds follow from the number of coordinates.

D = 20_000
BOUND = 5  # standard errors


def silent_learner(context: Context) -> Target:  # noqa: ARG001
    """At its optimum already: it sends zero."""
    return Target(np.zeros(D))


def loud_learner(context: Context) -> Target:
    """Far away from w = 0, each user in a direction of its own."""
    far = np.zeros(D)
    far[user_of(context)] = -1e6
    return Target(far)


def released(release: Release, learner: Callable[[Context], Target], step: float) -> Floats:
    """The first w of a training that begins at w = 0."""
    strategy = PPSGD(release=release, steps=Steps(step, 0.0), delta=1e-6)
    grid = InProcessGrid(client_app(learner), release.cohort.population)
    w0 = ArrayRecord([np.zeros(D)])
    return flat(strategy.start(grid, w0, num_rounds=1).arrays)


@pytest.mark.parametrize(
    ("release", "step"),
    [
        (Release(Poisson(8, 1.0), clip_norm=2.0, noise_multiplier=3.0), 0.5),
        (Release(Poisson(40, 0.1), clip_norm=0.1, noise_multiplier=0.7), 2.0),
        (Release(FixedSize(40, 4), clip_norm=1.0, noise_multiplier=1.0), 1.0),
        (Release(Poisson(8, 1.0), clip_norm=1.0, noise_multiplier=1.0, total_batch=80), 1.0),
    ],
)
def test_the_noise_of_the_published_w_has_std_s_w_z_c_over_d(release: Release, step: float) -> None:
    """Mean, variance and kurtosis of a Gaussian, and no correlation between coordinates."""
    w = released(release, silent_learner, step)
    scale = step * release.noise_multiplier * release.clip_norm / release.denominator
    noise = w / scale
    assert abs(noise.mean()) < BOUND / math.sqrt(D)
    assert abs(noise.var() - 1) < BOUND * math.sqrt(2 / D)
    assert abs(np.mean(noise**4) - 3) < BOUND * math.sqrt(96 / D)
    assert abs(np.mean(noise[1:] * noise[:-1])) < BOUND / math.sqrt(D)


def test_the_noise_of_every_round_is_new() -> None:
    release = Release(Poisson(8, 1.0), clip_norm=1.0, noise_multiplier=1.0)
    strategy = PPSGD(release=release, steps=Steps(8.0, 0.0), delta=1e-6)
    seen: list[Floats] = []
    strategy.start(
        InProcessGrid(client_app(silent_learner), 8),
        ArrayRecord([np.zeros(D)]),
        num_rounds=2,
        evaluate_fn=lambda _, arrays: seen.append(flat(arrays)),
    )
    first = seen[1]
    # w has moved to the first noise, and everyone pulls back by a vector of norm C = 1
    second = seen[2] - seen[1]
    correlation = np.corrcoef(first, second)[0, 1]
    assert abs(correlation) < (BOUND + 8) / math.sqrt(D)


def test_two_trainings_never_share_their_noise() -> None:
    release = Release(Poisson(8, 1.0), clip_norm=1.0, noise_multiplier=1.0)
    first = released(release, silent_learner, 1.0)
    second = released(release, silent_learner, 1.0)
    assert abs(np.corrcoef(first, second)[0, 1]) < BOUND / math.sqrt(D)


def test_the_server_clips_each_user_to_c_and_divides_by_d() -> None:
    """User i pulls coordinate i with a force of 10⁶: w_i = −s_w·C/D."""
    release = Release(Poisson(8, 1.0), clip_norm=2.0, noise_multiplier=0.0)
    w = released(release, loud_learner, 4.0)
    np.testing.assert_allclose(w[:8], -4.0 * 2.0 / 8, rtol=1e-8)
    np.testing.assert_array_equal(w[8:], 0.0)


# Who takes part. Each user pulls a coordinate of its own, so the first w shows who was drawn.


def drawn(release: Release) -> list[int]:
    w = released(release, loud_learner, 1.0)
    return np.flatnonzero(w).tolist()


def test_a_poisson_cohort_is_drawn_by_a_coin_for_each_user() -> None:
    """400 users at q = .3: the number drawn is binomial, and another one in another training."""
    release = Release(Poisson(400, 0.3), clip_norm=1.0, noise_multiplier=0.0)
    first = drawn(release)
    second = drawn(release)
    for cohort in (first, second):
        assert abs(len(cohort) - 120) < BOUND * math.sqrt(400 * 0.3 * 0.7)
    both = len(set(first) & set(second))
    assert abs(both - 36) < BOUND * math.sqrt(400 * 0.09 * 0.91)


def test_a_cohort_of_fixed_size_has_that_many_users() -> None:
    release = Release(FixedSize(60, 20), clip_norm=1.0, noise_multiplier=0.0)
    first = drawn(release)
    second = drawn(release)
    assert len(first) == len(second) == 20
    assert first != second  # equal with probability 1 / (60 choose 20) < 1e-15


def test_rate_one_draws_everyone() -> None:
    assert drawn(Release(Poisson(30, 1.0), 1.0, 0.0)) == list(range(30))
