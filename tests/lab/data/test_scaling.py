"""Scaling on the device: from the user's own training rows alone, and by type."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from flwr_ppsgd.lab.data.learners import linear_learner
from flwr_ppsgd.lab.data.per_user import PerUser
from flwr_ppsgd.lab.data.scaling import FARTHEST, own_scaled, with_kinds


def table(**changes: Any) -> PerUser:
    """Two users with 40 rows each: a large column, a flag, and one of size 1."""
    draw = np.random.default_rng(0)
    rows = 80
    x = np.stack(
        [draw.normal(2000, 10, rows), draw.integers(0, 2, rows), draw.normal(size=rows)], axis=1
    )
    values: dict[str, Any] = {
        "source": "made up",
        "x": x,
        "y": draw.normal(50, 5, rows),
        "test": np.tile([False, False, False, True], 20),
        "offsets": np.array([0, 40, 80]),
        "users": (0, 1),
        "task": "regression",
        "outputs": 1,
        "feature_names": ("year", "flag", "size"),
    }
    return PerUser(**{**values, **changes})


def test_only_columns_far_from_a_scale_of_1_are_scaled() -> None:
    data = table()
    seen = own_scaled(data)
    assert seen.own is not None
    assert seen.own.columns.tolist() == [0]
    np.testing.assert_array_equal(seen.x[:, 1:], data.x[:, 1:])
    for user in range(2):
        own = seen.x[seen.rows(user, test=False), 0]
        np.testing.assert_allclose([own.mean(), own.std()], [0, 1], atol=1e-12)
    assert "chosen by looking at data: not covered" in seen.notes[-1]


def test_own_decides_without_looking() -> None:
    seen = own_scaled(table(), "own")
    assert seen.own is not None
    assert seen.own.columns.tolist() == [0, 1, 2]
    assert "looking" not in " ".join(seen.notes)


def test_what_a_user_sees_depends_on_own_training_rows_alone() -> None:
    """Changing everybody else's rows, or the own test rows, changes nothing about the scale."""
    data = table()
    x = data.x.copy()
    x[40:] *= 3
    x[3] = 1e9
    other = own_scaled(replace(data, x=x), "own")
    seen = own_scaled(data, "own")
    kept = seen.rows(0, test=False)
    np.testing.assert_array_equal(seen.x[kept], other.x[kept])


def test_targets_lose_the_users_own_mean_and_can_be_had_back() -> None:
    data = table()
    seen = own_scaled(data)
    for user in range(2):
        own = seen.rows(user, test=False)
        np.testing.assert_allclose(seen.targets(own).mean(), 0, atol=1e-12)
        np.testing.assert_allclose(seen.amounts(own)[:, 0], data.y[own])
    assert (
        own_scaled(table(y=(data.y - 50) / 5, x=data.x[:, 1:], feature_names=("a", "b"))).own
        is None
    )


def test_targets_far_from_a_scale_of_1_are_divided_and_rmse_is_not() -> None:
    """Of an error of 1 own deviation, RMSE is that deviation in the units of the source."""
    data = table()
    seen = own_scaled(data)
    deviations = [data.y[data.rows(user, test=False)].std() for user in range(2)]
    np.testing.assert_allclose(seen.units, deviations)
    learner = linear_learner(seen, 0, batch_size=5, seed=0)
    nothing = np.zeros(seen.features)
    expected = data.y[data.rows(0, test=True)] - data.y[data.rows(0, test=False)].mean()
    found = learner.evaluate(nothing, nothing)["rmse"]
    assert found == pytest.approx(np.sqrt(np.mean(expected**2)))


def test_a_constant_column_and_a_far_test_row_stay_finite() -> None:
    x = np.full((80, 1), 1234.5)
    x[3] = 1e12
    seen = own_scaled(table(x=x, feature_names=("c",)))
    assert seen.x[seen.rows(0, test=False)].any() == np.False_
    assert seen.x[3, 0] == FARTHEST


def test_sparse_columns_of_numbers_are_scaled_and_categories_are_not() -> None:
    dense = table()
    x = np.concatenate([dense.x, np.eye(80)], axis=1)
    names = (*dense.feature_names, *(f"film={place}" for place in range(80)))
    seen = own_scaled(table(x=sparse.csr_array(x), feature_names=names))
    expected = own_scaled(dense)
    assert seen.is_sparse
    np.testing.assert_allclose(seen.x[:, :3].toarray(), expected.x)
    np.testing.assert_array_equal(seen.x[:, 3:].toarray(), np.eye(80))


@pytest.mark.parametrize("kind", ["bytes", "standardised"])
def test_what_has_a_public_scale_is_left_alone(kind: str) -> None:
    data = table(y=np.random.default_rng(1).normal(size=80))
    if kind == "bytes":
        data = replace(data, x=(data.x * 100 % 256).astype(np.uint8))
    else:
        data = data.standardised([2000, 0, 0], [10, 1, 1])
    assert own_scaled(data).own is None


def test_words_in_a_sparse_table_keep_their_scale() -> None:
    """Shares of words are 0 in most rows: scaled, the table would be full and rare words loud."""
    rng = np.random.default_rng(0)
    words = np.where(rng.random((80, 20)) < 0.1, 0.02, 0.0)
    names = tuple(f"word {at}" for at in range(20))
    plain = table(x=sparse.csr_array(words), feature_names=names)
    seen = own_scaled(plain)
    assert (seen.x != plain.x).nnz == 0


def test_numbers_are_scaled_on_the_device_and_flags_stay() -> None:
    seen = with_kinds(table())
    assert seen.kinds == ("number", "as-is", "number")
    assert seen.with_bias().all_kinds == ("number", "as-is", "number", "as-is")
    assert "0 and 1 alone was chosen by looking at data" in seen.notes[-1]
    np.testing.assert_array_equal(seen.x, table().x)
    assert with_kinds(table().standardised(0.0, 2.0)).kinds == ("as-is",) * 3


def test_columns_that_most_users_lack_are_sparse_by_kind() -> None:
    """65 categories are many, 2 are few; a number that fills a sparse table is a number."""
    names = ("age", "sex=f", "sex=m", "word#1", *(f"item={at}" for at in range(65)))
    dense = np.zeros((80, len(names)))
    dense[:, 0] = np.arange(80) + 1
    dense[:, 1] = 1.0
    seen = with_kinds(table(x=sparse.csr_array(dense), feature_names=names))
    assert seen.kinds == ("number", "as-is", "as-is", *("sparse",) * 66)
    unnamed = with_kinds(table(x=sparse.csr_array(dense), feature_names=()))
    assert set(unnamed.kinds) == {"sparse"}
