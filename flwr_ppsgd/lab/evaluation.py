"""Each user's results with a trained w: the personal model, one from own rows alone, w alone.

For simulations, which hold everyone's data. It is outside the guarantee.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.engine import num_tested, personal_model
from flwr_ppsgd.lab.measures import MEAN, WORST, badness, combined, measure_of, worst_tenth
from flwr_ppsgd.learner import LOCAL, SHARED, Learner, OwnModel, Solver
from flwr_ppsgd.models.additive_linear import AdditiveLinear
from flwr_ppsgd.wire import Order

log = logging.getLogger("flwr.ppsgd")

OUTSIDE = "Measured on users' own test rows: outside the guarantee."
SAME = 1e-12  # a smaller difference between two measures is round-off


@dataclass(frozen=True)
class UserResult:
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


def remember_model(learner: Learner) -> Learner:
    """Let a learner that can solve make its personal model once for each w.

    In a simulation the model that a device keeps is the one that is measured.
    """
    if not isinstance(learner, Solver):
        return learner
    make = learner.personal_model
    made: dict[tuple[object, ...], OwnModel] = {}

    def remembered(w: Vector, variance: Vector, order: Order) -> OwnModel:
        key = (w.tobytes(), variance.tobytes(), order.unit, order.size)
        if key not in made:
            made.clear()
            made[key] = make(w, variance, order)
        return made[key]

    setattr(learner, "personal_model", remembered)  # noqa: B010 - a method, for mypy
    return cast(Learner, learner)


def results_of(
    learner_of: Callable[[int], Learner], w: Vector, users: Iterable[int], order: Order | None
) -> list[UserResult]:
    """Each user's results; those without test rows are left out.

    Args:
        learner_of: the learner of a user.
        w: the trained parameters.
        users: their numbers.
        order: as of ``delivery_order``.
    """
    (found,) = results_of_each(learner_of, [w], users, order)
    return found


def results_of_each(
    learner_of: Callable[[int], Learner],
    ws: Sequence[Vector],
    users: Iterable[int],
    order: Order | None,
) -> list[list[UserResult]]:
    """The same for several w: what a user works out about own rows serves all of them."""
    found: list[list[UserResult]] = [[] for _ in ws]
    without = 0
    for user in users:
        learner = learner_of(user)
        rows = num_tested(learner)
        if not rows:
            continue
        models = [_model(learner, w, order) for w in ws]
        measures = [model.measures() for model in models]
        without += not measures[0]
        for people, model, own in zip(found, models, measures, strict=True):
            if own:
                mixture = getattr(model, "mixture", None)
                people.append(UserResult(user, rows, own, mixture.chosen if mixture else {}))
    if without:
        log.warning("%d users have no training rows, so no mean: they are not measured", without)
    return found


def _model(learner: Learner, w: Vector, order: Order | None) -> OwnModel:
    if order is not None:
        return personal_model(learner, w, order)
    return cast(AdditiveLinear, learner).stepped_model(w)


def overall(people: Sequence[UserResult]) -> dict[str, float]:
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
        found[name] = float(combined(name, values, weights))
    main = measure_of(found)
    for prefix in ("", LOCAL):
        if prefix + main in found:
            values = np.array([person.measures[prefix + main] for person in people])
            found[prefix + main + MEAN] = float(values.mean())
            found[prefix + main + WORST] = float(worst_tenth(main, values))
    return found


def fares(measures: Mapping[str, float], gains: Sequence[float | None]) -> str:
    """The personal models beside those from own rows alone and beside w alone, in words.

    Args:
        measures: over all users, as of ``overall``.
        gains: of each user, as of ``UserResult.gain``.
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
