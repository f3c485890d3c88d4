"""What one user's device solves: the message to the server, and the personal model.

Both are ridge regressions on the user's own rows X with targets Y, linear or with a kernel K. Each
kernel matrix is factorised once, K = BB' with B'B = diag(s). Every penalty λ, every w and every row
left out then costs products with B alone. Numpy is enough for a device.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
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

RIDGE = 0.001  # of the trace, in a message: almost none
UNIT_DEGREES = 4  # the public unit counts as much as this many own rows
CUT = 5.0  # own standard deviations, for columns of numbers
CONSTANT = 1e-9  # of the mean: a smaller deviation is round-off
LAMBDAS = np.array([1.0, 4.0, 16.0, 64.0, 256.0])  # divided by n, for kernels of trace n
BETAS = np.array([0.0, 0.5, 1.0])  # how much of w is added
WIDTHS = (0.3, 1.0, 3.0)  # of RBF kernels; one alone costs 8 % on some data
REFINEMENT = 0.1  # the prior of every RBF kernel, and of β = ½ beside β = 1
OFFSET = 10.0  # the prior of the own offset alone, divided by n
LEAST_RBF_ROWS = 5  # below, a kernel learns nothing
MOST_RBF_ROWS = 500  # a kernel needs a matrix of rows × rows
LEAST_ERROR = 1e-12  # of the mean square of Y: a smaller mean square of errors is round-off
LARGEST = 1e100  # a larger number counts as missing: its square would overflow
LEAST_TRACE = 1e-200  # a smaller sum of squares counts as zero
CLOSE = 1e-6  # of the squared norms: nearer pairs of rows are subtracted, which keeps their digits
PAIRS_AT_ONCE = 1024
ROWS_AT_ONCE = 1024
SCALING = "scaling_"  # begins the names of a saved model's scaling
NOT_SAVED = ("scaling", "alone", "shared_alone")


_threads = functools.cache(ThreadpoolController)  # looking for BLAS takes a while


def one_blas_thread() -> AbstractContextManager[Any]:
    """For loops over small products, in which threads of BLAS would wait for each other."""
    context: AbstractContextManager[Any] = _threads().limit(limits=1, user_api="blas")
    return context


# --- rows and targets


@dataclass(frozen=True, eq=False)
class PublicColumns:
    """What is public about rows and targets.

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


def spread(targets: ArrayLike) -> float:
    """√(S/(n − 1)) with S = Σ(y − ȳ)²; NaN below two rows, 0 if all targets are equal."""
    values = np.asarray(targets, dtype=np.float64).reshape(-1)
    values = values[np.abs(values) <= LARGEST]
    if len(values) < 2:
        return math.nan
    centred, _ = _subtract_mean(values)
    return math.sqrt(float(centred @ centred) / (len(values) - 1))


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
        centred, mean = _subtract_mean(training[:, numbers])
        squares = (centred**2).sum(axis=0)
        deviation = np.sqrt(squares / max(1, len(training)))
        deviation[deviation <= CONSTANT * np.abs(mean)] = 0.0
        width = len(columns.numbers)
        scaling = cls(width, numbers, mean, deviation, np.zeros(columns.width))
        if columns.task == "classification":
            return scaling
        _, centre = _subtract_mean(scaling(training))
        return replace(scaling, centre=centre)

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
        scaled[~(np.abs(scaled) <= LARGEST)] = 0.0
        return scaled


