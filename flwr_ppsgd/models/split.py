"""Networks as learners: f_i(w, θ_i) together with one user's data."""

import copy
from collections.abc import Iterable, Iterator, Sequence
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
from flwr_ppsgd.models.linear import Loss, Matrix
from flwr_ppsgd.models.loaders import LoaderBatches, rows_in
from flwr_ppsgd.models.losses import LossFunction, Objective
from flwr_ppsgd.models.torch_optimizer import OptimizerFactory, PersonalTraining, Schedule
from flwr_ppsgd.wire import Layout, Order

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
    """

    def __init__(
        self,
        module: nn.Module,
        personal: str | Sequence[str],
        loss: Loss | LossFunction = "softmax",
        *,
        additive: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        refuse_running_statistics(module)
        self._shared, self._personal = blocks(module, personal, additive)
        self._additive = additive
        self._patterns = patterns_of(personal)
        refuse_without_values(module)
        self._device = device_for(module, device)
        # w and θ of one user after the other are written into this copy
        self._module = copy.deepcopy(module).train().to(self._device)
        self._channels_last = allows_channels_last(self._module, beside=_Additive)
        if self._channels_last:
            self._module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parameters = dict(self._module.named_parameters())
        moving = dict.fromkeys([*self._shared, *self._personal])
        self._start = {name: _copied(self._parameters[name]) for name in moving}
        self._dtype = _common_dtype(self._parameters[name] for name in moving)
        first = next(module.parameters())
        network = module.network if isinstance(module, _Additive) else module
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
        return _flat(self._start[name] for name in self._shared)

    def initial_theta(self) -> Vector:
        """θ as the module has it; zero if it is added to w."""
        theta = _flat(self._start[name] for name in self._personal)
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
        full_batch: bool = False,
    ) -> "SplitLearner":
        """This model together with one user's data.

        Args:
            batches: the training minibatches, by visit.
            test: what ``evaluate`` measures on; None: nothing.
            optimizer: of θ, as for ``PersonalTraining``.
            personal_steps: the number of steps that θ takes in one visit.
            weight_decay: of θ.
            schedule: the factor on θ's learning rate, by visit.
            full_batch: whether the gradient of w is that of all training rows.
        """
        training = PersonalTraining(optimizer, personal_steps, weight_decay, schedule)
        if full_batch and not isinstance(batches, LoaderBatches):
            raise ValueError(
                f"full_batch needs a loader, got {type(batches).__name__}: give Minibatches the "
                "size of all rows, or use torch_learner"
            )
        kind = SplitLearner if training.is_plain else TrainedSplitLearner
        return kind(self, batches, test, training, full_batch)

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
        held = self._hold(w, theta, training=True)
        prediction, y = self._predicted(rows)
        loss = self._objective.total(prediction, y, reduction)
        found = torch.autograd.grad(loss, list(held.values()), materialize_grads=True)
        gradients = dict(zip(held, found, strict=True))
        g_w = _flat(gradients[name] for name in self._shared)
        return g_w, _flat(gradients[name] for name in self._personal)

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
        return float(loss.detach()), _flat(gradients)

    @property
    def personal_shapes(self) -> list[torch.Size]:
        """The shapes of the personal parameters, in the order of θ."""
        return [self._parameters[name].shape for name in self._personal]

    def cohort_gradients(
        self,
        w: Vector,
        thetas: Matrix,
        rows: tuple[Rows, Rows],
        reduction: Reduction,
    ) -> tuple[Matrix, Matrix]:
        """(∇_w, ∇_θ) of many users at once, one row per user.

        Args:
            w: the shared parameters.
            thetas: users × personal parameters.
            rows: x and y as users × m × …; all minibatches have the same size m.
            reduction: mean or sum over a minibatch.
        """
        self._module.train()
        parts = self._split(w, self._shared, "w")
        shared = {name: self._laid_out(part) for name, part in parts.items()}
        personal = self._split(thetas, self._personal, "θ")
        x = self._feeding.tensor(rows[0], "x")
        y = self._feeding.tensor(rows[1])
        self._settle(rows)

        def objective(
            shared: dict[str, Tensor],
            personal: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
        ) -> Tensor:
            parameters = self._combined(shared, personal)
            output = torch.func.functional_call(self._module, parameters, (x,))
            return self._objective.total(self._scores(output), y, reduction)

        of_one_user = torch.func.grad(objective, argnums=(0, 1))
        of_all = torch.func.vmap(of_one_user, in_dims=(None, 0, 0, 0), randomness="different")
        g_w, g_theta = of_all(shared, personal, x, y)
        users = len(thetas)
        return _by_row(g_w, self._shared, users), _by_row(g_theta, self._personal, users)

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
        positional, named = self._feeding.call(rows[0])
        output = self._module(*positional, **named)
        return self._scores(output), self._feeding.tensor(rows[1])

    def _scores(self, output: Any) -> Tensor:
        scores = scores_of(output, self._feeding.name)
        return scores.contiguous() if self._channels_last else scores

    def _settle(self, rows: tuple[Rows, Rows]) -> None:
        """How a loss reduces is found out on the first user's minibatch."""
        first = (rows[0][0], rows[1][0])
        with torch.no_grad():
            self._objective.settle(lambda: self._predicted(first))

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


