"""Features on raw scales without public numbers: each user's own mean and deviation, on the device.

A user computes them from the own training rows and they never leave the device, so they cost no
privacy. Only *which* columns need it may have been decided by looking at everyone's rows ("auto"):
that is not covered by any ε, and a note says so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.lab.data.features import LOOKED, MOST_DENSE, category_of, is_encoded
from flwr_ppsgd.lab.data.per_user import OwnScale, PerUser, Table
from flwr_ppsgd.lab.data.split import Indices

OWN = "own"
AUTO = "auto"
FARTHEST = 5.0  # own deviations from the own mean; what is farther is brought there
LARGEST = 10.0  # root mean square of a column that may stay as it is
SMALLEST = 0.05  # its deviation
MOST_OFF = 3.0  # its mean, in deviations
SAME = 1e-9  # a deviation below this share of the mean is round-off
MOST_TIMES = 3.0  # a target's own deviation may be larger or smaller than 1
MOSTLY = 0.5  # of the rows of a sparse table: a column of numbers is filled in more of them
ROWS_AT_ONCE = 1 << 14
MOST_NAMED = 6


def own_scaled(data: PerUser, scale: str = AUTO) -> PerUser:
    """(x − m_i) / s_i with each user's own mean and deviation; the same for targets of regression.

    Args:
        data: everyone's rows.
        scale: "own" scales every column of numbers; "auto" only those that are far from a scale of
            1 and not 0 and 1 alone; from the target the user's own mean is subtracted if the mean
            is larger than the deviation, and it is divided by the user's own deviation if that is
            far from 1.
    """
    standardised = np.any(data.std != 1.0) or np.any(data.mean != 0.0)
    columns = np.zeros(0, dtype=np.intp)
    if not standardised:
        columns = _columns(data, scale)
    amounts = data.task == "regression"
    centred = amounts and (scale == OWN or _is_off(data))
    divided = amounts and (scale == OWN or _is_far(data))
    if not len(columns) and not centred and not divided:
        return data
    mean, std = _own_statistics(data, columns)
    centre = _own_centres(data) if centred else np.zeros((len(data), data.outputs))
    unit = _own_units(data) if divided else np.ones(len(data))
    own = OwnScale(columns, mean, std, centre, unit)
    x = _scaled(data, own) if len(columns) else data.x
    y = _moved(data, own) if amounts else data.y
    notes = _notes(data, own, scale)
    return replace(data, x=x, y=y, own=own, notes=(*data.notes, *notes))


def with_kinds(data: PerUser) -> PerUser:
    """With the kind of each column, by which every device scales its own rows under the recipe.

    One-hot columns of many categories, words, and a sparse table without names are "sparse"; other
    one-hot columns, columns of 0 and 1, pixels, representations and what public numbers have scaled
    are "as-is"; the rest are numbers.
    """
    if data.representation is not None:
        return replace(data, kinds=("as-is",) * data.width)
    kinds = np.full(data.x.shape[1], "as-is", dtype=object)
    kinds[_rare(data)] = "sparse"
    standardised = np.any(data.std != 1.0) or np.any(data.mean != 0.0)
    numbers = np.array([], dtype=np.intp) if standardised else _columns(data, OWN)
    numbers = numbers[~_flags(data, numbers)]
    kinds[numbers] = "number"
    notes = []
    if len(numbers):
        named = _listed([data.column_name(column) for column in numbers.tolist()])
        notes.append(
            f"scaled on each device by the user's own mean and deviation: {named}; which columns "
            f"are numbers and not 0 and 1 alone was {LOOKED}"
        )
    if "sparse" in kinds:
        notes.append(f"{int((kinds == 'sparse').sum()):,} columns are sparse: most users lack them")
    return replace(data, kinds=tuple(kinds.tolist()), notes=(*data.notes, *notes))


def _rare(data: PerUser) -> Indices:
    """The columns of a sparse table that most users lack."""
    columns = np.arange(data.x.shape[1])
    if not data.is_sparse:
        return columns[:0]
    counts = Counter(category_of(name) for name in data.feature_names)
    few = [
        at
        for at, name in enumerate(data.feature_names)
        if "=" in name and counts[category_of(name)] <= MOST_DENSE
    ]
    return np.setdiff1d(columns, [*_numbers(data), *few])


def scaled_alike(data: PerUser, everyone: OwnScale) -> PerUser:
    """Rows of other users, scaled by themselves where everyone's rows were."""
    mean, std = _own_statistics(data, everyone.columns)
    centre = np.zeros((len(data), data.outputs))
    unit = np.ones(len(data))
    if everyone.centre.any():
        centre = _own_centres(data)
    if (everyone.unit != 1).any():
        unit = _own_units(data)
    own = OwnScale(everyone.columns, mean, std, centre, unit)
    x = _scaled(data, own) if len(own.columns) else data.x
    y = _moved(data, own) if data.task == "regression" else data.y
    return replace(data, x=x, y=y, own=own)


