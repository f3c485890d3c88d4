"""Known layers for a whole cohort: the gradients are those of one user after the other."""

import copy
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from flwr_ppsgd.algorithm import clip
from flwr_ppsgd.models.additive_head import AdditiveHead, _lengths
from flwr_ppsgd.models.chain import Chain
from tests.support.toy import Floats

SETTINGS, USERS, ROWS, CLASSES = 3, 4, 5, 3

# layers on images of 2 × 9 × 8 pixels, and the number of their outputs
NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "linear": (lambda: [nn.Flatten(), nn.Linear(144, 6), nn.ReLU()], 6),
    "in place": (lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True)], 126),
    "no bias": (lambda: [nn.Flatten(), nn.Linear(144, 6, bias=False), nn.Tanh()], 6),
    "convolution last": (lambda: [nn.Conv2d(2, 3, 3, stride=2)], 36),
    "padding": (lambda: [nn.Conv2d(2, 3, (4, 3), stride=(2, 1), padding=(3, 1)), nn.ReLU()], 144),
    "linear on images": (lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Linear(6, 4)], 84),
    "linear after a pool": (lambda: [nn.Conv2d(2, 3, 3), nn.AvgPool2d(2), nn.Linear(3, 4)], 36),
    "linear on channels": (lambda: [nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.Linear(42, 4)], 12),
    "a pool without channels": (
        lambda: [nn.Flatten(1, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)],
        5,
    ),
    "the same in the middle": (
        lambda: [nn.Flatten(1, 2), nn.Linear(8, 8), nn.ReLU(), nn.MaxPool2d(2)],
        36,
    ),
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


@pytest.mark.parametrize("name", [*NETWORKS, "one by one"])
def test_clipped_sums_are_those_of_the_gradients(name: str) -> None:
    """With clip norms of their own, some of which clip nobody; and for a network that is left to
    torch."""
    model = model_of("two convolutions" if name == "one by one" else name)
    if name == "one by one":
        model._chain = None
    source = np.random.default_rng(3)
    start = model.initial_w()
    ws = start + 0.1 * source.normal(size=(SETTINGS, start.size))
    thetas = source.normal(size=(SETTINGS, USERS, model.initial_theta().size))
    entered = model.entered(cohort())
    g_w, g_theta = model.cohort_gradients(ws, thetas, entered, "mean")
    lengths = np.linalg.norm(g_w, axis=2)
    clip_norms = np.linspace(lengths.min() / 2, lengths.max() * 2, SETTINGS)
    sums, found_theta = model.clipped_sums(ws, thetas, entered, "mean", clip_norms)
    for setting, clip_norm in enumerate(clip_norms):
        clipped = [clip(gradient, clip_norm) for gradient in g_w[setting]]
        np.testing.assert_allclose(sums[setting], np.sum(clipped, axis=0), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found_theta, g_theta)


def test_norms_of_float32_gradients_are_summed_in_float64() -> None:
    """A million squares of 1e-4 next to one of 1e4, in float32: all but the large one would be
    lost."""
    row = torch.full((1, 1, 1_000_001), 1e-2)
    row[0, 0, 0] = 1e2
    squares = row.double().square().sum().item()
    assert _lengths(row).item() == pytest.approx(math.sqrt(squares), rel=1e-12)


def test_a_cohort_of_another_size_and_a_copy_have_arrays_of_their_own() -> None:
    model = model_of("two convolutions")
    x, y = cohort()
    for _ in range(2):
        w = model.initial_w() * np.random.default_rng(4).normal(size=model.initial_w().size)
        for users in (USERS, 1, USERS):
            thetas = np.zeros((1, users, model.initial_theta().size))
            entered = model.entered((x[:users], y[:users]))
            g_w, _ = model.cohort_gradients(w[None], thetas, entered, "mean")
            expected, _ = model.gradients(w, thetas[0, 0], (x[0], y[0]), "mean")
            np.testing.assert_allclose(g_w[0, 0], expected, rtol=0, atol=1e-12)
        model = copy.deepcopy(model)
        x = -x


def test_threads_that_share_a_model_have_arrays_of_their_own() -> None:
    model = model_of("two convolutions")
    x, y = cohort()
    thetas = np.zeros((1, USERS, model.initial_theta().size))
    entered = model.entered((x, y))
    ws = [model.initial_w() * factor for factor in (1.0, -2.0)]
    expected = [model.cohort_gradients(w[None], thetas, entered, "mean")[0] for w in ws]

    def again(place: int) -> bool:
        found, _ = model.cohort_gradients(ws[place][None], thetas, entered, "mean")
        return np.array_equal(found, expected[place])

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(again, [0, 1] * 40))


class Weighted(nn.Module):
    """A loss for each row, by weights whose mean over the batch is 1. Its ``targets`` are nobody
    else's."""

    targets = "something of its own"

    def forward(self, prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(prediction, y, reduction="none")
        weights = y + 1.0
        return losses * weights / weights.mean()


def test_a_loss_that_joins_the_rows_of_a_user_never_joins_users() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Tanh()).double()
    model = AdditiveHead(network, 5, CLASSES, loss=Weighted(), head=torch.randn(5, CLASSES))
    x, y = cohort()
    w = model.initial_w()
    thetas = np.ones((1, USERS, model.initial_theta().size))
    found, _ = model.cohort_gradients(w[None], thetas, model.entered((x, y)), "mean")
    for user in range(USERS):
        expected, _ = model.gradients(w, thetas[0, user], (x[user], y[user]), "mean")
        np.testing.assert_allclose(found[0, user], expected, rtol=0, atol=1e-12)


def test_a_loss_of_ones_own_has_the_slopes_of_the_named_one() -> None:
    """That one goes through ``vmap``, since its rows may depend on each other."""

    def cross_entropy(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(prediction, y, reduction="none")

    x, y = cohort()
    found = []
    for loss in ("softmax", cross_entropy):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(2 * 9 * 8, 5), nn.Tanh()).double()
        model = AdditiveHead(network, 5, CLASSES, loss=loss)
        thetas = np.ones((1, USERS, model.initial_theta().size))
        entered = model.entered((x, y))
        found.append(model.cohort_gradients(model.initial_w()[None], thetas, entered, "mean"))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=1e-12)
