"""Measures over all users from those of each user: their names, whether higher or lower is better,
and their spread over users."""

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import LOCAL

# settings are compared by the first of these that was measured
MEASURES = ("accuracy", "precision_at_1", "rmse", "excess_risk", "loss")
HIGHER_IS_BETTER = ("accuracy", "precision_at_1")
LABELS = {"precision_at_1": "precision@1", "rmse": "RMSE", "excess_risk": "excess risk"}

# the prefix of a measure on validation rows, by which settings are chosen
VALIDATION = "validation_"
ROOT = "rmse"  # measures whose name ends so are combined as roots of mean squares

# suffixes of a measure's spread over users
MEAN = "_mean_user"
WORST = "_worst_tenth"
TENTH = 10

MeasureValue = TypeVar("MeasureValue")  # a number, or one for each setting


def measure_of(row: Mapping[str, object]) -> str:
    """The measure by which settings are compared: on validation rows if there are any."""
    names = [*(VALIDATION + name for name in MEASURES), *MEASURES]
    return next(name for name in names if name in row)


def name_of_measure(measure: str) -> str:
    """The name of a measure for people."""
    tested = as_test_measure(measure)
    name = LABELS.get(tested, tested)
    return name if tested == measure else f"{name}, validation rows"


def as_test_measure(measure: str) -> str:
    """The name of the same measure on test rows."""
    return measure.removeprefix(VALIDATION)


def badness(measure: str, value: float) -> float:
    """The value, negated if higher is better: smaller is better."""
    return -value if as_test_measure(measure) in HIGHER_IS_BETTER else value


def as_validation_measures(measures: Mapping[str, MeasureValue]) -> dict[str, MeasureValue]:
    """The same measures under the names of measures on validation rows, without their spread."""
    found = {}
    for name, value in measures.items():
        if not name.endswith((MEAN, WORST)):
            found[VALIDATION + name] = value
    return found


def over_users(by_user: Mapping[str, NDArray[np.float64]], weights: Vector) -> dict[str, Vector]:
    """Each measure over all measured rows, and how the main one spreads over users.

    Σ n_i·m_i / Σ n_i over users, for RMSE the root of the mean square: every row counts once. For
    the main measure (``measure_of``), and for the same from own rows alone, also the mean with
    each user counted once and the mean over the worst tenth of users.

    Args:
        by_user: each measure, users × settings.
        weights: n_i, the number of measured rows of each user.
    """
    if not by_user:
        return {}
    found = {}
    for name, values in by_user.items():
        if name.endswith(ROOT):
            found[name] = np.sqrt(np.average(values**2, axis=0, weights=weights))
        else:
            found[name] = np.average(values, axis=0, weights=weights)
    main = measure_of(by_user)
    for name in (main, LOCAL + main):
        if name in by_user:
            found[name + MEAN] = by_user[name].mean(axis=0)
            found[name + WORST] = _worst_tenth(main, by_user[name])
    return found


def _worst_tenth(measure: str, values: NDArray[np.float64]) -> Vector:
    """The mean over the worst tenth of users, who are along the first axis."""
    sign = badness(measure, 1.0)
    worst_last = sign * np.sort(sign * values, axis=0)
    tenth = math.ceil(len(values) / TENTH)
    return np.asarray(worst_last[-tenth:].mean(axis=0))
