"""The trusted server of one training, without Flower: draws cohorts, charges, publishes.

Every way to run the algorithm (both Flower APIs, and in one process) has a curator in its middle.
"""

import functools
import json
import logging
import secrets
from collections.abc import Mapping

from flwr.serverapp.exception import PrivacyBudgetExhausted
from numpy import intp
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector, descend
from flwr_ppsgd.noise import GridSum, coins_for, residual_delta
from flwr_ppsgd.privacy import MOST_ROUNDS, Ledger, affordable_rounds, release_to_dict
from flwr_ppsgd.promise import Headline, Promise, rounded_up
from flwr_ppsgd.server import checkpoint
from flwr_ppsgd.server.checkpoint import Checkpoint
from flwr_ppsgd.server.journal import Journal
from flwr_ppsgd.server.training import Training

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it


class Curator:
    """Whoever holds the ledger and the coins of one training.

    Args:
        training: all its settings.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.ledger = Ledger(training.delta)
        self.rounds_done = 0
        self.planned_charges = 0
        self.evaluated = False
        self.resumed: Checkpoint | None = None
        self._caveat = ""
        self._iterates: Vector | None = None  # Σ_{t<n} w_t
        self._last_round = 0  # of the plan
        self._covered = 0  # the number of charges that are known to be within the budget
        self._begun = False
        self._journal: Journal | None = None
        if training.checkpoint_dir is not None:
            self._journal = Journal(training.checkpoint_dir, training.release, training.delta)
            self._resume(self._journal)
        self.training_id = self._journal.training if self._journal else secrets.randbits(62)

    def _resume(self, journal: Journal) -> None:
        """Go on from what the journal and the checkpoints hold."""
        try:
            self.ledger = journal.ledger
            self.planned_charges = journal.planned
            self.evaluated = journal.evaluated
            found = checkpoint.load(journal.directory)
            if found is not None:
                self._go_on_from(found, journal)
        except BaseException:
            journal.close()
            raise

    def _go_on_from(self, found: Checkpoint, journal: Journal) -> None:
        charged = self.ledger.rounds
        if charged < found.charged:
            raise ValueError(
                f"the journal in {journal.directory} shows {charged} rounds but w has had "
                f"{found.charged}: charges were lost, so the training is not continued; restore "
                "the journal from a backup"
            )
        self.resumed = found
        self.rounds_done = found.round
        self._iterates = found.iterates
        log.info("Continuing after round %d; %d rounds are charged", found.round, charged)

    # --- the budget

    @functools.cached_property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for, in all; None if there is no limit."""
        return None if self._unlimited else self._affordable()

    @property
    def _unlimited(self) -> bool:
        return self.training.max_epsilon is None or not self.training.steps.publishes

    def _affordable(self, at_most: int = MOST_ROUNDS) -> int:
        assert self.training.max_epsilon is not None
        return affordable_rounds(
            max_epsilon=self.training.max_epsilon,
            delta=self.training.delta,
            release=self.training.release,
            at_most=at_most,
        )

    def plan(self, rounds: int) -> int:
        """Fix the number of rounds before the first one: as many as wanted and as can be paid for.

        ε is stated for the planned rounds even if someone stops the run earlier: a stop chosen by
        looking at results is itself a function of the data.
        """
        limit = self._paid_for(rounds)
        if limit < rounds:
            log.warning(
                "The budget max_epsilon=%g pays for %d of %d rounds: the run ends there. For all "
                "of them raise noise_multiplier (now %g), sample fewer users, or raise "
                "max_epsilon.",
                self.training.max_epsilon,
                limit,
                rounds,
                self.training.release.noise_multiplier,
            )
        self._last_round = limit
        if self.training.steps.publishes:
            # a round that is charged twice counts twice
            charges = self.ledger.rounds + max(0, limit - self.rounds_done)
            self.planned_charges = max(self.planned_charges, charges)
        if self._journal is not None:
            self._journal.plan(self.planned_charges)
        return limit

    def _paid_for(self, rounds: int) -> int:
        """How many of ``rounds`` rounds, counted over the whole training, the budget pays for."""
        if self._unlimited:
            return rounds
        ahead = max(0, rounds - self.rounds_done)
        self._covered = self._affordable(self.ledger.rounds + ahead)
        left = max(0, self._covered - self.ledger.rounds)
        return min(rounds, self.rounds_done + left)

    def check_budget(self, round_: int) -> None:
        """Raise before anything is sent in a round that the budget does not pay for."""
        charged = self.ledger.rounds
        if self._unlimited or charged < self._covered:
            return
        self._covered = self._affordable(2 * charged + 1)  # far enough ahead not to ask again soon
        if charged < self._covered:
            return
        release = self.training.release
        after = self.ledger.record(release)
        raise PrivacyBudgetExhausted(
            f"round {round_} would bring epsilon to {rounded_up(after.epsilon())} at "
            f"delta={self.ledger.delta:g}, above max_epsilon={self.training.max_epsilon:g} "
            f"({rounded_up(self.ledger.epsilon())} already spent). Run fewer rounds, sample fewer "
            f"users, or raise noise_multiplier (now {release.noise_multiplier:g})."
        )

    # --- what is promised

    def stated(self) -> Ledger:
        """The ledger for which ε is stated: what was released, and planned rounds that were not."""
        missing = max(0, self.planned_charges - self.ledger.rounds)
        insecure = self.training.insecure_seed is not None
        return self.ledger.record(self.training.release, missing, insecure=insecure)

    def headline(self) -> Headline:
        """What clients get to know with every Order."""
        ledger = self.stated()
        return Headline(
            epsilon=_zero_out(ledger),
            delta=ledger.delta,
            rounds=ledger.rounds,
            insecure_rounds=ledger.insecure_rounds,
            population=self.training.release.cohort.population,
            unit="node" if self._caveat else "user",
        )

    def in_one_line(self) -> str:
        """The promise for clients; nothing if no number of rounds was planned."""
        if self.training.steps.publishes and not self.planned_charges:
            return ""
        return self.headline().in_one_line()

    def promise(self, size: int = 0, simulation: tuple[str, ...] = ()) -> Promise:
        """Everything that is stated about this training.

        Args:
            size: the number of coordinates that each release has.
            simulation: the terms of a simulation, as of ``Promise``.
        """
        ledger = self.stated()
        replace_one = ledger.epsilon("replace-one")
        return Promise(
            headline=self.headline(),
            release=self.training.release,
            publishes=self.training.steps.publishes,
            epsilon_replace_one=replace_one,
            epsilon_rdp=ledger.epsilon(method="rdp"),
            paper_epsilon=ledger.paper_epsilon(),
            delta_taken_by_cap=ledger.delta_added(),
            delta_taken_by_cap_replace_one=ledger.delta_added("replace-one"),
            delta_added_by_finite_precision=residual_delta(size, ledger.rounds, replace_one),
            rounds_trained=self.rounds_done,
            rounds_charged=self.ledger.rounds,
            metrics=self.training.metrics,
            caveat=self._caveat,
            evaluated=self.evaluated,
            simulation=simulation,
            ledger=json.loads(self.ledger.to_json()),
            release_data=release_to_dict(self.training.release),
        )

    def epsilon_so_far(self) -> float:
        """An upper bound, cheap enough for every round; at most what is stated for the plan."""
        quick = self.ledger.quick_epsilon()
        if not self.planned_charges:
            return quick
        missing = max(0, self.planned_charges - self.ledger.rounds)
        planned = self.ledger.record(self.training.release, missing)
        return min(quick, _zero_out(planned))

    def note_evaluation(self) -> None:
        """From now on every statement says that there was evaluation on client data."""
        if not self.evaluated and self._journal is not None:
            self._journal.note_evaluation()
        self.evaluated = True

    def note_caveat(self, caveat: str) -> None:
        """From now on every statement says why a place in the population may not be one user."""
        self._caveat = caveat

    # --- the rounds

    def starts(self) -> tuple[int, ...]:
        """The first round of every start of the server so far, this one last.

        On disk before anyone hears of it. Empty without ``checkpoint_dir``: such a server cannot go
        on after it has died, so no round comes twice.
        """
        if self._journal is None:
            return ()
        if not self._begun:
            self._journal.begin(self.rounds_done + 1)
            self._begun = True
        return tuple(self._journal.starts)

    def draw(self, round_: int) -> NDArray[intp]:
        """Who takes part, as places in the enrolled population.

        Independent of data and of who is online.
        """
        cohort = self.training.release.cohort
        coins = coins_for(self.training.insecure_seed, "cohort", round_)
        return cohort.members(coins.uniforms(cohort.population))

    def open_sum(self, size: int) -> GridSum:
        """An empty sum for vectors of ``size``, and for private measures if there are any."""
        if not self.training.steps.publishes:
            return GridSum(0, self.training.release)
        return GridSum(size, self.training.release, self.training.metrics)

    def publish(self, round_: int, w: Vector, total: GridSum) -> tuple[Vector, dict[str, float]]:
        """(w − s_w·g·k/D, private measures).

        Charged before either exists. At α = 0 nothing is released or charged.
        """
        if self.training.average:
            self._iterates = w.copy() if self._iterates is None else self._iterates + w
        if not self.training.steps.publishes:
            self.rounds_done = round_
            return w, {}
        self._charge(round_)
        self.rounds_done = round_
        release = self.training.release
        noisy = total.noisy(coins_for(self.training.insecure_seed, "noise", round_))
        moved = descend(w, noisy[: len(w)], release, self.training.steps.shared)
        if self.training.metrics is None:
            return moved, {}
        return moved, self.training.metrics.decode(noisy[len(w) :], release)

    def _charge(self, round_: int) -> None:
        insecure = self.training.insecure_seed is not None
        if self._journal is not None:
            self._journal.charge(round_, insecure)
        self.ledger = self.ledger.record(self.training.release, insecure=insecure)

    def simulate(self, round_: int) -> None:
        """Count the rounds up to ``round_`` as ones without a guarantee, which others have run."""
        times = round_ - self.rounds_done
        self.rounds_done = round_
        if self.training.steps.publishes:
            self.ledger = self.ledger.record(self.training.release, times, insecure=True)

    def save(self, arrays: Mapping[str, bytes]) -> None:
        """Write w of the round just published, if it is due."""
        directory = self.training.checkpoint_dir
        regular = self.rounds_done % self.training.checkpoint_every == 0
        if directory is None or not (regular or self.rounds_done == self._last_round):
            return
        found = Checkpoint(self.rounds_done, dict(arrays), self.ledger.rounds, self._iterates)
        checkpoint.save(directory, found)

    def averaged(self, w: Vector) -> Vector:
        """The average iterate so far, if it is kept; else ``w``, also before the first round."""
        return w if self._iterates is None else self._iterates / self.rounds_done

    def close(self) -> None:
        """Give up the lock on the checkpoint directory."""
        if self._journal is not None:
            self._journal.close()


@functools.lru_cache(maxsize=64)
def _zero_out(ledger: Ledger) -> float:
    """ε under zero-out neighbours, worked out once per ledger."""
    return ledger.epsilon()
