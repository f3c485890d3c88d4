"""Each user's results with a trained w: the personal model, one from own rows alone, w alone.

Only simulations can do this: they hold everyone's data. The results are outside the guarantee.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.visit import model_around, num_tested
from flwr_ppsgd.lab.measures import badness, measure_of, over_users
from flwr_ppsgd.learner import LOCAL, DescribedModel, Learner, OwnModel, Solver
from flwr_ppsgd.models.additive_linear import AdditiveLinear
from flwr_ppsgd.wire import VARIANCE, Order

log = logging.getLogger("flwr.ppsgd")

OUTSIDE = "Measured on users' own test rows: outside the guarantee."
SAME_MEASURE = 1e-12  # a smaller difference between two measures is round-off


@dataclass(frozen=True)
class UserResult:
    """The results of one user.

    Args:
        user: the number of the user.
        weight: the number of test rows.
        measures: of the personal model; ``local_…`` of one from own rows alone; ``shared_…`` of w
            alone.
        chosen: what the user's personal model is made of.
    """

    user: int
    weight: float
    measures: Mapping[str, float]
    chosen: Mapping[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """How much better the main measure is than from own rows alone; above 0 is better.

        None if own rows alone were not measured.
        """
        main = measure_of(self.measures)
        alone = self.measures.get(LOCAL + main)
        if alone is None:
            return None
        return badness(main, alone) - badness(main, self.measures[main])


def delivery_order(task: str, beside: Mapping[str, NDArray[Any]]) -> Order | None:
    """The Order that delivers the last w of the recipe; None for a w that steps have trained.

    Args:
        task: the recipe's, "classification" or "regression".
        beside: what is published beside w (``PPSGD.published``).
    """
    if VARIANCE not in beside:
        return None
    return Order.delivery(task, beside)


@dataclass(frozen=True)
class MeasuredModel:
    """The measures of a personal model, which itself is kept only in the device's store."""

    found: dict[str, float]
    choices: Mapping[str, float]

    def measures(self) -> dict[str, float]:
        """On the user's own test rows."""
        return self.found

    def arrays(self) -> dict[str, NDArray[Any]]:
        """RuntimeError: the arrays are only in the device's store."""
        raise RuntimeError("a model that was measured is not kept here: read the device's store")


def remember_measures(learner: Learner) -> Learner:
    """Let a learner that can solve make the personal model around the last w only once.

    In a simulation, the model that a device keeps is also the one that is measured. The models of
    all users would not fit into memory twice, so only their measures are kept here.
    """
    if not isinstance(learner, Solver):
        return learner
    make = learner.personal_model
    known: dict[tuple[object, ...], MeasuredModel] = {}

    def model_once(w: Vector, variance: Vector, order: Order) -> OwnModel:
        if not order.last:
            return make(w, variance, order)
        digest = hashlib.sha256(w.tobytes()).digest()
        key = (digest, variance.tobytes(), order.unit, order.size)
        if key in known:
            return known[key]
        model = make(w, variance, order)
        known.clear()
        known[key] = MeasuredModel(model.measures(), _choices(model))
        return model

    setattr(learner, "personal_model", model_once)  # noqa: B010 - a method, for mypy
    return cast(Learner, learner)


def _choices(model: OwnModel) -> Mapping[str, float]:
    return model.choices if isinstance(model, DescribedModel) else {}


def results_of(
    learner_of: Callable[[int], Learner],
    ws: Sequence[Vector],
    users: Iterable[int],
    order: Order | None,
) -> list[list[UserResult]]:
    """Each user's results with each w; users without test rows are left out.

    Users are the outer loop, so that each factorises the own rows once for all w.

    Args:
        learner_of: the learner of a user.
        ws: trained parameters.
        users: the numbers of users.
        order: from ``delivery_order``.
    """
    found: list[list[UserResult]] = [[] for _ in ws]
    without = 0
    for user in users:
        learner = learner_of(user)
        rows = num_tested(learner)
        if not rows:
            continue
        for people, w in zip(found, ws, strict=True):
            if order is None:
                model: OwnModel = cast(AdditiveLinear, learner).stepped_model(w)
            else:
                model = model_around(learner, w, order)
            measures = model.measures()
            if measures:
                people.append(UserResult(user, rows, measures, _choices(model)))
            else:
                without += 1
    if without:
        count = without // len(ws)
        log.warning("%d users have no training rows, so no mean: they are not measured", count)
    return found


def overall_measures(people: Sequence[UserResult]) -> dict[str, float]:
    """Each measure over all users (``over_users``)."""
    if not people:
        return {}
    by_user = {}
    for name in people[0].measures:
        values = [person.measures.get(name, math.nan) for person in people]
        by_user[name] = np.array(values)
    weights = np.array([person.weight for person in people])
    return {name: float(value) for name, value in over_users(by_user, weights).items()}
