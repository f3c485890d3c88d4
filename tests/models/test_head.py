"""Solved heads of networks, against the solvers on the features before them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr_ppsgd.models.logistic import Logistic
from flwr_ppsgd.models.ridge import Ridge
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd.lab.cnn import paper_cnn
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.additive_head import AdditiveHead
from flwr_ppsgd.models.linear import Loss
from flwr_ppsgd.models.split import SplitModel
from flwr_ppsgd.models.torch_app import torch_learner
from flwr_ppsgd.wire import Order

ORDER = Order(round=1, step=0.0, clip_norm=1.0, reduction="mean", publishes=True, visit=1)
WHOLE = replace(ORDER, full_batch=True)
ROWS, WIDTH, FEATURES, CLASSES = 24, 6, 5, 3


class Network(nn.Module):
    """Features, then a head."""

    def __init__(self, bias: bool = True, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, FEATURES), nn.Tanh())
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias)
        self.last = last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.head(self.body(x)))
        return scores


def double(module: nn.Module) -> nn.Module:
    return module.to(torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def rows(loss: str = "softmax") -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, WIDTH))
    classes = (x @ random.normal(size=(WIDTH, CLASSES))).argmax(axis=1)
    if loss == "softmax":
        return x, classes
    return x, np.eye(CLASSES)[classes] + 0.1 * random.normal(size=(ROWS, CLASSES))


def targets(y: Any) -> Any:
    return np.eye(CLASSES)[y] if y.ndim == 1 else y


def seen(network: nn.Module, x: Any) -> Any:
    with torch.no_grad():
        return network(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize(("loss", "kind"), [("squared", Ridge), ("softmax", Logistic)])
def test_an_additive_head_is_solved_on_its_features(loss: Loss, kind: type[Ridge]) -> None:
    network = double(nn.Sequential(nn.Linear(WIDTH, FEATURES), nn.Tanh()))
    start = torch.randn(FEATURES, CLASSES)
    model = AdditiveHead(network, FEATURES, CLASSES, loss, head=start)
    x, y = rows(loss)
    learner = model.learner(Minibatches(x, y, 7, seed=0, user=0))
    w = model.initial_w()
    solution = learner.solve(w)
    shared = model.shared_head(w)
    expected = kind(seen(network, x), targets(y)).solve(shared)
    np.testing.assert_allclose(solution.theta, expected.theta, rtol=1e-6, atol=1e-8)
    before = model.evaluate(w, 0 * shared, (x, y))["loss"]
    assert model.evaluate(w, solution.theta, (x, y))["loss"] < before


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize(("loss", "kind"), [("squared", Ridge), ("softmax", Logistic)])
def test_a_linear_layer_at_the_end_is_solved(
    bias: bool, additive: bool, loss: Loss, kind: type[Ridge]
) -> None:
    """Shared or not: the personal head is the solver's on (features, 1)."""
    network = double(Network(bias))
    assert isinstance(network, Network)
    x, y = rows(loss)
    model = SplitModel(network, "head.*", loss, additive=additive)
    learner = model.learner(Minibatches(x, y, 7, seed=0, user=0))
    w = model.initial_w()
    whole = model.module_with(w, learner.solve(w).theta)
    features = seen(network.body, x)
    head = network.head.weight.detach().numpy().T
    if bias:
        features = np.hstack([features, np.ones((ROWS, 1))])
        head = np.vstack([head, network.head.bias.detach().numpy()])
    own = kind(features, targets(y)).solve(head.reshape(-1)).theta.reshape(head.shape)
    np.testing.assert_allclose(seen(whole, x), features @ (head + own), atol=1e-6)


def test_losses_of_torch_are_recognised() -> None:
    x, y = rows()
    by_name = SplitModel(double(Network()), "head.*", "softmax")
    torch.manual_seed(0)
    module = SplitModel(double(Network()), "head.*", nn.CrossEntropyLoss())
    torch.manual_seed(0)
    smoothed = SplitModel(double(Network()), "head.*", nn.CrossEntropyLoss(label_smoothing=0.1))
    found = []
    for model in (by_name, module, smoothed):
        learner = model.learner(Minibatches(x, y, 7, seed=0, user=0))
        found.append(learner.solve(model.initial_w()))
    assert found[0].chosen == found[1].chosen
    assert "epochs" in found[2].chosen


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Softplus()])
def test_a_layer_that_is_not_the_last_is_trained_instead(last: nn.Module) -> None:
    x, y = rows()
    model = SplitModel(double(Network(last=last)), "head.*")
    learner = model.learner(Minibatches(x, y, 7, seed=0, user=0))
    solution = learner.solve(model.initial_w())
    assert solution.chosen["loo"] < solution.chosen["loo-shared"]


