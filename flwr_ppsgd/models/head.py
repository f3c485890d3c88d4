"""A personal block that is one linear layer at the end of a network: it can be solved."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.models.batch import scores_of
from flwr_ppsgd.models.ridge import Floats


@dataclass(frozen=True)
class LinearHead:
    """An ``nn.Linear`` whose parameters are all of θ, or a matrix of its own (``AdditiveHead``).

    Args:
        layer: the name of the layer, or of what computes its features.
        shape: features × outputs, without a bias.
        bias: whether there is one; it is then the last row of the matrix.
        transposed: whether θ holds outputs × features, as ``nn.Linear`` does.
    """

    layer: str
    shape: tuple[int, int]
    bias: bool = False
    transposed: bool = True

    @classmethod
    def of(cls, module: nn.Module, personal: list[str]) -> "LinearHead | None":
        """The layer that has exactly the personal parameters; None if there is none.

        Args:
            module: the network.
            personal: the names of the personal parameters, in the order of θ.
        """
        layer, _, name = personal[0].rpartition(".")
        found = module.get_submodule(layer)
        if name != "weight" or type(found) is not nn.Linear:
            return None
        own = [f"{layer}.{each}".lstrip(".") for each, _ in found.named_parameters()]
        if own != personal:
            return None
        return cls(layer, (found.in_features, found.out_features), found.bias is not None)

    def matrix(self, theta: Vector) -> Floats:
        """θ as features × outputs, a bias as its last row."""
        features, outputs = self.shape
        weights = theta[: features * outputs]
        if not self.transposed:
            return weights.reshape(features, outputs)
        matrix: Floats = weights.reshape(outputs, features).T
        if not self.bias:
            return matrix
        return np.vstack([matrix, theta[features * outputs :]])

    def theta(self, matrix: Floats) -> Vector:
        """The other way round."""
        if not self.transposed:
            return matrix.reshape(-1)
        weights = matrix[: self.shape[0]].T.reshape(-1)
        if not self.bias:
            return weights
        return np.concatenate([weights, matrix[-1]])

    def features(self, module: nn.Module, run: Callable[[], Tensor]) -> Floats | None:
        """What the layer sees, one row per sample, a bias as a last column of ones.

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
        seen: Floats = inputs[0].double().cpu().numpy()
        if not self.bias:
            return seen
        return np.hstack([seen, np.ones((len(seen), 1))])


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
