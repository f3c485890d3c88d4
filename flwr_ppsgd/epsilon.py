"""ε of releases that are given as bare numbers: by PLD, by RDP (dp-accounting), in closed form.

Neighbours. ``zero-out``, the headline: a user stays enrolled but contributes nothing; N, q, M, D
and the enrolment are public and unchanged. ``replace-one``, the paper's definition: a user's data
are exchanged for any other; twice as far.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    rdp,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from flwr_ppsgd import loss_distribution
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.loss_distribution import Losses

Relation: TypeAlias = Literal["zero-out", "replace-one"]
Method: TypeAlias = Literal["pld", "rdp"]

LARGEST_EXPONENT = 600.0  # e to this power is still a float
ULP = 2.0**-52
PLD_MARGIN = 100.0  # PLD is used if δ is at least this many times its round-off
PAPER_ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)])
LEAST_ORDER = 1.01  # as in dp-accounting
FAR_OFF = 3.0  # a rough ε that many times too large chose too coarse a discretisation
MOST_POINTS = 1e6  # of a discretisation, about
WINDOW_TAIL = 1e-4  # the part of δ that losses outside the window of a composition may take


@dataclass(frozen=True, order=True)
class Priced:
    """A release as an accountant sees it, and how often it was made.

    Args:
        rate: q, the chance to be drawn by a secret coin; 1 if sampling amplifies nothing.
        noise_multiplier: z.
        times: the number of rounds.
    """

    rate: float
    noise_multiplier: float
    times: int

    @property
    def event(self) -> DpEvent:
        """One round, for dp-accounting."""
        noise = GaussianDpEvent(self.noise_multiplier)
        return PoissonSampledDpEvent(self.rate, noise) if self.rate < 1 else noise

    @property
    def reach(self) -> float:
        """About the largest privacy loss of one round that counts."""
        plain = 0.5 / self.noise_multiplier**2 + 8 / self.noise_multiplier
        return math.log1p(self.rate * math.expm1(min(plain, LARGEST_EXPONENT)))

    @property
    def spread(self) -> float:
        """q·√(e^(1/z²) − 1), about the standard deviation of the privacy loss of one round."""
        ratio = math.expm1(min(1 / self.noise_multiplier**2, LARGEST_EXPONENT))
        return min(self.rate * math.sqrt(ratio), self.reach)


Releases: TypeAlias = tuple[Priced, ...]


def sensitivity(relation: Relation) -> float:
    """How far one user moves the sum, in units of C."""
    return 1.0 if relation == "zero-out" else 2.0


def without_sampling(releases: Releases, delta: float, relation: Relation) -> float:
    """The exact ε if nobody is sampled: the rounds compose to one Gaussian.

    Its standard deviation is 1/√(Σ_t (s/z_t)²), with s the sensitivity. With sampling this is an
    upper bound: it forgets that sampling helps.
    """
    distance = sensitivity(relation)
    squared_shift = sum(
        priced.times * (distance / priced.noise_multiplier) ** 2 for priced in releases
    )
    return gaussian(1 / math.sqrt(squared_shift), delta)


@functools.lru_cache(maxsize=1024)
def gaussian(sigma: float, delta: float) -> float:
    """ε with Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) = δ for μ = 1/σ (Balle and Wang 2018).

    From above, by bisection.
    """
    mu = 1 / sigma

    def exceeds(epsilon: float) -> bool:
        at = mu / 2 - epsilon / mu
        reached = float(ndtr(at))
        gone = log_ndtr(-mu / 2 - epsilon / mu) + epsilon
        rounding = (8 + at**2) * ULP * reached  # of both terms; they may nearly cancel
        return reached - math.exp(min(gone, 0.0)) + rounding > delta

    low = 0.0
    high = 1.0
    if not exceeds(low):
        return 0.0
    while exceeds(high):
        low = high
        high = 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if exceeds(middle):
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Bound:
    """An upper bound on ε, and the name of the method that gave it."""

    epsilon: float
    method: str


def tightest(releases: Releases, delta: float, relation: Relation) -> Bound:
    """The smallest bound that holds in floating point, at any δ.

    Without sampling the closed form is exact. With sampling PLD is tight, but the FFT inside it has
    a round-off that grows with the number of rounds: it is used only if δ is far above that, and at
    δ less the round-off. Below, the smallest of the other bounds is taken.
    """
    if all(priced.rate == 1 for priced in releases):
        return Bound(without_sampling(releases, delta, relation), "exact")
    lost = pld_round_off(releases)
    if delta >= PLD_MARGIN * lost:
        epsilon = by_pld(releases, delta - lost, relation)
        if math.isfinite(epsilon):
            return Bound(epsilon, "PLD")
    return min(_without_pld(releases, delta, relation), key=lambda bound: bound.epsilon)


def _without_pld(releases: Releases, delta: float, relation: Relation) -> list[Bound]:
    """Bounds that need no FFT."""
    plain = without_sampling(releases, delta, relation)
    bounds = [Bound(plain, "the closed form without amplification by sampling")]
    if relation == "zero-out":
        bounds.append(Bound(by_rdp(releases, delta, relation), "RDP"))
    else:
        bounds.append(Bound(_twice(releases, delta), "twice the RDP bound for zero-out"))
    return bounds


def pld_round_off(releases: Releases) -> float:
    """A bound on what round-off takes from δ inside PLD: 2⁻⁵² per composed round.

    The FFT of one round's distribution is raised to the power T, which multiplies the relative
    error of each coefficient by T. Measured against exact values: a tenth of this or less.
    """
    return ULP * sum(priced.times for priced in releases)


def _twice(releases: Releases, delta: float) -> float:
    """``as_two_zero_outs`` with the RDP bound."""
    return as_two_zero_outs(
        lambda log_delta: by_rdp(releases, math.exp(log_delta), "zero-out"), delta
    )


def as_two_zero_outs(cost: Callable[[float], float], delta: float) -> float:
    """Replace-one neighbours as two zero-outs: 2ε₀, with (1 + e^ε₀)·δ₀ ≤ δ and ε₀ = ε(δ₀).

    The largest such δ₀ is found by bisection of its logarithm.

    Args:
        cost: ε under zero-out neighbours, for a logarithm of δ.
        delta: δ.
    """

    def fits(log_delta: float) -> bool:
        epsilon = max(0.0, cost(log_delta))
        if epsilon >= LARGEST_EXPONENT:
            return False
        return log_delta + math.log1p(math.exp(epsilon)) <= math.log(delta)

    low = math.log(1e-300)
    high = math.log(delta)
    if not fits(low):
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return 2 * max(0.0, cost(low))


@functools.cache
def check_accountant() -> None:
    """Known answers of the accountants, once per process, before the first guarantee is printed.

    RuntimeError if an accountant is not what this package was tested with: a wrong ε must never be
    printed.
    """
    gaussian_round = (Priced(1.0, 1.0, 1),)
    sampled = (Priced(0.01, 1.0, 1000),)
    answers = {
        "PLD, zero-out": (by_pld(sampled, 1e-4, "zero-out"), 1.5124, 1.530),
        "PLD, replace-one": (by_pld(sampled, 1e-4, "replace-one"), 2.4315, 2.457),
        "RDP, zero-out": (by_rdp(sampled, 1e-4, "zero-out"), 1.7540, 1.757),
        "PLD of one Gaussian": (by_pld(gaussian_round, 1e-5, "zero-out"), 4.3767, 4.421),
        "RDP of one Gaussian": (by_rdp(gaussian_round, 1e-5, "zero-out"), 4.7, 4.76),
        "RDP of one Gaussian, replace-one": (
            by_rdp(gaussian_round, 1e-5, "replace-one"),
            10.4,
            10.8,
        ),
        "the closed form": (gaussian(1.0, 1e-5), 4.37717, 4.37719),
    }
    for name, (found, least, most) in answers.items():
        if not least <= found <= most:
            raise RuntimeError(
                f"the accountant gives epsilon = {found!r} for {name} where {least} to {most} is "
                "right: no guarantee can be printed; install the versions of dp-accounting and "
                "scipy that constraints.txt names"
            )


@functools.lru_cache(maxsize=256)
def by_pld(releases: Releases, delta: float, relation: Relation) -> float:
    """By privacy loss distributions, at a discretisation chosen from the events and a rough ε.

    Once more if the rough ε was far off. Infinite if the tails of the noise take all of δ.
    """
    merged = _merged(releases)
    epsilon = rough_epsilon(merged, delta)
    for _ in range(4):
        rough = epsilon
        epsilon = _by_pld_near(rough, merged, delta, relation)
        if epsilon == 0 or epsilon >= rough / FAR_OFF:
            break
    return epsilon


def rough_epsilon(releases: Releases, delta: float) -> float:
    """ε as if all losses together were those of one Gaussian, by the central limit theorem.

    No bound: too low for few rounds, too high for little noise.
    """
    variance = sum(priced.times * priced.spread**2 for priced in releases)
    normal = gaussian(1 / math.sqrt(variance), delta)
    return min(normal, without_sampling(releases, delta, "zero-out"))


def _merged(releases: Releases) -> Releases:
    """The same with one Gaussian in place of all rounds without sampling."""
    sampled = tuple(priced for priced in releases if priced.rate < 1)
    precision = sum(
        priced.times / priced.noise_multiplier**2 for priced in releases if priced.rate == 1
    )
    if precision == 0:
        return sampled
    return (*sampled, Priced(1.0, 1 / math.sqrt(precision), 1))


def _by_pld_near(rough: float, releases: Releases, delta: float, relation: Relation) -> float:
    interval = _interval(releases, rough)
    pairs = [
        _one_round(priced.rate, priced.noise_multiplier, relation, interval) for priced in releases
    ]
    epsilons = []
    for one_way in zip(*pairs, strict=True):
        parts = [(losses, priced.times) for losses, priced in zip(one_way, releases, strict=True)]
        total = loss_distribution.composed(parts, WINDOW_TAIL * delta)
        epsilons.append(loss_distribution.epsilon_of(total, interval, delta))
    return max(epsilons)


@functools.lru_cache(maxsize=64)
def _one_round(
    rate: float, z: float, relation: Relation, interval: float
) -> tuple[Losses, Losses] | tuple[Losses]:
    """The privacy losses of one round: both ways for zero-out, which is not symmetric."""
    if relation == "replace-one":
        if rate == 1:
            return (loss_distribution.gaussian(z / 2, interval),)
        return (loss_distribution.replace_one(rate, z, interval),)
    if rate == 1:
        symmetric = loss_distribution.gaussian(z, interval)
        return (symmetric, symmetric)
    return loss_distribution.zero_out(rate, z, interval)


def _interval(releases: Releases, epsilon: float) -> float:
    """The coarsest discretisation of the privacy loss that keeps ε within 1 % of its limit.

    With spacing h the pessimistic rounding adds at most h²/4 to the variance of one round's loss,
    and at most h to the loss; so h ≤ .07·s suffices, with s² the mean variance of a round, and so
    does h ≤ .002·ε/rounds. An ε far below s is resolved by s/1400 at best, where rounding to floats
    is still small; the last term bounds the work.
    """
    rounds = sum(priced.times for priced in releases)
    variance = sum(priced.times * priced.spread**2 for priced in releases)
    widest = max(8 * math.sqrt(variance), *(priced.reach for priced in releases))
    enough = 0.07 * math.sqrt(variance / rounds)
    fine = max(min(enough, 0.02, 0.005 * epsilon), 0.01 * min(enough, 0.02))
    return min(1.0, max(fine, 0.002 * epsilon / rounds, widest / MOST_POINTS))


def by_rdp(releases: Releases, delta: float, relation: Relation) -> float:
    """By Rényi differential privacy. ValueError for replace-one neighbours with sampling."""
    if relation == "replace-one" and any(priced.rate < 1 for priced in releases):
        raise ValueError(
            "method='rdp' has no bound for relation='replace-one' under Poisson sampling "
            "(dp-accounting supports none): use method='pld'"
        )
    distance = sensitivity(relation)
    orders = _default_orders()

    def one_round(priced: Priced) -> Vector:
        return _one_round_rdp(priced.rate, priced.noise_multiplier / distance, orders)

    return _epsilon_of_rdp(releases, delta, orders, one_round)


def best_of_several(releases: Releases, delta: float, trials: float) -> float:
    """ε of publishing only the best of a random number of trainings, under zero-out neighbours.

    The number is drawn from a logarithmic, geometric or Poisson distribution, whichever costs least
    (Papernot and Steinke, arXiv:2110.03620, Theorems 2 and 6). What decides which training is best
    must itself be a private measure of that training.

    Args:
        releases: of one training.
        delta: δ.
        trials: the mean number of trainings.
    """
    if not releases:
        return 0.0
    one = ComposedDpEvent([SelfComposedDpEvent(own.event, own.times) for own in releases])
    costs = []
    for shape in (0.0, 1.0, math.inf):
        accountant = rdp.RdpAccountant(_default_orders(), NeighboringRelation.REPLACE_SPECIAL)
        with _quiet():
            accountant.compose(RepeatAndSelectDpEvent(one, trials, shape))
            costs.append(float(accountant.get_epsilon(delta)))
    return min(costs)


def by_paper(releases: Releases, delta: float) -> float:
    """The number that the paper's figures would print: RDP with the order grid of its code."""

    def one_round(priced: Priced) -> Vector:
        return _paper_rdp(priced.rate, priced.noise_multiplier)

    return _epsilon_of_rdp(releases, delta, PAPER_ORDERS, one_round)


