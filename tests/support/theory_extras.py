"""Formulas of the paper that only tests use: they are checked against ``flwr_ppsgd.lab.theory``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_ppsgd.algorithm import Cohort, Release, Vector
from flwr_ppsgd.epsilon import Relation
from flwr_ppsgd.lab.theory import (
    Constants,
    Minimiser,
    Theorem,
    noise_scale,
    squared_length,
    squared_loss_smoothness,
    sufficient_constant,
)
from flwr_ppsgd.privacy import calibrate_noise

Floats = NDArray[np.float64]


def minimiser_at(w: ArrayLike, thetas: ArrayLike) -> Minimiser:
    """A given minimiser (w*, θ*_1..N)."""
    return Minimiser(squared_length(w), squared_length(thetas))


def alpha_norm(w: ArrayLike, thetas: ArrayLike, alpha: float) -> float:
    """√(‖w‖²/α + Σ_i ‖θ_i‖²)   (equation 4).

    At α = 0 it is infinite unless w = 0; at α = ∞ w has no weight.
    """
    return math.sqrt(minimiser_at(w, thetas).squared_norm(alpha))


def minimal_norm_split(v: ArrayLike, population: int, alpha: float) -> tuple[Vector, Vector]:
    """w = αN/(αN+1)·v and θ_i = v/(αN+1), the minimiser of least α-norm if all users share the
    optimum v (Lemma 4.6)."""
    whole = np.asarray(v, dtype=np.float64)
    kept = 1 / (alpha * population + 1)
    return (1 - kept) * whole, kept * whole


def theorem_5_2(
    *,
    batch_sizes: Sequence[int],
    rate: float,
    rounds: int,
    dimension: int,
    smoothness: float,
    variances_w: Sequence[float],
    variances_theta: Sequence[float],
    noise_std: float,
    squared_gradients: Sequence[float] | None = None,
) -> Theorem:
    """Algorithm 2, sums over minibatches of m_i: a bound on f^m, users weighted by m_i/M.

    L_{m,α} = L·max(α + α m_max/(qM), m_max/(qM)) as in the proof; the statement drops the q.
    σ²_{m,α} = (α σ̄²_{w,m} + α σ̃²_{w,m} + σ̄²_{θ,m})/(qM) + α d_w σ_ζ², where σ̄²_m = (1/M) Σ m_i σ_i²
    and σ̃²_{w,m} = (1/M) Σ (1−q) m_i² ‖∇_w f_i(z*)‖². The paper has q(1−q) there: its proof loses a
    factor 1/q between E[(b−q)²]/q² = (1−q)/q and the next line.

    Args:
        batch_sizes: m_i of each user.
        rate: q.
        rounds: n.
        dimension: d_w.
        smoothness: L.
        variances_w: σ²_i of one *sample*, for each user.
        variances_theta: the same for the gradient in θ.
        noise_std: σ_ζ = zC/(qM); C = G·m_max clips nothing.
        squared_gradients: ‖∇_w f_i(z*)‖²; None means 0 for every user, as in the additive model.
    """
    m = np.asarray(batch_sizes, dtype=np.float64)
    pulls = np.zeros_like(m)
    if squared_gradients is not None:
        pulls = np.asarray(squared_gradients, dtype=np.float64)
    total = float(m.sum())
    expected = rate * total
    variance_w = float(m @ np.asarray(variances_w)) / total
    variance_theta = float(m @ np.asarray(variances_theta)) / total
    sampling = (1 - rate) * float(m**2 @ pulls) / total
    share = float(m.max()) / expected
    shared = (variance_w + sampling) / expected + dimension * noise_std**2
    return Theorem(
        smoothness=(smoothness * (1 + share), smoothness * share),
        variance=(shared, variance_theta / expected),
        rounds=rounds,
        denominator=expected,
    )


@dataclass(frozen=True)
class NoiseScale:
    """σ_ζ for an (ε, δ).

    Args:
        exact: by the accountant.
        paper: by the theorem with c = 1.
        proved: by the theorem with a constant that is proved to suffice, as if there were no
            sampling.
    """

    exact: float
    paper: float
    proved: float

    @property
    def constant(self) -> float:
        """The c that the theorem needs to be true here; it changes with ε, δ, q and n."""
        return self.exact / self.paper


def noise_scales(
    *,
    cohort: Cohort,
    clip_norm: float,
    rounds: int,
    epsilon: float,
    delta: float,
    relation: Relation = "zero-out",
) -> NoiseScale:
    """The noise of Theorem 4.1 or 5.1 beside the accountant's, to see how loose c is."""
    z = calibrate_noise(
        epsilon=epsilon,
        delta=delta,
        cohort=cohort,
        rounds=rounds,
        relation=relation,
    )
    release = Release(cohort, clip_norm, z)
    paper = noise_scale(
        clip_norm=clip_norm,
        rounds=rounds,
        total=cohort.population,
        epsilon=epsilon,
        delta=delta,
        constant=1.0,
    )
    unsampled = sufficient_constant(epsilon, delta, relation) / cohort.rate
    return NoiseScale(release.noise_std / release.denominator, paper, proved=unsampled * paper)


