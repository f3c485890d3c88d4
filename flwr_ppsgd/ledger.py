"""What was released and what it cost.

The :class:`Ledger` is data: which releases, how often. ε is worked out from it on demand.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, get_args

import dp_accounting
from scipy.optimize import brentq

from flwr_ppsgd import epsilon as accounting
from flwr_ppsgd.algorithm import Cohort, FixedSize, Poisson, Release, SecureSum
from flwr_ppsgd.checks import is_whole, one_of, require
from flwr_ppsgd.epsilon import (
    LARGEST_EXPONENT,
    EpsilonBound,
    Method,
    PricedRelease,
    Relation,
    Releases,
    best_of_several,
    rough_epsilon,
    sensitivity,
)

LEDGER_FORMAT = "flwr_ppsgd ledger 1"
MOST_ROUNDS = 2**40
ROUNDS_TOLERANCE = 1e-7  # relative: exact up to a million rounds and more
NOISE_LIMITS = (1e-3, 1e6)  # of a calibrated z
NOISE_TOLERANCE = 1e-4  # relative, of a calibrated z above the smallest one that suffices
LONGEST_STEP = math.log(2)  # of a logarithm of z, or of a number of rounds


@dataclass(frozen=True)
class Ledger:
    """What was released, in run-length form; ``record`` returns a longer ledger.

    Args:
        delta: δ at which ε is stated.
        releases: each release with the number of rounds it was made in a row.
        insecure_rounds: the number of rounds whose random bits came from a known seed. Any such
            round voids the guarantee, for ever.
    """

    delta: float
    releases: tuple[tuple[Release, int], ...] = ()
    insecure_rounds: int = 0

    def __post_init__(self) -> None:
        remedy = "choose it well below 1/population"
        require(0 < self.delta < 1, "delta must be in (0, 1)", self.delta, remedy)

    def record(self, release: Release, times: int = 1, insecure: bool = False) -> Self:
        """The ledger after ``times`` more rounds of ``release``."""
        rule = "times must be a whole number, not negative"
        require(is_whole(times) and times >= 0, rule, times, "a charge is never taken back")
        if not times:
            return self
        insecure_rounds = self.insecure_rounds + times * insecure
        before = self.releases
        in_a_row = int(times)
        if before and before[-1][0] == release:
            in_a_row += before[-1][1]
            before = before[:-1]
        longer = (*before, (release, in_a_row))
        return replace(self, releases=longer, insecure_rounds=insecure_rounds)

    def record_all(self, releases: Iterable[tuple[Release, int]]) -> Self:
        """The ledger after further releases, each with its number of rounds."""
        ledger = self
        for release, times in releases:
            ledger = ledger.record(release, times)
        return ledger

    @property
    def rounds(self) -> int:
        """The number of releases that were charged."""
        return sum(times for _, times in self.releases)

    @property
    def population(self) -> int:
        """The number of users that the releases are about."""
        return max((release.cohort.population for release, _ in self.releases), default=0)

    @property
    def _noiseless(self) -> bool:
        return any(release.noise_multiplier == 0 for release, _ in self.releases)

    @property
    def gains_from_sampling(self) -> bool:
        """Whether any release gains from sampling."""
        return any(release.amplifies for release, _ in self.releases)

    def epsilon(self, relation: Relation = "zero-out", method: Method = "pld") -> float:
        """ε of everything released so far, at ``delta``.

        Args:
            relation: "zero-out" or "replace-one" neighbours.
            method: "pld" is the tighter bound. If no release gains from sampling (rate 1, or
                ``FixedSize``), the composition is one Gaussian and the value is its exact ε.
                Otherwise it comes from dp-accounting, about .1 % above the limit of fine
                discretisation at most, unless that would take more than a few seconds; it is
                always an upper bound. If δ is too small for the floating-point numbers inside PLD,
                the smallest other bound is taken: ``bound`` names it.
        """
        return self.bound(relation, method).epsilon

    def bound(self, relation: Relation = "zero-out", method: Method = "pld") -> EpsilonBound:
        """The ε that ``epsilon`` gives, with the name of the bound."""
        one_of("relation", relation, get_args(Relation))
        one_of("method", method, get_args(Method))
        if not self.releases:
            return EpsilonBound(0.0, "exact")
        if self._noiseless:
            return EpsilonBound(math.inf, "exact")
        left = self.delta - self.failure
        if left <= 0:
            return EpsilonBound(math.inf, "random neighbours need more than the whole delta")
        releases = _price_list(self.releases)
        if method == "rdp":
            return EpsilonBound(accounting.by_rdp(releases, left, relation), "RDP")
        return accounting.tightest(releases, left, relation)

    def bound_with_cut(self, cut: float, relation: Relation = "zero-out") -> EpsilonBound:
        """ε at δ less what the sampler's cut tails take, (1 + e^ε)·cut; infinite if that is all.

        Args:
            cut: the probability that the sampler would have cut any normal of all releases.
            relation: neighbours, as in ``epsilon``.
        """
        without = self.bound(relation)
        if math.isinf(without.epsilon):
            return without
        reserved = 2 * _times_one_plus_exp(cut, without.epsilon)
        if reserved < self.delta / 2:
            bound = replace(self, delta=self.delta - reserved).bound(relation)
            if _times_one_plus_exp(cut, bound.epsilon) <= reserved:
                return bound
        return EpsilonBound(math.inf, "finite precision needs more than the whole delta")

    def pooled_epsilon(self, relation: Relation = "zero-out") -> float:
        """ε against all other users pooling with the server.

        In secure sums they know their own shares of the noise: a user's own, z/√h, is left. Without
        secure sums it is ``epsilon``.
        """
        if self._noiseless:
            return math.inf
        if not self.releases:
            return 0.0
        left = []
        for release, times in self.releases:
            rate = release.cohort.rate if release.amplifies else 1.0
            share = release.noise_multiplier / math.sqrt(release.noise_shares)
            left.append(PricedRelease(rate, share, times))
        return accounting.tightest(tuple(left), self.delta, relation).epsilon

    @property
    def failure(self) -> float:
        """The part of δ that the random neighbours of secure sums take: T·η.

        They fail, if they do, in the same rounds whatever anybody's data are: so no e^ε.
        """
        return sum(times * release.failure for release, times in self.releases)

    def quick_epsilon(self) -> float:
        """An upper bound on ``epsilon()`` in well under a millisecond, for use in every round.

        RDP if users are sampled, exact if they are not.
        """
        return self.epsilon(method="rdp" if self.gains_from_sampling else "pld")

    def selection_epsilon(self, trials: float) -> float:
        """ε of publishing only the best of a random number of trainings like this one.

        The number is drawn in secret, with mean ``trials``; each training's own private
        measure decides. Zero-out neighbours, by RDP.
        """
        require(trials >= 1, "trials must be at least 1", trials, "1 is a single training")
        if self._noiseless:
            return math.inf
        return best_of_several(_price_list(self.releases), self.delta, trials)

    def paper_epsilon(self) -> float:
        """The number that the paper's figures would print. **Not a guarantee** for ``FixedSize``.

        RDP of Poisson sampling at the same rate, with the order grid of the authors' code: it never
        falls below .066 at δ=1e-4, and for ``FixedSize`` it can understate the worst case several
        times over.
        """
        if self._noiseless:
            return math.inf
        as_poisson = []
        for release, times in self.releases:
            rate = release.cohort.rate
            as_poisson.append(PricedRelease(rate, release.noise_multiplier, times))
        return accounting.by_paper(tuple(as_poisson), self.delta)

    def to_json(self) -> str:
        releases = [
            {**release_to_dict(release), "times": times} for release, times in self.releases
        ]
        return json.dumps(
            {
                "format": LEDGER_FORMAT,
                "delta": self.delta,
                "insecure_rounds": self.insecure_rounds,
                "releases": releases,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The ledger that ``to_json`` wrote; anything else is refused, never repaired."""
        try:
            return cls._from_dict(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"not a ledger that can be trusted ({type(error).__name__}: {error}): restore the "
                "file from a backup, a damaged ledger is never repaired"
            ) from None

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Self:
        if data["format"] != LEDGER_FORMAT:
            raise ValueError(f"format is {data['format']!r}, expected {LEDGER_FORMAT!r}")
        ledger = cls(delta=data["delta"])
        for entry in data["releases"]:
            times = entry.pop("times")  # which record checks, but for a 0 that hides a charge
            if times == 0:
                raise ValueError("times is 0, expected at least 1")
            ledger = ledger.record(release_from_dict(entry), times)
        insecure = data["insecure_rounds"]
        if not isinstance(insecure, int) or not 0 <= insecure <= ledger.rounds:
            raise ValueError(f"insecure_rounds is {insecure!r}, expected 0 to {ledger.rounds}")
        return replace(ledger, insecure_rounds=insecure)


