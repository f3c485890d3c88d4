"""The trusted server of one training, without Flower: draws cohorts, charges, publishes.

Every way to run the algorithm (both Flower APIs, and in one process) has one of these in its middle.
"""

import functools
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp.exception import PrivacyBudgetExhausted
from numpy import intp
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release, Steps, Vector, descend
from flwr_ppsgd.noise import Coins, GridSum
from flwr_ppsgd.privacy import MOST_ROUNDS, Ledger, affordable_rounds
from flwr_ppsgd.server import checkpoint
from flwr_ppsgd.server.checkpoint import Checkpoint
from flwr_ppsgd.server.journal import Journal

STANDARD_ERROR = "-standard-error"

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it


@dataclass(frozen=True)
class PrivateMetrics:
    """Training measures inside the guarantee: their share of the clip norm is taken from the gradient's.

    bounds: the largest value of each measure that counts in full, by name; public. Larger ones are clipped.
    share: ρ. The gradient is clipped to C·√(1−ρ), the k measures together to C·√ρ, each in units of √k times its bound,
        so that all of them at their bounds still count in full.
    """

    bounds: Mapping[str, float]
    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share must be in (0, 1), got {self.share!r}: it is taken from the gradient's clip norm")
        for name, bound in self.bounds.items():
            if not 0 < bound < math.inf:
                raise ValueError(f"the bound of {name!r} must be positive and finite, got {bound!r}")
            if "," in name or name == "epsilon" or name.endswith(STANDARD_ERROR):
                raise ValueError(f"{name!r} cannot name a measure: leave out commas, 'epsilon' and {STANDARD_ERROR!r}")
        if not self.bounds:
            raise ValueError("bounds names no measure: give at least one, as in {'loss': 10.0}")

    @property
    def units(self) -> dict[str, float]:
        """√k·b of each measure: what is worth C·√ρ in the sum."""
        return {name: math.sqrt(len(self.bounds)) * bound for name, bound in self.bounds.items()}


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
        self.ledger = Ledger(delta)
        self.planned_charges = 0
        self.evaluated = False
        self.caveat = ""  # why a place in the population may not be one user
        self.rounds_done = 0
        self._last_round = 0  # of the plan
        self._covered = 0  # so many charges are known to be within the budget
        self._journal = None if self._directory is None else Journal(self._directory, release, delta)
        self.training = secrets.randbits(62) if self._journal is None else self._journal.training
        self._begun = False
        self.resumed: Checkpoint | None = None
        if self._journal is not None:
            self._resume(self._journal)

    def _resume(self, journal: Journal) -> None:
        try:
            assert self._directory is not None
            found = self.resumed = checkpoint.load(self._directory)
            self.ledger, self.planned_charges, self.evaluated = journal.ledger, journal.planned, journal.evaluated
            if found is None:
                return
            self.rounds_done, self._iterates = found.round, found.iterates
            if self.ledger.rounds < found.charged:
                raise ValueError(
                    f"the journal in {self._directory} shows {self.ledger.rounds} rounds but w has had "
                    f"{found.charged}: charges were lost, so the training is not continued; restore the journal from "
                    "a backup"
                )
        except BaseException:
            journal.close()
            raise
        log.info("Continuing after round %d; %d rounds are charged", found.round, self.ledger.rounds)

    @functools.cached_property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for, over the whole training; None where there is no limit."""
        return None if self._unlimited else self._affordable()

    @property
    def _unlimited(self) -> bool:
        return self.max_epsilon is None or not self.steps.publishes

    def _affordable(self, at_most: int = MOST_ROUNDS) -> int:
        assert self.max_epsilon is not None
        return affordable_rounds(
            max_epsilon=self.max_epsilon, delta=self.ledger.delta, release=self.release, at_most=at_most
        )

    def plan(self, rounds: int) -> int:
        """Fix the number of rounds before the first one: as many as wanted, or as the budget pays for.

        ε is stated for the planned rounds even if someone stops the run earlier: a stop chosen by looking at results
        is itself a function of the data.
        """
        ahead = max(0, rounds - self.rounds_done)
        self._covered = self._covered if self._unlimited else self._affordable(self.ledger.rounds + ahead)
        limit = rounds if self._unlimited else self.rounds_done + max(0, self._covered - self.ledger.rounds)
        if limit < rounds:
            log.warning(
                "The budget max_epsilon=%g pays for %d of %d rounds: the run ends there. For all of them raise "
                "noise_multiplier (now %g), sample fewer users, or raise max_epsilon.",
                self.max_epsilon, limit, rounds, self.release.noise_multiplier,
            )  # fmt: skip
            rounds = limit
        self._last_round = rounds
        charges = self.ledger.rounds + max(0, rounds - self.rounds_done)  # a round charged twice counts twice
        self.planned_charges = max(self.planned_charges, charges) if self.steps.publishes else self.planned_charges
        if self._journal is not None:
            self._journal.plan(self.planned_charges)
        return rounds

    def starts(self) -> tuple[int, ...]:
        """The first round of every start of the server so far, this one last; on disk before anyone hears of it.

        Empty without ``checkpoint_dir``: such a server cannot go on after it has died, so no round comes twice.
        """
        if self._journal is None:
            return ()
        if not self._begun:
            self._journal.begin(self.rounds_done + 1)
            self._begun = True
        return tuple(self._journal.starts)

    def check_budget(self, round_: int) -> None:
        """Raise before anything is sent in a round that the budget does not pay for."""
        if self._unlimited or self.ledger.rounds < self._covered:
            return
        self._covered = self._affordable(2 * self.ledger.rounds + 1)  # far enough ahead not to ask again soon
        if self.ledger.rounds < self._covered:
            return
        spent, after = self.ledger.epsilon(), self.ledger.record(self.release).epsilon()
        raise PrivacyBudgetExhausted(
            f"round {round_} would bring epsilon to {after:.4g} at delta={self.ledger.delta:g}, above "
            f"max_epsilon={self.max_epsilon:g} ({spent:.4g} already spent). Run fewer rounds, sample fewer users, or "
            f"raise noise_multiplier (now {self.release.noise_multiplier:g})."
        )

    def epsilon_so_far(self) -> float:
        """An upper bound, cheap enough for every round, that never exceeds what is stated for the planned ones."""
        quick = self.ledger.quick_epsilon()
        if not self.planned_charges > 0:
            return quick
        planned = self.ledger.record(self.release, max(0, self.planned_charges - self.ledger.rounds))
        return min(quick, planned.epsilon())

    def note_evaluation(self) -> None:
        """From now on every statement says that there was evaluation on client data, restarts included."""
        if not self.evaluated and self._journal is not None:
            self._journal.note_evaluation()
        self.evaluated = True

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
        due = self.rounds_done % self._every == 0 or self.rounds_done == self._last_round
        if self._directory is not None and due:
            found = Checkpoint(self.rounds_done, dict(arrays), self.ledger.rounds, self._iterates)
            checkpoint.save(self._directory, found)

    def averaged(self, w: Vector) -> Vector:
        """The average iterate so far, where it is kept; ``w``, the last one, otherwise and before the first round."""
        return w if self._iterates is None else self._iterates / self.rounds_done

    def close(self) -> None:
        """Give up the lock on the checkpoint directory."""
        if self._journal is not None:
            self._journal.close()

    def _measures(self, noisy: Vector) -> dict[str, float]:
        """Each measure's mean over qN users, and the standard error that the noise gives it: √k·b·z/(√ρ·qN)."""
        if self.metrics is None:
            return {}
        users, root = self.release.cohort.rate * self.release.cohort.population, math.sqrt(self.metrics.share)
        measures = {}
        for (name, unit), value in zip(self.metrics.units.items(), noisy, strict=True):
            measures[name] = float(value) * unit / (self.release.clip_norm * root) / users
            measures[name + STANDARD_ERROR] = unit * self.release.noise_multiplier / root / users
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
