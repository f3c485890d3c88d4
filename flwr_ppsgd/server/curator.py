"""The trusted server of one training, without Flower: draws cohorts, charges, publishes.

Every way to run the algorithm (both Flower APIs, and in one process) has a curator in its middle.
"""

import functools
import json
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flwr.serverapp.exception import PrivacyBudgetExhausted
from numpy import intp
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release, Vector, server_step
from flwr_ppsgd.epsilon import Bound, check_accountant
from flwr_ppsgd.noise import GridSum, coins_for, residual_delta
from flwr_ppsgd.privacy import MOST_ROUNDS, Ledger, affordable_rounds, release_to_dict
from flwr_ppsgd.promise import Headline, Promise, rounded_up
from flwr_ppsgd.recipe import (
    Values,
    published_variance,
    server_gain,
    shares_of_columns,
    values_of,
)
from flwr_ppsgd.server import checkpoint
from flwr_ppsgd.server.budget import Budget
from flwr_ppsgd.server.checkpoint import Checkpoint
from flwr_ppsgd.server.journal import Journal, behind
from flwr_ppsgd.server.training import Training
from flwr_ppsgd.signature import KEY, TrainingKey

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it

SUM = "sum-"  # before the names of what was released before round 1, in the state of a simulation
ITERATES = "iterates"
VARIANCE = "variance"  # in the state of a checkpoint


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
        self.training_id = secrets.randbits(62)
        self._planned_rounds = 0
        self._caveats: dict[str, str] = {}  # and who is protected, "user" or "node"
        self._iterates: Vector | None = None  # Σ_{t<n} w_t
        self.sums: dict[str, Vector] = {}  # what was released before the first round
        self._variance = np.zeros(1)  # ν
        self._last_round = 0  # of the plan
        self._covered = 0  # the number of charges that are known to be within the budget
        self._begun = False
        self._journal: Journal | None = None
        self._budget: Budget | None = None
        self._open()

    @functools.cached_property
    def key(self) -> TrainingKey:
        """What Orders are signed with; kept beside the journal, if there is one."""
        directory = self.training.checkpoint_dir
        if directory is None:
            return TrainingKey.new()
        path = directory / KEY
        if path.exists():
            return TrainingKey.load(path)
        key = TrainingKey.new()
        key.save(path)
        return key

    # --- what is on the disk

    def reopen(self) -> bool:
        """Take the lock again after ``close``, and go on from the disk as after a restart.

        Whether that happened: False if the journal is open, or if there is none.
        """
        journal_open = self._journal is None or self._journal.is_open
        budget_open = self._budget is None or self._budget.is_open
        if journal_open and budget_open:
            return False
        try:
            self._open()
        except OSError as error:
            directory = self.training.checkpoint_dir
            raise OSError(
                error.errno,
                f"the journal in {directory} cannot be opened again ({error.strerror or error}): "
                "nothing was sent; make it readable and writable, then start again",
            ) from None
        return self._journal is not None

    def close(self) -> None:
        """Give up the lock on the checkpoint directory."""
        if self._journal is not None:
            self._journal.close()
        if self._budget is not None:
            self._budget.close()

    def _open(self) -> None:
        directory = self.training.checkpoint_dir
        try:
            if directory is not None:
                journal = Journal(directory, self.training.release, self.training.delta)
                self._resume(journal)
            self._open_budget()
        except BaseException:
            self.close()
            raise

    def _resume(self, journal: Journal) -> None:
        """Go on from what the journal and the checkpoints hold."""
        try:
            found = checkpoint.load(journal.directory)
            self._refuse_lost_charges(journal, found)
        except BaseException:
            journal.close()
            raise
        self._journal = journal
        self.ledger = journal.ledger
        self.training_id = journal.training
        self.planned_charges = journal.story.planned
        self._planned_rounds = journal.story.planned_rounds
        self.evaluated = journal.story.evaluated
        self._caveats |= journal.story.caveats
        self._begun = False
        self.resumed = found
        self.rounds_done = found.round if found else 0
        self._iterates = found.iterates if found else None
        self.sums = {name: np.array(numbers) for name, numbers in journal.story.sums.items()}
        if found is not None and VARIANCE in found.state:
            self._variance = found.state[VARIANCE]
        if found is not None:
            charged = self.ledger.rounds
            log.info("Continuing after round %d; %d rounds are charged", found.round, charged)

    def _refuse_lost_charges(self, journal: Journal, found: Checkpoint | None) -> None:
        """ValueError if w, or this process, knows of more charges than the journal."""
        charged = journal.ledger.rounds
        if found is not None and charged < found.charged:
            raise behind(journal.directory, charged, found.charged, "w has had")
        if charged < self.ledger.rounds:
            who = "this process has made"
            raise behind(journal.directory, charged, self.ledger.rounds, who)

    def _open_budget(self) -> None:
        """Join the budget that the training is under, if there is one."""
        directory = self.training.budget_dir
        story = self._journal.story if self._journal else None
        if directory is None:
            if story is not None and story.budget is not None:
                raise ValueError(
                    f"this training is under the budget in {story.budget_dir}: set budget_dir to it"
                )
            return
        self._budget = Budget(directory)
        insecure = self.training.insecure_seed is not None
        self._budget.admit(self.training.release, self.training.delta, insecure)
        if self._journal is not None:
            self._journal.join(self._budget.id, directory)
            self._budget.catch_up(self.training_id, self._journal.story.counts)

    # --- the budget

    @functools.cached_property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for, in all; None if there is no limit."""
        return None if self._unlimited else self._affordable()

    @property
    def _unlimited(self) -> bool:
        return self.training.max_epsilon is None or not self.training.steps.publishes

    def _affordable(self, at_most: int = MOST_ROUNDS) -> int:
        """How many rounds, those charged included, beside everything else that is released."""
        assert self.training.max_epsilon is not None
        return affordable_rounds(
            max_epsilon=self.training.max_epsilon,
            delta=self.training.delta,
            release=self.training.release,
            at_most=at_most,
            also=self._besides_rounds(),
        )

    @property
    def _charged_rounds(self) -> int:
        """How many of all charges are for rounds: a round that is charged twice counts twice."""
        release = self.training.release
        return sum(times for charged, times in self.ledger.releases if charged == release)

    def _besides_rounds(self) -> list[tuple[Release, int]]:
        """What was charged for anything but rounds, and what comes before the first one."""
        release = self.training.release
        others = [each for each in self.ledger.releases if each[0] != release]
        return [*others, *self._coming()]

    def _coming(self) -> list[tuple[Release, int]]:
        """What is still to be released before the first round, each once."""
        recipe = self.training.recipe
        return [] if recipe is None else [(recipe.before[name], 1) for name in self.pending]

    def plan(self, rounds: int) -> int:
        """Fix the number of rounds before the first one: as many as wanted and as can be paid for.

        ε is stated for the planned rounds even if someone stops the run earlier: a stop chosen by
        looking at results is itself a function of the data.
        """
        self.reopen()
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
        limit = self._within_budget_dir(limit)
        self._last_round = limit
        if self.training.steps.publishes:
            self._plan_charges(limit)
        return limit

    def _plan_charges(self, rounds: int) -> None:
        """Write the plan down. One that grows after charges is a choice, and a caveat."""
        charged = self.ledger.rounds
        before = self._planned_rounds
        if self._charged_rounds and rounds > before and self._budget is None:
            self._note(
                f"the number of rounds was raised from {before} to {rounds} after {charged} "
                "charges; if that was decided by looking at results, epsilon is what was spent so "
                "far, and not a guarantee that was fixed in advance"
            )
        # a round that is charged twice counts twice
        charges = charged + max(0, rounds - self.rounds_done) + len(self.pending)
        self.planned_charges = max(self.planned_charges, charges)
        self._planned_rounds = max(before, rounds)
        if self._journal is not None:
            self._journal.plan(self.planned_charges, self._planned_rounds)

    def _paid_for(self, rounds: int) -> int:
        """How many of ``rounds`` rounds, counted over the whole training, max_epsilon pays for."""
        if self._unlimited:
            return rounds
        ahead = max(0, rounds - self.rounds_done)
        self._covered = self._affordable(self._charged_rounds + ahead)
        left = max(0, self._covered - self._charged_rounds)
        return min(rounds, self.rounds_done + left)

    def _within_budget_dir(self, rounds: int) -> int:
        """How many of ``rounds`` rounds the budget of all trainings has room for now."""
        if self._budget is None or not self.training.steps.publishes:
            return rounds
        fits = self._budget.affords(self.training.release, self._coming())
        room = self.rounds_done + fits
        if room < rounds:
            log.warning(
                "The budget in %s has room for %d of %d rounds: the run ends there. For more raise "
                "noise_multiplier (now %g), or sample fewer users.",
                self._budget.directory,
                room,
                rounds,
                self.training.release.noise_multiplier,
            )
        return min(rounds, room)

    def check_budget(self, round_: int) -> None:
        """Raise before anything is sent in a round that the budget does not pay for.

        Also if the disk has no room to write the round down.
        """
        self.reopen()
        self._reserve()
        if self._budget is not None and self.training.steps.publishes:
            self._budget.check(round_, self.training.release)
        charged = self._charged_rounds
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

    def check_before(self, name: str) -> None:
        """Raise before anything is sent, if the budget does not pay for what comes before round 1.

        Args:
            name: what is asked for.
        """
        assert self.training.recipe is not None
        self.reopen()
        self._reserve()
        release = self.training.recipe.before[name]
        if self._budget is not None:
            self._budget.check(0, release)
        limit = self.training.max_epsilon
        after = self.ledger.record(release).epsilon()
        if limit is not None and after > limit:
            raise PrivacyBudgetExhausted(
                f"asking for the {name} before round 1 would bring epsilon to {rounded_up(after)} "
                f"at delta={self.ledger.delta:g}, above max_epsilon={limit:g}: raise max_epsilon, "
                "or leave it out, since auto keeps to its epsilon"
            )

    def _reserve(self) -> None:
        if self._journal is not None:
            self._journal.reserve()
        if self._budget is not None:
            self._budget.reserve()

    # --- what is promised

    def stated(self) -> Ledger:
        """The ledger for which ε is stated: what was released, and planned rounds that were not."""
        insecure = self.training.insecure_seed is not None
        missing = max(0, self.planned_charges - self.ledger.rounds)
        ledger = self.ledger
        for release, times in self._coming() if missing else ():
            ledger = ledger.record(release, times, insecure=insecure)
            missing -= times
        return ledger.record(self.training.release, missing, insecure=insecure)

    def headline(self, simulation: str = "") -> Headline:
        """What clients get to know with every Order.

        Args:
            simulation: why this is a simulation; empty if it is none.
        """
        head = headline_of(self.stated())
        population = self.training.release.cohort.population
        unit = "node" if self._caveat else "user"
        secure = self.training.release.aggregation
        head = replace(head, population=population, unit=unit, simulation=simulation, secure=secure)
        if self._budget is not None:
            head = replace(head, cost=self._budget.allowance.epsilon)
        return head

    def for_clients(self) -> tuple[float, str]:
        """ε and the promise in one line; nothing is promised if no number of rounds was planned."""
        if self.training.steps.publishes and not self.planned_charges:
            return math.inf, ""
        head = self.headline()
        return head.epsilon, head.in_one_line()

    def promise(
        self,
        size: int = 0,
        simulation: str = "",
        terms: tuple[str, ...] = (),
    ) -> Promise:
        """Everything that is stated about this training.

        Args:
            size: the number of coordinates that each release has.
            simulation: why this is a simulation; empty if it is none.
            terms: further terms of a simulation.
        """
        check_accountant()
        stated = self.stated()
        replace_one = stated.epsilon("replace-one")
        shares = self.training.release.noise_shares
        residual = residual_delta(size, stated.rounds, replace_one, shares)
        # δ is the total: what finite precision takes is paid from it
        ledger = replace(stated, delta=max(stated.delta - residual, stated.delta / 2))
        head = self.headline(simulation)
        bound = ledger.bound()
        if self._budget is None:
            head = replace(head, cost=bound.epsilon)
            replace_one = ledger.epsilon("replace-one")
            by_rdp = ledger.epsilon(method="rdp")
        else:
            bound = Bound(head.cost, "the budget's filter")
            replace_one = self._budget.allowance.epsilon_replace_one()
            by_rdp = head.cost
        return Promise(
            headline=head,
            release=self.training.release,
            publishes=self.training.steps.publishes,
            method=bound.method,
            replace_one=replace_one,
            rdp=by_rdp,
            paper_epsilon=ledger.paper_epsilon(),
            delta_taken_by_cap=ledger.delta_added(),
            delta_taken_by_cap_replace_one=ledger.delta_added("replace-one"),
            delta_taken_by_precision=residual,
            delta_taken_by_neighbours=stated.failure,
            rounds_trained=self.rounds_done,
            rounds_charged=self.ledger.rounds,
            metrics=self.training.metrics,
            recipe=self.training.recipe,
            values=self.values,
            caveats=self._all_caveats(),
            evaluated=self.evaluated,
            terms=terms,
            ledger=json.loads(self.ledger.to_json()),
            release_data=release_to_dict(self.training.release),
        )

    def _all_caveats(self) -> tuple[str, ...]:
        """What the statement says besides its terms, as sentences."""
        found = [f"{text[:1].upper()}{text[1:]}." for text in self.caveats]
        if self._caveat:
            lost = "User-level privacy across restarts of a node is NOT claimed: "
            found.insert(0, f"{lost}{self._caveat}.")
        return tuple(found)

    def epsilon_so_far(self) -> float:
        """An upper bound on what is guaranteed, cheap enough for every round.

        At most what is stated for the plan; infinite if nothing is guaranteed.
        """
        head = headline_of(self.ledger, self.ledger.quick_epsilon())
        if head.void or not self.planned_charges:
            return head.epsilon
        return min(head.cost, _zero_out(self.stated()))

    def note_evaluation(self) -> None:
        """From now on every statement says that there was evaluation on client data."""
        if not self.evaluated and self._journal is not None:
            self._journal.note_evaluation()
        self.evaluated = True

    def note_caveat(self, caveat: str) -> None:
        """From now on every statement says why a place in the population may not be one user.

        Args:
            caveat: the reason; empty if there is none.
        """
        if caveat:
            self._note(caveat, "node")

    @property
    def caveats(self) -> tuple[str, ...]:
        """What every statement must say, besides ``note_caveat``'s reason."""
        found = dict(self._caveats)
        if self._journal is not None:
            found |= self._journal.story.caveats
        own = [text for text, unit in found.items() if unit == "user"]
        shared = self._budget.caveats if self._budget is not None else []
        return tuple(dict.fromkeys([*own, *shared]))

    @property
    def _caveat(self) -> str:
        """Why a place in the population may not be one user; empty if it is."""
        reasons = [text for text, unit in self._caveats.items() if unit == "node"]
        return "; ".join(reasons)

    def _note(self, caveat: str, unit: str = "user") -> None:
        """Remember a caveat for good."""
        if self._caveats.get(caveat) == unit:
            return
        if self._journal is not None:
            self._journal.note_caveat(caveat, unit)
        self._caveats[caveat] = unit

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
        return tuple(self._journal.story.starts)

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

    def encoded(self, gradient: Vector, measures: Mapping[str, float]) -> Vector:
        """What of one user is summed: the gradient, then private measures."""
        kinds = self.training.metrics
        if kinds is None:
            return gradient
        return np.append(gradient, kinds.encode(measures, self.training.release.clip_norm))

    def publish(
        self, round_: int, w: Vector, total: GridSum, columns: int = 0
    ) -> tuple[Vector, dict[str, float]]:
        """(w − s_w·g·k/D, private measures).

        Charged before either exists. At α = 0 nothing is released or charged.

        Args:
            round_: the absolute round.
            w: the shared parameters.
            total: the sum.
            columns: of users' rows, if w has a row for each of them.
        """
        if not self.training.steps.publishes:
            self._count(round_, w)
            return w, {}
        self.charge_round(round_)
        self._count(round_, w)
        noisy = total.noisy(coins_for(self.training.insecure_seed, "noise", round_))
        return self._step(w, noisy, columns)

    def charge_round(self, round_: int) -> None:
        """Write a round down, before anything of it can be seen."""
        self._charge(round_)

    def publish_sum(
        self, round_: int, w: Vector, noisy: Vector | None, columns: int = 0
    ) -> tuple[Vector, dict[str, float]]:
        """(w after the step, private measures) for a secure sum that was charged.

        Args:
            round_: the absolute round.
            w: the shared parameters.
            noisy: the sum; None if there is none, and w stays.
            columns: as of ``publish``.
        """
        self._count(round_, w)
        if noisy is None:
            return w, {}
        return self._step(w, noisy, columns)

    def _count(self, round_: int, w: Vector) -> None:
        """Note that a round is over that began with w."""
        if self.training.average:
            self._iterates = w.copy() if self._iterates is None else self._iterates + w
        self.rounds_done = round_

    def _step(self, w: Vector, noisy: Vector, columns: int) -> tuple[Vector, dict[str, float]]:
        """What follows from a released sum: the new w, and private measures."""
        training = self.training
        total = noisy[: len(w)]
        step: float | Vector = training.steps.shared
        if training.recipe is not None:
            step = self._recipe_step(total, columns or len(w))
        moved = server_step(w, total, training.release, step)
        if self._averages_half and 2 * self.rounds_done > self._planned_rounds:
            self._iterates = moved if self._iterates is None else self._iterates + moved
        if training.metrics is None:
            return moved, {}
        # the noise of a secure sum is that of all clients in it
        added = replace(training.release, aggregation=None)
        z = training.release.usual_noise_std / training.release.clip_norm
        measures = training.metrics.decode(noisy[len(w) :], replace(added, noise_multiplier=z))
        return moved, measures

    def _recipe_step(self, total: Vector, columns: int) -> float | Vector:
        """C·g: users sent −solution/C, and the server adds g times their noisy mean to w."""
        recipe = self.training.recipe
        assert recipe is not None
        values = self.values
        release = recipe.release
        mean = (-values.size / release.denominator) * total.reshape(columns, -1)
        sigma = values.size * release.usual_noise_std / release.denominator
        gain = server_gain(mean, sigma, shares_of_columns(recipe, values, columns))
        self._variance = published_variance(self._variance, gain, sigma)
        if len(gain) == 1:
            return values.size * float(gain[0])
        return values.size * np.repeat(gain, mean.shape[1])

    @property
    def variance(self) -> Vector:
        """ν, the noise in the published w: one number, or one for each column.

        Of Poisson cohorts w is a mean over T/2 rounds.
        """
        if not self._averages_half:
            return self._variance
        return self._variance * 2 / max(1, self._planned_rounds)

    @property
    def _averages_half(self) -> bool:
        """Whether w is the mean over the second half of the rounds."""
        recipe = self.training.recipe
        return recipe is not None and recipe.release.cohort.rate < 1

    @property
    def averages(self) -> bool:
        """Whether what is published in the end is a mean over rounds."""
        return self.training.average or self._averages_half

    # --- before the first round

    @property
    def pending(self) -> list[str]:
        """What is still to be asked for before the first round."""
        recipe = self.training.recipe
        if recipe is None:
            return []
        return [name for name in recipe.before if name not in self.sums]

    def publish_before(self, name: str, total: GridSum) -> None:
        """The noisy sum, charged before it exists and written down for a restart."""
        self.charge_before(name)
        coins = coins_for(self.training.insecure_seed, name, 0)
        self.note_sum(name, total.noisy(coins))

    def charge_before(self, name: str) -> None:
        """Write a release before the first round down, before anything of it can be seen."""
        assert self.training.recipe is not None
        self._charge(0, self.training.recipe.before[name])

    def note_sum(self, name: str, noisy: Vector | None) -> None:
        """Keep a noisy sum for a restart; if there is none, zeros, which leave the prior."""
        assert self.training.recipe is not None
        if noisy is None:
            noisy = np.zeros(self.training.recipe.length(name))
        if self._journal is not None:
            self._journal.note_sum(name, noisy.tolist())
        self.sums[name] = noisy

    @property
    def values(self) -> Values:
        """u, C and k, as far as they were released."""
        recipe = self.training.recipe
        return Values() if recipe is None else values_of(recipe, self.sums)

    def _charge(self, round_: int, release: Release | None = None) -> None:
        """Write the release down in all places; only then may it be made.

        Args:
            round_: the absolute round; 0 before the first.
            release: None is that of a round.
        """
        release = release or self.training.release
        insecure = self.training.insecure_seed is not None
        if self._budget is not None:
            self._budget.charge(self.training_id, round_, release)
        if self._journal is None:
            self.ledger = self.ledger.record(release, insecure=insecure)
        else:
            self._journal.charge(round_, insecure, release)
            self.ledger = self._journal.ledger

    def simulate(self, round_: int) -> None:
        """Count the rounds up to ``round_`` as ones without a guarantee, which others have run."""
        times = round_ - self.rounds_done
        self.rounds_done = round_
        if self.training.steps.publishes:
            self.ledger = self.ledger.record(self.training.release, times, insecure=True)

    def simulate_sums(self, sums: Mapping[str, Vector]) -> None:
        """Count releases before the first round without a guarantee, which others have made."""
        assert self.training.recipe is not None
        for name, noisy in sums.items():
            if name not in self.sums:
                release = self.training.recipe.before[name]
                self.ledger = self.ledger.record(release, insecure=True)
                self.sums[name] = noisy

    def save(self, arrays: Mapping[str, bytes]) -> None:
        """Write w of the round just published, if it is due."""
        directory = self.training.checkpoint_dir
        regular = self.rounds_done % self.training.checkpoint_every == 0
        if directory is None or not (regular or self.rounds_done == self._last_round):
            return
        found = Checkpoint(
            self.rounds_done,
            dict(arrays),
            self.ledger.rounds,
            self._iterates,
            self._kept_state(),
        )
        checkpoint.save(directory, found)

    def _kept_state(self) -> dict[str, Vector]:
        """What the next round needs besides w."""
        return {} if self.training.recipe is None else {VARIANCE: self._variance}

    def between_rounds(self) -> dict[str, Vector]:
        """Everything but w that a simulation needs to go on later."""
        state = self._kept_state()
        if self._iterates is not None:
            state[ITERATES] = self._iterates
        return {**state, **{SUM + name: noisy for name, noisy in self.sums.items()}}

    def continue_after(self, round_: int, state: Mapping[str, Vector]) -> None:
        """Go on with a simulation after ``round_`` rounds, from what ``between_rounds`` gave."""
        self._iterates = state.get(ITERATES)
        self._variance = state.get(VARIANCE, self._variance)
        sums = {
            name.removeprefix(SUM): noisy for name, noisy in state.items() if name.startswith(SUM)
        }
        if sums:
            self.simulate_sums(sums)
        self.simulate(round_)

    def averaged(self, w: Vector) -> Vector:
        """The mean that is published in place of ``w``, if there is one; before round 1 ``w``."""
        if self._iterates is None:
            return w
        rounds = self.rounds_done
        if self._averages_half:
            rounds -= self._planned_rounds // 2
        return self._iterates / rounds


def headline_of(ledger: Ledger, cost: float | None = None) -> Headline:
    """What a ledger guarantees to the users it is about.

    Args:
        ledger: what was released, or is planned.
        cost: ε of it, if that is known already.
    """
    populations = [release.cohort.population for release, _ in ledger.releases]
    return Headline(
        cost=_zero_out(ledger) if cost is None else cost,
        delta=ledger.delta,
        rounds=ledger.rounds,
        insecure_rounds=ledger.insecure_rounds,
        population=max(populations, default=0),
    )


@functools.lru_cache(maxsize=64)
def _zero_out(ledger: Ledger) -> float:
    """ε under zero-out neighbours, worked out once per ledger."""
    return ledger.epsilon()