def _times_one_plus_exp(probability: float, epsilon: float) -> float:
    """(1 + e^ε)·p: what an event of probability p, in either world, takes of δ."""
    if epsilon >= LARGEST_EXPONENT:
        return math.inf if probability else 0.0
    return probability * (1 + math.exp(epsilon))


def _price_list(releases: tuple[tuple[Release, int], ...]) -> Releases:
    """What an accountant needs to know: releases of equal price are counted together."""
    counts: dict[tuple[float, float], int] = defaultdict(int)
    for release, times in releases:
        rate = release.cohort.rate if release.amplifies else 1.0
        counts[rate, release.noise_multiplier] += times
    priced = [PricedRelease(rate, z, times) for (rate, z), times in counts.items()]
    return tuple(sorted(priced))


def release_to_dict(release: Release) -> dict[str, Any]:
    """A release as data for JSON."""
    cohort = {"kind": type(release.cohort).__name__, **asdict(release.cohort)}
    return {**asdict(release), "cohort": cohort}


def release_from_dict(data: dict[str, Any]) -> Release:
    """The release that ``release_to_dict`` gave."""
    cohort = dict(data["cohort"])
    kinds: dict[str, Callable[..., Cohort]] = {"Poisson": Poisson, "FixedSize": FixedSize}
    kind = kinds[cohort.pop("kind")]
    rules = data["aggregation"]
    aggregation = None if rules is None else SecureSum(**rules)
    return Release(**{**data, "cohort": kind(**cohort), "aggregation": aggregation})


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    cohort: Cohort,
    rounds: int,
    relation: Relation = "zero-out",
    method: Method = "pld",
    also: Iterable[tuple[Release, int]] = (),
    aggregation: SecureSum | None = None,
) -> float:
    """The smallest noise multiplier z whose ε after ``rounds`` rounds is at most ``epsilon``.

    Args:
        epsilon: the ε that all rounds together may cost.
        delta: δ at which ε is stated.
        cohort: who takes part in a round.
        rounds: the planned number of rounds.
        relation: neighbours, as in ``Ledger.epsilon``.
        method: accountant, as in ``Ledger.epsilon``.
        also: what else is released, each with its number of rounds: all together meet ``epsilon``.
        aggregation: ``SecureSum`` if clients add the noise: sampling then gains nothing, and δ pays
            for random neighbours.
    """
    remedy = "name the ε that you can afford"
    require(0 < epsilon < math.inf, "epsilon must be positive and finite", epsilon, remedy)
    remedy = "noise is calibrated for a planned number of rounds"
    require(rounds >= 1, "rounds must be at least 1", rounds, remedy)
    others = Ledger(delta).record_all(also)

    def after_all(z: float) -> Ledger:
        return others.record(Release(cohort, 1.0, z, aggregation=aggregation), rounds)

    spent = others.epsilon(relation, method)
    if spent >= epsilon:
        raise ValueError(
            f"what else is released costs epsilon={spent:.4g} at delta={delta:g} by itself, and "
            f"nothing is left of {epsilon:g}: raise epsilon, or give it more noise"
        )
    example = after_all(1.0)
    rule = f"delta must be above what random neighbours take of it in {rounds} rounds"
    remedy = f"raise it above {example.failure:.2g}, or lower SecureSum.failure"
    require(example.failure < delta, rule, delta, remedy)
    if method == "pld" and not example.gains_from_sampling:
        exact = _exact_noise(epsilon, delta - example.failure, rounds, others, relation)
        for slack in (0.0, 1e-9, NOISE_TOLERANCE):  # the last digits
            if after_all(exact * (1 + slack)).epsilon(relation, method) <= epsilon:
                return exact * (1 + slack)

    found = _least_affordable(
        after_all,
        epsilon,
        relation=relation,
        method=method,
        limits=NOISE_LIMITS,
        tolerance=NOISE_TOLERANCE,
    )
    if math.isinf(found):
        raise ValueError(
            f"no noise_multiplier up to {NOISE_LIMITS[1]:g} gives epsilon={epsilon:g} at "
            f"delta={delta:g} over {rounds} rounds: raise epsilon or delta, or run fewer rounds"
        )
    return found


