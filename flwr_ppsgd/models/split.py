"""Models as learners: f_i(w, θ_i) together with one user's data."""

import copy
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.wire import Layout, Order

Loss: TypeAlias = Literal["squared", "softmax"]
Matrix: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = Tensor | NDArray[Any]
LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def as_array(values: Rows) -> NDArray[Any]:
    """A torch tensor or an array as an array, without a copy where there need be none."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def as_matrix(values: Rows) -> Matrix:
    """One float64 row a sample; without a copy where it is that already."""
    array = as_array(values).astype(np.float64, copy=False)
    return array.reshape(len(array), -1)


class Batches(Protocol):
    """One user's minibatches, by visit."""

    num_examples: int

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(x, y) of the given visit, counted from 1; one row a sample."""
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
        test: tuple[Rows, Rows] | None = None,
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
        x, y = (as_matrix(rows) for rows in self._batches(order.visit))
        residual = predict(self._scores(x, w + theta), self._loss) - y
        total = (x.T @ residual).reshape(-1)
        gradient = total if order.reduction == "sum" else total / len(x)
        return gradient, gradient

    def training_measures(self, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
        """Mean loss on the minibatch."""
        x, y = (as_matrix(rows) for rows in self._batches(order.visit))
        return {"loss": float(mean_losses(self._scores(x, w + theta), y, self._loss))}

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """Mean loss on the test part, and accuracy where there are classes to tell apart."""
        if self._test is None:
            return {}
        x, y = self._test
        scores = self._scores(x, w + theta)
        measures = {"loss": float(mean_losses(scores, y, self._loss))}
        if self._shape[1] > 1:
            measures["accuracy"] = float(np.mean(scores.argmax(axis=1) == y.argmax(axis=1)))
        return measures

    def _scores(self, x: Matrix, parameters: Vector) -> Matrix:
        return x @ parameters.reshape(self._shape)


def predict(scores: Matrix, loss: Loss) -> Matrix:
    """What is compared with the targets, outputs along the last axis; scores − y, or softmax(scores) − y, is ∂ℓ."""
    return scores if loss == "squared" else np.exp(_log_softmax(scores))


def mean_losses(scores: Matrix, y: Matrix, loss: Loss) -> Vector:
    """Mean over the first axis (samples) of ℓ, outputs along the last one."""
    if loss == "squared":
        return np.asarray(0.5 * ((scores - y) ** 2).sum(axis=-1).mean(axis=0))
    return np.asarray(-(y * _log_softmax(scores)).sum(axis=-1).mean(axis=0))


def _log_softmax(scores: Matrix) -> Matrix:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    logs: Matrix = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


class SplitModel:
    """Any ``nn.Module`` with named parameters of two kinds: those that match a pattern are personal, the rest shared.

    personal: patterns as of fnmatch, ``"head.*"``.
    loss: "softmax" (cross-entropy, targets are class numbers), "squared" (½ of the squared error, summed over
        outputs), or a function (prediction, y) → one loss a sample.

    Parameters with ``requires_grad=False`` are frozen: they are part of neither block and stay as they are in the
    module. Buffers stay as they are too. BatchNorm that tracks running statistics is refused: those would be neither
    shared nor personal. Dropout is on in training, with the client's own coins, and off in evaluation.
    """

    def __init__(self, module: nn.Module, personal: Sequence[str], loss: Loss | LossFunction = "softmax") -> None:
        _refuse_running_statistics(module)
        moving = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._personal = [name for name in moving if any(fnmatch.fnmatchcase(name, p) for p in personal)]
        self._shared = [name for name in moving if name not in self._personal]
        for block, found in (("personal", self._personal), ("shared", self._shared)):
            if not found:
                raise ValueError(
                    f"personal={list(personal)} leaves no {block} parameter among {sorted(moving)}: name some of them, "
                    "not none and not all"
                )
        # w and θ of one user after the other are written into a copy; kernels with channels last are twice as fast
        self._module = copy.deepcopy(module).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parameters = dict(self._module.named_parameters())
        self._start = {name: value.detach().clone() for name, value in moving.items()}
        self._dtype = next(iter(moving.values())).dtype
        self._loss = LOSSES[loss] if isinstance(loss, str) else loss
        self._counts_hits = loss != "squared"

    def initial_arrays(self) -> ArrayRecord:
        """w as the module has it: the ``initial_arrays`` of a strategy."""
        return ArrayRecord({name: self._start[name] for name in self._shared})

    def initial_w(self) -> Vector:
        """The same as one flat vector."""
        return _flat(self._start[name] for name in self._shared)

    def initial_theta(self) -> Vector:
        """θ as the module has it."""
        return _flat(self._start[name] for name in self._personal)

    def learner(self, batches: Batches, test: tuple[Rows, Rows] | None = None) -> "SplitLearner":
        """This model together with one user's data."""
        return SplitLearner(self, batches, test)

    def module_with(self, w: ArrayRecord | Vector, theta: Vector | None = None) -> nn.Module:
        """A copy of the module that holds w, and θ where it is given, in evaluation mode: for saving, or for prediction
        on a client."""
        self._hold(self._flat_shared(w), self.initial_theta() if theta is None else theta)
        return copy.deepcopy(self._module).to(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]

    def gradients(
        self, w: Vector, theta: Vector, rows: tuple[Rows, Rows], reduction: Reduction
    ) -> tuple[Vector, Vector]:
        """(∇_w, ∇_θ) of the loss over ``rows``."""
        held = self._hold(w, theta, training=True)
        x, y = self._batch(rows)
        loss = _reduced(self._loss(self._module(x), y), reduction)
        gradients = torch.autograd.grad(loss, held, materialize_grads=True)
        shared = len(self._shared)
        return _flat(gradients[:shared]), _flat(gradients[shared:])

    def cohort_gradients(
        self, w: Vector, thetas: Matrix, rows: tuple[Rows, Rows], reduction: Reduction
    ) -> tuple[Matrix, Matrix]:
        """The same for many users at once, who share w and have minibatches of equal size; one row a user.

        thetas: users × parameters. rows: x and y as users × m × …
        """
        self._module.train()
        users = len(thetas)
        shared = {name: _channels_last(part) for name, part in self._split(w, self._shared, "w").items()}
        personal = self._split(thetas, self._personal, "θ")

        def objective(shared: dict[str, Tensor], personal: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            prediction = torch.func.functional_call(self._module, {**shared, **personal}, (x,))
            return _reduced(self._loss(prediction, y), reduction)

        by_user = torch.func.vmap(
            torch.func.grad(objective, argnums=(0, 1)), in_dims=(None, 0, 0, 0), randomness="different"
        )
        g_w, g_theta = by_user(shared, personal, *self._batch(rows))
        return _by_row(g_w, self._shared, users), _by_row(g_theta, self._personal, users)

    def evaluate(self, w: Vector, theta: Vector, rows: tuple[Rows, Rows]) -> dict[str, float]:
        """Mean loss, and accuracy where y holds class numbers."""
        self._hold(w, theta)
        x, y = self._batch(rows)
        with torch.no_grad():
            prediction = self._module(x)
            measures = {"loss": float(self._loss(prediction, y).mean())}
        if self._counts_hits and y.ndim == 1 and not y.is_floating_point():
            measures["accuracy"] = float((prediction.argmax(dim=1) == y).double().mean())
        return measures

    def _batch(self, rows: tuple[Rows, Rows]) -> tuple[Tensor, Tensor]:
        x, y = (torch.as_tensor(part) for part in rows)
        return x.to(self._dtype), y.to(self._dtype) if y.is_floating_point() else y

    def _hold(self, w: Vector, theta: Vector, training: bool = False) -> list[Tensor]:
        """Write w and θ into the module; returns its parameters, the shared ones first."""
        values = {**self._split(w, self._shared, "w"), **self._split(theta, self._personal, "θ")}
        held: list[Tensor] = [self._parameters[name] for name in values]
        with torch.no_grad():
            for parameter, value in zip(held, values.values(), strict=True):
                parameter.copy_(value)
        if self._module.training != training:
            self._module.train(training)
        return held

    def _split(self, vectors: Vector | Matrix, names: list[str], block: str) -> dict[str, Tensor]:
        """Named parameters from one flat vector, or from a row for each user."""
        sizes = [self._parameters[name].numel() for name in names]
        *users, found = vectors.shape
        if found != sum(sizes):
            raise ValueError(f"{block} has {found} parameters where the module's {names} have {sum(sizes)}")
        parts = zip(names, torch.split(torch.tensor(vectors, dtype=self._dtype), sizes, dim=-1), strict=True)
        return {name: part.reshape(*users, *self._parameters[name].shape) for name, part in parts}

    def _flat_shared(self, w: ArrayRecord | Vector) -> Vector:
        return Layout.of(w).flatten(ArrayRecord({n: w[n] for n in self._shared})) if isinstance(w, ArrayRecord) else w


class AdditiveHead(SplitModel):
    """(w + θ_i)ᵀΦ_W(x): any network as the shared representation Φ_W, under an additive head.

    The network's parameters and the head w are shared (and clipped together), θ_i is a head of the same size.
    head: the initial w, a num_features × num_outputs tensor; zero unless given.
    """

    def __init__(
        self,
        network: nn.Module,
        num_features: int,
        num_outputs: int,
        loss: Loss | LossFunction = "softmax",
        head: Tensor | None = None,
    ) -> None:
        start = torch.zeros(num_features, num_outputs) if head is None else head
        if start.shape != (num_features, num_outputs):
            raise ValueError(f"head has shape {tuple(start.shape)} where ({num_features}, {num_outputs}) was expected")
        super().__init__(_Additive(network, start), personal=["personal"], loss=loss)


class _Additive(nn.Module):
    def __init__(self, network: nn.Module, head: Tensor) -> None:
        super().__init__()
        self.network = network
        dtype = next((p.dtype for p in network.parameters()), torch.get_default_dtype())
        self.head = nn.Parameter(head.to(dtype))
        self.personal = nn.Parameter(torch.zeros_like(self.head))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.network(x)
        return features.flatten(1) @ (self.head + self.personal)


class SplitLearner:
    """A ``SplitModel`` together with one user's data."""

    def __init__(self, model: SplitModel, batches: Batches, test: tuple[Rows, Rows] | None = None) -> None:
        self._model, self._batches, self._test = model, batches, test
        self.num_examples = batches.num_examples

    def initial_theta(self) -> Vector:
        return self._model.initial_theta()

    def gradients(self, w: Vector, theta: Vector, order: Order) -> tuple[Vector, Vector]:
        return self._model.gradients(w, theta, self._batches(order.visit), order.reduction)

    def training_measures(self, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
        """Loss, and accuracy for classes, on the minibatch."""
        return self._model.evaluate(w, theta, self._batches(order.visit))

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        return {} if self._test is None else self._model.evaluate(w, theta, self._test)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum()


def _flat(tensors: Iterable[Tensor]) -> Vector:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double().numpy()


def _by_row(gradients: dict[str, Tensor], names: list[str], users: int) -> Matrix:
    return torch.cat([gradients[name].detach().reshape(users, -1) for name in names], dim=1).double().numpy()


def _refuse_running_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise ValueError(
                f"{type(part).__name__} {name!r} tracks running statistics, which are neither shared nor personal "
                "parameters: use GroupNorm or LayerNorm, or track_running_stats=False"
            )


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(prediction, y, reduction="none")


def _half_square(prediction: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((prediction - y.reshape(prediction.shape)) ** 2).flatten(1).sum(dim=1)


LOSSES: Mapping[str, LossFunction] = {"softmax": _cross_entropy, "squared": _half_square}
