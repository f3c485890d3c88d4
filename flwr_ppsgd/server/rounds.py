"""A round from asking to publishing, the same for both of Flower's APIs.

Each reply is a vector or zero, never an exception.
"""

import itertools
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord

from flwr_ppsgd.algorithm import PrivateMetrics, Release, Vector
from flwr_ppsgd.arrays import bytes_of, vector_record
from flwr_ppsgd.checks import printable
from flwr_ppsgd.noise import GridSum
from flwr_ppsgd.promise import why_delta_is_void
from flwr_ppsgd.secure.terms import Terms
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.enrolment import Enrolment, Present
from flwr_ppsgd.server.private_log import PrivateLog, RoundFacts
from flwr_ppsgd.server.training import Identity, Training
from flwr_ppsgd.signature import signed, signed_over
from flwr_ppsgd.wire import (
    ANSWER,
    ARRAYS,
    GRADIENT,
    LONGEST_PROMISE,
    NUM_EXAMPLES,
    Asked,
    Hold,
    Layout,
    Order,
    is_buffer,
    payload_hash,
)

log = logging.getLogger("flwr.ppsgd")

NOT_FINITE = "not finite"
LONGEST_DETAIL = 300  # characters of a client's error that the server's own log shows
LONGEST_NAME = 64  # characters of a measure that a client names
MOST_MEASURES = 50  # that are averaged over clients
LARGEST_MEASURE = 1e100
LARGEST_WEIGHT = 10.0  # of one client, in medians of all clients'
ROOT = "rmse"  # measures whose name ends so are roots of mean squares
OURS = ("round", "epsilon", "deployed_epsilon")  # names that no client's measure may have
DROWNED = 0.5  # of the noise's length, below which nothing was seen to learn
ENOUGH_ASKED = 10  # clients whose failing together says something about all


class NobodyUsableError(RuntimeError):
    """Nobody's reply could be used, twice in a row: the run would only cost ε."""


