"""A network together with one user's data."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.learner import (
    LOCAL,
    OWN_THETA,
    OWN_W,
    SHARED,
    Batches,
    OwnModel,
    Rows,
    all_rows,
    as_array,
)
from flwr_ppsgd.models.blocks import Shapes
from flwr_ppsgd.models.head import LinearHead
from flwr_ppsgd.models.linear import measures_of
from flwr_ppsgd.models.loaders import LoaderBatches, rows_in
from flwr_ppsgd.models.solve import (
    Mixture,
    OwnProblem,
    Published,
    personal_model,
    solution,
    spread,
)
from flwr_ppsgd.models.torch_optimizer import PersonalTraining
from flwr_ppsgd.recipe import Matrix, Task
from flwr_ppsgd.wire import Order

if TYPE_CHECKING:
    from flwr_ppsgd.models.split import SplitModel

ROWS_AT_ONCE = 256
LOCAL_STEP = 0.001  # of local epochs with Adam, or with the user's class of optimizers
LOCAL_EPOCHS = 5  # what a message is made of if w is more than a linear layer
PERSONAL_EPOCHS = 20  # of θ, at the last w


def _count(test: tuple[Rows, Rows] | LoaderBatches | None) -> int:
    """The number of rows on which a user measures."""
    if test is None:
        return 0
    return test.num_examples if isinstance(test, LoaderBatches) else len(test[0])


class SplitLearner:
    """A ``SplitModel`` together with one user's data; made by ``SplitModel.learner``."""

    def __init__(
        self,
        model: "SplitModel",
        batches: Batches | LoaderBatches,
        test: tuple[Rows, Rows] | LoaderBatches | None,
        training: PersonalTraining,
        *,
        task: Task | None = None,
    ) -> None:
        self._model = model
        self._batches = batches
        self._test = test
        self._training = training
        self._task = task
        self._solving: dict[float, tuple[LinearHead, OwnProblem] | None] = {}
        self.num_examples = batches.num_examples
        self.num_tested = _count(test)
        self.takes_float32 = model.takes_float32

    def initial_theta(self) -> Vector:
        """θ as the module has it."""
        return self._model.initial_theta()

    def check_shared(self, shapes: Shapes) -> None:
        """ValueError unless the server's arrays are this model's shared parameters."""
        self._model.check_shared(shapes)

    def gradients(
        self,
        w: Vector,
        theta: Vector,
        order: Order,
    ) -> tuple[Vector, Vector]:
        """(∇_w, ∇_θ) of the loss over the minibatch of this visit."""
        rows = self._batches(order.visit)
        return self._model.gradients(
            w,
            theta,
            rows,
            order.reduction,
        )

    def training_measures(
        self,
        w: Vector,
        theta: Vector,
        order: Order,
    ) -> dict[str, float]:
        """Loss, and accuracy for classes, on the rows of this visit."""
        rows = self._batches(order.visit)
        return self._model.evaluate(w, theta, rows)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """The same on the test part; nothing if there is none."""
        if self._test is None:
            return {}
        return self._model.evaluate_over(w, theta, self.test_batches())

    def _epoch(self) -> Iterator[tuple[Rows, Rows]]:
        """All training rows, one batch at a time in memory."""
        if isinstance(self._batches, LoaderBatches):
            yield from self._batches.epoch()
            return
        x, y = all_rows(self._batches)
        for start in range(0, len(y), ROWS_AT_ONCE):
            yield x[start : start + ROWS_AT_ONCE], y[start : start + ROWS_AT_ONCE]

    def test_batches(self) -> Iterator[tuple[Rows, Rows]]:
        """All test rows, likewise."""
        if isinstance(self._test, LoaderBatches):
            yield from self._test.epoch()
        elif self._test is not None:
            yield self._test

    @functools.cached_property
    def task(self) -> Task:
        """As given, or what the loss is for."""
        _, y = self._batches(1)
        return self._task or self._model.task(y)

    def origin(self, w: Vector) -> Vector:
        """Where the size of solutions is asked: w = 0, or this w where 0 is no model."""
        return w if self._problem(w) is None else np.zeros_like(w)

    def solution(self, w: Vector, order: Order) -> Vector:
        """What this user would add to w.

        If w is the last layer alone, a ridge solution on the features below it; else what a few
        local epochs from w add to it.
        """
        problem = self._problem(w, order.unit)
        if problem is None:
            return self._local_epochs(w, order) - w
        head, own = problem
        return head.vector(solution(own, head.matrix(w)))

    def spread(self) -> float:
        """The standard deviation of the user's own targets."""
        return spread(np.concatenate([as_array(y).reshape(-1) for _, y in self._epoch()]))

    def own_columns(self) -> Vector:
        """None are sparse."""
        return np.zeros(0)

    def personal_model(self, w: Vector, variance: Vector, order: Order) -> OwnModel:
        """The user's own model around w.

        Mixed on the features below the last layer if that is linear and all of θ, or all of w;
        else θ is trained at this w.
        """
        alone = None
        if order.last and not self._model.is_head:
            alone = functools.partial(self._measures_alone, order)
        solving = self._on_features(w, order.unit)
        if solving is None:
            return TrainedModel(self, w, self._trained_theta(w), alone)
        head, own = solving
        shared = head.matrix(self._model.shared_head(w))
        published = Published(shared, variance, order.unit, order.size)
        return HeadModel(self, w, personal_model(own, published), alone)

    def _measures_alone(self, order: Order) -> dict[str, float]:
        """Of the model that own rows make without w: around the network as it was at first."""
        start = self._model.initial_w()
        model = self.personal_model(start, np.ones(1), replace(order, last=False))
        if isinstance(model, HeadModel) and model.mixture.alone is not None:
            model = replace(model, mixture=model.mixture.alone)
        measures = model.measures()
        return {LOCAL + name: measures[name] for name in measures if not name.startswith(SHARED)}

    @property
    def model(self) -> "SplitModel":
        """The network."""
        return self._model

    def _problem(self, w: Vector, unit: float = 1.0) -> tuple[LinearHead, OwnProblem] | None:
        """The user's rows for the layer that is all of w; None if w is more than that."""
        return self._on_features(w, unit) if self._model.is_head else None

    def _on_features(self, w: Vector, unit: float) -> tuple[LinearHead, OwnProblem] | None:
        """The user's rows for the last layer; None if it cannot be solved."""
        if self._model.is_head and unit in self._solving:
            return self._solving[unit]
        found = self._made_problem(w, unit)
        if self._model.is_head:  # the features are the same for every w
            self._solving = {unit: found}
        return found

    def _made_problem(self, w: Vector, unit: float) -> tuple[LinearHead, OwnProblem] | None:
        head = self._model.head()
        if head is None:
            return None
        features = []
        targets = []
        for x, y in self._epoch():
            seen = self._model.head_features(w, x)
            wanted = solvable_targets(as_array(y), head.shape[1], self.task)
            if seen is None or wanted is None:
                return None
            features.append(seen)
            targets.append(wanted)
        rows = np.concatenate(features)
        columns = head.columns(self.task)
        return head, OwnProblem.of(rows, np.concatenate(targets), columns, unit)

    def _local_epochs(self, w: Vector, order: Order) -> Vector:
        """w after the user's own training from it; θ that is not added to w is trained along."""
        theta = self.initial_theta()
        own = np.zeros(0) if self._model.additive else theta
        shapes = list(self._model.shared_shapes)
        if not self._model.additive:
            shapes += self._model.personal_shapes

        def gradient(values: Vector, minibatch: int) -> tuple[float, Vector]:
            rows = self._batches(minibatch)
            at = theta if self._model.additive else values[len(w) :]
            loss, g_w, g_theta = self._model.loss_and_gradients(values[: len(w)], at, rows, "mean")
            return loss, np.concatenate([g_w, g_theta[: len(own)]])

        training = replace(self._local_training(LOCAL_EPOCHS), weight_decay=0.0)
        trained = training.train(
            np.concatenate([w, own]),
            shapes,
            gradient,
            step=LOCAL_STEP,
            visit=max(1, order.visit),
        )
        return trained[: len(w)]

    def _trained_theta(self, w: Vector) -> Vector:
        """θ after epochs of the user's own training at this w."""

        def gradient(theta: Vector, minibatch: int) -> tuple[float, Vector]:
            return self._model.personal_gradient(w, theta, self._batches(minibatch), "mean")

        return self._local_training(PERSONAL_EPOCHS).train(
            self.initial_theta(),
            self._model.personal_shapes,
            gradient,
            step=LOCAL_STEP,
            visit=1,
        )

    def _local_training(self, epochs: int) -> PersonalTraining:
        """The user's own training under ``PPSGD.auto``."""
        steps = epochs * math.ceil(self.num_examples / rows_in(self._batches(1)))
        optimizer = self._training.optimizer or torch.optim.Adam
        return replace(self._training, optimizer=optimizer, steps=steps, schedule=None)


