"""The engine for networks: a cohort is its users one after the other, and settings do not see each
other."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flwr_ppsgd import FixedSize, Release, Steps
from flwr_ppsgd.algorithm import Reduction
from flwr_ppsgd.lab.engine import EngineSetting
from flwr_ppsgd.lab.network_engine import NetworkEngine, cohort_gradients
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.torch_model import AdditiveHead, SplitModel
from tests.support.by_hand import by_hand, close

USERS, FEATURES, CLASSES = 60, 4, 3
SOURCE = np.random.default_rng(0)
SIZES = SOURCE.integers(3, 12, size=USERS).tolist()
ROWS = [(SOURCE.normal(size=(n, FEATURES)), SOURCE.integers(CLASSES, size=n)) for n in SIZES]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(x)))
        return scores


def settings(count: int) -> list[EngineSetting]:
    found = []
    for place in range(count):
        alpha = [0.0, 0.3, 1.0, math.inf][place % 4]
        release = Release(FixedSize(USERS, 7), 0.1 * (1 + place), noise_multiplier=0.5)
        found.append(EngineSetting(release, Steps.from_ratio(0.2, alpha)))
    return found


def engine_of(
    model: SplitModel, chosen: list[EngineSetting], *, average: bool = False
) -> NetworkEngine:
    batches = [Minibatches(x, y, 5, seed=2, user=user) for user, (x, y) in enumerate(ROWS)]
    tests = [rows if user % 9 else (rows[0][:0], rows[1][:0]) for user, rows in enumerate(ROWS)]
    return NetworkEngine(model, batches, chosen, seed=1, average=average, tests=tests)


def test_everyone_with_test_rows_is_measured() -> None:
    model = SplitModel(Small().double(), ["head.*"])
    engine = engine_of(model, settings(2))
    for _ in range(3):
        engine.advance()
    measures = engine.measures()
    measured = [user for user in range(USERS) if user % 9]
    for place in range(2):
        w = engine.w(place)
        each = [model.evaluate(w, engine.theta(place, user), ROWS[user]) for user in measured]
        weights = [SIZES[user] for user in measured]
        for name in ("loss", "accuracy"):
            expected = np.average([one[name] for one in each], weights=weights)
            assert measures[place][name] == pytest.approx(expected, rel=1e-9)
        accuracies = [one["accuracy"] for one in each]
        found, _ = engine.measure_users("test")
        np.testing.assert_allclose(found["accuracy"][:, place], accuracies)


@pytest.mark.parametrize("kind", ["split", "additive head"])
def test_every_setting_is_that_of_the_algorithm_round_by_round(kind: str) -> None:
    """w and θ by the paper's functions, one user after the other, and their averages; clip norms,
    noise and α differ."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU()).double()
    head = AdditiveHead(network, 5, CLASSES, head=torch.randn(5, CLASSES))
    model = head if kind == "additive head" else SplitModel(Small().double(), ["head.*"])
    chosen = settings(6)
    engine = engine_of(model, chosen)
    averages = engine_of(model, chosen, average=True)
    batches = [Minibatches(x, y, 5, seed=2, user=user) for user, (x, y) in enumerate(ROWS)]
    learners = [model.learner(own) for own in batches]
    w0 = model.initial_w()
    hands = [list(by_hand(learners, setting, w0, seed=1, rounds=4)) for setting in chosen]
    for round_ in range(4):
        engine.advance()
        averages.advance()
        for place, after in enumerate(hands):
            w, thetas = after[round_]
            close(engine.w(place), w)
            ours = [engine.theta(place, user) for user in range(USERS)]
            close(np.array(ours), np.array(thetas))
    for place, after in enumerate(hands):
        iterates = [w0, *(w for w, _ in after[:-1])]
        close(averages.w(place), np.mean(iterates, axis=0))
        thetas = [learners[5].initial_theta(), *(own[5] for _, own in after[:-1])]
        close(averages.theta(place, 5), np.mean(thetas, axis=0))


# layers on images of 2 × 9 × 8 pixels, and the number of their outputs
NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "linear": (lambda: [nn.Flatten(), nn.Linear(144, 6), nn.ReLU()], 6),
    "in place": (lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True)], 126),
    "two convolutions": (
        lambda: [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(4, 3, 4, stride=2, bias=False),
            nn.Sequential(nn.ReLU(), nn.AvgPool2d(2, stride=1)),
            nn.Flatten(),
            nn.Linear(6, 5),
        ],
        5,
    ),
}


class Weighted(nn.Module):
    """A loss for each row, by weights whose mean over the batch is 1."""

    def forward(self, prediction: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(prediction, y, reduction="none")
        weights = y + 1.0
        return losses * weights / weights.mean()


def head_over(name: str, loss: Any = "softmax") -> AdditiveHead:
    torch.manual_seed(0)
    layers, features = NETWORKS[name]
    network = nn.Sequential(*layers()).double()
    return AdditiveHead(network, features, CLASSES, loss, torch.randn(features, CLASSES))


def check_cohort_gradients(model: SplitModel, x: Tensor, y: Tensor, reduction: Reduction) -> None:
    """Those of a cohort are those of one user after the other."""
    source = np.random.default_rng(2)
    w = model.initial_w()
    w += 0.1 * source.normal(size=w.size)
    thetas = source.normal(size=(len(x), model.initial_theta().size))
    g_w, g_theta = cohort_gradients(model, w, thetas, (x, y), reduction)
    for user, theta in enumerate(thetas):
        one_w, one_theta = model.gradients(w, theta, (x[user], y[user]), reduction)
        np.testing.assert_allclose(g_w[user], one_w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(g_theta[user], one_theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_a_cohort_are_those_of_one_user_after_the_other(
    name: str, reduction: Reduction
) -> None:
    x = torch.randn(4, 5, 2, 9, 8, dtype=torch.float64)
    y = torch.randint(CLASSES, (4, 5))
    check_cohort_gradients(head_over(name), x, y, reduction)


def test_a_loss_that_joins_the_rows_of_a_user_never_joins_users() -> None:
    x = torch.randn(4, 5, 2, 9, 8, dtype=torch.float64)
    y = torch.randint(CLASSES, (4, 5))
    check_cohort_gradients(head_over("linear", Weighted()), x, y, "mean")


def test_a_loss_that_reduces_by_itself_may_train_a_cohort() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = SplitModel(network, "2.*", nn.MSELoss(reduction="sum"))
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    y = torch.randn(3, 5, dtype=torch.float64)
    check_cohort_gradients(model, x, y, "mean")
