"""Where θ lives: in the node's own state, and in a directory if the node config names one.

No message ever carries the name under which it lives. A round counts once. The server may die and
send a round again, to the same users or to others; every Order therefore says at which round each
start of the server began, and θ is stepped from the newest save that is still part of that history.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, Context, RecordDict
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import decode_vector, vector_record
from flwr_ppsgd.checks import altered
from flwr_ppsgd.client.refusal import REFUSED_CHARGES, THETA_FOREIGN, TOO_LATE, RefusedError
from flwr_ppsgd.client.sent import Leaving
from flwr_ppsgd.client.shelf import (
    RUN,
    TRAININGS,
    Save,
    Shelf,
    needed_before,
    owner_of,
)
from flwr_ppsgd.wire import Order

log = logging.getLogger("flwr.ppsgd")

STATE = "ppsgd-personal"  # the newest θ in a node's state; older ones are STATE-1, STATE-2, …
MODEL = "ppsgd-model"  # the personal model of the recipe, in a node's state
LEAST_BACK = 2  # rounds that any server with a checkpoint_dir may go back
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
        charges: the number of charges that the server had told of.
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
    charges: int = 0

    def stepped(self, theta: Vector, round_: int, average: bool = False) -> Self:
        """After one more visit."""
        stood = self._stood_until(round_) if average else self.stood
        return altered(self, theta=theta, round=round_, visit=self.visit + 1, stood=stood)

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
            charges=0,
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


def recall_or_begin(context: Context, initial: Callable[[], Vector]) -> Personal:
    """The θ for a message without an Order: that of this node's training, or else a new one."""
    training = training_in(context)
    shelf = Shelf.of(context, training)
    theta = initial()
    kept = _last(context, shelf) or Personal(theta, context.run_id, training=training)
    _refuse_other_model(kept, theta, shelf)
    return kept


def step_from(context: Context, order: Order, initial: Callable[[], Vector]) -> Personal:
    """The θ that this Order is to step: each round once, whatever the server lost."""
    shelf = Shelf.of(context, order.training)
    # before θ is read: what another task saves from now on must show
    seen = shelf.newest(order.training) if shelf else 0
    chosen = _chosen(context, shelf, order, initial, stepping=True)
    return altered(
        chosen,
        run=context.run_id,
        start=len(order.starts),
        seen=seen,
        charges=order.charges,
    )


def evaluate_with(context: Context, order: Order, initial: Callable[[], Vector]) -> Personal:
    """The θ after the Order's round, or the last one before it."""
    shelf = Shelf.of(context, order.training)
    return _chosen(context, shelf, order, initial, stepping=False)


def _chosen(
    context: Context,
    shelf: Shelf | None,
    order: Order,
    initial: Callable[[], Vector],
    stepping: bool,
) -> Personal:
    """The θ that counts for an Order, or a new one; RefusedError if there is a reason not to.

    A step goes from the θ before the Order's round, an evaluation is at the θ after it.
    """
    own = _own(context, shelf, order.training)
    newest = next(own, None)
    if newest is not None:
        _refuse_fewer_charges(newest, order)
        if stepping:
            _refuse_if_replaced(newest, order)
        own = itertools.chain([newest], own)
    theta = initial()
    below = order.round if stepping else order.round + 1
    chosen = choose(own, _others(context, shelf, order.training), order, below)
    if chosen is None:
        return Personal(theta, context.run_id, training=order.training)
    _refuse_other_model(chosen, theta, shelf)
    return chosen


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
            goes on. Read only if nothing in ``own`` counts.
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


def keep(context: Context, personal: Personal, back: int = 0) -> None:
    """Put θ into this node's state, with as many older ones as the server may go back to.

    If the node has a directory, they are there.

    Args:
        context: the node.
        personal: θ after the visit.
        back: the number of rounds that the server may go back.
    """
    before = _records(context)
    records = [_encode(personal)]
    if before and owner_of(context) is None:
        kept = [_decode(record) for record in before]
        records += [before[place] for place in _still_needed(personal, kept, back)]
    for place, record in enumerate(records):
        context.state[_state_name(place)] = record
    for place in range(len(records), len(before)):
        del context.state[_state_name(place)]


