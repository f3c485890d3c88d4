"""Theorem 4.5 beside what it bounds, for α from 0 to ∞.

The problem is small and additive, and all its constants are known. Run as a script, it draws the
bound and the measured f − f* against αN, for n on both sides of the threshold of Lemma 4.6.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flwr_ppsgd import Poisson, Release, Steps
from flwr_ppsgd.algorithm import Vector, clip, server_step
from flwr_ppsgd.lab.theory import (
    Minimiser,
    Theorem,
    noise_scale,
    squared_loss_smoothness,
    sufficient_constant,
    theorem_4_5,
    threshold_samples,
)
from flwr_ppsgd.recipe import Matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALPHA_QS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf)


@dataclass(frozen=True)
class Sphere:
    """y = vᵀx ± τ with x uniform on the unit sphere.

    R = 1, L = 2, Σ = I/d, σ² = τ², and gradients stay bounded.

    Args:
        users: N.
        features: d.
        distance: ‖v‖.
        label_noise: τ.
        epsilon: what all rounds together may cost; with so few users it is a large number.
        delta: δ.
        clip_norm: C, taken as G.
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
            population=self.users,
            sigma=self.label_noise,
            dimension=self.features,
            gradient_bound=self.clip_norm,
            epsilon=self.epsilon,
            delta=self.delta,
            constant=self.constant,
        )

    def noise_std(self, rounds: int) -> float:
        """σ_ζ of Theorem 4.1."""
        return noise_scale(
            clip_norm=self.clip_norm,
            rounds=rounds,
            total=self.users,
            epsilon=self.epsilon,
            delta=self.delta,
            constant=self.constant,
        )

    def theorem(self, rounds: int) -> Theorem:
        """Theorem 4.5 for this problem."""
        return theorem_4_5(
            population=self.users,
            rounds=rounds,
            dimension=self.features,
            smoothness=squared_loss_smoothness(1.0),
            variance_w=self.label_noise**2,
            variance_theta=self.label_noise**2,
            noise_std=self.noise_std(rounds),
        )

    @property
    def minimiser(self) -> Minimiser:
        """All users share the optimum v."""
        return Minimiser.additive_norms(self.users, self.distance)

    @property
    def optimum(self) -> Vector:
        """v."""
        return np.full(self.features, self.distance / math.sqrt(self.features))

    def release(self, rounds: int) -> Release:
        """What is released in a round."""
        z = self.noise_std(rounds) * self.users / self.clip_norm
        return Release(Poisson(self.users, 1.0), self.clip_norm, z)

    def measure(self, rounds: int, steps: Steps, source: np.random.Generator) -> float:
        """f(z̄) − f* after Algorithm 1, with one fresh sample per user and round."""
        release = self.release(rounds)
        w = np.zeros(self.features)
        thetas = np.zeros((self.users, self.features))
        total = np.zeros_like(thetas)
        for _ in range(rounds):
            total += w + thetas
            gradients = self._gradients(w + thetas, source)
            thetas = thetas - steps.personal * gradients
            noise = source.normal(0, release.noise_std, self.features)
            clipped = sum(clip(gradient, release.clip_norm) for gradient in gradients)
            w = server_step(w, clipped + noise, release, steps.shared)
        squares = (total / rounds - self.optimum) ** 2
        return float(squares.sum() / self.features / self.users / 2)

    def _gradients(self, parameters: Matrix, source: np.random.Generator) -> Matrix:
        """The gradient of one fresh sample per user.

        A gradient that is clipped is an error: the theorem assumes there is none.
        """
        x = source.normal(size=parameters.shape)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        noise = self.label_noise * source.choice([-1.0, 1.0], self.users)
        y = x @ self.optimum + noise
        residuals = np.einsum("ij,ij->i", x, parameters) - y
        gradients: Matrix = x * residuals[:, None]
        longest = np.linalg.norm(gradients, axis=1).max()
        if longest >= self.clip_norm * (1 - 1e-9):
            raise RuntimeError(
                f"a gradient reached clip_norm={self.clip_norm}: the bound assumes that none does"
            )
        return gradients


PROBLEM = Sphere(users=20, features=10, distance=1.0, label_noise=1.0, epsilon=60.0)
BELOW = 40  # samples per user; PROBLEM.threshold is 133
ABOVE = 800
SEEDS = 40


def curves(problem: Sphere, rounds: int, seeds: Sequence[int]) -> tuple[list[float], list[float]]:
    """(bound, measured) for each of ``ALPHA_QS``, with the theorem's steps.

    Args:
        problem: the problem.
        rounds: n.
        seeds: measured is a mean over them.
    """
    theorem = problem.theorem(rounds)
    bounds = []
    measured = []
    for number, alpha_q in enumerate(ALPHA_QS):
        bound = theorem.bound(alpha_q / problem.users, problem.minimiser)
        found = []
        for seed in seeds:
            source = np.random.default_rng([seed, number])
            found.append(problem.measure(rounds, bound.steps, source))
        bounds.append(bound.total)
        measured.append(float(np.mean(found)))
    return bounds, measured


def draw(out: Path) -> None:
    """Bound and measurement against αN, below and above the threshold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_panel(left, "below", BELOW)
    draw_panel(right, "above", ABOVE)
    left.set_ylabel("f − f*")
    left.legend(loc="center right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def draw_panel(axes: "Axes", side: str, rounds: int) -> None:
    """One side of the threshold."""
    from flwr_ppsgd.lab.figures import log_scale

    bounds, measured = curves(PROBLEM, rounds, range(SEEDS))
    places = range(len(ALPHA_QS))
    axes.plot(places, bounds, "s--", color="0.4", label="bound (Theorem 4.5)")
    axes.plot(places, measured, "o-", color="#0072B2", label="measured")
    log_scale(axes)
    axes.grid(alpha=0.3, which="both", lw=0.5)
    axes.set_xticks(places, [f"{alpha_q:g}".replace("inf", "∞") for alpha_q in ALPHA_QS])
    axes.set_xlabel("αN   (0 is local, ∞ is global learning)")
    title = f"n = {rounds} samples per user, {side} n* = {PROBLEM.threshold:.0f}"
    axes.set_title(title, fontsize=11)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs") / "bound.png")
