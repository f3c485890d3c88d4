"""A network with one user's data: gradients, the training of θ, the personal model."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import count, require
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
from flwr_ppsgd.models.additive_linear import MixtureModel, measures_of
from flwr_ppsgd.models.mixture import Mixture, personal_models
from flwr_ppsgd.models.solve import OwnProblem, solution, spread
from flwr_ppsgd.models.torch_data import LoaderBatches
from flwr_ppsgd.recipe import Matrix, Task
from flwr_ppsgd.wire import Order

if TYPE_CHECKING:
    from flwr_ppsgd.models.torch_model import SplitModel

OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]

ROWS_AT_ONCE = 256
LOCAL_STEP = 0.001  # of local epochs with Adam, or with the user's class of optimizers
LOCAL_EPOCHS = 5  # of a message, if w is more than a linear layer
PERSONAL_EPOCHS = 20  # of θ, at the last w


@dataclass(frozen=True)
class PersonalTraining:
    """The steps that θ takes in one visit, at the received w: they cost no ε.

    The optimizer is made anew for each visit, so momentum lasts for the steps of one visit.

    Args:
        optimizer: a class of ``torch.optim``, whose learning rate is then the server's s_θ, or a
            function of the parameters that makes one, such as
            ``functools.partial(torch.optim.Adam, lr=0.01)``; None is plain SGD with s_θ.
        steps: the number of steps in a visit; each takes the next minibatch.
        weight_decay: λ of (λ/2)‖θ‖², which is added to the loss.
    """

    optimizer: OptimizerFactory | None = None
    steps: int = 1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        count("personal_steps", self.steps)
        rule = "weight_decay must be a number from 0"
        require(0 <= self.weight_decay < math.inf, rule, self.weight_decay, "set weight_decay")
        made = self.optimizer
        rule = "optimizer must be a class of torch.optim or a function that makes one"
        remedy = "such as torch.optim.Adam or functools.partial(torch.optim.Adam, lr=0.01)"
        # the repr of an optimizer has many lines
        shown = type(made) if isinstance(made, torch.optim.Optimizer) else made
        require(made is None or callable(made), rule, shown, remedy)

    def train(
        self,
        parameters: Sequence[Tensor],
        batches: Batches | LoaderBatches,
        loss: Callable[[tuple[Rows, Rows]], Tensor],
        *,
        step: float,
        visit: int,
    ) -> None:
        """Move the parameters, in place, by the steps of this visit.

        Args:
            parameters: what is trained.
            batches: minibatches, by number.
            loss: of the parameters on a minibatch.
            step: the learning rate, unless the optimizer has its own.
            visit: the number of this visit.
        """
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = self._make_optimizer(parameters, step)
        for number in range(self.steps):
            rows = batches((visit - 1) * self.steps + number + 1)

            def closure(rows: tuple[Rows, Rows] = rows) -> float:
                value = loss(rows)
                if self.weight_decay:
                    squares = sum(parameter.square().sum() for parameter in parameters)
                    value = value + 0.5 * self.weight_decay * squares
                gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                return float(value.detach())

            optimizer.step(closure)

    def _make_optimizer(self, parameters: Sequence[Tensor], step: float) -> torch.optim.Optimizer:
        made = self.optimizer or torch.optim.SGD
        if isinstance(made, type):
            return made(parameters, lr=step)  # type: ignore[no-any-return]
        optimizer: Any = made(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer={made!r} returned a {type(optimizer).__name__}: return a "
                "torch.optim.Optimizer over the parameters that it is given"
            )
        return optimizer


class SplitLearner:
    """A ``SplitModel`` together with one user's data; made by ``SplitModel.learner``.

    Args:
        model: the network.
        batches: the training minibatches, by visit.
        test: what ``evaluate`` measures on; None: nothing.
        training: how θ is trained.
        task: as for ``SplitModel.learner``.
    """

    def __init__(
        self,
        model: "SplitModel",
        batches: Batches | LoaderBatches,
        test: tuple[Rows, Rows] | LoaderBatches | None,
        training: PersonalTraining,
        *,
        task: Task | None = None,
    ) -> None:
        self.model = model
        self._batches = batches
        self._test: Iterable[tuple[Rows, Rows]] = ()  # batches
        self._training = training
        self._task = task
        self._frozen_problems: dict[float, OwnProblem | None] = {}  # by unit
        self.num_examples = batches.num_examples
        self.num_tested = 0
        if isinstance(test, LoaderBatches):
            self._test = test
            self.num_tested = test.num_examples
        elif test is not None:
            self._test = [test]
            self.num_tested = len(test[0])
        self.takes_float32 = model.takes_float32

    @functools.cached_property
    def task(self) -> Task:
        """As given, or what the loss is for."""
        if self._task is not None:
            return self._task
        _, y = self._batches(1)
        return self.model.objective.task(self.model.tensor(y))

    # --- the paper's method

    def initial_theta(self) -> Vector:
        """θ as the module has it."""
        return self.model.initial_theta()

    def check_shared(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """ValueError unless the server's arrays are this model's shared parameters."""
        self.model.check_shared(shapes)

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
        """(∇_w, ∇_θ) of the loss over the minibatch of this visit."""
        return self.model.gradients(w, theta, self._batches(order.visit), order.reduction)

    def training_measures(self, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
        """Loss, and accuracy for classes, on the rows of this visit."""
        return self.model.evaluate(w, theta, self._batches(order.visit))

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """The same on the test part; nothing if there is none."""
        return self.model.evaluate_over(w, theta, self._test)

    # --- what PPSGD.auto asks for

    def spread(self) -> float:
        """The standard deviation of the user's own targets."""
        targets = [as_array(y).reshape(-1) for _, y in self._epoch()]
        return spread(np.concatenate(targets))

    def own_columns(self) -> Vector:
        """None are sparse."""
        return np.zeros(0)

    def origin(self, w: Vector) -> Vector:
        """The w at which the size of solutions is measured: 0, or this w if 0 is not a model."""
        if self.model.is_head and self._problem(w, 1.0) is not None:
            return np.zeros_like(w)
        return w

    def solution(self, w: Vector, order: Order) -> Vector:
        """What this user would add to w.

        If w is the last layer alone, a ridge solution on the features below it; else what a few
        local epochs from w add to it. A θ that is not added to w is trained along.
        """
        head = self.model.head
        problem = self._problem(w, order.unit) if self.model.is_head else None
        if head is not None and problem is not None:
            return head.vector(solution(problem, head.matrix(w)))
        training = replace(self._local_epochs(LOCAL_EPOCHS), weight_decay=0.0)
        shared = self.model.shared_tensors(w)
        personal = self.model.personal_tensors(self.initial_theta())
        trained = list(shared.values())
        if not self.model.additive:
            trained += personal.values()
        training.train(
            trained,
            self._batches,
            lambda rows: self.model.loss(shared, personal, rows, "mean"),
            step=LOCAL_STEP,
            visit=max(1, order.visit),
        )
        return flat_vector(shared.values()) - w

    def personal_model(self, w: Vector, variance: Vector, order: Order) -> OwnModel:
        """The user's own model around w.

        Mixed on the features below the last layer if that is linear and all of θ, or all of w;
        else θ is trained at this w.
        """
        model = self.model
        head = model.head
        problem = self._problem(w, order.unit)
        if head is None or problem is None:
            training = self._local_epochs(PERSONAL_EPOCHS)
            local = Order.own_step(LOCAL_STEP, visit=1)
            theta = self._train_theta(training, w, self.initial_theta(), local)
            return TrainedModel(self, w, theta)
        shared = head.matrix(model.shared_head(w))
        models = personal_models(problem, shared, variance)
        if not model.is_head:
            # the features depend on what others have: own rows alone see the network as it was made
            own_problem = self._problem(None, order.unit)
            assert own_problem is not None
            alone = personal_models(own_problem, np.zeros_like(shared), np.zeros(1))
            models[LOCAL] = alone[LOCAL]
            if not model.additive:
                del models[SHARED]
        _, outputs = head.shape
        return MixtureModel(models, self._measure_at(w, outputs), beside={OWN_W: w})

    def _measure_at(self, w: Vector, outputs: int) -> Callable[[str, Mixture], dict[str, float]]:
        """How mixtures are measured on the features that a network with this w makes."""
        rows_at_w = functools.cache(lambda: self._test_features(w, outputs))
        rows_as_made = functools.cache(lambda: self._test_features(None, outputs))
        is_trained = not self.model.is_head

        def measure(name: str, mixture: Mixture) -> dict[str, float]:
            rows = rows_as_made() if is_trained and name == LOCAL else rows_at_w()
            if rows is None:
                return {}
            x, y = rows
            measures = measures_of(mixture.predict(x), y, self.task)
            if is_trained and name == SHARED and self.task == "classification":
                del measures["loss"]  # a trained network's scores have a scale of their own
            return measures

        return measure

    def _test_features(self, w: Vector | None, outputs: int) -> tuple[Matrix, Matrix] | None:
        """Features and targets of the test part, classes as rows of 0 and 1; None without one.

        Args:
            w: the shared parameters; None: as the network was made.
            outputs: of the last layer.
        """
        features = []
        targets = []
        for x, y in self._test:
            features.append(self.model.features(w, x))
            targets.append(as_array(y))
        if not features:
            return None
        y = np.concatenate(targets)
        if self.task == "regression" or outputs == 1:
            y = y.reshape(-1, 1)
        elif y.ndim == 1:
            y = np.eye(outputs)[y]
        return np.concatenate(features), y.astype(np.float64)

    def _problem(self, w: Vector | None, unit: float) -> OwnProblem | None:
        """The user's rows for the last layer; None if it cannot be solved.

        Args:
            w: makes the features; None: the network as it was made.
            unit: u.
        """
        if not self.model.is_head:
            return self._make_problem(w, unit)
        if unit not in self._frozen_problems:  # the features are the same for every w
            self._frozen_problems = {unit: self._make_problem(w, unit)}
        return self._frozen_problems[unit]

    def _make_problem(self, w: Vector | None, unit: float) -> OwnProblem | None:
        head = self.model.head
        if head is None:
            return None
        features = []
        targets = []
        for x, y in self._epoch():
            seen = self.model.head_features(w, x)
            wanted = head.solvable_targets(as_array(y), self.task)
            if seen is None or wanted is None:
                return None
            features.append(seen)
            targets.append(wanted)
        columns = head.columns(self.task)
        return OwnProblem.of(np.concatenate(features), np.concatenate(targets), columns, unit)

    def _epoch(self) -> Iterator[tuple[Rows, Rows]]:
        """All training rows, one batch at a time in memory."""
        if isinstance(self._batches, LoaderBatches):
            yield from self._batches
            return
        x, y = all_rows(self._batches)
        for start in range(0, len(y), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            yield x[some], y[some]

    def _train_theta(
        self, training: PersonalTraining, w: Vector, theta: Vector, order: Order
    ) -> Vector:
        """θ after the steps of one visit, with the Order's step and reduction."""
        shared = self.model.shared_tensors(w)
        personal = self.model.personal_tensors(theta)
        training.train(
            list(personal.values()),
            self._batches,
            lambda rows: self.model.loss(shared, personal, rows, order.reduction),
            step=order.step,
            visit=order.visit,
        )
        return flat_vector(personal.values())

    def _local_epochs(self, epochs: int) -> PersonalTraining:
        """Training for this number of epochs; rows that fit in memory are read once."""
        if isinstance(self._batches, LoaderBatches):
            self._batches.keep_in_memory()
        _, y = self._batches(1)
        steps = epochs * math.ceil(self.num_examples / len(y))
        optimizer = self._training.optimizer or _adam
        return replace(self._training, optimizer=optimizer, steps=steps)


class TrainedSplitLearner(SplitLearner):
    """A ``SplitLearner`` whose user trains θ with an optimizer of their own."""

    def personal_step(self, w: Vector, theta: Vector, order: Order) -> Vector:
        """θ after this visit, in place of θ − s_θ·g_θ; s_θ = 0 leaves it as it is."""
        if order.step == 0:
            return theta
        return self._train_theta(self._training, w, theta, order)


@dataclass(frozen=True)
class TrainedModel:
    """A user's θ, trained at w.

    Args:
        learner: whose model it is.
        w: the shared parameters.
        theta: the personal ones.
    """

    learner: SplitLearner
    w: Vector
    theta: Vector

    def measures(self) -> dict[str, float]:
        """Of w with θ, and of w alone (``shared_…``) if θ is added to it."""
        found = self.learner.evaluate(self.w, self.theta)
        if self.learner.model.additive:
            alone = self.learner.evaluate(self.w, self.learner.initial_theta())
            found |= {SHARED + name: value for name, value in alone.items()}
        return found

    def arrays(self) -> dict[str, NDArray[Any]]:
        """θ, and the w that it was trained at."""
        return {OWN_THETA: self.theta, OWN_W: self.w}


def _adam(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Fused: small networks otherwise spend most of a step in Adam."""
    return torch.optim.Adam(parameters, lr=LOCAL_STEP, fused=True)


def flat_vector(tensors: Iterable[Tensor], single: bool = False) -> Vector:
    """One vector of all values, in float64 or ``single`` precision."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    values = torch.cat(parts).cpu()
    values = values.float() if single else values.double()
    return values.numpy()
