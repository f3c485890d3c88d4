"""One user of a ``PerUser`` as a learner.

As the ``learner_for`` of a client app, in a module of its own so that Ray can pickle it::

    @functools.cache
    def table():
        return read("ratings.csv", Columns(user="reader", target="stars")).with_bias()

    def learner_for(context):
        return linear_learner(table(), int(context.node_config["partition-id"]), batch_size=10, seed=0)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.data.per_user import PerUser
from flwr_ppsgd.datasets import Minibatches
from flwr_ppsgd.models import AdditiveLinear, Loss, SplitLearner, SplitModel, mean_losses


class LinearBatches:
    """A user's minibatches for a linear model: the same rows in the same order as ``Minibatches`` of that user."""

    def __init__(self, data: PerUser, user: int, size: int, *, seed: int, shift: float) -> None:
        rows = data.rows(user, test=False)
        self._data, self._shift = data, shift
        self._rows = Minibatches(rows, rows, size, seed=seed, user=user)
        self.num_examples = len(rows)

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        rows, _ = self._rows(visit)
        return self._data.matrix(rows), self._data.targets(rows, self._shift)


class NetworkBatches(LinearBatches):
    """The same with class numbers, or real targets, as networks' losses want them."""

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        rows, _ = self._rows(visit)
        return self._data.matrix(rows), _network_targets(self._data, rows)


class LinearLearner(AdditiveLinear):
    """An additive linear learner, measured as its task wants it."""

    def __init__(self, data: PerUser, user: int, batches: LinearBatches, loss: Loss, shift: float) -> None:
        super().__init__(batches, data.features, data.outputs, loss)
        self._data, self._user, self._shift = data, user, shift

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """Mean loss on the test part, and accuracy, precision@1 (the first label is a right one) or RMSE."""
        rows = self._data.rows(self._user, test=True)
        if not len(rows):
            return {}
        scores, y = self._scores(self._data.matrix(rows), w + theta), self._data.targets(rows)
        measures = {"loss": float(mean_losses(scores, y - self._shift, self._loss))}
        if self._data.task == "regression":
            return {**measures, "rmse": float(np.sqrt(np.mean((scores - y) ** 2)))}
        hits = np.take_along_axis(y, scores.argmax(axis=1)[:, None], axis=1)
        name = "accuracy" if self._data.task == "classification" else "precision_at_1"
        return {**measures, name: float(hits.mean())}


def linear_learner(
    data: PerUser, user: int, *, batch_size: int, seed: int, loss: Loss = "squared", shift: float = 0.0
) -> LinearLearner:
    """(w + θ_i)ᵀx, one output a class, with the user's own minibatches and test part.

    shift: targets are one-hot minus this; .1 in the paper's linear experiments.
    """
    if loss == "softmax" and data.task != "classification":
        raise ValueError(f"{data.source}: softmax is for classification and this is {data.task}: use loss='squared'")
    if shift and (loss == "softmax" or data.task == "regression"):
        raise ValueError(
            f"{data.source}: a shift of targets is for the squared loss on classes or labels, got {shift}: use 0"
        )
    batches = LinearBatches(data, user, batch_size, seed=seed, shift=shift)
    return LinearLearner(data, user, batches, loss, shift)


def network_learner(model: SplitModel, data: PerUser, user: int, *, batch_size: int, seed: int) -> SplitLearner:
    """A network, such as ``cnn.paper_cnn()``, together with one user's data."""
    batches = NetworkBatches(data, user, batch_size, seed=seed, shift=0.0)
    rows = data.rows(user, test=True)
    return model.learner(batches, (data.matrix(rows), _network_targets(data, rows)) if len(rows) else None)


def _network_targets(data: PerUser, rows: NDArray[np.intp]) -> NDArray[Any]:
    return data.y[rows] if data.task == "classification" else data.targets(rows)
