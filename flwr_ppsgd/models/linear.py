"""The additive linear model in numpy."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import DOUBLE
from flwr_ppsgd.learner import Batches, Rows, Solution, all_rows, as_array
from flwr_ppsgd.models.logistic import Logistic, log_softmax, softmax
from flwr_ppsgd.models.ridge import Columns, Features, Ridge, dense, finite_rows
from flwr_ppsgd.wire import Order

Loss: TypeAlias = Literal["squared", "softmax"]
Matrix: TypeAlias = NDArray[np.float64]

ROUND_OFF = 1e-14  # of the largest number


def as_matrix(values: Rows) -> Matrix:
    """One float64 row per sample, without a copy if ``values`` has that form already."""
    array = as_array(values)
    if array.ndim == 2 and array.dtype == DOUBLE:
        return array
    array = array.astype(np.float64, copy=False)
    return array.reshape(len(array), -1)


class AdditiveLinear:
    """f_i = mean of ℓ(y, (w + θ_i)ᵀx), with K outputs.

    w and θ_i are d × K matrices, flattened by rows.

    Args:
        batches: this user's training minibatches. Targets are real numbers for the squared loss
            ½‖·‖², one-hot rows for softmax.
        num_features: d.
        num_outputs: K.
        loss: "squared" or "softmax".
        test: (x, y) on which ``evaluate`` measures, in the same form.
    """

    begins_at_zero = True

    def __init__(
        self,
        batches: Batches,
        num_features: int,
        num_outputs: int = 1,
        loss: Loss = "squared",
        test: tuple[Rows, Rows] | None = None,
    ) -> None:
        if loss not in ("squared", "softmax"):
            raise ValueError(f"loss must be squared or softmax, got {loss!r}: choose one of them")
        if loss == "softmax" and num_outputs < 2:
            raise ValueError(
                f"softmax needs at least 2 outputs, got {num_outputs}: use loss='squared' for one"
            )
        self._batches = batches
        self._shape = (num_features, num_outputs)
        self._loss = loss
        self._test: tuple[Matrix, Matrix] | None = None
        if test is not None:
            x, y = test
            self._test = (as_matrix(x), as_matrix(y))
            self.num_tested = len(y)
        self.num_examples = batches.num_examples

    def initial_theta(self) -> Vector:
        """Zeros."""
        features, outputs = self._shape
        return np.zeros(features * outputs)

    def check_shared(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """ValueError unless the server's w has a number for each feature and output."""
        found = sum(map(math.prod, shapes.values()))
        features, outputs = self._shape
        if found != features * outputs:
            raise ValueError(
                f"the server's w has {found} parameters and this client's has {features} features "
                f"× {outputs} outputs = {features * outputs}: make initial_arrays, or this "
                "client's rows, of the same width"
            )

    def gradients(
        self,
        w: Vector,
        theta: Vector,
        order: Order,
    ) -> tuple[Vector, Vector]:
        """g_w = g_θ = Xᵀ(prediction − y), summed or averaged over the minibatch.

        They are equal because w and θ enter only as w + θ.
        """
        x, y = self._minibatch(order)
        prediction = predict(self._scores(x, w + theta), self._loss)
        residual = prediction - y
        if order.normalise:  # a perfect fit must not send noise of the last digit at full weight
            least = ROUND_OFF * self._largest(prediction, y, order)
            np.copyto(residual, 0.0, where=np.abs(residual) <= least)
        if order.reduction == "mean" and len(y):
            residual /= len(y)
        gradient = dense(x.T @ residual).reshape(-1)
        return gradient, gradient

    def training_measures(
        self,
        w: Vector,
        theta: Vector,
        order: Order,
    ) -> dict[str, float]:
        """Mean loss on the minibatch."""
        x, y = self._minibatch(order)
        scores = self._scores(x, w + theta)
        return {"loss": float(mean_losses(scores, y, self._loss))}

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """Mean loss on the test part, and accuracy if there are two or more outputs."""
        if self._test is None:
            return {}
        x, y = self._test
        scores = self._scores(x, w + theta)
        measures = {"loss": float(mean_losses(scores, y, self._loss))}
        if self._shape[1] > 1:
            right = scores.argmax(axis=1) == y.argmax(axis=1)
            measures["accuracy"] = float(np.mean(right))
        return measures

    def solve(self, w: Vector) -> Solution:
        """The best θ for this w: see ``ridge``, and ``logistic`` for softmax."""
        return self._solver.solve(w)

    def own_size(self) -> float:
        """The root mean square of the user's local solution."""
        return self._solver.own_size()

    @functools.cached_property
    def _solver(self) -> Ridge | Logistic:
        x, y = self._everything
        return solver(x, y, self._loss, self._groups())

    @functools.cached_property
    def _everything(self) -> tuple[Features, Matrix]:
        """All rows of the user that are finite."""
        return finite_rows(*self._all_rows())

    @functools.cached_property
    def _largest_target(self) -> float:
        """max |y| over all rows."""
        _, y = self._everything
        return _largest(y)

    def _largest(self, prediction: Matrix, y: Matrix, order: Order) -> float:
        """The size of what is compared: that of chances is 1."""
        if self._loss == "softmax":
            return 1.0
        targets = self._largest_target if order.full_batch else _largest(y)
        return max(targets, _largest(prediction))

    def _all_rows(self) -> tuple[Features, Matrix]:
        x, y = all_rows(self._batches)
        return as_matrix(x), as_matrix(y)

    def _groups(self) -> Sequence[Columns]:
        """The columns of each representation, if there are several."""
        return ()

    def _minibatch(self, order: Order) -> tuple[Features, Matrix]:
        if order.full_batch:
            return self._everything
        x, y = self._batches(order.visit)
        return as_matrix(x), as_matrix(y)

    def _scores(self, x: Features, parameters: Vector) -> Matrix:
        return dense(x @ parameters.reshape(self._shape))


def solver(
    x: Features,
    y: Matrix,
    loss: Loss,
    groups: Sequence[Columns] = (),
) -> Ridge | Logistic:
    """One user's rows, ready to be solved for any w.

    Args:
        x: n × d, dense or sparse.
        y: n × K: one-hot for softmax.
        loss: "squared" or "softmax".
        groups: as for ``ridge.Design``.
    """
    if loss == "softmax":
        return Logistic(x, y, groups)
    return Ridge(x, y, groups)


def _largest(values: Matrix) -> float:
    """max |values|."""
    return float(np.maximum.reduce(np.abs(values), axis=None, initial=0.0))


def predict(scores: Matrix, loss: Loss) -> Matrix:
    """What is compared with the targets: predict(scores) − y is ∂ℓ.

    Args:
        scores: outputs along the last axis.
        loss: "squared" leaves scores as they are, "softmax" turns them into chances.
    """
    if loss == "squared":
        return scores
    return softmax(scores)


def mean_losses(
    scores: Matrix,
    y: Matrix,
    loss: Loss,
) -> Vector:
    """The mean of ℓ over the first axis (samples).

    Args:
        scores: samples first, outputs along the last axis.
        y: targets that broadcast against ``scores``.
        loss: "squared" or "softmax".
    """
    if loss == "squared":
        errors = scores - y
        errors *= errors  # in place: for many models this is a large array
        squares = errors.sum(axis=-1)
        return np.asarray(0.5 * squares.mean(axis=0))
    likelihoods = (y * log_softmax(scores)).sum(axis=-1)
    return np.asarray(-likelihoods.mean(axis=0))
