"""The paper's bounds and thresholds as functions.

Theorems 4.5, 5.2 and B.4 are one statement with different numbers in it, so each of them is a value here: a
:class:`Theorem`, with L_α = max(αa, b) and σ²_tot = αA + B. Of the minimiser they need only ‖z*‖²_α = U/(α + c) + S
(:class:`Minimiser`). In this form α = 0 and α = ∞ are limits that can be written down, not divisions by zero.

They bound E[f(z̄) − f*] of the *average* iterate, for convex f and a clip norm that never clips (C ≥ G). With the
squared loss ½(·)², compare them with half of the closed-form excess risk (1/N) Σ_i ‖w + θ_i − θ_i*‖²_Σ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_ppsgd.algorithm import Cohort, Release, Steps, Vector
from flwr_ppsgd.privacy import Relation, calibrate_noise

ALPHA_Q_GRID = (0.0, *(float(f"{a:.3g}") for a in np.geomspace(1e-3, 1e3, 121)), math.inf)


def alpha_norm(w: ArrayLike, thetas: ArrayLike, alpha: float) -> float:
    """√(‖w‖²/α + Σ_i ‖θ_i‖²)   (equation 4). At α = 0 it is infinite unless w = 0; at α = ∞ w has no weight."""
    return math.sqrt(Minimiser.point(w, thetas).squared_norm(alpha))


@dataclass(frozen=True)
class Minimiser:
    """‖z*‖²_α = U/(α + c) + S: all that a bound needs to know of a minimiser.

    shared: U, what costs less as α grows. personal: S, what no w can take over. offset: c.
    A given point (w*, θ*) has U = ‖w*‖², S = Σ‖θ_i*‖², c = 0. In an additive model the split of w + θ_i = θ_i* is free,
    and the one of minimal norm has U = ‖μ‖² for the mean μ of the users' optima, S = Σ‖θ_i* − μ‖², c = 1/N.
    """

    shared: float
    personal: float = 0.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("shared", self.shared), ("personal", self.personal), ("offset", self.offset)):
            _not_negative(f"Minimiser.{name}", value)

    @classmethod
    def point(cls, w: ArrayLike, thetas: ArrayLike) -> "Minimiser":
        """A given minimiser (w*, θ*_1..N)."""
        return cls(_squared(w), _squared(thetas))

    @classmethod
    def additive(cls, optima: ArrayLike) -> "Minimiser":
        """From the users' own optima, one row each: w = αN/(αN+1)·μ, θ_i = θ_i* − w. Equal rows are Lemma 4.6."""
        rows = np.atleast_2d(np.asarray(optima, dtype=np.float64))
        mean = rows.mean(axis=0)
        return cls(_squared(mean), _squared(rows - mean), 1 / len(rows))

    @classmethod
    def additive_norms(cls, population: int, distance: float, spread: float = 0.0) -> "Minimiser":
        """The same from ‖μ‖ (``distance``) and the root mean square of ‖θ_i* − μ‖ (``spread``)."""
        return cls(distance**2, population * spread**2, 1 / population)

    def squared_norm(self, alpha: float) -> float:
        """‖z*‖²_α."""
        return _product(0.0, 1.0, self, alpha)


@dataclass(frozen=True)
class Bound:
    """What a theorem says at one α. ``smoothness`` L_α, ``variance`` σ²_tot and ``norm`` ‖z*‖_α may be infinite or 0 at
    the ends; ``bias`` 4L_α‖z*‖²_α/n and ``deviation`` 3σ_tot‖z*‖_α/√n are then the limits of the products."""

    alpha: float
    smoothness: float
    variance: float
    norm: float
    bias: float
    deviation: float
    steps: Steps

    @property
    def total(self) -> float:
        """The bound on E[f(z̄) − f*]."""
        return self.bias + self.deviation


