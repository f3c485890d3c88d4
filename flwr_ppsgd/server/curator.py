"""The trusted party of one training, without Flower: draws, orders, takes, publishes.

Both of Flower's APIs have a curator in their middle. It owns the round: the strategies around it
translate messages, and its account keeps what was charged.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import numpy as np

from flwr_ppsgd.algorithm import Vector, server_step
from flwr_ppsgd.checks import printable
from flwr_ppsgd.noise import random_stream
from flwr_ppsgd.recipe import DROWNED, Recipe, published_variance, server_gain, shares_of_columns
from flwr_ppsgd.secure.coordinator import SecureStage
from flwr_ppsgd.secure.terms import SecureTerms, Session
from flwr_ppsgd.server.account import LONGEST_ERROR, ServerAccount
from flwr_ppsgd.server.enrolment import Enrolment, Online
from flwr_ppsgd.server.rounds import (
    OpenSum,
    Payloads,
    SecureOpenSum,
    SumRequest,
    facts_in_words,
)
from flwr_ppsgd.training import Identity, Training
from flwr_ppsgd.wire import LONGEST_PROMISE, Asked, Order

log = logging.getLogger("flwr.ppsgd")

Look: TypeAlias = Callable[[], Online]  # tells who is online

ITERATES = "iterates"  # in the state beside w
VARIANCE = "variance"
ROOM_FOR_NAMES = 1 << 16  # bytes, of the names of arrays


class NobodyUsableError(RuntimeError):
    """Nobody's reply could be used: going on would only cost ε."""