@dataclass(frozen=True, eq=False)
class OwnProblem:
    """One user's rows X and targets Y, ready to be solved for any w.

    In regression both have mean zero, and Y is in own units: v² = (S + 4u²)/(max(n, 1) + 3). In
    classification Y is one-hot − 1/K. X holds only the columns of w in which some row is not 0.

    Args:
        columns: what is public.
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
        """From raw rows and targets: numbers, or class indices, or a row of 0 and 1 per class.

        Rows that hold NaN or infinity are left out, with a line in the log.
        """
        training, values = _drop_unusable(dense(rows), np.asarray(targets, dtype=np.float64))
        scaling = Scaling.of(training, columns)
        scaled = scaling(training)
        support = np.flatnonzero(scaled.any(axis=0))
        own = scaled.take(support, axis=1)
        has_column = training[:, columns.sparse].any(axis=0)
        own_columns = np.asarray(has_column, dtype=np.float64)
        if columns.task == "classification":
            classes = _class_targets(values, columns)
            return cls(columns, scaling, support, own, classes, own_columns)
        remedy = "give as many targets as rows"
        require(values.size == len(training), "a row has one target", values.shape, remedy)
        centred, mean = _subtract_mean(values.reshape(-1))
        squares = float(centred @ centred) + UNIT_DEGREES * unit**2
        degrees = max(len(centred), 1) - 1 + UNIT_DEGREES
        own_unit = math.sqrt(squares / degrees)
        scores = centred[:, None] / own_unit
        location = float(mean) if len(centred) else math.nan
        return cls(columns, scaling, support, own, scores, own_columns, location, own_unit)

    @property
    def primal(self) -> bool:
        """Whether X'X is smaller than XX'."""
        n, width = self.rows.shape
        return bool(n > width)

    @functools.cached_property
    def spectrum(self) -> tuple[Vector, Matrix]:
        """Eigenvalues and eigenvectors of X'X or XX', for all rounds and the personal model."""
        if self.primal:
            return _eigenpairs(self.rows.T @ self.rows)
        return _eigenpairs(self.rows @ self.rows.T)

    @functools.cached_property
    def trace(self) -> float:
        """tr XX', 0 if it is tiny."""
        trace = float((self.rows**2).sum())
        return trace if trace > LEAST_TRACE else 0.0

    def predictions(self, shared: Matrix) -> Matrix:
        """Xw, n × outputs."""
        return np.asarray(self.rows @ shared.take(self.support, axis=0))


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


# --- the candidates of the personal model


@dataclass(frozen=True, eq=False)
class Kernel:
    """One family of own models, by its matrix K = BB' between own rows, B'B = diag(s).

    Args:
        name: "linear", "offset" or "rbf" and its width.
        prior: how much the family counts before the user's rows are seen.
        basis: B, rows × rank.
        squares: s.
        scale: the trace of K divided by n, which every λ is multiplied by.
        intercept: whether the model has a constant without penalty. Rows and targets have mean
            zero then: the constant is 0, and differs only if a row is left out.
        rate: of an RBF kernel, exp(−rate·‖x − x'‖²).
    """

    name: str
    prior: float
    basis: Matrix
    squares: Vector
    scale: float = 1.0
    intercept: bool = False
    rate: float = 0.0

    def fit(self, targets: Matrix, predictions: Matrix) -> tuple[Matrix, Matrix]:
        """The duals of all models around β·Xw, and their mean squares on rows left out.

        The residual of a model is λ(K + λI)⁻¹(Y − β·Xw). On a row left out it is that divided by
        1 − leverage, the diagonal of K(K + λI)⁻¹.

        Args:
            targets: Y.
            predictions: Xw.

        Returns:
            (K + λI)⁻¹Y beside (K + λI)⁻¹Xw, λ × rows × 2·outputs, and L, λ × β.
        """
        n, outputs = targets.shape
        both = np.hstack([targets, predictions])  # every model is linear in both
        coordinates = self.basis.T @ both
        basis_squares = self.basis**2
        duals = np.zeros((len(LAMBDAS), n, 2 * outputs))
        scores = np.zeros((len(LAMBDAS), len(BETAS)))
        for place, ridge in enumerate(LAMBDAS * (self.scale / n)):
            inverse = 1 / (self.squares + ridge)
            residuals = both - self.basis @ (inverse[:, None] * coordinates)
            free = 1 - basis_squares @ inverse
            if self.intercept:
                free -= 1 / n
            of_targets, of_shared = np.hsplit(residuals / free[:, None], 2)
            for which, beta in enumerate(BETAS):
                left_out = of_targets - beta * of_shared
                scores[place, which] = (left_out**2).sum() / n
            duals[place] = residuals / ridge
        return duals, scores


