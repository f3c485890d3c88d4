"""The convolutional network of the paper's experiments, under an additive head."""

import math

import torch
from torch import Tensor, nn

from flwr_ppsgd.models.torch_model import AdditiveHead

FEATURES = 32
CLASSES = 10
SHIFT = 0.1  # targets are one-hot minus this


def paper_cnn(
    seed: int,
    classes: int = CLASSES,
    dtype: torch.dtype = torch.float32,
) -> AdditiveHead:
    """(w + θ_i)ᵀΦ_W(x) for images of 28 × 28 pixels, each one row of 784 numbers.

    It has 26,000 shared parameters with 10 classes. (W, w) is one flat vector, so one clip covers
    both. As in the authors' code, w starts at random values and the loss is ``mean_square``.

    Args:
        seed: of the initial values, which are public.
        classes: the number of outputs.
        dtype: of the parameters.
    """
    generator = torch.Generator().manual_seed(seed)
    network = _make_network()
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            _initialise(layer, generator)
    head = torch.randn(FEATURES, classes, generator=generator) / math.sqrt(FEATURES)
    return AdditiveHead(network.to(dtype), FEATURES, classes, loss=mean_square, head=head)


def mean_square(prediction: Tensor, y: Tensor) -> Tensor:
    """(1/K) Σ_k (prediction_k − y_k)² for each sample, without ½, as in the authors' code.

    Args:
        prediction: samples × K.
        y: class numbers, or the targets themselves: see ``shifted_targets``.
    """
    targets = shifted_targets(y, prediction.shape[1]).to(prediction.dtype)
    return ((prediction - targets) ** 2).mean(dim=1)


def shifted_targets(y: Tensor, outputs: int) -> Tensor:
    """One-hot minus .1 for class numbers; floating-point targets unchanged.

    Args:
        y: class numbers, or samples × K.
        outputs: K.
    """
    if y.is_floating_point():
        return y
    classes = torch.arange(outputs, device=y.device)
    return (y[:, None] == classes).double() - SHIFT  # .1 in float32 is not .1


def _make_network() -> nn.Sequential:
    """Φ_W.

    "Same" padding of 28 pixels at stride 2 needs 13·2 + 8 − 28 = 6 more pixels: 3 on each side.
    """
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


def _initialise(layer: nn.Conv2d | nn.Linear, generator: torch.Generator) -> None:
    """Glorot's normal kernels, and normal biases with deviation 1e-6 (convolutions) or 1e-2
    (dense), as in the authors' framework."""
    nn.init.xavier_normal_(layer.weight, generator=generator)
    if layer.bias is not None:
        std = 1e-6 if isinstance(layer, nn.Conv2d) else 1e-2
        nn.init.normal_(layer.bias, 0.0, std, generator=generator)
