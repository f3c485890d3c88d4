"""The network, and the rows of a user: made here, or read from a file."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 12
CLASSES = 4
ROWS = 20  # of a user, to learn from
TEST_ROWS = 40
OWN = 0.4  # how far a user's truth is from everybody's
BATCH = 10

Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Module):
    """A linear layer, called head; what is below it can be frozen, or trained along."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.body(x))
        return scores


def synthetic(user: int) -> tuple[Loader, Loader]:
    """Rows of one user: the class with the largest score of (V + U_i)x, partly everybody's."""
    common = np.random.default_rng(1).standard_normal((CLASSES, FEATURES))
    source = np.random.default_rng((2, user))
    truth = common + OWN * source.standard_normal((CLASSES, FEATURES))
    x = source.standard_normal((ROWS + TEST_ROWS, FEATURES))
    y = np.argmax(x @ truth.T, axis=1)
    return loader(x[:ROWS], y[:ROWS]), loader(x[ROWS:], y[ROWS:])


def from_file(path: str) -> tuple[Loader, Loader]:
    """Rows of one user: ``x``, ``y``, ``x_test`` and ``y_test`` in an .npz file."""
    with np.load(path) as data:
        return loader(data["x"], data["y"]), loader(data["x_test"], data["y_test"])


def loader(x: NDArray[Any], y: NDArray[Any]) -> Loader:
    """Batches of (x, y)."""
    rows = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.long))
    return DataLoader(rows, BATCH)