def mean_duals(duals: Matrix, weights: Matrix) -> Matrix:
    """Of the weighted mean of one kernel's models, rows × outputs.

    Args:
        duals: of ``Kernel.fit``.
        weights: λ × β.
    """
    of_targets, of_shared = np.split(duals, 2, axis=2)
    own = np.tensordot(weights.sum(axis=1), of_targets, axes=1)
    shared = np.tensordot(weights @ BETAS, of_shared, axes=1)
    return np.asarray(own - shared)


def candidates(problem: OwnProblem) -> list[Kernel]:
    """The user's kernels: the linear one, the offset, then RBF kernels of three widths.

    The last are for dense columns and 5 to 500 rows that are not all equal.
    """
    n = len(problem.rows)
    regression = problem.columns.task == "regression"
    squares, vectors = problem.spectrum
    basis = problem.rows @ vectors if problem.primal else vectors * np.sqrt(squares)
    scale = problem.trace / n or 1.0
    linear = Kernel("linear", 1.0, basis, squares, scale, intercept=regression)
    # regression: the own mean alone; classification: the kernel 11'
    rank = 0 if regression else 1
    ones = np.ones((n, rank))
    length = np.full(rank, float(n))
    offset = Kernel("offset", OFFSET / n, ones, length, intercept=regression)
    kernels = [linear, offset]
    if problem.columns.sparse.any() or not LEAST_RBF_ROWS <= n <= MOST_RBF_ROWS:
        return kernels
    distances = squared_distances(problem.rows, problem.rows)
    different = distances[distances > LEAST_TRACE]
    if not different.size:
        return kernels
    typical = np.median(different)
    for width in WIDTHS:
        rate = width / typical
        matrix = np.exp(-rate * distances)
        squares, vectors = _eigenpairs(matrix)
        basis = vectors * np.sqrt(squares)
        kernels.append(Kernel(f"rbf {width}", REFINEMENT, basis, squares, rate=rate))
    return kernels


def squared_distances(left: Matrix, right: Matrix) -> Matrix:
    """‖x − x'‖² for rows of the one and of the other; exactly 0 for equal rows."""
    norms = _squared_norms(left)
    squares = norms[:, None] + _squared_norms(right)
    distances = np.asarray(squares - 2 * (left @ right.T))
    near = distances <= CLOSE * squares
    if left is right:
        np.fill_diagonal(near, False)
        np.fill_diagonal(distances, 0.0)
    pairs = np.argwhere(near)
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        some, others = pairs[start : start + PAIRS_AT_ONCE].T
        distances[some, others] = _squared_norms(left[some] - right[others])
    return distances


def trust_in(problem: OwnProblem, shared: Matrix, variance: Vector) -> float:
    """s = max(0, 1 − c·Σx_j²ν_j/‖Xw‖²): is w's prediction for own rows more than its noise?

    Args:
        problem: the user's own rows.
        shared: w, columns × outputs.
        variance: ν, the noise in w: one number, or one per column.
    """
    predictions = problem.predictions(shared)
    signal = float((predictions**2).sum())
    if signal == 0:
        return 0.0
    energy = (problem.rows**2).sum(axis=0)
    by_column = np.broadcast_to(variance, problem.columns.width)
    noise = problem.columns.outputs * float(energy @ by_column[problem.support])
    return max(0.0, 1 - noise / signal)


def mixture_weights(scores: Matrix, priors: Vector, trust: float, targets: Matrix) -> Matrix:
    """∝ prior·L^(−n/2), kernels × λ × β, of sum 1; the prior alone if Y = 0.

    Args:
        scores: L, kernels × λ × β; at least 1e-12 of the mean square of Y counts.
        priors: of the kernels; β = 0, ½, 1 have the priors 1 − s, s/10, s.
        trust: s.
        targets: Y.
    """
    of_beta = np.array([1 - trust, REFINEMENT * trust, trust])
    prior = np.broadcast_to(priors[:, None, None] * of_beta, scores.shape)
    n = len(targets)
    mean_square = float((targets**2).sum()) / n
    if mean_square == 0:
        return np.asarray(prior / prior.sum())
    logs = np.log(np.maximum(scores, LEAST_ERROR * mean_square))
    least = logs[prior > 0].min()
    above_least = np.maximum(logs - least, 0.0)
    weights = prior * np.exp(-0.5 * n * above_least)
    return np.asarray(weights / weights.sum())