def own_scaled_new(one: PerUser, x: Table) -> PerUser:
    """New rows of a single user, as that user's model sees them; their targets are not known.

    Args:
        one: that user alone, with rows that were scaled.
        x: the new rows as the source has them.
    """
    rows = x.shape[0]
    bare = replace(
        one,
        x=sparse.csr_array(x) if one.is_sparse else x,
        y=np.zeros(rows),
        test=np.zeros(rows, dtype=np.bool_),
        validation=None,
        offsets=np.array([0, rows]),
    )
    if one.own is None or not len(one.own.columns):
        return bare
    return replace(bare, x=_scaled(bare, one.own))


def _moved(data: PerUser, own: OwnScale) -> NDArray[np.float64]:
    """Targets as each user's model sees them."""
    axes = data.y.ndim
    away = own.of_rows(own.centre, data.offsets, axes)
    return np.asarray((data.y - away) / own.of_rows(own.unit[:, None], data.offsets, axes))


def _columns(data: PerUser, scale: str) -> Indices:
    """The columns of numbers to scale."""
    if data.x.dtype == np.uint8:
        return np.zeros(0, dtype=np.intp)
    candidates = np.array(_numbers(data), dtype=np.intp)
    if scale == OWN:
        return candidates
    return candidates[~_may_stay(data, candidates)]


def _may_stay(data: PerUser, columns: Indices) -> NDArray[np.bool_]:
    """Which columns are 0 and 1 alone, or on a scale of about 1: few rows at a time."""
    trained = np.flatnonzero(data.trained)
    start = _dense(data.x, trained[:1], columns)  # sums around it lose no digits
    sums = np.zeros(len(columns))
    squares = np.zeros(len(columns))
    for first in range(0, len(trained), ROWS_AT_ONCE):
        values = _dense(data.x, trained[first : first + ROWS_AT_ONCE], columns)
        values = values - start
        sums += values.sum(axis=0)
        squares += np.einsum("nd,nd->d", values, values)
    off = sums / len(trained)
    std = np.sqrt(np.maximum(squares / len(trained) - off**2, 0.0))
    mean = np.abs(start[0] + off)
    near = (std >= SMALLEST) & (np.hypot(mean, std) <= LARGEST) & (mean <= MOST_OFF * std)
    return np.asarray(_flags(data, columns) | near)


def _flags(data: PerUser, columns: Indices) -> NDArray[np.bool_]:
    """Which columns are 0 and 1 alone in all training rows: few rows at a time."""
    trained = np.flatnonzero(data.trained)
    flags = np.ones(len(columns), dtype=np.bool_)
    for first in range(0, len(trained), ROWS_AT_ONCE):
        values = _dense(data.x, trained[first : first + ROWS_AT_ONCE], columns)
        flags &= ((values == 0) | (values == 1)).all(axis=0)
    return flags


def is_flag(values: NDArray[np.float64]) -> bool:
    """Whether all values are 0 and 1."""
    return bool(((values == 0) | (values == 1)).all())


def _numbers(data: PerUser) -> list[int]:
    """The columns that are neither one-hot nor words.

    In a sparse table, a column that is 0 in most rows holds counts or shares: a mean subtracted
    from it would fill the table, and a deviation would give the rarest words the largest scale.
    """
    names = data.feature_names
    if not names:
        return [] if data.is_sparse else list(range(data.x.shape[1]))
    numbers = [at for at, name in enumerate(names) if not is_encoded(name)]
    if not data.is_sparse:
        return numbers
    filled = np.bincount(data.x.indices, minlength=data.x.shape[1]) / data.x.shape[0]
    return [at for at in numbers if filled[at] > MOSTLY]


