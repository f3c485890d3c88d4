"""One (ε, δ) for all trainings of a population, fixed before the first: a filter on disk.

Who starts a second training has seen the first, and chooses its settings accordingly. The ε of a
composition that was chosen along the way is not the ε of the same releases planned in advance. A
*privacy filter* is: a rule that is fixed in advance and asks before each release, whatever was
chosen so far, whether one more fits. What it lets through is (ε, δ)-differentially private.

- ``rdp``: Σ_t RDP_a(release t) ≤ R at one order a (Feldman and Zrnic 2021). R is the largest value
  whose conversion to δ is at most ε. a is the order at which a plain Gaussian gets most rounds.
  Sampled rounds then get as many as from an RDP plan, within a percent; where RDP is a poor bound
  (z near 1 and ε near 1) they get few.
- ``gaussian``: Σ_t 1/z_t² ≤ μ² (Smith and Thakurta 2022; Koskela et al. 2023). Exact, and for
  releases without amplification by sampling only.
"""

import functools
import logging
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from dp_accounting import NeighboringRelation, rdp
from flwr.serverapp.exception import PrivacyBudgetExhausted

from flwr_ppsgd import disk
from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.checks import one_of, require
from flwr_ppsgd.epsilon import Priced, as_two_zero_outs, gaussian
from flwr_ppsgd.privacy import MOST_ROUNDS, release_from_dict, release_to_dict
from flwr_ppsgd.server.chain import Chain, Told, load_charge, read_only
from flwr_ppsgd.server.journal import NO_RECORD, RECORD_NOT_WRITTEN, behind
from flwr_ppsgd.server.record import Record

log = logging.getLogger("flwr.ppsgd")

Filter: TypeAlias = Literal["rdp", "gaussian"]

NAME = "budget.jsonl"
FORMAT = "flwr_ppsgd budget 1"
PATIENCE = 60.0  # seconds to wait for the lock, which others hold for milliseconds
ROUNDING = 1e-9  # relative, added to every cost: more than floating point can take from it
FRACTIONAL_ORDERS = [1 + tenth / 10 for tenth in range(1, 10)]
WHOLE_ORDERS = [float(order) for order in range(2, 65)]
LARGE_ORDERS = [float(round(2 ** (6 + step / 4))) for step in range(1, 41)]
ORDERS = (*FRACTIONAL_ORDERS, *WHOLE_ORDERS, *LARGE_ORDERS)


@dataclass(frozen=True)
class Allowance:
    """What a budget allows.

    Args:
        epsilon: ε of everything together, under zero-out neighbours.
        delta: δ.
        filter: which quantity adds up, "rdp" or "gaussian".
        order: at which order, for "rdp"; 0 for "gaussian".
        limit: what the quantity may add up to.
    """

    epsilon: float
    delta: float
    filter: Filter
    order: float
    limit: float

    @classmethod
    def of(cls, epsilon: float, delta: float, filter_: Filter = "rdp") -> "Allowance":
        """The largest limit that keeps (ε, δ)."""
        rule = "epsilon must be positive and finite"
        require(0 < epsilon < math.inf, rule, epsilon, "name the ε that all trainings may cost")
        remedy = "choose it well below 1/population"
        require(0 < delta < 1, "delta must be in (0, 1)", delta, remedy)
        one_of("filter", filter_, get_args(Filter))
        if filter_ == "gaussian":
            return cls(epsilon, delta, filter_, 0.0, _gaussian_limit(epsilon, delta))
        order = max(ORDERS, key=lambda each: _rdp_limit(epsilon, delta, each) / each)
        limit = _rdp_limit(epsilon, delta, order)
        rule = "epsilon is too small for an RDP filter at this delta"
        require(limit > 0, rule, epsilon, "raise epsilon or delta, or use the gaussian filter")
        return cls(epsilon, delta, filter_, order, limit)

    def cost(self, release: Release) -> float:
        """What one release adds. ValueError if this filter cannot price it."""
        z = release.noise_multiplier
        if z == 0:
            return math.inf
        sampled = release.amplifies
        if self.filter == "gaussian":
            if sampled:
                raise ValueError(
                    f"a gaussian budget has no price for sampled users, got rate="
                    f"{release.cohort.rate:g}: use rate 1, or a budget with the rdp filter"
                )
            return (1 + ROUNDING) / z**2
        rate = release.cohort.rate if sampled else 1.0
        return _rdp_of(rate, z, self.order) * (1 + ROUNDING)

    def epsilon_replace_one(self) -> float:
        """ε of everything together if a user's data are exchanged for any other."""
        if self.filter == "gaussian":
            return gaussian(1 / (2 * math.sqrt(self.limit)), self.delta)
        return _twice(self.limit, self.order, self.delta)


