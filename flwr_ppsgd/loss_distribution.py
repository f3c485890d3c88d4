"""Privacy loss distributions of sampled Gaussian rounds, on a grid, composed by FFT.

The loss of an output x is log(P(x)/Q(x)), where P and Q are its densities with and without one
user. δ(ε) = E_P[max(0, 1 − e^(ε − loss))]. On the grid of losses k·h, masses are placed such that
δ(ε) is exact at every grid point and linear in e^ε between them: as δ is convex in e^ε, that is an
upper bound everywhere (Doroshenko et al. 2022, "Connect the Dots"). dp-accounting does the same,
one point at a time; the tests hold these numbers against its numbers.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter
from scipy.special import log_ndtr, ndtr

from flwr_ppsgd.algorithm import Vector

REACH = 9.8  # standard deviations; what lies beyond, 6e-23, counts as an infinite loss
MOST_STEPS = 60  # of a search by factors of two


@dataclass(frozen=True)
class Losses:
    """Masses under P of the losses (first + 0)·h, (first + 1)·h, …

    Args:
        first: the smallest loss in units of h.
        masses: one for each grid point.
        infinite: the mass of outputs that Q never gives.
    """

    first: int
    masses: Vector
    infinite: float

    @property
    def indices(self) -> Vector:
        """The losses in units of h."""
        return np.arange(self.first, self.first + len(self.masses), dtype=np.float64)


def zero_out(rate: float, z: float, spacing: float) -> tuple[Losses, Losses]:
    """One round with q < 1 in which a user contributes a unit vector or nothing, in both orders.

    P = (1 − q)·N(0, z²) + q·N(1, z²) and Q = N(0, z²), then the two exchanged.
    """
    upwards = _grid(_sampled_loss(1 + REACH * z, rate, z), spacing)
    downwards = _grid(-_sampled_loss(-REACH * z, rate, z), spacing)
    with_user = _zero_out_delta(upwards, rate, z)
    without_user = _exchanged_delta(downwards, rate, z)
    return _connected(with_user, without_user, spacing)


def gaussian(z: float, spacing: float) -> Losses:
    """One round without sampling in which a user contributes a unit vector or nothing.

    P = N(1, z²) and Q = N(0, z²); exchanged, the distribution is the same.
    """
    deltas = _gaussian_delta(_grid(REACH / z + 0.5 / z**2, spacing), z)
    losses, _ = _connected(deltas, deltas, spacing)
    return losses


def replace_one(rate: float, z: float, spacing: float) -> Losses:
    """One round with q < 1 in which a user's unit vector turns round.

    P = (1 − q)·N(0, z²) + q·N(1, z²) and Q = (1 − q)·N(0, z²) + q·N(−1, z²); exchanged, the
    distribution is the same.
    """
    outermost = 1 + REACH * z
    top = _sampled_loss(outermost, rate, z) - _sampled_loss(-outermost, rate, z)
    deltas = _replace_one_delta(_grid(top, spacing), rate, z)
    losses, _ = _connected(deltas, deltas, spacing)
    return losses


def _grid(top: float, spacing: float) -> Vector:
    """0, h, 2h, … up to the first that is not below ``top``."""
    last = max(1, math.ceil(top / spacing))
    return spacing * np.arange(last + 1, dtype=np.float64)


def _sampled_loss(x: float, rate: float, z: float) -> float:
    """log(1 − q + q·e^((2x − 1)/(2z²)))."""
    plain = (2 * x - 1) / (2 * z**2)
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + plain))


def _zero_out_delta(epsilon: Vector, rate: float, z: float) -> Vector:
    """q·δ₁(log(1 + (e^ε − 1)/q)) for ε ≥ 0, with δ₁ that of the Gaussian without sampling."""
    factor = np.exp(-epsilon) - np.expm1(-epsilon) / rate  # e^(−ε)·(1 + (e^ε − 1)/q)
    delta: Vector = rate * _gaussian_delta(epsilon + np.log(factor), z)
    return delta


def _gaussian_delta(epsilon: Vector, z: float) -> Vector:
    """Φ(1/(2z) − zε) − e^ε·Φ(−1/(2z) − zε)   (Balle and Wang 2018)."""
    reached = ndtr(0.5 / z - z * epsilon)
    gone = np.exp(epsilon + log_ndtr(-0.5 / z - z * epsilon))
    delta: Vector = reached - gone
    return delta


def _exchanged_delta(epsilon: Vector, rate: float, z: float) -> Vector:
    """δ(ε), ε ≥ 0, of N(0, z²) against (1 − q)·N(0, z²) + q·N(1, z²).

    (1 − e^ε·(1 − q))·Φ(x/z) − q·e^ε·Φ((x − 1)/z), where x has the loss ε. 0 if no x has it.
    """
    ratio = 1 + np.expm1(-epsilon) / rate  # e^((2x − 1)/(2z²))
    inside = ratio > 0
    x = z**2 * np.log(ratio, where=inside, out=np.zeros_like(ratio)) + 0.5
    reached = -np.expm1(epsilon + math.log1p(-rate)) * ndtr(x / z)
    gone = rate * np.exp(epsilon + log_ndtr((x - 1) / z))
    return np.where(inside, reached - gone, 0.0)


def _replace_one_delta(epsilon: Vector, rate: float, z: float) -> Vector:
    """P(X > x) − e^ε·Q(X > x), where x has the loss ε ≥ 0.

    x/z² = ε/2 + arsinh((1 − q)/q·e^(1/(2z²))·sinh(ε/2)).
    """
    half = epsilon / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-epsilon) / 2)
    log_term = math.log1p(-rate) - math.log(rate) + 0.5 / z**2 + log_sinh
    arsinh = np.logaddexp(log_term, 0.5 * np.logaddexp(0.0, 2 * log_term))
    x = z**2 * (half + arsinh)
    reached = (1 - rate) * ndtr(-x / z) + rate * ndtr((1 - x) / z)
    undrawn_gone = (1 - rate) * np.exp(epsilon + log_ndtr(-x / z))
    drawn_gone = rate * np.exp(epsilon + log_ndtr((-1 - x) / z))
    delta: Vector = reached - undrawn_gone - drawn_gone
    return delta


def _connected(upwards: Vector, downwards: Vector, spacing: float) -> tuple[Losses, Losses]:
    """The losses of P against Q and of Q against P, from δ at ε = 0, h, 2h, … both ways.

    A mass m of P at a loss is a mass m·e^(−loss) of Q. So each way gives the positive losses of
    its own and the negative ones of the other, where tails are small numbers and keep their digits.
    """
    positive = _masses(upwards, spacing)
    negative = _masses(downwards, spacing)
    forth = _joined(positive, negative, max(0.0, float(upwards[-1])), spacing)
    back = _joined(negative, positive, max(0.0, float(downwards[-1])), spacing)
    return forth, back


def _masses(deltas: Vector, spacing: float) -> Vector:
    """At the losses h, 2h, …, such that δ is linear in e^ε between grid points."""
    drops = -np.diff(np.minimum.accumulate(deltas))
    step = math.expm1(spacing)
    masses = drops + drops / step
    masses[:-1] -= drops[1:] / step
    return np.maximum(masses, 0.0)


def _joined(positive: Vector, other_way: Vector, infinite: float, spacing: float) -> Losses:
    """The positive losses, those below 0, and at 0 what is left; without empty ends."""
    discount = np.exp(-spacing * np.arange(1, len(other_way) + 1))
    negative = other_way * discount
    rest = max(0.0, 1 - infinite - positive.sum() - negative.sum())
    masses = np.concatenate([negative[::-1], [rest], positive])
    filled = np.flatnonzero(masses)
    first = int(filled[0])
    return Losses(first - len(negative), masses[first : filled[-1] + 1], infinite)


def composed(parts: list[tuple[Losses, int]], tail: float) -> Losses:
    """The sum of independent losses, each drawn as many times as it says.

    Sums above a window that holds all but ``tail`` of the mass count as infinite. What lies below
    it comes out too high.
    """
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    lowest, highest = _window(parts, tail)
    longest = max(len(losses.masses) for losses, _ in parts)
    size = next_fast_len(max(highest - lowest + 1, longest), real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    log_finite = 0.0
    for losses, times in parts:
        spectrum *= _spectrum(losses, size) ** times
        log_finite += times * math.log1p(-losses.infinite)
    circle = irfft(spectrum, size)
    masses = np.roll(circle, -lowest)[: highest - lowest + 1]
    return Losses(lowest, masses, tail - math.expm1(log_finite))


def _spectrum(losses: Losses, size: int) -> Vector:
    """The Fourier transform on a circle of ``size`` grid points, a loss of 0 at the start."""
    circle = np.zeros(size)
    circle[: len(losses.masses)] = losses.masses
    spectrum: Vector = rfft(np.roll(circle, losses.first))
    return spectrum


def _window(parts: list[tuple[Losses, int]], tail: float) -> tuple[int, int]:
    """Grid points between which the sum lies but for a mass of ``tail`` on either side."""
    lowest = sum(times * losses.first for losses, times in parts)
    highest = lowest + sum(times * (len(losses.masses) - 1) for losses, times in parts)
    above = _tail_begins(parts, tail, 1.0)
    below = _tail_begins(parts, tail, -1.0)
    lowest = max(lowest, math.floor(-below) - 1)
    highest = min(highest, math.ceil(above) + 1)
    return lowest, max(lowest, highest)


def _tail_begins(parts: list[tuple[Losses, int]], tail: float, sign: float) -> float:
    """A u with P[sign·sum ≥ u] ≤ ``tail``, by Chernoff: (Σ log E[e^(λ·sign·loss)] − log tail)/λ.

    Every λ > 0 gives one. The search for the smallest begins at the λ that would be best for a
    Gaussian of the same variance.
    """

    def bound(order: float) -> float:
        moments = sum(times * _log_moment(losses, sign * order) for losses, times in parts)
        return (moments - math.log(tail)) / order

    variance = sum(times * _variance(losses) for losses, times in parts)
    order = math.sqrt(-2 * math.log(tail) / max(variance, 1e-12))
    found = bound(order)
    for factor in (0.5, 2.0):
        for _ in range(MOST_STEPS):
            tried = bound(order * factor)
            if tried >= found:
                break
            order *= factor
            found = tried
    return found


def _variance(losses: Losses) -> float:
    """In units of h²."""
    mean = losses.masses @ losses.indices
    return float(losses.masses @ (losses.indices - mean) ** 2)


def _log_moment(losses: Losses, order: float) -> float:
    """log E[e^(order·loss)], of the finite losses."""
    exponents = order * losses.indices
    top = float(max(exponents[0], exponents[-1]))
    return top + math.log(losses.masses @ np.exp(exponents - top))


def epsilon_of(losses: Losses, spacing: float, delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``; infinite if there is none."""
    if losses.infinite > delta:
        return math.inf
    start = max(0, 1 - losses.first)  # the first loss above 0
    masses = losses.masses[start:]
    lowest = spacing * (losses.first + start - 1)  # of an ε that is looked at
    if not len(masses):
        return max(0.0, lowest)
    backwards = masses[::-1]
    above = losses.infinite + np.cumsum(backwards)[::-1]
    fading = math.exp(-spacing)
    # Σ_j p_j·e^(ε − loss_j) over the losses above ε, for each ε one grid point below a loss
    discounted = lfilter([fading], [1.0, -fading], backwards)[::-1]
    exceeding = np.flatnonzero(above - discounted > delta)
    if not len(exceeding):
        return max(0.0, lowest)
    last = int(exceeding[-1])
    left = spacing * last + lowest
    if discounted[last] <= 0:
        return left + spacing
    return left + min(spacing, math.log((above[last] - delta) / discounted[last]))