def _epsilon_of_rdp(
    releases: Releases,
    delta: float,
    orders: tuple[float, ...],
    one_round: Callable[[Priced], Vector],
) -> float:
    if not releases:
        return 0.0
    total = np.zeros(len(orders))
    for priced in releases:
        total += priced.times * one_round(priced)
    return _least_over_orders(total, orders, delta)


def _least_over_orders(total: Vector, orders: tuple[float, ...], delta: float) -> float:
    """min over the orders a of r(a) + log(1 − 1/a) − log(δ·a)/(a − 1)   (Canonne et al. 2020).

    0 if δ ≥ √(1 − e^(−r)) at any order: the Kullback-Leibler divergence is at most r.
    """
    if delta**2 + math.expm1(-total.min()) > 0:
        return 0.0
    return max(0.0, float(np.min(total + _conversion(orders, delta))))


@functools.lru_cache(maxsize=64)
def _conversion(orders: tuple[float, ...], delta: float) -> Vector:
    """What an order adds to its divergence; infinity for orders near 1, which have too few digits.

    Negative numbers too: see ``_least_over_orders``.
    """
    a = np.array(orders)
    added = np.log1p(-1 / a) - np.log(delta * a) / (a - 1)
    return np.where(a > LEAST_ORDER, added, np.inf)


