"""The trusted server of one training, without Flower: draws cohorts, charges, publishes.

Every way to run the algorithm (both Flower APIs, and in one process) has one of these in its middle.
"""

import functools
import logging

from flwr.serverapp.exception import PrivacyBudgetExhausted
from numpy import intp
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release, Steps, Vector, descend
from flwr_ppsgd.noise import Coins, GridSum
from flwr_ppsgd.privacy import Ledger, affordable_rounds

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it


class Curator:
    """Whoever holds w, the ledger and the coins.

    delta: δ at which the guarantee is stated.
    max_epsilon: the budget under zero-out neighbours; None is no budget.
    average: keep the average iterate (1/n)·Σ_{t<n} w_t, for which the paper's convergence theorems hold.
    insecure_seed: makes cohorts and noise repeatable, for simulation and tests. It voids the guarantee, and the ledger
        and every report say so.
    """

    def __init__(
        self,
        release: Release,
        steps: Steps,
        *,
        delta: float,
        max_epsilon: float | None = None,
        insecure_seed: int | None = None,
        average: bool = False,
    ) -> None:
        self.release = release
        self.steps = steps
        self.max_epsilon = max_epsilon
        self.insecure_seed = insecure_seed
        self.ledger = Ledger(delta)
        self.planned_rounds = 0
        self.rounds_published = 0
        self.average = average
        self._iterates: Vector | None = None  # Σ_{t<n} w_t
        self._stood = 0  # n
        if max_epsilon is not None and not max_epsilon > 0:
            raise ValueError(f"max_epsilon must be positive, got {max_epsilon!r}: leave it out for no budget")

    @functools.cached_property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for, over the whole training; None where there is no limit."""
        if self.max_epsilon is None or not self.steps.publishes:
            return None
        return affordable_rounds(max_epsilon=self.max_epsilon, delta=self.ledger.delta, release=self.release)

    def plan(self, rounds: int) -> int:
        """Fix the number of rounds before the first one: as many as wanted, or as the budget pays for.

        ε is stated for the planned rounds even if someone stops the run earlier: a stop chosen by looking at results
        is itself a function of the data.
        """
        limit = self.affordable_rounds
        if limit is not None and limit < rounds:
            log.warning(
                "The budget max_epsilon=%g pays for %d of %d rounds: the run ends there. For all of them raise "
                "noise_multiplier (now %g), sample fewer users, or raise max_epsilon.",
                self.max_epsilon, limit, rounds, self.release.noise_multiplier,
            )  # fmt: skip
            rounds = limit
        self.planned_rounds = max(self.planned_rounds, rounds)
        return rounds

    def check_budget(self, round_: int) -> None:
        """Raise before anything is sent in a round that the budget does not pay for."""
        limit = self.affordable_rounds
        if limit is None or self.ledger.rounds < limit:
            return
        spent, after = self.ledger.epsilon(), self.ledger.record(self.release).epsilon()
        raise PrivacyBudgetExhausted(
            f"round {round_} would bring epsilon to {after:.4g} at delta={self.ledger.delta:g}, above "
            f"max_epsilon={self.max_epsilon:g} ({spent:.4g} already spent). Run fewer rounds, sample fewer users, or "
            f"raise noise_multiplier (now {self.release.noise_multiplier:g})."
        )

    def draw(self, round_: int) -> NDArray[intp]:
        """Who takes part, as places in the enrolled population; independent of data and of who is online."""
        return self.release.cohort.members(self._coins(round_, "cohort").uniforms(self.release.cohort.population))

    def open_sum(self, size: int) -> GridSum:
        return GridSum(size, self.release)

    def publish(self, round_: int, w: Vector, total: GridSum) -> Vector:
        """w − s_w·g·k/D. Charged before the new w exists; at α = 0 nothing is released and nothing is charged."""
        if self.average:
            self._iterates = w.copy() if self._iterates is None else self._iterates + w
            self._stood += 1
        self.rounds_published += 1
        if not self.steps.publishes:
            return w
        self._charge()
        return descend(w, total.noisy(self._coins(round_, "noise")), self.release, self.steps.shared)

    def averaged(self, w: Vector) -> Vector:
        """The average iterate so far, where it is kept; ``w``, the last one, otherwise and before the first round."""
        return w if self._iterates is None else self._iterates / self._stood

    def _charge(self) -> None:
        self.ledger = self.ledger.record(self.release, insecure=self.insecure_seed is not None)

    def _coins(self, round_: int, purpose: str) -> Coins:
        if self.insecure_seed is None:
            return Coins.secret()
        return Coins.insecure(self.insecure_seed, purpose, round_)
