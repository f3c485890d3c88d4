"""The cohort engine of the recipe: learners that are asked one by one, as clients would be.

The server's part is the curator of a deployment: with the same seed, w is the same to the last bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import altered
from flwr_ppsgd.client.visit import answer_before, respond, solver_of
from flwr_ppsgd.lab.engines.engine import State, dropped_since, progress
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.noise import GridSum
from flwr_ppsgd.recipe import Recipe
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.rounds import before_order_of, order_of
from flwr_ppsgd.server.training import Training

CURATOR = "curator-"  # before the names of what the curator keeps, in ``state``
NOTHING = np.zeros(0)  # θ while the recipe's rounds run


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
    """Measures w together with what the curator publishes beside it."""

    def __call__(self, w: Vector, curator: Curator) -> Found: ...


class LearnerEngine:
    """One training that visits its learners one by one.

    Args:
        training: what is trained, by a recipe.
        learner_of: the learner of a user.
        w: before the first round, columns × outputs.
        measure: says how good w is.
    """

    def __init__(
        self,
        training: Training,
        learner_of: Callable[[int], Learner],
        w: Vector,
        measure: Measure,
    ) -> None:
        assert training.recipe is not None
        self.curator = Curator(training)
        self.curator.plan(training.recipe.rounds)
        self.round = 0
        self.places = [0]
        self._recipe: Recipe = training.recipe
        self._learner_of = learner_of
        self._measure = measure
        self._columns = len(w)
        self._w = w.reshape(-1)
        self._visits = np.zeros(training.release.cohort.population, dtype=np.intp)

    def advance(self) -> None:
        """One round; what everybody is asked once comes before the first."""
        for name in self.curator.pending:
            self._ask_before(name)
        self.round += 1
        order = order_of(self.curator, self.round)
        total = self.curator.open_sum(len(self._w))
        for user in self.curator.draw(self.round).tolist():
            self._visits[user] += 1
            visited = altered(order, visit=int(self._visits[user]))
            sent, _ = respond(self._learner_of(user), self._w, NOTHING, visited)
            assert sent.vector is not None
            total.add(self.curator.encoded(sent.vector, sent.measures))
        self._w, _ = self.curator.publish(self.round, self._w, total, self._columns)

    def _ask_before(self, name: str) -> None:
        order = before_order_of(self.curator, name)
        total = GridSum(self._recipe.length(name), self._recipe.before[name])
        for user in range(len(self._visits)):
            learner = solver_of(self._learner_of(user), order)
            total.add(answer_before(learner, self._w, order))
        self.curator.publish_before(name, total)

    def w(self, place: int) -> Vector:  # noqa: ARG002 - there is one
        """w, or the mean over rounds that is published in its place."""
        return self.curator.averaged(self._w)

    def measures(self, *, final: bool = False) -> dict[int, dict[str, float]]:  # noqa: ARG002
        """Over all users, on their test rows: nothing is chosen among settings here."""
        if not self.places:
            return {}
        return {0: dict(self._measure(self.w(0), self.curator).overall)}

    def by_user(self) -> dict[int, Vector]:
        """The main measure of each user."""
        if not self.places:
            return {}
        return {0: self._measure(self.w(0), self.curator).by_user}

    def drop(self, gone: set[int]) -> None:
        """Stop training."""
        self.places = [place for place in self.places if place not in gone]

    def state(self) -> State:
        """w, visits, and what the curator keeps between rounds."""
        kept = self.curator.between_rounds()
        return {
            **progress(self),
            "w": self._w,
            "visits": self._visits,
            **{CURATOR + name: vector for name, vector in kept.items()},
        }

    def restore(self, state: State) -> None:
        """Continue from ``state``."""
        self.drop(dropped_since(self, state))
        self.round = int(state["round"])
        self._w = state["w"]
        self._visits = state["visits"].copy()
        kept = {
            name.removeprefix(CURATOR): vector
            for name, vector in state.items()
            if name.startswith(CURATOR)
        }
        self.curator.continue_after(self.round, kept)
