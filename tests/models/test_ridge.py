"""The solved personal part: leave-one-out against refitting, weights by hand, awkward users."""

import logging
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse

from flwr_ppsgd.models.ridge import PENALTIES, TRUSTS, Path, Ridge, Span, blending_weights

Floats = NDArray[np.float64]


def rows(length: int, width: int, outputs: int = 2, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """x, y and a w that explains a part of y."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(length, width))
    w = random.normal(size=(width, outputs))
    y = x @ (w + 0.3 * random.normal(size=w.shape)) + 0.5 * random.normal(size=(length, outputs))
    return x, y, w


def refitted(x: Floats, residual: Floats, penalty: float, row: int) -> Floats:
    """The error on a row of a ridge regression that never saw it."""
    kept = np.arange(len(x)) != row
    normal = x[kept].T @ x[kept] + penalty * np.eye(x.shape[1])
    found = np.linalg.solve(normal, x[kept].T @ residual[kept])
    return np.asarray(residual[row] - x[row] @ found)


@pytest.mark.parametrize("shape", [(6, 9), (9, 4), (5, 5)])
def test_errors_on_rows_left_out_are_those_of_refitting(shape: tuple[int, int]) -> None:
    """e_j = r_j / [(K + λI)⁻¹]_jj, with more columns than rows and the other way round."""
    x, y, _ = rows(*shape)
    span = Span.of(x)
    path = Path.of(span, y)
    for place, penalty in enumerate(PENALTIES * np.trace(x @ x.T) / len(x)):
        expected = [refitted(x, y, penalty, row) for row in range(len(x))]
        np.testing.assert_allclose(path.errors[place], expected, rtol=1e-9, atol=1e-12)
        solution = np.linalg.solve(x.T @ x + penalty * np.eye(shape[1]), x.T @ y)
        np.testing.assert_allclose(span.lifted(path.coordinates[place]), solution, atol=1e-12)


def by_hand(x: Floats, y: Floats, w: Floats) -> tuple[Floats, float, float]:
    """w + θ, the mean trust and the blend's error, from every candidate refitted row by row."""
    unit = np.trace(x @ x.T) / len(x)
    models, losses, trusts, errors = [], [], [], []
    for trust in TRUSTS:
        for penalty in PENALTIES * unit:
            residual = y - trust * (x @ w)
            left_out = np.array([refitted(x, residual, penalty, j) for j in range(len(x))])
            normal = x.T @ x + penalty * np.eye(x.shape[1])
            models.append(trust * w + np.linalg.solve(normal, x.T @ residual))
            losses.append(np.mean(left_out**2))
            trusts.append(trust)
            errors.append(left_out)
    weights = np.exp(-0.5 * len(x) * (np.array(losses) / min(losses) - 1))
    weights /= weights.sum()
    blend = np.einsum("c,cnk->nk", weights, np.array(errors))
    model = np.einsum("c,cdk->dk", weights, np.array(models))
    return model, float(weights @ trusts), math.sqrt(np.mean(blend**2))


@pytest.mark.parametrize("shape", [(7, 10), (12, 4), (1, 3)])
@pytest.mark.parametrize("scale", [1.0, 1e-180, 1e180])
def test_theta_is_the_weighted_average_of_all_candidates(
    shape: tuple[int, int], scale: float
) -> None:
    """Whatever the unit of the features: w is in the inverse unit."""
    x, y, w = rows(*shape)
    model, trust, error = by_hand(x, y, w)
    found = Ridge(x * scale, y).solve((w / scale).reshape(-1))
    personal = found.theta.reshape(w.shape) * scale + w
    np.testing.assert_allclose(personal, model, rtol=1e-8, atol=1e-10)
    assert found.chosen["beta"] == pytest.approx(trust)
    assert found.chosen["loo"] == pytest.approx(error)
    assert found.chosen["loo-shared"] == pytest.approx(math.sqrt(np.mean((y - x @ w) ** 2)))


def test_sparse_rows_give_what_dense_ones_do() -> None:
    x, y, w = rows(8, 30)
    x[np.random.default_rng(1).random(x.shape) < 0.8] = 0.0
    dense = Ridge(x, y)
    thin = Ridge(sparse.csr_array(x), y)
    np.testing.assert_allclose(thin.solve(w.ravel()).theta, dense.solve(w.ravel()).theta)
    assert thin.own_size() == pytest.approx(dense.own_size())


def test_w_is_trusted_where_it_is_right_and_not_where_it_is_wrong() -> None:
    x, _, w = rows(40, 60, outputs=1)
    right = x @ w
    assert Ridge(x, right).solve(w.ravel()).chosen["beta"] == pytest.approx(1.0)
    wrong = Ridge(x, right).solve(-w.ravel())
    assert wrong.chosen["beta"] == pytest.approx(0.0, abs=1e-4)
    assert wrong.chosen["loo"] == pytest.approx(wrong.chosen["loo-local"], rel=1e-3)
    local = Ridge(x, right).solve(0.0 * w.ravel()).theta
    np.testing.assert_allclose(wrong.theta - w.ravel(), local, atol=1e-3)


def test_a_group_of_columns_is_chosen_by_the_same_error() -> None:
    """Columns of noise beside the good ones: the user's own part leaves them out."""
    random = np.random.default_rng(0)
    good = random.normal(size=(30, 3))
    noise = 3 * random.normal(size=(30, 40))
    y = good @ np.ones((3, 1)) + 0.1 * random.normal(size=(30, 1))
    both = np.hstack([good, noise])
    groups = [np.arange(3), np.arange(3, 43)]
    nothing = np.zeros(43)
    chosen = Ridge(both, y, groups).solve(nothing)
    alone = Ridge(good, y).solve(nothing[:3])
    assert chosen.chosen["loo"] == pytest.approx(alone.chosen["loo"], rel=1e-6)
    np.testing.assert_allclose(chosen.theta[:3], alone.theta, rtol=1e-6)
    assert abs(chosen.theta[3:]).max() < 1e-9
    one_head = np.concatenate([np.ones(3), random.normal(size=40)])
    trusting = Ridge(both, y, groups).solve(one_head)
    assert trusting.chosen["loo"] < chosen.chosen["loo"]
    assert abs(one_head + trusting.theta)[3:].max() < 0.01


def test_weights_are_those_of_the_rule() -> None:
    """∝ exp(−½·n·(loss/least − 1)), with the least at least 1e-12 of the targets' mean square."""
    found = blending_weights(np.array([1.0, 1.5]), 4, 1.0)
    np.testing.assert_allclose(found, np.array([1.0, math.exp(-1)]) / (1 + math.exp(-1)))
    floored = blending_weights(np.array([0.0, 1e-12, 2e-12]), 2, 1.0)
    expected = np.array([1.0, 1.0, math.exp(-1)])
    np.testing.assert_allclose(floored, expected / expected.sum())
    np.testing.assert_array_equal(blending_weights(np.zeros(4), 3, 0.0), np.full(4, 0.25))


def test_a_row_with_nan_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    x, y, w = rows(6, 4)
    spoilt = np.vstack([x, x[:2]])
    spoilt[6, 1] = np.nan
    spoilt_y = np.vstack([y, y[:2]])
    spoilt_y[7, 0] = np.inf
    with caplog.at_level(logging.WARNING, "flwr.ppsgd"):
        found = Ridge(spoilt, spoilt_y).solve(w.ravel())
    assert "2 of this user's 8 rows" in caplog.text
    np.testing.assert_array_equal(found.theta, Ridge(x, y).solve(w.ravel()).theta)
    nothing = Ridge(np.full((2, 4), np.nan), y[:2])
    np.testing.assert_array_equal(nothing.solve(w.ravel()).theta, np.zeros(w.size))
    assert nothing.own_size() == 0.0


AWKWARD = {
    "one row": (np.ones((1, 3)), np.ones((1, 1))),
    "one empty row": (np.zeros((1, 3)), np.ones((1, 1))),
    "constant targets": (np.arange(12.0).reshape(4, 3), np.full((4, 1), 7.0)),
    "targets of zero": (np.arange(12.0).reshape(4, 3), np.zeros((4, 1))),
    "equal rows": (np.ones((5, 3)), np.arange(5.0)[:, None]),
    "equal columns": (np.repeat(np.arange(6.0)[:, None], 3, axis=1), np.arange(6.0)[:, None]),
    "huge features": (np.array([[1e300, 1, 0], [-1e300, 2, 1]]), np.ones((2, 1))),
    "tiny features": (np.full((4, 3), 1e-300), np.ones((4, 1))),
    "huge targets": (np.arange(12.0).reshape(4, 3), np.full((4, 1), 1e300)),
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e200])
def test_no_user_makes_nan(name: str, size: float) -> None:
    x, y = AWKWARD[name]
    w = np.array([size, -size, size])
    solver = Ridge(x, y)
    found = solver.solve(w)
    assert np.isfinite(found.theta).all()
    assert math.isfinite(solver.own_size())
    assert 0.0 <= found.chosen["beta"] <= 1.0
    assert math.isfinite(found.chosen["loo"])


