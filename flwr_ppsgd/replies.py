"""From what came back to what counts: each reply is a vector or zero, never an exception."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_ppsgd.algorithm import Vector, length
from flwr_ppsgd.wire import GRADIENT, METRICS, NUM_EXAMPLES, Layout

log = logging.getLogger("flwr.ppsgd")


class OpenRound:
    """A round between ``configure_train`` and ``aggregate_train``: w, who was asked, and what became of the replies."""

    def __init__(self, number: int, arrays: ArrayRecord, layout: Layout, asked: list[Message]) -> None:
        self.number = number
        self.arrays = arrays
        self.layout = layout
        self.w = layout.flatten(arrays)
        self.closed = False
        self._asked = [message.metadata for message in asked]  # a grid fills in the message ids when it sends them
        self._zeros: Counter[str] = Counter()
        self._first_error = ""

    def usable(
        self, replies: Iterable[Message], read: Callable[["OpenRound", Message], Vector | None]
    ) -> Iterator[Vector]:
        """Each first valid reply of an asked node as a vector. Everything else is zero: counted and passed over."""
        by_message = {metadata.message_id: metadata.dst_node_id for metadata in self._asked if metadata.message_id}
        waiting = {metadata.dst_node_id for metadata in self._asked}
        once = getattr(replies, "once", replies.__iter__)  # InProcessGrid forgets each reply once it is read
        for reply in once():
            node = _answered_node(reply, by_message)
            try:
                if node not in waiting:
                    raise UnusableError("not asked for", f"node {node} was not asked, or has answered")
                vector = read(self, reply)
            except Exception as error:  # a reply is never a reason to stop a round
                self._count(error, node)
                continue
            waiting.discard(node)
            if vector is not None:
                yield vector
        self._zeros["missing"] = len(waiting)

    def report(self) -> None:
        """Zeros by reason, for the server's own log: who took part and how many must not leave it."""
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self._zeros.items()) if count)
        if counts:
            log.info("Round %d (server-private): counted as zero: %s%s", self.number, counts, self._first_error)

    def _count(self, error: Exception, node: int | None) -> None:
        reason = error.reason if isinstance(error, UnusableError) else "malformed"
        self._zeros[reason] += 1
        self._first_error = self._first_error or f"; the first: {str(error)[:300]}"
        log.debug("Round %d: a reply of node %s counts as zero: %s", self.number, node, error)


class UnusableError(ValueError):
    """A reply that counts as zero, with the reason under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def nothing(round_: OpenRound, reply: Message) -> None:  # noqa: ARG001
    """At α = 0 a client has nothing to say; it may still fail."""
    _check_error(reply)


def gradient(round_: OpenRound, reply: Message) -> Vector:
    """The gradient record of a reply, and nothing else of it."""
    _check_error(reply)
    record = reply.content.get(GRADIENT)
    if not isinstance(record, ArrayRecord):
        raise UnusableError("without a gradient", f"no ArrayRecord {GRADIENT!r} among {sorted(reply.content)}")
    try:
        vector = round_.layout.flatten(record)
    except ValueError as error:
        raise UnusableError("of wrong keys, shape or dtype", str(error)) from None
    if not math.isfinite(length(vector)):
        raise UnusableError("not finite", "the gradient holds NaN or infinity")
    return vector


def _check_error(reply: Message) -> None:
    if reply.has_error():
        raise UnusableError("client error", f"error {reply.error.code}: {reply.error.reason}")


def _answered_node(reply: Message, by_message: dict[str, int]) -> int | None:
    """The asked node that a reply answers for: by the message it replies to where there is one, else by its source."""
    answered = reply.metadata.reply_to_message_id
    if answered and by_message:
        return by_message.get(answered)
    return reply.metadata.src_node_id


def weighted_mean(contents: Iterable[RecordDict]) -> MetricRecord | None:
    """Σ n_i·m_i / Σ n_i for each metric, over the replies in which it is a finite number; None where there are none."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for content in contents:
        metrics = content.get(METRICS)
        numbers = _finite(metrics) if isinstance(metrics, MetricRecord) else {}
        weight = max(0.0, numbers.pop(NUM_EXAMPLES, 1.0))
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    means = {name: total / weights[name] for name, total in sums.items() if weights[name] > 0}
    return MetricRecord({**means}) if means else None


def _finite(metrics: MetricRecord) -> dict[str, float]:
    return {name: float(v) for name, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
