"""ε of releases that are given as bare numbers: in closed form, by dp-accounting's PLD, by its RDP.

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
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr, ndtr

from flwr_ppsgd.algorithm import Vector

Relation: TypeAlias = Literal["zero-out", "replace-one"]
Method: TypeAlias = Literal["pld", "rdp"]

NEIGHBOURS = {
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}
LARGEST_EXPONENT = 600.0  # e to this power is still a float
ULP = 2.0**-52
PLD_MARGIN = 100.0  # PLD is used if δ is at least this many times its round-off
FINENESS = 0.003  # see _interval; ε comes out about a sixth of this too large
FAR_OFF = 1.2  # a rough ε that many times too large chose too coarse an interval
MOST_POINTS = 7.5e5  # on all grids together: two or three seconds
ADDED = 7 * ULP  # see _interval; δ comes out 2 % too large at most
TAIL = 1e-4  # about the part of δ that goes to losses beyond the grids
ORDERS = np.array(rdp.RdpAccountant().orders)
LEAST_ORDER = 1.01  # as in dp-accounting
PAPER_ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))


@dataclass(frozen=True, order=True)
class PricedRelease:
    """A release as an accountant sees it, and how often it was made.

    Args:
        rate: q, the chance to be drawn, in secret; 1 if sampling amplifies nothing.
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
        return _loss_with_sampling(plain, self.rate)

    @property
    def spread(self) -> float:
        """About the standard deviation of the privacy loss of one round.

        q·√(e^(1/z²) − 1); if z is small, √q times that of a round without sampling.
        """
        precision = 1 / self.noise_multiplier**2
        seldom = self.rate * math.sqrt(math.expm1(min(precision, LARGEST_EXPONENT)))
        plain = math.sqrt(precision + precision**2 / 4)
        return min(seldom, math.sqrt(self.rate) * plain)


Releases: TypeAlias = tuple[PricedRelease, ...]


@dataclass(frozen=True)
class EpsilonBound:
    """An upper bound on ε, and the name of the method that gave it."""

    epsilon: float
    method: str


def sensitivity(relation: Relation) -> float:
    """How far one user moves the sum, in units of C."""
    return 1.0 if relation == "zero-out" else 2.0


def tightest(releases: Releases, delta: float, relation: Relation) -> EpsilonBound:
    """The smallest bound that holds in floating point, at any δ.

    Without sampling the closed form is exact. With sampling PLD is tight, but the FFT inside it has
    a round-off of 2⁻⁵² per composed round: it is used only if δ is far above that, and at δ less
    the round-off. Otherwise, and where PLD would need too fine a grid to be tight, the
    smallest of all bounds is taken.
    """
    if all(priced.rate == 1 for priced in releases):
        return EpsilonBound(without_sampling(releases, delta, relation), "exact")
    bounds = []
    # The FFT of one round's distribution is raised to the power T, which multiplies the relative
    # error of each coefficient by T. Measured against exact values: a tenth of this or less.
    lost = ULP * sum(priced.times for priced in releases)
    if delta >= PLD_MARGIN * lost:
        epsilon, is_tight = by_pld(releases, delta - lost, relation)
        if is_tight:
            return EpsilonBound(epsilon, "PLD")
        bounds.append(EpsilonBound(epsilon, "PLD"))
    plain = without_sampling(releases, delta, relation)
    bounds.append(EpsilonBound(plain, "the closed form without amplification by sampling"))
    if relation == "zero-out":
        bounds.append(EpsilonBound(by_rdp(releases, delta, relation), "RDP"))
    else:
        twice = as_two_zero_outs(
            lambda log_delta: by_rdp(releases, math.exp(log_delta), "zero-out"), delta
        )
        bounds.append(EpsilonBound(twice, "twice the RDP bound for zero-out"))
    return min(bounds, key=lambda bound: bound.epsilon)


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
    """ε with Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) = δ for μ = 1/σ (Balle and Wang 2018), from above."""
    mu = 1 / sigma

    def exceeds(epsilon: float) -> bool:
        at = mu / 2 - epsilon / mu
        first = float(ndtr(at))
        log_second = log_ndtr(-mu / 2 - epsilon / mu) + epsilon
        rounding = (8 + at**2) * ULP * first  # of both terms, which may nearly cancel
        return first - math.exp(min(log_second, 0.0)) + rounding > delta

    return _least(exceeds)


def _least(exceeds: Callable[[float], bool]) -> float:
    """The least ε ≥ 0 that does not exceed something, from above, by bisection."""
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


