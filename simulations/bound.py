"""Theorem 4.5 beside what it bounds: a small additive problem whose constants are all known, for α from 0 to ∞.

Run as a script, it draws the bound and the measured f − f* against αN, for n on both sides of Lemma 4.6's threshold.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flwr_ppsgd import Poisson, Release, Steps, server_step
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.theory import (
    Minimiser,
    Theorem,
    noise_scale,
    squared_loss_smoothness,
    sufficient_constant,
    theorem_4_5,
    threshold_samples,
)

ALPHA_QS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf)


@dataclass(frozen=True)
class Sphere:
    """y = vᵀx ± τ with x uniform on the unit sphere: R = 1, L = 2, Σ = I/d, σ² = τ², and gradients that stay bounded.

    clip_norm: C, taken as G. epsilon, delta: what all rounds together may cost; with so few users ε is a large number.
    """

    users: int
    features: int
    distance: float
    label_noise: float
    epsilon: float
    delta: float = 1e-4
    clip_norm: float = 4.0

    @property
    def constant(self) -> float:
        """c of Theorem 4.1."""
        return sufficient_constant(self.epsilon, self.delta, "zero-out")

    @property
    def threshold(self) -> float:
        """n* of Lemma 4.6."""
        return threshold_samples(
            population=self.users, sigma=self.label_noise, dimension=self.features, gradient_bound=self.clip_norm,
            epsilon=self.epsilon, delta=self.delta, constant=self.constant,
        )  # fmt: skip

    def noise_std(self, rounds: int) -> float:
        """σ_ζ of Theorem 4.1."""
        return noise_scale(
            clip_norm=self.clip_norm, rounds=rounds, total=self.users, epsilon=self.epsilon, delta=self.delta,
            constant=self.constant,
        )  # fmt: skip

    def theorem(self, rounds: int) -> Theorem:
        return theorem_4_5(
            population=self.users, rounds=rounds, dimension=self.features, smoothness=squared_loss_smoothness(1.0),
            variance_w=self.label_noise**2, variance_theta=self.label_noise**2, noise_std=self.noise_std(rounds),
        )  # fmt: skip

    @property
    def minimiser(self) -> Minimiser:
        return Minimiser.additive_norms(self.users, self.distance)

    @property
    def optimum(self) -> Vector:
        return np.full(self.features, self.distance / math.sqrt(self.features))

    def release(self, rounds: int) -> Release:
        z = self.noise_std(rounds) * self.users / self.clip_norm
        return Release(Poisson(self.users, 1.0), self.clip_norm, z)

    def measure(self, rounds: int, steps: Steps, source: np.random.Generator) -> float:
        """f(z̄) − f* after Algorithm 1, one fresh sample a user and round. A gradient that is clipped is an error: the
        theorem assumes there is none."""
        release, v = self.release(rounds), self.optimum
        w, thetas = np.zeros(self.features), np.zeros((self.users, self.features))
        total = np.zeros_like(thetas)
        for _ in range(rounds):
            total += w + thetas
            x = source.normal(size=thetas.shape)
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            y = x @ v + self.label_noise * source.choice([-1.0, 1.0], self.users)
            gradients = x * (np.einsum("ij,ij->i", x, w + thetas) - y)[:, None]
            if np.linalg.norm(gradients, axis=1).max() >= self.clip_norm * (1 - 1e-9):
                raise RuntimeError(f"a gradient reached clip_norm={self.clip_norm}: the bound assumes that none does")
            thetas = thetas - steps.personal * gradients
            noise = source.normal(0, release.noise_std, self.features)
            w = server_step(w, gradients, release, steps.shared, noise)
        return float(((total / rounds - v) ** 2).sum() / self.features / self.users / 2)


PROBLEM = Sphere(users=20, features=10, distance=1.0, label_noise=1.0, epsilon=60.0)
BELOW, ABOVE = 40, 800  # samples a user; PROBLEM.threshold is 133


def curves(problem: Sphere, rounds: int, seeds: Sequence[int]) -> tuple[list[float], list[float]]:
    """(bound, measured) for each of ``ALPHA_QS``, with the theorem's steps; measured is a mean over seeds."""
    bounds = [problem.theorem(rounds).bound(a / problem.users, problem.minimiser) for a in ALPHA_QS]
    measured = [
        float(np.mean([problem.measure(rounds, b.steps, np.random.default_rng([seed, k])) for seed in seeds]))
        for k, b in enumerate(bounds)
    ]
    return [b.total for b in bounds], measured


def draw(out: Path) -> None:
    """Bound and measurement against αN below and above the threshold."""
    from matplotlib.figure import Figure

    from flwr_ppsgd.results.plots import log_scale

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    places = range(len(ALPHA_QS))
    for axes, (side, rounds, seeds) in zip(panels, (("below", BELOW, 40), ("above", ABOVE, 40)), strict=True):
        bounds, measured = curves(PROBLEM, rounds, range(seeds))
        axes.plot(places, bounds, "s--", color="0.4", label="bound (Theorem 4.5)")
        axes.plot(places, measured, "o-", color="#0072B2", label="measured")
        log_scale(axes)
        axes.grid(alpha=0.3, which="both", lw=0.5)
        axes.set_xticks(places, ["∞" if math.isinf(a) else f"{a:g}" for a in ALPHA_QS])
        axes.set_xlabel("αN   (0 is local, ∞ is global learning)")
        axes.set_title(f"n = {rounds} samples a user, {side} n* = {PROBLEM.threshold:.0f}", fontsize=11)
    panels[0].set_ylabel("f − f*")
    panels[0].legend(loc="center right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs") / "bound.png")
