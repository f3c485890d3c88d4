"""A network together with one user's data: its loss, how θ is trained, and the personal model."""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.checks import count, one_of, require
from flwr_ppsgd.learner import (
    OWN_THETA,
    OWN_W,
    SHARED,
    Batches,
    OwnModel,
    Rows,
    all_rows,
    as_array,
)
from flwr_ppsgd.models.additive_linear import Loss, MixtureModel, measures_of
from flwr_ppsgd.models.solve import (
    Mixture,
    OwnProblem,
    personal_model,
    solution,
    spread,
)
from flwr_ppsgd.models.torch_data import LoaderBatches
from flwr_ppsgd.recipe import Matrix, Task
from flwr_ppsgd.wire import Order

if TYPE_CHECKING:
    from flwr_ppsgd.models.torch_model import SplitModel

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]

ROWS_AT_ONCE = 256
LOCAL_STEP = 0.001  # of local epochs with Adam, or with the user's class of optimizers
LOCAL_EPOCHS = 5  # what a message is made of if w is more than a linear layer
PERSONAL_EPOCHS = 20  # of θ, at the last w
HALF = (torch.bfloat16, torch.float16)
LOSSES_OF_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


# --- the loss


class BatchLoss:
    """A loss as the algorithm needs it: the mean or the sum over the samples of a minibatch.

    A loss of torch that takes the mean is asked for the samples' own losses instead. Any other loss
    that returns one number for several samples is called for each of them alone.

    Args:
        loss: "softmax" (cross-entropy, targets are class numbers), "squared" (½ of the squared
            error, summed over outputs), or an ``nn.Module`` or function (prediction, y) → loss.
        device: of the network.
    """

    def __init__(self, loss: Loss | LossFunction, device: torch.device) -> None:
        self._named = isinstance(loss, str)
        if isinstance(loss, str):
            one_of("loss", loss, LOSSES)
            self._loss = LOSSES[loss]
        elif isinstance(loss, nn.Module):
            own: Any = copy.deepcopy(loss).to(device)
            if getattr(own, "reduction", None) == "mean":
                own.reduction = "none"
            self._loss = own
        else:
            self._loss = loss

    def total(self, prediction: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
        """The mean or the sum of the samples' losses."""
        y = self._reshape_targets(prediction, y)
        samples = len(y)
        losses = self._call(prediction, y)
        if losses.ndim == 0:
            rows = [slice(row, row + 1) for row in range(samples)]
            losses = torch.stack([self._call(prediction[row], y[row]) for row in rows])
        if len(losses) != samples:
            raise ValueError(
                f"the loss returned {len(losses)} numbers for {samples} samples: return one for "
                'each sample (reduction="none")'
            )
        if losses.ndim > 1:
            losses = losses.flatten(1).mean(dim=1)
        return losses.mean() if reduction == "mean" else losses.sum()

    def task(self, y: Tensor) -> Task:
        """Regression for squared and absolute errors of one number per sample, else classes.

        Args:
            y: targets of some samples.
        """
        of_numbers = self._loss is _half_square or isinstance(self._loss, LOSSES_OF_NUMBERS)
        return "regression" if of_numbers and y.numel() == len(y) else "classification"

    def accuracy(self, prediction: Tensor, y: Tensor) -> float | None:
        """The share of samples that are right; None unless there are classes, or yes and no."""
        if self._loss is _half_square:
            return None
        if prediction.numel() == len(y) == y.numel():
            least = _least_yes(self._loss)
            if least is None:
                return None
            says_yes = prediction.reshape(-1) > least
            right = says_yes == (y.reshape(-1) > 0.5)
        elif prediction.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
            right = prediction.argmax(dim=1) == y
        else:
            return None
        return float(right.double().mean())

    def _call(self, prediction: Tensor, y: Tensor) -> Tensor:
        try:
            losses = self._loss(prediction, y)
        except IndexError as error:
            outputs = prediction.shape[-1]
            raise ValueError(
                f"{error} The network has {outputs} outputs, so class numbers go from 0 to "
                f"{outputs - 1}: give the network more outputs, or number the classes from 0"
            ) from None
        if not isinstance(losses, Tensor):
            raise ValueError(
                f"the loss returned a {type(losses).__name__}: return a tensor, one loss for each "
                "sample"
            )
        return losses

    def _reshape_targets(self, prediction: Tensor, y: Tensor) -> Tensor:
        """y in the shape of a network with one output, whose targets are often one-dimensional."""
        if len(prediction) != len(y):
            raise ValueError(
                f"the network returned {len(prediction)} predictions for {len(y)} targets: let "
                "forward return one row per sample"
            )
        one_output = prediction.ndim == 1 or prediction.shape[1:].numel() == 1
        if self._named or not one_output or y.numel() != prediction.numel():
            return y
        return y.reshape(prediction.shape).to(prediction.dtype)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    if prediction.ndim == 1 or prediction.shape[1] == 1:
        raise ValueError(
            f'loss="softmax" needs an output for each class, got predictions of shape '
            f'{tuple(prediction.shape)}: use loss="squared" for numbers, '
            "torch.nn.BCEWithLogitsLoss() for yes or no, or give the network more outputs"
        )
    if y.is_floating_point():
        raise ValueError(
            f'loss="softmax" needs class numbers, got targets of {y.dtype}: convert them to whole '
            'numbers (y.long()), or use loss="squared"'
        )
    scores = prediction.float() if prediction.dtype in HALF else prediction
    classes_second = scores.ndim == 2 or y.shape == scores[:, 0].shape
    if not classes_second and y.shape == scores.shape[:-1]:
        scores = scores.movedim(-1, 1)  # samples × places × classes, as text models have them
    return nn.functional.cross_entropy(scores, y.long(), reduction="none")


def _half_square(prediction: Tensor, y: Tensor) -> Tensor:
    if y.numel() != prediction.numel():
        raise ValueError(
            f"targets of shape {tuple(y.shape)} and predictions of shape "
            f'{tuple(prediction.shape)}: loss="squared" needs a number for each output; use '
            'loss="softmax" for class numbers'
        )
    if prediction.dtype in HALF:
        prediction = prediction.float()
    squares = (prediction - y.reshape(prediction.shape)) ** 2
    return 0.5 * squares.reshape(len(squares), -1).sum(dim=1)


LOSSES: Mapping[str, LossFunction] = {"softmax": _cross_entropy, "squared": _half_square}


def _least_yes(loss: LossFunction) -> float | None:
    """Above which prediction a yes-or-no loss of torch means yes; None for other losses."""
    functional = nn.functional
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return 0.0
    if loss is functional.binary_cross_entropy_with_logits:
        return 0.0
    if isinstance(loss, nn.BCELoss) or loss is functional.binary_cross_entropy:
        return 0.5
    return None


# --- steps of the user's own


@dataclass(frozen=True)
class PersonalTraining:
    """The steps that θ takes in one visit, at the w that came: free under the guarantee.

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

    @property
    def is_plain(self) -> bool:
        """Whether this is Algorithm 1's own step, θ − s_θ·g_θ."""
        return self == PersonalTraining()

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


# --- the learner


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
        self.model = model
        self._batches = batches
        self._test = test
        self._training = training
        self._task = task
        self._frozen_problems: dict[float, OwnProblem | None] = {}  # by unit
        self.num_examples = batches.num_examples
        self.num_tested = 0
        if isinstance(test, LoaderBatches):
            self.num_tested = test.num_examples
        elif test is not None:
            self.num_tested = len(test[0])
        self.takes_float32 = model.takes_float32

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
        return self.model.evaluate_over(w, theta, self._test_batches())

    @functools.cached_property
    def task(self) -> Task:
        """As given, or what the loss is for."""
        if self._task is not None:
            return self._task
        _, y = self._batches(1)
        return self.model.task(y)

    def origin(self, w: Vector) -> Vector:
        """Where the size of solutions is asked: w = 0, or this w where 0 is no model."""
        if self.model.is_head and self._problem(w, 1.0) is not None:
            return np.zeros_like(w)
        return w

    def solution(self, w: Vector, order: Order) -> Vector:
        """What this user would add to w.

        If w is the last layer alone, a ridge solution on the features below it; else what a few
        local epochs from w add to it.
        """
        head = self.model.head
        problem = self._problem(w, order.unit) if self.model.is_head else None
        if head is not None and problem is not None:
            return head.vector(solution(problem, head.matrix(w)))
        training = replace(self._own_training(LOCAL_EPOCHS), weight_decay=0.0)
        local = Order.own_step(LOCAL_STEP, max(1, order.visit))
        return self._train(training, w, self.initial_theta(), local, of_w=True) - w

    def spread(self) -> float:
        """The standard deviation of the user's own targets."""
        targets = [as_array(y).reshape(-1) for _, y in self._epoch()]
        return spread(np.concatenate(targets))

    def own_columns(self) -> Vector:
        """None are sparse."""
        return np.zeros(0)

    def personal_model(self, w: Vector, variance: Vector, order: Order) -> OwnModel:
        """The user's own model around w.

        Mixed on the features below the last layer if that is linear and all of θ, or all of w;
        else θ is trained at this w.
        """
        head = self.model.head
        problem = self._problem(w, order.unit)
        if head is None or problem is None:
            training = self._own_training(PERSONAL_EPOCHS)
            local = Order.own_step(LOCAL_STEP, visit=1)
            theta = self._train(training, w, self.initial_theta(), local)
            return TrainedModel(self, w, theta)
        model = self.model
        shared = head.matrix(model.shared_head(w))
        mixture = personal_model(problem, shared, variance)
        if not (model.is_head or model.additive):
            mixture = replace(mixture, shared_alone=None)
        _, outputs = head.shape
        measure = self._measure_on(w, outputs)
        if model.is_head:
            return MixtureModel(mixture, measure, beside={OWN_W: w})
        # the features depend on what others have: own rows alone see the network as it was made
        own_problem = self._problem(None, order.unit)
        assert own_problem is not None
        alone = personal_model(own_problem, np.zeros_like(shared), np.zeros(1)).alone
        return MixtureModel(
            replace(mixture, alone=alone),
            measure,
            measure_alone=self._measure_on(None, outputs),
            # a trained network's scores have a scale of their own
            has_shared_loss=self.task == "regression",
            beside={OWN_W: w},
        )

    def _measure_on(self, w: Vector | None, outputs: int) -> Callable[[Mixture], dict[str, float]]:
        """How models are measured on the features that w makes of the test part."""
        rows = functools.cache(lambda: self.test_rows(w, outputs))

        def measure(model: Mixture) -> dict[str, float]:
            found = rows()
            if found is None:
                return {}
            x, y = found
            return measures_of(model.predict(x), y, self.task)

        return measure

    def test_rows(self, w: Vector | None, outputs: int) -> tuple[Matrix, Matrix] | None:
        """Features and targets of the test part, classes as rows of 0 and 1; None without one.

        Args:
            w: the shared parameters; None: as the network was made.
            outputs: of the last layer.
        """
        features = []
        targets = []
        for x, y in self._test_batches():
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

    def _epoch(self) -> Iterator[tuple[Rows, Rows]]:
        """All training rows, one batch at a time in memory."""
        if isinstance(self._batches, LoaderBatches):
            yield from self._batches.epoch()
            return
        x, y = all_rows(self._batches)
        for start in range(0, len(y), ROWS_AT_ONCE):
            yield x[start : start + ROWS_AT_ONCE], y[start : start + ROWS_AT_ONCE]

    def _test_batches(self) -> Iterator[tuple[Rows, Rows]]:
        """All test rows, likewise."""
        if isinstance(self._test, LoaderBatches):
            yield from self._test.epoch()
        elif self._test is not None:
            yield self._test

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
            wanted = solvable_targets(as_array(y), head.shape[1], self.task)
            if seen is None or wanted is None:
                return None
            features.append(seen)
            targets.append(wanted)
        columns = head.columns(self.task)
        return OwnProblem.of(np.concatenate(features), np.concatenate(targets), columns, unit)

    def _train(
        self,
        training: PersonalTraining,
        w: Vector,
        theta: Vector,
        order: Order,
        *,
        of_w: bool = False,
    ) -> Vector:
        """θ after the steps of one visit, with the Order's step and reduction.

        Or w after them; a θ that is not added to w is then trained along.
        """
        shared = self.model.shared_tensors(w)
        personal = self.model.personal_tensors(theta)
        trained = shared if of_w else personal
        moved = list(trained.values())
        if of_w and not self.model.additive:
            moved += personal.values()
        training.train(
            moved,
            self._batches,
            lambda rows: self.model.loss(shared, personal, rows, order.reduction),
            step=order.step,
            visit=order.visit,
        )
        return flat_vector(trained.values())

    def _own_training(self, epochs: int) -> PersonalTraining:
        """The user's own training under ``PPSGD.auto``; rows that fit in memory are read once."""
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
        return self._train(self._training, w, theta, order)


def _adam(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Fused: small networks otherwise spend most of a step in Adam."""
    return torch.optim.Adam(parameters, lr=LOCAL_STEP, fused=True)


def solvable_targets(y: NDArray[Any], outputs: int, task: Task) -> NDArray[Any] | None:
    """Targets with which a linear layer is solved; None if it cannot be.

    One number per row in regression. Class numbers or a number per class; 0 and 1 for one output.
    """
    one_number = outputs == 1 and y.size == len(y)
    if task == "regression":
        return y.reshape(-1) if one_number else None
    if one_number:
        is_yes_or_no = np.isin(y, (0, 1)).all()
        return y.reshape(-1, 1) if is_yes_or_no else None
    are_numbers = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
    are_rows = y.ndim == 2 and y.shape[1] == outputs
    return y if outputs > 1 and (are_numbers or are_rows) else None


def flat_vector(tensors: Iterable[Tensor], single: bool = False) -> Vector:
    """One vector of all values, in float64 or ``single`` precision."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    values = torch.cat(parts).cpu()
    values = values.float() if single else values.double()
    return values.numpy()


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