def _exact_noise(
    epsilon: float, delta: float, rounds: int, others: Ledger, relation: Relation
) -> float:
    """z in closed form, if nobody is sampled: T/z² + Σ 1/z_j² = 1/σ² for the σ that ε pays for."""
    one_round = float(dp_accounting.get_sigma_gaussian(epsilon, delta))
    allowed = 1 / (one_round * sensitivity(relation)) ** 2
    taken = sum(times / release.noise_multiplier**2 for release, times in others.releases)
    return math.sqrt(rounds / (allowed - taken)) if taken < allowed else math.inf


def _least_affordable(
    after: Callable[[float], Ledger],
    most: float,
    *,
    relation: Relation,
    method: Method,
    limits: tuple[float, float],
    tolerance: float,
) -> float:
    """The smallest x with ε(after(x)) ≤ most, from a guess by a rough ε, which costs nothing."""

    def rough_cost(x: float) -> float:
        ledger = after(x)
        return rough_epsilon(_price_list(ledger.releases), ledger.delta, relation)

    def cost(x: float) -> float:
        return after(x).epsilon(relation, method)

    guess = _least_argument(rough_cost, most, 1.0, limits, tolerance)
    return _least_argument(cost, most, guess, limits, tolerance)


def _least_argument(
    cost: Callable[[float], float],
    most: float,
    guess: float,
    limits: tuple[float, float],
    tolerance: float,
) -> float:
    """The smallest x, to a relative tolerance, with cost(x) ≤ most; infinite if no x has.

    The cost falls as x grows. Steps from a guess, longer each time, enclose x. Between them log ε
    against log x is close to a straight line, so that Brent's method asks for the cost a few times
    only. It stops at the first x whose cost is at most ``most``, and hardly less.
    """
    least, largest = map(math.log, limits)
    low = high = min(max(math.log(guess), least), largest)
    step = 0.1
    while cost(math.exp(high)) > most:
        if high == largest:
            return math.inf
        low = high
        high = min(high + step, largest)
        step = min(2 * step, LONGEST_STEP)
    while cost(math.exp(low)) <= most:
        if low == least:
            return limits[0]
        high = low
        low = max(low - step, least)
        step = min(2 * step, LONGEST_STEP)

    def excess(log_x: float) -> float:
        ratio = cost(math.exp(log_x)) / most
        if 1 - tolerance <= ratio <= 1:
            return 0.0
        return math.log(min(max(ratio, 1e-3), 1e3)) + tolerance / 2

    root = brentq(excess, low, high, xtol=tolerance / 4)
    for quarter in range(4):
        x = math.exp(root + quarter * tolerance / 4)
        if cost(x) <= most:
            return x
    return math.exp(high)