def _still_needed(personal: Personal, kept: list[Personal], back: int) -> list[int]:
    """The places of older θ that stay: what this one goes back to, and the last of other trainings.

    θ of a round that the server has lost had more visits than the one that was stepped instead.
    """
    history = []
    last_of_others: dict[int, int] = {}
    for place, each in enumerate(kept):
        if each.training != personal.training:
            last_of_others.setdefault(each.training, place)
        elif each.visit < personal.visit:
            history.append(place)
    needed = needed_before(personal.round, [kept[place].round for place in history], back)
    return [*history[:needed], *list(last_of_others.values())[: TRAININGS - 1]]


def back_of(order: Order | None) -> int:
    """The number of rounds that the server may go back."""
    if order is None or not order.starts:
        return 0
    return max(LEAST_BACK, order.back)


def all_or_nothing(
    context: Context,
    order: Order | None,
    answer: Callable[[Order | None], Answer],
    leaving: Callable[[Answer, Order | None], Leaving],
) -> Answer:
    """A reply and the θ after it, or an exception and the θ before it; on disk too.

    Args:
        context: the node.
        order: what is asked; None by a stock strategy.
        answer: makes the reply.
        leaving: what the reply takes along; asked for only if the node has a directory.
    """
    before = dict(context.state)
    try:
        reply = answer(order)
        if keeps_on_disk(context):
            stepped = context.state.get(STATE) is not before.get(STATE)
            _mirror(context, leaving(reply, order), stepped=stepped)
    except BaseException:
        context.state = RecordDict(before)
        raise
    return reply


def note(context: Context, leaving: Leaving) -> None:
    """In the node's directory, if it has one: note a reply that leaves θ as it is."""
    if keeps_on_disk(context):
        _mirror(context, leaving, stepped=False)


