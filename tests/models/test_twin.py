"""The judging twin: it stops where rows it has not seen say so, and uses the user's optimizer."""

import functools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.models.torch_optimizer import OptimizerFactory, PersonalTraining
from flwr_ppsgd.models.twin import Places, Twin

Floats = NDArray[np.float64]


def mean_of(y: Floats, optimizer: OptimizerFactory | None = None) -> Twin:
    """½·mean((θ − y)²), for one number θ."""

    def gradient(theta: Vector, places: Places) -> tuple[float, Vector]:
        residual = theta - y[places]
        return float(0.5 * np.mean(residual**2)), np.array([residual.mean()])

    return Twin(
        PersonalTraining(optimizer),
        [torch.Size([1])],
        gradient,
        lambda theta, places: float(0.5 * np.mean((theta - y[places]) ** 2)),
        len(y),
    )


FAST = functools.partial(torch.optim.SGD, lr=0.5)


def test_theta_is_trained_on_all_rows_where_that_helps() -> None:
    y = 3.0 + 0.01 * np.random.default_rng(0).normal(size=40)
    solution = mean_of(y, FAST).solve([np.zeros(1)])
    assert solution.theta == pytest.approx(3.0, abs=0.05)
    assert solution.chosen["epochs"] >= 1
    assert solution.chosen["loo"] < 0.01 < solution.chosen["loo-shared"]


def test_theta_stays_where_it_is_if_training_does_not_help() -> None:
    """Rows that say nothing: the start is the best that there is."""
    y = np.zeros(10)
    solution = mean_of(y, FAST).solve([np.zeros(1), np.full(1, 7.0)])
    np.testing.assert_array_equal(solution.theta, np.zeros(1))
    assert solution.chosen["epochs"] == 0.0


def test_the_better_start_is_chosen() -> None:
    y = np.full(10, 100.0)
    solution = mean_of(y).solve([np.zeros(1), np.full(1, 100.0)])
    assert solution.theta == pytest.approx(100.0, abs=0.5)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_users_with_few_rows_have_an_answer(rows: int) -> None:
    solution = mean_of(np.full(rows, 2.0), FAST).solve([np.zeros(1)])
    assert np.isfinite(solution.theta).all()
    assert (solution.theta[0] == 0.0) == (rows == 1)


def test_a_training_that_diverges_is_not_chosen() -> None:
    wild = functools.partial(torch.optim.SGD, lr=1e9)
    with np.errstate(over="ignore", invalid="ignore"):
        solution = mean_of(np.arange(20.0), wild).solve([np.ones(1)])
    np.testing.assert_array_equal(solution.theta, np.ones(1))
    nan = mean_of(np.full(6, np.nan)).solve([np.ones(1)])
    np.testing.assert_array_equal(nan.theta, np.ones(1))


def test_a_learning_rate_is_chosen_only_if_the_optimizer_has_none() -> None:
    assert mean_of(np.zeros(3), FAST).steps() == (1.0,)
    assert len(mean_of(np.zeros(3), torch.optim.SGD).steps()) > 1
    assert len(mean_of(np.zeros(3)).steps()) > 1
