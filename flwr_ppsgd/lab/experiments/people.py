"""How each user fares with a trained w: the personal model, one from own rows alone, w alone.

For simulations, which hold everyone's data. It is outside the guarantee.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.visit import LOCAL, SHARED, compared, solved
from flwr_ppsgd.lab.engines.measures import MEAN, TENTH, WORST, badness, measure_of
from flwr_ppsgd.lab.experiments.tasks import Task
from flwr_ppsgd.learner import Learner

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
        chosen: what the user's solution chose and expects.
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


def people_of(
    task: Task, w: Vector, users: Iterable[int], thetas: Mapping[int, Vector] | None = None
) -> list[Person]:
    """How users fare; those without test rows are left out.

    Args:
        task: everyone's model and data.
        w: the trained parameters.
        users: their numbers.
        thetas: a stepped θ for each user who has one; None: θ is solved.
    """
    (found,) = people_of_each(task, [w], users, thetas)
    return found


def people_of_each(
    task: Task,
    ws: Sequence[Vector],
    users: Iterable[int],
    thetas: Mapping[int, Vector] | None = None,
) -> list[list[Person]]:
    """The same for several w: what a user works out about own rows serves all of them."""
    found: list[list[Person]] = [[] for _ in ws]
    for user in users:
        weight = task.test_rows(user)
        if not weight:
            continue
        learner = task.learner(user)
        for people, w in zip(found, ws, strict=True):
            people.append(_person(learner, w, user, weight, thetas))
    return found


def _person(
    learner: Learner, w: Vector, user: int, weight: int, thetas: Mapping[int, Vector] | None
) -> Person:
    solution = solved(learner, w) if thetas is None else None
    if solution is not None:
        measures = compared(learner, w, solution.theta)
        return Person(user, weight, measures, solution.chosen)
    theta = (thetas or {}).get(user)
    if theta is None:
        theta = learner.initial_theta()
    return Person(user, weight, learner.evaluate(w, theta))


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
