"""Personalized-Private-SGD (Bietti et al., ICML 2022) as values and pure functions.

A cohort says who takes part, a :class:`Release` what the server publishes about them, :class:`Steps` how far both
blocks of parameters move. Algorithms 1, 2 and 3 of the paper are different values of these, never different code.
Inside this module a model is one flat float64 vector, as in the paper.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float64]
Reduction: TypeAlias = Literal["mean", "sum"]

FLOAT_INTEGER_BITS = 53  # float64 holds every integer up to 2^53
FINEST_GRID_BITS = 32
COARSEST_GRID_BITS = 20
NOISE_BITS = 26  # a finer grid would have steps with so few floats of noise in each that their number would show
LARGEST_NORMAL = 14.0  # standard deviations, where the sampler in `noise` is cut off
LEAST_NOISE = 1e-6  # a smaller z protects nobody, and no accountant can tell it from 0
CLIP_MARGIN = 2.0**-40  # relative; the rounding of a norm and of a product stays far below it


def _require(holds: bool, rule: str, value: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{rule}, got {value!r}: {remedy}")


def _require_count(name: str, value: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(whole and 1 <= value <= 2**50, f"{name} must be a whole number from 1 to 2^50", value, f"set {name}")


@dataclass(frozen=True)
class Poisson:
    """Every enrolled user takes part with probability ``rate``, by a coin of their own (Algorithms 1–3).

    population: N, the number of enrolled users; public. An enrolled user who is offline still counts.
    rate: q in (0, 1]. 1 is everyone, every round: Algorithm 1.
    cap: B, the most users a round may have. A larger draw loses users at random, which δ must pay for (``Ledger``).
    """

    population: int
    rate: float
    cap: int | None = None

    def __post_init__(self) -> None:
        _require_count("population", self.population)
        _require(0 < self.rate <= 1, "rate must be in (0, 1]", self.rate, "it is the chance to be drawn in a round")
        if self.cap is not None:
            _require_count("cap", self.cap)

    @property
    def amplifies(self) -> bool:
        """Whether secret sampling lowers ε: it does for independent coins that can come up tails."""
        return self.rate < 1

    def members(self, uniforms: Vector) -> NDArray[np.intp]:
        """{i : u_i < q}, from one uniform in [0, 1) for each enrolled user; of more than B, those with the smallest.

        Given that they are below q, the uniforms order the drawn users at random: whom the cap drops is chance.
        """
        drawn = np.flatnonzero(uniforms < self.rate)
        if self.cap is None or len(drawn) <= self.cap:
            return drawn
        return np.sort(drawn[np.argsort(uniforms[drawn], kind="stable")[: self.cap]])


@dataclass(frozen=True)
class FixedSize:
    """Exactly ``size`` users a round, without replacement: the paper's experiments.

    No amplification theorem covers it with clients that keep state, so its guarantee is that of no sampling at all.
    """

    population: int
    size: int

    def __post_init__(self) -> None:
        _require_count("population", self.population)
        _require_count("size", self.size)
        fits = self.size <= self.population
        _require(
            fits, f"size must be at most population={self.population}", self.size, "draw fewer or enrol more users"
        )

    @property
    def rate(self) -> float:
        return self.size / self.population

    @property
    def amplifies(self) -> bool:
        return False

    def members(self, uniforms: Vector) -> NDArray[np.intp]:
        """The users with the ``size`` smallest uniforms."""
        return np.sort(np.argsort(uniforms, kind="stable")[: self.size])


Cohort: TypeAlias = Poisson | FixedSize


@dataclass(frozen=True)
class Release:
    """One publication of the server: (Σ_i clip(g_i, C) + N(0, z²C² I)) / D.

    The noise that is added and the noise that is charged both come from this object, so they cannot drift apart.

    clip_norm: C, the largest Euclidean norm with which one user enters the sum.
    noise_multiplier: z, the standard deviation of the noise on the *sum*, in units of C. 0 gives no privacy.
    total_batch: M = Σ_i m_i for Algorithm 2, where users send sums over their minibatches; public. None is
        Algorithm 3 (and 1), where they send means.
    """

    cohort: Cohort
    clip_norm: float
    noise_multiplier: float
    total_batch: int | None = None

    def __post_init__(self) -> None:
        c, z = self.clip_norm, self.noise_multiplier
        _require(
            1e-100 <= c <= 1e100, "clip_norm must be positive and finite (1e-100 to 1e100)", c, "set the clip norm C"
        )
        _require(
            z == 0 or LEAST_NOISE <= z < math.inf,
            f"noise_multiplier must be finite and at least {LEAST_NOISE:g}, or 0",
            z,
            "0 adds no noise: ε is infinite",
        )
        if self.total_batch is not None:
            _require_count("total_batch", self.total_batch)
        _require(
            self._exact_bits >= COARSEST_GRID_BITS,
            f"a sum over population={self.cohort.population} with this noise_multiplier could leave the whole numbers "
            f"that float64 holds (2^{FLOAT_INTEGER_BITS})",
            z,
            f"keep population + {LARGEST_NORMAL:g}·z below 2^{FLOAT_INTEGER_BITS - 1 - COARSEST_GRID_BITS}",
        )

    @property
    def denominator(self) -> float:
        """D, the *expected* weight of a cohort: q·N, or q·M where minibatches are summed. Fixed and public."""
        if self.total_batch is not None:
            return self.cohort.rate * self.total_batch
        return (
            float(self.cohort.size) if isinstance(self.cohort, FixedSize) else self.cohort.rate * self.cohort.population
        )

    @property
    def reduction(self) -> Reduction:
        """How a client reduces its minibatch."""
        return "mean" if self.total_batch is None else "sum"

    @property
    def noise_std(self) -> float:
        """z·C, on the scale of the sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def _exact_bits(self) -> int:
        """The most with which every reachable noisy sum is below 2⁵³ steps of the grid."""
        reach = self.cohort.population + LARGEST_NORMAL * self.noise_multiplier
        return FLOAT_INTEGER_BITS - 1 - math.ceil(math.log2(reach + 1))

    @property
    def grid_bits(self) -> int:
        """b, so that sums are exact in whole multiples of C·2⁻ᵇ and the noise's standard deviation is at most 2²⁶."""
        z = self.noise_multiplier
        of_noise = NOISE_BITS - math.ceil(math.log2(z)) if z > 0 else FINEST_GRID_BITS
        return min(FINEST_GRID_BITS, self._exact_bits, of_noise)

    @property
    def grid(self) -> float:
        """g = C·2⁻ᵇ, the spacing of released sums."""
        return math.ldexp(self.clip_norm, -self.grid_bits)