@dataclass(frozen=True)
class Theorem:
    """L_α = max(αa, b) and σ²_tot = αA + B over ``rounds`` rounds: the common form of Theorems 4.5, 5.2 and B.4.

    smoothness: (a, b). variance: (A, B). denominator: D of the algorithm, which turns η into s_θ = η/D.
    """

    smoothness: tuple[float, float]
    variance: tuple[float, float]
    rounds: int
    denominator: float

    def smoothness_at(self, alpha: float) -> float:
        """L_α."""
        return max(_times(alpha, self.smoothness[0]), self.smoothness[1])

    def variance_at(self, alpha: float) -> float:
        """σ²_tot."""
        return _times(alpha, self.variance[0]) + self.variance[1]

    def steps(self, alpha: float, minimiser: Minimiser) -> Steps:
        """s_w = αη and s_θ = η/D for η = min(1/(4L_α), ‖z*‖_α/(√n σ_tot)).

        At α = ∞, η is 0 and αη tends to min(1/(4a), √(lim α‖z*‖²_α / (nA))).
        """
        if math.isfinite(alpha):
            return Steps.from_theory(
                alpha=alpha, denominator=self.denominator, rounds=self.rounds, smoothness=self.smoothness_at(alpha),
                deviation=math.sqrt(self.variance_at(alpha)), norm=math.sqrt(minimiser.squared_norm(alpha)),
            )  # fmt: skip
        noise, reach = self.rounds * self.variance[0], math.inf if minimiser.personal else minimiser.shared
        return Steps(min(1 / (4 * self.smoothness[0]), math.sqrt(reach / noise) if noise else math.inf), personal=0.0)

    def bound(self, alpha: float, minimiser: Minimiser) -> Bound:
        """4L_α‖z*‖²_α/n + 3σ_tot‖z*‖_α/√n, and the steps with which it holds."""
        _not_negative("alpha", alpha, finite=False)
        bias = max(
            _product(self.smoothness[0], 0.0, minimiser, alpha), _product(0.0, self.smoothness[1], minimiser, alpha)
        )
        return Bound(
            alpha, self.smoothness_at(alpha), self.variance_at(alpha), math.sqrt(minimiser.squared_norm(alpha)),
            bias=4 * bias / self.rounds,
            deviation=3 * math.sqrt(_product(*self.variance, minimiser, alpha) / self.rounds),
            steps=self.steps(alpha, minimiser),
        )  # fmt: skip

    def best(self, minimiser: Minimiser, alpha_qs: Sequence[float] = ALPHA_Q_GRID) -> Bound:
        """The smallest bound over a grid of αD; of equal ones, the most local, which releases least."""
        return min((self.bound(a / self.denominator, minimiser) for a in sorted(alpha_qs)), key=lambda b: b.total)

    def eased(self, factor: float) -> "Theorem":
        """The same for L/factor: steps that are longer, and a bias that is smaller, by up to this factor.

        The bias 4L_α‖z*‖²_α/n knows nothing of noise and is least at αD = 1 (without sampling). L holds for every
        sample alone; where the averages that training moves along are much smoother, the bias drowns the variance term,
        and ``best`` says αD = 1 whatever the noise.
        """
        return replace(self, smoothness=(self.smoothness[0] / factor, self.smoothness[1] / factor))


def theorem_4_5(
    *, population: int, rounds: int, dimension: int, smoothness: float, variance_w: float, variance_theta: float,
    noise_std: float,
) -> Theorem:  # fmt: skip
    """Algorithm 1: L_α = L·max(α, 1/N), σ²_tot = (α σ̄²_w + σ̄²_θ)/N + α d_w σ_ζ²   (Theorem 4.5).

    variance_w, variance_theta: σ̄²_w and σ̄²_θ of the gradient that a user takes in a round (of a mean over m samples: a
    sample's, over m). noise_std: σ_ζ = zC/N, the noise on the *average*. dimension: d_w.
    """
    n = population
    _check(population=n, rounds=rounds, dimension=dimension, smoothness=smoothness, noise_std=noise_std)
    return Theorem(
        (smoothness, smoothness / n), (variance_w / n + dimension * noise_std**2, variance_theta / n), rounds, float(n)
    )


def theorem_5_2(
    *, batch_sizes: Sequence[int], rate: float, rounds: int, dimension: int, smoothness: float,
    variances_w: Sequence[float], variances_theta: Sequence[float], noise_std: float,
    squared_gradients: Sequence[float] | None = None,
) -> Theorem:  # fmt: skip
    """Algorithm 2, sums over minibatches of m_i: it bounds f^m, users weighted by m_i/M   (Theorem 5.2).

    L_{m,α} = L·max(α + α m_max/(qM), m_max/(qM)): the proof's; the statement drops the q.
    σ²_{m,α} = (α σ̄²_{w,m} + α σ̃²_{w,m} + σ̄²_{θ,m})/(qM) + α d_w σ_ζ², σ̄²_m = (1/M) Σ m_i σ_i², and
    σ̃²_{w,m} = (1/M) Σ (1−q) m_i² ‖∇_w f_i(z*)‖². The paper has q(1−q) there: its proof loses a factor 1/q between
    E[(b−q)²]/q² = (1−q)/q and the next line.

    variances_w, variances_theta: σ²_i of one *sample*, for each user. squared_gradients: ‖∇_w f_i(z*)‖²; 0 for every
    user (the additive model) where left out. noise_std: σ_ζ = zC/(qM); C = G·m_max clips nothing.
    """
    _check(rounds=rounds, dimension=dimension, smoothness=smoothness, noise_std=noise_std, rate=rate)
    m = np.asarray(batch_sizes, dtype=np.float64)
    total, expected = float(m.sum()), rate * float(m.sum())
    pulls = np.zeros_like(m) if squared_gradients is None else np.asarray(squared_gradients, dtype=np.float64)
    variance_w = float(m @ np.asarray(variances_w)) / total
    variance_theta = float(m @ np.asarray(variances_theta)) / total
    sampling = (1 - rate) * float(m**2 @ pulls) / total
    share = float(m.max()) / expected
    return Theorem(
        (smoothness * (1 + share), smoothness * share),
        ((variance_w + sampling) / expected + dimension * noise_std**2, variance_theta / expected), rounds, expected,
    )  # fmt: skip


