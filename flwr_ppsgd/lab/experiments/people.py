"""How each user fares with a trained w: the personal model, one from own rows alone, w alone.

For simulations, which hold everyone's data. It is outside the guarantee.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.visit import personal_model
from flwr_ppsgd.lab.engines.measures import MEAN, TENTH, WORST, badness, measure_of
from flwr_ppsgd.lab.experiments.tasks import Task
from flwr_ppsgd.learner import LOCAL, SHARED
from flwr_ppsgd.wire import SIZE, UNIT, VARIANCE, Order, OrderTask

log = logging.getLogger("flwr.ppsgd")

OUTSIDE = "Measured on users' own test rows: outside the guarantee."
ROOTS = ("rmse",)  # measures that are pooled as squares
SAME = 1e-12  # a smaller difference between two measures is round-off


@dataclass(frozen=True)
class Person:
    """One user.

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
        """By how much the main measure is better than alone; None if there is nothing to compare.

        Above 0 is better, whatever the measure.
        """
        main = measure_of(self.measures)
        alone = self.measures.get(LOCAL + main)
        if alone is None:
            return None
        return badness(main, alone) - badness(main, self.measures[main])


def order_for(task: Task, beside: Mapping[str, NDArray[Any]]) -> Order:
    """What brings the last w to a device.

    Args:
        task: what is learnt.
        beside: what is published beside w, as of ``PPSGD.published``; empty for a w that has no
            noise and no unit.
    """
    variance = np.asarray(beside.get(VARIANCE, [])).reshape(-1)
    return Order(
        0,
        0.0,
        1.0,
        "mean",
        False,
        asks="nothing",
        task=cast(OrderTask, task.public()["task"]),
        unit=float(beside.get(UNIT, 1.0)),
        size=float(beside.get(SIZE, 1.0)),
        variance=tuple(variance.tolist()),
        last=True,
    )


def people_of(task: Task, w: Vector, users: Iterable[int], order: Order) -> list[Person]:
    """How users fare; those without test rows are left out.

    Args:
        task: everyone's model and data.
        w: the trained parameters.
        users: their numbers.
        order: as of ``order_for``.
    """
    (found,) = people_of_each(task, [w], users, order)
    return found


def people_of_each(
    task: Task, ws: Sequence[Vector], users: Iterable[int], order: Order
) -> list[list[Person]]:
    """The same for several w: what a user works out about own rows serves all of them."""
    found: list[list[Person]] = [[] for _ in ws]
    without = 0
    for user in users:
        weight = task.test_rows(user)
        if not weight:
            continue
        learner = task.learner(user)
        models = [personal_model(learner, w, order) for w in ws]
        measures = [model.measures() for model in models]
        without += not measures[0]
        for people, model, own in zip(found, models, measures, strict=True):
            if own:
                mixture = getattr(model, "mixture", None)
                people.append(Person(user, weight, own, mixture.chosen if mixture else {}))
    if without:
        log.warning("%d users have no training rows, so no mean: they are not measured", without)
    return found


def overall(people: Sequence[Person]) -> dict[str, float]:
    """Each measure over all test rows, and how the main one spreads over users.

    Means are weighted by test rows, so that every row counts once; an RMSE is the root of the mean
    over rows.
    """
    if not people:
        return {}
    weights = np.array([person.weight for person in people])
    found = {}
    for name in people[0].measures:
        values = np.array([person.measures.get(name, math.nan) for person in people])
        found[name] = _pooled(name, values, weights)
    main = measure_of(found)
    for prefix in ("", LOCAL):
        if prefix + main in found:
            values = np.array([person.measures[prefix + main] for person in people])
            found[prefix + main + MEAN] = float(values.mean())
            found[prefix + main + WORST] = _worst_tenth(main, values)
    return found


def _pooled(name: str, values: Vector, weights: Vector) -> float:
    kind = name.removeprefix(LOCAL).removeprefix(SHARED)
    if kind in ROOTS:
        return float(np.sqrt(np.average(values**2, weights=weights)))
    return float(np.average(values, weights=weights))


def _worst_tenth(main: str, values: Vector) -> float:
    sign = badness(main, 1.0)
    ordered = sign * np.sort(sign * values)  # the best first
    tenth = -(-len(ordered) // TENTH)
    return float(ordered[-tenth:].mean())


def fares(measures: Mapping[str, float], gains: Sequence[float | None]) -> str:
    """In words: the personal models beside those from own rows alone and beside w alone.

    Args:
        measures: over all users, as of ``overall``.
        gains: of each user, as of ``Person.gain``.
    """
    main = measure_of(measures)
    text = f"Personal models: {main} {measures[main]:.4g}"
    if LOCAL + main in measures:
        text += (
            f" (own rows alone {measures[LOCAL + main]:.4g}, shared model alone "
            f"{measures[SHARED + main]:.4g})"
        )
    known = [gain for gain in gains if gain is not None]
    if known:
        better = sum(gain > SAME for gain in known)
        worse = sum(gain < -SAME for gain in known)
        text += f"; better off than alone {better}, worse off {worse}, of {len(known)} users"
    return f"{text}. {OUTSIDE}"
