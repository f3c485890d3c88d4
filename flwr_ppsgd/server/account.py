"""What a training has released, may release and has planned: the money of one training.

Charges are on the disk before anything is released. The statement follows from them.
"""

import functools
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.serverapp.exception import PrivacyBudgetExhausted

from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.checks import is_whole, printable, require
from flwr_ppsgd.epsilon import Bound, Relation, check_accountant
from flwr_ppsgd.ledger import MOST_ROUNDS, Ledger, affordable_rounds, release_to_dict
from flwr_ppsgd.noise import cut_probability
from flwr_ppsgd.recipe import Values, values_of
from flwr_ppsgd.server.budget import Budget
from flwr_ppsgd.server.rounds import SumRequest
from flwr_ppsgd.server.store import Checkpoint, Store
from flwr_ppsgd.signature import KEY, TrainingKey
from flwr_ppsgd.statement import (
    Headline,
    Promise,
    raised_plan,
    rounded_up,
    why_delta_is_void,
)
from flwr_ppsgd.training import Training

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it

LONGEST_ERROR = 1000  # characters of an error that the operator's notes keep


class Account:
    """The charges, the plan and the promise of one training, on disk if it has a directory.

    Args:
        training: all its settings. A recipe may be replaced by one for fewer rounds in ``plan``.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.ledger = Ledger(training.delta)
        self.rounds_done = 0
        self.last_round = -1  # of the plan; -1 if there is none
        self.checkpoint: Checkpoint | None = None  # w that was found
        self._begun = False  # whether this start of the server is written down
        self._affordable = 0  # the number of rounds that are known to be within max_epsilon
        self._store = Store(training.checkpoint_dir)
        self._budget: Budget | None = None
        self._load()

    # --- what outlives the process

    def close(self) -> None:
        """Give up the lock on the checkpoint directory."""
        if self.training.checkpoint_dir is not None:
            self._store.close()
        if self._budget is not None:
            self._budget.close()

    def reopen(self) -> bool:
        """Take the lock again after ``close``, and go on from the disk as after a restart.

        Whether that was needed.
        """
        budget_open = self._budget is None or self._budget.is_open
        if self._store.is_open and budget_open:
            return False
        self._store.open()
        self._load()
        return True

    def _load(self) -> None:
        try:
            self._resume()
            self._join_budget()
        except BaseException:
            self.close()
            raise

    def _resume(self) -> None:
        """Go on from what the store holds."""
        if self.training.recipe is None:
            self._settle()
        found = self._store.load()
        self.ledger = self._store.ledger(self.training.delta)
        self._begun = False
        self.checkpoint = found
        if found is not None:
            self.rounds_done = found.round
            charged = self.ledger.rounds
            log.info("Continuing after round %d; %d rounds are charged", found.round, charged)

    def _settle(self) -> None:
        """Fix what the guarantee rests on; ValueError if the training began with something else."""
        recipe = self.training.recipe
        before = {} if recipe is None else recipe.before
        self._store.settle(
            delta=self.training.delta,
            release=self.training.release,
            before={name: release_to_dict(release) for name, release in before.items()},
        )

    def _join_budget(self) -> None:
        """Join the budget that the training is under, if there is one."""
        directory = self.training.budget_dir
        joined = self._store.notes("budget")
        if directory is None:
            if joined:
                _, place = joined[0]
                raise ValueError(
                    f"this training is under the budget in {place}: set budget_dir to it"
                )
            return
        self._budget = Budget(directory)
        self._budget.admit(self.training.release, self.training.delta, self.training.insecure)
        if not joined and self.ledger.rounds:
            raise ValueError(
                f"{self.training.checkpoint_dir} has {self.ledger.rounds} charges that the budget "
                f"in {directory} never saw: a training joins a budget before its first round; "
                "start anew in another checkpoint_dir"
            )
        if joined and joined[0][0] != self._budget.owner:
            raise ValueError(
                f"this training is under the budget in {joined[0][1]}, not under the one in "
                f"{directory}: set budget_dir to the former"
            )
        if not joined:
            self._store.note("budget", [self._budget.owner, str(directory.resolve())])
        counts: Counter[Release] = Counter()
        for (release, _), times in self._store.charges().items():
            counts[release] += times
        self._budget.catch_up(self.training_id, counts)

    @property
    def training_id(self) -> int:
        """Names this training to its clients."""
        return self._store.training

    @functools.cached_property
    def key(self) -> TrainingKey:
        """What Orders are signed with."""
        return TrainingKey(self._store.keep(KEY, lambda: TrainingKey.new().private))

    def starts(self) -> tuple[int, ...]:
        """The first round of every start of the server so far, this one last.

        On disk before anyone hears of it. Empty without ``checkpoint_dir``: such a server cannot go
        on after it has died, so no round comes twice.
        """
        if self.training.checkpoint_dir is None:
            return ()
        if not self._begun:
            self._store.note("start", self.rounds_done + 1)
            self._begun = True
        return tuple(self._store.notes("start"))

    def reserve(self, nbytes: int) -> None:
        """Make sure that there is room on the disk for all that a round writes.

        Args:
            nbytes: the size of w and of what is kept beside it.
        """
        self._store.reserve(nbytes)
        if self._budget is not None:
            self._budget.reserve()

    def save(self, arrays: Mapping[str, bytes], state: Mapping[str, Vector]) -> None:
        """Write w of the round just published, if it is due.

        Args:
            arrays: w as named serialised arrays.
            state: what the next round needs besides w.
        """
        if self.training.checkpoint_dir is None:
            return
        due = self.rounds_done % self.training.checkpoint_every == 0
        if due or self.rounds_done == self.last_round:
            self._store.save(self.rounds_done, arrays, state)

    # --- what was released before the first round

    @property
    def sums(self) -> dict[str, Vector]:
        """The noisy sums, by what was asked for."""
        return {name: np.array(numbers) for name, numbers in self._store.notes("sum")}

    def note_sum(self, name: str, noisy: Vector) -> None:
        """Keep a noisy sum for a restart: nobody is asked again."""
        self._store.note("sum", [name, noisy.tolist()])

    @property
    def pending(self) -> list[str]:
        """What is still to be asked for before the first round."""
        recipe = self.training.recipe
        if recipe is None:
            return []
        known = self.sums
        return [name for name in recipe.before if name not in known]

    @property
    def values(self) -> Values:
        """u, C and k, as far as they were released."""
        recipe = self.training.recipe
        return Values() if recipe is None else values_of(recipe, self.sums)

    # --- the plan and the budget

    def plan(self, wanted: int | None, default: int) -> int:
        """Fix the number of rounds before the first one: as many as wanted and as can be paid for.

        ε is stated for the planned rounds even if someone stops the run earlier: a stop chosen by
        looking at results is itself a function of the data.

        Args:
            wanted: the total, restarts included; None if nobody has said a number.
            default: then, without a recipe.
        """
        self.reopen()
        void = why_delta_is_void(self.training.delta, self.training.population)
        if void:
            log.warning("NO GUARANTEE: %s", void)
        rounds = self._within_recipe(wanted) if self.training.recipe else wanted
        rounds = default if rounds is None else rounds
        whole = is_whole(rounds) and rounds >= 0
        rule = "num_rounds must be a whole number that is not negative"
        require(whole, rule, rounds, "it is the total, restarts included")
        self.last_round = self._within_budget_dir(self._within_max_epsilon(rounds))
        if self.training.steps.publishes:
            self._plan_charges(self.last_round)
        return self.last_round

    def _within_recipe(self, wanted: int | None) -> int:
        """The recipe's rounds, or fewer: then the budget is spent in those."""
        recipe = self.training.recipe
        assert recipe is not None
        rounds = recipe.rounds
        if wanted is not None and wanted > rounds:
            log.info("auto needs %d rounds: num_rounds=%d is not used", rounds, wanted)
        elif wanted is not None and wanted < rounds:
            rounds = wanted
            fewer = self.training.with_rounds(wanted) if wanted > 0 else self.training
            settled = self._store.setting("release")
            if settled in (None, release_to_dict(fewer.release)):
                self.training = fewer
        if rounds > 0:
            self._settle()
        return rounds

    @functools.cached_property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for, in all; None if there is no limit."""
        return None if self._unlimited else self._paid_by_max_epsilon(MOST_ROUNDS)

    @property
    def _unlimited(self) -> bool:
        return self.training.max_epsilon is None or not self.training.steps.publishes

    def _paid_by_max_epsilon(self, at_most: int) -> int:
        """How many rounds, those charged included, beside everything else that is released."""
        assert self.training.max_epsilon is not None
        release = self.training.release
        others = [each for each in self.ledger.releases if each[0] != release]
        return affordable_rounds(
            max_epsilon=self.training.max_epsilon,
            delta=self.training.delta,
            release=release,
            at_most=at_most,
            also=[*others, *self._releases_before()],
        )

    @property
    def _charged_rounds(self) -> int:
        """How many of all charges are for rounds: a round that is charged twice counts twice."""
        release = self.training.release
        return sum(times for charged, times in self.ledger.releases if charged == release)

    def _releases_before(self) -> list[tuple[Release, int]]:
        """What is still to be released before the first round, each once."""
        recipe = self.training.recipe
        return [] if recipe is None else [(recipe.before[name], 1) for name in self.pending]

    def _within_max_epsilon(self, rounds: int) -> int:
        """How many of ``rounds`` rounds, counted over the whole training, max_epsilon pays for."""
        if self._unlimited:
            return rounds
        ahead = max(0, rounds - self.rounds_done)
        self._affordable = self._paid_by_max_epsilon(self._charged_rounds + ahead)
        left = max(0, self._affordable - self._charged_rounds)
        paid = min(rounds, self.rounds_done + left)
        if paid < rounds:
            log.warning(
                "The budget max_epsilon=%g pays for %d of %d rounds: the run ends there. For all "
                "of them raise noise_multiplier (now %g), sample fewer users, or raise "
                "max_epsilon.",
                self.training.max_epsilon,
                paid,
                rounds,
                self.training.release.noise_multiplier,
            )
        return paid

    def _within_budget_dir(self, rounds: int) -> int:
        """How many of ``rounds`` rounds the budget of all trainings has room for now."""
        if self._budget is None or not self.training.steps.publishes:
            return rounds
        release = self.training.release
        room = self.rounds_done + self._budget.affords(release, self._releases_before())
        if room < rounds:
            log.warning(
                "The budget in %s has room for %d of %d rounds: the run ends there. For more raise "
                "noise_multiplier (now %g), or sample fewer users.",
                self._budget.directory,
                room,
                rounds,
                release.noise_multiplier,
            )
        return min(rounds, room)

    @property
    def planned_charges(self) -> int:
        """The largest number of charges that was planned."""
        return max((plan["charges"] for plan in self._store.notes("plan")), default=0)

    @property
    def planned_rounds(self) -> int:
        """The largest number of rounds that was planned."""
        return max((plan["rounds"] for plan in self._store.notes("plan")), default=0)

    def _plan_charges(self, rounds: int) -> None:
        """Write the plan down. One that grows after any charge is a choice, and a caveat."""
        charged = self.ledger.rounds
        before = self.planned_rounds
        stated = self.stated()
        # a round that is charged twice counts twice
        charges = charged + max(0, rounds - self.rounds_done) + len(self.pending)
        if charges > self.planned_charges or rounds > before:
            charges = max(charges, self.planned_charges)
            self._store.note("plan", {"charges": charges, "rounds": max(rounds, before)})
        if charged and rounds > before and self._budget is None:
            self.note_caveat(raised_plan(stated, self.stated(), charged))

    def check(self, request: SumRequest) -> None:
        """PrivacyBudgetExhausted before anything is sent for a sum that the budget cannot pay."""
        release = request.release
        if not self.training.steps.publishes:
            return
        if self._budget is not None:
            self._budget.check(request.round, release)
        if self._unlimited:
            return
        if release == self.training.release:
            charged = self._charged_rounds
            if charged >= self._affordable:  # look far enough ahead not to ask again soon
                self._affordable = self._paid_by_max_epsilon(2 * charged + 1)
            if charged < self._affordable:
                return
        limit = self.training.max_epsilon
        after = self.ledger.record(release).epsilon()
        assert limit is not None
        if release != self.training.release and after <= limit:
            return
        asked = f"round {request.round}" if request.round else f"asking for the {request.what}"
        raise PrivacyBudgetExhausted(
            f"{asked} would bring epsilon to {rounded_up(after)} at delta={self.ledger.delta:g}, "
            f"above max_epsilon={limit:g} ({rounded_up(self.ledger.epsilon())} already spent). Run "
            "fewer rounds, sample fewer users, or raise noise_multiplier (now "
            f"{release.noise_multiplier:g})."
        )

    def charge(self, request: SumRequest) -> None:
        """Write a release down in all places; only then may it be made."""
        if not self.training.steps.publishes:
            return
        release = request.release
        insecure = self.training.insecure
        if self._budget is not None:
            self._budget.charge(self.training_id, request.round, release)
        self._store.charge(request.round, release, insecure=insecure)
        self.ledger = self.ledger.record(release, insecure=insecure)

    def count_simulated(self, round_: int) -> None:
        """Count the rounds up to ``round_``, which an engine has run without a guarantee."""
        times = round_ - self.rounds_done
        self.rounds_done = round_
        if self.training.steps.publishes:
            self.ledger = self.ledger.record(self.training.release, times, insecure=True)

    # --- what is promised

    def stated(self) -> Ledger:
        """The ledger for which ε is stated: what was released, and planned rounds that were not."""
        insecure = self.training.insecure
        missing = max(0, self.planned_charges - self.ledger.rounds)
        ledger = self.ledger
        for release, times in self._releases_before() if missing else ():
            ledger = ledger.record(release, times, insecure=insecure)
            missing -= times
        return ledger.record(self.training.release, missing, insecure=insecure)

    def _headline(self) -> Headline:
        stated = self.stated()
        secure = self.training.release.aggregation
        head = replace(
            headline_of(stated),
            population=self.training.population,
            unit="node" if self._caveats("node") else "user",
            secure=secure,
        )
        if self._budget is not None:  # its trainings together have no bound against all others
            allowance = self._budget.allowance
            exchanged = allowance.epsilon_replace_one()
            return replace(head, cost=allowance.epsilon, replace_one=exchanged)
        head = replace(head, replace_one=_epsilon_of(stated, "replace-one"))
        if secure is None:
            return head
        pooled = stated.pooled_epsilon()
        exchanged = stated.pooled_epsilon("replace-one")
        return replace(head, pooled=pooled, pooled_replace_one=exchanged)

    def promise_to_clients(self) -> tuple[float, str]:
        """ε and the promise in one line; nothing is promised if no number of rounds was planned."""
        if self.training.steps.publishes and not self.planned_charges:
            return math.inf, ""
        head = self._headline()
        return head.epsilon, head.in_one_line()

    def promise(self, size: int = 0, simulation: str = "", terms: tuple[str, ...] = ()) -> Promise:
        """Everything that is stated about this training.

        Args:
            size: the number of coordinates that each release has.
            simulation: why this is a simulation; empty if it is none.
            terms: further terms of a simulation.
        """
        check_accountant()
        stated = self.stated()
        head = replace(self._headline(), simulation=simulation)
        # δ is the total: what finite precision takes is paid from it
        cut = cut_probability(size, stated.rounds, self.training.release.noise_shares)
        if self._budget is None:
            bound = stated.bound_with_cut(cut)
            exchanged = stated.bound_with_cut(cut, "replace-one").epsilon
            head = replace(head, cost=bound.epsilon, replace_one=exchanged)
            by_rdp = stated.epsilon(method="rdp")
        else:
            bound = Bound(head.cost, "the budget's filter")
            by_rdp = head.cost
        return Promise(
            headline=head,
            release=self.training.release,
            releases=stated.releases,
            publishes=self.training.steps.publishes,
            method=bound.method,
            rdp=by_rdp,
            paper_epsilon=stated.paper_epsilon(),
            delta_taken_by_cap=stated.delta_added(),
            delta_taken_by_cap_replace_one=stated.delta_added("replace-one"),
            delta_taken_by_precision=cut * (1 + math.exp(min(bound.epsilon, 600.0))),
            delta_taken_by_neighbours=stated.failure,
            rounds_trained=self.rounds_done,
            rounds_charged=self.ledger.rounds,
            metrics=self.training.metrics,
            recipe=self.training.recipe,
            values=self.values,
            caveats=self._caveat_sentences(),
            evaluated=bool(self._store.notes("evaluation")),
            terms=terms,
            ledger=json.loads(self.ledger.to_json()),
        )

    def epsilon_so_far(self) -> float:
        """An upper bound on what is guaranteed, cheap enough for every round.

        At most what is stated for the plan; infinite if nothing is guaranteed.
        """
        head = headline_of(self.ledger, self.ledger.quick_epsilon())
        if head.void or not self.planned_charges:
            return head.epsilon
        return min(head.cost, _epsilon_of(self.stated()))

    def note_evaluation(self) -> None:
        """From now on every statement says that there was evaluation on client data."""
        if not self._store.notes("evaluation"):
            self._store.note("evaluation", True)

    def note_caveat(self, caveat: str, unit: str = "user") -> None:
        """From now on every statement says this; each caveat once.

        Args:
            caveat: the words; nothing is noted if they are empty.
            unit: who is protected: "user", or "node" if a user may come back as another node.
        """
        if caveat:
            self._store.note_caveat(caveat, unit)

    def _caveats(self, unit: str) -> list[str]:
        return [text for text, protected in self._store.caveats.items() if protected == unit]

    def _caveat_sentences(self) -> tuple[str, ...]:
        shared = self._budget.caveats if self._budget is not None else ()
        texts = dict.fromkeys([*self._caveats("user"), *shared])
        found = [f"{text[:1].upper()}{text[1:]}." for text in texts]
        lost = "; ".join(self._caveats("node"))
        if lost:
            found.insert(0, f"User-level privacy across restarts of a node is NOT claimed: {lost}.")
        return tuple(found)

    # --- what only the operator may see

    def where_facts_are(self) -> str:
        """For whoever looks for clients' replies and errors in the log."""
        directory = self.training.checkpoint_dir
        if directory is not None:
            return f"`ppsgd status {directory}` shows clients' replies and errors"
        return "clients' replies and errors are shown by `ppsgd status`, if checkpoint_dir is set"

    def note_problem(self, text: object) -> None:
        """What needs the operator and did not end the run."""
        words = printable(text, LONGEST_ERROR)
        self.tell_operator({"problem": words}, words, logging.WARNING)

    def note_error(self, error: BaseException) -> None:
        """What ended the run; whoever raised it shows it too."""
        words = printable(f"{type(error).__name__}: {error}", LONGEST_ERROR)
        self.tell_operator({"error": words}, words, logging.DEBUG)

    def note_failed_evaluations(self, round_: int, failures: Sequence[str], others: int) -> None:
        """How many evaluations failed, if any did, and why the first.

        Args:
            round_: the absolute round.
            failures: what the clients said.
            others: the number of evaluations that did not fail.
        """
        if failures:
            self.note_problem(
                f"round {round_}: {len(failures)} of {len(failures) + others} evaluations failed; "
                f"the first: {failures[0]}"
            )

    def tell_operator(self, fact: Mapping[str, Any], words: str, level: int) -> None:
        """Sampling protects users only as long as nobody knows who took part.

        So facts are not in Flower's log, which ``flwr log`` shows to whoever may submit runs,
        unless coins come from a known seed and there is no secret.
        """
        if self.training.checkpoint_dir is not None:
            self._store.record_fact(fact)
            return
        shown = level if self.training.insecure else logging.DEBUG
        log.log(shown, "server-private: %s", words)


def headline_of(ledger: Ledger, cost: float | None = None) -> Headline:
    """What a ledger guarantees to the users it is about.

    Args:
        ledger: what was released, or is planned.
        cost: ε of it, if that is known already.
    """
    populations = [release.cohort.population for release, _ in ledger.releases]
    return Headline(
        cost=_epsilon_of(ledger) if cost is None else cost,
        delta=ledger.delta,
        rounds=ledger.rounds,
        insecure_rounds=ledger.insecure_rounds,
        population=max(populations, default=0),
    )


@functools.lru_cache(maxsize=64)
def _epsilon_of(ledger: Ledger, relation: Relation = "zero-out") -> float:
    """ε, worked out once per ledger."""
    return ledger.epsilon(relation)
