"""From the measures of each user to those of all users: which measures there are, whether higher
or lower is better, and how they spread over users."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector

# settings are compared by the first of these that was measured
MEASURES = ("accuracy", "precision_at_1", "rmse", "excess_risk", "loss")
HIGHER_IS_BETTER = ("accuracy", "precision_at_1")

# what is appended to the name of a measure
MEAN = "_mean_user"
WORST = "_worst_tenth"
BEST = "_best_tenth"
TENTH = 10


def measure_of(row: Mapping[str, object]) -> str:
    """The measure by which settings are compared."""
    return next(name for name in MEASURES if name in row)


def badness(measure: str, value: float) -> float:
    """A number that is smaller if the measure is better."""
    return -value if measure in HIGHER_IS_BETTER else value


def summary(by_user: Mapping[str, NDArray[np.float64]], weights: Vector) -> dict[str, Vector]:
    """The weighted mean of each measure over users, and how the main measure spreads over users.

    The spread of the main measure (``measure_of``) is its mean with each user counted once, and its
    means over the worst and over the best tenth of users.

    Args:
        by_user: each measure, users × settings.
        weights: the weight of each user in the means: the number of training samples.
    """
    if not by_user:
        return {}
    found = {}
    for name, values in by_user.items():
        found[name] = np.average(values, axis=0, weights=weights)
    main = measure_of(by_user)
    sign = badness(main, 1.0)
    ordered = sign * np.sort(sign * by_user[main], axis=0)  # the best users first
    tenth = -(-len(ordered) // TENTH)  # rounded up
    found[main + MEAN] = ordered.mean(axis=0)
    found[main + WORST] = ordered[-tenth:].mean(axis=0)
    found[main + BEST] = ordered[:tenth].mean(axis=0)
    return found
