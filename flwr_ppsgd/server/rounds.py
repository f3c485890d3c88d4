"""A round from asking to publishing, the same for both of Flower's APIs.

Each reply is a vector or zero, never an exception.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.enrolment import Enrolment, Present
from flwr_ppsgd.server.tensorboard import Scalars
from flwr_ppsgd.server.training import Identity, Training
from flwr_ppsgd.wire import ARRAYS, GRADIENT, NUM_EXAMPLES, Hold, Layout, Order, is_buffer

log = logging.getLogger("flwr.ppsgd")

POLL_SECONDS = 1.0
LONGEST_DETAIL = 300  # characters of a client's error that the server's own log shows


class UnusableError(ValueError):
    """A reply that counts as zero, with the reason under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Reply:
    """What a client sent back in training, whichever API brought it.

    Args:
        arrays: the gradient, or the trained parameters; None if there are none.
        measures: numbers that came along, by name.
        error: why the client failed; empty if it did not.
        found: the names of what came, for an error message.
    """

    arrays: ArrayRecord | None = None
    measures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    found: Sequence[str] = ()


class Rounds:
    """The rounds of one training: who is asked, what is taken from them, what is published.

    Args:
        training: all settings.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.curator = Curator(training)
        self._scalars = Scalars(training.tensorboard_dir)
        population = training.release.cohort.population
        self._enrolment = Enrolment(population, training.enrolled, training.min_online)
        self._open: OpenRound | None = None
        self.last_round = -1  # of the plan; -1 if there is none

    @property
    def open_enrolment(self) -> bool:
        """Whether the population is the first nodes seen, rather than a list that was given."""
        return self._enrolment.open

    def plan(self, rounds: int) -> int:
        """Fix the number of rounds, as of ``Curator.plan``."""
        self.last_round = self.curator.plan(rounds)
        return self.last_round

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
        self.curator.check_budget(round_)
        online = self._online(look)
        drawn = self._enrolment.nodes(self.curator.draw(round_))
        asked = [online[node] for node in drawn if node in online]
        self._open = OpenRound(self.curator, round_, w, layout, asked)
        return asked

    def opened(self, round_: int) -> "OpenRound":
        """The round that was configured last; ValueError if there is none."""
        if self._open is None:
            raise not_configured(round_)
        return self._open

    def publish(self, round_: int) -> tuple[Vector, dict[str, float]]:
        """The new w, and what is released along with it."""
        w, measures = self.opened(round_).close(round_)
        released = {"epsilon": self.curator.epsilon_so_far(), **measures}
        self._scalars.add(round_, released)
        return w, released

    def order(self, round_: int) -> Order:
        """What the server asks of each client in a round, and what it tells them about itself."""
        training = self.training
        return Order(
            round=round_,
            step=training.steps.personal,
            clip_norm=training.release.clip_norm,
            reduction=training.release.reduction,
            publishes=training.steps.publishes,
            average=training.average,
            metrics=tuple(training.metrics.bounds) if training.metrics else (),
            training=self.curator.training_id,
            starts=self.curator.starts(),
            promise=self.curator.in_one_line(),
        )

    def evaluators(self, round_: int, look: Callable[[], Iterable[Present]]) -> list[Identity]:
        """The enrolled nodes online, if evaluation is due in this round; else nobody."""
        every = self.training.evaluate_every
        if not every or (round_ % every and round_ != self.last_round):
            return []
        self.curator.note_evaluation()
        online = self._online(look)
        return [online[node] for node in self._enrolment.known if node in online]

    def _online(self, look: Callable[[], Iterable[Present]]) -> dict[Identity, Identity]:
        online = self._enrolment.refresh(look)
        self.curator.note_caveat(self._enrolment.caveat)
        return online


class OpenRound:
    """Who was asked, what has been summed, what counted as zero and why."""

    def __init__(
        self,
        curator: Curator,
        number: int,
        w: Vector,
        layout: Layout,
        asked: Iterable[Hashable],
    ) -> None:
        self._curator = curator
        self._number = number
        self._w = w
        self._layout = layout
        self._waiting = set(asked)  # for a valid reply
        self._silent = set(self._waiting)
        self._total = curator.open_sum(len(w))
        self._used = 0
        self._zeros: Counter[str] = Counter()
        self._first = ""
        self._closed = False

    def take(self, node: Hashable, read: Callable[[], Reply]) -> None:
        """Add the first valid reply of an asked node. Everything else is zero, and counted."""
        self._silent.discard(node)
        try:
            if node not in self._waiting:
                detail = "a reply of a node that was not asked, or has answered"
                raise UnusableError("not asked for", detail)
            vector = self._vector(read())
            scales = self._total.scales(vector)
        except Exception as error:  # a reply is never a reason to stop a round
            self.pass_over(error, node)
            return
        self._waiting.discard(node)
        self._used += 1
        self._total.put(vector, scales)

    def pass_over(self, error: BaseException, node: Hashable = "unknown") -> None:
        """Count a reply as zero."""
        self._zeros[_reason(error)] += 1
        if not self._first:
            self._first = "; the first: " + one_line(error)
        log.debug("Round %d: a reply of node %s counts as zero: %s", self._number, node, error)

    def close(self, number: int) -> tuple[Vector, dict[str, float]]:
        """The new w and the private measures.

        Whatever came back, the step is taken and charged: an empty cohort still releases noise.
        """
        if self._closed or number != self._number:
            raise not_configured(number)
        self._closed = True
        published = self._curator.publish(self._number, self._w, self._total)
        self._report()
        return published

    def _vector(self, reply: Reply) -> Vector:
        """What of a reply is clipped and summed."""
        training = self._curator.training
        if reply.error:
            raise UnusableError("client error", reply.error)
        if not training.steps.publishes:
            return np.zeros(0)  # at α = 0 a client has nothing to say
        sent = self._sent(reply, training.replies)
        if training.replies == "parameters":
            return self._w - sent
        if training.metrics is None:
            return sent
        measures = finite(reply.measures)
        encoded = training.metrics.encode(measures, training.release.clip_norm)
        return np.append(sent, encoded)

    def _sent(self, reply: Reply, kind: str) -> Vector:
        """The arrays of a reply as one vector."""
        if reply.arrays is None:
            name = GRADIENT if kind == "gradient" else ARRAYS
            hint = ""
            if ARRAYS in reply.found:
                hint = " (a client that returns parameters needs PPSGD(replies='parameters'))"
            detail = f"no ArrayRecord {name!r} among {sorted(reply.found)}{hint}"
            raise UnusableError(f"without {name}", detail)
        try:
            return self._layout.flatten(reply.arrays)
        except ValueError as error:
            raise UnusableError("of wrong keys, shape or dtype", str(error)) from None

    def _report(self) -> None:
        """A line per round for the server's own log.

        How many replies counted must not leave the server; who sent them is not even in the line.
        """
        self._zeros["missing"] += len(self._silent)
        zeros = {reason: count for reason, count in sorted(self._zeros.items()) if count}
        nobody = zeros and not self._used
        level = logging.WARNING if nobody else logging.INFO
        if not log.isEnabledFor(level):
            return
        reasons = "".join(f" {name.replace(' ', '-')}={count}" for name, count in zeros.items())
        log.log(
            level,
            "server-private: round=%d epsilon=%s replies=%d zeros=%d%s%s",
            self._number,
            rounded_up(self._curator.epsilon_so_far()),
            self._used,
            sum(zeros.values()),
            reasons,
            self._first,
        )


def _reason(error: BaseException) -> str:
    """Under which heading a reply that counts as zero is counted."""
    if isinstance(error, UnusableError):
        return error.reason
    return "not finite" if isinstance(error, FloatingPointError) else "malformed"


def one_line(error: object) -> str:
    """An error as one line of bounded length."""
    words = str(error).split()
    return " ".join(words)[:LONGEST_DETAIL]


def ask(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterable[Message]:
    """Send, and wait for replies until all are there or the time is over.

    Late replies are never fetched. Flower's own loop trusts the wall clock, which may go back and
    keep a round open for as long.
    """
    if not _is_remote(grid):
        return grid.send_and_receive(messages, timeout=timeout)
    deadline = time.monotonic() + timeout
    replies: list[Message] = []
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    while waiting:
        found = list(grid.pull_messages(waiting))
        replies += found
        waiting -= {reply.metadata.reply_to_message_id for reply in found}
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    return replies


def _is_remote(grid: Grid) -> bool:
    """Whether this is Flower's grid over HTTP, told by its name: importing it would be dear."""
    return any(kind.__name__ == "HttpGrid" for kind in type(grid).__mro__)


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a client's measures that are finite numbers."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def mean_of(measures: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Σ n_i·m_i / Σ n_i of each measure, over the users in whose reply it is a finite number.

    n_i is the measure ``num-examples``, or 1 if it is missing.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for own in measures:
        numbers = finite(own)
        weight = max(0.0, numbers.pop(NUM_EXAMPLES, 1.0))
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    return {name: total / weights[name] for name, total in sums.items() if weights[name] > 0}


def not_configured(number: int) -> ValueError:
    """The error for a round that is aggregated out of turn."""
    return ValueError(
        f"round {number} was aggregated without being configured before: no cohort was drawn for "
        "it and nothing was released; configure and aggregate each round in turn"
    )
