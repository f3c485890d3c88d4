"""The trusted party of one training, without Flower: draws, orders, takes, publishes.

Both of Flower's APIs have a curator in their middle. It owns the round: the strategies around it
translate messages, and its account keeps what was charged.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import numpy as np

from flwr_ppsgd.algorithm import Vector, server_step
from flwr_ppsgd.checks import printable
from flwr_ppsgd.noise import random_stream
from flwr_ppsgd.recipe import DROWNED, Recipe, published_variance, server_gain, shares_of_columns
from flwr_ppsgd.secure.terms import SecureTerms, Session
from flwr_ppsgd.server.account import ServerAccount
from flwr_ppsgd.server.enrolment import Enrolment, Online
from flwr_ppsgd.server.facts import LONGEST_ERROR
from flwr_ppsgd.server.rounds import OpenSum, SecureOpenSum, SumRequest
from flwr_ppsgd.training import Identity, Training
from flwr_ppsgd.wire import LONGEST_PROMISE, Asked, Order, Plan

log = logging.getLogger("flwr.ppsgd")

Look: TypeAlias = Callable[[], Online]  # tells who is online

# in the state beside w:
ITERATES = "iterates"  # Σ_{t<n} w_t, or over the second half of the rounds
VARIANCE = "variance"  # ν
ROOM_FOR_NAMES = 1 << 16  # bytes, of the names of arrays


class NobodyUsableError(RuntimeError):
    """Nobody's reply could be used: going on would only cost ε."""


