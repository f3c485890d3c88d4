"""From each user's measures to those of all users: which are there, which way is better, and how they spread."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector

MEASURES = ("accuracy", "precision_at_1", "rmse", "excess_risk", "loss")  # the first that is there compares settings
HIGHER_IS_BETTER = ("accuracy", "precision_at_1")
MEAN, WORST, BEST = "_mean_user", "_worst_tenth", "_best_tenth"
TENTH = 10


def measure_of(row: Mapping[str, object]) -> str:
    """The measure by which settings are compared."""
    return next(name for name in MEASURES if name in row)


def badness(measure: str, value: float) -> float:
    """A number that is smaller where the measure is better."""
    return -value if measure in HIGHER_IS_BETTER else value


def summary(by_user: Mapping[str, NDArray[np.float64]], weights: Vector) -> dict[str, Vector]:
    """Of each measure the mean over users, weighted by their samples; of the first in ``MEASURES`` how it spreads, too.

    by_user: users × settings. The spread: the mean over users, each counted once, and the means of the worst and of
    the best tenth of them.
    """
    if not by_user:
        return {}
    main = measure_of(by_user)
    means = {name: np.average(values, axis=0, weights=weights) for name, values in by_user.items()}
    sign = badness(main, 1.0)
    ordered = sign * np.sort(sign * by_user[main], axis=0)  # the best users first
    tenth = -(-len(ordered) // TENTH)
    spread = {MEAN: ordered, WORST: ordered[-tenth:], BEST: ordered[:tenth]}
    return {**means, **{main + suffix: values.mean(axis=0) for suffix, values in spread.items()}}
