"""A client's four answers in a secure sum.

The keys, seeds and shares of a round are in the node's state between its messages, under the name
of the round, and never on disk. That no server gets two answers is the store's: see ``Agreement``.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector, clip
from flwr_ppsgd.client.refusal import RefusalCode, RefusedError
from flwr_ppsgd.noise import RandomStream, secure_input
from flwr_ppsgd.secure.crypto import Words
from flwr_ppsgd.secure.protocol import (
    KeysSent,
    Partners,
    Roster,
    SharesSent,
    State,
    VectorSent,
    members_of,
    pack_parts,
)
from flwr_ppsgd.secure.terms import Session
from flwr_ppsgd.wire import DATA, Order, payload_hash

STATE = "ppsgd-secure"  # what this node keeps between the messages of one round
SESSION = "session"
KIND = "kind"
CHARGES = "charges"
Kind = TypeVar("Kind", KeysSent, SharesSent, VectorSent)


def answer(context: Context, order: Order, payload: bytes) -> tuple[bytes, ConfigRecord | None]:
    """The answer to exchange 1, 2 or 4, and what to keep for the next one: nothing after 4."""
    if order.stage == 1:
        keys_sent = KeysSent.new(_session(context, order))
        return keys_sent.public.to_bytes(), _state_record(keys_sent, order)
    if order.stage == 2:
        before = _kept_state(context, order, KeysSent)
        with _refuse_wrong_messages():
            shares_sent, shares = before.share(Roster.from_bytes(payload))
        return shares.to_bytes(), _state_record(shares_sent, order)
    masked = _kept_state(context, order, VectorSent)
    charges = int(context.state[STATE][CHARGES])  # type: ignore[arg-type]
    if order.charges <= charges:
        raise _secure_refusal(
            f"survivors are named and the server has charged {order.charges} releases, as many as "
            "before: a round is charged before anything can be unmasked; nothing is sent"
        )
    with _refuse_wrong_messages():
        revealed = masked.reveal(members_of(payload, masked.participants))
    return pack_parts(revealed), None


def read_partners(context: Context, order: Order, payload: bytes) -> tuple[SharesSent, Partners]:
    """Where this node is before exchange 3, and U₂ with the shares that this client holds.

    Checked before the user's data are read.
    """
    state = _kept_state(context, order, SharesSent)
    with _refuse_wrong_messages():
        partners = Partners.from_bytes(payload, state.roster.participants)
        state.check(partners)
    return state, partners


def bounded_input(
    order: Order, vector: Vector | None, measures: Mapping[str, float], size: int, factor: float
) -> NDArray[np.int64]:
    """x: the vector with the private measures, bounded, with its share of the noise, on the grid.

    Args:
        order: what the server asks for.
        vector: what the learner gave; None is sent as zero, with its share of the noise.
        measures: private measures.
        size: the number of coordinates of the vector, without private measures.
        factor: f.
    """
    terms = order.terms
    assert terms is not None
    metrics = terms.metrics(order.metrics)
    if vector is not None and metrics is not None:
        bound = factor * terms.clip_norm
        encoded = metrics.encode(measures, terms.clip_norm)
        vector = np.append(
            clip(vector, bound * math.sqrt(1 - metrics.share)),
            clip(encoded, bound * math.sqrt(metrics.share)),
        )
    with np.errstate(all="ignore"):
        return secure_input(vector, size, terms.release, metrics, RandomStream.secret())


def masked_vector(
    order: Order, state: SharesSent, partners: Partners, x: NDArray[np.int64]
) -> tuple[Words, ConfigRecord]:
    """Exchange 3: the masked vector, and what to keep for exchange 4."""
    with _refuse_wrong_messages():
        after, words = state.mask_vector(partners, x)
    return words, _state_record(after, order)


def payload_of(record: Any, order: Order) -> bytes:
    """The bytes that came with an Order; RefusedError unless they are those that it names."""
    payload = record.get(DATA, b"") if isinstance(record, ConfigRecord) else b""
    if not isinstance(payload, bytes) or payload_hash(payload) != order.payload:
        raise _secure_refusal("a message of a secure sum that is not the one that its Order names")
    return payload


def _session(context: Context, order: Order) -> Session:
    """Which sum this is."""
    assert order.terms is not None
    return Session(
        training=order.training,
        run=context.run_id,
        start=len(order.starts),
        round=order.round,
        part=order.asks,
        terms=order.terms,
    )


def _state_record(state: State, order: Order) -> ConfigRecord:
    """What the node keeps of a round: nothing of the step before is left."""
    values: dict[str, Any] = {
        SESSION: state.session.label,
        KIND: type(state).__name__,
        CHARGES: order.charges,
        **state.to_flat(),
    }
    return ConfigRecord(values)


def keep_state(context: Context, state: ConfigRecord | None) -> None:
    """Keep what ``answer`` gave for the next exchange, in place of what was kept; None: nothing."""
    context.state.pop(STATE, None)
    if state is not None:
        context.state[STATE] = state


def _kept_state(context: Context, order: Order, kind: type[Kind]) -> Kind:
    """What the node keeps of this round; RefusedError if it is at another point of it."""
    session = _session(context, order)
    kept: Any = context.state.get(STATE, {})
    if kept.get(KIND) != kind.__name__ or kept.get(SESSION) != session.label:
        raise _secure_refusal(
            f"exchange {order.stage} of round {order.round}, for which nothing is kept here: it "
            "was answered before, or this node was started anew; nothing is sent"
        )
    return kind.from_flat(session, kept)


@contextmanager
def _refuse_wrong_messages() -> Iterator[None]:
    """A ValueError of the protocol as a refusal."""
    try:
        yield
    except ValueError as error:
        raise _secure_refusal(str(error)) from None


def _secure_refusal(reason: str) -> RefusedError:
    return RefusedError(RefusalCode.REFUSED_SECURE, reason)
