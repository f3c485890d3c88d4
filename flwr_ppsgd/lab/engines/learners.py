"""The cohort engine for everything else: any learner, any optimizer, a vote, solved personal parts.

Each user is visited in turn, as a client would be, without messages around it. The server's part is
the curator of a deployment: with the same seed, w is the same to the last bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import altered
from flwr_ppsgd.client.visit import respond, vote
from flwr_ppsgd.lab.engines.engine import State, dropped_since, progress
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.noise import GridSum
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.rounds import order_of, vote_order_of
from flwr_ppsgd.server.training import Training

OPTIMIZER = "optimizer-"  # before the names of the optimizer's vectors in ``state``
THETA = "theta-"  # before the number of a user


@dataclass(frozen=True)
class Found:
    """What was measured.

    Args:
        overall: each measure, over all users.
        by_user: the main measure of each measured user.
    """

    overall: Mapping[str, float]
    by_user: Vector


class Measure(Protocol):
    """Measures w, with the θ of users who have one."""

    def __call__(self, w: Vector, thetas: Mapping[int, Vector]) -> Found: ...


class LearnerEngine:
    """One training that visits its learners one by one.

    Args:
        training: what is trained.
        learner_of: the learner of a user.
        w: before the first round.
        measure: says how good w and θ are.
    """

    def __init__(
        self,
        training: Training,
        learner_of: Callable[[int], Learner],
        w: Vector,
        measure: Measure,
    ) -> None:
        self.curator = Curator(training)
        self.round = 0
        self.places = [0]
        self._training = training
        self._learner_of = learner_of
        self._measure = measure
        self._w = w
        self._thetas: dict[int, Vector] = {}
        self._visits = np.zeros(training.release.cohort.population, dtype=np.intp)

    def advance(self) -> None:
        """One round; the vote, if there is one, comes before the first."""
        if self.curator.vote_pending:
            self._hold_vote()
        self.round += 1
        order = order_of(self.curator, self.round)
        total = self.curator.open_sum(len(self._w))
        for user in self.curator.draw(self.round).tolist():
            self._visits[user] += 1
            learner = self._learner_of(user)
            theta = self._thetas.get(user)
            if theta is None:
                theta = learner.initial_theta()
            visited = altered(order, visit=int(self._visits[user]))
            sent, after = respond(learner, self._w, theta, visited)
            self._keep(user, theta, after)
            if sent.vector is not None:
                total.add(self.curator.encoded(sent.vector, sent.measures))
        self._w, _ = self.curator.publish(self.round, self._w, total)

    def _keep(self, user: int, before: Vector, after: Vector) -> None:
        """θ of a user, unless it is still the first one: most are, where θ is solved."""
        moved = after is not before and not np.array_equal(before, after)
        if moved or user in self._thetas:
            self._thetas[user] = after

    def _hold_vote(self) -> None:
        wanted = self._training.vote
        assert wanted is not None
        order = vote_order_of(self.curator)
        total = GridSum(wanted.powers, wanted.release)
        for user in range(len(self._visits)):
            total.add(vote(self._learner_of(user), order))
        self.curator.publish_vote(total)

    def w(self, place: int) -> Vector:  # noqa: ARG002 - there is one
        """w, or its average iterate if the training keeps it."""
        return self.curator.averaged(self._w)

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:  # noqa: ARG002
        """Over all users, on their test rows: nothing is chosen among settings here."""
        if not self.places:
            return {}
        return {0: dict(self._measure(self.w(0), self._thetas).overall)}

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each user."""
        if not self.places:
            return {}
        return {0: self._measure(self.w(0), self._thetas).by_user}

    def drop(self, gone: set[int]) -> None:
        """Stop training."""
        self.places = [place for place in self.places if place not in gone]

    def state(self) -> State:
        """w, θ, visits, and what the curator keeps between rounds."""
        kept = self.curator.between_rounds()
        return {
            **progress(self),
            "w": self._w,
            "visits": self._visits,
            **{OPTIMIZER + name: vector for name, vector in kept.items()},
            **{f"{THETA}{user}": theta for user, theta in self._thetas.items()},
        }

    def restore(self, state: State) -> None:
        """Continue from ``state``."""
        self.drop(dropped_since(self, state))
        self.round = int(state["round"])
        self._w = state["w"]
        self._visits = state["visits"].copy()
        self._thetas = {}
        kept: dict[str, Vector] = {}
        for name, vector in state.items():
            if name.startswith(THETA):
                self._thetas[int(name.removeprefix(THETA))] = vector
            if name.startswith(OPTIMIZER):
                kept[name.removeprefix(OPTIMIZER)] = vector
        self.curator.continue_after(self.round, kept)