def _gaussian_limit(epsilon: float, delta: float) -> float:
    """The largest μ² with ε(μ) ≤ epsilon, from below, by bisection."""
    low = 0.0
    high = 1.0
    while gaussian(1 / high, delta) <= epsilon:
        low = high
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if gaussian(1 / middle, delta) <= epsilon:
            low = middle
        else:
            high = middle
    return low**2


def _rdp_limit(epsilon: float, delta: float, order: float) -> float:
    """The R whose conversion is ε: R = ε − log((a−1)/a) + (log δ + log a)/(a−1).

    The conversion is that of Canonne, Kamath and Steinke (2020).
    """
    return epsilon - _conversion(delta, order)


def _conversion(delta: float, order: float) -> float:
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def _twice(limit: float, order: float, delta: float) -> float:
    """ε under replace-one neighbours of whatever stays within the limit at this order."""

    def cost(log_delta: float) -> float:
        return limit + math.log1p(-1 / order) - (log_delta + math.log(order)) / (order - 1)

    return as_two_zero_outs(cost, delta)


@functools.lru_cache(maxsize=256)
def _rdp_of(rate: float, z: float, order: float) -> float:
    """RDP of one round at one order, under zero-out neighbours."""
    accountant = rdp.RdpAccountant([order], NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(Priced(rate, z, 1).event)
    return float(accountant.rdp[0])


@dataclass
class Spending:
    """What the lines of a budget tell.

    Args:
        budget: its id.
        allowance: what it allows.
        kinds: the releases that charges may be of, by number.
        charges: how often each training charged each kind.
        unknown: charges of which nothing more is known: torn lines, and charges added by hand.
        caveats: what every statement must say.
    """

    budget: int
    allowance: Allowance
    kinds: dict[int, Release] = field(default_factory=dict)
    charges: Counter[tuple[int, int]] = field(default_factory=Counter)
    unknown: int = 0
    caveats: list[str] = field(default_factory=list)

    @property
    def charged(self) -> int:
        """How many charges there are in all."""
        return self.charges.total() + self.unknown

    def spent(self) -> float:
        """What all charges add up to; one of which nothing is known costs as much as any other."""
        costs = {kind: self.allowance.cost(release) for kind, release in self.kinds.items()}
        parts = [times * costs[kind] for (_, kind), times in self.charges.items()]
        if self.unknown:
            parts.append(self.unknown * max(costs.values(), default=math.inf))
        return math.fsum(parts)

    def affords(self, release: Release, first: Iterable[tuple[Release, int]] = ()) -> int:
        """How many more releases of this kind fit, after what has to fit before them."""
        cost = self.allowance.cost(release)
        if math.isinf(cost):
            return 0
        before = sum(times * self.allowance.cost(other) for other, times in first)
        spent = self.spent() + before
        left = self.allowance.limit - spent
        if left < cost:
            return 0
        most = math.floor(min(left / cost, MOST_ROUNDS))
        return most if spent + most * cost <= self.allowance.limit else most - 1

    def counts_of(self, training: int) -> dict[Release, int]:
        """How often a training charged each release."""
        counts: Counter[Release] = Counter()
        for (owner, kind), times in self.charges.items():
            if owner == training:
                counts[self.kinds[kind]] += times
        return counts

    def kind_of(self, release: Release) -> int | None:
        """The number of a release; None if it was never charged."""
        for kind, known in self.kinds.items():
            if known == release:
                return kind
        return None


def spending_of(told: Told, path: Path) -> Spending:
    """What the lines of a budget tell; ValueError if this version cannot read them."""
    try:
        first = dict(told.entries[0])
        if first.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        spending = Spending(first.pop("budget"), Allowance(**first), unknown=told.torn)
        for entry in told.entries[1:]:
            _take(entry, spending)
        for rest, times in told.charges.items():
            charge = load_charge(rest)
            spending.charges[charge["training"], charge["kind"]] += times
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no budget that this version reads ({error}): name a directory that was "
            "made for a budget"
        ) from None
    return spending


