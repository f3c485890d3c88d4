"""The message of one user's device: a ridge solution on the user's own rows.

Rows and targets are scaled first, in a way that depends on this user's rows alone. XX', or X'X if
that is smaller, is factorised once; every round then costs products of matrices only. The personal
model is in ``mixture``. Numpy is enough for a device.
"""

import functools
import logging
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import ThreadpoolController

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import require
from flwr_ppsgd.recipe import Flags, Matrix, Task

log = logging.getLogger("flwr.ppsgd")

Rows: TypeAlias = Any  # rows × columns: an array, or a sparse matrix that has ``toarray``
Places: TypeAlias = NDArray[np.intp]

RIDGE = 0.001  # the penalty of a message, as a share of the trace
UNIT_DEGREES = 4  # the public unit counts as much as this many own rows
CUT = 5.0  # own standard deviations, for columns of numbers
CONSTANT = 1e-9  # of the mean: a smaller deviation is round-off
LARGEST = 1e100  # a larger number counts as missing: its square would overflow
LEAST_TRACE = 1e-200  # a smaller sum of squares counts as zero

_threads = functools.cache(ThreadpoolController)  # cached, since finding BLAS takes a while


def one_blas_thread() -> AbstractContextManager[Any]:
    """For loops over small products, in which threads of BLAS would wait for each other."""
    context: AbstractContextManager[Any] = _threads().limit(limits=1, user_api="blas")
    return context


def spread(targets: ArrayLike) -> float:
    """√(S/(n − 1)) with S = Σ(y − ȳ)²; NaN below two rows, 0 if all targets are equal."""
    values = np.asarray(targets, dtype=np.float64).reshape(-1)
    values = values[np.abs(values) <= LARGEST]
    if len(values) < 2:
        return math.nan
    centred, _ = subtract_mean(values)
    squares = float(centred @ centred)
    return math.sqrt(squares / (len(values) - 1))


# --- rows and targets


@dataclass(frozen=True, eq=False)
class PublicColumns:
    """The public facts about rows and targets.

    Args:
        task: "regression" or "classification".
        numbers: per column, whether it is a number that each user scales by own rows.
        sparse: per column, whether most users lack it.
        outputs: the number of classes; 1 in regression, or for yes or no.
        ones: whether a column of ones is added, as the last.
    """

    task: Task
    numbers: Flags
    sparse: Flags
    outputs: int = 1
    ones: bool = False

    @property
    def width(self) -> int:
        """The number of columns of w."""
        return len(self.numbers) + self.ones


@dataclass(frozen=True, eq=False)
class Scaling:
    """How one user's raw rows become rows of X.

    Args:
        width: the number of raw columns.
        numbers: the places of the columns of numbers.
        mean: of each of them, over the training rows.
        deviation: likewise, with divisor n; 0 if the column is constant.
        centre: what is subtracted last, per column of w; it has one column more if ones are added.
    """

    width: int
    numbers: Places
    mean: Vector
    deviation: Vector
    centre: Vector

    @classmethod
    def of(cls, training: Matrix, columns: PublicColumns) -> Self:
        """By the training rows; in regression the centre is their mean."""
        numbers = np.flatnonzero(columns.numbers)
        centred, mean = subtract_mean(training[:, numbers])
        squares = (centred**2).sum(axis=0)
        deviation = np.sqrt(squares / max(1, len(training)))
        is_constant = deviation <= CONSTANT * np.abs(mean)
        deviation[is_constant] = 0.0
        width = len(columns.numbers)
        scaling = cls(width, numbers, mean, deviation, centre=np.zeros(columns.width))
        if columns.task == "regression":
            _, centre = subtract_mean(scaling(training))
            scaling = replace(scaling, centre=centre)
        return scaling

    def __call__(self, raw: Rows) -> Matrix:
        """Rows of X. A value that is missing counts as the own mean, or 0 in classification."""
        rows = dense(raw)
        rule = f"rows must have {self.width} columns"
        remedy = "give the columns of training, in their order"
        require(rows.shape[1] == self.width, rule, rows.shape[1], remedy)
        scaled = np.ones((len(rows), len(self.centre)))
        scaled[:, : self.width] = rows
        if len(self.numbers):
            varies = self.deviation > 0
            divisor = np.where(varies, self.deviation, 1.0)
            units = (rows[:, self.numbers] - self.mean) / divisor
            units = np.clip(units, -CUT, CUT)
            scaled[:, self.numbers] = np.where(varies, units, 0.0)
        scaled -= self.centre
        is_number = np.abs(scaled) <= LARGEST
        scaled[~is_number] = 0.0
        return scaled


