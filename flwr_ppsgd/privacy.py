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
from scipy.stats import binom

from flwr_ppsgd.algorithm import Cohort, FixedSize, Poisson, Release

Relation: TypeAlias = Literal["zero-out", "replace-one"]
Method: TypeAlias = Literal["pld", "rdp"]

LEDGER_FORMAT = "flwr_ppsgd ledger 1"
MOST_ROUNDS = 2**40
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
        if times < 0:
            raise ValueError(f"times must not be negative, got {times!r}: a charge is never taken back")
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
        unless z is so small that this would take many seconds; it is an upper bound always.
        """
        _check_choice("relation", relation, Relation)
        _check_choice("method", method, Method)
        if not self.releases:
            return 0.0
        if any(release.noise_multiplier == 0 for release, _ in self.releases):
            return math.inf
        if method == "rdp":
            return self._rdp_epsilon(relation)
        if any(release.cohort.amplifies for release, _ in self.releases):
            return _pld_epsilon(self, relation)
        return _gaussian_epsilon(1 / math.sqrt(self._squared_shift(relation)), self.delta)

    def delta_added(self, relation: Relation = "zero-out") -> float:
        """What caps on Poisson cohorts add to δ: (1 + e^ε)·Σ_t P[Bin(N, q) > B].

        Up to the rounds in which a cap bites, the capped mechanism is the plain one.
        """
        bites = sum(times * _cap_bites(release.cohort) for release, times in self.releases)
        return float(bites * (1 + math.exp(min(self.epsilon(relation), 700.0)))) if bites else 0.0

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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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

    def cost(z: float) -> float:
        release = Release(cohort, clip_norm=1.0, noise_multiplier=z)
        return nothing.record(release, rounds).epsilon(relation, method)

    if method == "pld" and not cohort.amplifies:  # closed form, up to its last digits
        exact = float(dp_accounting.get_sigma_gaussian(epsilon, delta)) * math.sqrt(rounds) * _sensitivity(relation)
        return exact if cost(exact) <= epsilon else exact * (1 + 1e-9)
    guess = 1.0
    if method == "pld":  # RDP is cheap, and a few percent above
        guess = calibrate_noise(epsilon=epsilon, delta=delta, cohort=cohort, rounds=rounds, method="rdp")
    return _smallest(cost, epsilon, guess)


def _smallest(cost: Callable[[float], float], budget: float, guess: float) -> float:
    """The smallest z with cost(z) ≤ budget, up to ``NOISE_TOLERANCE``, for a cost that falls with z.

    log ε is nearly straight in log z, so the line through the two points next to the budget all but hits it. Aiming a
    little past it, towards the farther end of the bracket, closes that in two steps. Should a step fail to, halve it.
    """
    low, high = _bracket(cost, budget, guess)
    known, past, halve = [low, high], 1 + NOISE_TOLERANCE / 3, False
    while high[0] > low[0] * (1 + NOISE_TOLERANCE):
        width, middle = high[0] / low[0], math.sqrt(low[0] * high[0])
        z = middle if halve else _secant(known, budget) or middle
        if not low[0] < z < high[0]:
            z = middle
        elif z != middle:
            z = min(z * past, middle) if z < middle else max(z / past, middle)
        known.append((z, cost(z)))
        low, high = (low, known[-1]) if known[-1][1] <= budget else (known[-1], high)
        halve = len(known) > 6 and not halve and high[0] / low[0] > math.sqrt(width)
    return high[0]


def _secant(known: list[tuple[float, float]], budget: float) -> float | None:
    """Where the line through the two known (z, ε) next to the budget, both in logarithms, meets it."""
    usable = [(z, epsilon) for z, epsilon in known if 0 < epsilon < math.inf]
    (z1, e1), (z2, e2) = (sorted(usable, key=lambda p: abs(math.log(p[1] / budget))) + [(1.0, 1.0)] * 2)[:2]
    if len(usable) < 2 or e1 == e2:
        return None
    exponent = math.log(budget / e1) / math.log(e2 / e1) * math.log(z2 / z1)
    return z1 * math.exp(exponent) if abs(exponent) < 50 else None


def _bracket(
    cost: Callable[[float], float], budget: float, guess: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(z, ε) too small and large enough, by strides from ``guess`` that go a little past where the line would hit."""
    here, slope = (guess, cost(guess)), 1.5
    enough = here[1] <= budget
    while True:
        far = abs(math.log(here[1] / budget)) if 0 < here[1] < math.inf else math.inf
        stride = min(max(1.005 * math.exp(min(far / slope, 2.0)), 1.01), 4.0)
        z = here[0] / stride if enough else here[0] * stride
        there = (z, cost(z))
        if (there[1] <= budget) is not enough:
            return (there, here) if enough else (here, there)
        if 0 < min(here[1], there[1]) < max(here[1], there[1]) < math.inf:
            slope = max(0.1, abs(math.log(there[1] / here[1])) / math.log(stride))
        here = there


