"""What was released and what it cost.

The :class:`Ledger` is data: which releases, how often. ε is worked out from it on demand by dp-accounting.

Neighbours. ``zero-out``, the headline: a user stays enrolled but contributes nothing; N, q, M, D and the enrolment are
public and unchanged. ``replace-one``, the paper's definition: a user's data are exchanged for any other; twice as far.
"""

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, TypeAlias, get_args

import dp_accounting
import numpy as np
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, pld, rdp
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

from flwr_ppsgd.algorithm import Cohort, FixedSize, Poisson, Release

Relation: TypeAlias = Literal["zero-out", "replace-one"]
Method: TypeAlias = Literal["pld", "rdp"]

LEDGER_FORMAT = "flwr_ppsgd ledger 1"
MOST_ROUNDS = 2**40
MOST_BY_PLD = 10**6
LEAST_CALIBRATED = 1e-3
MOST_NOISE = 1e6
NOISE_TOLERANCE = 1e-4  # relative; a calibrated z is at most this much above the smallest that suffices
PAPER_ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)])


@dataclass(frozen=True)
class Ledger:
    """What was released, in run-length form; ``record`` returns a longer ledger.

    delta: δ at which ε is stated.
    releases: each release with the number of rounds it was made in a row.
    insecure_rounds: rounds whose coins came from a known seed. Any such round voids the guarantee, for ever.
    """

    delta: float
    releases: tuple[tuple[Release, int], ...] = ()
    insecure_rounds: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta!r}: choose it well below 1/population")

    def record(self, release: Release, times: int = 1, insecure: bool = False) -> Self:
        """The ledger after ``times`` more rounds of ``release``."""
        if not isinstance(times, int) or times < 0:
            raise ValueError(f"times must be a whole number, not negative, got {times!r}: a charge is never taken back")
        before = self.releases
        if times and before and before[-1][0] == release:
            before, times_in_a_row = before[:-1], before[-1][1] + times
        else:
            times_in_a_row = times
        longer = (*before, (release, times_in_a_row)) if times else before
        return replace(self, releases=longer, insecure_rounds=self.insecure_rounds + times * insecure)

    @property
    def rounds(self) -> int:
        """How many releases were charged."""
        return sum(times for _, times in self.releases)

    def epsilon(self, relation: Relation = "zero-out", method: Method = "pld") -> float:
        """ε of everything released so far, at ``delta``.

        ``pld`` is the tighter bound. Where no release gains from sampling (rate 1, or ``FixedSize``), the composition
        is one Gaussian and the value is its exact ε. Elsewhere it is within 1 % of the limit of fine discretisation,
        unless z is so small that this would take many seconds; it is an upper bound always. Where δ is too small for
        its tails (below about 1e-15), the RDP bound stands in, if there is one.
        """
        _check_choice("relation", relation, Relation)
        _check_choice("method", method, Method)
        if not self.releases:
            return 0.0
        if any(release.noise_multiplier == 0 for release, _ in self.releases):
            return math.inf
        return self._capped_epsilon(relation, method) if self._cap_bites() else self._plain_epsilon(relation, method)

    def _plain_epsilon(self, relation: Relation, method: Method) -> float:
        """ε where no cap can bite."""
        if method == "rdp":
            return self._rdp_epsilon(relation)
        if any(release.cohort.amplifies for release, _ in self.releases):
            return _pld_epsilon(self, relation)
        return _gaussian_epsilon(1 / math.sqrt(self._squared_shift(relation)), self.delta)

    def _capped_epsilon(self, relation: Relation, method: Method) -> float:
        """The ε of a smaller δ', such that δ' and what the caps take are at most δ; infinite where none is left.

        Half of δ is tried first. What is left over is then given back, which lowers ε and with it what the caps take.
        """
        epsilon, spare = math.inf, self.delta / 2
        for _ in range(3):
            epsilon = replace(self, delta=spare)._plain_epsilon(relation, method)
            taken = self._taken_by_caps(epsilon)
            if not taken <= self.delta - spare:
                return math.inf
            spare = (self.delta - taken) * (1 - 1e-9)
        return epsilon

    def delta_added(self, relation: Relation = "zero-out") -> float:
        """The part of δ that caps on Poisson cohorts take: (1 + e^ε)·Σ_t P[Bin(N, q) > B].

        Up to the rounds in which a cap bites, the capped mechanism is the plain one. ``epsilon`` has paid for it: δ is
        the total.
        """
        return self._taken_by_caps(self.epsilon(relation)) if self._cap_bites() else 0.0

    def _taken_by_caps(self, epsilon: float) -> float:
        return self._cap_bites() * (1 + math.exp(epsilon)) if epsilon < 600 else math.inf

    def _cap_bites(self) -> float:
        """Σ_t P[Bin(N, q) > B]: how many rounds are expected to lose users."""
        return sum(times * _cap_bites(release.cohort) for release, times in self.releases)

    def quick_epsilon(self) -> float:
        """An upper bound on ``epsilon()`` in well under a millisecond, for use in every round: RDP where users are
        sampled, exact where they are not."""
        sampled = any(release.cohort.amplifies for release, _ in self.releases)
        return self.epsilon(method="rdp" if sampled else "pld")

    def paper_epsilon(self) -> float:
        """The number that the paper's figures would print. **Not a guarantee** for fixed-size cohorts.

        RDP of Poisson sampling at the same rate, with the order grid of the authors' code: it never falls below .066
        at δ=1e-4, and for ``FixedSize`` it can understate the worst case several times over.
        """
        if any(release.noise_multiplier == 0 for release, _ in self.releases):
            return math.inf
        return self._epsilon_of_rdp(
            lambda release: _paper_rdp(release.cohort.rate, release.noise_multiplier), PAPER_ORDERS
        )

    def _squared_shift(self, relation: Relation) -> float:
        """Σ_t (s/z_t)²: rounds of plain Gaussians compose to one of standard deviation 1/√ of it."""
        return sum(times * (_sensitivity(relation) / release.noise_multiplier) ** 2 for release, times in self.releases)

    def _rdp_epsilon(self, relation: Relation) -> float:
        if relation == "replace-one" and any(release.cohort.amplifies for release, _ in self.releases):
            raise ValueError(
                "method='rdp' has no bound for relation='replace-one' under Poisson sampling (dp-accounting supports "
                "none): use method='pld'"
            )
        orders = _default_orders()
        return self._epsilon_of_rdp(
            lambda release: _one_round_rdp(
                release.cohort.rate if release.cohort.amplifies else 1.0,
                release.noise_multiplier / _sensitivity(relation),
                orders,
            ),
            orders,
        )

    def _epsilon_of_rdp(self, one_round: Callable[[Release], NDArray[np.float64]], orders: tuple[float, ...]) -> float:
        if not self.releases:
            return 0.0
        total = sum(times * one_round(release) for release, times in self.releases)
        epsilon, _ = rdp.compute_epsilon(orders, total, self.delta)
        return float(epsilon)

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": LEDGER_FORMAT,
                "delta": self.delta,
                "insecure_rounds": self.insecure_rounds,
                "releases": [{**release_to_dict(release), "times": times} for release, times in self.releases],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The ledger that ``to_json`` wrote; anything else is refused, never repaired."""
        try:
            data = json.loads(text)
            if data["format"] != LEDGER_FORMAT:
                raise ValueError(f"format is {data['format']!r}, expected {LEDGER_FORMAT!r}")
            ledger = cls(delta=data["delta"])
            for entry in data["releases"]:
                times = entry.pop("times")
                if not isinstance(times, int) or times < 1:
                    raise ValueError(f"times is {times!r}, expected a whole number of at least 1")
                ledger = ledger.record(release_from_dict(entry), times)
            insecure = data["insecure_rounds"]
            if not isinstance(insecure, int) or not 0 <= insecure <= ledger.rounds:
                raise ValueError(f"insecure_rounds is {insecure!r}, expected 0 to {ledger.rounds}")
            return replace(ledger, insecure_rounds=insecure)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"not a ledger that can be trusted ({type(error).__name__}: {error}): restore the file from a backup, "
                "a damaged ledger is never repaired"
            ) from None


def release_to_dict(release: Release) -> dict[str, Any]:
    return {**asdict(release), "cohort": {"kind": type(release.cohort).__name__, **asdict(release.cohort)}}


def release_from_dict(data: dict[str, Any]) -> Release:
    cohort = dict(data["cohort"])
    kinds: dict[str, Callable[..., Cohort]] = {"Poisson": Poisson, "FixedSize": FixedSize}
    return Release(**{**data, "cohort": kinds[cohort.pop("kind")](**cohort)})


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    cohort: Cohort,
    rounds: int,
    relation: Relation = "zero-out",
    method: Method = "pld",
) -> float:
    """The smallest noise multiplier z whose ε after ``rounds`` rounds is at most ``epsilon``."""
    nothing = Ledger(delta)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon!r}: name the ε that you can afford")
    if rounds < 1:
        raise ValueError(
            f"rounds must be at least 1, got {rounds!r}: noise is calibrated for a planned number of rounds"
        )

    @functools.cache
    def cost(z: float, relation: Relation = relation, method: Method = method) -> float:
        return nothing.record(Release(cohort, clip_norm=1.0, noise_multiplier=z), rounds).epsilon(relation, method)

    if method == "pld" and not cohort.amplifies and _cap_bites(cohort) == 0:  # closed form, up to its last digits
        exact = float(dp_accounting.get_sigma_gaussian(epsilon, delta)) * math.sqrt(rounds) * _sensitivity(relation)
        return exact if cost(exact) <= epsilon else exact * (1 + 1e-9)
    found, factor = 1.0, 2.0
    if method == "pld":  # the quicker RDP tells where to look
        by_rdp = _least_noise(lambda z: cost(z, "zero-out", "rdp"), epsilon, found, factor) * _sensitivity(relation)
        found, factor = (by_rdp, 1.15) if by_rdp < MOST_NOISE else (found, factor)
    found = _least_noise(cost, epsilon, found, factor)
    if found > MOST_NOISE:
        raise ValueError(
            f"no noise_multiplier up to {MOST_NOISE:g} gives epsilon={epsilon:g} at delta={delta:g} over {rounds} "
            "rounds: raise epsilon or delta, run fewer rounds, or raise the cap if there is one"
        )
    return found


def _least_noise(cost: Callable[[float], float], most: float, guess: float, factor: float) -> float:
    """The smallest z, to ``NOISE_TOLERANCE``, with cost(z) ≤ most, for a cost that falls; infinite where there is none.

    Steps of ``factor`` from a guess, longer each time, enclose it. Between them log ε against log z is close to a
    straight line, so that Brent's method asks for the cost a few times only.
    """
    low = high = guess
    while cost(high) > most:
        low, high, factor = high, high * factor, min(2.0, factor**2)
        if high > MOST_NOISE:
            return math.inf
    while low > LEAST_CALIBRATED and cost(low) <= most:
        low, high, factor = low / factor, low, min(2.0, factor**2)
    if low <= LEAST_CALIBRATED:
        return high

    def excess(log_z: float) -> float:
        return math.log(min(max(cost(math.exp(log_z)) / most, 1e-3), 1e3))

    root = math.exp(brentq(excess, math.log(low), math.log(high), xtol=NOISE_TOLERANCE / 4))
    tries = (root * (1 + k * NOISE_TOLERANCE / 4) for k in (0, 1, 2, 3))
    return next((z for z in tries if z < high and cost(z) <= most), high)


def affordable_rounds(
    *,
    max_epsilon: float,
    delta: float,
    release: Release,
    relation: Relation = "zero-out",
    method: Method = "pld",
    at_most: int = MOST_ROUNDS,
) -> int:
    """The largest number of rounds of ``release``, up to ``at_most``, whose ε is at most ``max_epsilon``; 0 where one
    is too many. Beyond a million sampled rounds the quicker RDP decides, which allows somewhat fewer."""
    if not 0 < max_epsilon < math.inf:
        raise ValueError(f"max_epsilon must be positive and finite, got {max_epsilon!r}: leave it out for no budget")
    nothing = Ledger(delta)

    def cost(rounds: int, by: Method = method) -> float:
        return nothing.record(release, rounds).epsilon(relation, by)

    if at_most < 1 or cost(1) > max_epsilon:
        return 0
    quick = release.cohort.amplifies and relation == "zero-out" and method == "pld"
    low = max(1, _last(lambda rounds: cost(rounds, "rdp") <= max_epsilon, at_most)) if quick else 1
    if low > MOST_BY_PLD:
        return low
    return _last(lambda rounds: cost(rounds) <= max_epsilon, at_most, low)


def _last(holds: Callable[[int], bool], at_most: int, known: int = 0) -> int:
    """The largest number up to ``at_most`` with a property that, once lost, stays lost; ``known`` has it."""
    if at_most < MOST_ROUNDS and holds(at_most):
        return at_most
    low, high = known, min(at_most, max(known + 1, known * 5 // 4))
    while high < at_most and holds(high):
        low, high = high, min(at_most, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


_NEIGHBOURS = {
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,  # dp-accounting's PLD then doubles the sensitivity by itself
}


def _sensitivity(relation: Relation) -> float:
    """How far one user moves the sum, in units of C. dp-accounting's RDP leaves this to the caller."""
    return 1.0 if relation == "zero-out" else 2.0