class UnusableError(ValueError):
    """A reply that counts as zero, with the reason under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Reply(NamedTuple):
    """What a client sent back in training, whichever API brought it.

    Args:
        arrays: the gradient, or the trained parameters; None if there are none.
        measures: numbers that came along, by name.
        error: why the client failed; empty if it did not.
        payload: its message of a secure sum; empty if there is none.
        found: the names of what came, for an error message.
    """

    arrays: ArrayRecord | None = None
    measures: Mapping[str, Any] = MappingProxyType({})
    error: str = ""
    payload: bytes = b""
    found: Collection[str] = ()


class Rounds:
    """The rounds of one training: who is asked, what is taken from them, what is published.

    Args:
        training: all settings.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        secret = training.insecure_seed is None
        self.private = PrivateLog(training.checkpoint_dir, secret)
        try:
            self.curator = Curator(training)
        except (ValueError, OSError) as error:
            self.private.note_refusal(error)
            raise
        population = training.release.cohort.population
        self._enrolment = Enrolment(
            population,
            training.enrolled,
            training.min_online,
            training.wait_timeout,
            tell=self.private.note_problem,
        )
        self._open: OpenRound | None = None
        self._useless = 0  # rounds in a row in which nobody could be used
        self.last_round = -1  # of the plan; -1 if there is none

    @property
    def open_enrolment(self) -> bool:
        """Whether the population is the first nodes seen, rather than a list that was given."""
        return self._enrolment.open

    @property
    def asked_in_rounds(self) -> str:
        """What the Order of a round asks for."""
        return "gradient" if self.training.recipe is None else "solution"

    def plan(self, rounds: int) -> int:
        """Fix the number of rounds, as of ``Curator.plan``; warn if δ protects nobody."""
        self.last_round = self.curator.plan(rounds)
        population = self.training.release.cohort.population
        void = why_delta_is_void(self.training.delta, population)
        if void:
            log.warning("NO GUARANTEE: %s", void)
        return self.last_round

    def to_check(self, look: Callable[[], Iterable[Present]]) -> list[Identity]:
        """A few of the enrolled nodes online, to be asked whether they would obey an Order."""
        online = self._online(look)
        known = (node for node in self._enrolment.known if node in online)
        return [online[node] for node in itertools.islice(known, ENOUGH_ASKED)]

    def refuse_if_nobody_obeys(self, asked: int, refusals: Sequence[str]) -> None:
        """NobodyUsableError if each client that was asked has refused; nothing is charged.

        Args:
            asked: the number of clients that got a check Order.
            refusals: what those said who refused, or did not answer.
        """
        if not asked or len(refusals) < asked:
            return
        first = printable(refusals[0], LONGEST_DETAIL)
        raise NobodyUsableError(
            f"before round {self.curator.rounds_done + 1} none of {asked} clients would obey an "
            f"Order; the first: {first}. Nothing was charged: look at a client's log or "
            "`ppsgd client-report`, mend it, and start again"
        )

    def say_whether_it_can_learn(self, size: int) -> None:
        """Log, from public numbers alone, what signal to noise the planned rounds can reach.

        Args:
            size: the number of shared parameters.
        """
        release = self.training.release
        left = self.last_round - self.curator.rounds_done
        if left < 1 or not self.training.steps.publishes or release.noise_multiplier == 0:
            return
        recipe = self.training.recipe
        if recipe is not None:
            noise = recipe.noise_in_prediction
            log.info(
                "Noise in a prediction: at most about %.2g of the size of users' models", noise
            )
            if noise > DROWNED:
                log.warning(
                    "With %d users the noise in a prediction of the shared model is about %.2g of "
                    "what it says: users will mostly keep to their own models. Enrol about %.3g "
                    "times as many, or allow a larger epsilon.",
                    release.cohort.population,
                    noise,
                    noise / DROWNED,
                )
            return
        reached = math.sqrt(left) * release.signal_to_noise(size)
        log.info("Signal to noise over %d rounds: at best %.2g, if all users agree", left, reached)
        if reached < 1:
            log.warning(
                "%s if all users agree, the noise on %d shared parameters is "
                "%.3g times as long as what %d users can say in %d rounds. Enrol about %.3g times "
                "as many users, allow a larger epsilon, or share about %.3g times fewer "
                "parameters.",
                "This cannot learn: even" if reached < DROWNED else "This may learn little: even",
                size,
                1 / reached,
                release.cohort.population,
                left,
                1 / reached,
                1 / reached**2,
            )

    def hold(self) -> Hold | None:
        """Which arrays travel along and are not part of w."""
        return is_buffer if self.training.replies == "parameters" else None

    def open(
        self,
        round_: int,
        w: Vector,
        layout: Layout,
        look: Callable[[], Iterable[Present]],
    ) -> list[Identity]:
        """Budget, then the cohort from the enrolled population: the addresses of those online.

        Args:
            round_: the absolute round.
            w: the shared parameters as one flat vector.
            layout: their names and shapes.
            look: tells who is online.
        """
        wanted = Gradients(self.curator, round_, w, layout)
        return self.open_for(wanted, round_, look)

    def open_for(
        self, wanted: "Wanted", round_: int, look: Callable[[], Iterable[Present]]
    ) -> list[Identity]:
        """``open`` a round in which something else than plain gradients is wanted."""
        self.curator.check_budget(round_)
        online = self._online(look)
        drawn = self._enrolment.nodes(self.curator.draw(round_).tolist())
        asked = [online[node] for node in drawn if node in online]
        offline = len(drawn) - len(asked)
        self._open = OpenRound(self.curator, round_, wanted, asked, offline=offline)
        return asked

    def open_before(
        self,
        name: str,
        look: Callable[[], Iterable[Present]],
        wanted: "Wanted | None" = None,
    ) -> list[Identity]:
        """Budget, then everybody who is enrolled: the addresses of those online.

        Args:
            name: what is asked for before the first round.
            look: tells who is online.
            wanted: what becomes of the replies; None: they are summed.
        """
        self.curator.check_before(name)
        online = self._online(look)
        asked = [online[node] for node in self._enrolment.known if node in online]
        self._open = OpenRound(self.curator, 0, wanted or Answers(self.curator, name), asked)
        return asked

    def publish_before(self, name: str) -> None:
        """Release a sum before the first round; NobodyUsableError if nobody's answer had a form.

        A mistake that everybody makes ends the run here, with one release charged.
        """
        opened = self.opened(0)
        opened.close(0)
        self.private.note_round(opened.facts())
        if self._says_something(opened) and not opened.usable:
            said = self._what_was_said(opened)
            raise NobodyUsableError(
                f"none of {opened.asked} clients gave a usable answer when everybody was asked for "
                f"the {name} ({said}). That release is charged: look at a client's log, mend it, "
                "and start again"
            )

    def opened(self, round_: int) -> "OpenRound":
        """The round that was configured last; ValueError if there is none."""
        if self._open is None:
            raise not_configured(round_)
        return self._open

    def publish(self, round_: int, heard: bool = True) -> tuple[Vector, dict[str, float]]:
        """The new w, and what is released along with it.

        Args:
            round_: the absolute round.
            heard: whether the clients were really asked; False if somebody else drives the rounds
                and brings neither replies nor failures.
        """
        opened = self.opened(round_)
        w, measures = opened.close(round_)
        released = {"epsilon": self.curator.epsilon_so_far(), **measures}
        self.private.note_round(opened.facts())
        if heard:
            self._count_useless(opened)
        return w, released

    def _count_useless(self, opened: "OpenRound") -> None:
        """Two rounds in a row in which everyone asked has failed end the run after the second.

        Both are charged. A round that asked too few clients to say anything changes nothing.
        """
        if self._says_something(opened):
            self._useless = 0 if opened.usable else self._useless + 1

    def _says_something(self, opened: "OpenRound") -> bool:
        """Whether enough clients were asked, or all that there are."""
        cohort = self.training.release.cohort
        everyone = cohort.rate == 1 and opened.asked >= cohort.population
        return opened.asked >= ENOUGH_ASKED or everyone

    def _what_was_said(self, opened: "OpenRound") -> str:
        """Where failures are written down; the first one itself if they are not."""
        if self.private.path is not None:
            return self.private.where
        return f"the first: {opened.first_failure or 'no reply'}"

    def refuse_to_go_on(self) -> None:
        """NobodyUsableError after two rounds in a row in which nobody could be used."""
        if self._useless < 2:
            return
        self._useless = 0
        done = self.curator.rounds_done
        said = self._what_was_said(self.opened(done))
        raise NobodyUsableError(
            f"in rounds {done - 1} and {done} each client that was asked gave an error, a "
            f"malformed reply or none ({said}). Both rounds are charged. More rounds would only "
            "cost epsilon: look at a client's log, mend it, and start again"
        )

    def before_order(self, name: str, arrays: ArrayRecord) -> dict[str, Any]:
        """What the server asks of everybody before the first round, signed, as it is sent."""
        return signed(before_order_of(self.curator, name), bytes_of(arrays), self.curator.key)

    def last_order(self, arrays: ArrayRecord, *, measured: bool) -> dict[str, Any]:
        """The Order that brings the last w to everybody, signed, as it is sent.

        Args:
            arrays: w.
            measured: whether it asks for measures too.
        """
        order = order_of(self.curator, self.curator.rounds_done)
        order = replace(order, last=True, variance=tuple(self.curator.variance.tolist()))
        if not measured:
            order = replace(order, asks="nothing")
        return signed(order, bytes_of(arrays), self.curator.key)

    def measuring_order(self, round_: int, arrays: ArrayRecord) -> dict[str, Any]:
        """What comes with w for evaluation, signed, as it is sent."""
        order = order_of(self.curator, round_)
        if self.training.recipe is not None:
            order = replace(order, variance=tuple(self.curator.variance.tolist()))
        return signed(order, bytes_of(arrays), self.curator.key)

    def everybody(self, look: Callable[[], Iterable[Present]]) -> list[Identity]:
        """All enrolled nodes that are online."""
        online = self._online(look)
        return [online[node] for node in self._enrolment.known if node in online]

    def staged_orders(
        self,
        round_: int,
        stage: int,
        payloads: Mapping[Identity, bytes],
        w_digest: bytes,
        before: str = "",
    ) -> dict[Identity, dict[str, Any]]:
        """What the server asks of each client in one exchange of a secure sum, as it is sent.

        Args:
            round_: the absolute round; 0 before the first.
            stage: which exchange it is.
            payloads: what each client gets besides its Order, which names it.
            w_digest: of the arrays that travel along, as of ``signature.digest``.
            before: what is asked for before the first round; empty in a round.
        """
        asked = before_order_of(self.curator, before) if before else order_of(self.curator, round_)
        base = replace(asked, stage=stage)
        hashes = {payload: payload_hash(payload) for payload in set(payloads.values())}
        orders = {
            payload: signed_over(replace(base, payload=named), w_digest, self.curator.key)
            for payload, named in hashes.items()
        }
        return {node: orders[payload] for node, payload in payloads.items()}

    def order(self, round_: int, arrays: ArrayRecord) -> dict[str, Any]:
        """What the server asks of each client in a round, signed, as it is sent.

        Args:
            round_: the absolute round.
            arrays: what travels along; the signature covers it.
        """
        return signed(order_of(self.curator, round_), bytes_of(arrays), self.curator.key)

    def evaluators(self, round_: int, look: Callable[[], Iterable[Present]]) -> list[Identity]:
        """The enrolled nodes online, if evaluation is due in this round; else nobody."""
        every = self.training.evaluate_every
        if not every or (round_ % every and round_ != self.last_round):
            return []
        self.curator.note_evaluation()
        return self.everybody(look)

    def note_failed_evaluations(self, round_: int, failures: Sequence[str], others: int) -> None:
        """Note for the operator how many evaluations failed, if any did, and why the first.

        Args:
            round_: the absolute round.
            failures: what the clients said.
            others: the number of evaluations that did not fail.
        """
        if not failures:
            return
        first = printable(failures[0], LONGEST_DETAIL)
        self.private.note_problem(
            f"round {round_}: {len(failures)} of {len(failures) + others} evaluations failed; the "
            f"first: {first}"
        )

    def _online(self, look: Callable[[], Iterable[Present]]) -> Mapping[Identity, Identity]:
        online = self._enrolment.refresh(look)
        self.curator.note_caveat(self._enrolment.caveat)
        return online


