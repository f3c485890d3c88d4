"""θ's own training: equations by hand, against torch itself, and the limits."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flwr_ppsgd import Minibatches, Order, SplitModel, torch_learner
from flwr_ppsgd.models.torch_training import PersonalTraining, SplitLearner, TrainedSplitLearner
from tests.support.toy import Floats

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10
Y = torch.arange(6) % 3


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def model() -> SplitModel:
    return SplitModel(module(), "2.*")


def order(step: float = 0.1, visit: int = 1) -> Order:
    return Order(1, step, 1.0, "mean", True, visit=visit)


def learner(**options: Any) -> Any:
    """All rows in every minibatch."""
    return model().learner(Minibatches(X, Y, 6, seed=0, user=0), **options)


def after(theta: Floats | None = None, visit: int = 1, step: float = 0.1, **options: Any) -> Floats:
    own = learner(**options)
    start = own.initial_theta() if theta is None else theta
    found: Floats = own.personal_step(model().initial_w(), start, order(step, visit))
    return found


def gradient(theta: Floats) -> Floats:
    return model().gradients(model().initial_w(), theta, (X, Y), "mean")[1]


def test_without_options_theta_takes_the_algorithms_own_step() -> None:
    assert type(learner()) is SplitLearner
    assert not hasattr(learner(), "personal_step")
    assert type(learner(personal_steps=2)) is TrainedSplitLearner


def test_a_class_takes_the_servers_step() -> None:
    """SGD, one step: θ − s_θ·g_θ."""
    theta = model().initial_theta()
    np.testing.assert_allclose(
        after(optimizer=torch.optim.SGD), theta - 0.1 * gradient(theta), rtol=1e-12
    )


def test_several_steps_with_weight_decay_by_hand() -> None:
    """θ ← θ − s_θ·(g_θ + λθ), three times."""
    theta = model().initial_theta()
    for _ in range(3):
        theta = theta - 0.1 * (gradient(theta) + 0.5 * theta)
    np.testing.assert_allclose(after(personal_steps=3, weight_decay=0.5), theta, rtol=1e-10)


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(torch.optim.Adam, lr=0.05),
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        functools.partial(torch.optim.RMSprop, lr=0.01),
    ],
)
def test_any_optimizer_moves_theta_as_torch_moves_a_head(factory: Any) -> None:
    network = module()
    head = network[2]  # type: ignore[index]
    optimizer = factory(head.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(X), Y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = torch.cat([value.detach().reshape(-1) for value in head.parameters()])
    found = after(optimizer=factory, personal_steps=4)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-8)


def test_an_optimizer_that_needs_a_closure() -> None:
    theta = model().initial_theta()
    found = after(optimizer=functools.partial(torch.optim.LBFGS, max_iter=5))
    w = model().initial_w()
    before = model().evaluate(w, theta, (X, Y))["loss"]
    assert model().evaluate(w, found, (X, Y))["loss"] < before


def test_global_learning_leaves_theta_alone() -> None:
    """s_θ = 0, the limit α = ∞."""
    theta = model().initial_theta()
    found = after(step=0.0, optimizer=functools.partial(torch.optim.Adam, lr=1.0))
    np.testing.assert_array_equal(found, theta)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "personal_steps must be a whole number"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number from 0"),
        ({"optimizer": "adam"}, r"optimizer must be a class of torch.optim.*'adam'"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PersonalTraining(**options)


def test_a_factory_that_makes_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"returned a list: return a torch.optim.Optimizer"):
        after(optimizer=lambda parameters: parameters)


def test_theta_that_is_added_moves_as_torch_moves_the_layer() -> None:
    """w + θ after five steps is the head that torch trains on the same minibatches."""
    own = torch_learner(module(), "2.*", [(X, Y)], additive=True, personal_steps=5)
    w = SplitModel(module(), "2.*", additive=True).initial_w()
    theta = own.personal_step(w, own.initial_theta(), order())  # type: ignore[attr-defined]
    network = module()
    head = network[2]  # type: ignore[index]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(X), Y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = torch.cat([value.detach().reshape(-1) for value in head.parameters()])
    np.testing.assert_allclose(w[-theta.size :] + theta, expected.numpy(), rtol=1e-10)