def keep_model(context: Context, training: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Keep a personal model: in the node's directory if it has one, else in its state."""
    shelf = Shelf.of(context, training)
    if shelf is None:
        context.state[MODEL] = ArrayRecord({name: Array(each) for name, each in arrays.items()})
        return
    with shelf.writing():
        shelf.put_model(arrays)


def training_in(context: Context) -> int:
    """The training of the newest θ in this node's state; 0 if there is none."""
    newest = next(_from_node(context), None)
    return newest.training if newest else 0


def keeps_on_disk(context: Context) -> bool:
    """Whether the node has a directory for θ."""
    return owner_of(context) is not None


def _mirror(context: Context, reply: Leaving, stepped: bool) -> None:
    """In the node's directory: note what leaves, then w, and last θ."""
    training = reply.order.training if reply.order else training_in(context)
    shelf = Shelf.of(context, training)
    assert shelf is not None
    personal = next(_from_node(context), None) if stepped else None
    with shelf.writing():
        if personal is not None:
            shelf.refuse_if_busy(personal.training, personal.seen)
        with shelf.noted(reply.as_line(context.run_id)):
            if personal is not None:
                _put(shelf, personal, reply)


def _put(shelf: Shelf, personal: Personal, reply: Leaving) -> None:
    shelf.put_shared(reply.w, personal.round, reply.promise)
    shelf.put(
        personal.training,
        personal.stamp(),
        personal.vectors(),
        seen=personal.seen,
        base=personal.base,
        back=back_of(reply.order),
    )


def _refuse_if_replaced(newest: Personal, order: Order) -> None:
    """Refuse an Order that was overtaken: its round is over, or its server started again."""
    start = len(order.starts)
    if (start, order.round) < (newest.start, newest.round):
        raise RefusedError(
            TOO_LATE,
            f"round {order.round} of the server's start {start} is asked for after round "
            f"{newest.round} of start {newest.start}: it comes too late and θ stays as it is; give "
            f"another training another {RUN}",
        )


def _refuse_fewer_charges(newest: Personal, order: Order) -> None:
    """Refuse a server that has forgotten what it released: its ε would be too small."""
    if order.charges < newest.charges:
        raise RefusedError(
            REFUSED_CHARGES,
            f"the server has charged {order.charges} rounds of a training that had charged "
            f"{newest.charges} before: its journal went back in time, so its epsilon is too small; "
            "nothing is sent; ask its operator to add the missing charges with ppsgd ledger",
        )


def _refuse_other_model(kept: Personal, initial: Vector, shelf: Shelf | None) -> None:
    """Refuse a θ of another size than the learner's own."""
    if kept.theta.shape != initial.shape:
        place = f"run {shelf.run!r} in {shelf.root}" if shelf else "this node's state"
        raise RefusedError(
            THETA_FOREIGN,
            f"the θ of {place} has {kept.theta.size} numbers and this learner's has "
            f"{initial.size}: it belongs to another model; go on with that one there, or name "
            f"another {RUN} to begin anew",
        )


def _last(context: Context, shelf: Shelf | None) -> Personal | None:
    """The newest θ in the directory, or else in the node."""
    save = shelf.last() if shelf else None
    if save is not None:
        return next(_from_disk([save]))
    kept = next(_from_node(context), None)
    return None if kept is None else replace(kept, seen=0)  # no save was seen


def _own(context: Context, shelf: Shelf | None, training: int) -> Iterator[Personal]:
    """What was kept in this training, newest first: in the directory, or else in the node."""
    found = False
    if shelf is not None:
        for personal in _from_disk(shelf.saves(lambda other: other == training)):
            found = True
            yield personal
    if not found:
        for personal in _from_node(context):
            if personal.training == training:
                yield personal


def _others(context: Context, shelf: Shelf | None, training: int) -> Iterator[Personal]:
    """The last θ of another training under the same name, if somebody named the run.

    Asked for only if this training has none; refused if that is because of damage.
    """
    named = RUN in context.run_config
    save = None
    if shelf is not None:
        if named:
            save = next(shelf.saves(lambda other: other != training), None)
        shelf.refuse_to_fall_back(save, training)
    if save is not None:
        yield from _from_disk([save])
    elif named:
        kept = _from_node(context)
        yield from (personal for personal in kept if personal.training != training)


def _from_disk(saves: Iterable[Save]) -> Iterator[Personal]:
    for save in saves:
        stamp = {**save.stamp, "base": save.serial, "seen": save.serial}
        yield Personal(save.vectors["theta"], stood=save.vectors.get("stood"), **stamp)


def _from_node(context: Context) -> Iterator[Personal]:
    """What the node's state holds, newest first."""
    return map(_decode, _records(context))


def _records(context: Context) -> list[ArrayRecord]:
    """The same, serialised."""
    records: list[ArrayRecord] = []
    while (record := context.state.get(_state_name(len(records)))) is not None:
        if not isinstance(record, ArrayRecord):
            break
        records.append(record)
    return records


def _decode(record: ArrayRecord) -> Personal:
    stood = decode_vector(record["stood"]) if "stood" in record else None
    stamp = _stamp(decode_vector(record["stamp"]))
    return Personal(decode_vector(record["theta"]), stood=stood, **stamp)


def _stamp(numbers: NDArray[Any]) -> dict[str, int]:
    """The stamp in a node's state."""
    return dict(zip(_STAMP, numbers.tolist(), strict=True))


def _state_name(place: int) -> str:
    return f"{STATE}-{place}" if place else STATE


def _encode(personal: Personal) -> ArrayRecord:
    stamp = np.array([getattr(personal, name) for name in _STAMP], dtype=np.uint64)
    return vector_record({**personal.vectors(), "stamp": stamp})