def theorem_b_4(
    *, population: int, rate: float, rounds: int, dimension: int, smoothness: float, variance_w: float,
    variance_theta: float, noise_std: float, squared_gradient: float = 0.0,
) -> Theorem:  # fmt: skip
    """Algorithm 3, means over minibatches: it bounds f, the average user's risk   (Theorem B.4).

    L_α = L·max(α + α/(qN), 1/(qN)) (the statement drops the q) and σ² = (α σ̄²_w + α σ̃²_w + σ̄²_θ)/(qN) + α d_w σ_ζ² with
    σ̃²_w = (1/N) Σ (1−q)‖∇_w f_i(z*)‖² (the statement has q(1−q); see ``theorem_5_2``).

    variance_w, variance_theta: (1/N) Σ σ_i²/m_i, of a minibatch *mean*. squared_gradient: (1/N) Σ ‖∇_w f_i(z*)‖², 0 in
    the additive model. noise_std: σ_ζ = zC/(qN); C = G clips nothing.
    """
    _check(
        population=population, rounds=rounds, dimension=dimension, smoothness=smoothness, noise_std=noise_std, rate=rate
    )
    expected = rate * population
    shared = (variance_w + (1 - rate) * squared_gradient) / expected + dimension * noise_std**2
    return Theorem(
        (smoothness * (1 + 1 / expected), smoothness / expected), (shared, variance_theta / expected), rounds, expected
    )


def noise_scale(
    *, clip_norm: float, rounds: int, total: float, epsilon: float, delta: float, constant: float
) -> float:  # fmt: skip
    """σ_ζ = c·C√(n log(1/δ))/(Kε)   (Theorem 4.1 with K = N; Theorem 5.1, and B.4, with K = M, and N).

    The paper says of c only that it exists. Without sampling, ``sufficient_constant`` is one. With sampling the form
    needs ε < c₁q²T as well: where q²T is not far above ε, no constant makes it true.
    """
    return constant * clip_norm * math.sqrt(rounds * math.log(1 / delta)) / (total * epsilon)


def sufficient_constant(epsilon: float, delta: float, relation: Relation = "replace-one") -> float:
    """A c with which Theorem 4.1 holds: s·(1 + √(1 + ε/log(1/δ)))/√2, for s = 2 under the paper's neighbours.

    n Gaussian releases at multiplier z are ρ-zCDP for ρ = ns²/(2z²), hence (ρ + 2√(ρ log(1/δ)), δ)-DP. Setting that
    equal to ε at z = c√(n log(1/δ))/ε and solving for c gives it. From s√2 at small ε to 1.71·s at ε = log(1/δ).
    """
    sensitivity = 1.0 if relation == "zero-out" else 2.0
    return sensitivity * (1 + math.sqrt(1 + epsilon / math.log(1 / delta))) / math.sqrt(2)


@dataclass(frozen=True)
class NoiseScale:
    """σ_ζ for an (ε, δ) by the accountant (``exact``), by the theorem with c = 1 (``paper``), and, as if there were no
    sampling, by the theorem with a constant that is proved to suffice (``proved``)."""

    exact: float
    paper: float
    proved: float

    @property
    def constant(self) -> float:
        """The c that the theorem needs to be true here. It moves with ε, δ, q and n: c is a bound, not a number."""
        return self.exact / self.paper


