"""Frozen features and torch: a network's outputs as features, a representation as a network."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.models.batch import scores_of
from flwr_ppsgd.models.blocks import refuse_without_values
from flwr_ppsgd.models.representation import RandomConvolution

ROWS_AT_ONCE = 256


def frozen_outputs(module: nn.Module, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """One row of outputs for each row of x, in evaluation mode.

    Args:
        module: the network; it learns nothing here.
        x: rows × …, as the network takes them.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"a representation's factory returned a {type(module).__name__}: return a torch module"
        )
    refuse_without_values(module)
    module.eval()
    first = next(module.parameters(), torch.zeros(0))
    rows = torch.as_tensor(np.ascontiguousarray(x), dtype=first.dtype, device=first.device)
    with torch.no_grad():
        parts = [
            scores_of(module(part), type(module).__name__).flatten(1).double().cpu()
            for part in torch.split(rows, ROWS_AT_ONCE)
        ]
    outputs: NDArray[np.float64] = torch.cat(parts).numpy()
    return outputs


class OnImages(nn.Module):
    """A linear layer ``head``, zero at first, on a public representation of images.

    Args:
        representation: Φ, whose shape of images is known.
        outputs: K.
    """

    def __init__(self, representation: RandomConvolution, outputs: int) -> None:
        super().__init__()
        self._representation = representation
        width = sum(representation.widths(math.prod(representation.shape)))
        self.head = nn.Linear(width, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Scores; ``images`` are n × height × width, or n × channels × height × width."""
        if images.ndim == 4:
            images = images.movedim(1, -1)
        pixels = images.detach().flatten(1).double().cpu().numpy()
        features = torch.from_numpy(self._representation(pixels)).to(self.head.weight)
        scores: Tensor = self.head(features)
        return scores