def _cap_bites(cohort: Cohort) -> float:
    """P[Bin(N, q) > B]."""
    if isinstance(cohort, FixedSize) or cohort.cap is None:
        return 0.0
    return float(binom.sf(cohort.cap, cohort.population, cohort.rate))


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _event(release: Release) -> dp_accounting.DpEvent:
    noise = GaussianDpEvent(release.noise_multiplier)
    return PoissonSampledDpEvent(release.cohort.rate, noise) if release.cohort.amplifies else noise


@functools.lru_cache(maxsize=256)
def _pld_epsilon(ledger: Ledger, relation: Relation) -> float:
    """By PLD, at a discretisation chosen from the events and a first, rough ε; once more if that was far off."""
    rough = ledger._plain_epsilon("zero-out", "rdp")
    if rough == 0 and relation == "zero-out":
        return 0.0
    epsilon = _pld_epsilon_near(rough, ledger, relation)
    if math.isinf(epsilon) and relation == "zero-out":
        return rough
    return _pld_epsilon_near(epsilon, ledger, relation) if 0 < epsilon < rough / 3 else epsilon


def _pld_epsilon_near(rough: float, ledger: Ledger, relation: Relation) -> float:
    interval = min(_interval(release, ledger.rounds, rough) for release, _ in ledger.releases)
    accountant = pld.PLDAccountant(_NEIGHBOURS[relation], interval)
    with _quiet("absl"):
        for release, times in ledger.releases:
            accountant.compose(_event(release), times)
        return float(accountant.get_epsilon(ledger.delta))


