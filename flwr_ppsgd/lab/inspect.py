"""Look at a file before training: features, scales, and the measures without any feature.

Everything here is read from users' rows, for the person who holds them: no ε covers it.
"""

import math
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
TINY = 1e-300  # keeps divisions by 0 out
FEWEST_ROWS = 20  # to suspect anything
MOST_LISTED = 40  # columns in the table of scales
MOST_NAMED = 12
MOST_WORDS = 4
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
MEASURE_OF_TASK = {
    "regression": "rmse",
    "classification": "accuracy",
    "multi-label": "precision_at_1",
}


def trivial_answer(data: PerUser) -> tuple[str, float, float] | None:
    """What constant answers reach on the test rows; None if there are none.

    A measure, its value with everyone's mean target (or most frequent class or label), and its
    value with each user's own: a model has to beat the better one. RMSE is pooled over test rows.
    """
    if not data.test.any():
        return None
    pooled_answer = _constant_answer(data, np.flatnonzero(data.train_rows))
    pooled_errors = []
    own_errors = []
    for user in np.flatnonzero(data.test_sizes).tolist():
        rows = data.rows(user, test=True)
        own_answer = _constant_answer(data, data.rows(user, test=False))
        pooled_errors.append(_row_errors(data, rows, pooled_answer))
        own_errors.append(_row_errors(data, rows, own_answer))
    pooled = float(np.concatenate(pooled_errors).mean())
    own = float(np.concatenate(own_errors).mean())
    measure = MEASURE_OF_TASK[data.task]
    if data.task == "regression":
        return measure, math.sqrt(pooled), math.sqrt(own)
    return measure, 1 - pooled, 1 - own


def _constant_answer(data: PerUser, rows: NDArray[np.intp]) -> Any:
    """The mean target, or the most frequent class or label, of these rows."""
    if data.task == "regression":
        return data.amounts(rows).mean(axis=0)
    return data.targets(rows).sum(axis=0).argmax()


def _row_errors(data: PerUser, rows: NDArray[np.intp], answer: Any) -> NDArray[np.float64]:
    """The squared error of each row, or 1 if the answer is wrong and else 0."""
    if data.task == "regression":
        errors = data.amounts(rows) - answer
        return np.asarray((errors**2).mean(axis=1))
    return np.asarray(1.0 - data.targets(rows)[:, answer])


def suspected_leaks(data: PerUser) -> list[str]:
    """Features from which alone the target can be predicted, as from a leak."""
    trained = np.flatnonzero(data.train_rows)
    if len(trained) < FEWEST_ROWS or data.task == "multi-label":
        return []
    shares = _explained_variance(data, trained)
    places = np.flatnonzero(shares > SUSPICIOUS).tolist()
    if not data.feature_names:
        return [f"feature {place}" for place in places]
    columns: list[str] = []
    for column in data.schema.used_columns:
        columns += [f"column {column.name!r}"] * column.features
    return list(dict.fromkeys(columns[place] for place in places))