def _terms(release: Release, metrics: PrivateMetrics | None) -> Terms | None:
    """What clients are told about a secure sum; None if there is none."""
    return None if release.aggregation is None else Terms.of(release, metrics)


def order_of(curator: Curator, round_: int) -> Order:
    """What is asked of each client in a round, and what it is told about the server."""
    training = curator.training
    persistent = training.checkpoint_dir is not None
    epsilon, promise = curator.for_clients()
    values = curator.values
    return Order(
        round=round_,
        step=training.steps.personal,
        clip_norm=training.release.clip_norm,
        reduction=training.release.reduction,
        publishes=training.steps.publishes,
        asks="solution" if training.recipe else "gradient",
        task="" if training.recipe is None else training.recipe.task,
        sparse=() if training.recipe is None else training.recipe.sparse,
        unit=values.unit,
        size=values.size,
        average=training.average,
        metrics=tuple(training.metrics.bounds) if training.metrics else (),
        training=curator.training_id,
        starts=curator.starts(),
        # w may fall back to the checkpoint before the last one
        back=2 * training.checkpoint_every if persistent else 0,
        charges=curator.ledger.rounds,
        epsilon=epsilon,
        promise=printable(promise, LONGEST_PROMISE),
        terms=_terms(training.release, training.metrics),
        planned=curator.planned_charges if training.release.aggregation else 0,
    )


