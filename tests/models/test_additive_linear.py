"""The additive linear model: gradients against autograd, measures against numbers done by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.func import grad

from flwr_ppsgd.algorithm import Reduction
from flwr_ppsgd.learner import SHARED, Minibatches
from flwr_ppsgd.models.additive_linear import AdditiveLinear, Loss, columns_of
from flwr_ppsgd.models.solve import OwnProblem, solution
from flwr_ppsgd.recipe import Matrix
from flwr_ppsgd.wire import Order

FEATURES, OUTPUTS, ROWS = 4, 3, 6


class Fixed:
    """The same minibatch at every visit."""

    def __init__(self, x: Matrix, y: Matrix) -> None:
        self.x, self.y, self.num_examples = x, y, len(x)

    def __call__(self, visit: int) -> tuple[Matrix, Matrix]:  # noqa: ARG002
        return self.x, self.y


def order(reduction: Reduction) -> Order:
    return Order(round=1, step=0.1, clip_norm=1.0, reduction=reduction, publishes=True, visit=1)


def batch(loss: Loss) -> Fixed:
    random = np.random.default_rng(0)
    one_hot = np.eye(OUTPUTS)[random.integers(OUTPUTS, size=ROWS)]
    y = one_hot if loss == "softmax" else random.normal(size=(ROWS, OUTPUTS))
    return Fixed(random.normal(size=(ROWS, FEATURES)), y)


def mean_loss(w: torch.Tensor, theta: torch.Tensor, data: Fixed, loss: Loss) -> torch.Tensor:
    """The mean of ½‖·‖² or of the cross-entropy, in torch's own words."""
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    scores = x @ (w + theta).reshape(FEATURES, OUTPUTS)
    if loss == "softmax":
        return torch.nn.functional.cross_entropy(scores, y)
    return 0.5 * ((scores - y) ** 2).sum(dim=1).mean()


@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_both_gradients_are_those_of_autograd(loss: Loss) -> None:
    """g_w = ∇_w and g_θ = ∇_θ of the mean of ℓ(y, (w+θ)ᵀx), with K outputs."""
    data, random = batch(loss), np.random.default_rng(1)
    w, theta = random.normal(size=(2, FEATURES * OUTPUTS))
    g_w, g_theta = AdditiveLinear(data, FEATURES, OUTPUTS, loss).gradients(w, theta, order("mean"))
    for argument, ours in enumerate((g_w, g_theta)):
        theirs = grad(mean_loss, argnums=argument)(
            torch.from_numpy(w), torch.from_numpy(theta), data, loss
        )
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_a_sum_is_the_mean_times_the_minibatch(loss: Loss) -> None:
    """Algorithm 2 sums over m_i samples where Algorithm 3 averages."""
    learner = AdditiveLinear(batch(loss), FEATURES, OUTPUTS, loss)
    v = np.linspace(-1, 1, FEATURES * OUTPUTS)
    total, mean = (learner.gradients(v, v, order(reduction))[0] for reduction in ("sum", "mean"))
    np.testing.assert_allclose(total, ROWS * mean, rtol=1e-14)


RIGHT_AND_WRONG = (np.eye(2), np.array([[1.0, 0.0], [1.0, 0.0]]))
ONE_OF_EACH = (np.ones((2, 1)), np.eye(2))
SECOND = (np.ones((1, 1)), np.array([[0.0, 1.0]]))
AMOUNTS = (np.array([[1.0], [2.0]]), np.zeros((2, 1)))
HALF_RIGHT = {"loss": 2.75, "accuracy": 0.5}
EVEN = {"loss": (math.log(4 / 3) + math.log(4)) / 2, "accuracy": 0.5}


