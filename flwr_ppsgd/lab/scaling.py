"""Scale features by each user's own mean and deviation, on the device.

A user computes them from the own training rows and they never leave the device, so they cost no
privacy. The schema decides which columns are numbers.
"""

from dataclasses import replace

import numpy as np
from scipy import sparse

from flwr_ppsgd.lab.features import list_names
from flwr_ppsgd.lab.per_user import Indices, OwnScale, PerUser
from flwr_ppsgd.lab.tables import Values
from flwr_ppsgd.recipe import Matrix

FARTHEST = 5.0  # own deviations from the own mean, at which values are cut
ROUND_OFF = 1e-9  # a deviation of at most this share of the mean is round-off


def scale_own_rows(data: PerUser) -> PerUser:
    """(x − m_i) / s_i, cut at ±5, with each user's own mean and deviation, for columns of numbers;
    the same without the cut for targets of regression.

    A column that is constant in a user's training rows is 0 in all rows of that user.
    """
    is_regression = data.task == "regression"
    columns = np.zeros(0, dtype=np.intp)
    if data.divisor == 1.0:
        kinds = np.array(data.schema.model_kinds())
        columns = np.flatnonzero(kinds == "number")
    if not len(columns) and not is_regression:
        return data
    own = _own_scale(data, columns)
    x = data.x
    y = data.y
    notes = []
    if len(columns):
        x = _scale_columns(data, own)
        names = [f"feature {column}" for column in columns]
        if data.feature_names:
            names = [f"column {data.feature_names[column]!r}" for column in columns]
        what = "scaled on each device by the user's own mean and deviation"
        notes.append(f"{what}: {list_names(names)}")
    if is_regression:
        y = _scale_targets(data, own)
        notes.append(
            "targets: in each user's own deviations from the own mean; RMSE stays in the units of "
            "the source"
        )
    return replace(data, x=x, y=y, own=own, notes=(*data.notes, *notes))


def with_kinds(data: PerUser) -> PerUser:
    """With the kind of each feature, by which every device scales its own rows under the recipe.

    Representations are used as they are.
    """
    if data.representation is not None:
        return replace(data, kinds=("as-is",) * data.width)
    return replace(data, kinds=data.schema.model_kinds())


def scale_new_rows(one: PerUser, x: Values) -> PerUser:
    """New rows of a single user, scaled by that user's mean and deviation; targets are 0.

    Args:
        one: that user alone, with scaled rows.
        x: the new rows, not scaled.
    """
    rows = sparse.csr_array(x) if one.is_sparse else x
    new = one.with_rows(rows, np.zeros(x.shape[0]))
    if one.own is None or not len(one.own.columns):
        return new
    return replace(new, x=_scale_columns(new, one.own))


def _own_scale(data: PerUser, columns: Indices) -> OwnScale:
    """Means and deviations of each user's training rows, and of the targets in regression."""
    mean = np.zeros((len(data), len(columns)))
    std = np.full((len(data), len(columns)), np.inf)
    centre = np.zeros((len(data), data.outputs))
    unit = np.ones(len(data))
    for user in range(len(data)):
        rows = data.rows(user, test=False)
        if not len(rows):
            continue
        x = _float_copy(data.x[rows][:, columns])
        mean[user] = x.mean(axis=0)
        deviation = x.std(axis=0)
        varies = deviation > ROUND_OFF * np.abs(mean[user])
        std[user, varies] = deviation[varies]
        if data.task == "regression":
            y = data.targets(rows)
            centre[user] = y.mean(axis=0)
            variance = y.var(axis=0).mean()
            spread = np.sqrt(variance)
            if spread > ROUND_OFF * np.abs(y).max():
                unit[user] = spread
    return OwnScale(columns, mean, std, centre, unit)


def _scale_targets(data: PerUser, own: OwnScale) -> Matrix:
    """(y − centre) / unit of each user, in the shape of y."""
    sizes = np.diff(data.offsets)
    centre = np.repeat(own.centre, sizes, axis=0)
    unit = np.repeat(own.unit, sizes)
    scaled = (data.y.reshape(centre.shape) - centre) / unit[:, None]
    same_shape: Matrix = scaled.reshape(data.y.shape)
    return same_shape


def _scale_columns(data: PerUser, own: OwnScale) -> Values:
    """x with the columns of ``own`` scaled, as a copy; other columns of CSR stay sparse."""
    scaled = _float_copy(data.x[:, own.columns])
    for user in range(len(data)):
        rows = data.span(user)
        distance = (scaled[rows] - own.mean[user]) / own.std[user]
        scaled[rows] = np.clip(distance, -FARTHEST, FARTHEST)
    if not data.is_sparse:
        x = data.x.astype(np.float64)
        x[:, own.columns] = scaled
        return x
    others = np.setdiff1d(np.arange(data.x.shape[1]), own.columns)
    blocks = [sparse.csr_array(scaled), data.x[:, others]]
    together = sparse.hstack(blocks, format="csr")
    order = np.argsort(np.concatenate([own.columns, others]))
    return sparse.csr_array(together[:, order])


def _float_copy(x: Values) -> Matrix:
    """A copy in float64."""
    return np.array(x.toarray() if sparse.issparse(x) else x, dtype=np.float64)
