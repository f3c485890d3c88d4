"""Models as learners: f_i(w, θ_i) together with one user's data."""

from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.wire import Order

Loss: TypeAlias = Literal["squared", "softmax"]
Matrix: TypeAlias = NDArray[np.float64]


def as_matrix(values: Tensor | NDArray[Any]) -> Matrix:
    """A torch tensor (or array) as a float64 matrix with one row a sample; without a copy where it is one already."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    matrix = array.astype(np.float64, copy=False)
    return matrix.reshape(len(matrix), -1)


class Batches(Protocol):
    """One user's minibatches, by visit."""

    num_examples: int

    def __call__(self, visit: int) -> tuple[Matrix, Matrix]:
        """(x, y) of the given visit, counted from 1: x of shape (m, d), y of shape (m, K)."""
        ...


class AdditiveLinear:
    """f_i = mean of ℓ(y, (w + θ_i)ᵀx), with K outputs; w and θ_i are d×K matrices, flattened by rows.

    batches: this user's training minibatches; targets are real (squared loss, ½‖·‖²) or one-hot rows (softmax).
    test: (x, y) on which ``evaluate`` measures, in the same form.
    """

    def __init__(
        self,
        batches: Batches,
        num_features: int,
        num_outputs: int = 1,
        loss: Loss = "squared",
        test: tuple[Tensor | Matrix, Tensor | Matrix] | None = None,
    ) -> None:
        if loss not in ("squared", "softmax"):
            raise ValueError(f"loss must be squared or softmax, got {loss!r}")
        if loss == "softmax" and num_outputs < 2:
            raise ValueError(f"softmax needs at least 2 outputs, got {num_outputs}: use loss='squared' for one")
        self._batches = batches
        self._shape = (num_features, num_outputs)
        self._loss = loss
        self._test = None if test is None else (as_matrix(test[0]), as_matrix(test[1]))
        self.num_examples = batches.num_examples

    def initial_theta(self) -> Vector:
        return np.zeros(self._shape[0] * self._shape[1])

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
        """g_w = g_θ = Xᵀ(prediction − y), summed or averaged over the minibatch: w and θ enter only as w + θ."""
        x, y = self._batches(order.visit)
        residual = self._predict(x, w + theta) - y
        total = (x.T @ residual).reshape(-1)
        gradient = total if order.reduction == "sum" else total / len(x)
        return gradient, gradient

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """Mean loss on the test part, and accuracy where there are classes to tell apart."""
        if self._test is None:
            return {}
        x, y = self._test
        prediction = self._predict(x, w + theta)
        measures = {"loss": self._mean_loss(prediction, y)}
        if self._shape[1] > 1:
            measures["accuracy"] = float(np.mean(prediction.argmax(axis=1) == y.argmax(axis=1)))
        return measures

    def _predict(self, x: Matrix, parameters: Vector) -> Matrix:
        scores = x @ parameters.reshape(self._shape)
        if self._loss == "squared":
            return scores
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances: Matrix = odds / odds.sum(axis=1, keepdims=True)
        return chances

    def _mean_loss(self, prediction: Matrix, y: Matrix) -> float:
        if self._loss == "squared":
            return float(0.5 * ((prediction - y) ** 2).sum(axis=1).mean())
        return float(-(y * np.log(np.maximum(prediction, 1e-300))).sum(axis=1).mean())
