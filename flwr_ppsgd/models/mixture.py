"""The personal model: own models around β·w, weighted by their errors on rows left out.

All are ridge regressions with a kernel K between the user's own rows. Each kernel matrix is
factorised once, K = BB' with B'B = diag(s). Every penalty λ, every β and every row left out then
costs products with B alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import LOCAL, SHARED
from flwr_ppsgd.models.solve import (
    LEAST_TRACE,
    OwnProblem,
    Places,
    Rows,
    Scaling,
    eigenpairs,
    one_blas_thread,
)
from flwr_ppsgd.recipe import Matrix

LAMBDAS = np.array([1.0, 4.0, 16.0, 64.0, 256.0])  # divided by n, for kernels of trace n
BETAS = np.array([0.0, 0.5, 1.0])  # how much of w is added
WIDTHS = (0.3, 1.0, 3.0)  # of RBF kernels; one alone costs 8 % on some data
REFINEMENT = 0.1  # the prior of every RBF kernel, and of β = ½ beside β = 1
OFFSET = 10.0  # the prior of the own offset alone, divided by n
LEAST_RBF_ROWS = 5  # with fewer rows a kernel learns nothing
MOST_RBF_ROWS = 500  # a kernel needs a matrix of rows × rows
LEAST_ERROR = 1e-12  # of the mean square of Y: a smaller mean square of errors is round-off
CLOSE = 1e-6  # of the squared norms: nearer pairs of rows are subtracted, which keeps their digits
PAIRS_AT_ONCE = 1024
ROWS_AT_ONCE = 1024
SCALING = "scaling_"  # begins the names of a saved model's scaling


# --- the candidates


@dataclass(frozen=True, eq=False)
class Kernel:
    """One family of own models, by its matrix K = BB' between own rows, B'B = diag(s).

    Args:
        name: "linear", "offset" or "rbf" and its width.
        prior: the weight of the family before the user's rows are seen.
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
        """The duals of all models around β·Xw, and L, their mean squares on rows left out.

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
        duals = np.zeros((len(LAMBDAS), n, 2 * outputs))  # λ × rows × 2·outputs
        errors = np.zeros((len(LAMBDAS), len(BETAS)))
        for place, ridge in enumerate(LAMBDAS * (self.scale / n)):
            inverse = 1 / (self.squares + ridge)
            fitted = self.basis @ (inverse[:, None] * coordinates)
            residuals = both - fitted
            free = 1 - basis_squares @ inverse
            if self.intercept:
                free -= 1 / n
            of_targets, of_shared = np.hsplit(residuals / free[:, None], 2)
            for which, beta in enumerate(BETAS):
                left_out = of_targets - beta * of_shared
                errors[place, which] = (left_out**2).sum() / n
            duals[place] = residuals / ridge
        return duals, errors


def mean_duals(duals: Matrix, weights: Matrix) -> Matrix:
    """The duals of the weighted mean of one kernel's models, rows × outputs.

    Args:
        duals: of ``Kernel.fit``, λ × rows × 2·outputs.
        weights: λ × β.
    """
    of_targets, of_shared = np.split(duals, 2, axis=2)
    own = np.tensordot(weights.sum(axis=1), of_targets, axes=1)
    shared = np.tensordot(weights @ BETAS, of_shared, axes=1)
    return np.asarray(own - shared)


def candidate_kernels(problem: OwnProblem) -> list[Kernel]:
    """The user's kernels: the linear one, the offset, then RBF kernels of three widths.

    RBF kernels need dense columns and 5 to 500 rows that are not all equal.
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
        squares, vectors = eigenpairs(np.exp(-rate * distances))
        basis = vectors * np.sqrt(squares)
        kernels.append(Kernel(f"rbf {width}", REFINEMENT, basis, squares, rate=rate))
    return kernels


def squared_distances(left: Matrix, right: Matrix) -> Matrix:
    """‖x − x'‖² for rows x of ``left`` and x' of ``right``; exactly 0 for equal rows."""
    squares = _squared_norms(left)[:, None] + _squared_norms(right)
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


def _squared_norms(rows: Matrix) -> Vector:
    """‖x‖² of each row."""
    return np.asarray(np.einsum("ij,ij->i", rows, rows))


# --- their weights


def trust_in(problem: OwnProblem, shared: Matrix, variance: Vector) -> float:
    """s = max(0, 1 − c·Σx_j²ν_j/‖Xw‖²): the share of w's predictions for own rows beyond noise.

    Args:
        problem: the user's own rows.
        shared: w, columns × outputs.
        variance: ν, the noise in w: one number, or one per column.
    """
    signal = float((problem.predictions(shared) ** 2).sum())
    if signal == 0:
        return 0.0
    energy = (problem.rows**2).sum(axis=0)
    by_column = np.broadcast_to(variance, problem.columns.width)
    noise = problem.columns.outputs * float(energy @ by_column[problem.support])
    return max(0.0, 1 - noise / signal)