def before_order_of(curator: Curator, name: str) -> Order:
    """What is asked of everybody before the first round.

    Args:
        curator: knows the recipe.
        name: what is asked for.
    """
    recipe = curator.training.recipe
    assert recipe is not None
    release = recipe.before[name]
    values = curator.values
    return replace(
        order_of(curator, 0),
        clip_norm=release.clip_norm,
        asks=cast(Asked, name),
        size=values.count if name == "columns" else values.size,
        metrics=(),
        terms=_terms(release, None),
    )


class Wanted(Protocol):
    """What is asked for in a round: what becomes of a reply, and what is published."""

    def read(self, node: Hashable, reply: Reply) -> Callable[[], bool]:
        """What takes a reply in; an exception if it counts as zero.

        What is returned says whether the reply is a vector in the sum.
        """
        ...

    def publish(self) -> tuple[Vector, dict[str, float]]:
        """Charge, and release."""
        ...


class Gradients:
    """A round of training: gradients at w, and private measures if there are any.

    Args:
        curator: charges and releases.
        number: the absolute round.
        w: the shared parameters as one flat vector.
        layout: their names and shapes.
    """

    def __init__(self, curator: Curator, number: int, w: Vector, layout: Layout) -> None:
        self._curator = curator
        self._number = number
        self._w = w
        self._layout = layout
        self._total = curator.open_sum(len(w))

    def publish(self) -> tuple[Vector, dict[str, float]]:
        """The new w, and private measures."""
        return self._curator.publish(self._number, self._w, self._total, self._layout.columns)

    def read(self, node: Hashable, reply: Reply) -> Callable[[], bool]:  # noqa: ARG002
        """Adds a reply to the sum."""
        return _adding(self._total, self.vector(reply))

    def vector(self, reply: Reply) -> Vector:
        """The gradient, or w − w_i of a client that returns parameters; measures follow."""
        training = self._curator.training
        if not training.steps.publishes:
            return np.zeros(0)  # at α = 0 a client has nothing to say
        sent = _sent(reply, self._layout, training.replies)
        if training.replies == "parameters":
            sent = self._w - sent
        return self._curator.encoded(sent, finite(reply.measures))


