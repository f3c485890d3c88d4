"""The engine for networks: a few calls measure everyone, and settings do not see each other."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flwr_ppsgd import FixedSize, Release, Steps
from flwr_ppsgd.lab.engines.engine import Setting
from flwr_ppsgd.lab.engines.networks import TOGETHER, NetworkEngine
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.additive_head import AdditiveHead
from flwr_ppsgd.models.split import SplitModel
from flwr_ppsgd.models.split_learner import ROWS_AT_ONCE

USERS, FEATURES, CLASSES = 60, 4, 3
SOURCE = np.random.default_rng(0)
SIZES = SOURCE.integers(3, 12, size=USERS).tolist()
ROWS = [(SOURCE.normal(size=(n, FEATURES)), SOURCE.integers(CLASSES, size=n)) for n in SIZES]


class Counted(nn.Module):
    """A network that counts the calls of all its copies."""

    calls: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        scores: Tensor = self.head(torch.tanh(self.body(x)))
        return scores


def settings(count: int) -> list[Setting]:
    found = []
    for place in range(count):
        alpha = [0.0, 0.3, 1.0, math.inf][place % 4]
        release = Release(FixedSize(USERS, 7), 0.1 * (1 + place), noise_multiplier=0.5)
        found.append(Setting(release, Steps.from_ratio(0.2, alpha)))
    return found


def engine_of(model: SplitModel, chosen: list[Setting]) -> NetworkEngine:
    batches = [Minibatches(x, y, 5, seed=2, user=user) for user, (x, y) in enumerate(ROWS)]
    tests = [rows if user % 9 else (rows[0][:0], rows[1][:0]) for user, rows in enumerate(ROWS)]
    return NetworkEngine(model, batches, chosen, seed=1, tests=tests)


def test_everyone_is_measured_in_a_few_calls_of_the_network() -> None:
    """As many calls as it takes with ROWS_AT_ONCE rows each, and one more for the last; the
    measures are those of one user after the other."""
    model = SplitModel(Counted().double(), ["head.*"])
    engine = engine_of(model, settings(2))
    for _ in range(3):
        engine.advance()
    Counted.calls = 0
    measures = engine.measures()
    padded = USERS * max(SIZES)
    assert 0 < Counted.calls <= 2 * (padded // ROWS_AT_ONCE + 1)
    measured = [user for user in range(USERS) if user % 9]
    for place in range(2):
        w = engine.w(place)
        each = [model.evaluate(w, engine.theta(place, user), ROWS[user]) for user in measured]
        weights = [SIZES[user] for user in measured]
        for name in ("loss", "accuracy"):
            expected = np.average([one[name] for one in each], weights=weights)
            assert measures[place][name] == pytest.approx(expected, rel=1e-9)
        accuracies = [one["accuracy"] for one in each]
        np.testing.assert_allclose(engine.by_user()[place], accuracies)


def test_settings_in_one_call_are_those_of_engines_of_their_own() -> None:
    """More settings than go into one call of the model, with clip norms and α of their own."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU()).double()
    model = AdditiveHead(network, 5, CLASSES, head=torch.randn(5, CLASSES))
    chosen = settings(TOGETHER + 2)
    together = engine_of(model, chosen)
    alone = [engine_of(model, [setting]) for setting in chosen]
    for _ in range(5):
        for engine in (together, *alone):
            engine.advance()
    for place, engine in enumerate(alone):
        np.testing.assert_allclose(together.w(place), engine.w(0), rtol=1e-10)
        for user in range(USERS):
            own = engine.theta(0, user)
            np.testing.assert_allclose(together.theta(place, user), own, rtol=1e-10, atol=1e-14)
