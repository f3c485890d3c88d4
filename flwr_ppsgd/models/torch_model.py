"""Networks whose parameters are split into shared ones, w, and personal ones, θ."""

import copy
import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from flwr_ppsgd.algorithm import Reduction, Vector
from flwr_ppsgd.arrays import Layout
from flwr_ppsgd.learner import Batches, Rows
from flwr_ppsgd.models.additive_linear import Loss
from flwr_ppsgd.models.solve import PublicColumns
from flwr_ppsgd.models.torch_data import LoaderBatches, NetworkInputs, scores_of
from flwr_ppsgd.models.torch_training import (
    HALF,
    BatchLoss,
    LossFunction,
    OptimizerFactory,
    PersonalTraining,
    SplitLearner,
    TrainedSplitLearner,
    flat_vector,
)
from flwr_ppsgd.recipe import Matrix, Task

Shapes: TypeAlias = Mapping[str, Sequence[int]]
Tensors: TypeAlias = Mapping[str, Tensor]

MOST_SUGGESTED = 3


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
        self._additive = additive
        self._patterns = list_patterns(personal)
        refuse_without_values(module)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        own = copy.deepcopy(module).to(device)
        self._module = own  # its values never change: w and θ are passed to each call
        self._parameters = dict(own.named_parameters())
        names = [*self._shared, *self._personal]
        precisions = {self._parameters[name].dtype for name in names}
        self._dtype = torch.float64 if torch.float64 in precisions else torch.float32
        self._inputs = NetworkInputs(own)
        self._objective = BatchLoss(loss, self._inputs.device)

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
        return 0.0 * theta if self._additive else theta

    @property
    def additive(self) -> bool:
        """Whether θ is added to a part of w, so that θ = 0 is a model."""
        return self._additive

    @property
    def takes_float32(self) -> bool:
        """Whether float32 vectors hold all that the network can tell apart."""
        return self._dtype == torch.float32

    def check_shared(self, shapes: Shapes) -> None:
        """ValueError unless these are the names and shapes of this model's shared parameters."""
        here = {name: self._parameters[name].shape for name in self._shared}
        refuse_other_shared(shapes, here, self._patterns, self._additive)

    def shared_tensors(self, w: Vector) -> dict[str, Tensor]:
        """The shared parameters by name."""
        return self._split(w, self._shared, "w")

    def personal_tensors(self, thetas: Vector | Matrix) -> dict[str, Tensor]:
        """The personal parameters by name, of one user or with one row per user."""
        return self._split(thetas, self._personal, "θ")

    def tensor(self, values: Rows) -> Tensor:
        """Inputs or targets on the network's device, floats in its precision."""
        return self._inputs.tensor(values)

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

    def predict(
        self, shared: Tensors, personal: Tensors, x: Rows, *, training: bool = False
    ) -> Tensor:
        """The network's predictions with these parameters; ``torch.func`` may be around it."""
        if self._module.training != training:
            self._module.train(training)
        parameters = self._combine(shared, personal)
        positional, named = self._inputs.call(x)
        output = torch.func.functional_call(self._module, parameters, positional, named)
        return scores_of(output, type(self._module).__name__)

    def loss(
        self, shared: Tensors, personal: Tensors, rows: tuple[Rows, Rows], reduction: Reduction
    ) -> Tensor:
        """The loss over ``rows`` with these parameters, likewise."""
        x, y = rows
        prediction = self.predict(shared, personal, x, training=True)
        return self._objective.total(prediction, self.tensor(y), reduction)

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
        return g_w, flat_vector(found[len(shared) :])

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
            samples += len(y)
            for name, value in self.measures(prediction, self.tensor(y)).items():
                sums[name] = sums.get(name, 0.0) + len(y) * value
        return {name: total / samples for name, total in sums.items()}

    def measures(self, prediction: Tensor, y: Tensor) -> dict[str, float]:
        """Mean loss of these predictions, and accuracy for classes and for yes or no."""
        with torch.no_grad():
            measures = {"loss": float(self._objective.total(prediction, y, "mean"))}
            accuracy = self._objective.accuracy(prediction, y)
        if accuracy is not None:
            measures["accuracy"] = accuracy
        return measures

    def task(self, y: Rows) -> Task:
        """What the loss is for, with targets like these."""
        return self._objective.task(self.tensor(y))

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
        kind = SplitLearner if training.is_plain else TrainedSplitLearner
        return kind(self, batches, test, training, task=task)

    # --- the last layer

    @functools.cached_property
    def is_head(self) -> bool:
        """Whether w is nothing but one linear layer, so that the features below it are fixed."""
        return LinearHead.of(self._module, self._shared) is not None

    @functools.cached_property
    def head(self) -> "LinearHead | None":
        """The linear layer that is all of w, or all of θ; None if neither is one."""
        return LinearHead.of(self._module, self._shared if self.is_head else self._personal)

    def shared_head(self, w: Vector) -> Vector:
        """The values of ``head`` in w; zeros if it is not shared."""
        if self.is_head:
            return w
        if not self._additive:
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
        head = self.head
        if head is None:
            return None
        shared = self.shared_tensors(self.initial_w() if w is None else w)
        personal = self.personal_tensors(self.initial_theta())
        return head.features(self._module, lambda: self.predict(shared, personal, x))

    # --- inside

    def _combine(self, shared: Tensors, personal: Tensors) -> dict[str, Tensor]:
        """The module's parameters from both blocks, each in its own precision."""
        values = {**shared, **personal}
        if self._additive:
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
        tensor = torch.tensor(vectors, dtype=self._dtype, device=self._inputs.device)
        parts = torch.split(tensor, sizes, dim=-1)
        tensors = {}
        for name, part in zip(names, parts, strict=True):
            shape = self._parameters[name].shape
            tensors[name] = part.reshape(*users, *shape)
        return tensors

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
        features = scores_of(output, type(self.network).__name__)
        scores: Tensor = self.head(features.flatten(1))
        return scores


