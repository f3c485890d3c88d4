"""What a training has released, may release and has planned.

Charges are on the disk before anything is released. The statement follows from them.
"""

import functools
import logging
import math
from collections.abc import Mapping

import numpy as np
from flwr.serverapp.exception import PrivacyBudgetExhausted

from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.checks import is_whole, require
from flwr_ppsgd.epsilon import check_accountant
from flwr_ppsgd.ledger import MOST_ROUNDS, Ledger, affordable_rounds, release_to_dict
from flwr_ppsgd.noise import cut_probability
from flwr_ppsgd.recipe import Recipe, RecipeValues, values_of
from flwr_ppsgd.server.budget import Budget
from flwr_ppsgd.server.facts import OperatorFacts
from flwr_ppsgd.server.rounds import SumRequest
from flwr_ppsgd.server.store import Checkpoint, Store
from flwr_ppsgd.signature import KEY, TrainingKey
from flwr_ppsgd.statement import Promise, raised_plan, rounded_up, why_delta_is_void
from flwr_ppsgd.training import Training

log = logging.getLogger("flwr.ppsgd")  # below Flower's own logger, so that its handlers show it


class ServerAccount:
    """The charges, the plan and the promise of one training, on disk if it has a directory.

    Args:
        training: all its settings. A recipe may be replaced by one for fewer rounds in ``plan``.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.ledger = Ledger(training.delta)
        self.training_id = 0  # names this training to its clients
        self.rounds_done = 0
        self.last_round = -1  # of the plan; -1 if there is none
        self.checkpoint: Checkpoint | None = None  # w of the last round, as far as it is known
        self._is_saved = True  # whether the store has it
        self.state: dict[str, Vector] = {}  # what the next round needs besides w
        self._begun = False  # whether this start of the server is written down
        # what Orders promised last, and for which ledger and unit
        self._promised: tuple[tuple[Ledger, str], tuple[float, str]] | None = None
        self._affordable = 0  # the number of rounds that are known to be within max_epsilon
        self._store = Store(training.checkpoint_dir)
        self.facts = OperatorFacts(self._store, training)
        self._budget: Budget | None = None
        self._load()

    # --- what outlives the process

    def close(self) -> None:
        """Keep the last w, if that was not due yet, and give up the lock on the directory."""
        try:
            if self._store.is_open:
                self._save_checkpoint()
        finally:
            self._store.close()
            if self._budget is not None:
                self._budget.close()

    def reopen(self) -> None:
        """Take the lock again after ``close``, and go on from the disk as after a restart."""
        if self._store.is_open and (self._budget is None or self._budget.is_open):
            return
        self._store.open()
        self._load()

    def _load(self) -> None:
        """Go on from what the store holds."""
        try:
            if self.training.recipe is None:
                self._fix_settings()
            found = self._store.load()
            self.training_id = self._store.owner
            self.ledger = self._store.ledger(self.training.delta)
            self._begun = False
            if found is not None:
                charged = self.ledger.rounds
                log.info("Continuing after round %d; %d rounds are charged", found.round, charged)
            if self.training.checkpoint_dir is not None:
                self.checkpoint = found
                self._is_saved = True
                self.rounds_done = found.round if found else 0
                self.state = dict(found.state) if found else {}
            self._join_budget()
        except BaseException:
            self.close()
            raise

    def _fix_settings(self) -> None:
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
        training = self.training
        directory = training.budget_dir
        joined = self._store.notes("budget")
        owner, place = joined[0] if joined else (None, None)
        if directory is not None:
            self._budget = Budget(directory)
            insecure = training.insecure_seed is not None
            self._budget.admit(training.release, training.delta, insecure)
        if joined and (self._budget is None or owner != self._budget.owner):
            raise ValueError(
                f"this training is under the budget in {place}, not under the one in "
                f"budget_dir={directory}: set budget_dir to the former"
            )
        if self._budget is None:
            return
        if not joined:
            if self.ledger.rounds:
                raise ValueError(
                    f"{training.checkpoint_dir} has {self.ledger.rounds} charges that the budget "
                    f"in {directory} never saw: a training joins a budget before its first round; "
                    "start anew in another checkpoint_dir"
                )
            self._store.note("budget", [self._budget.owner, str(self._budget.directory.resolve())])
        self._budget.catch_up(self.training_id, self._store.charges())

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
        """Take room on the disk for w and what is kept beside it, and for the rows of a round."""
        self._store.reserve(nbytes)
        if self._budget is not None:
            self._budget.reserve()

    def save(self, arrays: Mapping[str, bytes]) -> None:
        """Keep w of the round just published, on the disk if it is due; else ``close`` does.

        Args:
            arrays: w as named serialised arrays.
        """
        self.checkpoint = Checkpoint(self.rounds_done, dict(arrays), dict(self.state))
        self._is_saved = False
        due = self.rounds_done % self.training.checkpoint_every == 0
        if due or self.rounds_done == self.last_round:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        if self.checkpoint is not None and not self._is_saved:
            self._store.save(self.checkpoint)
            self._is_saved = True

    # --- what was released before the first round

    def note_sum(self, name: str, noisy: Vector) -> None:
        """Keep a noisy sum for a restart: nobody is asked again."""
        self._store.note("sum", [name, noisy.tolist()])

    @property
    def pending_releases(self) -> dict[str, Release]:
        """What is still to be released before the first round, each once."""
        recipe = self.training.recipe
        if recipe is None:
            return {}
        known = dict(self._store.notes("sum"))
        return {name: each for name, each in recipe.before.items() if name not in known}

    @property
    def values(self) -> RecipeValues:
        """u, C and k, as far as they were released."""
        recipe = self.training.recipe
        if recipe is None:
            return RecipeValues()
        sums = {name: np.array(numbers) for name, numbers in self._store.notes("sum")}
        return values_of(recipe, sums)

    # --- the plan and the budget

    @property
    def planned_rounds(self) -> int:
        """The largest number of rounds that was planned."""
        return self._store.planned[1]

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
        rounds = default if wanted is None else wanted
        whole = is_whole(rounds) and rounds >= 0
        rule = "num_rounds must be a whole number that is not negative"
        require(whole, rule, rounds, "it is the total, restarts included")
        if self.training.recipe is not None:
            rounds = self._within_recipe(self.training.recipe, wanted)
        self.last_round = self._within_budgets(rounds)
        if self.training.steps.publishes:
            self._plan_charges(self.last_round)
        return self.last_round

    def _within_recipe(self, recipe: Recipe, wanted: int | None) -> int:
        """The recipe's rounds, or fewer: then the budget is spent in those."""
        rounds = recipe.rounds
        if wanted is not None and wanted > rounds:
            log.info("auto needs %d rounds: num_rounds=%d is not used", rounds, wanted)
        elif wanted is not None and wanted < rounds:
            rounds = wanted
            fewer = self.training.with_rounds(wanted) if wanted > 0 else self.training
            if self._store.setting("release") in (None, release_to_dict(fewer.release)):
                self.training = fewer
        if rounds > 0:
            self._fix_settings()
        return rounds

    def affordable_rounds(self, at_most: int = MOST_ROUNDS) -> int | None:
        """How many rounds the budget pays for, those charged included; None if it has no limit."""
        limit = self.training.max_epsilon
        if limit is None or not self.training.steps.publishes:
            return None
        release = self.training.release
        others = [each for each in self.ledger.releases if each[0] != release]
        return affordable_rounds(
            max_epsilon=limit,
            delta=self.training.delta,
            release=release,
            at_most=at_most,
            also=[*others, *((each, 1) for each in self.pending_releases.values())],
        )

    def _charged_rounds(self) -> int:
        """How many of all charges are for rounds: a round that is charged twice counts twice."""
        release = self.training.release
        return sum(times for charged, times in self.ledger.releases if charged == release)

    def _within_budgets(self, rounds: int) -> int:
        """How many of ``rounds`` rounds, counted over the whole training, are paid for."""
        if not self.training.steps.publishes:
            return rounds
        charged = self._charged_rounds()
        ahead = max(0, rounds - self.rounds_done)
        affordable = self.affordable_rounds(at_most=charged + ahead)
        if affordable is not None:
            self._affordable = affordable
            paid = self.rounds_done + max(0, affordable - charged)
            payer = f"max_epsilon={self.training.max_epsilon:g} pays for"
            rounds = self._rounds_paid_for(rounds, paid, payer)
        if self._budget is not None:
            before = [(each, 1) for each in self.pending_releases.values()]
            room = self._budget.affords(self.training.release, before)
            payer = f"in {self._budget.directory} has room for"
            rounds = self._rounds_paid_for(rounds, self.rounds_done + room, payer)
        return rounds

    def _rounds_paid_for(self, rounds: int, paid: int, payer: str) -> int:
        """The smaller number, with a warning if a budget does not pay for all rounds."""
        if paid >= rounds:
            return rounds
        log.warning(
            "The budget %s %d of %d rounds: the run ends there. For all of them raise "
            "noise_multiplier (now %g), sample fewer users, or allow a larger epsilon.",
            *(payer, paid, rounds, self.training.release.noise_multiplier),
        )
        return paid

    def _plan_charges(self, rounds: int) -> None:
        """Write the plan down. One that grows after any charge is a choice, and a caveat."""
        charged = self.ledger.rounds
        planned, before = self._store.planned
        stated = self.stated_ledger()
        # a round that is charged twice counts twice
        charges = charged + max(0, rounds - self.rounds_done) + len(self.pending_releases)
        if charges > planned or rounds > before:
            plan = {"charges": max(charges, planned), "rounds": max(rounds, before)}
            self._store.note("plan", plan)
        if charged and rounds > before and self._budget is None:
            caveat = raised_plan(stated, self.stated_ledger(), charged)
            if caveat:
                self._store.note_caveat(caveat)

    def check(self, request: SumRequest) -> None:
        """PrivacyBudgetExhausted before anything is sent for a sum that the budget cannot pay."""
        release = request.release
        if not self.training.steps.publishes:
            return
        if self._budget is not None:
            self._budget.check(request.round, release)
        limit = self.training.max_epsilon
        if limit is None:
            return
        in_rounds = release == self.training.release
        if in_rounds and self._charged_rounds() < self._affordable:
            return
        after = self.ledger.record(release)
        if after.quick_epsilon() <= limit:
            return
        cost = after.epsilon()
        if cost <= limit:
            return
        asked = f"round {request.round}" if request.round else f"asking for the {request.what}"
        raise PrivacyBudgetExhausted(
            f"{asked} would bring epsilon to {rounded_up(cost)} at delta={self.ledger.delta:g}, "
            f"above max_epsilon={limit:g} ({rounded_up(self.ledger.epsilon())} already spent). Run "
            "fewer rounds, sample fewer users, or raise noise_multiplier (now "
            f"{release.noise_multiplier:g})."
        )

    def charge(self, request: SumRequest) -> None:
        """Write a release down in all places; only then may it be made."""
        if not self.training.steps.publishes:
            return
        release = request.release
        insecure = self.training.insecure_seed is not None
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

    def stated_ledger(self) -> Ledger:
        """The ledger for which ε is stated: what was released, and planned rounds that were not."""
        insecure = self.training.insecure_seed is not None
        missing = max(0, self._store.planned[0] - self.ledger.rounds)
        ledger = self.ledger
        if missing:
            for release in self.pending_releases.values():
                ledger = ledger.record(release, insecure=insecure)
                missing -= 1
        return ledger.record(self.training.release, missing, insecure=insecure)

    def promise_to_clients(self) -> tuple[float, str]:
        """ε and the promise in one line; nothing is promised if no number of rounds was planned."""
        if self.training.steps.publishes and not self._store.planned[0]:
            return math.inf, ""
        known = (self.stated_ledger(), self._unit)  # all that changes between two rounds
        if self._promised is None or self._promised[0] != known:
            promise = self.promise()
            self._promised = known, (promise.epsilon, promise.in_one_line())
        return self._promised[1]

    @property
    def _unit(self) -> str:
        """Who is protected: a node, if a user may come back as another one."""
        return "node" if "node" in self._store.caveats.values() else "user"

    def promise(self, size: int = 0, simulation: str = "", terms: tuple[str, ...] = ()) -> Promise:
        """Everything that is stated about this training.

        Args:
            size: the number of coordinates that each release has.
            simulation: why this is a simulation; empty if it is not one.
            terms: further terms of a simulation.
        """
        check_accountant()
        stated = self.stated_ledger()
        budget = None
        if self._budget is not None:
            allowance = self._budget.allowance
            budget = (allowance.epsilon, allowance.epsilon_replace_one())
        return Promise(
            training=self.training,
            stated=stated,
            charged=self.ledger,
            rounds_trained=self.rounds_done,
            cut=cut_probability(size, stated.rounds, self.training.release.noise_shares),
            budget=budget,
            unit=self._unit,
            simulation=simulation,
            caveats=self._caveat_sentences(),
            evaluated=bool(self._store.notes("evaluation")),
            terms=terms,
            values=self.values,
        )

    def epsilon_so_far(self) -> float:
        """An upper bound on what is guaranteed, cheap enough for every round.

        At most what is stated for the plan; infinite if nothing is guaranteed.
        """
        if not self.ledger.rounds:
            return 0.0
        delta = self.training.delta
        if self.ledger.insecure_rounds or why_delta_is_void(delta, self.training.population):
            return math.inf
        promised, _ = self.promise_to_clients()
        return min(self.ledger.quick_epsilon(), promised)

    def note_evaluation(self) -> None:
        """From now on every statement says that there was evaluation on client data."""
        if not self._store.notes("evaluation"):
            self._store.note("evaluation", True)

    def note_node_caveat(self, caveat: str) -> None:
        """From now on every statement protects nodes in place of users, and says why."""
        self._store.note_caveat(caveat, "node")

    def _caveat_sentences(self) -> tuple[str, ...]:
        caveats = self._store.caveats
        of_nodes = [text for text, unit in caveats.items() if unit == "node"]
        texts = dict.fromkeys(text for text, unit in caveats.items() if unit != "node")
        if self._budget is not None:
            texts |= dict.fromkeys(self._budget.caveats)
        found = [text[:1].upper() + text[1:] + "." for text in texts]
        if of_nodes:
            lost = "; ".join(of_nodes)
            found.insert(0, f"User-level privacy across restarts of a node is NOT claimed: {lost}.")
        return tuple(found)
