"""What a device sends: recorded problems, messages by hand, scaling, bad rows and targets."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from flwr_ppsgd.models.mixture import personal_models
from flwr_ppsgd.models.solve import OwnProblem, PublicColumns, solution, spread
from flwr_ppsgd.recipe import Task
from tests.support.own_problems import (
    NOISE,
    TASKS,
    data,
    made,
    plain_columns,
    shared_model,
    whole_rows,
)
from tests.support.recipe_golden import NAMES, close, needs_golden, problems_of, recorded


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_rows_targets_and_messages_are_the_recorded_ones(name: str) -> None:
    golden = recorded(name)
    problems = problems_of(golden)
    w = np.zeros_like(golden["round0_w"])
    for t in range(golden["T"]):
        for user, problem in enumerate(problems):
            close(solution(problem, w), golden[f"round{t}_messages"][user])
        w = golden[f"round{t}_w"]
    for user, problem in enumerate(problems):
        close(whole_rows(problem), golden[f"user{user}_x"])
        close(problem.targets, golden[f"user{user}_y"])
        close(problem.scaling.centre, golden[f"user{user}_x_centre"])
        if len(problem.rows):
            close(problem.location, golden[f"user{user}_y_centre"])
        close(problem.unit, golden[f"user{user}_v"])


def test_a_message_by_hand() -> None:
    """x = −1, 1 and y = −1, 1 around their means: v² = (2 + 4·2²)/(2 + 3), λ = .001·2."""
    columns = PublicColumns("regression", np.array([False]), np.array([False]))
    problem = OwnProblem.of(np.array([[5.0], [7.0]]), [10.0, 12.0], columns, unit=2.0)
    unit = math.sqrt(18 / 5)
    assert problem.unit == pytest.approx(unit)
    assert problem.location == 11.0
    for w in (0.0, 0.1):
        found = solution(problem, np.array([[w]]))
        np.testing.assert_allclose(found, [[(2 / unit - 2 * w) / 2.002]], rtol=1e-12)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("n", "width"), [(4, 30), (40, 6), (12, 12)])
def test_primal_and_dual_messages_are_the_ridge_solution(task: Task, n: int, width: int) -> None:
    problem = made(task, n, width, numbers=2)
    w = shared_model(problem.columns)
    x = whole_rows(problem)
    ridge = 0.001 * np.trace(x @ x.T)
    residual = problem.targets - x @ w
    dual = x.T @ np.linalg.solve(x @ x.T + ridge * np.eye(n), residual)
    primal = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ residual)
    assert problem.primal == (n > width + problem.columns.ones)
    np.testing.assert_allclose(solution(problem, w), dual, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(solution(problem, w), primal, rtol=1e-9, atol=1e-12)


def test_numbers_are_scaled_by_own_rows_and_cut() -> None:
    """Numbers: (x − mean)/deviation within ±5, constant ones 0; other columns as they are."""
    columns = plain_columns("classification", 3, numbers=2)
    rows = np.tile([0, 0.1, 7], (100, 1))
    rows[:50, 0] = 2.0
    problem = OwnProblem.of(rows, np.zeros(100), columns)
    np.testing.assert_allclose(whole_rows(problem)[[0, 99]], [[1, 0, 7, 1], [-1, 0, 7, 1]])
    later = problem.scaling(np.array([[1e6, 55.0, -3.0], [-1e6, 0.1, math.nan]]))
    np.testing.assert_array_equal(later, [[5, 0, -3, 1], [-5, 0, 0, 1]])
    round_off = np.array([[1e6, 1e6, 0], [1e6 + 1e-4, 1e6 + 1e-2, 0]])
    found = whole_rows(OwnProblem.of(round_off, [0, 1], columns))
    np.testing.assert_allclose(found, [[0, -1, 0, 1], [0, 1, 0, 1]], rtol=1e-6)


def test_the_spread_has_divisor_n_minus_1_and_may_be_undefined() -> None:
    assert spread([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert spread([0.1] * 7) == 0
    assert math.isnan(spread([4.0]))
    assert math.isnan(spread([]))
    assert spread([1.0, math.nan, 3.0, math.inf]) == pytest.approx(math.sqrt(2))


def test_own_columns_are_the_sparse_ones_that_are_not_zero_somewhere() -> None:
    """A sparse column that is 1 in every own row counts, though its centred form is 0."""
    columns = plain_columns("regression", 4, sparse=3)
    rows = np.array([[3.0, 1, 0, 0], [4.0, 1, 0, 2]])
    problem = OwnProblem.of(rows, [1.0, 2.0], columns)
    assert problem.own_columns.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("task", TASKS)
def test_sparse_rows_give_what_dense_ones_do(task: Task) -> None:
    random = np.random.default_rng(1)
    rows = random.normal(size=(12, 40)) * (random.random((12, 40)) < 0.1)
    targets = data(task, 12, 2)[1]
    columns = plain_columns(task, 40, sparse=38)
    w = shared_model(columns)
    dense = OwnProblem.of(rows, targets, columns)
    sparse = OwnProblem.of(scipy.sparse.csr_matrix(rows), targets, columns)
    np.testing.assert_array_equal(solution(sparse, w), solution(dense, w))
    later = random.normal(size=(5, 40))
    np.testing.assert_array_equal(
        personal_models(sparse, w, NOISE)[""].predict(scipy.sparse.csr_matrix(later)),
        personal_models(dense, w, NOISE)[""].predict(later),
    )


def test_a_row_with_nan_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rows, targets = data("regression", 9, 3)
    rows[4, 1] = math.nan
    targets[7] = math.inf
    good = [0, 1, 2, 3, 5, 6, 8]
    columns = plain_columns("regression", 3, numbers=1)
    found = OwnProblem.of(rows, targets, columns)
    assert "2 of this user's 9 rows hold NaN or infinity and are left out" in caplog.text
    expected = OwnProblem.of(rows[good], targets[good], columns)
    w = shared_model(columns)
    np.testing.assert_array_equal(solution(found, w), solution(expected, w))


def test_rows_of_0_and_1_are_targets_too() -> None:
    rows, targets = data("classification", 9, 3)
    columns = plain_columns("classification", 3)
    by_index = OwnProblem.of(rows, targets, columns)
    by_row = OwnProblem.of(rows, np.eye(3)[targets.astype(int)], columns)
    np.testing.assert_array_equal(by_index.targets, by_row.targets)


@pytest.mark.parametrize(
    ("task", "targets", "words"),
    [
        ("classification", [0, 3], "classes must be whole numbers from 0 to 2"),
        ("classification", [-1, 0], "classes must be whole numbers from 0 to 2"),
        ("classification", [0.5, 1.0], "classes must be whole numbers from 0 to 2"),
        ("regression", np.zeros((2, 2)), r"a row has one target, got \(2, 2\)"),
    ],
)
def test_targets_that_do_not_fit_are_refused(task: Task, targets: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OwnProblem.of(np.zeros((2, 1)), targets, plain_columns(task, 1))