def _take(entry: Mapping[str, Any], spending: Spending) -> None:
    match entry:
        case {"kind": kind, "release": data}:
            spending.kinds[kind] = release_from_dict(data)
        case {"added": times, "kind": kind, "training": training}:
            spending.charges[training, kind] += times
        case {"added": times}:
            spending.unknown += times
        case {"caveat": text}:
            spending.caveats.append(text)
        case _:
            raise ValueError(f"a line with {', '.join(entry)} is unknown to this version")


def new_budget(directory: Path, epsilon: float, delta: float, filter_: Filter = "rdp") -> None:
    """Fix a budget, before the first training that is under it.

    Args:
        directory: where it is kept; no budget may be there.
        epsilon: ε of all trainings together, under zero-out neighbours.
        delta: δ.
        filter_: "gaussian" if nobody is ever sampled: it is exact then. "rdp" for all else.
    """
    allowance = Allowance.of(epsilon, delta, filter_)
    disk.make_private(directory)
    chain = Chain(directory / NAME)
    try:
        with chain.locked(PATIENCE):
            chain.refresh()
            if chain.told.entries or chain.told.torn:
                raise ValueError(
                    f"{directory} has a budget already: it is fixed for ever; choose another "
                    "directory for another population"
                )
            budget = secrets.randbits(62)
            chain.append({"format": FORMAT, "budget": budget, **asdict(allowance)})
            disk.sync_directory(directory)
    finally:
        chain.close()


def read_spending(directory: Path) -> Spending:
    """What the budget in a directory tells, without a lock."""
    path = directory / NAME
    _require_budget(path)
    return spending_of(read_only(path).told, path)


def _require_budget(path: Path) -> None:
    if not path.is_file():
        raise ValueError(
            f"no budget in {path.parent}: a budget is fixed before the first training, with "
            f"ppsgd budget {path.parent} --epsilon EPSILON --delta DELTA"
        )


