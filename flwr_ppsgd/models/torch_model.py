"""Networks whose parameters are split into shared ones, w, and personal ones, θ."""

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.arrays import Layout
from flwr_ppsgd.learner import Batches, Rows
from flwr_ppsgd.models.additive_linear import Loss
from flwr_ppsgd.models.torch_data import (
    BatchKey,
    LoaderBatches,
    as_tensor,
    call_arguments,
    map_parts,
    scores_of,
)
from flwr_ppsgd.models.torch_head import LinearHead
from flwr_ppsgd.models.torch_loss import HALF, BatchLoss, LossFunction
from flwr_ppsgd.models.torch_split import (
    Shapes,
    list_patterns,
    refuse_other_shared,
    refuse_without_values,
    split_parameters,
)
from flwr_ppsgd.models.torch_training import (
    OptimizerFactory,
    PersonalTraining,
    SplitLearner,
    TrainedSplitLearner,
    flat_vector,
)
from flwr_ppsgd.recipe import Matrix, Task

Tensors: TypeAlias = Mapping[str, Tensor]


class SplitModel:
    """Any ``nn.Module``: parameters whose names match a pattern are personal, the rest shared.

    The module stays as its owner wrote it: inputs that are whole numbers stay so, several inputs
    are passed by keyword (a mapping) or by position (a tuple), and what it returns may have its
    predictions as ``logits``. Parameters with ``requires_grad=False`` are frozen: they are part of
    neither block and stay as they are in the module. Buffers stay as they are too. BatchNorm that
    tracks running statistics is refused: those would be neither shared nor personal. Dropout is on
    in training, at random on each client, and off in evaluation.

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
        self._shared, self._personal = split_parameters(module, personal, additive)
        self._patterns = list_patterns(personal)
        refuse_without_values(module)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        own = copy.deepcopy(module).to(device)
        self._module = own  # its values never change: w and θ are passed to each call
        self._parameters = dict(own.named_parameters())
        first = next(own.parameters())
        self._device = first.device
        self._input_dtype = first.dtype
        precisions = {self._parameters[name].dtype for name in (*self._shared, *self._personal)}
        self._dtype = torch.float64 if torch.float64 in precisions else torch.float32
        self.additive = additive
        self.takes_float32 = self._dtype == torch.float32  # as vectors, without loss
        self.objective = BatchLoss(loss, self._device)

    # --- w and θ

    def initial_arrays(self) -> ArrayRecord:
        """w as the module has it: the ``initial_arrays`` of a strategy.

        Parameters of half precision travel as float32.
        """
        arrays = {}
        for name in self._shared:
            value = self._parameters[name].detach().cpu()
            if value.dtype in HALF:
                value = value.float()
            arrays[name] = value.clone(memory_format=torch.contiguous_format)
        return ArrayRecord(arrays)

    def initial_w(self) -> Vector:
        """The same as one flat vector."""
        return flat_vector(self._parameters[name] for name in self._shared)

    def initial_theta(self) -> Vector:
        """θ as the module has it; zero if it is added to w."""
        theta = flat_vector(self._parameters[name] for name in self._personal)
        return 0.0 * theta if self.additive else theta

    def check_shared(self, shapes: Shapes) -> None:
        """ValueError unless these are the names and shapes of this model's shared parameters."""
        here = {name: self._parameters[name].shape for name in self._shared}
        refuse_other_shared(shapes, here, self._patterns, self.additive)

    def shared_tensors(self, w: Vector) -> dict[str, Tensor]:
        """The shared parameters by name."""
        return self._split(w, self._shared, "w")

    def personal_tensors(self, thetas: Vector | Matrix) -> dict[str, Tensor]:
        """The personal parameters by name, of one user or with one row per user."""
        return self._split(thetas, self._personal, "θ")

    def module_with(
        self, w: ArrayRecord | Sequence[NDArray[Any]] | Vector, theta: Vector | None = None
    ) -> nn.Module:
        """A copy of the module that holds w and θ, in evaluation mode.

        It is for saving, or for prediction on a client.

        Args:
            w: the shared parameters, as arrays or as one flat vector.
            theta: the personal ones; None leaves them as they are in the module.
        """
        if theta is None:
            theta = self.initial_theta()
        shared = self.shared_tensors(self._flat_shared(w))
        values = self._combine(shared, self.personal_tensors(theta))
        module = copy.deepcopy(self._module).eval()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
        return module

    # --- predictions, losses, gradients

    def tensor(self, values: Rows, part: BatchKey = "y") -> Tensor:
        """Inputs or targets on the network's device, floats in its precision."""
        tensor = as_tensor(values, part)
        if tensor.is_floating_point():
            return tensor.to(self._device, self._input_dtype)
        return tensor.to(self._device)

    def predict(
        self, shared: Tensors, personal: Tensors, x: Rows, *, training: bool = False
    ) -> Tensor:
        """The network's predictions with these parameters; ``torch.func`` may be around it."""
        network = self._module
        if network.training != training:
            network.train(training)
        positional, named = call_arguments(network, map_parts(x, self.tensor))
        parameters = self._combine(shared, personal)
        output = torch.func.functional_call(network, parameters, positional, named)
        return scores_of(output, network)

    def loss(
        self, shared: Tensors, personal: Tensors, rows: tuple[Rows, Rows], reduction: Reduction
    ) -> Tensor:
        """The loss over ``rows`` with these parameters, likewise."""
        x, y = rows
        prediction = self.predict(shared, personal, x, training=True)
        return self.objective.total(prediction, self.tensor(y), reduction)

    def gradients(
        self, w: Vector, theta: Vector, rows: tuple[Rows, Rows], reduction: Reduction
    ) -> tuple[Vector, Vector]:
        """(∇_w, ∇_θ) of the loss over ``rows``; ∇_w in float32 if the network computes so."""
        shared = self.shared_tensors(w)
        personal = self.personal_tensors(theta)
        parameters = [*shared.values(), *personal.values()]
        for parameter in parameters:
            parameter.requires_grad_(True)
        loss = self.loss(shared, personal, rows, reduction)
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        g_w = flat_vector(found[: len(shared)], single=self.takes_float32)  # w may be large
        g_theta = flat_vector(found[len(shared) :])
        return g_w, g_theta

    def evaluate(self, w: Vector, theta: Vector, rows: tuple[Rows, Rows]) -> dict[str, float]:
        """Mean loss, and accuracy for classes and for yes or no."""
        return self.evaluate_over(w, theta, [rows])

    def evaluate_over(
        self, w: Vector, theta: Vector, batches: Iterable[tuple[Rows, Rows]]
    ) -> dict[str, float]:
        """The same over many batches, one at a time in memory; nothing without any."""
        shared = self.shared_tensors(w)
        personal = self.personal_tensors(theta)
        sums: dict[str, float] = {}
        samples = 0
        for x, y in batches:
            with torch.no_grad():
                prediction = self.predict(shared, personal, x)
                measures = self.measures(prediction, self.tensor(y))
            samples += len(y)
            for name, value in measures.items():
                sums[name] = sums.get(name, 0.0) + len(y) * value
        return {name: total / samples for name, total in sums.items()}

    def measures(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Mean loss of these predictions, and accuracy for classes and for yes or no."""
        measures = {"loss": float(self.objective.total(prediction, y, "mean"))}
        accuracy = self.objective.accuracy(prediction, y)
        if accuracy is not None:
            measures["accuracy"] = accuracy
        return measures

    def learner(
        self,
        batches: Batches | LoaderBatches,
        test: tuple[Rows, Rows] | LoaderBatches | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        personal_steps: int = 1,
        weight_decay: float = 0.0,
        task: Task | None = None,
    ) -> SplitLearner:
        """This model together with one user's data.

        Args:
            batches: the training minibatches, by visit.
            test: what ``evaluate`` measures on; None: nothing.
            optimizer: of θ, as for ``PersonalTraining``; of local epochs under ``PPSGD.auto``.
            personal_steps: the number of steps that θ takes in one visit.
            weight_decay: of θ.
            task: for ``PPSGD.auto``: "classification" or "regression"; by the loss unless given.
        """
        training = PersonalTraining(optimizer, personal_steps, weight_decay)
        kind = SplitLearner if training == PersonalTraining() else TrainedSplitLearner
        return kind(self, batches, test, training, task=task)

    # --- the last layer

    @functools.cached_property
    def is_head(self) -> bool:
        """Whether w is nothing but one linear layer, so that the features below it are fixed."""
        return LinearHead.of(self._module, self._shared) is not None

    @functools.cached_property
    def head(self) -> LinearHead | None:
        """The linear layer that is all of w, or all of θ; None if neither is one."""
        names = self._shared if self.is_head else self._personal
        return LinearHead.of(self._module, names)

    def shared_head(self, w: Vector) -> Vector:
        """The values of ``head`` in w; zeros if it is not shared."""
        if self.is_head:
            return w
        if not self.additive:
            return 0.0 * self.initial_theta()
        parts = self.shared_tensors(w)
        return flat_vector(parts[name] for name in self._personal)

    def features(self, w: ArrayRecord | Vector | None, x: Rows) -> Matrix:
        """What the last layer sees of these inputs, one row per sample.

        A personal model of ``PPSGD.auto`` predicts from them.

        Args:
            w: the shared parameters; None: as they are in the module.
            x: inputs, as the network takes them.
        """
        found = self.head_features(None if w is None else self._flat_shared(w), x)
        if found is None:
            raise ValueError(
                f"neither w nor θ is one linear layer at the end of the network, with personal="
                f"{self._patterns}: use PersonalModel.module for predictions"
            )
        return found

    def head_features(self, w: Vector | None, x: Rows) -> Matrix | None:
        """The same; None if there is no such layer."""
        if self.head is None:
            return None
        shared = self.shared_tensors(self.initial_w() if w is None else w)
        personal = self.personal_tensors(self.initial_theta())
        return self.head.features(self._module, lambda: self.predict(shared, personal, x))

    # --- inside

    def _combine(self, shared: Tensors, personal: Tensors) -> dict[str, Tensor]:
        """The module's parameters from both blocks, each in its own precision."""
        values = {**shared, **personal}
        if self.additive:
            for name, offset in personal.items():
                values[name] = shared[name] + offset
        return {name: value.to(self._parameters[name].dtype) for name, value in values.items()}

    def _split(self, vectors: Vector | Matrix, names: list[str], block: str) -> dict[str, Tensor]:
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
        tensors = {}
        for name, part in zip(names, parts, strict=True):
            shape = self._parameters[name].shape
            tensors[name] = part.reshape(*users, *shape)
        return tensors

    def _flat_shared(self, w: ArrayRecord | Sequence[NDArray[Any]] | Vector) -> Vector:
        """w as one vector, in the module's order."""
        if isinstance(w, np.ndarray):
            return w
        record = w if isinstance(w, ArrayRecord) else ArrayRecord(list(w))
        self.check_shared(Layout.of(record).shape_of)
        if set(record) == set(self._shared):
            record = ArrayRecord({name: record[name] for name in self._shared})
        return Layout.of(record).flatten(record)


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
        module = HeadedNetwork(network, start)
        super().__init__(module, "head.*", loss, additive=True, device=device)


class HeadedNetwork(nn.Module):
    """A linear layer ``head`` without a bias on the outputs of a network.

    Args:
        network: Φ.
        head: the layer at the start, features × outputs.
    """

    def __init__(self, network: nn.Module, head: Tensor) -> None:
        super().__init__()
        self.head = nn.utils.skip_init(nn.Linear, *head.shape, bias=False)  # type: ignore[no-untyped-call]
        self.network = network
        first = next(network.parameters(), torch.zeros(0))
        self.head.weight = nn.Parameter(head.T.contiguous().to(first))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        output = self.network(*inputs, **named)
        features = scores_of(output, self.network)
        scores: Tensor = self.head(features.flatten(1))
        return scores
