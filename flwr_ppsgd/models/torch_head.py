"""The linear layer at the end of a network, which is solved on the features below it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.models.solve import PublicColumns
from flwr_ppsgd.recipe import Matrix, Task


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
        """The inverse of ``matrix``."""
        features, _ = self.shape
        weights = matrix[:features].T.reshape(-1)
        bias = matrix[features:].reshape(-1)
        return np.concatenate([weights, bias])

    def columns(self, task: Task) -> PublicColumns:
        """The public facts about the features, which are not scaled."""
        features, outputs = self.shape
        none = np.zeros(features, dtype=np.bool_)
        return PublicColumns(task, numbers=none, sparse=none, outputs=outputs, ones=self.bias)

    def solvable_targets(self, y: NDArray[Any], task: Task) -> NDArray[Any] | None:
        """Targets with which the layer is solved; None if it cannot be.

        One number per row in regression. Class numbers or a number per class; 0 and 1 for one
        output.
        """
        _, outputs = self.shape
        one_number = outputs == 1 and y.size == len(y)
        if task == "regression":
            return y.reshape(-1) if one_number else None
        if one_number:
            is_yes_or_no = np.isin(y, (0, 1)).all()
            return y.reshape(-1, 1) if is_yes_or_no else None
        are_numbers = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
        are_rows = y.ndim == 2 and y.shape[1] == outputs
        return y if outputs > 1 and (are_numbers or are_rows) else None

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
    """Whether the scores are these numbers, or their sigmoid, softmax or log-softmax."""
    if made.numel() != scores.numel():
        return False
    links = [made, torch.sigmoid(made), made.softmax(dim=1), made.log_softmax(dim=1)]
    for link in links:
        shaped = link.reshape(scores.shape)
        if torch.allclose(shaped, scores, rtol=0.0, atol=0.0, equal_nan=True):
            return True
    return False