def _is_off(data: PerUser) -> bool:
    """Whether the mean of a target is larger than its deviation."""
    trained = np.asarray(data.y[data.trained], dtype=np.float64).reshape(-1, data.outputs)
    return bool((np.abs(trained.mean(axis=0)) > trained.std(axis=0)).any())


def _is_far(data: PerUser) -> bool:
    """Whether targets of one user typically deviate by much more or much less than 1."""
    typical = float(np.median(_own_units(data)))
    return not 1 / MOST_TIMES <= typical <= MOST_TIMES


def _own_units(data: PerUser) -> NDArray[np.float64]:
    """The deviation of each user's training targets; 1 for users who have none."""
    units = np.ones(len(data))
    for user in range(len(data)):
        own = data.targets(data.rows(user, test=False))
        found = float(np.sqrt(own.var(axis=0).mean()))
        if found > SAME * float(np.abs(own).max()):
            units[user] = found
    return units


def _own_statistics(
    data: PerUser, columns: Indices
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and deviations of each user's training rows: users × columns."""
    mean = np.zeros((len(data), len(columns)))
    std = np.ones((len(data), len(columns)))
    if not len(columns):
        return mean, std
    for user in range(len(data)):
        own = _dense(data.x, data.rows(user, test=False), columns)
        mean[user] = own.mean(axis=0)
        found = own.std(axis=0)
        std[user] = np.where(found > SAME * np.abs(mean[user]), found, 1.0)
    return mean, std


def _dense(x: Table, rows: Any, columns: Indices) -> NDArray[np.float64]:
    taken = x[rows][:, columns]
    if sparse.issparse(taken):
        taken = taken.toarray()
    return np.asarray(taken, dtype=np.float64)


def _own_centres(data: PerUser) -> NDArray[np.float64]:
    """The mean target of each user's training rows: users × K."""
    centres = np.zeros((len(data), data.outputs))
    for user in range(len(data)):
        centres[user] = data.targets(data.rows(user, test=False)).mean(axis=0)
    return centres


def _scaled(data: PerUser, own: OwnScale) -> Table:
    """x with the columns of ``own`` scaled, as a copy."""
    if data.is_sparse:
        return _scaled_sparse(data, own)
    x = data.x.astype(np.float64)  # a copy
    for user in range(len(data)):
        start = int(data.offsets[user])
        stop = int(data.offsets[user + 1])
        x[start:stop, own.columns] = scaled_by(x[start:stop, own.columns], own, user)
    return x


def _scaled_sparse(data: PerUser, own: OwnScale) -> Table:
    """The same for CSR: the columns that are scaled are filled, the others stay sparse."""
    everything = np.arange(data.x.shape[1])
    filled = _dense(data.x, slice(None), own.columns)
    for user in range(len(data)):
        here = slice(int(data.offsets[user]), int(data.offsets[user + 1]))
        filled[here] = scaled_by(filled[here], own, user)
    others = np.setdiff1d(everything, own.columns)
    parts = sparse.hstack([sparse.csr_array(filled), data.x[:, others]], format="csr")
    order = np.argsort(np.concatenate([own.columns, others]))
    return sparse.csr_array(parts[:, order])


def scaled_by(values: NDArray[np.float64], own: OwnScale, user: int) -> NDArray[np.float64]:
    """Rows of one user, the columns of ``own`` alone, as that user's model sees them."""
    moved = (values - own.mean[user]) / own.std[user]
    return np.asarray(np.clip(moved, -FARTHEST, FARTHEST))


def _notes(data: PerUser, own: OwnScale, scale: str) -> list[str]:
    notes = []
    if len(own.columns):
        named = _listed([data.column_name(column) for column in own.columns.tolist()])
        notes.append(
            f"scaled on each device by the user's own mean and deviation, at most {FARTHEST:g} "
            f"of them: {named}"
        )
    if own.centre.any():
        notes.append("targets: each user's own mean is subtracted, on the device")
    if (own.unit != 1).any():
        notes.append(
            "targets: divided by each user's own deviation, on the device; RMSE stays in the "
            "units of the source"
        )
    if scale == AUTO:
        notes.append(f"what to scale was {LOOKED} (scale = 'own' or 'none' decides without)")
    return notes


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return f"{shown}, … ({len(names)} in all)" if len(names) > MOST_NAMED else shown