@functools.cache
def _default_orders() -> tuple[float, ...]:
    orders = rdp.RdpAccountant().orders
    return tuple(float(order) for order in orders)


@functools.lru_cache(maxsize=256)
def _one_round_rdp(rate: float, z: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """RDP of one round under zero-out neighbours.

    The expensive part of ε: it is kept, so that ε in every round is cheap.
    """
    accountant = rdp.RdpAccountant(orders, NeighboringRelation.REPLACE_SPECIAL)
    with _quiet():
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)))
    return np.array(accountant.rdp)


@functools.lru_cache(maxsize=256)
def _paper_rdp(rate: float, z: float) -> NDArray[np.float64]:
    """log E[(1 − q + q·exp((2x−1)/(2z²)))^a] / (a − 1) for x ~ N(0, z²), at each order a.

    By the trapezoid rule, which is exact to rounding for such integrands. dp-accounting overstates
    it at fractional orders, by up to a half; the authors' code did not.
    """
    return np.array([_log_moment(rate, z, order) / (order - 1) for order in PAPER_ORDERS])


def _log_moment(rate: float, z: float, order: float) -> float:
    if rate == 1:
        return order * (order - 1) / (2 * z**2)
    x = np.arange(-12 * z, order + 12 * z, z / 8)
    drawn = math.log(rate) + (2 * x - 1) / (2 * z**2)
    ratio = np.logaddexp(math.log1p(-rate), drawn)
    integrand = order * ratio - x**2 / (2 * z**2)
    top = integrand.max()
    total = np.exp(integrand - top).sum()
    return float(top + np.log(total / 8 / math.sqrt(2 * math.pi)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep dp-accounting's warnings about orders that it leaves out: the bound still holds.

    Without a handler on the root logger, absl would install one that prints everything, DEBUG and
    other packages' lines too.
    """
    logger = logging.getLogger("absl")
    nobody = logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.ERROR)
    logging.root.addHandler(nobody)
    try:
        yield
    finally:
        logging.root.removeHandler(nobody)
        logger.setLevel(level)