@functools.lru_cache(maxsize=256)
def by_pld(releases: Releases, delta: float, relation: Relation) -> tuple[float, bool]:
    """ε by dp-accounting's privacy loss distributions, and whether the grid was fine enough.

    The grid follows from a rough ε; once more if that was too large. An ε on a fine grid is about
    .1 % above the limit of ever finer ones at most; on any grid it is an upper bound.
    """
    merged = _merge_unsampled(releases)
    epsilon = rough_epsilon(merged, delta, relation)
    while True:
        rough = epsilon
        interval, is_fine = _interval(merged, rough, delta)
        if interval > LARGEST_EXPONENT:
            return math.inf, False
        epsilon = _by_pld_at(interval, merged, delta, relation)
        if epsilon == 0 or epsilon >= rough / FAR_OFF:
            return epsilon, is_fine


def rough_epsilon(releases: Releases, delta: float, relation: Relation) -> float:
    """About ε, at no cost; no bound.

    The larger of two, at most what it would be without sampling: all losses together as those of
    one Gaussian, by the central limit theorem, and one release as if it were the only one that is
    drawn, once, which is so if users are seldom drawn.
    """
    distance = sensitivity(relation)
    variance = sum(priced.times * (distance * priced.spread) ** 2 for priced in releases)
    found = gaussian(1 / math.sqrt(variance), delta)
    for priced in releases:
        share = delta / (priced.times * priced.rate)
        if share < 1:
            drawn = gaussian(priced.noise_multiplier, share)
            found = max(found, _loss_with_sampling(drawn, priced.rate))
    return min(found, without_sampling(releases, delta, relation))


def _loss_with_sampling(loss: float, rate: float) -> float:
    """log(1 + q·(e^loss − 1)): a loss, where one is drawn with probability q."""
    if loss > LARGEST_EXPONENT:
        return loss + math.log(rate)
    return math.log1p(rate * math.expm1(loss))


def _merge_unsampled(releases: Releases) -> Releases:
    """The same with one Gaussian in place of all rounds without sampling."""
    merged = []
    precision = 0.0
    for priced in releases:
        if priced.rate < 1:
            merged.append(priced)
        else:
            precision += priced.times / priced.noise_multiplier**2
    if precision:
        merged.append(PricedRelease(1.0, 1 / math.sqrt(precision), 1))
    return tuple(merged)


def _interval(releases: Releases, epsilon: float, delta: float) -> tuple[float, bool]:
    """The spacing h of the grid of losses, and whether it is as fine as ε needs it.

    The pessimistic rounding adds about h²/6 to the variance of each round's loss: ε grows by a
    factor of 1 + F/6 at h = ε·√(F/(T·(log(1/δ) + ε/2))). There are two limits. The work grows with
    1/h. And dp-accounting's probabilities of negative losses are rounded to about 10⁻¹⁶/h, upwards
    at 0: over all rounds this adds to δ, in proportion to 1/h². Intervals are powers of 2^(1/4), so
    that a grid is found again.
    """
    rounds = sum(priced.times for priced in releases)
    variance = sum(priced.times * priced.spread**2 for priced in releases)
    deviation = math.sqrt(variance)
    resolved = max(epsilon, 0.05 * deviation)
    steepness = 1 - math.log(delta) + resolved / 2
    wanted = resolved * math.sqrt(FINENESS / (rounds * steepness))
    width = 16 * deviation + 4 * sum(priced.reach for priced in releases)
    added = sum(priced.times * min(priced.reach, deviation) for priced in releases)
    least = max(width / MOST_POINTS, math.sqrt(ADDED * added))
    power = round(4 * math.log2(wanted))
    least_power = math.ceil(4 * math.log2(least))
    interval = 2 ** (max(power, least_power) / 4)
    return interval, power >= least_power


def _by_pld_at(interval: float, releases: Releases, delta: float, relation: Relation) -> float:
    rounds = sum(priced.times for priced in releases)
    beyond = 16.0 ** math.floor(math.log(TAIL * delta / rounds, 16))
    tail = TAIL * delta / len(releases)
    parts = []
    for priced in releases:
        one = _one_round_losses(priced.rate, priced.noise_multiplier, relation, interval, beyond)
        at_once = max(4000, math.floor(20 * (priced.reach / priced.spread) ** 2))
        parts.append(_compose_times(one, priced.times, at_once, tail))
    total = functools.reduce(lambda done, part: done.compose(part, tail), parts)
    if total.get_delta_for_epsilon(LARGEST_EXPONENT) > delta:  # there, e^-ε loses its digits
        return _least(lambda epsilon: total.get_delta_for_epsilon(epsilon) > delta)
    return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=16)
def _one_round_losses(
    rate: float, z: float, relation: Relation, interval: float, beyond: float
) -> pld.PrivacyLossDistribution:
    """The losses of one round; the outermost, of this probability, count as infinite."""
    one = pld.from_gaussian_mechanism(
        standard_deviation=z,
        value_discretization_interval=interval,
        log_mass_truncation_bound=math.log(beyond),
        sampling_prob=rate,
        neighboring_relation=NEIGHBOURS[relation],
    )
    # Up to 1000 points come as a dict, whose self_compose takes their number to the power of the
    # number of rounds, with all digits. The mixture is the same as an array, to the last bit.
    return one.compute_mixture(one, 0.5)


