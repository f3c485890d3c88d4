"""A chain of common layers, for everyone in a cohort and several settings at once.

All users of a cohort share the parameters of these layers, so the rows of all users go through a
layer together; only the gradient of its parameters is a product for each user. ``vmap`` finds the
same gradients, but by slower convolutions and one setting after the other.

A layer with parameters is a matrix product here: that of a convolution is patches × kernel. What
lies between two of them are steps without parameters.
"""

import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from flwr_ppsgd.models.steps import Bound, Flat, InOrder, Step, Unroll, step_of

Parts: TypeAlias = Mapping[str, Tensor]  # by the parameter's name

PRECISIONS = (torch.float32, torch.float64)
MOST_PASSES = 2  # kept for the next call in a thread, one for each shape


@dataclass(frozen=True)
class Affine:
    """x → x·M + b over the last axis: ``nn.Linear``, or ``nn.Conv2d`` on unrolled patches.

    Args:
        weight: the name of the parameter M comes from.
        bias: the name of b; None: there is none.
        outputs: the number of them.
        kernel: channels × height × width of a convolution; None for a linear layer.
    """

    weight: str
    bias: str | None
    outputs: int
    kernel: tuple[int, int, int] | None

    @classmethod
    def of(cls, name: str, layer: nn.Linear | nn.Conv2d) -> "Affine":
        """The layer of this name in a network."""
        bias = None if layer.bias is None else f"{name}.bias"
        if isinstance(layer, nn.Linear):
            return cls(f"{name}.weight", bias, layer.out_features, None)
        height, width = layer.kernel_size
        kernel = (layer.in_channels, height, width)
        return cls(f"{name}.weight", bias, layer.out_channels, kernel)

    @property
    def names(self) -> list[str]:
        """Of its parameters."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def matrix(self, parameters: Parts) -> Tensor:
        """Mᵀ, settings × outputs × inputs. A convolution's inputs are ordered as in a patch."""
        weight = parameters[self.weight]
        if self.kernel is None:
            return weight
        by_place = weight.permute(0, 1, 3, 4, 2)  # settings × outputs × height × width × channels
        return by_place.flatten(2)

    def as_images(self, output: Tensor) -> Tensor:
        """rows × … × outputs as the steps see it: images have their channels in the middle."""
        return output if self.kernel is None else output.permute(0, 3, 1, 2)

    def in_order(self, matrix: Tensor) -> Tensor:
        """… × (outputs·inputs) from the order of Mᵀ to that of the parameter."""
        if self.kernel is None:
            return matrix
        channels, height, width = self.kernel
        by_place = matrix.view(*matrix.shape[:-1], -1, height, width, channels)
        return by_place.movedim(-1, -3).flatten(-4)


