"""Where θ lives: in the node's own state, and in a directory if the node config names one.

No message ever carries the name under which it lives. A round counts once. The server may die and
send a round again, to the same users or to others; every Order therefore says at which round each
start of the server began, and θ is stepped from the newest save that is still part of that history.
"""

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.sent import Leaving
from flwr_ppsgd.client.shelf import Save, Shelf
from flwr_ppsgd.wire import Order, decode_vector, vector_record

log = logging.getLogger("flwr.ppsgd")

STATE = "ppsgd-personal"
BEFORE = "ppsgd-personal-before"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Personal:
    """θ with the stamp of when it was last stepped.

    Args:
        theta: θ.
        run: the Flower run.
        round: the last round taken part in.
        visit: the number of rounds taken part in.
        stood: Σ_{t<round} θ_t, if the average iterate is wanted.
        training: the server's training.
        start: which start of the server it was (1, 2, …) in which that round was.
        since: the number of visits before that training.
        base: the number of the save on disk that θ was stepped from.
        seen: the number of the newest save when θ was read.
    """

    theta: Vector
    run: int
    round: int = 0
    visit: int = 0
    stood: Vector | None = None
    training: int = 0
    start: int = 0
    since: int = 0
    base: int = 0
    seen: int = 0

    def stepped(self, theta: Vector, round_: int, average: bool = False) -> Self:
        """After one more visit."""
        stood = self._stood_until(round_) if average else self.stood
        return replace(self, theta=theta, round=round_, visit=self.visit + 1, stood=stood)

    def average(self, round_: int) -> Vector:
        """(1/n)·Σ_{t<n} θ_t after n = ``round_`` rounds.

        Each value is weighted by the rounds it stood, not by visits.
        """
        return self._stood_until(round_) / round_ if round_ else self.theta

    def counts_in(self, starts: tuple[int, ...]) -> bool:
        """Whether the server still has the round of this visit.

        It does if no later start began at or before it.
        """
        later = starts[self.start :]
        return self.round < min(later, default=math.inf)

    def entering(self, order: Order) -> Self:
        """The same θ at the beginning of another training."""
        return replace(
            self,
            round=0,
            stood=None,
            since=self.visit,
            training=order.training,
            base=0,
            seen=0,
        )

    def stamp(self) -> dict[str, Any]:
        """Everything but the vectors, for JSON."""
        return {name: getattr(self, name) for name in _STAMP}

    def vectors(self) -> dict[str, Vector]:
        """θ, and Σ θ_t if it is kept."""
        if self.stood is None:
            return {"theta": self.theta}
        return {"theta": self.theta, "stood": self.stood}

    def _stood_until(self, round_: int) -> Vector:
        standing = (round_ - self.round) * self.theta
        return standing if self.stood is None else self.stood + standing


_STAMP = tuple(each.name for each in fields(Personal) if each.name not in ("theta", "stood"))


def recall(context: Context) -> Personal | None:
    """What this node kept last, or None if the user has not taken part yet."""
    shelf = Shelf.of(context)
    if shelf is not None:
        on_disk = next(_from_disk(shelf.saves()), None)
        if on_disk is not None:
            return on_disk
    return next(_from_node(context), None)


def step_from(context: Context, order: Order, initial: Callable[[], Vector]) -> Personal:
    """The θ that this Order is to step: each round once, whatever the server lost."""
    shelf = Shelf.of(context)
    own, others = _lines(context, shelf, order.training)
    newest = next(own, None)
    if newest is not None:
        _refuse_if_replaced(newest, order)
        own = itertools.chain([newest], own)
    chosen = choose(own, others, order, below=order.round)
    if chosen is None:
        if shelf is not None:
            shelf.refuse_if_all_are_damaged()
        chosen = Personal(initial(), context.run_id, training=order.training)
    return replace(
        chosen,
        run=context.run_id,
        start=len(order.starts),
        seen=shelf.newest(order.training) if shelf else 0,
    )


def evaluate_with(context: Context, order: Order) -> Personal | None:
    """The θ after the Order's round, or the last one before it."""
    own, others = _lines(context, Shelf.of(context), order.training)
    return choose(own, others, order, below=order.round + 1)