def affordable_rounds(
    *, max_epsilon: float, delta: float, release: Release, relation: Relation = "zero-out", method: Method = "pld"
) -> int:
    """The largest number of rounds of ``release`` whose ε is at most ``max_epsilon``; 0 where one is too many."""
    if not 0 < max_epsilon < math.inf:
        raise ValueError(f"max_epsilon must be positive and finite, got {max_epsilon!r}: leave it out for no budget")

    def cost(rounds: int) -> float:
        return Ledger(delta).record(release, rounds).epsilon(relation, method)

    low, high = (0, 0.0), (1, cost(1))
    if high[1] > max_epsilon:
        return 0
    if method == "pld" and relation == "zero-out" and release.cohort.amplifies:  # RDP is cheap, and pays for fewer
        fewer = affordable_rounds(max_epsilon=max_epsilon, delta=delta, release=release, method="rdp")
        high = (fewer, cost(fewer)) if fewer > 1 else high
    ahead = max(1, high[0] // 16)
    while high[1] <= max_epsilon:
        if high[0] >= MOST_ROUNDS:
            return high[0]
        low, high, ahead = high, (high[0] + ahead, cost(high[0] + ahead)), ahead * 2
    return _largest(cost, max_epsilon, low, high)


def _largest(cost: Callable[[int], float], budget: float, low: tuple[int, float], high: tuple[int, float]) -> int:
    """The largest number of rounds with cost ≤ budget between ``low``, which is affordable, and ``high``, which is not.

    log ε is nearly straight in log rounds: the line through both ends is tried first, halving in every third step.
    """
    step = 0
    while high[0] - low[0] > 1:
        (few, below), (many, above), step = low, high, step + 1
        middle = (few + many) // 2
        if step % 3 and few and 0 < below < above < math.inf:
            share = math.log(budget / below) / math.log(above / below)
            middle = min(max(int(few * (many / few) ** share) + step % 3 - 1, few + 1), many - 1)
        epsilon = cost(middle)
        low, high = ((middle, epsilon), high) if epsilon <= budget else (low, (middle, epsilon))
    return low[0]


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
    rough = ledger.quick_epsilon()
    interval = _finest(ledger, rough)
    epsilon = _pld_epsilon_at(interval, ledger, relation)
    finer = _finest(ledger, epsilon) if 0 < epsilon < rough / 3 else interval
    return _pld_epsilon_at(finer, ledger, relation) if finer < interval else epsilon


def _finest(ledger: Ledger, epsilon: float) -> float:
    return min(_interval(release, ledger.rounds, epsilon) for release, _ in ledger.releases)


def _pld_epsilon_at(interval: float, ledger: Ledger, relation: Relation) -> float:
    accountant = pld.PLDAccountant(_NEIGHBOURS[relation], interval)
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
    return float(dp_accounting.get_epsilon_gaussian(sigma, delta))


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
    """dp-accounting warns once for each order that it leaves out; the bound over the others still holds."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
