"""One user of a ``PerUser`` as a learner.

As the ``learner_for`` of a client app, in a module of its own so that Ray can pickle it::

    ratings = Problem(
        data="ratings.csv", user_column="reader", target_column="stars", bias=True
    )

    def learner_for(context):
        user = int(context.node_config["partition-id"])
        return linear_learner(ratings.per_user(), user, batch_size=10, seed=0)
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.per_user import Indices, PerUser
from flwr_ppsgd.lab.schema import TaskName
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.additive_linear import AdditiveLinear, Features, Loss, mean_losses
from flwr_ppsgd.models.mixture import Mixture
from flwr_ppsgd.recipe import Matrix

if TYPE_CHECKING:
    from flwr_ppsgd.models.torch_model import SplitModel
    from flwr_ppsgd.models.torch_training import SplitLearner


class LinearBatches:
    """A user's minibatches for a linear model, empty for a user without training rows.

    They are the rows of the user's ``Minibatches``, in the same order.

    Args:
        data: everyone's rows.
        user: the number of the user.
        size: rows per minibatch.
        seed: decides the order of rows.
        shift: what is subtracted from targets.
    """

    def __init__(self, data: PerUser, user: int, size: int, seed: int, shift: float = 0.0) -> None:
        self._data = data
        self._shift = shift
        self._own = data.rows(user, test=False)
        self._batches: Minibatches | None = None
        if len(self._own):
            self._batches = Minibatches(self._own, self._own, size, seed=seed, user=user)
        self.num_examples = len(self._own)

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        rows = self._minibatch_rows(visit)
        return self._data.matrix(rows), self._data.targets(rows, self._shift)

    def _minibatch_rows(self, visit: int) -> Indices:
        return self._own if self._batches is None else self._own[self._batches.rows(visit)]


class NetworkBatches(LinearBatches):
    """The same for networks, whose losses need class numbers or real targets."""

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return network_rows(self._data, self._minibatch_rows(visit))

    def everything(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All training rows."""
        return network_rows(self._data, self._own)


class LinearLearner(AdditiveLinear):
    """An additive linear learner with the measures of its task."""

    def __init__(
        self, data: PerUser, user: int, batches: LinearBatches, loss: Loss, shift: float
    ) -> None:
        super().__init__(
            batches,
            data.features,
            data.outputs,
            loss,
            task="regression" if data.task == "regression" else "classification",
            kinds=data.all_kinds,
        )
        self._data = data
        self._user = user
        self._shift = shift
        self._test_rows = data.rows(user, test=True)
        self.num_tested = len(self._test_rows)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """Mean loss on the test part, and accuracy, precision@1 or RMSE.

        precision@1 is the share of rows whose label with the highest score is a right one.
        """
        if not self.num_tested:
            return {}
        return self._measure(self._scores(self._data.matrix(self._test_rows), w + theta))

    def measure(self, model: Mixture) -> dict[str, float]:
        """The same measures for a personal model, whose scores of classes lack 1/K."""
        if not self.num_tested:
            return {}
        return self._measure(model.predict(self._data.model_rows(self._test_rows)))

    def _measure(self, scores: Matrix) -> dict[str, float]:
        y = self._data.targets(self._test_rows, self._shift)
        unit = float(self._data.units[self._user])
        one_model = scores[:, None, :]  # rows × 1 × K
        measures = user_measures(one_model, y, self._loss, self._data.task, unit)
        return {name: float(values[0]) for name, values in measures.items()}

    def _all_rows(self) -> tuple[Features, Matrix]:
        """All training rows for the solution, which subtracts 1/K from one-hot targets."""
        rows = self._data.rows(self._user, test=False)
        shift = self._shift
        if self.task == "classification":
            shift -= 1 / self._data.outputs
        return self._data.model_rows(rows), self._data.targets(rows, shift)


def linear_learner(
    data: PerUser,
    user: int,
    *,
    batch_size: int,
    seed: int,
    loss: Loss = "squared",
    shift: float = 0.0,
) -> LinearLearner:
    """(w + θ_i)ᵀx, one output per class, with the user's own minibatches and test part.

    Args:
        data: everyone's rows.
        user: the number of the user.
        batch_size: rows per minibatch.
        seed: decides the order of rows.
        loss: "squared" or "softmax".
        shift: what is subtracted from targets: .1 in the paper's linear experiments; for amounts a
            *public* centre, such as 3 for ratings from 1 to 5.
    """
    check_loss(data, loss, shift)
    batches = LinearBatches(data, user, batch_size, seed, shift)
    return LinearLearner(data, user, batches, loss, shift)


def check_loss(data: PerUser, loss: Loss, shift: float) -> None:
    """Refuse a loss that does not fit the task."""
    if loss == "softmax" and data.task != "classification":
        raise ValueError(
            f"{data.source}: softmax is for classification and this is {data.task}: use "
            "loss='squared'"
        )
    if shift and loss == "softmax":
        raise ValueError(
            f"{data.source}: a shift of targets is for the squared loss, got {shift}: use 0"
        )
    if data.task != "regression" and not 0 <= shift < 1:
        raise ValueError(
            f"{data.source}: a shift of classes or labels must be in [0, 1), got {shift}: use 0 or "
            "0.1"
        )


def user_measures(
    scores: NDArray[Any], y: Matrix, loss: Loss, task: TaskName, unit: float = 1.0
) -> dict[str, Vector]:
    """One user's mean loss, and accuracy, precision@1 or RMSE, of many models.

    Args:
        scores: rows × models × K.
        y: rows × K; labels that are right are above 0, shift included.
        loss: "squared" or "softmax".
        task: decides the second measure.
        unit: of this user's targets, in the units of RMSE.
    """
    targets = y[:, None, :]  # rows × 1 × K
    measures = {"loss": mean_losses(scores, targets, loss)}
    if task == "regression":
        squares = (scores - targets) ** 2
        measures["rmse"] = unit * np.sqrt(np.mean(squares, axis=(0, 2)))
        return measures
    first = scores.argmax(axis=2)
    right = np.take_along_axis(y, first, axis=1) > 0
    name = "accuracy" if task == "classification" else "precision_at_1"
    measures[name] = right.mean(axis=0)
    return measures


def network_learner(
    model: "SplitModel", data: PerUser, user: int, *, batch_size: int, seed: int
) -> "SplitLearner":
    """A network, such as ``cnn.paper_cnn()``, together with one user's data.

    Args:
        model: the network.
        data: everyone's rows.
        user: the number of the user.
        batch_size: rows per minibatch.
        seed: decides the order of rows.
    """
    batches = NetworkBatches(data, user, batch_size, seed)
    rows = data.rows(user, test=True)
    if not len(rows):
        return model.learner(batches)
    return model.learner(batches, network_rows(data, rows))


def network_rows(data: PerUser, rows: Indices) -> tuple[NDArray[Any], NDArray[Any]]:
    """(x, y) of these rows: y are class numbers, or the targets of a linear model."""
    if data.task == "classification":
        return data.matrix(rows), data.y[rows]
    return data.matrix(rows), data.targets(rows)