class Budget:
    """A budget that a training charges. The lock is held only while it is read or written.

    Args:
        directory: where ``new_budget`` has made it.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / NAME
        _require_budget(path)
        self.directory = directory
        self._chain = Chain(path)
        try:
            with self._current() as spending:
                self.id = spending.budget
                self.allowance = spending.allowance
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._chain.is_open

    def admit(self, release: Release, delta: float, insecure: bool) -> None:
        """ValueError unless a training with these settings can be under the budget.

        Args:
            release: what it publishes in a round.
            delta: δ at which it states its ε.
            insecure: whether its coins come from a known seed.
        """
        allowance = self.allowance
        remedy = f"use delta={allowance.delta:g}"
        rule = f"delta must be that of the budget in {self.directory}"
        require(delta == allowance.delta, rule, delta, remedy)
        rule = "a training under a budget cannot have a known seed, which voids the guarantee"
        require(not insecure, rule, "insecure_seed", "leave insecure_seed out, or budget_dir")
        cap = getattr(release.cohort, "cap", None)
        rule = "a training under a budget cannot have a cap on the cohort, which takes part of δ"
        require(cap is None, rule, cap, "leave the cap out")
        rule = "a training under a budget cannot have random neighbours, which take part of δ"
        remedy = "set SecureSum.neighbours to the population, so that all are neighbours"
        require(not release.failure, rule, release.failure, remedy)
        allowance.cost(release)

    @property
    def caveats(self) -> list[str]:
        """What every statement under this budget must say."""
        return spending_of(self._chain.told, self._chain.path).caveats

    def affords(self, release: Release, first: Iterable[tuple[Release, int]] = ()) -> int:
        """How many more releases of this kind fit.

        Args:
            release: the kind.
            first: what has to fit before them, each with how often.
        """
        with self._current() as spending:
            return spending.affords(release, first)

    def check(self, round_: int, release: Release) -> None:
        """Raise PrivacyBudgetExhausted unless one more release fits."""
        with self._current() as spending:
            self._require_room(spending, round_, release)

    def charge(self, training: int, round_: int, release: Release) -> None:
        """Write one release down, if it fits; PrivacyBudgetExhausted if it does not.

        When this returns, it is on the disk; only then may anything be released.
        """
        with self._current() as spending:
            self._require_room(spending, round_, release)
            kind = self._kind(spending, release)
            self._chain.append({"round": round_, "kind": kind, "training": training})
            self._keep_record(spending.charged + 1)

    def catch_up(self, training: int, counts: Mapping[Release, int]) -> None:
        """Write down charges that a training's journal shows and the budget does not.

        Args:
            training: its id.
            counts: how often its journal shows each release.
        """
        with self._current() as spending:
            known = spending.counts_of(training)
            charged = spending.charged
            for release, times in counts.items():
                missing = times - known.get(release, 0)
                if missing > 0:
                    kind = self._kind(spending, release)
                    self._chain.append({"added": missing, "kind": kind, "training": training})
                    charged += missing
            if charged > spending.charged:
                self._keep_record(charged)

    def reserve(self) -> None:
        """Make sure that there is room on the disk for a round's lines."""
        self._chain.reserve()

    def close(self) -> None:
        """Give up the file; harmless if that was done before."""
        self._chain.close()

    @contextmanager
    def _current(self) -> Iterator[Spending]:
        """The lock, and what all trainings have spent by now."""
        with self._chain.locked(PATIENCE):
            self._chain.refresh()
            spending = spending_of(self._chain.told, self._chain.path)
            recorded = Record(spending.budget, self.directory).read()
            if recorded is not None and recorded > spending.charged:
                who = "the record outside the directory shows"
                raise behind(self.directory, spending.charged, recorded, who)
            self._chain.mend()
            if recorded is None and spending.charged:
                self._note_caveat(NO_RECORD)
            yield spending

    def _require_room(self, spending: Spending, round_: int, release: Release) -> None:
        if spending.affords(release):
            return
        allowance = spending.allowance
        spent = spending.spent() / allowance.limit
        cost = allowance.cost(release) / allowance.limit
        raise PrivacyBudgetExhausted(
            f"round {round_} does not fit into the budget epsilon={allowance.epsilon:g} at "
            f"delta={allowance.delta:g} in {self.directory}: {spent:.2%} is spent by "
            f"{spending.charged} releases of all trainings, and one more costs {cost:.2%}. Run "
            f"fewer rounds, or raise noise_multiplier (now {release.noise_multiplier:g})."
        )

    def _kind(self, spending: Spending, release: Release) -> int:
        """The number of a release; a new one is defined first."""
        kind = spending.kind_of(release)
        if kind is not None:
            return kind
        kind = len(spending.kinds)
        self._chain.append({"kind": kind, "release": release_to_dict(release)})
        spending.kinds[kind] = release
        return kind

    def _keep_record(self, charged: int) -> None:
        """Write the outside record; the budget goes on without it, and says so."""
        try:
            Record(self.id, self.directory).write(charged)
        except OSError as error:
            if RECORD_NOT_WRITTEN not in self.caveats:
                log.warning("The record of the budget's charges cannot be written: %s", error)
            self._note_caveat(RECORD_NOT_WRITTEN)

    def _note_caveat(self, caveat: str) -> None:
        if caveat not in self.caveats:
            self._chain.append({"caveat": caveat})
