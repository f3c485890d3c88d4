"""A client's four answers in a secure sum, and what it remembers so that no server gets two.

The keys, seeds and shares of a round are in the node's state between its messages, under the name
of the round, and never on disk. What is on disk, if the node has a directory, is what a training
may not change and which rounds were answered.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.refusal import REFUSED_SECURE, DiskError, RefusedError, refusing
from flwr_ppsgd.client.shelf import TRAININGS, Shelf
from flwr_ppsgd.client.visit import Sent
from flwr_ppsgd.noise import Coins, secure_input
from flwr_ppsgd.secure.masks import Words
from flwr_ppsgd.secure.messages import Partners, Roster, members_of
from flwr_ppsgd.secure.participant import Keyed, Masked, Session, Shared, State
from flwr_ppsgd.secure.terms import Terms
from flwr_ppsgd.wire import DATA, Order, payload_hash

log = logging.getLogger("flwr.ppsgd")

STATE = "ppsgd-secure"  # what this node keeps between the messages of one round
MEMORY = "ppsgd-secure-memory"  # of trainings, in the node's state
SESSION = "session"
KIND = "kind"
CHARGES = "charges"
Kind = TypeVar("Kind", Keyed, Shared, Masked)


@dataclass(frozen=True)
class Memory:
    """What a node remembers of one training with a secure sum.

    Args:
        terms: what was first agreed for each part, by what was asked for: it never changes.
        last: the start of the server and the round of the last masked vector, by part.
        answers: the number of masked vectors.
    """

    terms: dict[str, dict[str, Any]] = field(default_factory=dict)
    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    answers: int = 0

    def agreed(self, order: Order) -> Self:
        """With the Order's terms; RefusedError if they were others before."""
        assert order.terms is not None
        now = order.terms.to_flat()
        before = self.terms.get(order.asks, now)
        for name, value in before.items():
            if now[name] != value:
                raise refused(
                    f"{name} of the secure sum was {value} in this training and is {now[name]} "
                    "now: it is fixed; nothing is sent"
                )
        return replace(self, terms={**self.terms, order.asks: now})

    def claimed(self, order: Order) -> Self:
        """After one more masked vector; RefusedError if this round was answered, or all are."""
        here = (len(order.starts), order.round)
        last = self.last.get(order.asks)
        if last is not None and here <= tuple(last):
            raise refused(
                f"a second masked vector for round {order.round} of the server's start {here[0]}, "
                f"after round {last[1]} of start {last[0]}: a round is answered once"
            )
        restarts = max(0, len(order.starts) - 1)
        most = order.planned + restarts
        if self.answers >= most:
            raise refused(
                f"{self.answers} rounds were answered and {order.planned} are planned, with "
                f"{restarts} restarts of the server: no more are answered"
            )
        return replace(self, last={**self.last, order.asks: here}, answers=self.answers + 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        last = {part: (int(start), int(round_)) for part, (start, round_) in data["last"].items()}
        return cls(data["terms"], last, data["answers"])


NOTHING = Memory()


def refuse_plain(context: Context, order: Order) -> None:
    """RefusedError if a training that has a secure sum asks for a vector of its own."""
    if not order.publishes:
        return
    if order.terms is not None or _recalled(context, order.training).terms:
        raise refused(
            "an Order without a secure sum in a training that has one: the server would see this "
            "client's vector; nothing is sent"
        )


def refuse_other_terms(context: Context, order: Order) -> None:
    """RefusedError if this training had other terms before."""
    if order.terms is not None:
        _recalled(context, order.training).agreed(order)


def answer_keys(context: Context, order: Order) -> bytes:
    """Exchange 1: two fresh public keys. What was kept of another round is gone."""
    memory = _recalled(context, order.training)
    memory.agreed(order).claimed(order)  # else there is no point in going on
    state = Keyed.new(_session(context, order))
    _keep(context, state, order)
    return state.message.to_bytes()


def answer_shares(context: Context, order: Order, payload: bytes) -> bytes:
    """Exchange 2: shares of the seed and of the mask key, for the neighbours."""
    before = _kept(context, order, Keyed)
    after, shares = refusing(
        REFUSED_SECURE,
        lambda: before.share(Roster.from_bytes(payload), _terms(order).rules),
    )
    _keep(context, after, order)
    return shares.to_bytes()


def answer_masked(
    context: Context,
    order: Order,
    payload: bytes,
    *,
    size: int,
    train: Callable[[], Sent],
) -> Words:
    """Exchange 3: the bounded vector with its share of the noise, masked.

    A learner that fails counts as zero, with its share of the noise all the same: whether it fails
    may depend on its data. What a refusal says does not, so those stay refusals.

    Args:
        context: the node.
        order: what the server asks for.
        payload: U₂, and the shares that this client holds.
        size: the number of coordinates of the vector, without private measures.
        train: makes the vector, and steps θ.
    """
    before = _kept(context, order, Shared)
    partners = refusing(
        REFUSED_SECURE,
        lambda: Partners.from_bytes(payload, before.roster.participants),
    )
    rules = _terms(order).rules
    refusing(REFUSED_SECURE, lambda: before.check(partners, rules))
    with _remembering(context, order.training) as change:
        change(lambda memory: memory.agreed(order).claimed(order))
    x = _input(order, size, train)
    after, words = refusing(REFUSED_SECURE, lambda: before.masked(partners, rules, x))
    _keep(context, after, order)
    return words


def answer_revealed(context: Context, order: Order, payload: bytes) -> bytes:
    """Exchange 4: one share for each neighbour; after it nothing of the round is left here."""
    before = _kept(context, order, Masked)
    record = context.state[STATE]
    charges = int(record[CHARGES])  # type: ignore[arg-type]
    if order.charges <= charges:
        raise refused(
            f"survivors are named and the server has charged {order.charges} releases, as many as "
            "before: a round is charged before anything can be unmasked; nothing is sent"
        )
    revealed = refusing(
        REFUSED_SECURE,
        lambda: before.reveal(members_of(payload, before.participants), _terms(order).rules),
    )
    del context.state[STATE]
    return revealed.to_bytes()


def payload_of(record: Any, order: Order) -> bytes:
    """The bytes that came with an Order; RefusedError unless they are those that it names."""
    payload = b""
    if isinstance(record, ConfigRecord) and isinstance(record.get(DATA), bytes):
        payload = bytes(record[DATA])  # type: ignore[arg-type]
    if payload_hash(payload) != order.payload:
        raise refused("a message of a secure sum that is not the one that its Order names")
    return payload


def refused(reason: str) -> RefusedError:
    """A refusal that concerns the secure sum."""
    return RefusedError(REFUSED_SECURE, reason)


def _input(order: Order, size: int, train: Callable[[], Sent]) -> NDArray[np.int64]:
    """x: what the learner gives, bounded, in whole multiples of the grid, with its noise."""
    terms = _terms(order)
    metrics = terms.metrics(order.metrics)
    vector: Vector | None = None
    try:
        sent = train()
        assert sent.vector is not None
        vector = sent.vector
        if metrics is not None:
            encoded = metrics.encode(sent.measures, terms.clip_norm)
            vector = np.append(vector, encoded)
    except (RefusedError, DiskError):
        raise
    except Exception:
        log.exception("The learner failed: zero is sent, with this client's share of the noise")
    with np.errstate(all="ignore"):
        return secure_input(vector, size, terms.release, metrics, Coins.secret())


def _terms(order: Order) -> Terms:
    assert order.terms is not None
    return order.terms


def _session(context: Context, order: Order) -> Session:
    return Session(
        training=order.training,
        run=context.run_id,
        start=len(order.starts),
        round=order.round,
        part=order.asks,
    )


# --- between the messages of a round


def _keep(context: Context, state: State, order: Order) -> None:
    """Replace what the node keeps of a round: nothing of the step before is left."""
    values: dict[str, Any] = {
        SESSION: state.session.label,
        KIND: type(state).__name__,
        CHARGES: order.charges,
        **state.to_flat(),
    }
    context.state[STATE] = ConfigRecord(values)


def _kept(context: Context, order: Order, kind: type[Kind]) -> Kind:
    """What the node keeps of this round; RefusedError if it is at another point of it."""
    record = context.state.get(STATE)
    session = _session(context, order)
    found = record.get(KIND) if isinstance(record, ConfigRecord) else None
    if found != kind.__name__ or record[SESSION] != session.label:  # type: ignore[index]
        raise refused(
            f"exchange {order.stage} of round {order.round}, for which nothing is kept here: it "
            "was answered before, or this node was started anew; nothing is sent"
        )
    flat = {name: bytes(value) for name, value in record.items() if isinstance(value, bytes)}  # type: ignore[union-attr]
    return kind.from_flat(session, flat)


# --- between rounds


def _recalled(context: Context, training: int) -> Memory:
    """What is remembered of a training: on disk, or else in the node's state."""
    shelf = Shelf.of(context, training)
    found = _in_state(context) if shelf is None else shelf.memory()
    data = found.get(str(training))
    return NOTHING if data is None else Memory.from_json(data)


@contextmanager
def _remembering(
    context: Context, training: int
) -> Iterator[Callable[[Callable[[Memory], Memory]], None]]:
    """Alone with the memory, under the lock of θ: a change is on disk before anything leaves."""
    shelf = Shelf.of(context, training)

    def changed(change: Callable[[Memory], Memory]) -> None:
        found = _in_state(context) if shelf is None else shelf.memory()
        before = found.pop(str(training), None)
        after = change(NOTHING if before is None else Memory.from_json(before))
        recent = list(found.items())[-(TRAININGS - 1) :]
        kept = {**dict(recent), str(training): after.to_json()}
        if shelf is None:
            context.state[MEMORY] = ConfigRecord({DATA: json.dumps(kept)})
        else:
            shelf.put_memory(kept)

    if shelf is None:
        yield changed
        return
    with shelf.writing():
        yield changed


def _in_state(context: Context) -> dict[str, Any]:
    record = context.state.get(MEMORY)
    if record is None or not isinstance(record, ConfigRecord):
        return {}
    found: dict[str, Any] = json.loads(str(record[DATA]))
    return found
