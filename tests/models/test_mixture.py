"""The personal model: recorded problems, rows left out, saved models, users of any kind."""

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.learner import LOCAL
from flwr_ppsgd.models.mixture import (
    BETAS,
    LAMBDAS,
    Kernel,
    Mixture,
    candidate_kernels,
    mean_duals,
    mixture_weights,
    personal_models,
    squared_distances,
    trust_in,
)
from flwr_ppsgd.models.solve import OwnProblem, PublicColumns, solution
from flwr_ppsgd.recipe import Task
from tests.support.own_problems import (
    NOISE,
    TASKS,
    Floats,
    data,
    made,
    plain_columns,
    shared_model,
    whole_rows,
)
from tests.support.recipe_golden import NAMES, close, needs_golden, problems_of, recorded


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_personal_models_are_the_recorded_ones(name: str) -> None:
    golden = recorded(name)
    shared = golden[f"round{golden['T'] - 1}_w"]
    for user, problem in enumerate(problems_of(golden)):
        model = personal_models(problem, shared, golden["nu"])[""]
        recorded_weights = golden[f"user{user}_weights"]
        close(model.trust, golden[f"user{user}_s"])
        close(model.beta, float((recorded_weights * BETAS).sum()))
        assert model.kernels.tolist() == golden[f"user{user}_kernels"].tolist()
        if len(problem.rows) > 1:
            close(model.weights, recorded_weights.sum(axis=(1, 2)))
            predictions = problem.predictions(shared)
            for place, kernel in enumerate(candidate_kernels(problem)):
                duals, scores = kernel.fit(problem.targets, predictions)
                close(scores, golden[f"user{user}_scores"][place])
                coefficients = kernel.scale * mean_duals(duals, recorded_weights[place])
                close(coefficients, golden[f"user{user}_coefficients"][place])
        if model.has_location:
            close(model.predict(golden["test_rows"][user]), golden[f"user{user}_predictions"])


def kernel_matrix(problem: OwnProblem, kernel: Kernel) -> Floats:
    """K of trace n, written out."""
    x = problem.rows
    n = len(x)
    if kernel.name == "linear":
        gram = x @ x.T
        return np.asarray(gram / (np.trace(gram) / n))
    if kernel.name == "offset":
        return np.full((n, n), 0.0 if problem.columns.task == "regression" else 1.0)
    distances = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    typical = np.median(distances[np.triu_indices(n, 1)])
    return np.asarray(np.exp(-float(kernel.name.split()[1]) * distances / typical))


def refitted_error(gram: Floats, values: Floats, row: int, ridge: float, intercept: bool) -> Floats:
    """Fits all rows but one and returns the error on that one."""
    others = np.delete(np.arange(len(gram)), row)
    inner = gram[np.ix_(others, others)] + ridge * np.eye(len(others))
    ones = np.ones((len(others), 1)) * intercept
    corner = np.array([[0.0 if intercept else 1.0]])
    bordered = np.block([[inner, ones], [ones.T, corner]])
    target = np.vstack([values[others], np.zeros((1, values.shape[1]))])
    solved = np.linalg.solve(bordered, target)
    return np.asarray(values[row] - gram[row, others] @ solved[:-1] - solved[-1] * intercept)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("n", "width"), [(2, 3), (4, 8), (5, 4), (14, 30)])
def test_scores_are_those_of_really_leaving_rows_out(task: Task, n: int, width: int) -> None:
    problem = made(task, n, width, numbers=1)
    predictions = problem.predictions(shared_model(problem.columns))
    kernels = candidate_kernels(problem)
    assert len(kernels) == (5 if n >= 5 else 2)
    for kernel in kernels:
        gram = kernel_matrix(problem, kernel)
        _, found = kernel.fit(problem.targets, predictions)
        intercept = task == "regression" and kernel.name in ("linear", "offset")
        for l_, ridge in enumerate(LAMBDAS / n):
            for b, beta in enumerate(BETAS):
                residual = problem.targets - beta * predictions
                errors = [refitted_error(gram, residual, row, ridge, intercept) for row in range(n)]
                assert found[l_, b] == pytest.approx((np.array(errors) ** 2).sum() / n, rel=1e-8)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("n", [4, 9])