def test_the_papers_cnn_is_solved_with_its_own_targets() -> None:
    model = paper_cnn(0, dtype=torch.float64)
    random = np.random.default_rng(0)
    x = random.random((12, 784))
    y = random.integers(0, 10, 12)
    learner = model.learner(Minibatches(x, y, 5, seed=0, user=0))
    w = model.initial_w()
    module: Any = model.module_with(w)
    expected = Ridge(seen(module.network, x), np.eye(10)[y] - 0.1).solve(model.shared_head(w))
    np.testing.assert_allclose(learner.solve(w).theta, expected.theta, rtol=1e-6, atol=1e-8)


def test_a_loader_is_solved_batch_by_batch_and_rows_with_nan_are_left_out() -> None:
    x, y = rows()
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    module = double(Network())
    held = torch_learner(module, "head.*", DataLoader(data, batch_size=5), device="cpu")
    one = torch_learner(module, "head.*", DataLoader(data, batch_size=ROWS), device="cpu")
    w = SplitModel(module, "head.*").initial_w()
    np.testing.assert_allclose(held.solve(w).theta, one.solve(w).theta, atol=1e-6)
    spoilt = np.vstack([x, np.full((1, WIDTH), np.nan)])
    learner = SplitModel(module, "head.*").learner(
        Minibatches(spoilt, np.append(y, 0), 7, seed=0, user=0)
    )
    np.testing.assert_allclose(learner.solve(w).theta, one.solve(w).theta, atol=1e-6)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_full_batch_is_all_rows(lazy: bool) -> None:
    x, y = rows()
    module = double(Network())
    model = SplitModel(module, "head.*")
    w, theta = model.initial_w(), model.initial_theta()
    expected = model.gradients(w, theta, (x, y), "mean")
    if lazy:
        data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        learner = torch_learner(module, "head.*", DataLoader(data, batch_size=5), device="cpu")
    else:
        learner = model.learner(Minibatches(x, y, 5, seed=0, user=0))
    for ours, theirs in zip(learner.gradients(w, theta, WHOLE), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    few = learner.gradients(w, theta, ORDER)[0]
    assert not np.allclose(few, expected[0])


def test_gradients_are_taken_at_zero_or_at_a_trained_theta() -> None:
    """θ = 0 is a model if it is added to w; else a head is solved, other blocks train on."""
    x, y = rows()
    minibatches = Minibatches(x, y, 5, seed=0, user=0)
    added = SplitModel(double(Network()), "head.*", additive=True)
    kept = np.ones_like(added.initial_theta())
    anchor = added.learner(minibatches).anchor(added.initial_w(), kept, ORDER)
    np.testing.assert_array_equal(anchor, np.zeros_like(kept))
    split = SplitModel(double(Network()), "head.*")
    learner = split.learner(minibatches)
    w = split.initial_w()
    np.testing.assert_array_equal(learner.anchor(w, kept, ORDER), learner.solve(w).theta)
    body = SplitModel(double(Network()), "body.*")
    learner = body.learner(minibatches)
    start = body.initial_theta()
    first = learner.anchor(body.initial_w(), start, ORDER)
    second = learner.anchor(body.initial_w(), first, ORDER)
    losses = [
        body.evaluate(body.initial_w(), each, (x, y))["loss"] for each in (start, first, second)
    ]
    assert losses[0] > losses[1] > losses[2]


def test_the_size_of_the_own_solution_is_known_where_w_is_a_head_alone() -> None:
    x, y = rows("squared")
    network = double(nn.Sequential(nn.Linear(WIDTH, FEATURES), nn.Tanh()))
    learnt = AdditiveHead(network, FEATURES, CLASSES, "squared")
    minibatches = Minibatches(x, y, 5, seed=0, user=0)
    assert learnt.learner(minibatches).own_size() == 0.0
    frozen = AdditiveHead(network.requires_grad_(False), FEATURES, CLASSES, "squared")
    expected = Ridge(seen(network, x), y).own_size()
    assert frozen.learner(minibatches).own_size() == pytest.approx(expected)
