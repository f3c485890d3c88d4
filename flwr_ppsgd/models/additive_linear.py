"""The additive linear model in numpy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import DOUBLE
from flwr_ppsgd.checks import one_of
from flwr_ppsgd.learner import Batches, Rows, all_rows, as_array
from flwr_ppsgd.models.mixture import Mixture, personal_models
from flwr_ppsgd.models.solve import OwnProblem, PublicColumns, dense, solution, spread
from flwr_ppsgd.recipe import Matrix, Task
from flwr_ppsgd.wire import Order

Loss: TypeAlias = Literal["squared", "softmax"]
Features: TypeAlias = Any  # an array or a scipy.sparse.csr_array, which has no types

LOSSES = ("squared", "softmax")
KINDS = ("number", "as-is", "sparse")  # of columns


def as_matrix(values: Rows) -> Matrix:
    """One float64 row per sample, without a copy if ``values`` has that form already."""
    array = as_array(values)
    if array.ndim == 2 and array.dtype == DOUBLE:
        return array
    array = array.astype(np.float64, copy=False)
    return array.reshape(len(array), -1)


class AdditiveLinear:
    """f_i = mean of ℓ(y, (w + θ_i)ᵀx), with K outputs.

    w and θ_i are d × K matrices, flattened by rows. Under ``PPSGD.auto`` the user sends a ridge
    solution around w (``solve``), and the personal model is a mixture (``mixture``).

    Args:
        batches: this user's training minibatches. Targets are real numbers for the squared loss
            ½‖·‖², one-hot rows for softmax and for classification.
        num_features: d.
        num_outputs: K.
        loss: "squared" or "softmax".
        test: (x, y) on which ``evaluate`` measures; None: nothing.
        task: for ``PPSGD.auto``: "classification" or "regression"; the latter unless there are two
            or more outputs.
        kinds: for ``PPSGD.auto``: of each column, "number" (each user scales it by own rows),
            "sparse" (most users lack it) or "as-is"; None uses all as they are.
    """

    def __init__(
        self,
        batches: Batches,
        num_features: int,
        num_outputs: int = 1,
        loss: Loss = "squared",
        test: tuple[Rows, Rows] | None = None,
        *,
        task: Task | None = None,
        kinds: Sequence[str] | None = None,
    ) -> None:
        one_of("loss", loss, LOSSES)
        if loss == "softmax" and num_outputs < 2:
            raise ValueError(
                f"softmax needs at least 2 outputs, got {num_outputs}: use loss='squared' for one"
            )
        self._batches = batches
        self._shape = (num_features, num_outputs)
        self._loss = loss
        self.task: Task = task or ("classification" if num_outputs > 1 else "regression")
        self._columns = columns_of(kinds, num_features, num_outputs, self.task)
        self._problems: dict[float, OwnProblem] = {}
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

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
        """g_w = g_θ = Xᵀ(prediction − y), summed or averaged over the minibatch.

        They are equal because w and θ enter only as w + θ.
        """
        x, y = map(as_matrix, self._batches(order.visit))
        scores = self._scores(x, w + theta)
        residual = predict(scores, self._loss) - y
        if order.reduction == "mean" and len(y):
            residual /= len(y)
        gradient = dense(x.T @ residual).reshape(-1)
        return gradient, gradient

    def training_measures(self, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
        """Mean loss on the minibatch."""
        x, y = map(as_matrix, self._batches(order.visit))
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

    def solution(self, w: Vector, order: Order) -> Vector:
        """What this user would add to w: a ridge solution around w with a tiny penalty."""
        problem = self._problem(order.unit)
        return solution(problem, w.reshape(self._shape)).reshape(-1)

    def spread(self) -> float:
        """The standard deviation of the user's own targets."""
        _, y = self._all_rows()
        return spread(y)

    def own_columns(self) -> Vector:
        """1 for each sparse column that is not 0 in every own row."""
        return self._problem(1.0).own_columns

    def personal_model(self, w: Vector, variance: Vector, order: Order) -> "MixtureModel":
        """The user's mixture around w, and how it is measured."""
        problem = self._problem(order.unit)
        models = personal_models(problem, w.reshape(self._shape), variance)
        return MixtureModel(models, lambda _, model: self.measure(model))

    def stepped_model(self, w: Vector) -> "MixtureModel":
        """The user's mixture around a w that steps have trained, as if w had no noise.

        Such a w predicts the targets themselves, so it is divided by the user's own unit.
        """
        problem = self._problem(1.0)
        shared = w.reshape(self._shape) / problem.unit
        models = personal_models(problem, shared, np.zeros(1))
        return MixtureModel(models, lambda _, model: self.measure(model))

    def measure(self, model: Mixture) -> dict[str, float]:
        """Measures of a model's predictions on the test part; empty without one."""
        if self._test is None:
            return {}
        x, y = self._test
        return measures_of(model.predict(x), y, self.task)

    def _problem(self, unit: float) -> OwnProblem:
        """The user's rows, ready to be solved; the problem of the latest unit is cached."""
        if unit not in self._problems:
            x, y = self._all_rows()
            self._problems = {unit: OwnProblem.of(x, y, self._columns, unit)}
        return self._problems[unit]

    def _all_rows(self) -> tuple[Features, Matrix]:
        x, y = all_rows(self._batches)
        return as_matrix(x), as_matrix(y)

    def _scores(self, x: Features, parameters: Vector) -> Matrix:
        return dense(x @ parameters.reshape(self._shape))


