"""The solved personal part with softmax: optimality, folds, trust in w, awkward users."""

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_ppsgd.models.logistic import PENALTIES, Logistic, fitted, folds, left_out, log_softmax
from flwr_ppsgd.models.ridge import Span

Floats = NDArray[np.float64]
CLASSES = 3


def users_rows(length: int, width: int, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """x, one-hot y, and the w behind them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(length, width))
    w = 2 * random.normal(size=(width, CLASSES))
    chosen = (x @ w + random.gumbel(size=(length, CLASSES))).argmax(axis=1)
    return x, np.eye(CLASSES)[chosen], w


@pytest.mark.parametrize("shape", [(8, 20), (30, 4)])
def test_every_fit_has_no_gradient_left_on_the_rows_that_it_saw(shape: tuple[int, int]) -> None:
    x, y, w = users_rows(*shape)
    span = Span.of(x)
    offsets = 0.5 * (x @ w)[None]
    penalty = 0.4 * span.unit
    seen = folds(len(x))
    fits = fitted(span, y, offsets, np.array([penalty]), seen)
    for fit, kept in zip(fits, seen == 1, strict=True):
        own = span.lifted(fit[0])
        chances = np.exp(log_softmax(offsets[0] + x @ own))
        gradient = x[kept].T @ (chances - y)[kept] + penalty * span.scale**2 * own
        start = x[kept].T @ (np.exp(log_softmax(offsets[0])) - y)[kept]
        assert abs(gradient).max() < 1e-3 * abs(start).max()


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 23])
def test_every_row_is_left_out_once(rows: int) -> None:
    seen = folds(rows)
    assert len(seen) == 1 + min(rows, 5)
    assert seen[0].all()
    np.testing.assert_array_equal((1 - seen[1:]).sum(axis=0), np.ones(rows))
    sizes = (1 - seen[1:]).sum(axis=1)
    assert sizes.max() - sizes.min() <= 1


def test_a_row_is_scored_by_the_fit_that_did_not_see_it() -> None:
    x, y, w = users_rows(11, 4)
    span = Span.of(x)
    offsets = np.stack([0.0 * (x @ w), x @ w])
    seen = folds(len(x))
    fits = fitted(span, y, offsets, np.array([0.1, 0.2]) * span.unit, seen)
    scores = left_out(span, offsets, fits, seen)
    for row in range(len(x)):
        fold = int(np.flatnonzero(seen[:, row] == 0)[0])
        for candidate in range(2):
            own = span.lifted(fits[fold, candidate])
            expected = offsets[candidate, row] + x[row] @ own
            np.testing.assert_allclose(scores[candidate, row], expected, atol=1e-12)


def test_w_is_trusted_where_it_is_right_and_not_where_it_is_wrong() -> None:
    x, y, w = users_rows(40, 60)
    solver = Logistic(x, y)
    right = solver.solve(w.ravel())
    wrong = solver.solve(-w.ravel())
    local = solver.solve(0.0 * w.ravel())
    assert right.chosen["beta"] > 0.7
    assert right.chosen["loo"] < 0.7 * right.chosen["loo-local"]
    assert wrong.chosen["beta"] < 0.01
    np.testing.assert_allclose(wrong.theta - w.ravel(), local.theta, atol=0.02)


def test_a_group_of_columns_is_chosen_by_the_same_error() -> None:
    x, y, _ = users_rows(60, 3)
    both = np.hstack([x, 3 * np.random.default_rng(5).normal(size=(60, 80))])
    groups = [np.arange(3), np.arange(3, 83)]
    nothing = np.zeros(83 * CLASSES)
    chosen = Logistic(both, y, groups).solve(nothing)
    assert chosen.chosen["loo"] < 0.6 * Logistic(both, y).solve(nothing).chosen["loo"]
    noise = abs(chosen.theta.reshape(83, CLASSES)[3:]).max()
    assert noise < 1e-3 * abs(chosen.theta).max()


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e300])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e200])
def test_no_user_makes_nan(length: int, scale: float, size: float) -> None:
    """One row, one class only, empty rows, huge features, huge w."""
    x = scale * np.ones((length, 2))
    y = np.tile(np.eye(CLASSES)[0], (length, 1))
    solver = Logistic(x, y)
    found = solver.solve(np.full(2 * CLASSES, size) * np.arange(2 * CLASSES))
    assert np.isfinite(found.theta).all()
    assert np.isfinite(list(found.chosen.values())).all()
    assert np.isfinite(solver.own_size())


def test_a_row_with_nan_is_left_out() -> None:
    x, y, w = users_rows(6, 4)
    spoilt = np.vstack([x, np.full((1, 4), np.nan)])
    found = Logistic(spoilt, np.vstack([y, y[:1]])).solve(w.ravel())
    np.testing.assert_array_equal(found.theta, Logistic(x, y).solve(w.ravel()).theta)


def test_with_groups_local_learning_is_a_candidate_once_for_each_choice_of_columns() -> None:
    x, y, w = users_rows(12, 4)
    solver = Logistic(x, y, [np.arange(2), np.arange(2, 4)])
    heads = solver._design.heads(w.ravel())
    fits = solver._fits(*solver._design.predictions(heads))
    pairs = [(each.place, each.head) for each in fits]
    assert pairs == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 2)]
    local = [int((each.trusts == 0).sum()) for each in fits]
    assert local == [len(PENALTIES), len(PENALTIES), 0, len(PENALTIES), 0]
