"""The additive linear model in numpy."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import Batches, Rows, as_array
from flwr_ppsgd.wire import Order

Loss: TypeAlias = Literal["squared", "softmax"]
Matrix: TypeAlias = NDArray[np.float64]


def as_matrix(values: Rows) -> Matrix:
    """One float64 row per sample, without a copy if ``values`` has that form already."""
    array = as_array(values).astype(np.float64, copy=False)
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
        self.num_examples = batches.num_examples

    def initial_theta(self) -> Vector:
        """Zeros."""
        features, outputs = self._shape
        return np.zeros(features * outputs)

    def check_shared(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """ValueError unless the server's w has a number for each feature and output."""
        found = sum(math.prod(shape) for shape in shapes.values())
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
        scores = self._scores(x, w + theta)
        residual = predict(scores, self._loss) - y
        gradient = (x.T @ residual).reshape(-1)
        if order.reduction == "mean":
            gradient = gradient / len(x)
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

    def _minibatch(self, order: Order) -> tuple[Matrix, Matrix]:
        x, y = self._batches(order.visit)
        return as_matrix(x), as_matrix(y)

    def _scores(self, x: Matrix, parameters: Vector) -> Matrix:
        return x @ parameters.reshape(self._shape)


def predict(scores: Matrix, loss: Loss) -> Matrix:
    """What is compared with the targets: predict(scores) − y is ∂ℓ.

    Args:
        scores: outputs along the last axis.
        loss: "squared" leaves scores as they are, "softmax" turns them into chances.
    """
    if loss == "squared":
        return scores
    return np.exp(_log_softmax(scores))


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
        squares = ((scores - y) ** 2).sum(axis=-1)
        return np.asarray(0.5 * squares.mean(axis=0))
    likelihoods = (y * _log_softmax(scores)).sum(axis=-1)
    return np.asarray(-likelihoods.mean(axis=0))


def _log_softmax(scores: Matrix) -> Matrix:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    logs: Matrix = shifted - np.log(total)
    return logs
