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
import math
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from dp_accounting import NeighboringRelation, rdp
from flwr.serverapp.exception import PrivacyBudgetExhausted

from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.checks import one_of, require
from flwr_ppsgd.database import FileLock, StoreError, private_directory
from flwr_ppsgd.epsilon import PricedRelease, as_two_zero_outs, gaussian
from flwr_ppsgd.ledger import MOST_ROUNDS
from flwr_ppsgd.server.sealed import SealedRows

Filter: TypeAlias = Literal["rdp", "gaussian"]

NAME = "budget.sqlite"
LOCK = "budget.lock"
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
        limits = {order: epsilon - _conversion(math.log(delta), order) for order in ORDERS}
        order = max(limits, key=lambda each: limits[each] / each)
        limit = limits[order]
        rule = "epsilon is too small for an RDP filter at this delta"
        require(limit > 0, rule, epsilon, "raise epsilon or delta, or use the gaussian filter")
        return cls(epsilon, delta, filter_, order, limit)

    def cost(self, release: Release) -> float:
        """What one release adds. ValueError if this filter cannot price it."""
        z = release.noise_multiplier
        if z == 0:
            return math.inf
        rate = release.cohort.rate if release.amplifies else 1.0
        if self.filter == "rdp":
            return _rdp_of(rate, z, self.order) * (1 + ROUNDING)
        if release.amplifies:
            raise ValueError(
                f"a gaussian budget has no price for sampled users, got rate={rate:g}: use rate 1, "
                "or a budget with the rdp filter"
            )
        return (1 + ROUNDING) / z**2

    def epsilon_replace_one(self) -> float:
        """ε of everything together if a user's data are exchanged for any other."""
        if self.filter == "gaussian":
            return gaussian(1 / (2 * math.sqrt(self.limit)), self.delta)

        def cost(log_delta: float) -> float:
            return self.limit + _conversion(log_delta, self.order)

        return as_two_zero_outs(cost, self.delta)


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


def _conversion(log_delta: float, order: float) -> float:
    """What ε is above R: log((a−1)/a) − (log δ + log a)/(a−1) (Canonne, Kamath, Steinke 2020)."""
    return math.log1p(-1 / order) - (log_delta + math.log(order)) / (order - 1)