def mixture_weights(errors: Matrix, priors: Vector, trust: float, targets: Matrix) -> Matrix:
    """∝ prior·L^(−n/2), kernels × λ × β, of sum 1; the prior alone if Y = 0.

    Args:
        errors: L, kernels × λ × β; at least 1e-12 of the mean square of Y counts.
        priors: of the kernels; β = 0, ½, 1 have the priors 1 − s, s/10, s.
        trust: s.
        targets: Y.
    """
    of_beta = np.array([1 - trust, REFINEMENT * trust, trust])
    prior = np.broadcast_to(priors[:, None, None] * of_beta, errors.shape)  # kernels × λ × β
    n = len(targets)
    mean_square = float((targets**2).sum()) / n
    if mean_square == 0:
        return np.asarray(prior / prior.sum())
    logs = np.log(np.maximum(errors, LEAST_ERROR * mean_square))
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
        location: ȳ; 0 in classification. NaN in regression without rows: then nothing can be
            predicted.
        unit: v; 1 in classification.
        trust: s.
        beta: β̄, the mean β.
        kernels: the names of the kernels; none below two rows.
        weights: of the kernels.
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

    @classmethod
    def linear(cls, problem: OwnProblem, slopes: Matrix, offset: Vector) -> Self:
        """A model without kernels, in the user's own coordinates."""
        return cls(
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

    @property
    def has_location(self) -> bool:
        """Whether the model can predict: not in regression without rows."""
        return not math.isnan(self.location)

    @property
    def choices(self) -> dict[str, float]:
        """Trust, the mean β, and the weight of each kernel."""
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
            x = self.scaling(raw[start : start + ROWS_AT_ONCE])
            parts.append(self.location + self.unit * self._scores(x))
        return np.concatenate(parts)

    def _scores(self, x: Matrix) -> Matrix:
        """Scores of scaled rows, in own units around the location."""
        scores = x @ self.slopes + self.offset
        if len(self.rates):
            distances = squared_distances(x.take(self.support, axis=1), self.rows)
            elsewhere = np.delete(x, self.support, axis=1)  # the user's own rows are 0 there
            distances += _squared_norms(elsewhere)[:, None]
            for rate, coefficients in zip(self.rates, self.coefficients, strict=True):
                scores += np.exp(-rate * distances) @ coefficients
        return np.asarray(scores)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """All fields, for ``np.savez``."""
        values = dict(vars(self))
        scaling = values.pop("scaling")
        for name, value in vars(scaling).items():
            values[SCALING + name] = value
        return {name: np.asarray(value) for name, value in values.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The model of ``to_arrays``, which predicts the same bits."""

        def value(name: str) -> Any:
            array = arrays[name]
            return array.item() if array.ndim == 0 else array

        parts = {field.name: value(SCALING + field.name) for field in fields(Scaling)}
        names = [field.name for field in fields(cls) if field.name != "scaling"]
        own = {name: value(name) for name in names}
        return cls(scaling=Scaling(**parts), **own)


def personal_models(problem: OwnProblem, shared: Matrix, variance: Vector) -> dict[str, Mixture]:
    """The user's own model and two to compare it with; w alone below two rows.

    Args:
        problem: the user's own rows.
        shared: w, columns × outputs.
        variance: ν, the noise in w: one number, or one per column.

    Returns:
        "": the user's own model; "local_": the same mixture with β = 0 only, from own rows
        without w; "shared_": w around the own location, without own models.
    """
    trust = trust_in(problem, shared, variance)
    no_offset = np.zeros(problem.columns.outputs)
    shared_alone = Mixture.linear(problem, shared, no_offset)
    if len(problem.rows) < 2:
        own = replace(shared_alone, trust=trust, beta=1.0)
        alone = Mixture.linear(problem, 0.0 * shared, problem.targets.sum(axis=0))
        return {"": own, LOCAL: alone, SHARED: shared_alone}
    with one_blas_thread():
        kernels = candidate_kernels(problem)
        predictions = problem.predictions(shared)
        fits = [kernel.fit(problem.targets, predictions) for kernel in kernels]
        own = _mix(problem, shared, trust, kernels, fits)
        alone = _mix(problem, shared, 0.0, kernels, fits)
    return {"": own, LOCAL: alone, SHARED: shared_alone}


def _mix(
    problem: OwnProblem,
    shared: Matrix,
    trust: float,
    kernels: list[Kernel],
    fits: list[tuple[Matrix, Matrix]],
) -> Mixture:
    """The mixture of all candidates."""
    errors = np.array([own_errors for _, own_errors in fits])  # kernels × λ × β
    priors = np.array([kernel.prior for kernel in kernels])
    weights = mixture_weights(errors, priors, trust, problem.targets)
    duals = []
    for (own_duals, _), own_weights in zip(fits, weights, strict=True):
        duals.append(mean_duals(own_duals, own_weights))
    linear, offset, *rbf = duals  # rows × outputs each
    beta = float((weights @ BETAS).sum())
    slopes = beta * shared
    slopes[problem.support] += problem.rows.T @ linear
    constant = np.zeros(problem.columns.outputs)
    if problem.columns.task == "classification":
        constant = offset.sum(axis=0)
    return replace(
        Mixture.linear(problem, slopes, constant),
        rows=problem.rows if rbf else problem.rows[:0],
        rates=np.array([kernel.rate for kernel in kernels[2:]]),
        coefficients=np.array(rbf),  # rates × rows × outputs
        trust=trust,
        beta=beta,
        kernels=np.array([kernel.name for kernel in kernels]),
        weights=weights.sum(axis=(1, 2)),
    )