def affordable_rounds(
    *,
    max_epsilon: float,
    delta: float,
    release: Release,
    relation: Relation = "zero-out",
    method: Method = "pld",
    at_most: int = MOST_ROUNDS,
    also: Iterable[tuple[Release, int]] = (),
) -> int:
    """The largest number of rounds of ``release`` whose ε is at most ``max_epsilon``.

    0 if one round is too many.

    Args:
        max_epsilon: the ε that all rounds together may cost.
        delta: δ at which ε is stated.
        release: what is published in each round.
        relation: neighbours, as in ``Ledger.epsilon``.
        method: accountant, as in ``Ledger.epsilon``.
        at_most: the largest number that is of interest.
        also: what else the ε has to pay for, each release with its number of rounds.
    """
    rule = "max_epsilon must be positive and finite"
    require(0 < max_epsilon < math.inf, rule, max_epsilon, "leave it out for no budget")
    others = Ledger(delta).record_all(also)
    if others.record(release)._noiseless:
        return 0

    def rounds_of(inverse: float) -> int:
        return math.floor((1 + 1e-12) / inverse)

    def after_all(inverse: float) -> Ledger:
        return others.record(release, rounds_of(inverse))

    if at_most < 1 or after_all(1.0).epsilon(relation, method) > max_epsilon:
        return 0
    found = _least_affordable(
        after_all,
        max_epsilon,
        relation=relation,
        method=method,
        limits=(1 / at_most, 1.0),
        tolerance=ROUNDS_TOLERANCE,
    )
    return rounds_of(found)
