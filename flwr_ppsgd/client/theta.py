"""θ with the stamp of when it was last stepped, and which of several kept ones counts.

A round counts once. The server may die and send a round again, to the same users or to others;
every Order therefore says at which round each start of the server began, and θ is stepped from the
newest save that is still part of that history.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import fast_replace
from flwr_ppsgd.client.refusal import RefusalCode, RefusedError
from flwr_ppsgd.wire import Order

log = logging.getLogger("flwr.ppsgd")

RUN = "ppsgd-run"  # run config: the name under which trainings share one θ
LEAST_BACK = 2  # rounds that any server with a checkpoint_dir may go back
TRAININGS = 4  # of which θ is kept under one name


@dataclass(frozen=True)
class ThetaStamp:
    """When a θ was last stepped.

    Args:
        round: the last round taken part in.
        visit: the number of rounds taken part in.
        training: the server's training.
        start: which start of the server it was (1, 2, …) in which that round was.
        since: the number of visits before that training.
        charges: the number of charges that the server had named.
        serial: the number of its save on disk; 0 if there is none.
    """

    round: int = 0
    visit: int = 0
    training: int = 0
    start: int = 0
    since: int = 0
    charges: int = 0
    serial: int = 0

    def counts_in(self, starts: tuple[int, ...]) -> bool:
        """Whether the server still has the round of this visit: no later start began before it."""
        later = starts[self.start :]
        return self.round < min(later, default=math.inf)


@dataclass(frozen=True)
class Theta:
    """One user's θ.

    Args:
        theta: θ.
        stamp: when it was last stepped.
        stood: Σ_{t<round} θ_t, if the average iterate is wanted.
        seen: the number of the newest save of this training when θ was read.
    """

    theta: Vector
    stamp: ThetaStamp
    stood: Vector | None = None
    seen: int = 0

    def in_training(self, order: Order) -> Self:
        """At the beginning of a visit in the Order's training; another training counts anew."""
        stamp = self.stamp
        stood = self.stood
        if stamp.training != order.training:
            stood = None
            stamp = ThetaStamp(visit=stamp.visit, since=stamp.visit, training=order.training)
        stamp = fast_replace(stamp, start=len(order.starts), charges=order.charges)
        return fast_replace(self, stamp=stamp, stood=stood)

    def after_step(self, theta: Vector, round_: int, average: bool = False) -> Self:
        """After one more visit."""
        stood = self._stood_until(round_) if average else self.stood
        stamp = fast_replace(self.stamp, round=round_, visit=self.stamp.visit + 1)
        return fast_replace(self, theta=theta, stamp=stamp, stood=stood)

    def average(self, round_: int) -> Vector:
        """(1/n)·Σ_{t<n} θ_t after n = ``round_`` rounds.

        Each value is weighted by the rounds it stood, not by visits.
        """
        return self._stood_until(round_) / round_ if round_ else self.theta

    def _stood_until(self, round_: int) -> Vector:
        standing = (round_ - self.stamp.round) * self.theta
        return standing if self.stood is None else self.stood + standing


def theta_candidates(
    stamps: Sequence[ThetaStamp], order: Order, *, stepping: bool, named: bool
) -> list[ThetaStamp]:
    """The kept θ that count for an Order, best first; empty if θ is to begin anew.

    Args:
        stamps: of everything that is kept under this name, newest first.
        order: tells at which rounds the server started.
        stepping: a step goes from the θ before the Order's round, an evaluation is at the θ after.
        named: whether somebody chose the name, so that a new training goes on with the last θ.
    """
    own = [stamp for stamp in stamps if stamp.training == order.training]
    if own:
        _refuse_outdated(order, own[0], stepping)
    below = order.round if stepping else order.round + 1
    counting = [each for each in own if each.round < below and each.counts_in(order.starts)]
    if counting:
        return counting
    if own and own[-1].visit > own[-1].since + 1:  # it is not of the first visit
        log.warning(
            "The server has gone back to round %d and the oldest θ kept here is of round %d: it is "
            "taken as it is",
            order.round,
            own[-1].round,
        )
        return [own[-1]]
    others = [stamp for stamp in stamps if stamp.training != order.training]
    if not named or not others:
        return []
    return [stamp for stamp in others if stamp.training == others[0].training]


def _refuse_outdated(order: Order, newest: ThetaStamp, stepping: bool) -> None:
    """Refuse a server that has forgotten what it released, and an Order that was overtaken."""
    if order.charges < newest.charges:
        raise RefusedError(
            RefusalCode.REFUSED_CHARGES,
            f"the server has charged {order.charges} rounds of a training that had charged "
            f"{newest.charges} before: its store went back in time, so its epsilon is too small; "
            "nothing is sent; ask its operator to add the missing charges with ppsgd ledger",
        )
    start = len(order.starts)
    if stepping and (start, order.round) < (newest.start, newest.round):
        raise RefusedError(
            RefusalCode.TOO_LATE,
            f"round {order.round} of the server's start {start} is asked for after round "
            f"{newest.round} of start {newest.start}: it comes too late and θ stays as it is; give "
            f"another training another {RUN}",
        )


def stamps_to_keep(
    new: ThetaStamp, kept: Sequence[ThetaStamp], order: Order | None, least: int
) -> list[ThetaStamp]:
    """The kept θ that stay beside a new one, of the last few trainings.

    Of its own training those that the server may go back to: all of the last rounds that it could
    have lost, and the last one before them, which is stepped if all of those rounds come again. θ
    of a round that the server has lost had more visits than the one that was stepped instead.

    Args:
        new: of the θ that is to be kept.
        kept: of what is kept already, newest first.
        order: says how many rounds the server may go back; None of a stock strategy.
        least: how many of the training stay in any case.
    """
    own = [each for each in kept if each.training == new.training and each.visit < new.visit]
    needed = 0
    if order is not None and order.starts:
        first = new.round - max(LEAST_BACK, order.back)
        needed = 1 + len([each for each in own if each.round > first])
    others = [each for each in kept if each.training != new.training]
    trainings = list(dict.fromkeys(each.training for each in others))
    recent = [each for each in others if each.training in trainings[: TRAININGS - 1]]
    return own[: max(least, needed)] + recent