def noise_scales(
    *, cohort: Cohort, clip_norm: float, rounds: int, epsilon: float, delta: float,
    total_batch: int | None = None, relation: Relation = "zero-out",
) -> NoiseScale:  # fmt: skip
    """Theorem 4.1's or 5.1's noise beside the accountant's, so that one sees how loose the constant is."""
    z = calibrate_noise(epsilon=epsilon, delta=delta, cohort=cohort, rounds=rounds, relation=relation)
    release = Release(cohort, clip_norm, z, total_batch)
    total = total_batch or cohort.population
    paper = noise_scale(
        clip_norm=clip_norm, rounds=rounds, total=total, epsilon=epsilon, delta=delta, constant=1.0
    )  # fmt: skip
    unsampled = sufficient_constant(epsilon, delta, relation) / cohort.rate
    return NoiseScale(release.noise_std / release.denominator, paper, proved=unsampled * paper)


def minimal_norm_split(v: ArrayLike, population: int, alpha: float) -> tuple[Vector, Vector]:
    """w = αN/(αN+1)·v and θ_i = v/(αN+1), the minimiser of least α-norm where all users share the optimum v
    (Lemma 4.6)."""
    whole = np.asarray(v, dtype=np.float64)
    kept = 1 / (alpha * population + 1)
    return (1 - kept) * whole, kept * whole


def variance_term(
    *, alpha: float, population: int, samples: float, sigma: float, distance: float, dimension: int,
    gradient_bound: float, epsilon: float, delta: float, constant: float,
) -> float:  # fmt: skip
    """‖v‖ √( N/(αN+1) · ((α+1)σ²/(Nn) + α c² d_w G² log(1/δ)/(N²ε²)) )   (Lemma 4.6), any α in [0, ∞].

    c is the constant of Theorem 4.1. It enters squared, since σ_ζ does; the lemma leaves it out.
    """
    noise = noise_scale(
        clip_norm=gradient_bound, rounds=1, total=population, epsilon=epsilon, delta=delta, constant=constant
    )
    sampling = sigma**2 / (population * samples)
    equal = Minimiser.additive_norms(population, distance)
    return math.sqrt(_product(sampling + dimension * noise**2, sampling, equal, alpha))


def threshold_samples(
    *, population: int, sigma: float, dimension: int, gradient_bound: float, epsilon: float, delta: float,
    constant: float,
) -> float:  # fmt: skip
    """n* = N(N−1)σ²ε² / (c² d_w G² log(1/δ)): from it on the variance term does not fall with α   (Lemma 4.6).

    Samples a user, one a round. ε² as in the statement: the last line of the proof, and the text after the lemma
    ("linearly"), lose the square. c², where the proof has c.
    """
    n = population
    return n * (n - 1) * (sigma * epsilon / (constant * gradient_bound)) ** 2 / (dimension * math.log(1 / delta))


def favours_local(
    *, population: int, rate: float, batch_size: int, dimension: int, sigma: float, noise_std: float
) -> bool:
    """N·d_w·σ_ζ² ≥ (N−1)σ²/(qm): the variance term of Algorithm 3 does not fall with α (Lemma 4.6 with the noise σ_ζ =
    zC/(qN) that is really used). σ² is the variance of one sample's gradient at the minimiser."""
    return population * dimension * noise_std**2 >= (population - 1) * sigma**2 / (rate * batch_size)


def threshold_noise_multiplier(
    *, population: int, rate: float, batch_size: int, dimension: int, sigma: float, clip_norm: float
) -> float:
    """z* = (σ/C)·√((N−1)·qN/(m·d_w)), at which ``favours_local`` turns: σ_ζ = zC/(qN) put into it."""
    return sigma / clip_norm * math.sqrt((population - 1) * rate * population / (batch_size * dimension))


def squared_loss_smoothness(radius: float) -> float:
    """L = 2R² of ½(y − (w + θ)ᵀx)² for ‖x‖ ≤ R: its Hessian in (w, θ) is four copies of xxᵀ."""
    return 2 * radius**2


@dataclass(frozen=True)
class Constants:
    """What the bounds ask about a problem. smoothness: L. minimiser, dimension: of w and θ together, and d_w.

    variance_w, variance_theta: σ̄²_w and σ̄²_θ of one sample's gradient at the optimum.
    gradient_bound: G, the largest gradient seen at the start and at the optimum. Between them it may be larger.
    """

    smoothness: float
    variance_w: float
    variance_theta: float
    gradient_bound: float
    minimiser: Minimiser
    dimension: int


def gradient_variances(gradients: Sequence[ArrayLike]) -> tuple[float, float]:
    """(σ̄²_w, σ̄²_θ) from gradients at the minimiser, for each user one row a sample: (1/N) Σ_i of the variance, and of
    the second moment (the paper's two definitions; they agree where every user's mean gradient is 0)."""
    rows = [np.asarray(user, dtype=np.float64) for user in gradients]
    around = [float(((user - user.mean(axis=0)) ** 2).sum() / max(1, len(user) - 1)) for user in rows]
    return float(np.mean(around)), float(np.mean([(user**2).sum() / len(user) for user in rows]))


