"""Look at a file before training: what is used, on which scales, what trivial answers reach.

Everything here is read from users' rows. It is for the person who holds them: no ε covers it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.lab.features import count_of, list_names
from flwr_ppsgd.lab.find_schema import ID
from flwr_ppsgd.lab.per_user import PerUser
from flwr_ppsgd.lab.schema import CATEGORY, NUMBER, Schema

LOOKED = "chosen by looking at data: not covered"
SUSPICIOUS = 0.98  # share of the target's variance that one feature explains alone
ROWS_AT_ONCE = 1 << 14
FEWEST_ROWS = 20  # to suspect anything
MOST_LISTED = 40  # columns in the table of scales
MOST_NAMED = 12
MOST_WORDS = 4
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class TrivialAnswers:
    """What can be had without features: the better of two is what a model has to beat.

    Args:
        measure: "rmse", "accuracy" or "precision_at_1".
        pooled: of everyone's mean target, or most frequent class or label.
        own: of the user's own.
    """

    measure: str
    pooled: float
    own: float

    def words(self) -> str:
        """Both, in a line."""
        what = "mean" if self.measure == "rmse" else "most frequent answer"
        return (
            f"without features: {self.measure} {self.pooled:.4g} with everyone's {what}, "
            f"{self.own:.4g} with each user's own"
        )


def trivial(data: PerUser) -> TrivialAnswers | None:
    """Trivial predictions of the training rows, measured on all test rows; None if there is none.

    RMSE is pooled over test rows.
    """
    if not data.test.any():
        return None
    pooled = _answer(data, np.flatnonzero(data.train_rows))
    of_pooled = []
    of_own = []
    for user in np.flatnonzero(data.test_sizes).tolist():
        rows = data.rows(user, test=True)
        of_pooled.append(_faults(data, rows, pooled))
        own = _answer(data, data.rows(user, test=False))
        of_own.append(_faults(data, rows, own))
    pooled_fault = float(np.concatenate(of_pooled).mean())
    own_fault = float(np.concatenate(of_own).mean())
    if data.task == "regression":
        return TrivialAnswers("rmse", math.sqrt(pooled_fault), math.sqrt(own_fault))
    measure = "accuracy" if data.task == "classification" else "precision_at_1"
    return TrivialAnswers(measure, 1 - pooled_fault, 1 - own_fault)


def _answer(data: PerUser, rows: NDArray[np.intp]) -> Any:
    """The mean target, or the most frequent class or label, of these rows."""
    if data.task == "regression":
        return data.amounts(rows).mean(axis=0)
    if data.task == "classification":
        return np.bincount(data.y[rows], minlength=data.outputs).argmax()
    counts = data.y[rows].sum(axis=0)
    return np.asarray(counts).argmax()


def _faults(data: PerUser, rows: NDArray[np.intp], answer: Any) -> NDArray[np.float64]:
    """The squared error of each row, or whether the answer is wrong."""
    if data.task == "regression":
        return np.asarray(((data.amounts(rows) - answer) ** 2).mean(axis=1))
    if data.task == "classification":
        return np.asarray(data.y[rows] != answer, dtype=np.float64)
    right = data.y[rows][:, [answer]].toarray()
    return np.asarray(1.0 - right[:, 0])


def suspected_leaks(data: PerUser) -> list[str]:
    """Features that predict the target alone, as a leak would."""
    trained = np.flatnonzero(data.train_rows)
    if len(trained) < FEWEST_ROWS or data.task == "multi-label":
        return []
    shares = _explained_variance(data, trained)
    found = np.flatnonzero(shares > SUSPICIOUS).tolist()
    if not data.feature_names or data.schema is None:
        return [f"feature {place}" for place in found]
    columns = [column.name for column in data.schema.used_columns for _ in range(column.features)]
    return list(dict.fromkeys(f"column {columns[place]!r}" for place in found))


def _explained_variance(data: PerUser, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """The share of variance that each feature has in common with the target.

    R² of a straight line for amounts; for classes the share of the feature's variance that lies
    between them. A column that is constant but for round-off has 0.
    """
    amounts = data.task == "regression"
    y = data.amounts(rows) if amounts else data.targets(rows)
    if amounts:
        y = y - y.mean(axis=0)
    sums = np.zeros(data.x.shape[1])
    squares = np.zeros(data.x.shape[1])
    products = np.zeros((data.x.shape[1], y.shape[1]))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        x = data.x[rows[start : start + ROWS_AT_ONCE]].astype(np.float64)
        sums += np.asarray(x.sum(axis=0)).reshape(-1)
        squares += np.asarray((x * x).sum(axis=0)).reshape(-1)
        products += np.asarray(x.T @ y[start : start + ROWS_AT_ONCE])
    means = sums / len(rows)
    total = squares - len(rows) * means**2
    if amounts:
        common = (products**2 / np.maximum((y**2).sum(axis=0), 1e-300)).max(axis=1)
    else:
        counts = y.sum(axis=0)
        of_class = products / np.maximum(counts, 1)
        common = (counts * (of_class - means[:, None]) ** 2).sum(axis=1)
    varies = total > 1e-9 * len(rows) * (means**2 + 1e-300)
    return np.where(varies, common / np.where(varies, total, 1.0), 0.0)


def brief(seen: PerUser) -> list[str]:
    """The lines that a run or a sweep begins with."""
    found = trivial(seen)
    words = [] if found is None else [found.words()]
    return [_describe_columns(seen), *words, *hints(seen)]


def hints(seen: PerUser) -> list[str]:
    """What is probably not meant."""
    lines = []
    if len(seen) == 1:
        lines.append("there is one user: nobody to share a model with, and no crowd to hide in")
    single = int((np.diff(seen.offsets) == 1).sum())
    if len(seen) > 1 and single > len(seen) / 2 and seen.schema is not None:
        so = ", so there are no test rows" if not seen.test.any() else ""
        lines.append(
            f"{single:,} of {len(seen):,} users have one row each{so}: is {seen.schema.user!r} the "
            "column of users? (--user)"
        )
    if not seen.test.any() and single < len(seen):
        lines.append(
            "there are no test rows: nothing can be measured (--set test-fraction=0.2 makes some)"
        )
    ids = [name for name in _number_columns(seen.schema) if ID.search(name)]
    if ids:
        lines.append(
            f"taken as numbers, but named like an id: {list_names(ids, MOST_NAMED)} (--categorical "
            "makes them one-hot, --exclude leaves them out)"
        )
    still = _constant_within_users(seen)
    if still:
        lines.append(
            "the same in all rows of each user, so of no use as a number: "
            f"{list_names(still, MOST_NAMED)} (--exclude leaves it out)"
        )
    leaks = suspected_leaks(seen)
    if leaks:
        lines.append(
            f"suspected leak, predicts the target alone: {list_names(leaks, MOST_NAMED)} "
            "(--exclude leaves it out)"
        )
    return lines


def _constant_within_users(seen: PerUser) -> list[str]:
    """Columns of numbers of which each user has one value: scaled by the own mean they are 0."""
    if seen.is_sparse or not seen.feature_names or len(seen.test) == len(seen):
        return []
    first = np.repeat(seen.offsets[:-1], np.diff(seen.offsets))  # each row's user's first row
    found = []
    for name in _number_columns(seen.schema):
        values = seen.x[:, seen.feature_names.index(name)]
        if (values == values[first]).all():
            found.append(name)
    return found


def _number_columns(schema: Schema | None) -> list[str]:
    columns = schema.used_columns if schema else ()
    return [column.name for column in columns if column.kind == NUMBER and column.width == 1]


def _describe_columns(data: PerUser) -> str:
    """The columns that are used, and in how many features."""
    parts = []
    for column in data.schema.used_columns if data.schema else ():
        count = f" in {column.features:,} columns" if column.features > 1 else ""
        words = f" ({list_names(column.words, MOST_WORDS)})" if column.kind == CATEGORY else ""
        parts.append(f"{column.name!r}{count}{words}")
    if data.bias:
        parts.append("a constant")
    return f"features: {list_names(parts, MOST_NAMED)}"


def data_report(raw: PerUser, seen: PerUser) -> str:
    """Everything there is to know before training, in lines.

    Args:
        raw: the rows as they are in the source.
        seen: as a model sees them.
    """
    spread = ", ".join(f"{value:g}" for value in np.quantile(raw.train_sizes, QUANTILES))
    lines = [
        seen.describe(1),
        f"training rows per user (least, quarter, half, three quarters, most): {spread}",
        *brief(seen),
        *_scales(raw),
        count_of(seen.features * seen.outputs, "shared parameter"),
        f"All of this was {LOOKED} by any epsilon. --write schema.toml writes down what a run "
        "would take to be public, for you to read and declare.",
    ]
    return "\n".join(lines)


def _scales(raw: PerUser) -> list[str]:
    """Least, mean, deviation and most of each column of numbers."""
    import pandas

    if raw.is_sparse or not raw.feature_names:
        return []
    names = [name for name in _number_columns(raw.schema) if name in raw.feature_names]
    names = names[:MOST_LISTED]
    if not names:
        return []
    places = [raw.feature_names.index(name) for name in names]
    frame = pandas.DataFrame(raw.x[raw.train_rows][:, places], columns=names)
    table = frame.agg(["min", "mean", "std", "max"]).T
    table.columns = ["least", "mean", "deviation", "most"]
    return str(table.to_string(float_format="{:.4g}".format)).splitlines()