@dataclass(frozen=True)
class MixtureModel:
    """A user's mixture, and how it is measured on the user's test rows.

    Args:
        models: the result of ``personal_models``; the mixture itself has the name "".
        measure: the measures of a model, by its name and the model.
        beside: arrays that are saved with the mixture.
    """

    models: Mapping[str, Mixture]
    measure: Callable[[str, Mixture], dict[str, float]]
    beside: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def mixture(self) -> Mixture:
        """The personal model."""
        return self.models[""]

    @property
    def choices(self) -> dict[str, float]:
        """The choices of the mixture."""
        return self.mixture.choices

    def measures(self) -> dict[str, float]:
        """Of the personal model, of own rows alone (``local_…``), of w alone (``shared_…``)."""
        found: dict[str, float] = {}
        if not self.mixture.has_location:
            return found
        for prefix, model in self.models.items():
            for name, value in self.measure(prefix, model).items():
                found[prefix + name] = value
        return found

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the mixture, and those beside it."""
        return {**self.mixture.to_arrays(), **self.beside}


def measures_of(scores: Matrix, y: Matrix, task: Task) -> dict[str, float]:
    """The squared loss of a mixture's predictions, and the accuracy for classes.

    Args:
        scores: predictions, rows × outputs.
        y: numbers, or rows of 0 and 1.
        task: "regression" or "classification".
    """
    if task == "regression":
        return {"loss": float(mean_losses(scores, y, "squared"))}
    classes = y.shape[1]
    shifted = scores + 1 / max(2, classes)  # scores are around 0, targets are 0 and 1
    if classes == 1:
        right = (shifted > 0.5) == (y > 0.5)
    else:
        right = scores.argmax(axis=1) == y.argmax(axis=1)
    loss = float(mean_losses(shifted, y, "squared"))
    return {"loss": loss, "accuracy": float(np.mean(right))}


def columns_of(
    kinds: Sequence[str] | None, features: int, outputs: int, task: Task
) -> PublicColumns:
    """What is public about the columns of a linear model's rows."""
    if kinds is None:
        kinds = ["as-is"] * features
    if len(kinds) != features:
        raise ValueError(f"kinds has {len(kinds)} entries for {features} columns: name each")
    for kind in kinds:
        one_of("kinds", kind, KINDS)
    return PublicColumns(
        task,
        numbers=np.array([kind == "number" for kind in kinds], dtype=np.bool_),
        sparse=np.array([kind == "sparse" for kind in kinds], dtype=np.bool_),
        outputs=outputs,
    )


def predict(scores: Matrix, loss: Loss) -> Matrix:
    """Predictions for which ∂ℓ = predict(scores) − y.

    Args:
        scores: outputs along the last axis.
        loss: "squared" returns the scores, "softmax" their probabilities.
    """
    if loss == "squared":
        return scores
    # ufuncs rather than methods, whose overhead dominates for a few rows
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    chances: Matrix = np.exp(scores - largest)
    chances /= np.add.reduce(chances, axis=-1, keepdims=True)
    return chances


def mean_losses(scores: Matrix, y: Matrix, loss: Loss) -> Vector:
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
    shifted = scores - scores.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    logs = shifted - np.log(total)
    likelihoods = (y * logs).sum(axis=-1)
    return np.asarray(-likelihoods.mean(axis=0))