@pytest.mark.parametrize(
    ("loss", "test", "w", "measures"),
    [
        # scores (2, 0) and (0, 3) against (1, 0) and (1, 0): losses ½·1 and ½·(1 + 9)
        ("squared", RIGHT_AND_WRONG, [2.0, 0.0, 0.0, 3.0], HALF_RIGHT),
        # chances (3/4, 1/4) for both samples, one of each class
        ("softmax", ONE_OF_EACH, [math.log(3), 0.0], EVEN),
        # −ln(e⁰ / (e¹⁰⁰⁰ + e⁰)) = 1000, though the chance itself is below the smallest float
        ("softmax", SECOND, [1000.0, 0.0], {"loss": 1000.0, "accuracy": 0.0}),
        # one output has no accuracy: (½·4 + ½·16)/2
        ("squared", AMOUNTS, [2.0], {"loss": 5.0}),
    ],
)
def test_measures_by_hand(loss: Loss, test: Any, w: list[float], measures: Any) -> None:
    """At (w/4, 3w/4): only their sum counts."""
    x, y = test
    learner = AdditiveLinear(batch(loss), x.shape[1], y.shape[1], loss, test)
    found = learner.evaluate(np.array(w) / 4, 3 * np.array(w) / 4)
    assert found == pytest.approx(measures, rel=1e-12)


def test_large_scores_give_finite_gradients() -> None:
    """Chances (1, 0) against (0, 1) at x = 1: the gradient is (1, −1), whatever the size of the
    scores."""
    learner = AdditiveLinear(Fixed(*SECOND), 1, 2, "softmax")
    g_w, _ = learner.gradients(np.array([1e4, 0.0]), np.zeros(2), order("mean"))
    assert g_w.tolist() == [1, -1]


def test_theta_starts_at_zero_and_nothing_is_measured_without_a_test_part() -> None:
    learner = AdditiveLinear(batch("squared"), FEATURES, OUTPUTS)
    zero = learner.initial_theta()
    assert zero.tolist() == [0.0] * (FEATURES * OUTPUTS)
    assert learner.num_examples == ROWS
    assert learner.evaluate(zero, zero) == {}


@pytest.mark.parametrize(
    ("outputs", "options", "words"),
    [
        (OUTPUTS, {"loss": "hinge"}, "squared, softmax, got 'hinge'"),
        (1, {"loss": "softmax"}, "at least 2 outputs, got 1: use loss='squared'"),
        (OUTPUTS, {"kinds": ["word"] * FEATURES}, "kinds must be"),
        (OUTPUTS, {"kinds": ["number"]}, "kinds has 1 entries"),
    ],
)
def test_wrong_options_are_refused(outputs: int, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdditiveLinear(batch("squared"), FEATURES, outputs, **options)


class Unlisted:
    """Minibatches that cannot list their rows."""

    def __init__(self, batches: Minibatches) -> None:
        self.num_examples = batches.num_examples
        self._batches = batches

    def __call__(self, visit: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._batches(visit)


def test_a_solution_is_that_of_all_rows_of_the_user() -> None:
    data = batch("squared")
    few = Minibatches(data.x, data.y, 2, seed=0, user=0)
    w = np.random.default_rng(4).normal(size=FEATURES * OUTPUTS)
    columns = columns_of(None, FEATURES, OUTPUTS, "classification")
    problem = OwnProblem.of(data.x, data.y, columns)
    expected = solution(problem, w.reshape(FEATURES, OUTPUTS)).reshape(-1)
    for batches in (few, Unlisted(few)):
        learner = AdditiveLinear(batches, FEATURES, OUTPUTS)
        np.testing.assert_allclose(learner.solution(w, order("mean")), expected, rtol=1e-9)


def test_a_w_that_steps_have_trained_predicts_targets_as_they_are() -> None:
    """y = 7x + 3 without noise: around the true w there is nothing left to learn."""
    x = np.random.default_rng(0).normal(size=(20, 1))
    data = Minibatches(x, 7 * x + 3, 20, seed=0, user=0)
    model = AdditiveLinear(data, 1, test=(x, 7 * x + 3)).stepped_model(np.array([7.0]))
    np.testing.assert_allclose(model.models[SHARED].predict(x), 7 * x + 3, rtol=1e-9)
    np.testing.assert_allclose(model.mixture.predict(x), 7 * x + 3, rtol=1e-6)