def _explained_variance(data: PerUser, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """The share of variance that each feature has in common with the target.

    R² of a straight line for amounts; for classes the share of the feature's variance that lies
    between them. A column that is constant but for round-off has 0.
    """
    is_amount = data.task == "regression"
    y = data.amounts(rows) if is_amount else data.targets(rows)
    if is_amount:
        y = y - y.mean(axis=0)
    features = data.x.shape[1]
    sums = np.zeros(features)
    squares = np.zeros(features)
    products = np.zeros((features, y.shape[1]))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        x = data.x[rows[some]].astype(np.float64)
        sums += np.asarray(x.sum(axis=0)).reshape(-1)
        squares += np.asarray((x * x).sum(axis=0)).reshape(-1)
        products += np.asarray(x.T @ y[some])
    means = sums / len(rows)
    total = squares - len(rows) * means**2
    if is_amount:
        scales = np.maximum((y**2).sum(axis=0), TINY)
        by_output = products**2 / scales
        common = by_output.max(axis=1)
    else:
        counts = y.sum(axis=0)
        class_means = products / np.maximum(counts, 1)
        distances = class_means - means[:, None]
        common = (counts * distances**2).sum(axis=1)
    varies = total > 1e-9 * len(rows) * (means**2 + TINY)
    shares = np.zeros(features)
    shares[varies] = common[varies] / total[varies]
    return shares


def brief_report(seen: PerUser) -> list[str]:
    """The lines that a run or a sweep begins with."""
    parts = []
    for column in seen.schema.used_columns:
        count = f" in {column.features:,} columns" if column.features > 1 else ""
        words = f" ({list_names(column.words, MOST_WORDS)})" if column.kind == CATEGORY else ""
        parts.append(f"{column.name!r}{count}{words}")
    if seen.bias:
        parts.append("a constant")
    lines = [f"features: {list_names(parts, MOST_NAMED)}"]
    answer = trivial_answer(seen)
    if answer is not None:
        measure, pooled, own = answer
        what = "mean" if measure == "rmse" else "most frequent answer"
        lines.append(
            f"without features: {measure} {pooled:.4g} with everyone's {what}, "
            f"{own:.4g} with each user's own"
        )
    return [*lines, *hints(seen)]


def hints(seen: PerUser) -> list[str]:
    """Warnings about what is probably a mistake."""
    lines = []
    if len(seen) == 1:
        lines.append("there is one user: nobody to share a model with, and no crowd to hide in")
    single = int((np.diff(seen.offsets) == 1).sum())
    if len(seen) > 1 and single > len(seen) / 2:
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
    constant = _constant_within_users(seen)
    if constant:
        lines.append(
            "the same in all rows of each user, so of no use as a number: "
            f"{list_names(constant, MOST_NAMED)} (--exclude leaves it out)"
        )
    leaks = suspected_leaks(seen)
    if leaks:
        lines.append(
            f"suspected leak, predicts the target alone: {list_names(leaks, MOST_NAMED)} "
            "(--exclude leaves it out)"
        )
    return lines


def _constant_within_users(seen: PerUser) -> list[str]:
    """Columns of numbers that are constant within each user: scaled by the own mean they are 0."""
    if seen.is_sparse or not seen.feature_names or len(seen.test) == len(seen):
        return []
    first = np.repeat(seen.offsets[:-1], np.diff(seen.offsets))  # each row's user's first row
    names = []
    for name in _number_columns(seen.schema):
        values = seen.x[:, seen.feature_names.index(name)]
        if (values == values[first]).all():
            names.append(name)
    return names


def _number_columns(schema: Schema) -> list[str]:
    numbers = [column for column in schema.used_columns if column.kind == NUMBER]
    return [column.name for column in numbers if column.width == 1]


def data_report(raw: PerUser, seen: PerUser) -> str:
    """All facts about the data before training, in lines.

    Args:
        raw: the rows as they are in the source.
        seen: as a model sees them.
    """
    spread = ", ".join(f"{value:g}" for value in np.quantile(raw.train_sizes, QUANTILES))
    lines = [
        seen.describe(1),
        f"training rows per user (least, quarter, half, three quarters, most): {spread}",
        *brief_report(seen),
        *_scale_table(raw),
        count_of(seen.features * seen.outputs, "shared parameter"),
        f"All of this was {LOOKED} by any epsilon. --write schema.toml writes down what a run "
        "would take to be public, for you to read and declare.",
    ]
    return "\n".join(lines)


def _scale_table(raw: PerUser) -> list[str]:
    """Least, mean, deviation and most of each column of numbers."""
    import pandas

    names = _number_columns(raw.schema)[:MOST_LISTED]
    if raw.is_sparse or not raw.feature_names or not names:
        return []
    places = [raw.feature_names.index(name) for name in names]
    frame = pandas.DataFrame(raw.x[raw.train_rows][:, places], columns=names)
    table = frame.agg(["min", "mean", "std", "max"]).T
    table.columns = ["least", "mean", "deviation", "most"]
    return str(table.to_string(float_format="{:.4g}".format)).splitlines()
