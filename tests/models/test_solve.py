"""What a device solves: recorded problems, rows left out, saved models, users of any kind."""

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray

from flwr_ppsgd.models.solve import (
    BETAS,
    LAMBDAS,
    Kernel,
    Mixture,
    OwnProblem,
    PublicColumns,
    candidates,
    mean_duals,
    mixture_weights,
    personal_model,
    solution,
    spread,
    squared_distances,
    trust_in,
)
from flwr_ppsgd.recipe import Task
from tests.support.recipe_golden import (
    NAMES,
    close,
    needs_golden,
    problems_of,
    recorded,
)

Floats = NDArray[np.float64]
NOISE = np.array([1e-3])
TASKS: list[Task] = ["regression", "classification"]


def plain_columns(task: Task, width: int, numbers: int = 0, sparse: int = 0) -> PublicColumns:
    """Numbers first, sparse columns last; three classes and ones in classification."""
    places = np.arange(width)
    classes = task == "classification"
    return PublicColumns(
        task, places < numbers, places >= width - sparse, 3 if classes else 1, ones=classes
    )


def data(task: Task, n: int, width: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Rows around 2, and targets that depend on them."""
    random = np.random.default_rng([seed, n, width])
    rows = random.normal(size=(n, width)) + 2
    signal = rows @ random.normal(size=(width, 3)) + random.normal(size=(n, 3))
    return rows, signal[:, 0] if task == "regression" else signal.argmax(axis=1)


def made(task: Task, n: int, width: int, seed: int = 0, **kinds: int) -> OwnProblem:
    rows, targets = data(task, n, width, seed)
    return OwnProblem.of(rows, targets, plain_columns(task, width, **kinds), 2.0)


def shared_model(columns: PublicColumns) -> Floats:
    return np.random.default_rng(0).normal(size=(columns.width, columns.outputs))


def whole_rows(problem: OwnProblem) -> Floats:
    """X with all columns of w."""
    rows = np.zeros((len(problem.rows), problem.columns.width))
    rows[:, problem.support] = problem.rows
    return rows


# Recorded problems


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


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_answers_before_the_rounds_are_the_recorded_ones(name: str) -> None:
    """The sums of what users say about unit, size and columns, before noise."""
    golden = recorded(name)
    problems = problems_of(golden)
    zero = np.zeros_like(golden["round0_w"])
    own = [golden["targets"][golden["user"] == user] for user in range(golden["users"])]
    answers = {
        "unit": [spread(targets) for targets in own],
        "size": [float(np.linalg.norm(solution(problem, zero))) for problem in problems],
        "count": [math.sqrt(problem.own_columns.sum()) for problem in problems],
    }
    for name_, values in answers.items():
        if f"{name_}_sum" in golden:
            said = np.array([value for value in values if value > 0])
            pairs = np.clip(np.log2(said) / 8, -1, 1).sum(), len(said) / 2
            close(pairs, golden[f"{name_}_sum"])
    if golden["sparse"].any():
        vectors = np.array([problem.own_columns for problem in problems]) / golden["k"]
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        close((vectors / np.maximum(lengths, 1)).sum(axis=0), golden["columns_sum"])


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_personal_models_are_the_recorded_ones(name: str) -> None:
    golden = recorded(name)
    shared = golden[f"round{golden['T'] - 1}_w"]
    for user, problem in enumerate(problems_of(golden)):
        model = personal_model(problem, shared, golden["nu"])
        recorded_weights = golden[f"user{user}_weights"]
        close(model.trust, golden[f"user{user}_s"])
        close(model.beta, float((recorded_weights * BETAS).sum()))
        assert model.kernels.tolist() == golden[f"user{user}_kernels"].tolist()
        if len(problem.rows) > 1:
            close(model.weights, recorded_weights.sum(axis=(1, 2)))
            predictions = problem.predictions(shared)
            for place, kernel in enumerate(candidates(problem)):
                duals, scores = kernel.fit(problem.targets, predictions)
                close(scores, golden[f"user{user}_scores"][place])
                coefficients = kernel.scale * mean_duals(duals, recorded_weights[place])
                close(coefficients, golden[f"user{user}_coefficients"][place])
        if model.has_location:
            close(model.predict(golden["test_rows"][user]), golden[f"user{user}_predictions"])


# The message


def test_a_message_by_hand() -> None:
    """x = −1, 1 and y = −1, 1 around their means: v² = (2 + 4·2²)/(2 + 3), λ = .001·2."""
    columns = PublicColumns("regression", np.array([False]), np.array([False]))
    problem = OwnProblem.of(np.array([[5.0], [7.0]]), [10.0, 12.0], columns, unit=2.0)
    unit = math.sqrt(18 / 5)
    assert problem.unit == pytest.approx(unit)
    assert problem.location == 11.0
    np.testing.assert_allclose(solution(problem, np.zeros((1, 1))), [[2 / unit / 2.002]])
    np.testing.assert_allclose(
        solution(problem, np.array([[0.1]])), [[(2 / unit - 0.2) / 2.002]], rtol=1e-12
    )


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
    columns = PublicColumns(
        "classification", np.array([True, True, False]), np.zeros(3, bool), 2, True
    )
    rows = np.zeros((100, 3))
    rows[:50, 0] = 2.0
    rows[:, 1] = 0.1
    rows[:, 2] = 7.0
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
        personal_model(sparse, w, NOISE).predict(scipy.sparse.csr_matrix(later)),
        personal_model(dense, w, NOISE).predict(later),
    )


# The personal model


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
    kernels = candidates(problem)
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
    model = personal_model(problem, w, NOISE)
    later = np.random.default_rng(5).normal(size=(6, 3)) + 2
    x, z = whole_rows(problem), problem.scaling(later)
    kernels = candidates(problem)
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


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_a_w_of_zeros_is_not_trusted(task: Task, n: int) -> None:
    problem = made(task, n, 4)
    w = 0 * shared_model(problem.columns)
    assert trust_in(problem, w, NOISE) == 0
    model = personal_model(problem, w, NOISE)
    assert model.trust == 0
    assert model.beta == (1.0 if n < 2 else 0.0)


@pytest.mark.parametrize("task", TASKS)
def test_alone_is_the_model_of_a_w_of_zeros(task: Task) -> None:
    problem = made(task, 9, 4)
    w = shared_model(problem.columns)
    alone = personal_model(problem, w, NOISE).alone
    nothing = personal_model(problem, 0 * w, np.zeros(1))
    assert alone is not None
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


def test_the_choices_of_a_model_have_names() -> None:
    problem = made("regression", 9, 4)
    model = personal_model(problem, shared_model(problem.columns), NOISE)
    names = ["trust", "beta", "linear", "offset", "rbf 0.3", "rbf 1.0", "rbf 3.0"]
    assert list(model.choices) == names
    assert sum(model.weights) == pytest.approx(1)


def test_a_prior_of_the_offset_falls_with_rows() -> None:
    kernels = candidates(made("regression", 20, 3))
    priors = {kernel.name: kernel.prior for kernel in kernels}
    assert priors == {"linear": 1, "offset": 0.5, "rbf 0.3": 0.1, "rbf 1.0": 0.1, "rbf 3.0": 0.1}
    for without_rbf in (made("regression", 20, 3, sparse=1), made("regression", 501, 3)):
        assert [kernel.name for kernel in candidates(without_rbf)] == ["linear", "offset"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("n", [1, 3, 9, 700])
def test_a_saved_model_predicts_the_same_bits(tmp_path: Path, task: Task, n: int) -> None:
    problem = made(task, n, 6, numbers=2)
    model = personal_model(problem, shared_model(problem.columns), NOISE)
    arrays: dict[str, Any] = model.to_arrays()
    np.savez(tmp_path / "model.npz", **arrays)
    with np.load(tmp_path / "model.npz") as file:
        loaded = Mixture.from_arrays(file)
    later = data(task, 50, 6, seed=1)[0]
    np.testing.assert_array_equal(loaded.predict(later), model.predict(later))
    assert loaded.choices == model.choices
    assert loaded.has_location


# Users of any kind


def test_one_row_in_regression_is_its_target_and_the_shared_slope() -> None:
    """ȳ + u·(x − x₁)w."""
    columns = plain_columns("regression", 2)
    problem = OwnProblem.of(np.array([[1.0, 2.0]]), [5.0], columns, unit=3.0)
    shared = np.array([[0.5], [-1.0]])
    model = personal_model(problem, shared, np.zeros(1))
    np.testing.assert_allclose(model.predict(np.array([[2.0, 1.0]])), [[5 + 3 * 1.5]])
    assert model.alone is not None
    np.testing.assert_allclose(model.alone.predict(np.array([[2.0, 1.0]])), [[5.0]])
    assert not solution(problem, shared).any()


@pytest.mark.parametrize("n", [0, 1])
def test_below_two_rows_classes_are_those_of_w(n: int) -> None:
    problem = made("classification", n, 4)
    w = shared_model(problem.columns)
    later = data("classification", 5, 4)[0]
    found = personal_model(problem, w, NOISE).predict(later)
    np.testing.assert_allclose(found, later @ w[:4] + w[4])


def test_regression_without_rows_has_no_location_and_says_so() -> None:
    problem = made("regression", 0, 4)
    model = personal_model(problem, shared_model(problem.columns), NOISE)
    assert not model.has_location
    assert model.alone is not None
    assert not model.alone.has_location
    with pytest.raises(ValueError, match="a user without rows has no mean"):
        model.predict(np.zeros((1, 4)))


def with_missing(rows: Floats) -> Floats:
    rows[2, 1] = math.nan
    rows[5, 0] = math.inf
    return rows


def with_number(rows: Floats, value: float, place: Any) -> Floats:
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
    "too large a number": lambda rows: with_number(rows, 1e300, (3, 2)),
    "missing numbers": with_missing,
    "missing everywhere": lambda rows: with_number(rows, math.nan, (slice(None), 1)),
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
    model = personal_model(problem, w, NOISE)
    assert np.isfinite(list(model.choices.values())).all()
    assert model.alone is not None
    later = np.vstack([data(task, 5, 4, seed=1)[0], np.full((1, 4), math.nan)])
    for each in (model, model.alone):
        if each.has_location:
            assert np.isfinite(each.predict(later)).all()


def test_a_row_with_nan_is_left_out_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_many_rows_never_make_a_matrix_of_rows_by_rows() -> None:
    n = 6000
    rows, targets = data("classification", n, 10)
    tracemalloc.start()
    problem = OwnProblem.of(rows, targets, plain_columns("classification", 10))
    personal_model(problem, shared_model(problem.columns), NOISE).predict(rows)
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


def test_rows_of_another_width_are_refused() -> None:
    problem = made("regression", 9, 4)
    model = personal_model(problem, shared_model(problem.columns), NOISE)
    with pytest.raises(ValueError, match="rows must have 4 columns, got 3"):
        model.predict(np.zeros((2, 3)))
