"""The outputs of a frozen torch network, as features."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_ppsgd.models.batch import scores_of
from flwr_ppsgd.models.blocks import refuse_without_values

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