@dataclass(frozen=True)
class Steps:
    """s_w for the shared block and s_θ for the personal one.

    ``shared=0`` is α = 0: nothing is released. ``personal=0`` is α = ∞: θ is frozen.
    """

    shared: float
    personal: float

    def __post_init__(self) -> None:
        for name, value in (("shared", self.shared), ("personal", self.personal)):
            _require(
                0 <= value < math.inf, f"Steps.{name} must be finite and not negative", value, "0 freezes that block"
            )

    @classmethod
    def from_paper(cls, eta: float, alpha: float, denominator: float) -> Self:
        """s_w = αη, s_θ = η/D (Algorithms 1–3)."""
        _require(
            0 < denominator < math.inf,
            "denominator must be positive and finite",
            denominator,
            "use release.denominator",
        )
        _require(0 <= eta < math.inf, "eta must be finite and not negative", eta, "set the step size η")
        _require(alpha >= 0, "alpha must be in [0, inf)", alpha, "0 is local learning")
        _require(
            alpha < math.inf, "alpha must be finite here, where η and α enter separately", alpha, "use Steps.from_ratio"
        )
        return cls(shared=alpha * eta, personal=eta / denominator)

    @classmethod
    def from_ratio(cls, step: float, alpha_q: float) -> Self:
        """The larger of the two steps is ``step`` and s_w / s_θ = a = αQ, any a in [0, ∞] (the figures' grid)."""
        _require(alpha_q >= 0, "alpha_q must be in [0, inf]", alpha_q, "0 is local learning, inf is global learning")
        _require(0 <= step < math.inf, "step must be finite and not negative", step, "set the step size")
        if alpha_q <= 1:
            return cls(shared=alpha_q * step, personal=step)
        return cls(shared=step, personal=step / alpha_q)

    @classmethod
    def from_theory(
        cls, *, alpha: float, denominator: float, rounds: int, smoothness: float, deviation: float, norm: float
    ) -> Self:
        """s_w = αη, s_θ = η/D with η = min(1/(4L_α), ‖z*‖_α/(√n σ_tot))   (Theorems 4.5, 5.2 and B.4).

        smoothness: L_α. deviation: σ_tot. norm: ‖z*‖_α. ``theory.Theorem.steps`` works them out, and has α = ∞ too.
        """
        _require(0 < smoothness < math.inf, "smoothness must be positive and finite", smoothness, "give L_α")
        _require(deviation >= 0, "deviation must not be negative", deviation, "give σ_tot")
        _require(norm >= 0, "norm must not be negative", norm, "give ‖z*‖_α")
        _require_count("rounds", rounds)
        noise = math.sqrt(rounds) * deviation
        eta = min(1 / (4 * smoothness), norm / noise if noise > 0 else math.inf)
        return cls.from_paper(eta, alpha, denominator)

    @property
    def alpha_q(self) -> float:
        """a = s_w / s_θ = αD."""
        if self.personal == 0:
            return math.inf if self.shared > 0 else math.nan
        return self.shared / self.personal

    @property
    def publishes(self) -> bool:
        """Whether w moves at all; where it does not, no gradient is asked for and ε is 0."""
        return self.shared > 0


