"""Fine-tuning and private local steps against plain loops over users, and in a sweep."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from flwr_ppsgd import Ledger
from flwr_ppsgd.algorithm import Poisson, Release, Steps, clip
from flwr_ppsgd.lab.baselines import LocalStepsEngine, fine_tune
from flwr_ppsgd.lab.engine import EngineSetting
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.population import FinitePopulation
from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.rows import GridPoint
from flwr_ppsgd.lab.sweep import Sweep
from flwr_ppsgd.lab.tasks import finite_population
from flwr_ppsgd.learner import minibatch_rows
from flwr_ppsgd.models.additive_linear import predict
from flwr_ppsgd.noise import RandomStream
from tests.support.own_data import FLAT, USERS, write

COHORT = Poisson(USERS, 0.5)
BASELINES = ("fine-tuned", "fedavg")


def settings(clip_norm: float = 0.3) -> list[EngineSetting]:
    return [
        EngineSetting(Release(COHORT, clip_norm, z), Steps(step, 0.0))
        for z in (0.0, 0.7)
        for step in (0.05, 0.2)
    ]


def data(directory: Path, loss: str = "squared") -> FinitePopulation:
    return finite_population(
        Problem(data=str(write(directory)), batch_size=3, loss=loss), "float64"
    )


def as_sparse(dense: FinitePopulation) -> FinitePopulation:
    return FinitePopulation(
        sparse.csr_array(dense.x),
        dense.y,
        dense.offsets,
        batch_size=3,
        seed=dense.seed,
        loss=dense.loss,
    )


def local_steps_by_hand(
    own: FinitePopulation, setting: EngineSetting, seed: int, rounds: int, count: int
) -> Any:
    """w_k of each user by k explicit steps; (w − w_k)/(s·k) is clipped, and w moves by s·k of the
    noisy mean."""
    w = np.zeros((own.features, own.outputs))
    visits = [0] * USERS
    step = setting.steps.shared
    release = setting.release
    for round_ in range(1, rounds + 1):
        normals = RandomStream.insecure(seed, "noise", round_).normals(w.size)
        total = release.noise_std * normals.reshape(w.shape)
        uniforms = RandomStream.insecure(seed, "cohort", round_).uniforms(USERS)
        for user in COHORT.members(uniforms).tolist():
            moved = w.copy()
            for _ in range(count):
                visits[user] += 1
                size = int(own.sizes[user])
                rows = own.offsets[user] + minibatch_rows(own.seed, user, visits[user], size, 3)
                x = own.x[rows]
                residual = predict(x @ moved, own.loss) - own.y[rows]
                moved -= step * x.T @ residual / len(rows)
            mean_gradient = (w - moved) / (step * count)
            total += clip(mean_gradient.reshape(-1), release.clip_norm).reshape(w.shape)
        w = w - step * count * total / release.denominator
    return w.reshape(-1)


@pytest.mark.parametrize("loss", ["squared", "softmax"])
@pytest.mark.parametrize("count", [1, 3])
def test_local_steps_are_those_of_a_plain_loop(tmp_path: Path, loss: str, count: int) -> None:
    own = data(tmp_path, loss)
    for population in (own, as_sparse(own)):
        engine = LocalStepsEngine(
            population, settings(), seed=4, local_steps=count, dtype="float64"
        )
        for _ in range(5):
            engine.advance()
        for place, setting in enumerate(settings()):
            expected = local_steps_by_hand(own, setting, 4, 5, count)
            np.testing.assert_allclose(engine.w(place), expected, atol=1e-10)


def test_one_local_step_is_global_learning(tmp_path: Path) -> None:
    own = data(tmp_path)
    fedavg = LocalStepsEngine(own, settings(), seed=4, local_steps=1, dtype="float64")
    common = LinearEngine(own, settings(), seed=4)
    for _ in range(4):
        fedavg.advance()
        common.advance()
    fedavg.drop({1})
    assert fedavg.places == [0, 2, 3]
    for place in fedavg.places:
        np.testing.assert_allclose(fedavg.w(place), common.w(place), atol=1e-10)
        assert fedavg.measures()[place] == pytest.approx(common.measures()[place])


def test_fine_tuning_is_local_learning_on_top_of_w(tmp_path: Path) -> None:
    """θ_i by explicit steps from 0; of two steps the one that measures better, 1e9 being worse
    than none."""
    own = data(tmp_path)
    test = own.parts["test"]
    w = np.random.default_rng(1).normal(size=(own.features, 2, own.outputs))
    for at, measures in enumerate(fine_tune(own, w, [0.1, 1e9], passes=2)):
        accuracies = []
        for user in test.measured_users.tolist():
            v = w[:, at].copy()
            count = int(own.sizes[user])
            for visit in range(1, round(2 * count / 3) + 1):
                rows = own.offsets[user] + minibatch_rows(own.seed, user, visit, count, 3)
                v -= 0.1 * own.x[rows].T @ (own.x[rows] @ v - own.y[rows]) / len(rows)
            rows = test.rows_of(user)
            right = (test.x[rows] @ v).argmax(axis=1) == test.y[rows].argmax(axis=1)
            accuracies.append(right.mean())
        expected = np.average(accuracies, weights=test.sizes[test.measured_users])
        assert measures["accuracy"] == pytest.approx(expected)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    lists = {"step": [0.05, 0.1], "alpha-q": [0.0, 0.3, math.inf], "epsilon": [1.0, 4.0]}
    flat = {**FLAT, **lists, "data": str(write(tmp_path)), "baselines": "fine-tuned, fedavg"}
    del flat["noise-multiplier"]
    return Sweep.read(flat, where="here")


def test_baselines_stand_beside_the_settings_of_a_sweep(sweep: Sweep) -> None:
    """2 steps × (α = 0, 2 αs × 2 z) and 2 steps × 2 z of each baseline, all with αQ = ∞."""
    points = sweep.points()
    assert len(points) == 2 * (1 + 4) + 2 * 4
    assert {point.alpha_q for point in points if point.method in BASELINES} == {math.inf}
    assert all(GridPoint.of(json.loads(json.dumps(point.key()))) == point for point in points)


def test_epsilon_becomes_the_noise_that_costs_it(sweep: Sweep) -> None:
    training = sweep.base.training
    releases = [Release(training.cohort(), 1.0, z) for z in sweep.grid["noise-multiplier"]]
    spent = [Ledger(training.delta).record(release, 6).epsilon() for release in releases]
    assert spent == pytest.approx([1.0, 4.0], rel=1e-3)
