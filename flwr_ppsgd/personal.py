"""Where θ lives: in the node's own state, under a name that no message ever carries."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.wire import decode_vector, vector_record

STATE = "ppsgd-personal"


@dataclass(frozen=True)
class Personal:
    """θ with the stamp of when it was last stepped.

    run: the Flower run. round: the last round taken part in. visit: how many that makes.
    """

    theta: Vector
    run: int
    round: int = 0
    visit: int = 0

    def stepped(self, theta: Vector, round_: int) -> Self:
        return replace(self, theta=theta, round=round_, visit=self.visit + 1)


def recall(context: Context) -> Personal | None:
    """What this node kept, or None where the user has not taken part yet."""
    kept = context.state.get(STATE)
    if not isinstance(kept, ArrayRecord):
        return None
    run, round_, visit = decode_vector(kept["stamp"])
    return Personal(decode_vector(kept["theta"]), int(run), int(round_), int(visit))


def keep(context: Context, personal: Personal) -> None:
    """Replace what this node kept. Call it last: an exception before it leaves θ as it was."""
    stamp = np.array([personal.run, personal.round, personal.visit], dtype=np.uint64)
    context.state[STATE] = vector_record({"theta": personal.theta, "stamp": stamp})