@functools.lru_cache(maxsize=256)
def _rdp_of(rate: float, z: float, order: float) -> float:
    """RDP of one round at one order, under zero-out neighbours."""
    accountant = rdp.RdpAccountant([order], NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(PricedRelease(rate, z, 1).event)
    return float(accountant.rdp[0])


class Budget(SealedRows):
    """A budget that trainings charge, each in transactions of milliseconds.

    Args:
        directory: where ``new_budget`` has made it.
        read_only: write nothing, for reports.
        repair: open it although charges were lost, to add them by hand.
    """

    def __init__(self, directory: Path, *, read_only: bool = False, repair: bool = False) -> None:
        super().__init__(directory / NAME, "budget", read_only=read_only, repair=repair)
        self.directory = directory
        self.open()

    def open(self) -> None:
        """Read and verify everything, unless it is open."""
        if (self.directory / NAME).is_file():
            with nullcontext() if self._read_only else _lock(self.directory):
                super().open()
        if not self.is_open or not self.notes("allowance"):
            self.close()
            raise StoreError(
                f"no budget in {self.directory}: a budget is fixed before the first training, with "
                f"ppsgd budget {self.directory} --epsilon EPSILON --delta DELTA"
            )
        self.allowance = Allowance(**self.notes("allowance")[0])

    # --- what is spent

    def cost_of_charges(self) -> float:
        """What all charges add up to; one that was added by hand costs as much as any other."""
        costs = [self.allowance.cost(release) for release in self.kinds]
        parts = [times * costs[kind] for (_, kind, _), times in self.tally.items()]
        if self.added:
            parts.append(self.added * max(costs, default=math.inf))
        return math.fsum(parts)

    def affords(self, release: Release, first: Iterable[tuple[Release, int]] = ()) -> int:
        """How many more releases of this kind fit after others, each with its number of rounds."""
        with self.transaction():  # which reads what other trainings have charged
            return self._room_for(release, first)

    def check(self, round_: int, release: Release) -> None:
        """Raise PrivacyBudgetExhausted unless one more release fits."""
        with self.transaction():
            self._require_room(round_, release)

    def admit(self, release: Release, delta: float, insecure: bool) -> None:
        """ValueError unless a training with these settings can be under the budget."""
        allowance = self.allowance
        remedy = f"use delta={allowance.delta:g}"
        rule = f"delta must be that of the budget in {self.directory}"
        require(delta == allowance.delta, rule, delta, remedy)
        rule = "a training under a budget cannot have a known seed, which voids the guarantee"
        require(not insecure, rule, "insecure_seed", "leave insecure_seed out, or budget_dir")
        rule = "a training under a budget cannot have random neighbours, which take part of δ"
        remedy = "set SecureSum.neighbours to the population, so that all are neighbours"
        require(not release.failure, rule, release.failure, remedy)
        allowance.cost(release)

    # --- charges

    def charge(self, training: int, round_: int, release: Release) -> None:
        """Write one release down, if it fits; PrivacyBudgetExhausted if it does not.

        Only when this has returned may anything be released.
        """
        with self.transaction() as add:
            self._require_room(round_, release)
            self._add_charge(add, training, round_, release)

    def catch_up(self, training: int, charges: Mapping[tuple[Release, bool], int]) -> None:
        """Add the charges of a training that the budget lacks, from ``Store.charges``.

        No training under a budget has a known seed.
        """
        with self.transaction() as add:
            for (release, _insecure), times in charges.items():
                kind = self.kinds.index(release) if release in self.kinds else -1
                for _ in range(times - self.tally[training, kind, False]):
                    self._add_charge(add, training, 0, release)

    def _room_for(self, release: Release, first: Iterable[tuple[Release, int]] = ()) -> int:
        """How many more fit, by the charges that were read."""
        cost = self.allowance.cost(release)
        spent = self.cost_of_charges()
        for other, times in first:
            spent += times * self.allowance.cost(other)
        left = self.allowance.limit - spent
        if left < cost:  # which is infinite without noise
            return 0
        most = math.floor(min(left / cost, MOST_ROUNDS))
        return most if spent + most * cost <= self.allowance.limit else most - 1

    def _require_room(self, round_: int, release: Release) -> None:
        if self._room_for(release):
            return
        allowance = self.allowance
        spent = self.cost_of_charges() / allowance.limit
        cost = allowance.cost(release) / allowance.limit
        raise PrivacyBudgetExhausted(
            f"round {round_} does not fit into the budget epsilon={allowance.epsilon:g} at "
            f"delta={allowance.delta:g} in {self.directory}: {spent:.2%} is spent by "
            f"{self.charge_count} releases of all trainings, and one more costs {cost:.2%}. Run "
            f"fewer rounds, or raise noise_multiplier (now {release.noise_multiplier:g})."
        )


def new_budget(directory: Path, epsilon: float, delta: float, filter_: Filter = "rdp") -> None:
    """Fix a budget, before the first training that is under it.

    Args:
        directory: where it is kept; no budget may be there.
        epsilon: ε of all trainings together, under zero-out neighbours.
        delta: δ.
        filter_: "gaussian" if nobody is ever sampled: it is exact then. "rdp" for all else.
    """
    allowance = Allowance.of(epsilon, delta, filter_)
    private_directory(directory)
    rows = SealedRows(directory / NAME, "budget")
    with _lock(directory), closing(rows):
        rows.open()
        if rows.notes("allowance"):
            raise StoreError(
                f"{directory} has a budget already: it is fixed for ever; choose another directory "
                "for another population"
            )
        rows.note("allowance", asdict(allowance))


def _lock(directory: Path) -> closing[FileLock]:
    """Taken to open a budget: it shows whether locks hold there, which SQLite rests on too."""
    busy = f"the budget in {directory} is in use by another process: try again"
    return closing(FileLock(directory / LOCK, PATIENCE, busy))