class Chain:
    """Layers with parameters, and what lies before, between and after them.

    Args:
        affine: the layers with parameters.
        between: the steps before each of them, and those after the last.
    """

    def __init__(self, affine: Sequence[Affine], between: Sequence[Sequence[Step]]) -> None:
        self._affine = affine
        self._between = between
        self._own = threading.local()  # each thread has passes of its own

    @classmethod
    def of(cls, network: nn.Module, trained: Container[str]) -> "Chain | None":
        """The layers of a network that is nothing but a sequence of layers known here; else None.

        Args:
            network: a module whose forward is torch's own.
            trained: the names of the parameters that are trained; those of all layers must be.
        """
        affine: list[Affine] = []
        between: list[list[Step]] = [[]]
        for name, layer in network.named_modules(remove_duplicate=False):
            if type(layer) is nn.Sequential:
                continue
            step = step_of(layer)
            if step is not None:
                between[-1].append(step)
                continue
            if not _is_product(layer):
                return None
            between[-1].append(_unroll(layer) if isinstance(layer, nn.Conv2d) else InOrder())
            affine.append(Affine.of(name, layer))
            between.append([])
        names = [name for each in affine for name in each.names]
        if not affine or not all(name in trained for name in names):
            return None
        between[-1].append(Flat())
        return cls(affine, between)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies make arrays of their own."""
        return Chain, (self._affine, self._between)

    def in_order(self, gradients: Parts) -> Parts:
        """From the order of ``Pass.gradients`` to that of the parameters: … × values each."""
        found = dict(gradients)
        for affine in self._affine:
            found[affine.weight] = affine.in_order(found[affine.weight])
        return found

    def entered(self, x: Tensor) -> Tensor:
        """x as the first layer with parameters sees it: the same for every w."""
        entered = x.clone()
        for step in self._between[0]:
            bound = step.bound(entered, torch.empty_like(entered))
            bound.forward()
            entered = bound.y
        return entered

    def pass_for(self, entered: Tensor, settings: int, users: int) -> "Pass":
        """The way through all layers, for rows such as these.

        Args:
            entered: from ``entered``.
            settings: the number of settings, each with parameters of its own.
            users: whose rows they are, the same number for each, one user after the other.
        """
        shape = (settings, users, *entered.shape)
        passes: dict[tuple[int, ...], Pass] = self._own.__dict__.setdefault("passes", {})
        found = passes.get(shape)
        if found is None:
            if len(passes) == MOST_PASSES:
                del passes[next(iter(passes))]
            found = Pass(self._affine, self._between[1:], entered, settings, users)
            passes[shape] = found
        return found


class Pass:
    """The way of a cohort's rows through a chain and back, with all arrays it needs: the next call
    overwrites them. Rows of one setting come after those of the other.

    Args:
        affine: the layers with parameters.
        after: the steps after each of them.
        entered: rows like those that will enter, the same for all settings.
        settings: the number of settings.
        users: whose rows they are.
    """

    def __init__(
        self,
        affine: Sequence[Affine],
        after: Sequence[Sequence[Step]],
        entered: Tensor,
        settings: int,
        users: int,
    ) -> None:
        self._layers: list[_Layer] = []
        shape = (settings * len(entered), *entered.shape[1:])
        x_shape = torch.Size(shape)
        slope_x: Tensor | None = None
        for each, steps in zip(affine, after, strict=True):
            layer = _Layer(each, steps, x_shape, slope_x, (settings, users), dtype=entered.dtype)
            self._layers.append(layer)
            x_shape = layer.y.shape
            slope_x = layer.slope
        self.features = layer.y
        self.slope = layer.slope

    def forward(self, entered: Tensor, parameters: Parts) -> None:
        """Write ``features``, rows × features.

        Args:
            entered: from ``Chain.entered``.
            parameters: by name, each one settings × …
        """
        x = entered
        for layer in self._layers:
            layer.forward(x, parameters)
            x = layer.y

    def backward(self, entered: Tensor, parameters: Parts, into: Parts) -> None:
        """Write the gradients of all parameters, from ``slope``: the gradient of ``features``.

        Args:
            entered: as in ``forward``.
            parameters: as in ``forward``.
            into: settings × users × values each; those of a matrix as in ``Affine.matrix``.
        """
        inputs = [entered, *(layer.y for layer in self._layers)]
        for place in reversed(range(len(self._layers))):
            layer = self._layers[place]
            layer.gradients(inputs[place], into)
            layer.backward(parameters)


class _Layer:
    """A layer with parameters and the steps after it, with their arrays.

    Args:
        affine: the layer.
        steps: those after it.
        shape: of its input, rows × … × inputs.
        slope: for the gradient of its input; None: nobody needs it.
        sizes: the number of settings and of users.
        dtype: of all arrays.
    """

    def __init__(
        self,
        affine: Affine,
        steps: Sequence[Step],
        shape: torch.Size,
        slope: Tensor | None,
        sizes: tuple[int, int],
        *,
        dtype: torch.dtype,
    ) -> None:
        self._affine = affine
        self._settings, self._users = sizes
        self._slope_x = slope
        self._output = torch.empty(*shape[:-1], affine.outputs, dtype=dtype)
        self._slope_output = torch.empty_like(self._output)
        self.y = affine.as_images(self._output)
        self.slope = affine.as_images(self._slope_output)
        self._after: list[Bound] = []
        for step in steps:
            bound = step.bound(self.y, self.slope)
            self._after.append(bound)
            self.y = bound.y
            self.slope = bound.slope

    def forward(self, x: Tensor, parameters: Parts) -> None:
        """Write y: x·M + b, and the steps. x has the rows of all settings, or of each the same."""
        matrix = self._affine.matrix(parameters).transpose(1, 2).contiguous()
        output = self._by_block(self._output)
        product(self._by_block(x), matrix, output)
        if self._affine.bias is not None:
            output += parameters[self._affine.bias][:, None]
        for step in self._after:
            step.forward()

    def gradients(self, x: Tensor, into: Parts) -> None:
        """Write those of Mᵀ and b, from that of y."""
        for step in reversed(self._after):
            step.backward()
        slope = self._by_block(self._slope_output, self._users)
        matrix = into[self._affine.weight].transpose(0, 1)
        matrix = matrix.view(*matrix.shape[:2], self._affine.outputs, -1)
        product(slope.transpose(2, 3), self._by_block(x, self._users), matrix)
        if self._affine.bias is not None:
            torch.sum(slope, dim=2, out=into[self._affine.bias].transpose(0, 1))

    def backward(self, parameters: Parts) -> None:
        """Write that of x."""
        if self._slope_x is not None:
            matrix = self._affine.matrix(parameters).contiguous()
            product(self._by_block(self._slope_output), matrix, self._by_block(self._slope_x))

    def _by_block(self, rows: Tensor, blocks: int | None = None) -> Tensor:
        """blocks × settings × places × values, or blocks × 1 × … if settings share their rows.

        A product takes one block of all settings after the other, so that what settings share is
        still in a cache. Images are many places, so that a user is a block.
        """
        if blocks is None:
            blocks = 1 if self._affine.kernel is None else self._users
        settings = self._settings * rows.shape[:-1].numel() // self._output.shape[:-1].numel()
        return rows.view(settings, blocks, -1, rows.shape[-1]).transpose(0, 1)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a·b by numpy: for such narrow matrices OpenBLAS is up to twice as fast as torch's MKL, as
    measured on an AMD processor."""
    target = None if out is None else out.numpy()
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy(), out=target))


def _is_product(layer: nn.Module) -> bool:
    """Whether it is a linear layer, or a convolution that is a product of patches and kernel."""
    if type(layer) is nn.Linear:
        return True
    if type(layer) is not nn.Conv2d:
        return False
    plain = layer.groups == 1 and layer.dilation == (1, 1)
    return plain and layer.padding_mode == "zeros" and isinstance(layer.padding, tuple)


def _unroll(layer: nn.Conv2d) -> Unroll:
    high, wide = layer.kernel_size
    down, across = layer.stride
    assert not isinstance(layer.padding, str)
    above, beside = layer.padding
    return Unroll((high, wide), (down, across), (above, beside))
