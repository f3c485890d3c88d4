"""The linear layer at the end of a network: what it sees, and its parameters as a matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.models.batch import scores_of
from flwr_ppsgd.models.solve import Columns
from flwr_ppsgd.recipe import Matrix, Task


@dataclass(frozen=True)
class LinearHead:
    """An ``nn.Linear``, or the matrix of an ``AdditiveHead``.

    Args:
        layer: the name of the layer, or of what computes its features.
        shape: features × outputs, without a bias.
        bias: whether there is one; it is then the last row of the matrix.
        transposed: whether weights are outputs × features, as ``nn.Linear`` has them.
    """

    layer: str
    shape: tuple[int, int]
    bias: bool = False
    transposed: bool = True

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
        own = [f"{layer}.{each}".lstrip(".") for each, _ in found.named_parameters()]
        if own != names:
            return None
        return cls(layer, (found.in_features, found.out_features), found.bias is not None)

    def matrix(self, vector: Vector) -> Matrix:
        """The layer's parameters as columns × outputs; a bias is the weight of a column of ones."""
        features, outputs = self.shape
        vector = np.asarray(vector, dtype=np.float64)
        weights = vector[: features * outputs]
        if not self.transposed:
            return weights.reshape(features, outputs)
        matrix: Matrix = weights.reshape(outputs, features).T
        if not self.bias:
            return matrix
        return np.vstack([matrix, vector[features * outputs :]])

    def vector(self, matrix: Matrix) -> Vector:
        """The other way round."""
        if not self.transposed:
            return matrix.reshape(-1)
        weights = matrix[: self.shape[0]].T.reshape(-1)
        if not self.bias:
            return weights
        return np.concatenate([weights, matrix[-1]])

    def columns(self, task: Task) -> Columns:
        """What is public about the features: they are used as they are."""
        features, outputs = self.shape
        none = np.zeros(features, dtype=np.bool_)
        return Columns(task, numbers=none, sparse=none, outputs=outputs, ones=self.bias)

    def features(self, module: nn.Module, run: Callable[[], Tensor]) -> Matrix | None:
        """What the layer sees, one row per sample.

        None if its output is not what the network returns, or if it is called more than once.

        Args:
            module: the network.
            run: calls it, and returns its scores.
        """
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def note(part: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            if self.transposed:
                inputs.append(given[0])
                outputs.append(made)
            else:
                inputs.append(scores_of(made, type(part).__name__).flatten(1))

        handle = module.get_submodule(self.layer).register_forward_hook(note)
        try:
            with torch.no_grad():
                scores = run()
        finally:
            handle.remove()
        last = all(_same(made, scores) for made in outputs)
        if len(inputs) != 1 or inputs[0].ndim != 2 or not last:
            return None
        seen: Matrix = inputs[0].double().cpu().numpy()
        return seen


def _same(made: Tensor, scores: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN for NaN."""
    if made.shape != scores.shape:
        return False
    return torch.allclose(made, scores, rtol=0.0, atol=0.0, equal_nan=True)


class Additive(nn.Module):
    """(head + personal)ᵀΦ(x) with a network Φ: the module of an ``AdditiveHead``.

    Args:
        network: Φ.
        head: the shared head at the start.
    """

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