def choose(
    own: Iterable[Personal],
    others: Iterable[Personal],
    order: Order,
    below: int,
) -> Personal | None:
    """The newest θ of a round below ``below`` that the server still has.

    None: nobody has stepped θ yet.

    Args:
        own: what was kept in this training, newest first.
        others: the same for other trainings under the same name, from whose last θ a new training
            goes on.
        order: tells at which rounds the server started.
        below: the first round that is too late.
    """
    oldest = None
    for oldest in own:
        if oldest.round < below and oldest.counts_in(order.starts):
            return oldest
    if oldest is not None and oldest.visit > oldest.since + 1:
        log.warning(
            "The server has gone back to round %d and the oldest θ kept here is of round %d: it is "
            "taken as it is",
            order.round,
            oldest.round,
        )
        return oldest
    last = next(iter(others), None)
    return None if last is None else last.entering(order)


def keep(context: Context, personal: Personal, before: Personal | None = None) -> None:
    """Replace what this node's state holds.

    Args:
        context: the node.
        personal: θ after the visit.
        before: θ before it, if the server can go back.
    """
    if before is not None:
        context.state[BEFORE] = _encode(before)
    context.state[STATE] = _encode(personal)


def all_or_nothing(
    context: Context,
    answer: Callable[[], Answer],
    leaving: Callable[[Answer], Leaving],
) -> Answer:
    """A reply and the θ after it, or an exception and the θ before it; on disk too.

    Args:
        context: the node.
        answer: makes the reply.
        leaving: what the reply takes along; asked for only if the node has a directory.
    """
    before = context.state.copy()
    try:
        reply = answer()
        stepped = context.state.get(STATE) is not before.get(STATE)
        mirror(context, lambda: leaving(reply), stepped=stepped)
    except BaseException:
        context.state = before
        raise
    return reply


def mirror(context: Context, leaving: Callable[[], Leaving], stepped: bool) -> None:
    """In the node's directory, if it has one: note what leaves, then w, and last θ."""
    shelf = Shelf.of(context)
    if shelf is None:
        return
    with shelf.writing():
        reply = leaving()
        shelf.note(reply.as_line(context.run_id))
        personal = next(_from_node(context), None)
        if stepped and personal is not None:
            shelf.put_shared(reply.w, personal.round, reply.promise)
            shelf.put(
                personal.training,
                personal.stamp(),
                personal.vectors(),
                personal.seen,
                personal.base,
            )


def _refuse_if_replaced(newest: Personal, order: Order) -> None:
    """Refuse an Order that was overtaken: its round is over, or its server started again."""
    start = len(order.starts)
    if (start, order.round) < (newest.start, newest.round):
        raise ValueError(
            f"round {order.round} of the server's start {start} is asked for after round "
            f"{newest.round} of start {newest.start}: it comes too late and θ stays as it is; give "
            "another training another ppsgd-run"
        )


def _lines(
    context: Context, shelf: Shelf | None, training: int
) -> tuple[Iterator[Personal], Iterator[Personal]]:
    """What was kept in this training, and in others.

    From the directory if anything is there, else from the node.
    """
    if shelf is not None and shelf.serials():
        own = shelf.saves(lambda other: other == training)
        others = shelf.saves(lambda other: other != training)
        return _from_disk(own), _from_disk(others)
    kept = list(_from_node(context))
    own_kept = [personal for personal in kept if personal.training == training]
    others_kept = [personal for personal in kept if personal.training != training]
    return iter(own_kept), iter(others_kept)


def _from_disk(saves: Iterable[Save]) -> Iterator[Personal]:
    for save in saves:
        stamp = {**save.stamp, "base": save.serial, "seen": save.serial}
        yield Personal(save.vectors["theta"], stood=save.vectors.get("stood"), **stamp)


def _from_node(context: Context) -> Iterator[Personal]:
    for name in (STATE, BEFORE):
        kept = context.state.get(name)
        if isinstance(kept, ArrayRecord):
            stamp = json.loads(decode_vector(kept["stamp"]).tobytes())
            stood = decode_vector(kept["stood"]) if "stood" in kept else None
            yield Personal(decode_vector(kept["theta"]), stood=stood, **stamp)


def _encode(personal: Personal) -> ArrayRecord:
    text = json.dumps(personal.stamp()).encode()
    stamp = np.frombuffer(text, dtype=np.uint8)
    return vector_record({**personal.vectors(), "stamp": stamp})