def variance_term(
    *,
    alpha: float,
    population: int,
    samples: float,
    sigma: float,
    distance: float,
    dimension: int,
    gradient_bound: float,
    epsilon: float,
    delta: float,
    constant: float,
) -> float:
    """‖v‖ √( N/(αN+1) · ((α+1)σ²/(Nn) + α c² d_w G² log(1/δ)/(N²ε²)) )   (Lemma 4.6), any α in
    [0, ∞].

    c is the constant of Theorem 4.1. It enters squared, since σ_ζ does; the lemma leaves it out.
    """
    noise = noise_scale(
        clip_norm=gradient_bound,
        rounds=1,
        total=population,
        epsilon=epsilon,
        delta=delta,
        constant=constant,
    )
    sampling = sigma**2 / (population * samples)
    equal = Minimiser.additive_norms(population, distance)
    return math.sqrt(equal.weighted(sampling + dimension * noise**2, sampling, alpha))


def gradient_variances(gradients: Sequence[ArrayLike]) -> tuple[float, float]:
    """(σ̄²_w, σ̄²_θ): (1/N) Σ_i of the variance, and of the second moment, at the minimiser.

    These are the paper's two definitions. They agree if every user's mean gradient is 0.

    Args:
        gradients: for each user, one row per sample.
    """
    variances = []
    moments = []
    for user in gradients:
        rows = np.asarray(user, dtype=np.float64)
        squares = float(((rows - rows.mean(axis=0)) ** 2).sum())
        variances.append(squares / max(1, len(rows) - 1))
        moments.append((rows**2).sum() / len(rows))
    return float(np.mean(variances)), float(np.mean(moments))


def estimate_constants(
    users: Sequence[tuple[ArrayLike, ArrayLike]], ridge: float = 0.0
) -> Constants:
    """σ_w, σ_θ, G, L and the minimiser of the additive linear model with squared loss.

    **From public or synthetic data only.** Estimated from private data these numbers are a release
    of their own, about every user at once (G and L are maxima, which one user decides): it would
    have to be clipped, noised and charged to the ledger. Nothing here does that.

    Each user's optimum is fitted by least squares. Few rows overstate how much users differ.

    Args:
        users: (x, y) of each user. Users need more rows than features, or a ridge.
        ridge: times the squared distance, draws each fit towards the fit of all users together.
    """
    rows = [(_matrix(x), _matrix(y)) for x, y in users]
    _refuse_exact_fits(rows, ridge)
    all_x = np.vstack([x for x, _ in rows])
    all_y = np.vstack([y for _, y in rows])
    common = np.linalg.lstsq(all_x, all_y, rcond=None)[0]
    optima = []
    gradients = []
    largest = []  # of each user: gradients at the start and at the optimum
    for x, y in rows:
        optimum = common + _ridge_fit(x, y - x @ common, ridge)
        found = _sample_gradients(x, y, optimum, ridge)
        start = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        optima.append(optimum.reshape(-1))
        gradients.append(found)
        largest += [start.max(), np.linalg.norm(found, axis=1).max()]
    radius = float(np.linalg.norm(all_x, axis=1).max())
    variance_w, variance_theta = gradient_variances(gradients)
    return Constants(
        smoothness=squared_loss_smoothness(radius),
        variance_w=variance_w,
        variance_theta=variance_theta,
        gradient_bound=float(max(largest)),
        minimiser=Minimiser.additive(optima),
        dimension=common.size,
    )


def _refuse_exact_fits(rows: Sequence[tuple[Floats, Floats]], ridge: float) -> None:
    features = rows[0][0].shape[1]
    fewest = min(len(x) for x, _ in rows)
    if ridge == 0 and fewest <= features:
        raise ValueError(
            f"a user has {fewest} rows for {features} features, which fit any data exactly: leave "
            "small users out, or set ridge"
        )


def _sample_gradients(x: Floats, y: Floats, optimum: Floats, ridge: float) -> Floats:
    """x rᵀ for each row, with residuals enlarged by √(n/(n − features)).

    A least-squares fit makes residuals smaller by that factor.
    """
    freedom = 1.0 if ridge else len(x) / (len(x) - x.shape[1])
    residuals = math.sqrt(freedom) * (x @ optimum - y)
    products = np.einsum("ni,nj->nij", x, residuals)  # rows × features × outputs
    gradients: Floats = products.reshape(len(x), -1)
    return gradients


def _ridge_fit(x: Floats, y: Floats, ridge: float) -> Floats:
    features = x.shape[1]
    penalty = math.sqrt(ridge * len(x)) * np.eye(features)
    padded_x = np.vstack([x, penalty])
    padded_y = np.vstack([y, np.zeros((features, y.shape[1]))])
    fitted: Floats = np.linalg.lstsq(padded_x, padded_y, rcond=None)[0]
    return fitted


def _matrix(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    return array.reshape(len(array), -1)
