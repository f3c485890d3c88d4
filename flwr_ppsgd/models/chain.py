"""A chain of common layers, for everyone in a cohort and several settings at once.

All users of a cohort share the parameters of these layers, so the rows of all users go through a
layer together; only the gradient of its parameters is a product for each user. ``vmap`` finds the
same gradients, but by slower convolutions and one setting after the other.

A layer with parameters is a matrix product here: that of a convolution is patches × kernel. What
lies between two of them has no parameters, and torch differentiates it.
"""

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Gradients: TypeAlias = dict[str, Tensor]  # settings × users × …, by the parameter's name
Between: TypeAlias = Callable[[Tensor], Tensor]

# layers without parameters that treat each row alone, and are the same in training and evaluation
PLAIN = (
    nn.AvgPool2d,
    nn.ELU,
    nn.Flatten,
    nn.GELU,
    nn.Identity,
    nn.LeakyReLU,
    nn.MaxPool2d,
    nn.ReLU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
    nn.Unflatten,
)
PRECISIONS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Affine:
    """x → x·M + b over the last axis: ``nn.Linear``, or ``nn.Conv2d`` on unrolled patches.

    Args:
        weight: the name of the parameter M comes from.
        bias: the name of b; None: there is none.
        kernel: channels × height × width of a convolution; None for a linear layer.
    """

    weight: str
    bias: str | None
    kernel: tuple[int, int, int] | None

    @classmethod
    def of(cls, name: str, layer: nn.Linear | nn.Conv2d) -> "Affine":
        """The layer of this name in a network."""
        bias = None if layer.bias is None else f"{name}.bias"
        kernel = None
        if isinstance(layer, nn.Conv2d):
            height, width = layer.kernel_size
            kernel = (layer.in_channels, height, width)
        return cls(f"{name}.weight", bias, kernel)

    @property
    def names(self) -> list[str]:
        """Of its parameters."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def matrix(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """M, settings × inputs × outputs. A convolution's inputs are ordered as in a patch."""
        weight = parameters[self.weight]
        if self.kernel is None:
            return weight.transpose(1, 2)
        by_place = weight.permute(0, 3, 4, 2, 1)  # settings × height × width × channels × outputs
        return by_place.flatten(1, 3)

    def forward(self, x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """x·M + b, the rows of all settings one after the other.

        Args:
            x: settings × rows × … × inputs; or 1 × rows × …, the same for all settings.
            parameters: by name, each one settings × …
        """
        y = product(x.flatten(1, -2), self.matrix(parameters))
        if self.bias is not None:
            y += parameters[self.bias][:, None]
        y = y.view(-1, *x.shape[2:-1], y.shape[-1])
        return y if self.kernel is None else y.permute(0, 3, 1, 2)

    def backward(self, slope: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The gradient of x, from that of the output."""
        matrix = self.matrix(parameters)
        rows = self._rows(slope)
        by_setting = rows.reshape(len(matrix), -1, rows.shape[-1])
        return product(by_setting, matrix.transpose(1, 2)).view(*rows.shape[:-1], -1)

    def gradients(self, x: Tensor, slope: Tensor, settings: int, users: int) -> Gradients:
        """The gradients of M and b, from x and the gradient of the output."""
        x = x.reshape(len(x), users, -1, x.shape[-1])
        rows = self._rows(slope)
        rows = rows.reshape(settings, users, -1, rows.shape[-1])
        matrix = product(x.transpose(2, 3), rows)  # settings × users × inputs × outputs
        found = {self.weight: self._as_weight(matrix)}
        if self.bias is not None:
            found[self.bias] = rows.sum(dim=2)
        return found

    def _rows(self, slope: Tensor) -> Tensor:
        """With the channels of images last."""
        return slope if self.kernel is None else slope.permute(0, 2, 3, 1)

    def _as_weight(self, matrix: Tensor) -> Tensor:
        """settings × users × inputs × outputs in the order of the parameter."""
        if self.kernel is None:
            return matrix.transpose(2, 3)
        channels, height, width = self.kernel
        by_place = matrix.view(*matrix.shape[:2], height, width, channels, -1)
        return by_place.permute(0, 1, 5, 4, 2, 3)


@dataclass(frozen=True)
class Unroll:
    """Images → the patches that a convolution sees: rows × height × width × patch."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def __call__(self, images: Tensor) -> Tensor:
        patches: Tensor = _Patches.apply(images, self)  # type: ignore[no-untyped-call]
        return patches

    def padded(self, images: Tensor) -> Tensor:
        """rows × height × width × channels, with zeros around."""
        high, wide = self.padding
        channels_last = images.permute(0, 2, 3, 1)
        return nn.functional.pad(channels_last, (0, 0, wide, wide, high, high)).contiguous()

    def windows(self, padded: Tensor) -> Tensor:
        """The patches as a view: rows × height × width × lines × (kernel width·channels)."""
        rows, height, width, channels = padded.shape
        a_row, a_line, a_place, _ = padded.stride()
        high = (height - self.kernel[0]) // self.stride[0] + 1
        wide = (width - self.kernel[1]) // self.stride[1] + 1
        shape = (rows, high, wide, self.kernel[0], self.kernel[1] * channels)
        down = self.stride[0] * a_line
        across = self.stride[1] * a_place
        return padded.as_strided(shape, (a_row, down, across, a_line, 1))

    def folded(self, patches: Tensor, shape: torch.Size) -> Tensor:
        """Each pixel's sum over the patches it is in; ``shape`` is that of the images.

        Patches some way apart do not overlap, so they are added in one go.
        """
        rows, channels, height, width = shape
        high, wide = self.padding
        sums = patches.new_zeros(rows, height + 2 * high, width + 2 * wide, channels)
        windows = self.windows(sums)
        patches = patches.reshape(windows.shape)
        down = -(-self.kernel[0] // self.stride[0])  # rounded up
        across = -(-self.kernel[1] // self.stride[1])
        for line in range(down):
            for place in range(across):
                apart = (slice(None), slice(line, None, down), slice(place, None, across))
                windows[apart] += patches[apart]
        inside = sums[:, high : high + height, wide : wide + width]
        return inside.permute(0, 3, 1, 2)


class _Patches(torch.autograd.Function):
    """``Unroll`` for torch: its own derivative of a view whose parts overlap is slow."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, unroll: Unroll) -> Tensor:
        ctx.unroll = unroll
        ctx.shape = images.shape
        return unroll.windows(unroll.padded(images)).flatten(3)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (slope,) = slopes
        return ctx.unroll.folded(slope, ctx.shape), None


class Chain:
    """Layers with parameters, and what lies before, between and after them.

    Args:
        affine: the layers with parameters.
        between: what lies before each of them, and what lies after the last.
    """

    def __init__(self, affine: Sequence[Affine], between: Sequence[Between]) -> None:
        self._affine = affine
        self._between = between

    @classmethod
    def of(cls, network: nn.Module, trained: Container[str]) -> "Chain | None":
        """The layers of a network that is nothing but a sequence of layers known here; else None.

        Args:
            network: a module whose forward is torch's own.
            trained: the names of the parameters that are trained; those of all layers must be.
        """
        affine: list[Affine] = []
        between: list[list[Between]] = [[]]
        for name, layer in network.named_modules(remove_duplicate=False):
            if type(layer) is nn.Sequential:
                continue
            if type(layer) in PLAIN and not getattr(layer, "return_indices", False):
                between[-1].append(_out_of_place(layer))
                continue
            if not _is_product(layer):
                return None
            if isinstance(layer, nn.Conv2d):
                between[-1].append(_unroll(layer))
            affine.append(Affine.of(name, layer))
            between.append([])
        names = [name for each in affine for name in each.names]
        if not affine or not all(name in trained for name in names):
            return None
        between[-1].append(lambda features: features.flatten(1))
        return cls(affine, [_one_after_the_other(layers) for layers in between])

    def entered(self, x: Tensor) -> Tensor:
        """x as the first layer with parameters sees it, 1 × rows × …: the same for every w."""
        with torch.no_grad():
            return self._between[0](x)[None]

    def passed(self, entered: Tensor, parameters: Mapping[str, Tensor]) -> "Passed":
        """The way of rows that have ``entered`` through all layers.

        Args:
            entered: from ``entered``.
            parameters: by name, each one settings × …
        """
        settings = len(parameters[self._affine[0].weight])
        inputs = [entered]
        outputs = []
        for affine, after in zip(self._affine, self._between[1:], strict=True):
            output = affine.forward(inputs[-1].detach(), parameters)
            outputs.append(output.requires_grad_())
            inputs.append(_by_setting(after(output), settings))
        return Passed(self._affine, parameters, inputs, outputs)


@dataclass(frozen=True, eq=False)
class Passed:
    """What rows have left on their way through a chain.

    Args:
        affine: the layers with parameters.
        parameters: by name, each one settings × …
        inputs: of each layer, and the output of the chain.
        outputs: of each layer.
    """

    affine: Sequence[Affine]
    parameters: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    @property
    def features(self) -> Tensor:
        """settings × rows × features."""
        return self.inputs[-1].detach()

    def gradients(self, slope: Tensor, users: int) -> Gradients:
        """The gradients of all parameters, settings × users × …

        Args:
            slope: the gradient of the features, settings × rows × features.
            users: whose rows they are, the same number for each, one user after the other.
        """
        found: Gradients = {}
        settings = len(slope)
        for place in reversed(range(len(self.affine))):
            affine = self.affine[place]
            (slope,) = torch.autograd.grad(self.inputs[place + 1], self.outputs[place], slope)
            found |= affine.gradients(self.inputs[place].detach(), slope, settings, users)
            if place:
                slope = _by_setting(affine.backward(slope, self.parameters), settings)
        return found


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b by numpy: for such narrow matrices OpenBLAS is up to twice as fast as torch's MKL, as
    measured on an AMD processor."""
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def _by_setting(rows: Tensor, settings: int) -> Tensor:
    """settings × rows × …, from the rows of one setting after the other."""
    return rows.reshape(settings, -1, *rows.shape[1:])


def _is_product(layer: nn.Module) -> bool:
    """Whether it is a linear layer, or a convolution that is a product of patches and kernel."""
    if type(layer) is nn.Linear:
        return True
    if type(layer) is not nn.Conv2d:
        return False
    plain = layer.groups == 1 and layer.dilation == (1, 1)
    return plain and layer.padding_mode == "zeros" and isinstance(layer.padding, tuple)


def _out_of_place(layer: nn.Module) -> nn.Module:
    """The layer, or one like it that leaves its input alone: gradients need that."""
    if not getattr(layer, "inplace", False):
        return layer
    other = copy.copy(layer)
    other.inplace = False  # type: ignore[assignment]
    return other


def _unroll(layer: nn.Conv2d) -> Unroll:
    high, wide = layer.kernel_size
    down, across = layer.stride
    assert not isinstance(layer.padding, str)
    above, beside = layer.padding
    return Unroll((high, wide), (down, across), (above, beside))


def _one_after_the_other(layers: Sequence[Between]) -> Between:
    def between(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return between
