"""What the server does with a released gradient."""

import math

import numpy as np
import pytest

from flwr_ppsgd.algorithm import Poisson, Release, server_step
from flwr_ppsgd.optimizers import SGD, Adam, Momentum, Released, Schedule, State

RELEASE = Release(Poisson(4, 1.0), clip_norm=2.0, noise_multiplier=0.5)
W = np.array([1.0, -2.0, 0.5])
MEANS = [np.array([0.4, -0.2, 0.0]), np.array([0.3, 0.1, 0.0]), np.array([-0.1, 0.2, 0.0])]


def released(mean: np.ndarray, noise_std: float = 0.25) -> Released:
    return Released(mean * RELEASE.denominator, RELEASE, noise_std, RELEASE.clip_norm)


def after(optimizer: SGD | Momentum | Adam, step: float, noise_std: float = 0.25) -> np.ndarray:
    w = W
    state = optimizer.initial(len(W))
    for mean in MEANS:
        w, state = optimizer.moved(w, released(mean, noise_std), step, state)
    return w


def test_sgd_is_the_papers_step() -> None:
    expected = W
    for mean in MEANS:
        expected = server_step(expected, [], RELEASE, 0.1, mean * RELEASE.denominator)
    np.testing.assert_array_equal(after(SGD(), 0.1), expected)


def test_momentum_adds_up_what_was_released() -> None:
    first, second, third = MEANS
    motion = first + (0.5 * first + second) + (0.25 * first + 0.5 * second + third)
    np.testing.assert_allclose(after(Momentum(0.5), 0.1), W - 0.1 * motion, rtol=1e-12)


def test_nesterov_looks_ahead_by_one_step() -> None:
    w, _ = Momentum(0.5, nesterov=True).moved(
        W, released(MEANS[0]), 0.1, Momentum(0.5).initial(len(W))
    )
    np.testing.assert_allclose(w, W - 0.1 * 1.5 * MEANS[0], rtol=1e-12)


def test_the_first_step_of_adam_by_hand() -> None:
    """m̂ = ḡ and v̂ = ḡ² after one step: where ḡ² − σ² is above σ², that is what is divided by."""
    mean = np.array([0.4, 0.3, 0.1])
    w, _ = Adam().moved(W, released(mean, noise_std=0.25), 0.1, Adam().initial(3))
    variance = 0.25**2
    roots = np.sqrt([0.16 - variance, variance, variance])
    np.testing.assert_allclose(w, W - 0.1 * mean / roots, rtol=1e-12)


def test_adam_without_noise_is_plain_adam() -> None:
    """Two steps of the published rule, with ε̂ = 0."""
    mean = np.zeros(3)
    squares = np.zeros(3)
    w = W
    for done, gradient in enumerate(MEANS, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        squares = 0.99 * squares + 0.01 * gradient**2
        root = np.sqrt(squares / (1 - 0.99**done))
        root[2] = 1.0  # nothing moves there
        w = w - 0.1 * mean / (1 - 0.9**done) / root
    np.testing.assert_allclose(after(Adam(), 0.1, noise_std=0.0), w, rtol=1e-12)


def test_a_coordinate_of_noise_alone_moves_less_than_by_plain_adam() -> None:
    rng = np.random.default_rng(0)
    moved = {}
    for corrected in (True, False):
        optimizer = Adam(corrected=corrected)
        w = np.zeros(2000)
        state: State = optimizer.initial(len(w))
        for _ in range(50):
            noise = Released(rng.normal(size=len(w)) * 4.0, RELEASE, 1.0, 2.0)
            w, state = optimizer.moved(w, noise, 0.1, state)
        moved[corrected] = float(np.sqrt(np.mean(w**2)))
    assert moved[True] < 1.1 * moved[False]


def test_a_scale_of_everything_cancels_in_adam() -> None:
    """C needs no tuning: gradients, noise and floor grow with it."""
    larger = Release(Poisson(4, 1.0), clip_norm=200.0, noise_multiplier=0.5)
    one = Adam()
    w, _ = one.moved(W, released(MEANS[0], 0.1), 0.1, one.initial(3))
    many = Released(MEANS[0] * 400.0, larger, 10.0, 200.0)
    scaled, _ = one.moved(W, many, 0.1, one.initial(3))
    np.testing.assert_allclose(scaled, w, rtol=1e-12)


def test_the_noise_really_added_counts_not_a_constant() -> None:
    """σ̂² is averaged like v̂: a round with more noise than the last shows in it."""
    optimizer = Adam()
    state = optimizer.initial(3)
    for noise_std in (1.0, 3.0):
        _, state = optimizer.moved(W, released(MEANS[0], noise_std), 0.1, state)
    assert state["noise"][0] == pytest.approx(0.99 * 0.01 * 1 + 0.01 * 9)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule(), [1, 1, 1]),
        (Schedule("linear", rounds=4), [1, 0.75, 0.5]),
        (Schedule("cosine", rounds=4), [1, 0.5 + 0.5 * math.sqrt(0.5), 0.5]),
        (Schedule("inverse-root"), [1, math.sqrt(0.5), math.sqrt(1 / 3)]),
        (Schedule(warm_up=1), [0.5, 1, 1]),
    ],
)
def test_schedules_by_hand(schedule: Schedule, factors: list[float]) -> None:
    assert [schedule.factor(done) for done in range(3)] == pytest.approx(factors)


def test_the_schedule_goes_on_where_the_state_is() -> None:
    """A restart in the middle must not begin the schedule anew."""
    optimizer = SGD(Schedule("linear", rounds=4))
    w, state = optimizer.moved(W, released(MEANS[0]), 1.0, optimizer.initial(3))
    kept = {name: vector.copy() for name, vector in state.items()}
    moved, _ = optimizer.moved(w, released(MEANS[1]), 1.0, kept)
    np.testing.assert_allclose(moved, w - 0.75 * MEANS[1], rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Momentum(1.0),
        lambda: Adam(beta1=-0.1),
        lambda: Adam(beta2=math.nan),
        lambda: Schedule("linear"),
        lambda: Schedule("cosine", rounds=0),
        lambda: Schedule(warm_up=-1),
        lambda: Schedule("upwards"),  # type: ignore[arg-type]
    ],
)
def test_values_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"must be|needs rounds"):
        make()  # type: ignore[operator]