@dataclass(frozen=True, eq=False)
class OwnProblem:
    """One user's rows X and targets Y, ready to be solved for any w.

    In regression both have mean zero, and Y is in own units: v² = (S + 4u²)/(max(n, 1) + 3). In
    classification Y is one-hot − 1/K. X holds only the columns of w in which some row is not 0.

    Args:
        columns: the public facts.
        scaling: how raw rows become X.
        support: the places of X's columns among those of w.
        rows: X, n × support.
        targets: Y, n × outputs.
        own_columns: 1.0 for each sparse column in which some raw row is not 0, else 0.0.
        location: ȳ, NaN without rows; 0 in classification.
        unit: v; 1 in classification.
    """

    columns: PublicColumns
    scaling: Scaling
    support: Places
    rows: Matrix
    targets: Matrix
    own_columns: Vector
    location: float = 0.0
    unit: float = 1.0

    @classmethod
    def of(cls, rows: Rows, targets: ArrayLike, columns: PublicColumns, unit: float = 1.0) -> Self:
        """From raw rows and targets: numbers, class indices, or rows of 0 and 1 with a column per
        class.

        Rows that hold NaN or infinity are left out, with a line in the log.
        """
        values = np.asarray(targets, dtype=np.float64)
        training, values = _drop_unusable(dense(rows), values)
        n = len(training)
        scaling = Scaling.of(training, columns)
        scaled = scaling(training)
        support = np.flatnonzero(scaled.any(axis=0))
        own_rows = scaled.take(support, axis=1)
        has_column = training[:, columns.sparse].any(axis=0)
        own_columns = np.asarray(has_column, dtype=np.float64)
        if columns.task == "classification":
            one_hot = _class_targets(values, columns)
            return cls(columns, scaling, support, own_rows, one_hot, own_columns)
        remedy = "give as many targets as rows"
        require(values.size == n, "a row has one target", values.shape, remedy)
        centred, mean = subtract_mean(values.reshape(-1))
        squares = float(centred @ centred) + UNIT_DEGREES * unit**2
        degrees = max(n, 1) - 1 + UNIT_DEGREES
        own_unit = math.sqrt(squares / degrees)
        amounts = centred[:, None] / own_unit
        location = float(mean) if n else math.nan
        return cls(columns, scaling, support, own_rows, amounts, own_columns, location, own_unit)

    @property
    def primal(self) -> bool:
        """Whether X'X is smaller than XX'."""
        n, width = self.rows.shape
        return bool(n > width)

    @functools.cached_property
    def spectrum(self) -> tuple[Vector, Matrix]:
        """Eigenvalues and eigenvectors of X'X or XX', for all rounds and the personal model."""
        if self.primal:
            return eigenpairs(self.rows.T @ self.rows)
        return eigenpairs(self.rows @ self.rows.T)

    @functools.cached_property
    def trace(self) -> float:
        """tr XX', 0 if it is tiny."""
        trace = float((self.rows**2).sum())
        return trace if trace > LEAST_TRACE else 0.0

    def predictions(self, shared: Matrix) -> Matrix:
        """Xw, n × outputs."""
        own_part = shared.take(self.support, axis=0)
        return np.asarray(self.rows @ own_part)


def solution(problem: OwnProblem, shared: Matrix) -> Matrix:
    """m = X'(XX' + λI)⁻¹(Y − Xw), λ = .001·tr XX': what this user would add to w.

    Zeros if X = 0: no rows, or one in regression.
    """
    message = np.zeros(shared.shape)
    if problem.trace == 0:
        return message
    rows = problem.rows
    with one_blas_thread():
        squares, vectors = problem.spectrum
        damped = squares[:, None] + RIDGE * problem.trace
        residual = problem.targets - problem.predictions(shared)
        if problem.primal:  # (X'X + λI)⁻¹X'r, the same numbers
            coordinates = vectors.T @ (rows.T @ residual)
            own = vectors @ (coordinates / damped)
        else:
            coordinates = vectors.T @ residual
            own = rows.T @ (vectors @ (coordinates / damped))
    message[problem.support] = own
    return message


# --- small pieces


def dense(rows: Rows) -> Matrix:
    """A float64 array, also of sparse rows."""
    if hasattr(rows, "toarray"):
        rows = rows.toarray()
    return np.asarray(rows, dtype=np.float64)


def eigenpairs(matrix: Matrix) -> tuple[Vector, Matrix]:
    """Eigenvalues and eigenvectors of a positive semidefinite matrix; round-off below 0 is cut."""
    values, vectors = np.linalg.eigh(matrix)
    return np.maximum(values, 0.0), vectors


def subtract_mean(values: Matrix) -> tuple[Matrix, Matrix]:
    """Values minus their mean, and the mean; equal values give exact zeros, no values mean 0."""
    if not len(values):
        return values, np.zeros(values.shape[1:])
    from_first = values - values[0]
    mean = from_first.mean(axis=0)
    return from_first - mean, values[0] + mean


def _drop_unusable(rows: Matrix, targets: Matrix) -> tuple[Matrix, Matrix]:
    """Without rows that hold NaN, infinity or a number beyond 1e100."""
    usable = (np.abs(rows) <= LARGEST).all(axis=1)
    has_target = np.abs(targets) <= LARGEST
    usable &= has_target.all(axis=1) if targets.ndim == 2 else has_target
    if usable.all():
        return rows, targets
    log.warning(
        "%d of this user's %d rows hold NaN or infinity and are left out: clean the data",
        int((~usable).sum()),
        len(rows),
    )
    return rows[usable], targets[usable]


def _class_targets(values: Matrix, columns: PublicColumns) -> Matrix:
    """One-hot − 1/K, of class indices; or of rows of 0 and 1 minus 1/K."""
    chance = 1 / max(2, columns.outputs)
    if values.ndim == 2:
        return values - chance
    known = bool(np.isin(values, np.arange(columns.outputs)).all())
    rule = f"classes must be whole numbers from 0 to {columns.outputs - 1}"
    require(known, rule, values[:5].tolist(), "number the classes in their public order")
    one_hot = np.eye(columns.outputs)[values.astype(np.intp)]
    return np.asarray(one_hot - chance)