# --- which parameters are shared and which are personal


def list_patterns(personal: str | Sequence[str]) -> list[str]:
    """Patterns as a list, a single one too."""
    return [personal] if isinstance(personal, str) else list(personal)


def split_parameters(
    module: nn.Module, personal: str | Sequence[str], additive: bool = False
) -> tuple[list[str], list[str]]:
    """The names of the (shared, personal) parameters; with ``additive`` all are shared.

    ValueError if a pattern matches nothing, if one of the blocks is empty, or if the module cannot
    be split.
    """
    _refuse_running_statistics(module)
    patterns = list_patterns(personal)
    parameters = dict(module.named_parameters())
    tied = dict(module.named_parameters(remove_duplicate=False))  # by all of their names
    for pattern in patterns:
        if not fnmatch.filter(tied, pattern):
            near = difflib.get_close_matches(pattern, parameters, n=MOST_SUGGESTED, cutoff=0.0)
            raise ValueError(
                f"personal={patterns}: {pattern!r} matches no parameter of "
                f"{type(module).__name__}; the nearest are {near}: use one of those names, or a "
                "pattern such as 'head.*'"
            )
    _refuse_tied_across(tied, patterns)
    moving = [name for name, value in parameters.items() if value.requires_grad]
    own = [name for name in moving if _matches(name, patterns)]
    shared = [name for name in moving if additive or name not in own]
    for block, found in (("personal", own), ("shared", shared)):
        if not found:
            raise ValueError(
                f"personal={patterns} leaves no {block} parameter among {sorted(moving)}: name "
                "some of them, not none and not all"
            )
    return shared, own


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_tied_across(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> None:
    """ValueError if one tensor is personal by one of its names and shared by another."""
    names: dict[int, list[str]] = {}
    for name, value in parameters.items():
        names.setdefault(id(value), []).append(name)
    for tied in names.values():
        own = [name for name in tied if _matches(name, patterns)]
        others = [name for name in tied if name not in own]
        if own and others:
            raise ValueError(
                f"personal={list(patterns)}: {own[0]!r} and {others[0]!r} are one tensor (tied), "
                "and would be personal and shared at once: match both or none, or untie them"
            )


def _refuse_running_statistics(module: nn.Module) -> None:
    """ValueError if a normalisation keeps statistics of the data it has seen."""
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise ValueError(
                f"{type(part).__name__} {name!r} tracks running statistics, which are neither "
                "shared nor personal parameters: use GroupNorm or LayerNorm, or "
                "track_running_stats=False"
            )


def refuse_without_values(module: nn.Module) -> None:
    """ValueError if a parameter has no values."""
    for name, value in module.named_parameters():
        if isinstance(value, UninitializedParameter) or value.is_meta:
            raise ValueError(
                f"parameter {name!r} has no values yet: load the network's weights, or call it "
                "once on a batch if it has lazy layers, before it is split"
            )


def refuse_other_shared(
    there: Shapes, here: Shapes, patterns: Sequence[str], additive: bool
) -> None:
    """ValueError unless a server's w has the shared parameters of this client, in their shapes.

    Numbers for names say nothing: legacy servers send them, and so do those that send w as one
    vector.

    Args:
        there: the shapes of the server's arrays, by name.
        here: those of this client's shared parameters.
        patterns: of this client's personal parameters, for the error.
        additive: likewise.
    """
    if all(name.isdigit() for name in there):
        return
    missing = sorted(set(here) - set(there))
    unknown = sorted(set(there) - set(here))
    if missing or unknown:
        raise ValueError(
            f"the server's w has {unknown or 'nothing'} that is not shared here, and lacks "
            f"{missing or 'nothing'} that is: personal={list(patterns)}, additive={additive} on "
            "this client must be those of shared_arrays(module, personal, additive=…) on the "
            "server; buffers, frozen parameters and further names of tied ones are no part of w"
        )
    for name, shape in there.items():
        if tuple(shape) != tuple(here[name]):
            raise ValueError(
                f"{name!r} has shape {tuple(shape)} in the server's w and {tuple(here[name])} in "
                "this client's network: make the network with the same sizes on both sides"
            )


# --- the linear layer at the end


@dataclass(frozen=True)
class LinearHead:
    """The ``nn.Linear`` at the end of a network.

    Args:
        layer: its name.
        shape: features × outputs, without a bias.
        bias: whether there is one; it is then the last row of the matrix.
    """

    layer: str
    shape: tuple[int, int]
    bias: bool

    @classmethod
    def of(cls, module: nn.Module, names: list[str]) -> "LinearHead | None":
        """The layer that has exactly these parameters; None if there is none.

        Args:
            module: the network.
            names: of the parameters, in their order.
        """
        layer, _, name = names[0].rpartition(".")
        found = module.get_submodule(layer)
        if name != "weight" or type(found) is not nn.Linear:
            return None
        own = [each for each, _ in found.named_parameters(prefix=layer)]
        if own != names:
            return None
        return cls(layer, (found.in_features, found.out_features), found.bias is not None)

    def matrix(self, vector: Vector) -> Matrix:
        """The layer's parameters as columns × outputs; a bias is the weight of a column of ones."""
        features, outputs = self.shape
        vector = np.asarray(vector, dtype=np.float64)
        weights = vector[: features * outputs].reshape(outputs, features)
        bias = vector[features * outputs :].reshape(-1, outputs)
        return np.vstack([weights.T, bias])

    def vector(self, matrix: Matrix) -> Vector:
        """The other way round."""
        features, _ = self.shape
        weights = matrix[:features].T.reshape(-1)
        bias = matrix[features:].reshape(-1)
        return np.concatenate([weights, bias])

    def columns(self, task: Task) -> PublicColumns:
        """What is public about the features: they are used as they are."""
        features, outputs = self.shape
        none = np.zeros(features, dtype=np.bool_)
        return PublicColumns(task, numbers=none, sparse=none, outputs=outputs, ones=self.bias)

    def features(self, module: nn.Module, predict: Callable[[], Tensor]) -> Matrix | None:
        """What the layer sees, one row per sample.

        None if what the network returns is more than the layer's output, or its sigmoid or
        softmax, or if the layer is called more than once.

        Args:
            module: the network.
            predict: calls it.
        """
        calls: list[tuple[Tensor, Tensor]] = []

        def note(_: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            calls.append((given[0], made))

        handle = module.get_submodule(self.layer).register_forward_hook(note)
        try:
            with torch.no_grad():
                scores = predict()
        finally:
            handle.remove()
        if len(calls) != 1:
            return None
        seen, made = calls[0]
        if seen.ndim != 2 or not _is_link_of(made, scores):
            return None
        features: Matrix = seen.double().cpu().numpy()
        return features


def _is_link_of(made: Tensor, scores: Tensor) -> bool:
    """Whether the scores are these numbers, or the chances that they stand for."""
    if made.numel() != scores.numel():
        return False
    links = [made, torch.sigmoid(made), made.softmax(dim=1), made.log_softmax(dim=1)]
    for link in links:
        shaped = link.reshape(scores.shape)
        if torch.allclose(shaped, scores, rtol=0.0, atol=0.0, equal_nan=True):
            return True
    return False
