"""The paper's network against one recorded round of the authors' code, in float64."""

import numpy as np
import pytest
import torch

from flwr_ppsgd import FixedSize, Release
from flwr_ppsgd.algorithm import client_step
from flwr_ppsgd.arrays import Layout
from flwr_ppsgd.lab.cnn import FEATURES, mean_square, paper_cnn
from flwr_ppsgd.lab.network_engine import cohort_gradients
from flwr_ppsgd.models.torch_model import AdditiveHead
from tests.support.paths import GOLDEN
from tests.support.steps import noisy_step
from tests.support.toy import Floats

USERS, HEAD = 10, 320


def recorded() -> dict[str, Floats]:
    with np.load(GOLDEN / "cnn_gradients.npz") as file:
        return {key: file[key] for key in file.files if key != "settings"}


RECORDED = recorded()


def from_channels_last(parameters: list[Floats]) -> dict[str, torch.Tensor]:
    """The network's parameters from the authors' framework, which has channels last.

    Kernels are height × width × in × out there and out × in × height × width here. Dense matrices
    are in × out there and out × in here; their inputs are flattened by height, width, channel
    there, by channel, height, width here.
    """
    tensors = [torch.as_tensor(np.asarray(array)) for array in parameters]
    kernel1, bias1, kernel2, bias2, dense, bias3 = tensors
    by_place = dense.reshape(4, 4, 32, FEATURES)  # height × width × channels × outputs
    return {
        "1.weight": kernel1.permute(3, 2, 0, 1),
        "1.bias": bias1.reshape(-1),
        "4.weight": kernel2.permute(3, 2, 0, 1),
        "4.bias": bias2.reshape(-1),
        "8.weight": by_place.permute(3, 2, 0, 1).reshape(FEATURES, -1),
        "8.bias": bias3,
    }


def flat(model: AdditiveHead, head: Floats, parameters: list[Floats]) -> Floats:
    """(w, W) as the model's flat shared vector, from the authors' layout."""
    values = {"head.weight": torch.as_tensor(head).T}
    values |= {f"network.{name}": value for name, value in from_channels_last(parameters).items()}
    names = list(model.initial_arrays())
    assert set(names) == set(values)
    return np.concatenate([values[name].reshape(-1).numpy() for name in names])


def by_class(heads: Floats) -> Floats:
    """Users' heads as ``nn.Linear`` has them, outputs × features, each as one row."""
    transposed: Floats = heads.reshape(USERS, FEATURES, -1).transpose(0, 2, 1)
    return transposed.reshape(USERS, -1)


def shared_vector(model: AdditiveHead) -> Floats:
    arrays = model.initial_arrays()
    return Layout.of(arrays).flatten(arrays).copy()


def parameters(prefix: str) -> list[Floats]:
    return [RECORDED[f"{prefix}{i}"] for i in range(6)]


def rows(user: int) -> tuple[Floats, Floats]:
    return RECORDED["X"][:, user].reshape(-1, 784), RECORDED["y"][:, user]


@pytest.mark.parametrize("clip", ["0.1", "0.55"])
def test_a_round_is_that_of_the_authors_code(clip: str) -> None:
    """One joint clip over (W, w): at C=.1 everyone is clipped, at C=.55 some users are."""
    model = paper_cnn(0, dtype=torch.float64)
    w = flat(model, RECORDED["w"], parameters("param"))
    sent = []
    for user in range(USERS):
        theta = by_class(RECORDED["th"])[user]
        g_w, g_theta = model.gradients(w, theta, rows(user), "mean")
        assert np.linalg.norm(g_w) == pytest.approx(RECORDED["user_grad_norm"][user], rel=1e-8)
        expected = by_class(RECORDED[f"C{clip}_gth"])[user]
        np.testing.assert_allclose(g_theta, expected, rtol=0, atol=1e-8)
        vector, _ = client_step(theta, g_w, g_theta, float(clip), 1.0)
        sent.append(vector)
    release = Release(FixedSize(USERS, USERS), clip_norm=float(clip), noise_multiplier=0.0)
    mean = -noisy_step(np.zeros_like(w), sent, release, 1.0, noise=0.0)
    expected = flat(model, RECORDED[f"C{clip}_gw"], parameters(f"C{clip}_gp"))
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-8)