def estimate_constants(users: Sequence[tuple[ArrayLike, ArrayLike]], ridge: float = 0.0) -> Constants:
    """σ_w, σ_θ, G, L and the minimiser of the additive linear model with squared loss, from (x, y) of each user.

    **From public or synthetic data only.** Estimated from private data these numbers are a release of their own, about
    every user at once (G and L are maxima, which one user decides): it would have to be clipped, noised and charged to
    the ledger. Nothing here does that.

    Each user's optimum is fitted by least squares, drawn towards the fit of all users together by ``ridge`` times the
    squared distance. Users need more rows than features, or a ridge. Few rows overstate how much users differ.
    """
    rows = [(_matrix(x), _matrix(y)) for x, y in users]
    features = rows[0][0].shape[1]
    fewest = min(len(x) for x, _ in rows)
    if ridge == 0 and fewest <= features:
        raise ValueError(
            f"a user has {fewest} rows for {features} features, which fit any data exactly: leave small users out, or "
            "set ridge"
        )
    common = np.linalg.lstsq(np.vstack([x for x, _ in rows]), np.vstack([y for _, y in rows]), rcond=None)[0]
    optima = [common + _ridge_fit(x, y - x @ common, ridge) for x, y in rows]
    gradients = [_sample_gradients(x, y, optimum, ridge) for (x, y), optimum in zip(rows, optima, strict=True)]
    start = max(float((np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)).max()) for x, y in rows)
    return Constants(
        squared_loss_smoothness(max(float(np.linalg.norm(x, axis=1).max()) for x, _ in rows)),
        *gradient_variances(gradients),
        max(start, *(float(np.linalg.norm(g, axis=1).max()) for g in gradients)),
        Minimiser.additive([o.reshape(-1) for o in optima]), common.size,
    )  # fmt: skip


def _sample_gradients(
    x: NDArray[np.float64], y: NDArray[np.float64], optimum: NDArray[np.float64], ridge: float
) -> NDArray[np.float64]:
    """x rᵀ for each row, residuals enlarged by √(n/(n − features)), what a least-squares fit takes from them."""
    freedom = 1.0 if ridge else len(x) / (len(x) - x.shape[1])
    residuals = math.sqrt(freedom) * (x @ optimum - y)
    gradients: NDArray[np.float64] = np.einsum("ni,nj->nij", x, residuals).reshape(len(x), -1)
    return gradients


def _ridge_fit(x: NDArray[np.float64], y: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
    penalty = math.sqrt(ridge * len(x)) * np.eye(x.shape[1])
    fitted: NDArray[np.float64] = np.linalg.lstsq(
        np.vstack([x, penalty]), np.vstack([y, np.zeros((x.shape[1], y.shape[1]))]), rcond=None
    )[0]
    return fitted


def _matrix(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return array.reshape(len(array), -1)


def _squared(values: ArrayLike) -> float:
    return float(np.square(np.asarray(values, dtype=np.float64)).sum())


def _times(alpha: float, value: float) -> float:
    """α·value, where nothing times infinity is nothing."""
    return alpha * value if value else 0.0


def _product(slope: float, constant: float, minimiser: Minimiser, alpha: float) -> float:
    """(αA + B)·(U/(α + c) + S), term by term, so that 0·∞ never arises: its limit at α = 0 and α = ∞."""
    u, s, at = minimiser.shared, minimiser.personal, alpha + minimiser.offset
    share = 1.0 if math.isinf(alpha) or at == 0 else alpha / at
    inverse = math.inf if at == 0 else 1 / at
    return (
        slope * u * share + (constant * u * inverse if constant * u else 0.0) + _times(alpha, slope * s) + constant * s
    )


def _not_negative(name: str, value: float, finite: bool = True) -> None:
    if not 0 <= value <= (1e300 if finite else math.inf):
        raise ValueError(f"{name} must not be negative{' and finite' if finite else ''}, got {value!r}")


def _check(**values: float) -> None:
    for name, value in values.items():
        least_one = name in ("population", "rounds", "dimension")
        ok = value >= 1 if least_one else 0 < value <= 1 if name == "rate" else 0 <= value < math.inf
        if not ok or (name == "smoothness" and value == 0):
            rule = "at least 1" if least_one else "in (0, 1]" if name == "rate" else "positive and finite"
            raise ValueError(f"{name} must be {rule}, got {value!r}: set {name}")