def length(g: Vector) -> float:
    """‖g‖₂, safe from overflow and underflow of the squares."""
    with np.errstate(over="ignore", invalid="ignore"):
        plain = math.sqrt(np.dot(g, g))
    if 1e-140 < plain < 1e140 or not g.size:
        return plain
    largest = float(np.max(np.abs(g)))
    return largest * math.sqrt(np.dot(g / largest, g / largest)) if 0 < largest < math.inf else largest


def clip_scale(g: Vector, limit: float, margin: float = CLIP_MARGIN) -> float:
    """The factor, at most 1, that brings ‖g‖ below ``limit``, less a ``margin`` for the rounding of the product.

    A vector 10²⁸⁰ times too long becomes zero: a factor that small has too few digits left to keep the promise.
    """
    within, actual = limit * (1 - margin), length(g)
    if actual <= within:
        return 1.0
    return within / actual if within / actual > 1e-280 else 0.0


def clip_scales(lengths: Vector, limits: Vector | float, margin: float = CLIP_MARGIN) -> Vector:
    """``clip_scale`` of many vectors at once, from their lengths."""
    within = limits * (1 - margin)
    with np.errstate(all="ignore"):
        scales: Vector = within / lengths
    scales = np.where(scales <= 1e-280, 0.0, scales)
    return np.where(lengths <= within, 1.0, scales)


def clip(g: Vector, norm: float) -> Vector:
    """g / max(1, ‖g‖/C)   (Algorithm 1, line 8). The result's norm is at most C, never a rounding above it."""
    scale = clip_scale(g, norm)
    return g if scale == 1.0 else g * scale


def client_step(theta: Vector, g_w: Vector, g_theta: Vector, clip_norm: float, step: float) -> tuple[Vector, Vector]:
    """(clip(g_w, C), θ − s_θ·g_θ)   (Algorithm 1, lines 7–9). θ's own gradient is not clipped: it goes nowhere."""
    return clip(g_w, clip_norm), theta - step * g_theta


def descend(w: Vector, total: Vector | float, release: Release, step: float) -> Vector:
    """w − s_w·total/D, where ``total`` is the noisy sum."""
    with np.errstate(over="ignore", invalid="ignore"):  # a step too large ends in infinity, not in a warning
        moved: NDArray[Any] = np.multiply(total, -step / release.denominator)
        moved += w
    return moved


def server_step(w: Vector, gradients: Iterable[Vector], release: Release, step: float, noise: Vector | float) -> Vector:
    """w − s_w·(Σ_i clip(g_i, C) + noise) / D   (Algorithms 1–3, last line), in plain floating point.

    D is the *expected* weight of a cohort: it is public, and a client that drops out shrinks the sum but not the
    noise. Clipping happens here even if the client already did it: the guarantee must not rest on the client's word.
    What a deployment releases is the same step over whole multiples of a grid: see ``noise.GridSum``.
    """
    total = np.zeros_like(w)
    for gradient in gradients:
        total += clip(gradient, release.clip_norm)
    return descend(w, total + noise, release, step)
