"""Where θ lives: in the node's own state, under a name that no message ever carries, and in a directory where the node
config names one.

A round counts once. The server may die and send a round again, to the same users or to others; every Order therefore
says at which round each start of the server began, and θ is stepped from the newest save that is still part of that
history.
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
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Personal:
    """θ with the stamp of when it was last stepped.

    run: the Flower run. round: the last round taken part in. visit: how many that makes.
    stood: Σ_{t<round} θ_t, kept where the average iterate is wanted.
    training, start: the server's training, and its how manieth start, in which that round was.
    since: visits before that training.
    base, seen: numbers of saves on disk: the one that θ was stepped from, the newest when it was read.
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
        """(1/n)·Σ_{t<n} θ_t after n = ``round_`` rounds: each value weighted by the rounds it stood, not by visits."""
        return self._stood_until(round_) / round_ if round_ else self.theta

    def counts_in(self, starts: tuple[int, ...]) -> bool:
        """Whether the server still has the round of this visit: no later start began at or before it."""
        return self.round < min(starts[self.start :], default=math.inf)

    def entering(self, order: Order) -> Self:
        """The same θ at the beginning of another training."""
        return replace(self, round=0, stood=None, since=self.visit, training=order.training, base=0, seen=0)

    def stamp(self) -> dict[str, Any]:
        """Everything but the vectors, for JSON."""
        return {name: getattr(self, name) for name in _STAMP}

    def vectors(self) -> dict[str, Vector]:
        return {"theta": self.theta, **({} if self.stood is None else {"stood": self.stood})}

    def _stood_until(self, round_: int) -> Vector:
        before: Vector | float = 0.0 if self.stood is None else self.stood
        return before + (round_ - self.round) * self.theta


_STAMP = tuple(each.name for each in fields(Personal) if each.name not in ("theta", "stood"))


def recall(context: Context) -> Personal | None:
    """What this node kept last, or None where the user has not taken part yet."""
    shelf = Shelf.of(context)
    on_disk = next(_from_disk(shelf.saves()), None) if shelf else None
    return on_disk or next(_from_node(context), None)


def step_from(context: Context, order: Order, initial: Callable[[], Vector]) -> Personal:
    """The θ that this Order is to step: each round once, whatever the server lost."""
    shelf = Shelf.of(context)
    own, others = _lines(context, shelf, order.training)
    newest = next(own, None)
    if newest is not None:
        _refuse_if_replaced(newest, order)
    chosen = choose(own if newest is None else itertools.chain([newest], own), others, order, below=order.round)
    if chosen is None and shelf is not None:
        shelf.refuse_if_all_are_damaged()
    return replace(
        chosen or Personal(initial(), context.run_id, training=order.training),
        run=context.run_id,
        start=len(order.starts),
        seen=shelf.newest(order.training) if shelf else 0,
    )


def evaluate_with(context: Context, order: Order) -> Personal | None:
    """The θ after the Order's round, or the last one before it."""
    return choose(*_lines(context, Shelf.of(context), order.training), order, below=order.round + 1)


def choose(own: Iterable[Personal], others: Iterable[Personal], order: Order, below: int) -> Personal | None:
    """The newest θ of a round below ``below`` that the server still has. None: nobody has stepped θ yet.

    own: what was kept in this training, newest first. others: the same for other trainings under the same name, from
    whose last θ a new one goes on.
    """
    oldest = None
    for oldest in own:
        if oldest.round < below and oldest.counts_in(order.starts):
            return oldest
    if oldest is not None and oldest.visit > oldest.since + 1:
        log.warning(
            "The server has gone back to round %d and the oldest θ kept here is of round %d: it is taken as it is",
            order.round, oldest.round,
        )  # fmt: skip
        return oldest
    last = next(iter(others), None)
    return last and last.entering(order)


def keep(context: Context, personal: Personal, before: Personal | None = None) -> None:
    """Replace what this node's state holds, by θ and, where the server can go back, the θ before.

    Call it last: an exception before it leaves θ as it was.
    """
    if before is not None:
        context.state[BEFORE] = _encode(before)
    context.state[STATE] = _encode(personal)


def all_or_nothing(context: Context, answer: Callable[[], Reply], leaving: Callable[[Reply], Leaving]) -> Reply:
    """A reply and the θ after it, or an exception and the θ before it; on disk too, where the node has a directory."""
    before = context.state.copy()
    try:
        reply = answer()
        mirror(context, lambda: leaving(reply), stepped=context.state.get(STATE) is not before.get(STATE))
    except BaseException:
        context.state = before
        raise
    return reply


def mirror(context: Context, leaving: Callable[[], Leaving], stepped: bool) -> None:
    """In the node's directory, if it has one: note what leaves, then w, and last the θ that the node's state holds."""
    shelf = Shelf.of(context)
    if shelf is None:
        return
    with shelf.writing():
        reply = leaving()
        shelf.note(reply.as_line(context.run_id))
        personal = next(_from_node(context), None)
        if stepped and personal is not None:
            shelf.put_shared(reply.w, personal.round, reply.promise)
            shelf.put(personal.training, personal.stamp(), personal.vectors(), personal.seen, personal.base)


def _refuse_if_replaced(newest: Personal, order: Order) -> None:
    """An Order that was overtaken must not step θ: its round is over, or its server was started again."""
    if (len(order.starts), order.round) < (newest.start, newest.round):
        raise ValueError(
            f"round {order.round} of the server's start {len(order.starts)} is asked for after round {newest.round} of "
            f"start {newest.start}: it comes too late and θ stays as it is; give another training another ppsgd-run"
        )


def _lines(context: Context, shelf: Shelf | None, training: int) -> tuple[Iterator[Personal], Iterator[Personal]]:
    """What was kept in this training, and in others; from the directory if anything is there, else from the node."""
    if shelf is not None and shelf.serials():
        return _from_disk(shelf.saves(lambda t: t == training)), _from_disk(shelf.saves(lambda t: t != training))
    kept = list(_from_node(context))
    return iter([p for p in kept if p.training == training]), iter([p for p in kept if p.training != training])


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
    stamp = np.frombuffer(json.dumps(personal.stamp()).encode(), dtype=np.uint8)
    return vector_record({**personal.vectors(), "stamp": stamp})