def _interval(release: Release, rounds: int, epsilon: float) -> float:
    """The coarsest discretisation of the privacy loss that keeps ε within 1 % of its limit.

    With spacing h the pessimistic rounding inflates the variance s² of one round's loss by about .18·h²/s², and adds
    at most h a round; so either h ≤ .07·s, or h ≤ .002·ε/rounds, suffices. The last term bounds the work.
    """
    q, z = release.cohort.rate, release.noise_multiplier
    spread = q * math.sqrt(math.expm1(min(1 / z**2, 50.0)))
    reach = math.log1p(q * math.expm1(min(0.5 / z**2 + 8 / z, 600.0)))
    fine = min(0.07 * spread, 0.02, 0.005 * epsilon)
    return min(1.0, max(fine, 0.002 * epsilon / rounds, reach / 1e5))


@functools.lru_cache(maxsize=1024)
def _gaussian_epsilon(sigma: float, delta: float) -> float:
    """ε with Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) = δ for μ = 1/σ (Balle and Wang 2018), from above, by bisection."""
    mu = 1 / sigma

    def exceeds(epsilon: float) -> bool:
        gone = log_ndtr(-mu / 2 - epsilon / mu) + epsilon
        return float(ndtr(mu / 2 - epsilon / mu)) - math.exp(min(gone, 0.0)) > delta

    low, high = 0.0, 1.0
    if not exceeds(low):
        return 0.0
    while exceeds(high):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