def solvable_targets(y: NDArray[Any], outputs: int, task: Task) -> NDArray[Any] | None:
    """Targets with which a linear layer is solved; None if it cannot be.

    Class numbers or a number per class for two or more classes; one number in regression.
    """
    if task == "regression":
        return y.reshape(-1) if outputs == 1 and y.size == len(y) else None
    numbers = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
    rows = y.ndim == 2 and y.shape[1] == outputs
    return y if outputs > 1 and (numbers or rows) else None


@dataclass(frozen=True)
class HeadModel:
    """A user's mixture on the features below the last layer.

    Args:
        learner: whose model it is.
        w: the shared parameters, which make the features.
        mixture: the personal model.
        alone: what own rows alone reach, if w has made the features.
    """

    learner: SplitLearner
    w: Vector
    mixture: Mixture
    alone: Callable[[], dict[str, float]] | None = None

    def measures(self) -> dict[str, float]:
        """Of the personal model, of w alone (``shared_…``) if the last layer is in it, and of own
        rows alone (``local_…``): in every round if w is a last layer, else at the last w.
        """
        rows = self._test_rows()
        if rows is None or not self.mixture.has_location:
            return {}
        x, y = rows
        task = self.learner.task
        found = measures_of(self.mixture.predict(x), y, task)
        model = self.learner.model
        shared = self.mixture.shared_alone
        if shared is not None and (model.is_head or model.additive):
            of_shared = measures_of(shared.predict(x), y, task)
            if task == "classification" and not model.is_head:
                del of_shared["loss"]  # a trained network's scores have a scale of their own
            found |= {SHARED + name: value for name, value in of_shared.items()}
        alone = self.mixture.alone
        if alone is not None and model.is_head:
            of_alone = measures_of(alone.predict(x), y, task)
            found |= {LOCAL + name: value for name, value in of_alone.items()}
        return found | (self.alone() if self.alone else {})

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that predicts."""
        return {**self.mixture.to_arrays(), OWN_W: self.w}

    def _test_rows(self) -> tuple[Matrix, Matrix] | None:
        """Features and targets, classes as rows of 0 and 1."""
        features = []
        targets = []
        for x, y in self.learner.test_batches():
            features.append(self.learner.model.features(self.w, x))
            targets.append(as_array(y))
        if not features:
            return None
        y = np.concatenate(targets)
        outputs = len(self.mixture.offset)
        if self.learner.task == "regression":
            y = y.reshape(-1, 1)
        elif y.ndim == 1:
            y = np.eye(outputs)[y]
        return np.concatenate(features), y.astype(np.float64)


@dataclass(frozen=True)
class TrainedModel:
    """A user's θ, trained at w.

    Args:
        learner: whose model it is.
        w: the shared parameters.
        theta: the personal ones.
        alone: what own rows alone reach.
    """

    learner: SplitLearner
    w: Vector
    theta: Vector
    alone: Callable[[], dict[str, float]] | None = None

    def measures(self) -> dict[str, float]:
        """Of w with θ, of w alone (``shared_…``) if θ is added to it, and at the last w of own rows
        alone (``local_…``)."""
        found = self.learner.evaluate(self.w, self.theta)
        if self.learner.model.additive:
            alone = self.learner.evaluate(self.w, self.learner.initial_theta())
            found |= {SHARED + name: value for name, value in alone.items()}
        return found | (self.alone() if self.alone else {})

    def arrays(self) -> dict[str, NDArray[Any]]:
        """θ, and the w that it was trained at."""
        return {OWN_THETA: self.theta, OWN_W: self.w}


class TrainedSplitLearner(SplitLearner):
    """A ``SplitLearner`` whose user trains θ with an optimizer of their own."""

    def personal_step(self, w: Vector, theta: Vector, order: Order) -> Vector:
        """θ after this visit, in place of θ − s_θ·g_θ."""

        def gradient(theta: Vector, minibatch: int) -> tuple[float, Vector]:
            rows = self._batches(minibatch)
            return self._model.personal_gradient(w, theta, rows, order.reduction)

        return self._training.train(
            theta,
            self._model.personal_shapes,
            gradient,
            step=order.step,
            visit=order.visit,
        )