# --- the personal model


@dataclass(frozen=True, eq=False)
class Mixture:
    """A user's personal model; it stays on the device.

    Prediction = location + unit·(x·slopes + offset + Σ_rates exp(−rate·‖x − rows‖²)·coefficients).

    Args:
        scaling: how raw rows become x.
        slopes: β̄·w and the own linear part, columns × outputs.
        offset: per output.
        support: the places of the columns of ``rows``.
        rows: the user's own rows, if there are RBF kernels.
        rates: of the RBF kernels.
        coefficients: dual ones, rates × rows × outputs.
        location: ȳ; 0 in classification. NaN in regression without rows: there is nothing to
            predict with.
        unit: v; 1 in classification.
        trust: s.
        beta: β̄, the mean β.
        kernels: the names of the kernels; none below two rows.
        weights: how much each of them counts.
        alone: the same mixture with β = 0 only: own rows without w. It is not saved.
        shared_alone: w around the own location, without own models. It is not saved.
    """

    scaling: Scaling
    slopes: Matrix
    offset: Vector
    support: Places
    rows: Matrix
    rates: Vector
    coefficients: Matrix
    location: float
    unit: float
    trust: float
    beta: float
    kernels: NDArray[np.str_]
    weights: Vector
    alone: "Mixture | None" = None
    shared_alone: "Mixture | None" = None

    @property
    def has_location(self) -> bool:
        """Whether there is something to predict with."""
        return not math.isnan(self.location)

    @property
    def choices(self) -> dict[str, float]:
        """What the user chose, in numbers: trust, the mean β, and the weight of each kernel."""
        by_kernel = zip(self.kernels.tolist(), self.weights.tolist(), strict=True)
        return {"trust": self.trust, "beta": self.beta, **dict(by_kernel)}

    def predict(self, raw: Rows) -> Matrix:
        """Rows × 1 in the units of the targets, or rows × classes of scores."""
        if not self.has_location:
            raise ValueError(
                "a user without rows has no mean to predict around: give this user rows, or leave "
                "the user out of the evaluation"
            )
        parts = [np.zeros((0, len(self.offset)))]
        for start in range(0, raw.shape[0], ROWS_AT_ONCE):
            parts.append(self._predict_part(raw[start : start + ROWS_AT_ONCE]))
        return np.concatenate(parts)

    def _predict_part(self, raw: Rows) -> Matrix:
        x = self.scaling(raw)
        result = x @ self.slopes + self.offset
        if len(self.rates):
            distances = squared_distances(x.take(self.support, axis=1), self.rows)
            elsewhere = np.delete(x, self.support, axis=1)  # the user's own rows are 0 there
            distances += _squared_norms(elsewhere)[:, None]
            for rate, coefficients in zip(self.rates, self.coefficients, strict=True):
                result += np.exp(-rate * distances) @ coefficients
        return np.asarray(self.location + self.unit * result)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that predicts, for ``np.savez``."""
        arrays = {}
        for name, value in vars(self.scaling).items():
            arrays[SCALING + name] = np.asarray(value)
        for name, value in vars(self).items():
            if name not in NOT_SAVED:
                arrays[name] = np.asarray(value)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The model that gave these arrays: it predicts the same bits."""

        def value(name: str) -> Any:
            array = arrays[name]
            return array.item() if array.ndim == 0 else array

        parts = {field.name: value(SCALING + field.name) for field in fields(Scaling)}
        names = [field.name for field in fields(cls) if field.name not in NOT_SAVED]
        own = {name: value(name) for name in names}
        return cls(scaling=Scaling(**parts), **own)