class Answers:
    """What is asked for once before the first round: a number of each user, or own columns.

    Args:
        curator: charges and releases.
        name: what is asked for.
    """

    def __init__(self, curator: Curator, name: str) -> None:
        recipe = curator.training.recipe
        assert recipe is not None
        length = recipe.length(name)
        self._curator = curator
        self._name = name
        self._layout = Layout.of(vector_record({ANSWER: np.zeros(length)}))
        self._total = GridSum(length, recipe.before[name])

    def publish(self) -> tuple[Vector, dict[str, float]]:
        """The noisy sum."""
        self._curator.publish_before(self._name, self._total)
        return self._curator.sums[self._name], {}

    def read(self, node: Hashable, reply: Reply) -> Callable[[], bool]:  # noqa: ARG002
        """Adds one user's answer."""
        return _adding(self._total, _sent(reply, self._layout, "gradient"))


def _adding(total: GridSum, vector: Vector) -> Callable[[], bool]:
    """What adds a vector that can be added; an exception if it cannot."""
    scales = total.scales(vector)

    def add() -> bool:
        total.put(vector, scales)
        return True

    return add


def _sent(reply: Reply, layout: Layout, kind: str) -> Vector:
    """The arrays of a reply as one vector."""
    if reply.arrays is None:
        name = GRADIENT if kind == "gradient" else ARRAYS
        hint = ""
        if ARRAYS in reply.found:
            hint = " (a client that returns parameters needs PPSGD(replies='parameters'))"
        detail = f"no ArrayRecord {name!r} among {sorted(reply.found)}{hint}"
        raise UnusableError(f"without {name}", detail)
    try:
        return layout.flatten(reply.arrays, as_sent=True)
    except ValueError as error:
        raise UnusableError("of wrong keys, shape or dtype", str(error)) from None


