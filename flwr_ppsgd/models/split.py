"""Networks as learners: f_i(w, θ_i) together with one user's data."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.learner import Batches, Rows
from flwr_ppsgd.models.batch import Feeding, scores_of
from flwr_ppsgd.models.blocks import (
    Shapes,
    allows_channels_last,
    blocks,
    device_for,
    patterns_of,
    refuse_other_shared,
    refuse_running_statistics,
    refuse_without_values,
)
from flwr_ppsgd.models.head import Additive, LinearHead
from flwr_ppsgd.models.linear import Loss
from flwr_ppsgd.models.loaders import LoaderBatches, rows_in
from flwr_ppsgd.models.losses import LossFunction, Objective
from flwr_ppsgd.models.split_learner import SplitLearner, TrainedSplitLearner
from flwr_ppsgd.models.torch_optimizer import OptimizerFactory, PersonalTraining, Schedule
from flwr_ppsgd.recipe import Matrix, Task
from flwr_ppsgd.wire import Layout

HALF = (torch.bfloat16, torch.float16)


class SplitModel:
    """Any ``nn.Module``: parameters whose names match a pattern are personal, the rest shared.

    The module stays as its owner wrote it: inputs that are whole numbers stay so, several inputs
    are passed by keyword (a mapping) or by position (a tuple), and what it returns may have its
    predictions as ``logits``. Parameters with ``requires_grad=False`` are frozen: they are part of
    neither block and stay as they are in the module. Buffers stay as they are too. BatchNorm that
    tracks running statistics is refused: those would be neither shared nor personal. Dropout is on
    in training, with the client's own coins, and off in evaluation.

    Args:
        module: the network; it is copied.
        personal: a pattern for ``fnmatch``, such as ``"head.*"``, or several.
        loss: "softmax" (cross-entropy, targets are class numbers), "squared" (½ of the squared
            error, summed over outputs), or any ``nn.Module`` or function (prediction, y) → loss,
            one for each sample or their mean or sum.
        additive: whether personal parameters are shared too, and θ is added to them: w is then the
            whole module, and θ starts at zero.
        device: where to compute: "auto" (a GPU if there is one), "cpu", "cuda:0", …; None is where
            the module is.
        handed_over: whether nobody else uses the module. It is then not copied, and the shared
            values that it came with are not kept: there is no ``initial_w`` and no
            ``initial_arrays``.
    """

    def __init__(
        self,
        module: nn.Module,
        personal: str | Sequence[str],
        loss: Loss | LossFunction = "softmax",
        *,
        additive: bool = False,
        device: str | torch.device | None = None,
        handed_over: bool = False,
    ) -> None:
        refuse_running_statistics(module)
        self._shared, self._personal = blocks(module, personal, additive)
        self._additive = additive
        self._patterns = patterns_of(personal)
        refuse_without_values(module)
        self._device = device_for(module, device)
        # w and θ of one user after the other are written into this one
        own = module if handed_over else copy.deepcopy(module)
        self._module = own.train().to(self._device)
        self._channels_last = allows_channels_last(self._module, beside=Additive)
        if self._channels_last:
            self._module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parameters = dict(self._module.named_parameters())
        moving = dict.fromkeys([*self._shared, *self._personal])
        self._start = {name: _copied(self._parameters[name]) for name in moving}
        self._dtype = _common_dtype(self._parameters[name] for name in moving)
        first = next(module.parameters())
        network = module.network if isinstance(module, Additive) else module
        self._feeding = Feeding.into(network, self._device, first.dtype)
        self._objective = Objective(loss, self._device)

    def initial_arrays(self) -> ArrayRecord:
        """w as the module has it: the ``initial_arrays`` of a strategy.

        Parameters of half precision travel as float32.
        """
        arrays = {}
        for name in self._shared:
            value = self._start[name]
            arrays[name] = value.float() if value.dtype in HALF else value
        return ArrayRecord(arrays)

    def initial_w(self) -> Vector:
        """The same as one flat vector."""
        return flat_vector(self._start[name] for name in self._shared)

    def initial_theta(self) -> Vector:
        """θ as the module has it; zero if it is added to w."""
        theta = flat_vector(self._start[name] for name in self._personal)
        return 0.0 * theta if self._additive else theta

    def learner(
        self,
        batches: Batches | LoaderBatches,
        test: "tuple[Rows, Rows] | LoaderBatches | None" = None,
        *,
        optimizer: OptimizerFactory | None = None,
        personal_steps: int = 1,
        weight_decay: float = 0.0,
        schedule: Schedule | None = None,
        task: Task | None = None,
    ) -> "SplitLearner":
        """This model together with one user's data.

        Args:
            batches: the training minibatches, by visit.
            test: what ``evaluate`` measures on; None: nothing.
            optimizer: of θ, as for ``PersonalTraining``; of local epochs under ``PPSGD.auto``.
            personal_steps: the number of steps that θ takes in one visit.
            weight_decay: of θ.
            schedule: the factor on θ's learning rate, by visit.
            task: for ``PPSGD.auto``: "classification" or "regression"; by the loss unless given.
        """
        training = PersonalTraining(optimizer, personal_steps, weight_decay, schedule)
        kind = SplitLearner if training.is_plain else TrainedSplitLearner
        return kind(self, batches, test, training, task=task)

    def module_with(
        self,
        w: ArrayRecord | Sequence[NDArray[Any]] | Vector,
        theta: Vector | None = None,
    ) -> nn.Module:
        """A copy of the module that holds w and θ, in evaluation mode.

        It is for saving, or for prediction on a client.

        Args:
            w: the shared parameters, as arrays or as one flat vector.
            theta: the personal ones; None leaves them as they are in the module.
        """
        if theta is None:
            theta = self.initial_theta()
        self._hold(self._flat_shared(w), theta)
        held = copy.deepcopy(self._module)
        return held.to(memory_format=torch.contiguous_format)  # type: ignore[no-any-return, call-overload]

    def gradients(
        self,
        w: Vector,
        theta: Vector,
        rows: tuple[Rows, Rows],
        reduction: Reduction,
    ) -> tuple[Vector, Vector]:
        """(∇_w, ∇_θ) of the loss over ``rows``."""
        _, g_w, g_theta = self.loss_and_gradients(w, theta, rows, reduction)
        return g_w, g_theta

    def loss_and_gradients(
        self,
        w: Vector,
        theta: Vector,
        rows: tuple[Rows, Rows],
        reduction: Reduction,
    ) -> tuple[float, Vector, Vector]:
        """(loss, ∇_w, ∇_θ) over ``rows``; ∇_w in float32 if the network computes so."""
        held = self._hold(w, theta, training=True)
        prediction, y = self._predicted(rows)
        loss = self._objective.total(prediction, y, reduction)
        found = torch.autograd.grad(loss, list(held.values()), materialize_grads=True)
        gradients = dict(zip(held, found, strict=True))
        shared = [gradients[name] for name in self._shared]
        g_w = flat_vector(shared, single=self.takes_float32)  # w may be large
        g_theta = flat_vector(gradients[name] for name in self._personal)
        return float(loss.detach()), g_w, g_theta

    @property
    def takes_float32(self) -> bool:
        """Whether float32 vectors hold all that the network can tell apart."""
        return self._dtype in (torch.float32, *HALF)

    def personal_gradient(
        self,
        w: Vector,
        theta: Vector,
        rows: tuple[Rows, Rows],
        reduction: Reduction,
    ) -> tuple[float, Vector]:
        """The loss over ``rows``, and ∇_θ alone."""
        held = self._hold(w, theta, training=True)
        prediction, y = self._predicted(rows)
        loss = self._objective.total(prediction, y, reduction)
        personal = [held[name] for name in self._personal]
        gradients = torch.autograd.grad(loss, personal, materialize_grads=True)
        return float(loss.detach()), flat_vector(gradients)

    @property
    def additive(self) -> bool:
        """Whether θ is added to a part of w, so that θ = 0 is a model."""
        return self._additive

    @property
    def is_head(self) -> bool:
        """Whether w is nothing but one linear layer, so that the features below it are fixed."""
        return LinearHead.of(self._module, self._shared) is not None

    def head(self) -> LinearHead | None:
        """The linear layer that is all of w, or all of θ; None if neither is one."""
        names = self._shared if self.is_head else self._personal
        return LinearHead.of(self._module, names)

    def shared_head(self, w: Vector) -> Vector:
        """The values of ``head`` in w; zeros if it is not shared."""
        if self.is_head:
            return w
        if not self._additive:
            return 0.0 * self.initial_theta()
        parts = self._split(w, self._shared, "w")
        return flat_vector(parts[name] for name in self._personal)

    def features(self, w: ArrayRecord | Vector, x: Rows) -> Matrix:
        """What the last layer sees of these inputs, one row per sample.

        A personal model of ``PPSGD.auto`` predicts from them.

        Args:
            w: the shared parameters.
            x: inputs, as the network takes them.
        """
        found = self.head_features(self._flat_shared(w), x)
        if found is None:
            raise ValueError(
                f"neither w nor θ is one linear layer at the end of the network, with personal="
                f"{self._patterns}: use PersonalModel.module for predictions"
            )
        return found

    def head_features(self, w: Vector, x: Rows) -> Matrix | None:
        """The same; None if there is no such layer."""
        head = self.head()
        if head is None:
            return None
        self._hold(w, self.initial_theta())
        return head.features(self._module, lambda: self._outputs(x))

    def task(self, y: Rows) -> Task:
        """What the loss is for, with targets like these."""
        return self._objective.task(self._feeding.tensor(y))

    @property
    def shared_shapes(self) -> list[torch.Size]:
        """The shapes of the shared parameters, in the order of w."""
        return [self._parameters[name].shape for name in self._shared]

    @property
    def personal_shapes(self) -> list[torch.Size]:
        """The shapes of the personal parameters, in the order of θ."""
        return [self._parameters[name].shape for name in self._personal]

    def settle_loss(self, rows: tuple[Rows, Rows]) -> None:
        """Find out how the loss reduces, on these rows of one user: before ``torch.func``."""
        with torch.no_grad():
            self._objective.settle(lambda: self._predicted(rows))

    def tensor(self, values: Rows) -> Tensor:
        """Inputs or targets on the network's device, floats in its precision."""
        return self._feeding.tensor(values)

    def shared_tensors(self, w: Vector) -> dict[str, Tensor]:
        """The shared parameters by name."""
        parts = self._split(w, self._shared, "w")
        return {name: self._laid_out(part) for name, part in parts.items()}

    def personal_tensors(self, thetas: Vector | Matrix) -> dict[str, Tensor]:
        """The personal parameters by name, of one user or with one row per user."""
        return self._split(thetas, self._personal, "θ")

    def predict(
        self,
        shared: dict[str, Tensor],
        personal: dict[str, Tensor],
        x: Tensor,
        *,
        training: bool,
    ) -> Tensor:
        """The network's predictions with these parameters, for ``torch.func``."""
        self._module.train(training)
        parameters = self._combined(shared, personal)
        output = torch.func.functional_call(self._module, parameters, (x,))
        return self._scores(output)

    def loss(
        self,
        shared: dict[str, Tensor],
        personal: dict[str, Tensor],
        rows: tuple[Tensor, Tensor],
        reduction: Reduction,
    ) -> Tensor:
        """The loss over ``rows`` with these parameters, for ``torch.func``."""
        x, y = rows
        prediction = self.predict(shared, personal, x, training=True)
        return self._objective.total(prediction, y, reduction)

    def evaluate(
        self,
        w: Vector,
        theta: Vector,
        rows: tuple[Rows, Rows],
    ) -> dict[str, float]:
        """Mean loss, and accuracy if y holds class numbers."""
        return self.evaluate_over(w, theta, [rows])

    def evaluate_over(
        self,
        w: Vector,
        theta: Vector,
        batches: Iterable[tuple[Rows, Rows]],
    ) -> dict[str, float]:
        """The same over many batches, one at a time in memory."""
        self._hold(w, theta)
        counts = []
        measured = []
        for rows in batches:
            counts.append(rows_in(rows))
            measured.append(self._measured(rows))
        if len(measured) == 1:
            return measured[0]
        everything = sum(counts)
        means: dict[str, float] = {}
        for name in measured[0] if measured else ():
            weighted = [n * each[name] for n, each in zip(counts, measured, strict=True)]
            means[name] = sum(weighted) / everything
        return means

    def check_shared(self, shapes: Shapes) -> None:
        """ValueError unless these are the names and shapes of this model's shared parameters."""
        here = {name: self._parameters[name].shape for name in self._shared}
        split = f"personal={self._patterns}, additive={self._additive}"
        refuse_other_shared(shapes, here, split)

    def _measured(self, rows: tuple[Rows, Rows]) -> dict[str, float]:
        with torch.no_grad():
            prediction, y = self._predicted(rows)
        return self.measures(prediction, y)

    def measures(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Mean loss of these predictions, and accuracy if y holds class numbers."""
        with torch.no_grad():
            loss = self._objective.total(prediction, y, "mean")
        measures = {"loss": float(loss)}
        are_classes = y.ndim == 1 and not y.is_floating_point()
        several = prediction.ndim == 2 and prediction.shape[1] > 1
        if self._objective.counts_hits and are_classes and several:
            right = prediction.argmax(dim=1) == y
            measures["accuracy"] = float(right.double().mean())
        return measures

    def _predicted(self, rows: tuple[Rows, Rows]) -> tuple[Tensor, Tensor]:
        """The network's predictions, and the targets."""
        return self._outputs(rows[0]), self._feeding.tensor(rows[1])

    def _outputs(self, x: Rows) -> Tensor:
        positional, named = self._feeding.call(x)
        return self._scores(self._module(*positional, **named))

    def _scores(self, output: Any) -> Tensor:
        scores = scores_of(output, self._feeding.name)
        return scores.contiguous() if self._channels_last else scores

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if not self._channels_last or tensor.ndim != 4:
            return tensor
        return tensor.clone(memory_format=torch.channels_last)

    def _hold(
        self,
        w: Vector,
        theta: Vector,
        training: bool = False,
    ) -> dict[str, Tensor]:
        """Write w and θ into the module; returns the parameters that hold them."""
        shared = self._split(w, self._shared, "w")
        personal = self._split(theta, self._personal, "θ")
        held: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, value in self._combined(shared, personal).items():
                parameter = self._parameters[name]
                parameter.copy_(value)
                held[name] = parameter
        if self._module.training != training:
            self._module.train(training)
        return held

    def _combined(
        self,
        shared: dict[str, Tensor],
        personal: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """The module's parameters from both blocks."""
        if not self._additive:
            return {**shared, **personal}
        sums = {name: shared[name] + offset for name, offset in personal.items()}
        return {**shared, **sums}

    def _split(
        self,
        vectors: Vector | Matrix,
        names: list[str],
        block: str,
    ) -> dict[str, Tensor]:
        """Named parameters from one flat vector, or from one row per user."""
        sizes = [self._parameters[name].numel() for name in names]
        *users, found = vectors.shape
        wanted = sum(sizes)
        if found != wanted:
            raise ValueError(
                f"{block} has {found} parameters, but the module's {names} have {wanted}: give "
                f"the vector of this model; personal={self._patterns} and the network must be the "
                "same on server and client"
            )
        tensor = torch.tensor(vectors, dtype=self._dtype, device=self._device)
        parts = torch.split(tensor, sizes, dim=-1)
        named = {}
        for name, part in zip(names, parts, strict=True):
            parameter = self._parameters[name]
            named[name] = part.reshape(*users, *parameter.shape).to(parameter.dtype)
        return named

    def _flat_shared(self, w: ArrayRecord | Sequence[NDArray[Any]] | Vector) -> Vector:
        if isinstance(w, list | tuple):
            w = ArrayRecord(list(w))
        if not isinstance(w, ArrayRecord):
            return w  # type: ignore[return-value]
        self.check_shared(Layout.of(w).shape_of)
        if set(w) == set(self._shared):
            w = ArrayRecord({name: w[name] for name in self._shared})
        return Layout.of(w).flatten(w)


def _copied(parameter: Tensor) -> Tensor:
    """Its values, on the CPU and in the usual layout."""
    return parameter.detach().cpu().clone(memory_format=torch.contiguous_format)


def _common_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """In which a flat vector holds them all."""
    dtypes = {parameter.dtype for parameter in parameters}
    if len(dtypes) == 1:
        return dtypes.pop()
    return torch.float64 if torch.float64 in dtypes else torch.float32


def flat_vector(tensors: Iterable[Tensor], single: bool = False) -> Vector:
    """One vector of all values, in float64 or ``single`` precision."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    values = torch.cat(parts).cpu()
    return (values.float() if single else values.double()).numpy()
