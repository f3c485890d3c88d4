"""Each step against torch's own layer and its derivative."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flwr_ppsgd.models.steps import Bound, ByTorch, Flat, PairPool, Rectify, Unroll, step_of

POOLS = {
    "overlapping": lambda: nn.MaxPool2d(2, stride=1),
    "side by side": lambda: nn.MaxPool2d(2),
    "apart": lambda: nn.MaxPool2d(2, stride=3),
    "by axis": lambda: nn.MaxPool2d((2, 2), stride=(1, 2)),
}
OTHERS = {
    "larger": lambda: nn.MaxPool2d(3),
    "padded": lambda: nn.MaxPool2d(2, padding=1),
    "dilated": lambda: nn.MaxPool2d(2, dilation=2),
    "rounded up": lambda: nn.MaxPool2d(2, ceil_mode=True),
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], type]] = {
    **{f"{name} pool": (make, PairPool) for name, make in POOLS.items()},
    **{f"{name} pool": (make, ByTorch) for name, make in OTHERS.items()},
    "relu": (nn.ReLU, Rectify),
    "relu in place": (lambda: nn.ReLU(inplace=True), Rectify),
    "elu in place": (lambda: nn.ELU(inplace=True), ByTorch),
    "flatten": (nn.Flatten, Flat),
    "flatten places": (lambda: nn.Flatten(2), ByTorch),
}


def few_values(seed: int) -> Tensor:
    """Images of small whole numbers, of which neighbours are often equal; channels are last."""
    coins = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (4, 7, 8, 3), generator=coins)
    return values.double().permute(0, 3, 1, 2)


def assert_there_and_back(bound: Bound, slope: Tensor, leaf: Tensor, expected: Tensor) -> None:
    """The step gives what torch gives, and the gradient of its input is torch's too."""
    bound.forward()
    torch.testing.assert_close(bound.y, expected.detach(), rtol=0, atol=0)
    ahead = torch.randn(expected.shape, dtype=expected.dtype)
    bound.slope.copy_(ahead)
    bound.backward()
    (of_leaf,) = torch.autograd.grad(expected, leaf, ahead)
    torch.testing.assert_close(slope, of_leaf, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_is_torchs_layer_there_and_back_in_every_call(name: str) -> None:
    """Bound once, with other values in each call: nothing is left of the call before."""
    make, kind = LAYERS[name]
    step = step_of(make())
    assert step is not None
    assert type(step) is kind
    x = torch.empty_like(few_values(0))
    slope = torch.full_like(x, torch.nan)
    bound = step.bound(x, slope)
    for seed in range(3):
        leaf = few_values(seed).requires_grad_()
        expected = make()(leaf.clone())
        x.copy_(leaf.detach())
        assert_there_and_back(bound, slope, leaf, expected)


@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
def test_patches_are_those_of_unfold_and_so_is_their_derivative(padding: tuple[int, int]) -> None:
    kernel = (3, 2)
    stride = (2, 1)
    x = torch.empty_like(few_values(0))
    slope = torch.full_like(x, torch.nan)
    bound = Unroll(kernel, stride, padding).bound(x, slope)
    for seed in range(2):
        leaf = few_values(seed).requires_grad_()
        columns = nn.functional.unfold(leaf, kernel, padding=padding, stride=stride)
        # rows × channels × lines × kernel width × places, to channels last
        by_channel = columns.unflatten(1, (3, *kernel))  # type: ignore[no-untyped-call]
        expected = by_channel.permute(0, 4, 2, 3, 1).flatten(2).reshape(bound.y.shape)
        x.copy_(leaf.detach())
        assert_there_and_back(bound, slope, leaf, expected)