class Curator:
    """The holder of the secret randomness and the open round of one training.

    Args:
        training: all its settings.
    """

    def __init__(self, training: Training) -> None:
        self.account = ServerAccount(training)
        self.enrolment = Enrolment(training.nodes, training.enrolled, self.account.note_problem)
        self._sum: OpenSum | None = None
        self._useless = 0  # rounds in a row in which nobody could be used
        self._iterates: Vector | None = None  # Σ_{t<n} w_t, or over the second half of the rounds
        self._variance = np.zeros(1)  # ν
        self._load_state()

    def reopen(self) -> bool:
        """Go on after ``account.close``, as after a restart; whether that was needed."""
        reopened = self.account.reopen()
        if reopened:
            self._load_state()
        return reopened

    def _load_state(self) -> None:
        found = self.account.checkpoint
        if found is not None:
            self._iterates = found.state.get(ITERATES)
            self._variance = found.state.get(VARIANCE, self._variance)

    @property
    def training(self) -> Training:
        """All settings."""
        return self.account.training

    def save(self, arrays: Mapping[str, bytes]) -> None:
        """Keep w of the round just published, and what the next round needs besides."""
        state = {} if self.training.recipe is None else {VARIANCE: self._variance}
        if self._iterates is not None:
            state[ITERATES] = self._iterates
        self.account.save(arrays, state)

    # --- one sum: asked for, taken, charged, published

    def request(self, round_: int, length: int) -> SumRequest:
        """What is asked for in a round, of a w with this number of parameters."""
        training = self.training
        what = "gradient" if training.recipe is None else "solution"
        if not training.steps.publishes:
            return SumRequest(what, round_, training.release, 0)
        return SumRequest(what, round_, training.release, length, training.metrics)

    def request_before(self, name: str) -> SumRequest:
        """What is asked for once before the first round: a number of each user, or own columns."""
        recipe = cast(Recipe, self.training.recipe)
        return SumRequest(name, 0, recipe.before[name], recipe.length(name))

    def open_sum(self, request: SumRequest, look: Look, nbytes: int, run: int = 0) -> OpenSum:
        """Budget and room on the disk, then the cohort from the enrolled population.

        Who takes part is independent of data and of who is online.

        Args:
            request: what is asked for.
            look: tells who is online.
            nbytes: the size of w, for which there must be room.
            run: the number of Flower's run.
        """
        self.reopen()
        # the mean of w, and ν
        beside = 16 * request.length if self.averages or self.training.recipe else 0
        self.account.reserve(nbytes + beside + ROOM_FOR_NAMES)
        self.account.check(request)
        online = self._online(look)
        seed = self.training.insecure_seed
        cohort = request.release.cohort
        uniforms = random_stream(seed, "cohort", request.round).uniforms(cohort.population)
        drawn = self.enrolment.nodes(cohort.members(uniforms).tolist())
        asked = [online[node] for node in drawn if node in online]
        offline = len(drawn) - len(asked)
        if self.training.secure:
            session = Session(
                training=self.account.training_id,
                run=run,
                start=len(self.account.starts()),
                round=request.round,
                part=request.what,
                terms=SecureTerms.of(request.release, request.metrics),
            )
            stream = random_stream(seed, "neighbours", request.round)
            self._sum = SecureOpenSum(request, asked, offline, session, stream)
        else:
            self._sum = OpenSum(request, asked, offline)
        return self._sum

    def open_sum_of(self, round_: int) -> OpenSum:
        """The sum that was opened last; ValueError if it is not that of this round."""
        if self._sum is None or self._sum.closed or self._sum.request.round != round_:
            raise ValueError(
                f"round {round_} was aggregated without being configured, so nothing was released: "
                "configure and aggregate each round in turn"
            )
        return self._sum

    def exchanges(self, opened: OpenSum) -> Iterator[tuple[int, Payloads]]:
        """What to send for a sum, one exchange after the other, charged before it is unmasked."""
        for stage, payloads in opened.exchanges():
            if stage == SecureStage.REVEALED:
                self._charge(opened)
            yield stage, payloads

    def _charge(self, opened: OpenSum) -> None:
        """Once for each sum, before anything of it can be seen."""
        if not opened.charged:
            self.account.charge(opened.request)
            opened.charged = True

    def _close(self, opened: OpenSum) -> Vector | None:
        """Charge, then the noisy sum; None if a secure sum has none."""
        self._charge(opened)
        request = opened.request
        name = "noise" if request.round else request.what
        noisy = opened.close(random_stream(self.training.insecure_seed, name, request.round))
        if opened.why_lost:
            self.account.note_problem(f"round {request.round} has no sum: {opened.why_lost}")
            log.warning(
                "A round has no sum: nothing was unmasked, and it is charged all the same. Lower "
                "honest or colluding if that happens often."
            )
        facts = opened.facts()
        self.account.tell_operator(facts, facts_in_words(facts), logging.INFO)
        return noisy

    def publish_before(self, opened: OpenSum) -> None:
        """Release a sum before the first round; NobodyUsableError if nobody's answer had a form.

        A mistake that everybody makes ends the run here, with one release charged.
        """
        request = opened.request
        noisy = self._close(opened)
        if noisy is None:
            noisy = np.zeros(request.length)  # which leave the prior
        self.account.note_sum(request.what, noisy)
        if opened.telling and not opened.usable:
            raise NobodyUsableError(
                f"none of {len(opened.nodes)} clients gave a usable answer when everybody was "
                f"asked for the {request.what} ({self._what_was_said(opened)}). That release is "
                "charged: look at a client's log, correct it, and start again"
            )

    def publish(
        self, opened: OpenSum, w: Vector, columns: int, heard: bool = True
    ) -> tuple[Vector, dict[str, float]]:
        """(w − s_w·(noisy sum)/D, ε so far and private measures).

        Charged before either exists. At α = 0 nothing is released or charged.

        Args:
            opened: the sum of a round.
            w: the shared parameters at which it was asked for.
            columns: of users' rows, if w has a row for each of them; else its length.
            heard: whether the clients were really asked; False if somebody else drives the rounds
                and brings neither replies nor failures.
        """
        noisy = self._close(opened)
        if self.training.average:
            self._iterates = w.copy() if self._iterates is None else self._iterates + w
        self.account.rounds_done = opened.request.round
        released: dict[str, float] = {}
        if noisy is not None and self.training.steps.publishes:
            w, released = self._step(w, noisy, columns)
        if heard and opened.telling:
            self._useless = 0 if opened.usable else self._useless + 1
        return w, {"epsilon": self.account.epsilon_so_far(), **released}

    def _step(self, w: Vector, noisy: Vector, columns: int) -> tuple[Vector, dict[str, float]]:
        """What follows from a released sum: the new w, and private measures."""
        training = self.training
        total = noisy[: len(w)]
        step: float | Vector = training.steps.shared
        if training.recipe is not None:
            step = self._recipe_step(training.recipe, total, columns)
        moved = server_step(w, total, training.release, step)
        if self._averages_half and 2 * self.account.rounds_done > self.account.planned_rounds:
            self._iterates = moved if self._iterates is None else self._iterates + moved
        if training.metrics is None:
            return moved, {}
        # the noise of a secure sum is that of all clients in it
        z = training.release.usual_noise_std / training.release.clip_norm
        added = replace(training.release, aggregation=None, noise_multiplier=z)
        return moved, training.metrics.decode(noisy[len(w) :], added)

    def _recipe_step(self, recipe: Recipe, total: Vector, columns: int) -> float | Vector:
        """C·g: users sent −solution/C, and the server adds g times their noisy mean to w."""
        values = self.account.values
        release = recipe.release
        mean = (-values.size / release.denominator) * total.reshape(columns, -1)
        sigma = values.size * release.usual_noise_std / release.denominator
        gain = server_gain(mean, sigma, shares_of_columns(recipe, values, columns))
        self._variance = published_variance(self._variance, gain, sigma)
        if len(gain) == 1:
            return values.size * float(gain[0])
        return values.size * np.repeat(gain, mean.shape[1])

    # --- mistakes that everybody makes

    def refuse_to_go_on(self) -> None:
        """NobodyUsableError if everyone asked has failed, twice in a row.

        Once is enough in the first release, if all have failed alike: a mistake in the app. What
        was released is charged. A round that asked too few clients to say anything changes nothing.
        """
        opened = self._sum
        if opened is None or not self._useless:
            return
        mistake = self.account.ledger.rounds == 1 and opened.all_failed_alike
        if self._useless < 2 and not mistake:
            return
        done = self.account.rounds_done
        rounds = f"rounds {done - 1} and {done}" if self._useless > 1 else f"round {done}"
        self._useless = 0
        raise NobodyUsableError(
            f"in {rounds} each client that was asked gave an error, a malformed reply or none "
            f"({self._what_was_said(opened)}). What was released is charged: look at a client's "
            "log, correct it, and start again"
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

    def _what_was_said(self, opened: OpenSum) -> str:
        """Where failures are written down; the first one itself if they are not."""
        if self.training.checkpoint_dir is not None:
            return self.account.where_facts_are()
        return f"the first: {opened.first_failure or 'no reply'}"

    def say_whether_it_can_learn(self, size: int) -> None:
        """Log, from public numbers alone, what signal to noise the planned rounds can reach.

        Args:
            size: the number of shared parameters.
        """
        release = self.training.release
        left = self.account.last_round - self.account.rounds_done
        if left < 1 or not self.training.steps.publishes or release.noise_multiplier == 0:
            return
        users = self.training.population
        if self.training.recipe is not None:
            noise = self.training.recipe.noise_in_prediction
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
        recipe = self.training.recipe
        return recipe is not None and recipe.release.cohort.rate < 1

    @property
    def variance(self) -> Vector:
        """ν, the noise in the published w: one number, or one for each column.

        Of Poisson cohorts w is a mean over T/2 rounds.
        """
        if not self._averages_half:
            return self._variance
        return self._variance * 2 / max(1, self.account.planned_rounds)

    @property
    def averages(self) -> bool:
        """Whether what is published in the end is a mean over rounds."""
        return self.training.average or self._averages_half

    def mean_of_rounds(self, w: Vector) -> Vector:
        """The mean that is published in place of ``w``, if there is one; before round 1 ``w``."""
        if self._iterates is None:
            return w
        rounds = self.account.rounds_done
        if self._averages_half:
            rounds -= self.account.planned_rounds // 2
        return self._iterates / rounds

    # --- who is asked besides

    def evaluators(self, round_: int, look: Look) -> list[Identity]:
        """The enrolled nodes online, if evaluation is due in this round; else nobody."""
        every = self.training.evaluate_every
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
            self.account.note_caveat(caveat, "node")
        return online

    # --- Orders

    def order(self, round_: int) -> Order:
        """What every client gets to know about the training, and is asked in a round."""
        training = self.training
        release = training.release
        recipe = training.recipe
        persistent = training.checkpoint_dir is not None
        asks: Asked = "solution" if recipe else "gradient"
        # everything that is released about a user: its noise multiplier, and how often
        plan: dict[str, tuple[float, int]] = {}
        rounds = self.account.planned_rounds
        if training.steps.publishes and rounds:
            before = recipe.before if recipe else {}
            plan = {name: (each.noise_multiplier, 1) for name, each in before.items()}
            plan[asks] = (release.noise_multiplier, rounds)
        epsilon, promise = self.account.promise_to_clients()
        values = self.account.values
        return Order(
            round=round_,
            step=training.steps.personal,
            clip_norm=release.clip_norm,
            reduction=release.reduction,
            publishes=training.steps.publishes,
            asks=asks,
            task=recipe.task if recipe else "",
            sparse=len(recipe.sparse) if recipe else 0,
            unit=values.unit,
            size=values.size,
            average=training.average,
            metrics=tuple(training.metrics.bounds) if training.metrics else (),
            training=self.account.training_id,
            starts=self.account.starts(),
            # w may fall back to the checkpoint before the last one
            back=2 * training.checkpoint_every if persistent else 0,
            charges=self.account.ledger.rounds,
            epsilon=epsilon,
            promise=printable(promise, LONGEST_PROMISE),
            terms=SecureTerms.of(release, training.metrics) if release.aggregation else None,
            plan=plan,
            sampled=release.cohort.rate < 1,
        )

    def sum_order(self, request: SumRequest, stage: int = 0) -> Order:
        """What is asked of each client for a sum, or for one exchange of a secure one."""
        order = replace(self.order(request.round), stage=stage)
        if request.round:
            return order
        values = self.account.values
        release = request.release
        return replace(
            order,
            clip_norm=release.clip_norm,
            asks=cast(Asked, request.what),
            size=values.count if request.what == "columns" else values.size,
            metrics=(),
            terms=SecureTerms.of(release, None) if release.aggregation else None,
        )

    def evaluation_order(self, round_: int, *, last: bool, measured: bool = True) -> Order:
        """What comes with w for evaluation.

        Args:
            round_: the absolute round.
            last: whether this w is the last one: the device then makes its personal model.
            measured: whether measures are asked for, or nothing.
        """
        order = self.order(round_)
        if self.training.recipe is None:
            return order
        asks: Asked = order.asks if measured else "nothing"
        return replace(order, asks=asks, last=last, variance=tuple(self.variance.tolist()))
