"""A round from asking to publishing: each reply is a vector or zero, never an exception."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

from flwr_ppsgd import promise as statement
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.wire import Order

log = logging.getLogger("flwr.ppsgd")

POLL_SECONDS = 1.0


class UnusableError(ValueError):
    """A reply that counts as zero, with the reason under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class OpenRound:
    """Who was asked, what has been summed, what counted as zero and why."""

    def __init__(self, curator: Curator, number: int, w: Vector, asked: Iterable[Hashable]) -> None:
        self._curator = curator
        self._number = number
        self._w = w
        self._waiting = set(asked)  # for a valid reply
        self._silent = set(self._waiting)
        self._total = curator.open_sum(len(w))
        self._used = 0
        self._zeros: Counter[str] = Counter()
        self._first = ""
        self._closed = False

    def take(self, node: Hashable, read: Callable[[], Vector]) -> None:
        """Add the first valid reply of an asked node. Everything else is zero: counted and passed over."""
        self._silent.discard(node)
        try:
            if node not in self._waiting:
                raise UnusableError("not asked for", "a reply of a node that was not asked, or has answered")
            vector = read()
            scales = self._total.scales(vector)
        except Exception as error:  # a reply is never a reason to stop a round
            self.pass_over(error, node)
            return
        self._waiting.discard(node)
        self._used += 1
        self._total.put(vector, scales)

    def pass_over(self, error: BaseException, node: Hashable = "unknown") -> None:
        """Count a reply as zero."""
        infinite = isinstance(error, FloatingPointError)
        reason = error.reason if isinstance(error, UnusableError) else "not finite" if infinite else "malformed"
        self._zeros[reason] += 1
        self._first = self._first or f"; the first: {' '.join(str(error).split())[:300]}"
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

    def _report(self) -> None:
        """A line a round for the server's own log: how many replies counted must not leave it, who sent them is not
        even in it."""
        self._zeros["missing"] += len(self._silent)
        zeros = {reason: count for reason, count in sorted(self._zeros.items()) if count}
        level = logging.INFO if self._used or not zeros else logging.WARNING  # nobody could be used: look at it
        if not log.isEnabledFor(level):
            return
        log.log(
            level,
            "server-private: round=%d epsilon=%.4g replies=%d zeros=%d%s%s",
            self._number, self._curator.epsilon_so_far(), self._used, sum(zeros.values()),
            "".join(f" {reason.replace(' ', '-')}={count}" for reason, count in zeros.items()), self._first,
        )  # fmt: skip


def ask(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterable[Message]:
    """Send, and wait for replies until all are there or the time is over; late ones are never fetched.

    Flower's own loop trusts the wall clock, which may go back and keep a round open for as long.
    """
    if not isinstance(grid, HttpGrid):
        return grid.send_and_receive(messages, timeout=timeout)
    deadline, replies = time.monotonic() + timeout, list[Message]()
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    while waiting:
        found = list(grid.pull_messages(waiting))
        replies += found
        waiting -= {reply.metadata.reply_to_message_id for reply in found}
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS if waiting else 0)
    return replies


def order_for(curator: Curator, round_: int) -> Order:
    """What the server asks of each client in a round, and what it lets them know about itself."""
    return Order(
        round=round_,
        step=curator.steps.personal,
        clip_norm=curator.release.clip_norm,
        reduction=curator.release.reduction,
        publishes=curator.steps.publishes,
        average=curator.average,
        metrics=tuple(curator.metrics.bounds) if curator.metrics else (),
        training=curator.training,
        starts=curator.starts(),
        promise=statement.in_one_line(curator),
    )


def not_configured(number: int) -> ValueError:
    return ValueError(
        f"round {number} was aggregated without being configured before: no cohort was drawn for it and nothing was "
        "released; configure and aggregate each round in turn"
    )