def test_predictions_are_the_weighted_mean_of_all_candidates(task: Task, n: int) -> None:
    """Each one fitted by itself, on later rows that have columns which training has not."""
    rows, targets = data(task, n, 3)
    rows[:, 1] = 0.0
    problem = OwnProblem.of(rows, targets, plain_columns(task, 3), 2.0)
    w = shared_model(problem.columns)
    model = personal_models(problem, w, NOISE)[""]
    later = np.random.default_rng(5).normal(size=(6, 3)) + 2
    x, z = whole_rows(problem), problem.scaling(later)
    kernels = candidate_kernels(problem)
    weights = mixture_weights(
        np.array([each.fit(problem.targets, x @ w)[1] for each in kernels]),
        np.array([each.prior for each in kernels]),
        model.trust,
        problem.targets,
    )
    between = [z @ x.T / (np.trace(x @ x.T) / n), np.ones((6, n)) * (task != "regression")]
    distances = ((z[:, None] - x[None]) ** 2).sum(axis=2)
    between += [np.exp(-kernel.rate * distances) for kernel in kernels[2:]]
    expected = np.zeros((6, problem.columns.outputs))
    for k, kernel in enumerate(kernels):
        gram = kernel_matrix(problem, kernel)
        for l_, ridge in enumerate(LAMBDAS / n):
            inverse = np.linalg.inv(gram + ridge * np.eye(n))
            for b, beta in enumerate(BETAS):
                own = inverse @ (problem.targets - beta * x @ w)
                expected += weights[k, l_, b] * (beta * z @ w + between[k] @ own)
    expected = problem.location + problem.unit * expected
    np.testing.assert_allclose(model.predict(later), expected, rtol=1e-9, atol=1e-10)


def test_the_trust_in_w_by_hand() -> None:
    """‖Xw‖² = 4·(3² + 1)·2² of three classes; noise 3·(40·.5 + 4·.25)."""
    columns = PublicColumns("classification", np.array([False]), np.array([False]), 3, ones=True)
    problem = OwnProblem.of(np.array([[3.0], [-3.0], [1.0], [-1.0]]), [0, 1, 2, 0], columns)
    w = np.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    signal = 4 * (9 + 9 + 1 + 1)
    noise = 3 * (20 * 0.5 + 4 * 0.25)
    assert trust_in(problem, w, np.array([0.5, 0.25])) == pytest.approx(1 - noise / signal)
    assert trust_in(problem, w, np.array([10.0])) == 0


def personal(problem: OwnProblem) -> Mixture:
    """The personal model around ``shared_model``."""
    return personal_models(problem, shared_model(problem.columns), NOISE)[""]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_a_w_of_zeros_is_not_trusted(task: Task, n: int) -> None:
    problem = made(task, n, 4)
    w = 0 * shared_model(problem.columns)
    assert trust_in(problem, w, NOISE) == 0
    model = personal_models(problem, w, NOISE)[""]
    assert (model.trust, model.beta) == (0, 1.0 if n < 2 else 0.0)


