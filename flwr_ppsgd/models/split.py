"""Networks as learners: f_i(w, θ_i) together with one user's data."""

import copy
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.learner import Batches, Rows
from flwr_ppsgd.models.linear import Loss, Matrix
from flwr_ppsgd.wire import Layout, Order

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class SplitModel:
    """Any ``nn.Module``: parameters whose names match a pattern are personal, the rest shared.

    Parameters with ``requires_grad=False`` are frozen: they are part of neither block and stay as
    they are in the module. Buffers stay as they are too. BatchNorm that tracks running statistics
    is refused: those would be neither shared nor personal. Dropout is on in training, with the
    client's own coins, and off in evaluation.

    Args:
        module: the network; it is copied.
        personal: patterns for ``fnmatch``, such as ``"head.*"``.
        loss: "softmax" (cross-entropy, targets are class numbers), "squared" (½ of the squared
            error, summed over outputs), or a function (prediction, y) → one loss per sample.
    """

    def __init__(
        self,
        module: nn.Module,
        personal: Sequence[str],
        loss: Loss | LossFunction = "softmax",
    ) -> None:
        _refuse_running_statistics(module)
        moving = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._personal = [name for name in moving if _matches(name, personal)]
        self._shared = [name for name in moving if name not in self._personal]
        _refuse_empty(
            "personal",
            self._personal,
            personal,
            moving,
        )
        _refuse_empty(
            "shared",
            self._shared,
            personal,
            moving,
        )
        # w and θ of one user after the other are written into this copy; channels_last makes
        # convolutions twice as fast
        trained = copy.deepcopy(module).train()
        self._module = trained.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
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
        return held.to(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]

    def gradients(
        self,
        w: Vector,
        theta: Vector,
        rows: tuple[Rows, Rows],
        reduction: Reduction,
    ) -> tuple[Vector, Vector]:
        """(∇_w, ∇_θ) of the loss over ``rows``."""
        held = self._hold(w, theta, training=True)
        x, y = self._batch(rows)
        losses = self._loss(self._module(x), y)
        loss = _reduced(losses, reduction)
        gradients = torch.autograd.grad(loss, held, materialize_grads=True)
        shared = len(self._shared)
        return _flat(gradients[:shared]), _flat(gradients[shared:])

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
        shared = {name: _channels_last(part) for name, part in parts.items()}
        personal = self._split(thetas, self._personal, "θ")
        x, y = self._batch(rows)

        def objective(
            shared: dict[str, Tensor],
            personal: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
        ) -> Tensor:
            parameters = {**shared, **personal}
            prediction = torch.func.functional_call(self._module, parameters, (x,))
            return _reduced(self._loss(prediction, y), reduction)

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
        self._hold(w, theta)
        x, y = self._batch(rows)
        with torch.no_grad():
            prediction = self._module(x)
            losses = self._loss(prediction, y)
        measures = {"loss": float(losses.mean())}
        are_classes = y.ndim == 1 and not y.is_floating_point()
        if self._counts_hits and are_classes:
            right = prediction.argmax(dim=1) == y
            measures["accuracy"] = float(right.double().mean())
        return measures

    def _batch(self, rows: tuple[Rows, Rows]) -> tuple[Tensor, Tensor]:
        x = torch.as_tensor(rows[0])
        y = torch.as_tensor(rows[1])
        if y.is_floating_point():
            y = y.to(self._dtype)
        return x.to(self._dtype), y

    def _hold(
        self,
        w: Vector,
        theta: Vector,
        training: bool = False,
    ) -> list[Tensor]:
        """Write w and θ into the module; returns its parameters, the shared ones first."""
        shared = self._split(w, self._shared, "w")
        personal = self._split(theta, self._personal, "θ")
        held: list[Tensor] = []
        with torch.no_grad():
            for name, value in {**shared, **personal}.items():
                parameter = self._parameters[name]
                parameter.copy_(value)
                held.append(parameter)
        if self._module.training != training:
            self._module.train(training)
        return held

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
                "the vector of this model"
            )
        tensor = torch.tensor(vectors, dtype=self._dtype)
        parts = torch.split(tensor, sizes, dim=-1)
        named = {}
        for name, part in zip(names, parts, strict=True):
            named[name] = part.reshape(*users, *self._parameters[name].shape)
        return named

    def _flat_shared(self, w: ArrayRecord | Vector) -> Vector:
        if not isinstance(w, ArrayRecord):
            return w
        in_order = ArrayRecord({name: w[name] for name in self._shared})
        return Layout.of(w).flatten(in_order)


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
    """

    def __init__(
        self,
        network: nn.Module,
        num_features: int,
        num_outputs: int,
        loss: Loss | LossFunction = "softmax",
        head: Tensor | None = None,
    ) -> None:
        shape = (num_features, num_outputs)
        start = torch.zeros(shape) if head is None else head
        found = tuple(start.shape)
        if found != shape:
            raise ValueError(
                f"head must have shape {shape}, got {found}: give num_features × num_outputs"
            )
        super().__init__(_Additive(network, start), personal=["personal"], loss=loss)


class _Additive(nn.Module):
    def __init__(self, network: nn.Module, head: Tensor) -> None:
        super().__init__()
        self.network = network
        dtypes = [parameter.dtype for parameter in network.parameters()]
        dtype = dtypes[0] if dtypes else torch.get_default_dtype()
        self.head = nn.Parameter(head.to(dtype))
        self.personal = nn.Parameter(torch.zeros_like(self.head))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.network(x)
        return features.flatten(1) @ (self.head + self.personal)


class SplitLearner:
    """A ``SplitModel`` together with one user's data."""

    def __init__(
        self,
        model: SplitModel,
        batches: Batches,
        test: tuple[Rows, Rows] | None = None,
    ) -> None:
        self._model = model
        self._batches = batches
        self._test = test
        self.num_examples = batches.num_examples

    def initial_theta(self) -> Vector:
        """θ as the module has it."""
        return self._model.initial_theta()

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
        """Loss, and accuracy for classes, on the minibatch."""
        rows = self._batches(order.visit)
        return self._model.evaluate(w, theta, rows)

    def evaluate(self, w: Vector, theta: Vector) -> dict[str, float]:
        """The same on the test part; nothing if there is none."""
        if self._test is None:
            return {}
        return self._model.evaluate(w, theta, self._test)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_empty(
    block: str,
    found: Sequence[str],
    patterns: Sequence[str],
    names: Iterable[str],
) -> None:
    if not found:
        raise ValueError(
            f"personal={list(patterns)} leaves no {block} parameter among {sorted(names)}: name "
            "some of them, not none and not all"
        )


def _refuse_running_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise ValueError(
                f"{type(part).__name__} {name!r} tracks running statistics, which are neither "
                "shared nor personal parameters: use GroupNorm or LayerNorm, or "
                "track_running_stats=False"
            )


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4:
        return tensor
    return tensor.clone(memory_format=torch.channels_last)


def _reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses.sum()


def _flat(tensors: Iterable[Tensor]) -> Vector:
    """One vector of all values, in float64."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    return torch.cat(parts).double().numpy()


def _by_row(
    gradients: dict[str, Tensor],
    names: list[str],
    users: int,
) -> Matrix:
    """users × parameters, in float64."""
    parts = [gradients[name].detach().reshape(users, -1) for name in names]
    return torch.cat(parts, dim=1).double().numpy()


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(prediction, y, reduction="none")


def _half_square(prediction: Tensor, y: Tensor) -> Tensor:
    squares = (prediction - y.reshape(prediction.shape)) ** 2
    return 0.5 * squares.flatten(1).sum(dim=1)


LOSSES: Mapping[str, LossFunction] = {"softmax": _cross_entropy, "squared": _half_square}