def test_a_cohort_at_once_has_the_gradients_of_the_authors_code() -> None:
    model = paper_cnn(0, dtype=torch.float64)
    w = flat(model, RECORDED["w"], parameters("param"))
    thetas = by_class(RECORDED["th"])
    x, y = zip(*[rows(user) for user in range(USERS)], strict=True)
    batch = (model.tensor(np.stack(x)), model.tensor(np.stack(y)))
    g_w, g_theta = cohort_gradients(model, w, thetas, batch, "mean")
    norms = np.linalg.norm(g_w, axis=1)
    np.testing.assert_allclose(norms, RECORDED["user_grad_norm"].reshape(-1), rtol=1e-8)
    expected = by_class(RECORDED["C0.1_gth"])
    np.testing.assert_allclose(g_theta, expected, rtol=0, atol=1e-8)


def test_the_loss_is_that_of_the_authors_code() -> None:
    model = paper_cnn(0, dtype=torch.float64)
    w = flat(model, RECORDED["w"], parameters("param"))
    losses = [model.evaluate(w, by_class(RECORDED["th"])[i], rows(i))["loss"] for i in range(USERS)]
    np.testing.assert_allclose(losses, RECORDED["loss"], rtol=1e-8)


def test_it_has_26000_shared_and_320_personal_parameters() -> None:
    model = paper_cnn(0)
    assert shared_vector(model).size == 26_000
    assert model.initial_theta().size == HEAD
    assert not model.initial_theta().any()


def test_it_starts_as_widely_spread_as_the_authors_network() -> None:
    """Standard deviations of n normal values agree to about 5/√(2n) on either side."""
    arrays = paper_cnn(3).initial_arrays()
    golden = {"head.weight": torch.as_tensor(RECORDED["w"]).T}
    golden |= {
        f"network.{name}": value for name, value in from_channels_last(parameters("param")).items()
    }
    for name, array in arrays.items():
        ours, theirs = array.numpy(), golden[name].numpy()
        assert abs(np.log(ours.std() / theirs.std())) < 2 * 5 / np.sqrt(2 * ours.size), name


def test_the_seed_alone_decides_where_it_starts() -> None:
    torch.manual_seed(1)
    first = shared_vector(paper_cnn(5))
    torch.manual_seed(2)
    np.testing.assert_array_equal(first, shared_vector(paper_cnn(5)))
    assert not np.array_equal(first, shared_vector(paper_cnn(6)))


def test_class_numbers_stand_for_one_hot_minus_a_tenth() -> None:
    """(1/2)((1 − .9)² + (0 + .1)²) = .01 where the class is 0 and the prediction (1, 0)."""
    prediction = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert mean_square(prediction, torch.tensor([0])).item() == pytest.approx(0.01)
    assert mean_square(prediction, torch.tensor([1])).item() == pytest.approx(1.01)
    targets = torch.tensor([[0.9, -0.1]], dtype=torch.float64)
    assert mean_square(prediction, targets).item() == pytest.approx(0.01)


def test_accuracy_is_measured_on_class_numbers() -> None:
    model, (x, y) = paper_cnn(0, dtype=torch.float64), rows(0)
    w = flat(model, RECORDED["w"], parameters("param"))
    measures = model.evaluate(w, model.initial_theta(), (x, y.argmax(axis=1)))
    features = torch.as_tensor(RECORDED["features_user0"]).numpy()
    assert measures["accuracy"] == np.mean(
        (features @ RECORDED["w"]).argmax(axis=1) == y.argmax(axis=1)
    )
