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
    stood: Σ_{t<round} θ_t, kept where the average iterate is wanted.
    """

    theta: Vector
    run: int
    round: int = 0
    visit: int = 0
    stood: Vector | None = None

    def stepped(self, theta: Vector, round_: int, average: bool = False) -> Self:
        """After one more visit."""
        stood = self._stood_until(round_) if average else self.stood
        return replace(self, theta=theta, round=round_, visit=self.visit + 1, stood=stood)

    def average(self, round_: int) -> Vector:
        """(1/n)·Σ_{t<n} θ_t after n = ``round_`` rounds: each value weighted by the rounds it stood, not by visits."""
        return self._stood_until(round_) / round_ if round_ else self.theta

    def _stood_until(self, round_: int) -> Vector:
        before: Vector | float = 0.0 if self.stood is None else self.stood
        return before + (round_ - self.round) * self.theta


def recall(context: Context) -> Personal | None:
    """What this node kept, or None where the user has not taken part yet."""
    kept = context.state.get(STATE)
    if not isinstance(kept, ArrayRecord):
        return None
    run, round_, visit = (int(number) for number in decode_vector(kept["stamp"]))
    stood = decode_vector(kept["stood"]) if "stood" in kept else None
    return Personal(decode_vector(kept["theta"]), run, round_, visit, stood)


def keep(context: Context, personal: Personal) -> None:
    """Replace what this node kept. Call it last: an exception before it leaves θ as it was."""
    stamp = np.array([personal.run, personal.round, personal.visit], dtype=np.uint64)
    stood = {} if personal.stood is None else {"stood": personal.stood}
    context.state[STATE] = vector_record({"theta": personal.theta, "stamp": stamp, **stood})