def personal_model(problem: OwnProblem, shared: Matrix, variance: Vector) -> Mixture:
    """Own models around β·w, weighted by their errors on rows left out; w alone below two rows.

    Args:
        problem: the user's own rows.
        shared: w, columns × outputs.
        variance: ν, the noise in w: one number, or one per column.
    """
    trust = trust_in(problem, shared, variance)
    only_shared = _linear_model(problem, shared, np.zeros(problem.columns.outputs))
    if len(problem.rows) < 2:
        alone = _linear_model(problem, 0.0 * shared, problem.targets.sum(axis=0))
        return replace(only_shared, trust=trust, beta=1.0, alone=alone, shared_alone=only_shared)
    with one_blas_thread():
        kernels = candidates(problem)
        predictions = problem.predictions(shared)
        fits = [kernel.fit(problem.targets, predictions) for kernel in kernels]
        model = _mix(problem, shared, trust, kernels, fits)
        alone = _mix(problem, shared, 0.0, kernels, fits)
    return replace(model, alone=alone, shared_alone=only_shared)


def _mix(
    problem: OwnProblem,
    shared: Matrix,
    trust: float,
    kernels: Sequence[Kernel],
    fits: Sequence[tuple[Matrix, Matrix]],
) -> Mixture:
    """The mixture of all candidates."""
    scores = np.array([own_scores for _, own_scores in fits])
    priors = np.array([kernel.prior for kernel in kernels])
    weights = mixture_weights(scores, priors, trust, problem.targets)
    duals = []
    for (own_duals, _), own_weights in zip(fits, weights, strict=True):
        duals.append(mean_duals(own_duals, own_weights))
    linear, offset, *rbf = duals
    beta = float((weights @ BETAS).sum())
    slopes = beta * shared
    slopes[problem.support] += problem.rows.T @ linear
    constant = np.zeros(problem.columns.outputs)
    if problem.columns.task == "classification":
        constant = offset.sum(axis=0)
    return replace(
        _linear_model(problem, slopes, constant),
        rows=problem.rows if rbf else problem.rows[:0],
        rates=np.array([kernel.rate for kernel in kernels[2:]]),
        coefficients=np.array(rbf),
        trust=trust,
        beta=beta,
        kernels=np.array([kernel.name for kernel in kernels]),
        weights=weights.sum(axis=(1, 2)),
    )


def _linear_model(problem: OwnProblem, slopes: Matrix, offset: Vector) -> Mixture:
    """A model without kernels, in the user's own coordinates."""
    return Mixture(
        scaling=problem.scaling,
        slopes=slopes,
        offset=offset,
        support=problem.support,
        rows=problem.rows[:0],
        rates=np.zeros(0),
        coefficients=np.zeros((0, 0, len(offset))),
        location=problem.location,
        unit=problem.unit,
        trust=0.0,
        beta=0.0,
        kernels=np.array([], dtype=np.str_),
        weights=np.zeros(0),
    )


# --- small pieces


def _squared_norms(rows: Matrix) -> Vector:
    """‖x‖² of each row."""
    return np.asarray(np.einsum("ij,ij->i", rows, rows))


def _eigenpairs(matrix: Matrix) -> tuple[Vector, Matrix]:
    """Of a matrix whose eigenvalues are negative by round-off alone."""
    values, vectors = np.linalg.eigh(matrix)
    return np.maximum(values, 0.0), vectors


def dense(rows: Rows) -> Matrix:
    """A float64 array of what may be sparse."""
    if hasattr(rows, "toarray"):
        rows = rows.toarray()
    return np.asarray(rows, dtype=np.float64)


def _subtract_mean(values: Matrix) -> tuple[Matrix, Matrix]:
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
    if targets.ndim == 2:
        usable &= has_target.all(axis=1)
    else:
        usable &= has_target
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
    classes = values.astype(np.intp)
    known = bool(np.isin(values, np.arange(columns.outputs)).all())
    rule = f"classes must be whole numbers from 0 to {columns.outputs - 1}"
    require(known, rule, values[:5].tolist(), "number the classes in their public order")
    one_hot = np.eye(columns.outputs)[classes]
    return np.asarray(one_hot - chance)
