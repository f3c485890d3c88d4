"""The convolutional network of the paper's experiments, under an additive head."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_ppsgd.models.split import AdditiveHead

FEATURES, CLASSES = 32, 10
SHIFT = 0.1  # targets are one-hot minus this


def paper_cnn(seed: int, classes: int = CLASSES, dtype: torch.dtype = torch.float32) -> AdditiveHead:
    """(w + θ_i)ᵀΦ_W(x) for 28 × 28 images, one row of 784 pixels each: 26,000 shared parameters with 10 classes.

    (W, w) is one flat vector, so one clip is over both of them. As in the authors' code w starts at random too, and
    the loss is ``mean_square``. The initial values depend on ``seed`` alone; they are public.
    """
    coins = torch.Generator().manual_seed(seed)
    network = _network()
    for part in network:
        if isinstance(part, nn.Conv2d | nn.Linear):
            _start(part, coins)
    head = torch.randn(FEATURES, classes, generator=coins) / math.sqrt(FEATURES)
    return AdditiveHead(network.to(dtype), FEATURES, classes, loss=mean_square, head=head)


def mean_square(prediction: Tensor, y: Tensor) -> Tensor:
    """(1/K) Σ_k (prediction_k − y_k)² for each sample, without ½, as in the authors' code.

    y: class numbers, whose targets are one-hot minus .1; or the targets themselves.
    """
    if not y.is_floating_point():
        y = (y[:, None] == torch.arange(prediction.shape[1])).to(prediction.dtype) - SHIFT
    return ((prediction - y) ** 2).mean(dim=1)


def from_channels_last(parameters: Sequence[NDArray[np.float64]]) -> dict[str, Tensor]:
    """The network's parameters from a channels-last framework's: kernel, bias, kernel, bias, dense, bias.

    Kernels are height × width × in × out there and out × in × height × width here. Dense matrices are in × out there
    and out × in here; their inputs are flattened by height, width, channel there, by channel, height, width here.
    """
    kernel1, bias1, kernel2, bias2, dense, bias3 = (torch.as_tensor(np.asarray(p)) for p in parameters)
    return {
        "1.weight": kernel1.permute(3, 2, 0, 1),
        "1.bias": bias1.reshape(-1),
        "4.weight": kernel2.permute(3, 2, 0, 1),
        "4.bias": bias2.reshape(-1),
        "8.weight": dense.reshape(4, 4, 32, FEATURES).permute(3, 2, 0, 1).reshape(FEATURES, -1),
        "8.bias": bias3,
    }


def _network() -> nn.Sequential:
    """Φ_W. "Same" padding of 28 pixels at stride 2 wants 13·2 + 8 − 28 = 6 more of them: 3 on either side."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, FEATURES),
        nn.ReLU(),
    )


def _start(part: nn.Conv2d | nn.Linear, coins: torch.Generator) -> None:
    """Glorot's normal kernels, and biases of 1e-6 (convolutions) or 1e-2 (dense), as in the authors' framework."""
    nn.init.xavier_normal_(part.weight, generator=coins)
    if part.bias is not None:
        nn.init.normal_(part.bias, 0.0, 1e-6 if isinstance(part, nn.Conv2d) else 1e-2, generator=coins)
