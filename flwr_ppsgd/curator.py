"""The trusted server of one training, without Flower: draws cohorts, charges, publishes.

Every way to run the algorithm (both Flower APIs, and in one process) has one of these in its middle.
"""

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp.exception import PrivacyBudgetExhausted
from numpy import intp
from numpy.typing import NDArray

from flwr_ppsgd import checkpoint
from flwr_ppsgd.algorithm import Release, Steps, Vector, descend
from flwr_ppsgd.checkpoint import Checkpoint
from flwr_ppsgd.journal import Journal
from flwr_ppsgd.noise import Coins, GridSum
from flwr_ppsgd.privacy import Ledger, affordable_rounds

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it


@dataclass(frozen=True)
class PrivateMetrics:
    """Training measures inside the guarantee: their share of the clip norm is taken from the gradient's.

    bounds: the largest value of each measure that counts in full, by name; public. Larger ones are clipped.
    share: ρ. The gradient is clipped to C·√(1−ρ), the measures (each in units of its bound) together to C·√ρ.
    """

    bounds: Mapping[str, float]
    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share must be in (0, 1), got {self.share!r}: it is taken from the gradient's clip norm")
        for name, bound in self.bounds.items():
            if not 0 < bound < math.inf:
                raise ValueError(f"the bound of {name!r} must be positive and finite, got {bound!r}")
        if not self.bounds:
            raise ValueError("bounds names no measure: give at least one, as in {'loss': 10.0}")


class Curator:
    """Whoever holds w, the ledger and the coins.

    delta: δ at which the guarantee is stated.
    max_epsilon: the budget under zero-out neighbours; None is no budget.
    average: keep the average iterate (1/n)·Σ_{t<n} w_t, for which the paper's convergence theorems hold.
    checkpoint_dir: where the journal of charges and the checkpoints of w live; a training found there is continued.
    checkpoint_every: write w every so many rounds. The journal is written in every one.
    metrics: training measures to release along with the gradient; None is none.
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
        checkpoint_dir: Path | str | None = None,
        checkpoint_every: int = 1,
        metrics: PrivateMetrics | None = None,
    ) -> None:
        if max_epsilon is not None and not 0 < max_epsilon < math.inf:
            raise ValueError(
                f"max_epsilon must be positive and finite, got {max_epsilon!r}: leave it out for no budget"
            )
        if checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every!r}")
        self.release = release
        self.steps = steps
        self.max_epsilon = max_epsilon
        self.insecure_seed = insecure_seed
        self.average = average
        self.metrics = metrics
        self._iterates: Vector | None = None  # Σ_{t<n} w_t
        self._directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._every = checkpoint_every
        self._journal = None if self._directory is None else Journal(self._directory, release, delta)
        self.resumed = None if self._directory is None else checkpoint.load(self._directory)
        self.ledger = Ledger(delta) if self._journal is None else self._journal.ledger
        self.planned_rounds = 0 if self._journal is None else self._journal.planned
        self.rounds_done = 0
        if self.resumed:
            self._resume(self.resumed)

    def _resume(self, found: Checkpoint) -> None:
        self.rounds_done = found.round
        self._iterates = found.iterates
        if self.steps.publishes and self.ledger.rounds < found.round:
            raise ValueError(
                f"the journal in {self._directory} shows {self.ledger.rounds} rounds but w has had {found.round}: "
                "charges were lost, so the training is not continued; restore the journal from a backup"
            )
        log.info("Continuing after round %d; %d rounds are charged", found.round, self.ledger.rounds)

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
        if limit is not None:
            limit = self.rounds_done + max(0, limit - self.ledger.rounds)  # a round charged twice counts twice
        if limit is not None and limit < rounds:
            log.warning(
                "The budget max_epsilon=%g pays for %d of %d rounds: the run ends there. For all of them raise "
                "noise_multiplier (now %g), sample fewer users, or raise max_epsilon.",
                self.max_epsilon, limit, rounds, self.release.noise_multiplier,
            )  # fmt: skip
            rounds = limit
        self.planned_rounds = max(self.planned_rounds, rounds)
        if self._journal is not None:
            self._journal.plan(rounds)
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
        """An empty sum for vectors of ``size``, followed by the private measures where there are any."""
        if not self.steps.publishes:
            return GridSum(0, self.release)
        if self.metrics is None:
            return GridSum(size, self.release)
        count = len(self.metrics.bounds)
        return GridSum(size + count, self.release, apart=(count, self.metrics.share))

    def publish(self, round_: int, w: Vector, total: GridSum) -> tuple[Vector, dict[str, float]]:
        """(w − s_w·g·k/D, private measures). Charged before either exists; at α = 0 nothing is released or charged."""
        if self.average:
            self._iterates = w.copy() if self._iterates is None else self._iterates + w
        if not self.steps.publishes:
            self.rounds_done = round_
            return w, {}
        self._charge(round_)
        self.rounds_done = round_
        noisy = total.noisy(self._coins(round_, "noise"))
        return descend(w, noisy[: len(w)], self.release, self.steps.shared), self._measures(noisy[len(w) :])

    def save(self, arrays: Mapping[str, bytes]) -> None:
        """Write w of the round just published, where it is due."""
        due = self.rounds_done % self._every == 0 or self.rounds_done == self.planned_rounds
        if self._directory is not None and due:
            checkpoint.save(self._directory, Checkpoint(self.rounds_done, dict(arrays), self._iterates))

    def averaged(self, w: Vector) -> Vector:
        """The average iterate so far, where it is kept; ``w``, the last one, otherwise and before the first round."""
        return w if self._iterates is None else self._iterates / self.rounds_done

    def close(self) -> None:
        """Give up the lock on the checkpoint directory."""
        if self._journal is not None:
            self._journal.close()

    def _measures(self, noisy: Vector) -> dict[str, float]:
        """Each measure's mean over the cohort, and the standard error that the noise gives it: b·z/(√ρ·D)."""
        if self.metrics is None:
            return {}
        release, root = self.release, math.sqrt(self.metrics.share)
        measures = {}
        for (name, bound), value in zip(self.metrics.bounds.items(), noisy, strict=True):
            measures[name] = float(value) * bound / (release.clip_norm * root) / release.denominator
            measures[f"{name}-standard-error"] = bound * release.noise_multiplier / root / release.denominator
        return measures

    def _charge(self, round_: int) -> None:
        insecure = self.insecure_seed is not None
        if self._journal is not None:
            self._journal.charge(round_, insecure)
        self.ledger = self.ledger.record(self.release, insecure=insecure)

    def _coins(self, round_: int, purpose: str) -> Coins:
        if self.insecure_seed is None:
            return Coins.secret()
        return Coins.insecure(self.insecure_seed, purpose, round_)