class AdditiveHead(SplitModel):
    """(w + θ_i)ᵀΦ_W(x): any network as the shared representation Φ_W, under an additive head.

    The network's parameters and the head w are shared (and clipped together), θ_i is a head of the
    same size.

    Args:
        network: Φ_W.
        num_features: the number of outputs of ``network``.
        num_outputs: K.
        loss: as for ``SplitModel``.
        head: the initial w, a num_features × num_outputs tensor; None is zero.
        device: as for ``SplitModel``.
    """

    def __init__(
        self,
        network: nn.Module,
        num_features: int,
        num_outputs: int,
        loss: Loss | LossFunction = "softmax",
        head: Tensor | None = None,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        shape = (num_features, num_outputs)
        start = torch.zeros(shape) if head is None else head
        found = tuple(start.shape)
        if found != shape:
            raise ValueError(
                f"head must have shape {shape}, got {found}: give num_features × num_outputs"
            )
        additive = _Additive(network, start)
        super().__init__(additive, personal=["personal"], loss=loss, device=device)


class _Additive(nn.Module):
    def __init__(self, network: nn.Module, head: Tensor) -> None:
        super().__init__()
        self.network = network
        first = next(network.parameters(), None)
        dtype = torch.get_default_dtype() if first is None else first.dtype
        device = None if first is None else first.device
        self.head = nn.Parameter(head.to(device, dtype))
        self.personal = nn.Parameter(torch.zeros_like(self.head))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        output = self.network(*inputs, **named)
        features = scores_of(output, type(self.network).__name__)
        return features.flatten(1) @ (self.head + self.personal)


def _count(test: tuple[Rows, Rows] | LoaderBatches | None) -> int:
    """The number of rows on which a user measures."""
    if test is None:
        return 0
    return test.num_examples if isinstance(test, LoaderBatches) else len(test[0])


class SplitLearner:
    """A ``SplitModel`` together with one user's data; made by ``SplitModel.learner``."""

    def __init__(
        self,
        model: SplitModel,
        batches: Batches | LoaderBatches,
        test: tuple[Rows, Rows] | LoaderBatches | None,
        training: PersonalTraining,
        full_batch: bool,
    ) -> None:
        self._model = model
        self._batches = batches
        self._test = test
        self._training = training
        self._full_batch = full_batch
        self.num_examples = batches.num_examples
        self.num_tested = _count(test)

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
        """(∇_w, ∇_θ) of the loss over the minibatch of this visit, or over all rows."""
        if self._full_batch:
            return self._full_gradients(w, theta, order.reduction)
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
        if self._full_batch:
            return self._model.evaluate_over(w, theta, self._epoch())
        rows = self._batches(order.visit)
        return self._model.evaluate(w, theta, rows)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """The same on the test part; nothing if there is none."""
        if self._test is None:
            return {}
        if isinstance(self._test, LoaderBatches):
            return self._model.evaluate_over(w, theta, self._test.epoch())
        return self._model.evaluate(w, theta, self._test)

    def _full_gradients(
        self,
        w: Vector,
        theta: Vector,
        reduction: Reduction,
    ) -> tuple[Vector, Vector]:
        """The gradients over all rows, one batch at a time in memory."""
        g_w = 0.0 * w
        g_theta = 0.0 * theta
        rows_seen = 0
        for rows in self._epoch():
            of_w, of_theta = self._model.gradients(w, theta, rows, "sum")
            g_w += of_w
            g_theta += of_theta
            rows_seen += rows_in(rows)
        if reduction == "sum":
            return g_w, g_theta
        return g_w / rows_seen, g_theta / rows_seen

    def _epoch(self) -> Iterator[tuple[Rows, Rows]]:
        assert isinstance(self._batches, LoaderBatches)
        return self._batches.epoch()


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


def _copied(parameter: Tensor) -> Tensor:
    """Its values, on the CPU and in the usual layout."""
    return parameter.detach().cpu().clone(memory_format=torch.contiguous_format)


def _common_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """In which a flat vector holds them all."""
    dtypes = {parameter.dtype for parameter in parameters}
    if len(dtypes) == 1:
        return dtypes.pop()
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _flat(tensors: Iterable[Tensor]) -> Vector:
    """One vector of all values, in float64."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    return torch.cat(parts).cpu().double().numpy()


def _by_row(
    gradients: dict[str, Tensor],
    names: list[str],
    users: int,
) -> Matrix:
    """users × parameters, in float64."""
    parts = [gradients[name].detach().reshape(users, -1) for name in names]
    return torch.cat(parts, dim=1).cpu().double().numpy()