class Curator:
    """The holder of the secret randomness and the open round of one training.

    Args:
        training: all its settings. The account holds them, since a plan may change them.
    """

    def __init__(self, training: Training) -> None:
        self.enrolment = Enrolment(training.nodes, training.enrolled)  # before a file is opened
        self.account = ServerAccount(training)
        self.enrolment.tell = self.account.facts.note_problem
        self._sum: OpenSum | None = None
        self._useless = 0  # sums in a row in which nobody could be used

    # --- one sum: asked for, taken, charged, published

    @property
    def in_rounds(self) -> Asked:
        """What each user sends in a round."""
        return "gradient" if self.account.training.recipe is None else "solution"

    def request(self, round_: int, length: int = 0) -> SumRequest:
        """What is asked for in a round, of a w with this number of parameters."""
        training = self.account.training
        if not training.steps.publishes:
            return SumRequest(self.in_rounds, round_, training.release, 0)
        return SumRequest(self.in_rounds, round_, training.release, length, training.metrics)

    def request_before(self, name: str) -> SumRequest:
        """What is asked for once before the first round: a number of each user, or own columns."""
        recipe = cast(Recipe, self.account.training.recipe)
        return SumRequest(cast(Asked, name), 0, recipe.before[name], recipe.length(name))

    def open_sum(self, request: SumRequest, look: Look, nbytes: int, run: int = 0) -> OpenSum:
        """Budget and room on the disk, then the cohort.

        Args:
            request: what is asked for.
            look: tells who is online.
            nbytes: the size of w, for which there must be room.
            run: the number of Flower's run.
        """
        account = self.account
        account.reopen()
        training = account.training
        state = 16 * request.length if self.averages or training.recipe else 0  # the mean of w, ν
        account.reserve(nbytes + state + ROOM_FOR_NAMES)
        account.check(request)
        asked, offline = self._draw_cohort(request, look)
        if not training.secure:
            self._sum = OpenSum(request, asked, offline, account.charge)
            return self._sum
        session = Session(
            training=account.training_id,
            run=run,
            start=len(account.starts()),
            round=request.round,
            part=request.what,
            terms=SecureTerms.of(request.release, request.metrics),
        )
        stream = random_stream(training.insecure_seed, "neighbours", request.round)
        self._sum = SecureOpenSum(request, asked, offline, account.charge, session, stream)
        return self._sum

    def _draw_cohort(self, request: SumRequest, look: Look) -> tuple[list[Identity], int]:
        """Who is asked, and how many were drawn and are offline.

        Drawn from the enrolled population: independent of data and of who is online.
        """
        online = self._online(look)
        cohort = request.release.cohort
        seed = self.account.training.insecure_seed
        uniforms = random_stream(seed, "cohort", request.round).uniforms(cohort.population)
        places = cohort.members(uniforms).tolist()
        known = self.enrolment.known
        drawn = [known[place] for place in places if place < len(known)]  # others are free
        asked = [online[node] for node in drawn if node in online]
        return asked, len(drawn) - len(asked)

    def open_sum_of(self, round_: int) -> OpenSum:
        """The sum that was opened last; ValueError if it is not that of this round."""
        if self._sum is None or self._sum.closed or self._sum.request.round != round_:
            raise ValueError(
                f"round {round_} was aggregated without being configured, so nothing was released: "
                "configure and aggregate each round in turn"
            )
        return self._sum

    def publish(
        self, opened: OpenSum, w: Vector, columns: int, heard: bool = True
    ) -> tuple[Vector, dict[str, float]]:
        """(w − s_w·(noisy sum)/D, ε so far and private measures).

        Charged before either exists. At α = 0 nothing is released or charged. A sum before the
        first round is noted, and leaves w as it is.

        Args:
            opened: the sum.
            w: the shared parameters at which it was asked for.
            columns: of users' rows, if w has a row for each of them; else its length.
            heard: whether the clients were really asked; False if somebody else drives the rounds
                and brings neither replies nor failures.
        """
        training = self.account.training
        request = opened.request
        name = "noise" if request.round else request.what
        noisy = opened.close(random_stream(training.insecure_seed, name, request.round))
        self._note_outcome(opened, heard)
        if not request.round:
            prior = np.zeros(request.length)  # zeros leave the prior
            self.account.note_sum(request.what, prior if noisy is None else noisy)
            return w, {}
        if training.average:
            self._add_to_mean(w)
        self.account.rounds_done = request.round
        released: dict[str, float] = {}
        if noisy is not None and training.steps.publishes:
            w, released = self._step(w, noisy, columns)
        return w, {"epsilon": self.account.epsilon_so_far(), **released}

    def _note_outcome(self, opened: OpenSum, heard: bool) -> None:
        """What came back, for the operator; and whether any of it was of use."""
        round_ = opened.request.round
        if opened.why_lost:
            self.account.facts.note_problem(f"round {round_} has no sum: {opened.why_lost}")
            log.warning(
                "A round has no sum: nothing was unmasked, and it is charged all the same. Lower "
                "honest or colluding if that happens often."
            )
        self.account.facts.note_replies(opened.facts())
        if opened.usable:
            self._useless = 0
        elif opened.enough_asked and (heard or not round_):
            self._useless += 1

    def _step(self, w: Vector, noisy: Vector, columns: int) -> tuple[Vector, dict[str, float]]:
        """What follows from a released sum: the new w, and private measures."""
        training = self.account.training
        total = noisy[: len(w)]
        step: float | Vector = training.steps.shared
        if training.recipe is not None:
            step = self._recipe_step(training.recipe, total, columns)
        moved = server_step(w, total, training.release, step)
        if self._averages_half and 2 * self.account.rounds_done > self.account.planned_rounds:
            self._add_to_mean(moved)
        if training.metrics is None:
            return moved, {}
        # the noise of a secure sum is that of all clients in it
        z = training.release.usual_noise_std / training.release.clip_norm
        added = replace(training.release, aggregation=None, noise_multiplier=z)
        return moved, training.metrics.decode(noisy[len(w) :], added)

    def _add_to_mean(self, w: Vector) -> None:
        state = self.account.state
        state[ITERATES] = state[ITERATES] + w if ITERATES in state else w.copy()

    def _recipe_step(self, recipe: Recipe, total: Vector, columns: int) -> float | Vector:
        """C·g: users sent −solution/C, and the server adds g times their noisy mean to w."""
        values = self.account.values
        release = recipe.release
        mean = (-values.size / release.denominator) * total.reshape(columns, -1)
        sigma = values.size * release.usual_noise_std / release.denominator
        gain = server_gain(mean, sigma, shares_of_columns(recipe, values, columns))
        variance = self.account.state.get(VARIANCE, np.zeros(1))
        self.account.state[VARIANCE] = published_variance(variance, gain, sigma)
        if len(gain) == 1:
            return values.size * float(gain[0])
        return values.size * np.repeat(gain, mean.shape[1])

    # --- mistakes that everybody makes

    def refuse_to_go_on(self) -> None:
        """NobodyUsableError if everyone asked has failed, twice in a row.

        Once is enough before the first round, and in the first release if all have failed alike: a
        mistake in the app. What was released is charged. A round that asked too few clients to say
        anything changes nothing.
        """
        opened = self._sum
        if opened is None or not self._useless:
            return
        round_ = opened.request.round
        mistake = self.account.ledger.rounds == 1 and opened.all_failed_alike
        if round_ and self._useless < 2 and not mistake:
            return
        when = f"in round {round_}"
        if not round_:
            when = f"when everybody was asked for the {opened.request.what}"
        elif self._useless > 1:
            when = f"in rounds {round_ - 1} and {round_}"
        self._useless = 0
        said = f"the first: {opened.first_failure or 'no reply'}"
        if self.account.training.checkpoint_dir is not None:
            said = self.account.facts.where()
        raise NobodyUsableError(
            f"{when} each client that was asked gave an error, a malformed reply or none ({said}). "
            "What was released is charged: look at a client's log, correct it, and start again"
        )

    def refuse_if_nobody_obeys(self, asked: int, refusals: Sequence[str]) -> None:
        """NobodyUsableError if each client that was asked has refused; nothing is charged.

        Args:
            asked: the number of clients that got a check Order.
            refusals: what those said who refused, or did not answer.
        """
        if asked and len(refusals) >= asked:
            first = printable(refusals[0], LONGEST_ERROR)
            raise NobodyUsableError(
                f"before round {self.account.rounds_done + 1} none of {asked} clients would obey "
                f"an Order; the first: {first}. Nothing was charged: look at a client's log or "
                "`ppsgd client-report`, correct it, and start again"
            )

    def say_whether_it_can_learn(self, size: int) -> None:
        """Log, from public numbers alone, what signal to noise the planned rounds can reach.

        Args:
            size: the number of shared parameters.
        """
        training = self.account.training
        release = training.release
        left = self.account.last_round - self.account.rounds_done
        if left < 1 or not training.steps.publishes or release.noise_multiplier == 0:
            return
        users = training.population
        if training.recipe is not None:
            noise = training.recipe.noise_in_prediction
            log.info(
                "Noise in a prediction: at most about %.2g of the size of users' models", noise
            )
            if noise > DROWNED:
                log.warning(
                    "With %d users the noise in a prediction of the shared model is about %.2g of "
                    "what it says: users will mostly keep to their own models. Enrol about %.3g "
                    "times as many, or allow a larger epsilon.",
                    *(users, noise, noise / DROWNED),
                )
            return
        reached = math.sqrt(left) * release.signal_to_noise(size)
        log.info("Signal to noise over %d rounds: at best %.2g, if all users agree", left, reached)
        if reached < 1:
            verdict = "This cannot learn:" if reached < DROWNED else "This may learn little:"
            more = 1 / reached
            log.warning(
                "%s even if all users agree, the noise on %d shared parameters is %.3g times as "
                "long as what %d users can say in %d rounds. Enrol about %.3g times as many users, "
                "allow a larger epsilon, or share about %.3g times fewer parameters.",
                *(verdict, size, more, users, left, more, more**2),
            )

    # --- what is published in the end

    @property
    def _averages_half(self) -> bool:
        """Whether w is the mean over the second half of the rounds: with the recipe's cohorts."""
        recipe = self.account.training.recipe
        return recipe is not None and recipe.release.cohort.rate < 1

    @property
    def variance(self) -> Vector:
        """ν, the noise in the published w: one number, or one for each column.

        Of Poisson cohorts w is a mean over T/2 rounds.
        """
        variance = self.account.state.get(VARIANCE, np.zeros(1))
        if not self._averages_half:
            return variance
        return variance * 2 / max(1, self.account.planned_rounds)

    @property
    def averages(self) -> bool:
        """Whether what is published in the end is a mean over rounds."""
        return self.account.training.average or self._averages_half

    def mean_of_rounds(self, w: Vector) -> Vector:
        """The mean that is published in place of ``w``, if there is one; before round 1 ``w``."""
        total = self.account.state.get(ITERATES)
        if total is None:
            return w
        rounds = self.account.rounds_done
        if self._averages_half:
            rounds -= self.account.planned_rounds // 2
        return total / rounds

    # --- who is asked besides

    def evaluators(self, round_: int, look: Look) -> list[Identity]:
        """The enrolled nodes online, if evaluation is due in this round; else nobody."""
        every = self.account.training.evaluate_every
        if not every or (round_ % every and round_ != self.account.last_round):
            return []
        self.account.note_evaluation()
        return self.everybody(look)

    def everybody(self, look: Look) -> list[Identity]:
        """All enrolled nodes that are online."""
        online = self._online(look)
        return [online[node] for node in self.enrolment.known if node in online]

    def _online(self, look: Look) -> Mapping[Identity, Identity]:
        online = self.enrolment.refresh(look)
        for caveat in self.enrolment.caveats:
            self.account.note_node_caveat(caveat)
        return online

    # --- Orders

    def order(self, request: SumRequest, stage: int = 0) -> Order:
        """What every client gets to know about the training, and is asked.

        Args:
            request: the sum that is asked for, or whose w comes along.
            stage: which exchange of a secure sum this is; 0 of a plain one.
        """
        account = self.account
        training = account.training
        recipe = training.recipe
        release = request.release
        values = account.values
        # after a crash w may fall back to the checkpoint before the last one
        back = 0 if training.checkpoint_dir is None else 2 * training.checkpoint_every
        epsilon, promise = account.promise_to_clients()
        return Order(
            round=request.round,
            step=training.steps.personal,
            clip_norm=release.clip_norm,
            reduction=training.release.reduction,
            publishes=training.steps.publishes,
            asks=request.what,
            task=recipe.task if recipe else "",
            sparse=len(recipe.sparse) if recipe else 0,
            unit=values.unit,
            size=values.count if request.what == "columns" else values.size,
            average=training.average,
            metrics=tuple(request.metrics.bounds) if request.metrics else (),
            training=account.training_id,
            starts=account.starts(),
            back=back,
            charges=account.ledger.rounds,
            epsilon=epsilon,
            promise=printable(promise, LONGEST_PROMISE),
            terms=SecureTerms.of(release, request.metrics) if release.aggregation else None,
            stage=stage,
            plan=self._planned_releases(),
            sampled=training.release.cohort.rate < 1,
        )

    def _planned_releases(self) -> Plan:
        """Everything that is released about a user: its noise multiplier, and how often."""
        training = self.account.training
        rounds = self.account.planned_rounds
        if not training.steps.publishes or not rounds:
            return {}
        before = training.recipe.before if training.recipe else {}
        plan = {name: (release.noise_multiplier, 1) for name, release in before.items()}
        plan[self.in_rounds] = (training.release.noise_multiplier, rounds)
        return plan

    def evaluation_order(self, round_: int, *, last: bool, measured: bool = True) -> Order:
        """What comes with w for evaluation.

        Args:
            round_: the absolute round.
            last: whether this w is the last one: the device then makes its personal model.
            measured: whether measures are asked for, or nothing.
        """
        order = self.order(self.request(round_))
        if self.account.training.recipe is None:
            return order
        asks = self.in_rounds if measured else "nothing"
        return replace(order, asks=asks, last=last, variance=tuple(self.variance.tolist()))