def test_the_size_of_the_own_solution_counts_features_that_the_user_has() -> None:
    x, y, _ = rows(20, 5, outputs=1)
    wider = np.hstack([x, np.zeros((20, 50))])
    local = Ridge(x, y).solve(np.zeros(5)).theta
    assert Ridge(wider, y).own_size() == pytest.approx(math.sqrt(np.mean(local**2)))


def test_with_groups_every_pair_of_columns_and_heads_is_a_candidate_once() -> None:
    """β = 0 is the same candidate for every head: counted twice, it would outvote the others."""
    x, y, w = rows(10, 5)
    groups = [np.array([0, 1, 4]), np.array([2, 3, 4])]
    choices = [np.arange(5), *groups]
    models, losses = [], []
    for columns in choices:
        for number, head in enumerate(choices):
            part = np.zeros_like(w)
            part[head] = w[head]
            for trust in TRUSTS[1:] if number else TRUSTS:
                residual = y - trust * (x @ part)
                for penalty in PENALTIES * np.trace(x[:, columns] @ x[:, columns].T) / len(x):
                    own = x[:, columns]
                    left_out = [refitted(own, residual, penalty, row) for row in range(len(x))]
                    normal = own.T @ own + penalty * np.eye(len(columns))
                    model = trust * part
                    model[columns] += np.linalg.solve(normal, own.T @ residual)
                    models.append(model)
                    losses.append(np.mean(np.square(left_out)))
    weights = np.exp(-0.5 * len(x) * (np.array(losses) / min(losses) - 1))
    expected = np.einsum("c,cdk->dk", weights / weights.sum(), np.array(models))
    found = Ridge(x, y, groups).solve(w.ravel()).theta.reshape(w.shape)
    np.testing.assert_allclose(w + found, expected, rtol=1e-8, atol=1e-10)
