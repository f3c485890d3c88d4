"""Trajectories: those of the authors' own code, and small ones that a reader can redo by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context

from flwr_ppsgd import PPSGD, FixedSize, Ledger, Order, Poisson, Release, Steps, client_app
from flwr_ppsgd.algorithm import client_step
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.targets import Floats, Target, flat, nodes, strategy, user_of, zeros
from tests.support.steps import noisy_step

GOLDEN = Path(__file__).parents[1] / "golden"
SYNTHETIC = [f"a{a}_s{s}" for a in ("0.3", "3", "-1", "0") for s in (0, 5)]
CLASSES = ["a0.3_s0", "a0.3_s2", "a-1_s2"]


def load(name: str) -> dict[str, Floats]:
    with np.load(GOLDEN / name) as file:
        return dict(file)


def steps_of(key: str, step: float) -> Steps:
    a = float(key[1:].split("_", maxsplit=1)[0])
    return Steps.from_ratio(step, math.inf if a == -1 else a)


def noise_of(key: str) -> float:
    return float(key.split("_s")[1])


@pytest.mark.parametrize("key", SYNTHETIC)
def test_the_functions_follow_the_authors_regression(key: str) -> None:
    """Algorithm 1 with everything clipped: w, every θ_i, the excess risk and ε, round by round."""
    data = load("synthetic_all_clipped.npz")
    release = Release(Poisson(50, 1.0), clip_norm=1.0, noise_multiplier=noise_of(key))
    steps = steps_of(key, 0.4)
    expected = data[f"{key}_stepw_steptheta"]
    np.testing.assert_allclose([steps.shared, steps.personal], expected, rtol=1e-12)
    w = np.zeros(20)
    thetas = np.zeros((50, 20))
    for t, (xs, ys) in enumerate(zip(data["X"], data["y"], strict=True)):
        sent = np.empty_like(thetas)
        for i in range(50):
            x, y = xs[:, i], ys[:, i]
            g = x.T @ (x @ (w + thetas[i]) - y) / len(x)
            sent[i], thetas[i] = client_step(thetas[i], g, g, 1.0, steps.personal)
        noise = noise_of(key) * data["noise_z"][t]
        w = noisy_step(w, sent, release, steps.shared, noise)
        np.testing.assert_allclose(w, data[f"{key}_w"][t], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(thetas, data[f"{key}_theta"][t], rtol=1e-9, atol=1e-11)
        risk = np.mean((w + thetas - data["theta_star"]) ** 2 * data["var"])
        assert risk == pytest.approx(data[f"{key}_risk"][t], rel=1e-9)
        charged = t + 1 if steps.shared > 0 else 0
        spent = Ledger(1e-4).record(release, charged).paper_epsilon()
        assert spent == pytest.approx(data[f"{key}_eps"][t], rel=1e-9)


@pytest.mark.parametrize("key", CLASSES)
def test_the_functions_follow_the_authors_classification(key: str) -> None:
    """Cohorts of 10 of 30, some gradients clipped and some not; targets are one-hot minus .1."""
    data = load("linear_classes_mixed_clipping.npz")
    steps = steps_of(key, 0.2)
    w = np.zeros(250)
    thetas = np.zeros((30, 250))
    for t, ids in enumerate(data["ids"]):
        present = [place for place, user in enumerate(ids) if user >= 0]
        release = Release(FixedSize(30, len(present)), 0.88, noise_of(key))
        sent = []
        for place in present:
            user = int(ids[place])
            x = data["X"][t][:, place]
            y = data["y"][t][:, place] - 0.1
            residual = x @ (w + thetas[user]).reshape(25, 10) - y
            g = (x.T @ residual / len(x)).reshape(-1)
            vector, thetas[user] = client_step(thetas[user], g, g, 0.88, steps.personal)
            sent.append(vector)
        noise = noise_of(key) * 0.88 * data["noise_z"][t].reshape(-1)
        w = noisy_step(w, sent, release, steps.shared, noise)
        np.testing.assert_allclose(w.reshape(25, 10), data[f"{key}_w"][t], rtol=1e-9, atol=1e-12)
        for kept, theta in zip(data["theta_rounds"], data[f"{key}_theta"], strict=True):
            if kept == t + 1:
                np.testing.assert_allclose(thetas.reshape(30, 25, 10), theta, rtol=1e-9, atol=1e-11)


class Recorded(Target):
    """One user of the recorded regression: round t has its own samples."""

    def __init__(self, data: dict[str, Floats], user: int, kept: dict[int, Floats]) -> None:
        super().__init__(np.zeros(20))
        self.data = data
        self.user = user
        self.kept = kept

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        x = self.data["X"][order.round - 1][:, self.user]
        y = self.data["y"][order.round - 1][:, self.user]
        g = x.T @ (x @ (w + theta) - y) / len(x)
        return g, g

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        self.kept[self.user] = np.array(theta)
        return super().evaluate(w, theta)


@pytest.mark.parametrize("key", [key for key in SYNTHETIC if noise_of(key) == 0])
def test_the_strategy_without_noise_follows_the_authors_regression(key: str) -> None:
    """Through messages, w and every θ: 50 users, truncated onto a grid of 2⁻³², over D = 50."""
    data = load("synthetic_all_clipped.npz")
    kept: dict[int, Floats] = {}
    app = client_app(lambda context: Recorded(data, user_of(context), kept))
    release = Release(Poisson(50, 1.0), clip_norm=1.0, noise_multiplier=0.0)
    ppsgd = PPSGD(release=release, steps=steps_of(key, 0.4), delta=1e-4, evaluate_every=1)
    rounds = len(data["X"])

    def compare(round_: int, w: ArrayRecord) -> None:
        if round_:
            grid_steps = 20 * round_ * 2.0**-32
            np.testing.assert_allclose(flat(w), data[f"{key}_w"][round_ - 1], atol=grid_steps)
            thetas = [kept[user] for user in range(50)]
            expected = data[f"{key}_theta"][round_ - 1]
            np.testing.assert_allclose(thetas, expected, atol=20 * grid_steps)

    w0 = ArrayRecord([np.zeros(20)])
    ppsgd.start(InProcessGrid(app, 50), w0, num_rounds=rounds, evaluate_fn=compare)
    assert ppsgd.rounds_done == rounds


def test_the_papers_epsilon_for_fixed_size_cohorts() -> None:
    """Their ε, at the rate of the realised cohort: 18 rounds of 10 users, then 2 of 8."""
    expected = load("linear_classes_mixed_clipping.npz")["a0.3_s2_eps"]
    ledger = Ledger(1e-4)
    for t, size in enumerate([10] * 18 + [8] * 2):
        ledger = ledger.record(Release(FixedSize(30, size), clip_norm=0.88, noise_multiplier=2.0))
        assert ledger.paper_epsilon() == pytest.approx(expected[t], rel=1e-9)


# By hand. One coordinate, f_i = ½(w + θ_i − y_i)², everyone in every round, no noise.

GRID = 1e-7  # more than truncation and the margin of the clip (1e-9·C) take in a few rounds


def pair_learner(context: Context) -> Target:
    """Users 0 and 1 want 1 and 3."""
    return Target(np.array([1.0 + 2.0 * user_of(context)]))


def pair(steps: Steps, rounds: int, **changes: Any) -> tuple[float, float]:
    """w, and the mean over users of (w + θ_i − y_i)², after these rounds."""
    settings = {"clip_norm": 16.0, "noise_multiplier": 0.0, **changes}
    release = Release(Poisson(2, 1.0), **settings)
    ppsgd = PPSGD(release=release, steps=steps, delta=1e-4, evaluate_every=1)
    grid = InProcessGrid(client_app(pair_learner), 2)
    result = ppsgd.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=rounds)
    distance = result.evaluate_metrics_clientapp[rounds]["distance"]
    assert isinstance(distance, float)
    return float(flat(result.arrays)[0]), distance


def test_without_noise_and_clipping_it_is_gradient_descent() -> None:
    """α = ∞: w ← w − ½·(w − 2), so 2 − w halves: 1, 1.5, 1.75. θ stays 0."""
    w, distance = pair(Steps.from_ratio(0.5, math.inf), rounds=3)
    assert w == pytest.approx(1.75, abs=GRID)
    assert distance == pytest.approx((0.75**2 + 1.25**2) / 2, abs=4 * GRID)


def test_alpha_zero_is_local_learning() -> None:
    """w stays 0 and each θ_i halves its distance to y_i: ⅛ of 1 and of 3 is left."""
    w, distance = pair(Steps.from_ratio(0.5, 0.0), rounds=3)
    assert w == 0
    assert distance == pytest.approx((1 / 64 + 9 / 64) / 2, rel=1e-12)


def test_both_steps_are_taken_at_the_same_w_and_theta() -> None:
    """s_w = s_θ = ¼, from 0: residuals −1, −3; w = ½, θ = ¼, ¾. Then residuals −¼, −1¾;
    w = ½ + ¼, θ = 5⁄16, 19⁄16."""
    w, distance = pair(Steps(shared=0.25, personal=0.25), rounds=2)
    assert w == pytest.approx(0.75, abs=GRID)
    left = (0.75 + 5 / 16 - 1, 0.75 + 19 / 16 - 3)
    assert distance == pytest.approx((left[0] ** 2 + left[1] ** 2) / 2, abs=4 * GRID)


def test_a_clipped_user_counts_with_the_clip_norm() -> None:
    """C = 1 lets 1 through and makes 3 a 1: w = ½·(1 + 1) = 1, then ½·(0 + 1) more."""
    w, _ = pair(Steps.from_ratio(1.0, math.inf), rounds=2, clip_norm=1.0)
    assert w == pytest.approx(1.5, abs=GRID)


def test_algorithm_2_divides_sums_by_the_total_batch() -> None:
    """Each user sums 3 samples and M = 6: the same w as with means over N = 2."""
    w, _ = pair(Steps.from_ratio(0.5, math.inf), rounds=3, total_batch=6)
    assert w == pytest.approx(1.75, abs=GRID)


# Recorded once from this package: a known seed gives the same w for ever.

SEEDED: dict[str, tuple[Release, list[float]]] = {
    "everyone": (
        Release(Poisson(5, 1.0), 1.0, 0.5),
        [
            0.3440900325775147,
            -0.36212545782327654,
            0.1502820506691933,
            -0.3728717863559723,
            -0.10111345052719117,
            0.04110285788774487,
        ],
    ),
    "Poisson": (
        Release(Poisson(5, 0.4), 1.0, 0.5),
        [
            0.7204347960650921,
            -0.7586127854883671,
            -0.27015595883131027,
            -1.0010301992297173,
            -0.04243384674191475,
            0.2071894109249115,
        ],
    ),
    "fixed size": (
        Release(FixedSize(5, 2), 1.0, 0.5),
        [
            0.8931041695177555,
            -1.1329807564616203,
            -0.08612767979502678,
            -0.851008765399456,
            -0.1858791708946228,
            0.015094049274921417,
        ],
    ),
    "Algorithm 2": (
        Release(Poisson(5, 0.4), 1.0, 0.5, total_batch=15),
        [
            0.2759777903556824,
            -0.2314097099006176,
            -0.05110245943069458,
            -0.1355666108429432,
            -0.21756927544871965,
            -0.023684666802485793,
        ],
    ),
}


@pytest.mark.parametrize("case", SEEDED)
def test_a_known_seed_gives_the_recorded_w(case: str) -> None:
    release, expected = SEEDED[case]
    ppsgd = strategy(release, insecure_seed=7)
    w = flat(ppsgd.start(nodes(), zeros(), num_rounds=3).arrays)
    assert w.tolist() == expected