@pytest.mark.parametrize("task", TASKS)
def test_alone_is_the_model_of_a_w_of_zeros(task: Task) -> None:
    problem = made(task, 9, 4)
    w = shared_model(problem.columns)
    alone = personal_models(problem, w, NOISE)[LOCAL]
    nothing = personal_models(problem, 0 * w, np.zeros(1))[""]
    assert alone.beta == 0
    later = data(task, 6, 4)[0]
    np.testing.assert_allclose(alone.predict(later), nothing.predict(later), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(alone.weights, nothing.weights, rtol=1e-9)


def test_weights_by_hand() -> None:
    """Two kernels, two rows: prior·L^(−1); and with Y = 0 the prior alone."""
    scores = np.ones((2, 1, 3))
    scores[1, 0] = [2.0, 4.0, 1e-30]
    targets = np.array([[1.0], [-1.0]])  # mean square 1
    priors = np.array([1.0, 0.5])
    prior = np.array([[[0.2, 0.08, 0.8]], [[0.1, 0.04, 0.4]]])
    raw = prior / np.maximum(scores, 1e-12)
    found = mixture_weights(scores, priors, 0.8, targets)
    np.testing.assert_allclose(found, raw / raw.sum(), rtol=1e-12)
    found = mixture_weights(scores, priors, 0.8, 0 * targets)
    np.testing.assert_allclose(found, prior / prior.sum(), rtol=1e-12)
    assert mixture_weights(scores, priors, 0.0, targets)[:, :, 1:].sum() == 0


def test_kernels_have_names_and_priors() -> None:
    """The prior of the offset falls with the number of rows."""
    problem = made("regression", 20, 3)
    priors = {kernel.name: kernel.prior for kernel in candidate_kernels(problem)}
    assert priors == {"linear": 1, "offset": 0.5, "rbf 0.3": 0.1, "rbf 1.0": 0.1, "rbf 3.0": 0.1}
    model = personal(problem)
    assert list(model.choices) == ["trust", "beta", *priors]
    assert sum(model.weights) == pytest.approx(1)
    for without_rbf in (made("regression", 20, 3, sparse=1), made("regression", 501, 3)):
        assert [kernel.name for kernel in candidate_kernels(without_rbf)] == ["linear", "offset"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("n", [1, 3, 9, 700])
def test_a_saved_model_predicts_the_same_bits(tmp_path: Path, task: Task, n: int) -> None:
    model = personal(made(task, n, 6, numbers=2))
    arrays: dict[str, Any] = model.to_arrays()
    np.savez(tmp_path / "model.npz", **arrays)
    with np.load(tmp_path / "model.npz") as file:
        loaded = Mixture.from_arrays(file)
    later = data(task, 50, 6, seed=1)[0]
    np.testing.assert_array_equal(loaded.predict(later), model.predict(later))
    assert loaded.choices == model.choices
    assert loaded.has_location


def test_one_row_in_regression_is_its_target_and_the_shared_slope() -> None:
    """ȳ + u·(x − x₁)w."""
    columns = plain_columns("regression", 2)
    problem = OwnProblem.of(np.array([[1.0, 2.0]]), [5.0], columns, unit=3.0)
    shared = np.array([[0.5], [-1.0]])
    models = personal_models(problem, shared, np.zeros(1))
    later = np.array([[2.0, 1.0]])
    np.testing.assert_allclose(models[""].predict(later), [[5 + 3 * 1.5]])
    np.testing.assert_allclose(models[LOCAL].predict(later), [[5.0]])
    assert not solution(problem, shared).any()


@pytest.mark.parametrize("n", [0, 1])
def test_below_two_rows_classes_are_those_of_w(n: int) -> None:
    problem = made("classification", n, 4)
    w = shared_model(problem.columns)
    later = data("classification", 5, 4)[0]
    np.testing.assert_allclose(personal(problem).predict(later), later @ w[:4] + w[4])


def test_regression_without_rows_has_no_location_and_says_so() -> None:
    problem = made("regression", 0, 4)
    models = personal_models(problem, shared_model(problem.columns), NOISE)
    for model in models.values():
        assert not model.has_location
        with pytest.raises(ValueError, match="a user without rows has no mean"):
            model.predict(np.zeros((1, 4)))


def changed(rows: Floats, *changes: tuple[Any, float]) -> Floats:
    for place, value in changes:
        rows[place] = value
    return rows


# what is out of the ordinary in a user's rows
UNUSUAL_ROWS: dict[str, Callable[[Floats], Floats]] = {
    "no rows": lambda rows: rows[:0],
    "one row": lambda rows: rows[:1],
    "two rows": lambda rows: rows[:2],
    "many rows": lambda rows: np.tile(rows, (430, 1)) + np.arange(430 * 12)[:, None] % 97,
    "constant columns": lambda rows: 0 * rows + 1 / 3,
    "rows of zeros": lambda rows: 0 * rows,
    "twice the same rows": lambda rows: np.tile(rows[:6], (2, 1)),
    "large columns": lambda rows: rows * 1e6,
    "far from zero": lambda rows: rows + 1e6,
    "huge columns": lambda rows: rows * 1e99,
    "tiny columns": lambda rows: rows * 1e-155,
    "too large a number": lambda rows: changed(rows, ((3, 2), 1e300)),
    "missing numbers": lambda rows: changed(rows, ((2, 1), math.nan), ((5, 0), math.inf)),
    "missing everywhere": lambda rows: changed(rows, ((slice(None), 1), math.nan)),
    "constant targets": lambda rows: rows,
    "one row of another class": lambda rows: rows,
}


def unusual(name: str, task: Task) -> tuple[Floats, Floats]:
    """A user's rows and targets with one thing that is out of the ordinary."""
    rows, targets = data(task, 12, 4)
    rows = UNUSUAL_ROWS[name](rows)
    targets = np.resize(targets, len(rows))
    if name in ("constant targets", "one row of another class"):
        targets = 0 * targets + 1
    if name == "one row of another class":
        targets[0] = 2
    return rows, targets


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("numbers", [0, 4])
@pytest.mark.parametrize("name", UNUSUAL_ROWS)
def test_no_user_crashes_or_makes_nan(name: str, numbers: int, task: Task) -> None:
    rows, targets = unusual(name, task)
    problem = OwnProblem.of(rows, targets, plain_columns(task, 4, numbers=numbers), 2.0)
    w = shared_model(problem.columns)
    assert np.isfinite(solution(problem, w)).all()
    models = personal_models(problem, w, NOISE)
    assert np.isfinite(list(models[""].choices.values())).all()
    later = np.vstack([data(task, 5, 4, seed=1)[0], np.full((1, 4), math.nan)])
    for model in models.values():
        if model.has_location:
            assert np.isfinite(model.predict(later)).all()


def test_many_rows_never_make_a_matrix_of_rows_by_rows() -> None:
    n = 6000
    rows, targets = data("classification", n, 10)
    tracemalloc.start()
    personal(OwnProblem.of(rows, targets, plain_columns("classification", 10))).predict(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * n * n / 4


@pytest.mark.parametrize("shift", [0.0, 1e5])
def test_distances_keep_their_digits(shift: float) -> None:
    """Rows far from zero lose 1e-6 of their distance by products alone; equal rows are at 0."""
    random = np.random.default_rng(0)
    left = random.normal(size=(30, 5)) + shift
    right = random.normal(size=(20, 5)) + shift
    right[3] = left[7]
    plain = ((left[:, None] - right[None]) ** 2).sum(axis=2)
    found = squared_distances(left, right)
    np.testing.assert_allclose(found, plain, rtol=1e-9)
    assert found[7, 3] == 0


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must have 4 columns, got 3"):
        personal(made("regression", 9, 4)).predict(np.zeros((2, 3)))
