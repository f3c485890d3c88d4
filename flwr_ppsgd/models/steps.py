"""Layers without parameters, there and back, for the chain of a whole cohort.

A step is bound to the arrays it works on, once for each number of rows: calls are then few and
short, and memory stays in the caches. Images are rows × channels × height × width, with the
channels last in memory.

torch differentiates most layers. Those of the usual networks are written out, because torch's own
pool takes longer than the convolution before it if there are few channels.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

Work: TypeAlias = Callable[[], object]

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


@dataclass(frozen=True, eq=False)
class Bound:
    """A step with its arrays.

    Args:
        y: the output.
        slope: for the gradient of the output.
        forward: writes y, from x; x may be overwritten.
        backward: writes the gradient of x, from ``slope``; ``slope`` may be overwritten.
    """

    y: Tensor
    slope: Tensor
    forward: Work
    backward: Work


class Step(Protocol):
    """A layer without parameters."""

    def bound(self, x: Tensor, slope: Tensor) -> Bound:
        """This step on x, with ``slope`` for the gradient of x."""


def step_of(layer: nn.Module) -> Step | None:
    """A layer as a step; None if it is none of those known here."""
    if type(layer) not in PLAIN or getattr(layer, "return_indices", False):
        return None
    if isinstance(layer, nn.ReLU):
        return Rectify()
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return Flat()
    if isinstance(layer, nn.MaxPool2d) and _is_of_pairs(layer):
        return PairPool(_two(layer.stride))
    return ByTorch(_out_of_place(layer))


@dataclass(frozen=True)
class ByTorch:
    """Any layer, as torch differentiates it."""

    layer: nn.Module

    def bound(self, x: Tensor, slope: Tensor) -> Bound:
        leaf = x.detach().requires_grad_()
        found = self.layer(leaf)
        y = torch.empty_like(found)

        def forward() -> None:
            nonlocal found
            found = self.layer(leaf)
            y.copy_(found.detach())

        def backward() -> None:
            slope.copy_(torch.autograd.grad(found, leaf, slope_y)[0])

        slope_y = torch.empty_like(y)
        return Bound(y, slope_y, forward, backward)


@dataclass(frozen=True)
class Rectify:
    """max(x, 0), in place."""

    def bound(self, x: Tensor, slope: Tensor) -> Bound:
        write = torch.ops.aten.threshold_backward.grad_input
        return Bound(x, slope, x.relu_, lambda: write(slope, x, 0, grad_input=slope))


@dataclass(frozen=True)
class InOrder:
    """The same numbers, in memory in the order of the axes, as a linear layer needs them."""

    def bound(self, x: Tensor, slope: Tensor) -> Bound:
        if x.is_contiguous() and slope.is_contiguous():
            return Bound(x, slope, _nothing, _nothing)
        y = torch.empty(x.shape, dtype=x.dtype)
        slope_y = torch.empty_like(y)
        return Bound(y, slope_y, lambda: y.copy_(x), lambda: slope.copy_(slope_y))


@dataclass(frozen=True)
class Flat:
    """Each row as one vector."""

    def bound(self, x: Tensor, slope: Tensor) -> Bound:
        rows = InOrder().bound(x, slope)
        return Bound(rows.y.flatten(1), rows.slope.flatten(1), rows.forward, rows.backward)


@dataclass(frozen=True)
class PairPool:
    """The largest of 2 × 2 pixels: of two neighbours in a line, and then of two lines.

    The gradient goes to the largest, and to the first of equal ones, as in torch: the left one in
    the upper line.

    Args:
        stride: down and across.
    """

    stride: tuple[int, int]

    def bound(self, x: Tensor, slope: Tensor) -> Bound:
        if x.ndim != 4:  # images without channels
            return ByTorch(nn.MaxPool2d(2, self.stride)).bound(x, slope)
        across = self._along(3, x, slope)
        down = self._along(2, across.y, across.slope)

        def forward() -> None:
            across.forward()
            down.forward()

        def backward() -> None:
            down.backward()
            across.backward()

        return Bound(down.y, down.slope, forward, backward)

    def _along(self, axis: int, x: Tensor, slope: Tensor) -> Bound:
        first, second = self._pairs(axis, x)
        slope_first, slope_second = self._pairs(axis, slope)
        y = torch.empty_like(first)
        slope_y = torch.empty_like(first)
        is_second = torch.empty_like(first)  # 1 or 0
        not_first = slope if self.stride[axis - 2] > 1 else slope.narrow(axis, -1, 1)

        def backward() -> None:
            torch.gt(second, first, out=is_second)
            not_first.zero_()
            torch.addcmul(slope_y, slope_y, is_second, value=-1, out=slope_first)
            slope_second.addcmul_(slope_y, is_second)

        return Bound(y, slope_y, lambda: torch.maximum(first, second, out=y), backward)

    def _pairs(self, axis: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second one of all pairs, as views."""
        apart = self.stride[axis - 2]
        last = x.shape[axis] - 1
        before = (slice(None),) * axis
        return x[(*before, slice(0, last, apart))], x[(*before, slice(1, None, apart))]


