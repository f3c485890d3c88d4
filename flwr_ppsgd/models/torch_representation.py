"""Public representations with torch: outputs of a frozen network, and a module on images."""

import hashlib
import math
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.models.representation import RandomConvolution
from flwr_ppsgd.models.torch_data import scores_of
from flwr_ppsgd.models.torch_split import refuse_without_values

ROWS_AT_ONCE = 256
MOST_REMEMBERED = 2**28  # bytes of features of images, in one process


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
    parts = []
    with torch.no_grad():
        for part in torch.split(rows, ROWS_AT_ONCE):
            scores = scores_of(module(part), module)
            parts.append(scores.flatten(1).double().cpu())
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
        width = representation.width(math.prod(representation.shape))
        self.head = nn.Linear(width, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Scores; ``images`` are n × height × width, or n × channels × height × width."""
        if images.ndim == 4:
            images = images.movedim(1, -1)
        pixels = images.detach().flatten(1).cpu().numpy()
        features = _FEATURES.of(self._representation, pixels).to(self.head.weight)
        scores: Tensor = self.head(features)
        return scores


class _RememberedFeatures:
    """Features of images that were seen before in this process: a client makes its network anew
    for each message. The least recently used ones go first."""

    def __init__(self) -> None:
        self._found: dict[bytes, Tensor] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, representation: RandomConvolution, pixels: NDArray[Any]) -> Tensor:
        """Φ of these rows of pixels."""
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=32)
        digest.update(repr((representation, pixels.shape, pixels.dtype)).encode())
        key = digest.digest()
        with self._lock:
            features = self._found.pop(key, None)
            if features is None:
                features = torch.from_numpy(representation(pixels.astype(np.float64)))
                self._bytes += features.nbytes
            self._found[key] = features
            while self._bytes > MOST_REMEMBERED:
                oldest = next(iter(self._found))
                self._bytes -= self._found.pop(oldest).nbytes
        return features


_FEATURES = _RememberedFeatures()
