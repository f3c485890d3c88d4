"""Known layers for a whole cohort: the gradients are those of one user after the other."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from flwr_ppsgd.models.chain import Chain
from flwr_ppsgd.models.split import AdditiveHead
from tests.support.toy import Floats

SETTINGS, USERS, ROWS, CLASSES = 3, 4, 5, 3

# layers on images of 2 × 9 × 8 pixels, and the number of their outputs
NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "linear": (lambda: [nn.Flatten(), nn.Linear(144, 6), nn.ReLU()], 6),
    "in place": (lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True)], 126),
    "no bias": (lambda: [nn.Flatten(), nn.Linear(144, 6, bias=False), nn.Tanh()], 6),
    "convolution last": (lambda: [nn.Conv2d(2, 3, 3, stride=2)], 36),
    "padding": (lambda: [nn.Conv2d(2, 3, (4, 3), stride=(2, 1), padding=(3, 1)), nn.ReLU()], 144),
    "stride beyond the kernel": (lambda: [nn.Conv2d(2, 3, 2, stride=3), nn.GELU()], 27),
    "two convolutions": (
        lambda: [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(4, 3, 4, stride=2, bias=False),
            nn.Sequential(nn.ReLU(), nn.AvgPool2d(2, stride=1)),
            nn.Flatten(),
            nn.Linear(6, 5),
            nn.Sigmoid(),
        ],
        5,
    ),
}

REFUSED: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
    "two outputs": lambda: nn.Sequential(nn.Linear(2, 2), nn.MaxPool2d(2, return_indices=True)),
    "groups": lambda: nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)),
    "dilation": lambda: nn.Sequential(nn.Conv2d(2, 2, 3, dilation=2)),
    "padding by name": lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding="same")),
    "reflected padding": lambda: nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")
    ),
    "normalisation": lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
    "the same layer twice": lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2),
    "own forward": lambda: nn.TransformerEncoderLayer(2, 1),
    "nothing to train": lambda: nn.Sequential(nn.ReLU()),
}


def model_of(name: str) -> AdditiveHead:
    torch.manual_seed(0)
    layers, features = NETWORKS[name]
    head = torch.randn(features, CLASSES)
    return AdditiveHead(nn.Sequential(*layers()).double(), features, CLASSES, head=head)


def cohort() -> tuple[Floats, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    source = np.random.default_rng(1)
    x = source.normal(size=(USERS, ROWS, 2, 9, 8))
    return x, source.integers(CLASSES, size=(USERS, ROWS))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_one_user_after_the_other(
    name: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, for several settings with weights of their own, and without ``vmap`` over the
    network."""
    model = model_of(name)
    source = np.random.default_rng(2)
    start = model.initial_w()
    ws = start + 0.1 * source.normal(size=(SETTINGS, start.size))
    thetas = source.normal(size=(SETTINGS, USERS, model.initial_theta().size))
    x, y = cohort()
    expected = {}
    for setting, user in itertools.product(range(SETTINGS), range(USERS)):
        rows = (x[user], y[user])
        expected[setting, user] = model.gradients(
            ws[setting],
            thetas[setting, user],
            rows,
            reduction,  # type: ignore[arg-type]
        )
    monkeypatch.delattr(torch.func, "functional_call")
    entered = model.entered((x, y))
    g_w, g_theta = model.cohort_gradients(ws, thetas, entered, reduction)  # type: ignore[arg-type]
    for place, (one_w, one_theta) in expected.items():
        np.testing.assert_allclose(g_w[place], one_w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(g_theta[place], one_theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_left_to_torch(name: str) -> None:
    network = REFUSED[name]()
    trained = [name for name, _ in network.named_parameters()]
    assert Chain.of(network, trained) is None


def test_a_frozen_layer_is_left_to_torch() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert Chain.of(network, ["1.weight", "1.bias"]) is None
    assert Chain.of(network, ["0.weight", "0.bias", "1.weight", "1.bias"]) is not None