@dataclass(frozen=True)
class Unroll:
    """Images → the patches that a convolution sees: rows × height × width × patch."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def bound(self, x: Tensor, slope: Tensor) -> Bound:
        padded, inside = self._padded(x)
        sums, slope_inside = self._padded(slope)
        windows = self._windows(padded)
        patches = torch.empty(windows.shape, dtype=x.dtype)
        slope_patches = torch.empty_like(patches)
        additions = list(self._additions(self._windows(sums), slope_patches))

        def forward() -> None:
            inside.copy_(x)
            patches.copy_(windows)

        def backward() -> None:
            sums.zero_()
            for target, part in additions:
                target.add_(part)
            slope.copy_(slope_inside)

        return Bound(patches.flatten(3), slope_patches.flatten(3), forward, backward)

    def _padded(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """rows × height × width × channels with zeros around, and the images in the middle of it,
        which are to be copied there; without padding nothing is copied."""
        rows, channels, height, width = images.shape
        high, wide = self.padding
        by_place = images.permute(0, 2, 3, 1)
        if not high and not wide and by_place.is_contiguous():
            return by_place, images
        shape = (rows, height + 2 * high, width + 2 * wide, channels)
        padded = torch.zeros(shape, dtype=images.dtype)
        inside = padded[:, high : high + height, wide : wide + width]
        return padded, inside.permute(0, 3, 1, 2)

    def _windows(self, padded: Tensor) -> Tensor:
        """The patches as a view: rows × height × width × lines × (kernel width·channels)."""
        rows, height, width, channels = padded.shape
        a_row, a_line, a_place, _ = padded.stride()
        high = (height - self.kernel[0]) // self.stride[0] + 1
        wide = (width - self.kernel[1]) // self.stride[1] + 1
        shape = (rows, high, wide, self.kernel[0], self.kernel[1] * channels)
        down = self.stride[0] * a_line
        across = self.stride[1] * a_place
        return padded.as_strided(shape, (a_row, down, across, a_line, 1))

    def _additions(self, windows: Tensor, patches: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(Where to, what): each pixel gets its sum over the patches it is in.

        Patches some way apart do not overlap, so they are added in one go.
        """
        down = -(-self.kernel[0] // self.stride[0])  # rounded up
        across = -(-self.kernel[1] // self.stride[1])
        for line in range(down):
            for place in range(across):
                apart = (slice(None), slice(line, None, down), slice(place, None, across))
                yield windows[apart], patches[apart]


def _nothing() -> None:
    """There is nothing to do."""


def _is_of_pairs(layer: nn.MaxPool2d) -> bool:
    """Whether it is over 2 × 2 pixels and nothing else is special."""
    plain = _two(layer.padding) == (0, 0) and _two(layer.dilation) == (1, 1)
    return _two(layer.kernel_size) == (2, 2) and plain and not layer.ceil_mode


def _two(size: int | tuple[int, ...]) -> tuple[int, int]:
    """A size of both axes, or one for each."""
    if isinstance(size, int):
        return size, size
    down, across = size
    return down, across


def _out_of_place(layer: nn.Module) -> nn.Module:
    """The layer, or one like it that leaves its input alone: gradients need that."""
    if not getattr(layer, "inplace", False):
        return layer
    other = copy.copy(layer)
    other.inplace = False  # type: ignore[assignment]
    return other