@functools.cache
def _default_orders() -> tuple[float, ...]:
    return tuple(float(order) for order in rdp.RdpAccountant().orders)


@functools.lru_cache(maxsize=256)
def _one_round_rdp(rate: float, z: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """RDP of one round under zero-out neighbours. The expensive part of ε: kept, so that ε in every round is cheap."""
    accountant = rdp.RdpAccountant(orders, NeighboringRelation.REPLACE_SPECIAL)
    with _quiet("absl"):
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)))
    return np.array(accountant.rdp)


@functools.lru_cache(maxsize=256)
def _paper_rdp(rate: float, z: float) -> NDArray[np.float64]:
    """log E[(1 − q + q·exp((2x−1)/(2z²)))^a] / (a − 1) for x ~ N(0, z²), by the trapezoid rule, which is exact to
    rounding for such integrands. dp-accounting overstates it at fractional orders, by up to a half; the authors' code
    did not."""
    return np.array([_log_moment(rate, z, order) / (order - 1) for order in PAPER_ORDERS])


def _log_moment(rate: float, z: float, order: float) -> float:
    if rate == 1:
        return order * (order - 1) / (2 * z**2)
    x = np.arange(-12 * z, order + 12 * z, z / 8)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * z**2))
    integrand = order * ratio - x**2 / (2 * z**2)
    top = integrand.max()
    return float(top + np.log(np.exp(integrand - top).sum() / 8 / math.sqrt(2 * math.pi)))


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """dp-accounting warns once for each order that it leaves out; the bound over the others still holds.

    Without a handler on the root logger, absl would install one that prints everything, DEBUG and other packages' too.
    """
    logger, nobody = logging.getLogger(logger_name), logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.ERROR)
    logging.root.addHandler(nobody)
    try:
        yield
    finally:
        logging.root.removeHandler(nobody)
        logger.setLevel(level)
