"""The paper's bounds and thresholds as functions.

Theorems 4.5 and B.4 are one statement with different numbers in it. Each of them is a value
here, a :class:`Theorem`, with L_α = max(αa, b) and σ²_tot = αA + B. They need only one fact about
the minimiser, ‖z*‖²_α = U/(α + c) + S (:class:`Minimiser`). In this form α = 0 and α = ∞ are
limits that can be written down, not divisions by zero.

They bound E[f(z̄) − f*] of the *average* iterate, for convex f and a clip norm that never clips
(C ≥ G). With the squared loss ½(·)², compare them with half of the closed-form excess risk
(1/N) Σ_i ‖w + θ_i − θ_i*‖²_Σ.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr_ppsgd.algorithm import Steps

if TYPE_CHECKING:
    from flwr_ppsgd.epsilon import Relation


@dataclass(frozen=True)
class Minimiser:
    """‖z*‖²_α = U/(α + c) + S: the only fact about a minimiser that a bound needs.

    A given point (w*, θ*) has U = ‖w*‖², S = Σ‖θ_i*‖² and c = 0. In an additive model w + θ_i =
    θ_i* can be split in many ways. The split of minimal norm has U = ‖μ‖² for the mean μ of the
    users' optima, S = Σ‖θ_i* − μ‖² and c = 1/N.

    Args:
        shared: U, the part that costs less as α grows.
        personal: S, the part that no w can take over.
        offset: c.
    """

    shared: float
    personal: float = 0.0
    offset: float = 0.0

    @classmethod
    def additive_norms(cls, population: int, distance: float, spread: float = 0.0) -> "Minimiser":
        """w = αN/(αN+1)·μ and θ_i = θ_i* − w, from two lengths. A spread of 0 is Lemma 4.6.

        Args:
            population: N.
            distance: ‖μ‖.
            spread: the root mean square of ‖θ_i* − μ‖ over users.
        """
        return cls(distance**2, population * spread**2, 1 / population)

    def squared_norm(self, alpha: float) -> float:
        """‖z*‖²_α."""
        return self.weighted_norm(0.0, 1.0, alpha)

    def weighted_norm(self, slope: float, constant: float, alpha: float) -> float:
        """(αA + B)·‖z*‖²_α, at α = 0 and α = ∞ its limit.

        The four terms are added one by one, so that 0·∞ never arises.

        Args:
            slope: A.
            constant: B.
            alpha: α in [0, ∞].
        """
        at = alpha + self.offset
        share = 1.0  # α/(α + c), also at both ends
        inverse = math.inf
        if at != 0:
            inverse = 1 / at
            if math.isfinite(alpha):
                share = alpha / at
        shared_slope = slope * self.shared * share
        shared_constant = _product(inverse, constant * self.shared)
        personal_slope = _product(alpha, slope * self.personal)
        personal_constant = constant * self.personal
        return shared_slope + shared_constant + personal_slope + personal_constant


@dataclass(frozen=True)
class RiskBound:
    """A theorem's bound at one α; at α = 0 and α = ∞, its limit.

    Args:
        alpha: α.
        bias: 4L_α‖z*‖²_α/n.
        deviation: 3σ_tot‖z*‖_α/√n.
        steps: the steps for which the bound holds.
    """

    alpha: float
    bias: float
    deviation: float
    steps: Steps

    @property
    def total(self) -> float:
        """The bound on E[f(z̄) − f*]."""
        return self.bias + self.deviation


@dataclass(frozen=True)
class Theorem:
    """L_α = max(αa, b) and σ²_tot = αA + B: the common form of Theorems 4.5 and B.4.

    Args:
        smoothness: (a, b).
        variance: (A, B).
        rounds: n, the number of rounds.
        denominator: D of the algorithm, which turns η into s_θ = η/D.
    """

    smoothness: tuple[float, float]
    variance: tuple[float, float]
    rounds: int
    denominator: float

    def smoothness_at(self, alpha: float) -> float:
        """L_α."""
        slope, constant = self.smoothness
        return max(_product(alpha, slope), constant)

    def variance_at(self, alpha: float) -> float:
        """σ²_tot."""
        slope, constant = self.variance
        return _product(alpha, slope) + constant

    def steps(self, alpha: float, minimiser: Minimiser) -> Steps:
        """s_w = αη and s_θ = η/D for η = min(1/(4L_α), ‖z*‖_α/(√n σ_tot)).

        At α = ∞, η is 0 and αη tends to min(1/(4a), √(lim α‖z*‖²_α / (nA))).
        """
        if math.isfinite(alpha):
            eta = 1 / (4 * self.smoothness_at(alpha))
            deviation = math.sqrt(self.rounds) * math.sqrt(self.variance_at(alpha))
            if deviation > 0:
                eta = min(eta, math.sqrt(minimiser.squared_norm(alpha)) / deviation)
            return Steps.from_paper(eta, alpha, self.denominator)
        longest = 1 / (4 * self.smoothness[0])
        noise = self.rounds * self.variance[0]
        if noise and not minimiser.personal:
            longest = min(longest, math.sqrt(minimiser.shared / noise))
        return Steps(longest, personal=0.0)

    def bound(self, alpha: float, minimiser: Minimiser) -> RiskBound:
        """4L_α‖z*‖²_α/n + 3σ_tot‖z*‖_α/√n, and the steps for which it holds."""
        steep = minimiser.weighted_norm(self.smoothness[0], 0.0, alpha)
        flat = minimiser.weighted_norm(0.0, self.smoothness[1], alpha)
        spread = minimiser.weighted_norm(*self.variance, alpha)
        return RiskBound(
            alpha=alpha,
            bias=4 * max(steep, flat) / self.rounds,
            deviation=3 * math.sqrt(spread / self.rounds),
            steps=self.steps(alpha, minimiser),
        )


def theorem_4_5(
    *,
    population: int,
    rounds: int,
    dimension: int,
    smoothness: float,
    variance_w: float,
    variance_theta: float,
    noise_std: float,
) -> Theorem:
    """Algorithm 1: L_α = L·max(α, 1/N), σ²_tot = (α σ̄²_w + σ̄²_θ)/N + α d_w σ_ζ²   (Theorem 4.5).

    Args:
        population: N.
        rounds: n.
        dimension: d_w, the number of shared parameters.
        smoothness: L.
        variance_w: σ̄²_w of the gradient that a user takes in a round; for a mean over m samples,
            the variance of one sample divided by m.
        variance_theta: σ̄²_θ of the same gradient.
        noise_std: σ_ζ = zC/N, the noise on the *average*.
    """
    shared = variance_w / population + dimension * noise_std**2
    return Theorem(
        smoothness=(smoothness, smoothness / population),
        variance=(shared, variance_theta / population),
        rounds=rounds,
        denominator=float(population),
    )


def theorem_b_4(
    *,
    population: int,
    rate: float,
    rounds: int,
    dimension: int,
    smoothness: float,
    variance_w: float,
    variance_theta: float,
    noise_std: float,
    squared_gradient: float = 0.0,
) -> Theorem:
    """Algorithm 3, means over minibatches: a bound on f, the average user's risk   (Theorem B.4).

    L_α = L·max(α + α/(qN), 1/(qN)); the statement drops the q.
    σ² = (α σ̄²_w + α σ̃²_w + σ̄²_θ)/(qN) + α d_w σ_ζ² with σ̃²_w = (1/N) Σ (1−q)‖∇_w f_i(z*)‖². The
    statement has q(1−q): the proof of Theorem 5.2 loses a factor 1/q between E[(b−q)²]/q² =
    (1−q)/q and the next line.

    Args:
        population: N.
        rate: q.
        rounds: n.
        dimension: d_w, the number of shared parameters.
        smoothness: L.
        variance_w: (1/N) Σ σ²_i/m_i, the variance of a minibatch *mean*, of the gradient in w.
        variance_theta: the same for the gradient in θ.
        noise_std: σ_ζ = zC/(qN); C = G clips nothing.
        squared_gradient: (1/N) Σ ‖∇_w f_i(z*)‖², which is 0 in the additive model.
    """
    expected = rate * population
    sampling = (1 - rate) * squared_gradient
    shared = (variance_w + sampling) / expected + dimension * noise_std**2
    return Theorem(
        smoothness=(smoothness * (1 + 1 / expected), smoothness / expected),
        variance=(shared, variance_theta / expected),
        rounds=rounds,
        denominator=expected,
    )


def noise_scale(
    *, clip_norm: float, rounds: int, total: float, epsilon: float, delta: float, constant: float
) -> float:
    """σ_ζ = c·C√(n log(1/δ))/(Kε)   (Theorem 4.1 with K = N; 5.1 with K = M; B.4 with K = N).

    The paper says only that such a c exists. Without sampling, ``sufficient_constant`` is one. With
    sampling the form also needs ε < c₁q²T: if q²T is not far above ε, no constant makes it true.

    Args:
        clip_norm: C.
        rounds: n.
        total: K, the number of users N or the sum M of their batch sizes.
        epsilon: ε of all rounds together.
        delta: δ.
        constant: c.
    """
    return constant * clip_norm * math.sqrt(rounds * math.log(1 / delta)) / (total * epsilon)


def sufficient_constant(
    epsilon: float, delta: float, relation: "Relation" = "replace-one"
) -> float:
    """s·(1 + √(1 + ε/log(1/δ)))/√2, a c for which Theorem 4.1 holds; s = 2 for replace-one.

    n Gaussian releases at multiplier z are ρ-zCDP for ρ = ns²/(2z²), hence (ρ + 2√(ρ log(1/δ)),
    δ)-DP. Setting that equal to ε at z = c√(n log(1/δ))/ε and solving for c gives this formula. It
    grows from s√2 at small ε to 1.71·s at ε = log(1/δ).
    """
    sensitivity = 1.0 if relation == "zero-out" else 2.0
    root = math.sqrt(1 + epsilon / math.log(1 / delta))
    return sensitivity * (1 + root) / math.sqrt(2)


def threshold_samples(
    *,
    population: int,
    sigma: float,
    dimension: int,
    gradient_bound: float,
    epsilon: float,
    delta: float,
    constant: float,
) -> float:
    """n* = N(N−1)σ²ε² / (c² d_w G² log(1/δ)): above it the variance term does not fall with α
    (Lemma 4.6).

    n* is a number of samples per user, one per round. ε is squared as in the statement: the last
    line of the proof, and the text after the lemma ("linearly"), lose the square. c is squared too;
    the proof has c.

    Args:
        population: N.
        sigma: σ of one sample's gradient at the minimiser.
        dimension: d_w, the number of shared parameters.
        gradient_bound: G.
        epsilon: ε of all rounds together.
        delta: δ.
        constant: c of Theorem 4.1.
    """
    pairs = population * (population - 1)
    ratio = sigma * epsilon / (constant * gradient_bound)
    return pairs * ratio**2 / (dimension * math.log(1 / delta))


def threshold_noise_multiplier(
    *, population: int, rate: float, batch_size: int, dimension: int, sigma: float, clip_norm: float
) -> float:
    """z* = (σ/C)·√((N−1)·qN/(m·d_w)): from it on, the variance term of Theorem B.4 grows with α.

    Args:
        population: N.
        rate: q.
        batch_size: m.
        dimension: d_w, the number of shared parameters.
        sigma: σ of one sample's gradient at the minimiser.
        clip_norm: C; the noise on w has σ_ζ = zC/(qN).
    """
    users = (population - 1) * rate * population
    return sigma / clip_norm * math.sqrt(users / (batch_size * dimension))


def squared_loss_smoothness(radius: float) -> float:
    """L = 2R² of ½(y − (w + θ)ᵀx)² for ‖x‖ ≤ R: its Hessian in (w, θ) is four copies of xxᵀ."""
    return 2 * radius**2


def _product(factor: float, value: float) -> float:
    """factor·value, where ∞·0 is 0."""
    return factor * value if value else 0.0
