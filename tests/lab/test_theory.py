"""The paper's theorems against numbers worked out by hand and against a simulation."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd import Poisson, Steps, calibrate_noise
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.epsilon import Relation
from flwr_ppsgd.lab.theory import (
    Minimiser,
    Theorem,
    noise_scale,
    squared_loss_smoothness,
    sufficient_constant,
    theorem_4_5,
    theorem_b_4,
    threshold_noise_multiplier,
    threshold_samples,
)
from simulations.pictures.bound import ABOVE, ALPHA_QS, BELOW, PROBLEM, curves

ALPHAS = (0.0, 1e-3, 0.1, 0.5, 1.0, 7.0, 1e4, math.inf)


def theorem(**changes: float) -> Theorem:
    """Theorem 4.5 with numbers that a reader can redo by hand."""
    given = {"population": 4, "rounds": 16, "dimension": 2, "smoothness": 3.0}
    noise = {"variance_w": 8.0, "variance_theta": 4.0, "noise_std": 0.5}
    return theorem_4_5(**{**given, **noise, **changes})  # type: ignore[arg-type]


def sampled(**changes: float) -> Theorem:
    """Theorem B.4 without sampling, minibatch noise or privacy noise, but for changes."""
    given = {"population": 1, "rate": 1.0, "rounds": 1, "dimension": 1, "smoothness": 1.0}
    noise = {"variance_w": 0.0, "variance_theta": 0.0, "noise_std": 0.0}
    return theorem_b_4(**{**given, **noise, **changes})  # type: ignore[arg-type]


def test_theorem_4_5_by_hand() -> None:
    """N=4, n=16, d=2, L=3, σ_w²=8, σ_θ²=4, σ_ζ=1/2, α=1/2, ‖z*‖²_α = 2/α + 5 = 9.

    L_α = 3·max(1/2, 1/4) = 3/2; σ² = (4 + 4)/4 + 1/2·2·1/4 = 9/4; η = min(1/6, 3/(4·3/2)) = 1/6;
    bound 4·3/2·9/16 + 3·(3/2)·3/4 = 27/8 + 27/8.
    """
    bound = theorem().bound(0.5, Minimiser(shared=2.0, personal=5.0))
    assert (theorem().smoothness_at(0.5), theorem().variance_at(0.5)) == (1.5, 2.25)
    assert (bound.bias, bound.deviation, bound.total) == (27 / 8, 27 / 8, 27 / 4)
    assert bound.steps == Steps.from_paper(eta=1 / 6, alpha=0.5, denominator=4)


def test_theorem_b_4_by_hand() -> None:
    """N = 4, q = 1/2: qN = 2. σ² = (α·6 + α·(1/2)·4 + 5)/2 + α·3 at α = 2: (12 + 4 + 5)/2 + 6 =
    16.5; L_α = max(2 + 1, 1/2)."""
    variances = {"variance_w": 6.0, "variance_theta": 5.0, "squared_gradient": 4.0}
    found = sampled(population=4, rate=0.5, dimension=3, noise_std=1.0, **variances)
    assert (found.smoothness_at(2.0), found.smoothness_at(0.0)) == (3.0, 0.5)
    assert found.variance_at(2.0) == pytest.approx(16.5)


def test_the_smoothness_of_sampling_needs_the_q_that_the_statement_drops() -> None:
    """One user, f = ½θ²: g = bθ/q, so E g² = θ²/q = 2·(L/q)·f. With the statement's L = 1 the
    lemma would be false."""
    q, theta = 0.1, 3.0
    second_moment = q * (theta / q) ** 2
    risk = theta**2 / 2
    assert second_moment == pytest.approx(2 * sampled(rate=q).smoothness_at(0.0) * risk)
    assert second_moment > 2 * 1.0 * risk


@pytest.mark.parametrize(
    "kind",
    [Minimiser(3.0, 0.0, 0.1), Minimiser(3.0, 2.0, 0.1), Minimiser(0.0, 2.0), Minimiser(3.0)],
)
def test_the_ends_are_the_limits(kind: Minimiser) -> None:
    """α = 10^±12 comes arbitrarily near to what is returned at 0 and ∞, or both are infinite."""
    found = Theorem((2.0, 0.3), (5.0, 0.7), rounds=4, denominator=10.0)
    for end, near in ((0.0, 1e-14), (math.inf, 1e14)):
        at, by = found.bound(end, kind), found.bound(near, kind)
        for name in ("bias", "deviation"):
            if math.isinf(getattr(at, name)):
                assert getattr(by, name) > 1e5
            else:
                assert getattr(at, name) == pytest.approx(getattr(by, name), rel=1e-9)
        assert at.steps.shared == pytest.approx(by.steps.shared, rel=1e-6, abs=1e-12)
        assert at.steps.personal == pytest.approx(by.steps.personal, rel=1e-6, abs=1e-12)


def test_global_learning_by_hand() -> None:
    """α = ∞, equal users: 4L‖v‖²/n + 3‖v‖√((σ²/N + dσ_ζ²)/n), s_w = min(1/(4L), ‖v‖/√(nA))."""
    variances = {"variance_w": 10.0, "variance_theta": 10.0}
    found = theorem(population=5, rounds=9, smoothness=1.0, noise_std=1.0, **variances)
    bound = found.bound(math.inf, Minimiser.additive_norms(5, distance=3.0))
    assert (bound.bias, bound.deviation) == pytest.approx((4.0, 3 * 3 * 2 / 3))
    assert bound.steps == Steps(shared=0.25, personal=0.0)


def test_local_learning_pays_nothing_for_privacy() -> None:
    """α = 0: 4L Σ‖θ_i*‖²/(Nn) + 3√(σ_θ² Σ‖θ_i*‖²/(Nn)), whatever the noise.

    θ* = (1, 0) and (0, 3): Σ‖θ_i*‖² = 10, of which 2·2.5 is that of the mean (.5, 1.5).
    """
    users = Minimiser(shared=2.5, personal=5.0, offset=0.5)
    quiet, loud = (
        theorem(population=2, rounds=8, smoothness=1.0, noise_std=noise).bound(0.0, users)
        for noise in (0.0, 1e6)
    )
    assert quiet.bias == pytest.approx(4 * 10 / 16)
    assert quiet.deviation == pytest.approx(3 * math.sqrt(4 * 10 / 16))
    assert (loud.total, loud.steps) == (quiet.total, quiet.steps)


def test_users_who_differ_rule_out_global_learning() -> None:
    users = Minimiser.additive_norms(2, distance=1.5, spread=0.5)
    assert theorem(population=2).bound(math.inf, users).total == math.inf


@pytest.mark.parametrize("alpha", ALPHAS[1:-1])
def test_the_additive_minimiser_has_the_least_norm(alpha: float) -> None:
    """No other split of w + θ_i = θ_i* has a smaller α-norm (Lemma 4.6, here for users who
    differ)."""
    optima = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]])
    mean = optima.mean(axis=0)
    spread = np.sqrt(((optima - mean) ** 2).sum(axis=1).mean())
    least = Minimiser.additive_norms(3, float(np.linalg.norm(mean)), spread).squared_norm(alpha)

    def squared_norm(w: Vector) -> float:
        return float((w**2).sum() / alpha + ((optima - w) ** 2).sum())

    w = alpha * 3 / (alpha * 3 + 1) * mean
    assert squared_norm(w) == pytest.approx(least)
    for other in np.random.default_rng(0).normal(size=(20, 2)) * 0.1 + w:
        assert squared_norm(other) >= least


def test_lemma_4_6_by_hand() -> None:
    """N = 3, σ = 2, ε = 3, d = 2, G = 5, log(1/δ) = 4, c = 3: n* = 3·2·4·9/(9·2·25·4)."""
    problem: Any = {"population": 3, "sigma": 2.0, "dimension": 2, "gradient_bound": 5.0}
    found = threshold_samples(**problem, epsilon=3.0, delta=math.exp(-4), constant=3.0)
    assert found == pytest.approx(216 / 1800)


def test_theorem_4_1_by_hand() -> None:
    """c·C√(n log(1/δ))/(Nε) = 2·3·√(9·4)/(5·6)."""
    found = noise_scale(
        clip_norm=3.0, rounds=9, total=5, epsilon=6.0, delta=math.exp(-4), constant=2.0
    )
    assert found == pytest.approx(1.2)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0, 100.0])
def test_the_explicit_constant_of_theorem_4_1_suffices_and_is_not_far_off(
    epsilon: float, relation: Relation
) -> None:
    """The noise that it gives is above the exact one, by less than two thirds."""
    asked: Any = {"epsilon": epsilon, "delta": 1e-5, "rounds": 30}
    exact = calibrate_noise(**asked, cohort=Poisson(50, 1.0), relation=relation) * 2.0 / 50
    constant = sufficient_constant(epsilon, 1e-5, relation)
    proved = noise_scale(**asked, clip_norm=2.0, total=50, constant=constant)
    assert exact <= proved <= 5 / 3 * exact


def test_the_explicit_constant_solves_its_equation() -> None:
    """ρ + 2√(ρ log(1/δ)) = ε for ρ = s²n/(2z²), z = c√(n log(1/δ))/ε. At ε = 3·log(1/δ): c =
    s·3/√2."""
    assert sufficient_constant(12.0, math.exp(-4), "zero-out") == pytest.approx(3 / math.sqrt(2))
    assert sufficient_constant(12.0, math.exp(-4)) == pytest.approx(6 / math.sqrt(2))
    c = sufficient_constant(2.0, 1e-4, "zero-out")
    rho = 4 / (2 * c**2 * math.log(1e4))
    assert rho + 2 * math.sqrt(rho * math.log(1e4)) == pytest.approx(2.0)


def test_squared_loss_has_smoothness_twice_the_squared_radius() -> None:
    """The largest eigenvalue of the Hessian [[xxᵀ, xxᵀ], [xxᵀ, xxᵀ]] for x = (3, 4)."""
    x = np.array([3.0, 4.0])
    hessian = np.tile(np.outer(x, x), (2, 2))
    assert np.linalg.eigvalsh(hessian)[-1] == pytest.approx(squared_loss_smoothness(5.0))


@pytest.mark.parametrize(("rounds", "seeds", "better"), [(BELOW, 20, math.inf), (ABOVE, 2, 0.0)])
def test_the_bound_holds_and_orders_the_ends_as_they_are_measured(
    rounds: int, seeds: int, better: float
) -> None:
    """Theorem 4.5 on a problem whose constants are known and where nothing is clipped (``measure``
    raises): half the closed-form excess risk of the average iterate stays below it for every α,
    and on both sides of the threshold it says rightly which end is better."""
    assert (rounds > PROBLEM.threshold) == (better == 0.0)
    bounds, measured = curves(PROBLEM, rounds, range(seeds))
    assert all(found < bound for found, bound in zip(measured, bounds, strict=True))
    for values in (bounds, measured):
        assert min((values[0], 0.0), (values[-1], math.inf))[1] == better
    assert math.isinf(ALPHA_QS[-1])


def test_a_clipped_gradient_is_an_error_of_the_measurement() -> None:
    tight = replace(PROBLEM, clip_norm=0.5)
    with pytest.raises(RuntimeError, match=r"clip_norm=0.5"):
        curves(tight, 3, range(1))


def test_the_best_alpha_is_an_end_for_equal_users_unless_the_bias_decides() -> None:
    """Lemma 4.6: with much noise local, with none global; where only L matters, α ≈ 1/D, the kink
    of L_α."""
    equal = Minimiser.additive_norms(100, 1.0)
    given = {"population": 100, "rate": 0.1, "dimension": 10}
    long = {**given, "rounds": 10**9, "variance_w": 1.0, "variance_theta": 1.0}
    noisy = sampled(**long, noise_std=1.0)
    quiet = sampled(**long)
    biased = sampled(**given)
    between = [float(alpha) for alpha in np.geomspace(1e-4, 1e2, 121)]

    def best_alpha(theorem: Theorem) -> float:
        bounds = [theorem.bound(alpha, equal) for alpha in (0.0, *between, math.inf)]
        return min(bounds, key=lambda bound: bound.total).alpha

    assert best_alpha(noisy) == 0.0
    assert best_alpha(quiet) == math.inf
    assert best_alpha(biased) == pytest.approx(1 / 11, rel=0.12)


def test_steps_of_a_theorem_by_hand() -> None:
    """η = min(1/(4·2), 3/(2·1)) = 1/8, then min(1/8, 3/(2·24)) = 1/16."""
    minimiser = Minimiser(shared=0.0, personal=9.0, offset=1.0)
    for deviation, eta in ((1.0, 1 / 8), (24.0, 1 / 16), (0.0, 1 / 8)):
        found = Theorem((0.0, 2.0), (0.0, deviation**2), rounds=4, denominator=4.0)
        assert found.steps(0.5, minimiser) == Steps(shared=eta / 2, personal=eta / 4)


@pytest.mark.parametrize(("factor", "local"), [(0.999, False), (1.001, True)])
def test_the_threshold_for_algorithm_3_with_the_noise_in_use(factor: float, local: bool) -> None:
    """N·d·σ_ζ² against (N−1)σ²/(qm): B.4's deviation rises with α on one side and falls on the
    other."""
    n, m, sigma, c = 50, 5, 3.0, 2.0
    shared: Any = {"population": n, "rate": 0.2, "dimension": 8}
    z = threshold_noise_multiplier(**shared, batch_size=m, sigma=sigma, clip_norm=c)
    variances = {"variance_w": sigma**2 / m, "variance_theta": sigma**2 / m}
    theorem = sampled(**shared, **variances, rounds=10, noise_std=factor * z * c / (0.2 * n))
    deviations = [theorem.bound(a, Minimiser.additive_norms(n, 1.0)).deviation for a in ALPHAS]
    assert deviations == sorted(deviations, reverse=not local)
