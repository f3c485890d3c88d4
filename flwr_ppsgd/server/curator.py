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

from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.epsilon import Bound, check_accountant
from flwr_ppsgd.noise import GridSum, coins_for, residual_delta
from flwr_ppsgd.optimizers import Released, State
from flwr_ppsgd.privacy import MOST_ROUNDS, Ledger, affordable_rounds, release_to_dict
from flwr_ppsgd.promise import Headline, Promise, rounded_up
from flwr_ppsgd.server import checkpoint
from flwr_ppsgd.server.budget import Budget
from flwr_ppsgd.server.checkpoint import Checkpoint
from flwr_ppsgd.server.journal import Journal, behind
from flwr_ppsgd.server.training import Training
from flwr_ppsgd.signature import KEY, TrainingKey
from flwr_ppsgd.tuning import BELOW

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it

VOTES = "votes"  # in the state of a simulation
ITERATES = "iterates"
CLIP_NORM = "clip-norm"  # in the state of a checkpoint, beside the optimizer's own vectors


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
        self._optimizing: State | None = None  # of the optimizer
        self.clip_norm = training.release.clip_norm  # of the next round, if it adapts
        self.votes: Vector | None = None  # the noisy counts of the vote, once it was held
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
        if journal.story.vote is not None:
            self.votes = np.array(journal.story.vote)
        self._restore(found.state if found else {})
        if found is not None:
            charged = self.ledger.rounds
            log.info("Continuing after round %d; %d rounds are charged", found.round, charged)

    def _restore(self, state: Mapping[str, Vector]) -> None:
        """Go on with the optimizer's state, and the clip norm, of the checkpoint."""
        kept = dict(state)
        clip_norm = kept.pop(CLIP_NORM, None)
        self.clip_norm = self.training.release.clip_norm
        if clip_norm is not None:
            self.clip_norm = float(clip_norm[0])
        self._optimizing = kept or None

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
        """What was charged for anything but rounds, and the vote that is still to come."""
        release = self.training.release
        others = [each for each in self.ledger.releases if each[0] != release]
        return [*others, *self._coming_vote()]

    def _coming_vote(self) -> list[tuple[Release, int]]:
        """The vote that is still to come, as a release with how often; nothing if there is none."""
        if self.training.vote is None or not self.vote_pending:
            return []
        return [(self.training.vote.release, 1)]

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
        charges = charged + max(0, rounds - self.rounds_done) + self.vote_pending
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
        fits = self._budget.affords(self.training.release, self._coming_vote())
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

    def check_vote(self) -> None:
        """Raise before anything is sent in a vote that the budget does not pay for."""
        self.reopen()
        self._reserve()
        for vote, _ in self._coming_vote():
            if self._budget is not None:
                self._budget.check(0, vote)
            limit = self.training.max_epsilon
            after = self.ledger.record(vote).epsilon()
            if limit is not None and after > limit:
                raise PrivacyBudgetExhausted(
                    f"the vote before round 1 would bring epsilon to {rounded_up(after)} at "
                    f"delta={self.ledger.delta:g}, above max_epsilon={limit:g}. Give it more "
                    f"noise (noise_multiplier is {vote.noise_multiplier:g}), or leave it out."
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
        for vote, times in self._coming_vote() if missing else ():
            ledger = ledger.record(vote, times, insecure=insecure)
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
            metrics=self.training.measures,
            vote=self.training.vote,
            voted_size=self.voted_size,
            personal=self.training.personal,
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
        return GridSum(size, self.training.release, self.training.measures)

    @property
    def scale(self) -> float:
        """C_t/C: by which a gradient is divided before it is summed, if the clip norm adapts."""
        return self.clip_norm / self.training.release.clip_norm

    def encoded(self, gradient: Vector, measures: Mapping[str, float]) -> Vector:
        """What of one user is summed: the gradient on the scale of C, then private measures."""
        if self.scale != 1.0:
            with np.errstate(all="ignore"):
                gradient = np.divide(gradient, self.scale, dtype=np.float64)
        kinds = self.training.measures
        if kinds is None:
            return gradient
        return np.append(gradient, kinds.encode(measures, self.training.release.clip_norm))

    def publish(self, round_: int, w: Vector, total: GridSum) -> tuple[Vector, dict[str, float]]:
        """(w after the optimizer's step on g·k/D, private measures).

        Charged before either exists. At α = 0 nothing is released or charged.
        """
        if not self.training.steps.publishes:
            self._count(round_, w)
            return w, {}
        self.charge_round(round_, len(w))
        self._count(round_, w)
        noisy = total.noisy(coins_for(self.training.insecure_seed, "noise", round_))
        return self._moved(w, noisy, self.training.release)

    def charge_round(self, round_: int, size: int) -> None:
        """Write a round down, before anything of it can be seen.

        Args:
            round_: the absolute round.
            size: of w; ValueError, before anything is charged, if the optimizer is of another.
        """
        self._state_for(size)
        self._charge(round_)

    def publish_sum(
        self, round_: int, w: Vector, noisy: Vector | None, counted: int
    ) -> tuple[Vector, dict[str, float]]:
        """(w after the optimizer's step, private measures) for a secure sum that was charged.

        The noise is that of all clients in the sum, each with its share, not only of those whom the
        guarantee counts on: its variance is ``counted``/h times what is charged for.

        Args:
            round_: the absolute round.
            w: the shared parameters.
            noisy: the sum; None if there is none, and w stays.
            counted: how many clients are in it.
        """
        self._count(round_, w)
        if noisy is None:
            return w, {}
        release = self.training.release
        more = math.sqrt(counted / release.noise_shares)
        added = replace(release, noise_multiplier=more * release.noise_multiplier)
        return self._moved(w, noisy, added)

    def _count(self, round_: int, w: Vector) -> None:
        """Note that a round is over that began with w."""
        if self.training.average:
            self._iterates = w.copy() if self._iterates is None else self._iterates + w
        self.rounds_done = round_

    def _moved(self, w: Vector, noisy: Vector, added: Release) -> tuple[Vector, dict[str, float]]:
        """What follows from a released sum: the new w, measures, and the next clip norm.

        Args:
            w: the shared parameters.
            noisy: the sum.
            added: the release, with the noise that was really added.
        """
        training = self.training
        state = self._state_for(len(w))
        gradient = noisy[: len(w)]
        if self.scale != 1.0:
            gradient = gradient * self.scale
        deviation = added.noise_std * self.scale / added.denominator
        released = Released(gradient, training.release, deviation, self.clip_norm)
        step = training.steps.shared * self.size
        moved, self._optimizing = training.optimizer.moved(w, released, step, state)
        if training.measures is None:
            return moved, {}
        measures = training.measures.decode(noisy[len(w) :], added)
        if training.adaptive_clip is not None:
            measures["clip-norm"] = self.clip_norm
            first = training.release.clip_norm
            bit = measures[BELOW]
            self.clip_norm = training.adaptive_clip.after(self.clip_norm, bit, first)
        return moved, measures

    def _state_for(self, size: int) -> State:
        """The optimizer's state; ValueError, before anything is charged, if it is another's."""
        fresh = self.training.optimizer.initial(size)
        if self._optimizing is None:
            return fresh
        kept = {name: vector.shape for name, vector in self._optimizing.items()}
        if kept != {name: vector.shape for name, vector in fresh.items()}:
            raise ValueError(
                f"the training so far was optimized with {sorted(kept)} and "
                f"{type(self.training.optimizer).__name__} keeps {sorted(fresh)}, or other sizes: "
                "go on with the same optimizer, or start anew in another checkpoint_dir"
            )
        return self._optimizing

    # --- the vote

    @property
    def vote_pending(self) -> bool:
        """Whether a vote is to be held before the first round, and was not."""
        wanted = self.training.vote is not None and self.training.steps.publishes
        return wanted and self.votes is None

    def publish_vote(self, total: GridSum) -> Vector:
        """The noisy counts, charged before they exist and written down for a restart."""
        self.charge_vote()
        return self.note_votes(total.noisy(coins_for(self.training.insecure_seed, "vote", 0)))

    def charge_vote(self) -> None:
        """Write the vote down, before anything of it can be seen."""
        assert self.training.vote is not None
        self._charge(0, self.training.vote.release)

    def note_votes(self, votes: Vector | None) -> Vector:
        """Keep the noisy counts for a restart; zeros, from which nothing follows, if None."""
        assert self.training.vote is not None
        if votes is None:
            votes = np.zeros(self.training.vote.powers)
        if self._journal is not None:
            self._journal.note_vote(votes.tolist())
        self.votes = votes
        return votes

    @property
    def voted_size(self) -> float | None:
        """The typical size of users' own solutions; None if no vote has found one."""
        if self.votes is None or self.training.vote is None:
            return None
        return self.training.vote.typical(self.votes)

    @property
    def size(self) -> float:
        """The unit of the server's steps: what the vote found, or the default."""
        voted = self.voted_size
        return self.training.default_size if voted is None else voted

    def _charge(self, round_: int, release: Release | None = None) -> None:
        """Write the release down in all places; only then may it be made.

        Args:
            round_: the absolute round; 0 for a vote.
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

    def simulate_vote(self, votes: Vector) -> None:
        """Count a vote without a guarantee, which others have held."""
        assert self.training.vote is not None
        self.ledger = self.ledger.record(self.training.vote.release, insecure=True)
        self.votes = votes

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
        state = dict(self._optimizing or {})
        if self.training.adaptive_clip is not None:
            state[CLIP_NORM] = np.array([self.clip_norm])
        return state

    def between_rounds(self) -> dict[str, Vector]:
        """Everything but w that a simulation needs to go on later."""
        state = self._kept_state()
        for name, vector in ((VOTES, self.votes), (ITERATES, self._iterates)):
            if vector is not None:
                state[name] = vector
        return state

    def continue_after(self, round_: int, state: Mapping[str, Vector]) -> None:
        """Go on with a simulation after ``round_`` rounds, from what ``between_rounds`` gave."""
        kept = dict(state)
        self.votes = kept.pop(VOTES, None)
        self._iterates = kept.pop(ITERATES, None)
        self._restore(kept)
        if self.votes is not None:
            self.simulate_vote(self.votes)
        self.simulate(round_)

    def averaged(self, w: Vector) -> Vector:
        """The average iterate so far, if it is kept; else ``w``, also before the first round."""
        return w if self._iterates is None else self._iterates / self.rounds_done


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