class OpenRound:
    """Who was asked, what has been summed, what counted as zero and why."""

    def __init__(
        self,
        curator: Curator,
        number: int,
        wanted: Wanted,
        asked: Iterable[Hashable],
        *,
        offline: int = 0,
    ) -> None:
        self._curator = curator
        self._number = number
        self._wanted = wanted
        self._waiting = set(asked)  # for a valid reply
        self.asked = len(self._waiting)
        self._silent = set(self._waiting)
        self._unnamed = 0  # failures of asked nodes, nobody knows of which
        self._used = 0
        self._heard = 0  # replies that could be used, be they vectors or not
        self._zeros = Counter({"offline": offline})  # drawn, and not there to be asked
        self.first_failure = ""
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether any reply had a form that can be used; a vector that is not finite has one."""
        return self._heard > 0 or self._zeros[NOT_FINITE] > 0

    def ask_again(self, asked: Iterable[Hashable]) -> None:
        """Begin another exchange of the same round; whoever is silent in the last one is missing.

        Args:
            asked: those who are asked in it.
        """
        self._zeros["missing"] += len(self._silent)
        self._waiting = set(asked)
        self._silent = set(self._waiting)

    def take(self, node: Hashable, read: Callable[[], Reply]) -> None:
        """Add the first valid reply of an asked node. Everything else is zero, and counted."""
        self._silent.discard(node)
        try:
            if node not in self._waiting:
                detail = "a reply of a node that was not asked, or has answered"
                raise UnusableError("not asked for", detail)
            take_in = self._wanted.read(node, _without_error(read()))
        except Exception as error:  # a reply is never a reason to stop a round
            self.pass_over(error, node)
            return
        self._waiting.discard(node)
        self._heard += 1
        self._used += take_in()

    def fail(self, detail: str) -> None:
        """Count the failure of an asked node, of which nobody knows which it is."""
        self._unnamed += 1
        self.pass_over(UnusableError("client error", detail))

    def pass_over(self, error: BaseException, node: Hashable = "unknown") -> None:
        """Count a reply as zero."""
        self._zeros[_reason(error)] += 1
        if not self.first_failure:
            self.first_failure = printable(error, LONGEST_DETAIL)
        log.debug("Round %d: a reply of node %s counts as zero: %s", self._number, node, error)

    def close(self, number: int) -> tuple[Vector, dict[str, float]]:
        """The new w and the private measures.

        Whatever came back, the step is taken and charged: an empty cohort still releases noise.
        """
        if self._closed or number != self._number:
            raise not_configured(number)
        self._closed = True
        return self._wanted.publish()

    def facts(self) -> RoundFacts:
        """How many replies counted, and why others did not. It must not leave the server.

        Who sent them is not even there.
        """
        missing = max(0, len(self._silent) - self._unnamed)
        counts = self._zeros + Counter({"missing": missing})
        zeros = dict(sorted(counts.items()))
        return RoundFacts(self._number, self._used, zeros, self.first_failure)


def _without_error(reply: Reply) -> Reply:
    """A reply of a client that did not fail."""
    if reply.error:
        raise UnusableError("client error", reply.error)
    return reply


def _reason(error: BaseException) -> str:
    """Under which heading a reply that counts as zero is counted."""
    if isinstance(error, UnusableError):
        return error.reason
    return NOT_FINITE if isinstance(error, FloatingPointError) else "malformed"


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a client's measures that are finite numbers."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and abs(value) <= LARGEST_MEASURE
    }


def mean_of(measures: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Σ n_i·m_i / Σ n_i of each measure, over the users in whose reply it is a finite number; for
    measures called …rmse the root of the mean square, which is that of all rows together.

    n_i is the measure ``num-examples``, or 1 if it is missing; it counts up to ten times the
    median, so that no client can make itself the mean. Names that are ours, or that no terminal
    should see, are left out.
    """
    numbers = [finite(own) for own in measures]
    weights = [max(0.0, own.pop(NUM_EXAMPLES, 1.0)) for own in numbers]
    largest = LARGEST_WEIGHT * statistics.median(weights) if weights else 0.0
    sums: dict[str, float] = {}
    totals: dict[str, float] = {}
    for own, given in zip(numbers, weights, strict=True):
        weight = min(given, largest)
        for name, value in own.items():
            if name not in sums and (len(sums) >= MOST_MEASURES or not _is_name(name)):
                continue
            power = 2 if name.endswith(ROOT) else 1
            sums[name] = sums.get(name, 0.0) + weight * value**power
            totals[name] = totals.get(name, 0.0) + weight
    means = {name: total / totals[name] for name, total in sums.items() if totals[name] > 0}
    return {name: math.sqrt(mean) if name.endswith(ROOT) else mean for name, mean in means.items()}


def _is_name(name: str) -> bool:
    """Whether a client may call a measure so."""
    return name not in OURS and 0 < len(name) <= LONGEST_NAME and name.isprintable()


def refuse_other_model(so_far: Layout, initial: Layout) -> None:
    """ValueError if a training would go on with another model than it began with."""
    difference = so_far.difference(initial)
    if difference:
        raise ValueError(
            f"the training so far and the initial parameters have {difference}: continue with the "
            "same model, or start anew in another checkpoint_dir"
        )


def not_configured(number: int) -> ValueError:
    """The error for a round that is aggregated out of turn."""
    return ValueError(
        f"round {number} was aggregated without being configured before: no cohort was drawn for "
        "it and nothing was released; configure and aggregate each round in turn"
    )