def _compose_times(
    one: pld.PrivacyLossDistribution, times: int, at_once: int, tail: float
) -> pld.PrivacyLossDistribution:
    """A round composed with itself, in steps if there are too many; then a few more than asked for.

    From about 20·(largest loss/standard deviation)² rounds at once dp-accounting keeps far too many
    losses: ten million rounds would take all memory.
    """
    if times == 1:
        return one
    if times <= at_once:
        return one.self_compose(times, tail)
    steps = math.ceil(times / at_once)
    step = _compose_times(one, math.ceil(times / steps), at_once, tail / steps)
    return _compose_times(step, steps, at_once, tail)


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


def by_rdp(releases: Releases, delta: float, relation: Relation) -> float:
    """By Rényi differential privacy. ValueError for replace-one neighbours with sampling."""
    if relation == "replace-one" and any(priced.rate < 1 for priced in releases):
        raise ValueError(
            "method='rdp' has no bound for relation='replace-one' under Poisson sampling "
            "(dp-accounting supports none): use method='pld'"
        )
    distance = sensitivity(relation)
    total = np.zeros(len(ORDERS))
    for priced in releases:
        total += priced.times * _one_round_rdp(priced.rate, priced.noise_multiplier / distance)
    return _least_over_orders(total, ORDERS, delta)


@functools.lru_cache(maxsize=256)
def _one_round_rdp(rate: float, z: float) -> Vector:
    """RDP of one round under zero-out neighbours, at each order.

    The expensive part of ε: it is kept, so that ε in every round is cheap.
    """
    accountant = rdp.RdpAccountant(list(ORDERS), NeighboringRelation.REPLACE_SPECIAL)
    with _without_absl_warnings():
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)))
    return np.array(accountant.rdp)


def _least_over_orders(total: Vector, orders: Vector, delta: float) -> float:
    """min over the orders a of r(a) + log(1 − 1/a) − log(δ·a)/(a − 1)   (Canonne et al. 2020).

    0 if δ ≥ √(1 − e^(−r)) at any order: the Kullback-Leibler divergence is at most r.
    """
    if delta**2 + math.expm1(-total.min()) > 0:
        return 0.0
    usable = orders > LEAST_ORDER
    a = orders[usable]
    epsilons = total[usable] + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)
    return max(0.0, float(epsilons.min()))


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
        accountant = rdp.RdpAccountant(list(ORDERS), NeighboringRelation.REPLACE_SPECIAL)
        with _without_absl_warnings():
            accountant.compose(RepeatAndSelectDpEvent(one, trials, shape))
            costs.append(float(accountant.get_epsilon(delta)))
    return min(costs)


def by_paper(releases: Releases, delta: float) -> float:
    """The number that the paper's figures would print: RDP with the order grid of its code."""
    total = np.zeros(len(PAPER_ORDERS))
    for priced in releases:
        total += priced.times * _paper_rdp(priced.rate, priced.noise_multiplier)
    return _least_over_orders(total, PAPER_ORDERS, delta)


@functools.lru_cache(maxsize=256)
def _paper_rdp(rate: float, z: float) -> Vector:
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
def _without_absl_warnings() -> Iterator[None]:
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


@functools.cache
def check_accountant() -> None:
    """Known answers of the accountants, once per process, before the first guarantee is printed.

    RuntimeError if an accountant is not what this package was tested with: a wrong ε must never be
    printed.
    """
    gaussian_round = (PricedRelease(1.0, 1.0, 1),)
    sampled = (PricedRelease(0.01, 1.0, 1000),)
    answers = {
        "PLD, zero-out": (by_pld(sampled, 1e-4, "zero-out")[0], 1.5124, 1.530),
        "PLD, replace-one": (by_pld(sampled, 1e-4, "replace-one")[0], 2.4315, 2.457),
        "RDP, zero-out": (by_rdp(sampled, 1e-4, "zero-out"), 1.7540, 1.757),
        "PLD of one Gaussian": (by_pld(gaussian_round, 1e-5, "zero-out")[0], 4.3767, 4.421),
        "RDP of one Gaussian": (by_rdp(gaussian_round, 1e-5, "zero-out"), 4.7, 4.76),
        "RDP, replace-one": (by_rdp(gaussian_round, 1e-5, "replace-one"), 10.4, 10.8),
        "the closed form": (gaussian(1.0, 1e-5), 4.37717, 4.37719),
    }
    for name, (found, least, most) in answers.items():
        if not least <= found <= most:
            raise RuntimeError(
                f"the accountant gives epsilon = {found!r} for {name} where {least} to {most} is "
                "right: no guarantee can be printed; install the versions of dp-accounting and "
                "scipy that constraints.txt names"
            )
