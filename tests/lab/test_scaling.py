"""Scaling on the device: from the user's own training rows alone, and by the schema's kinds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from flwr_ppsgd.lab.learners import linear_learner
from flwr_ppsgd.lab.per_user import PerUser
from flwr_ppsgd.lab.scaling import FARTHEST, scale_own_rows, with_kinds
from tests.support.own_data import per_user

ROWS = 80


def columns(**changes: Any) -> dict[str, Any]:
    """Two users with 40 rows each, a fourth for testing: a large column, a flag, a small one."""
    draw = np.random.default_rng(0)
    return {
        "user": np.repeat([0, 1], 40),
        "year": draw.normal(2000, 10, ROWS),
        "flag": draw.integers(0, 2, ROWS),
        "size": draw.normal(size=ROWS),
        "y": draw.normal(50, 5, ROWS),
        "test": np.tile([0, 0, 0, 1], 20),
        **changes,
    }


def table(**changes: Any) -> PerUser:
    return per_user(columns(**changes))


def test_numbers_are_scaled_by_own_training_rows_and_flags_stay() -> None:
    data = table()
    seen = scale_own_rows(data)
    np.testing.assert_array_equal(seen.x[:, 1], data.x[:, 1])
    for user in range(2):
        own = seen.x[seen.rows(user, test=False)][:, [0, 2]]
        np.testing.assert_allclose(own.mean(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(own.std(axis=0), 1)


def test_a_test_row_changes_nothing_else() -> None:
    far = columns()["year"].copy()
    far[3] = 1e9
    seen = scale_own_rows(table())
    other = scale_own_rows(table(year=far))
    kept = seen.rows(0, test=False)
    np.testing.assert_array_equal(seen.x[kept], other.x[kept])
    assert other.x[3, 0] == FARTHEST


def test_targets_are_in_own_deviations_and_rmse_in_the_units_of_the_source() -> None:
    data = table()
    seen = scale_own_rows(data)
    for user in range(2):
        own = seen.rows(user, test=False)
        np.testing.assert_allclose(seen.targets(own).mean(), 0, atol=1e-12)
        np.testing.assert_allclose(seen.amounts(own)[:, 0], data.y[own])
    deviations = [data.y[data.rows(user, test=False)].std() for user in range(2)]
    np.testing.assert_allclose(seen.units, deviations)
    learner = linear_learner(seen, 0, batch_size=5, seed=0)
    nothing = np.zeros(seen.features)
    expected = data.y[data.rows(0, test=True)] - data.y[data.rows(0, test=False)].mean()
    found = learner.evaluate(nothing, nothing)["rmse"]
    assert found == pytest.approx(np.sqrt(np.mean(expected**2)))


def test_a_column_that_is_constant_in_own_training_rows_is_0_in_other_rows_too() -> None:
    constant = np.where(np.arange(ROWS) < 40, 1234.5, np.arange(ROWS) + 0.5)
    constant[3] = 99.0  # a test row
    seen = scale_own_rows(table(year=constant))
    assert not seen.x[:40, 0].any()
    assert seen.x[40:, 0].any()


def test_numbers_in_a_sparse_table_are_scaled_and_categories_are_not() -> None:
    films = np.array([f"f{place}" for place in range(ROWS)], dtype=object)
    data = per_user(columns(film=films), categorical_columns="film")
    seen = scale_own_rows(data)
    assert sparse.issparse(seen.x)
    np.testing.assert_allclose(seen.x[:, :3].toarray(), scale_own_rows(table()).x)
    assert (seen.x[:, 3:] != data.x[:, 3:]).nnz == 0


def test_pixels_are_left_alone() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 9), dtype=np.uint8)
    data = per_user({**columns(y=np.arange(ROWS) % 2), "pixels": pixels}, feature_columns="pixels")
    assert scale_own_rows(data).own is None
    assert with_kinds(data).kinds == ("as-is",) * 9
    np.testing.assert_array_equal(data.matrix(np.arange(ROWS)), pixels / 255)


def test_the_recipe_gets_the_kinds_of_columns_and_raw_rows() -> None:
    seen = with_kinds(table())
    assert seen.kinds == ("number", "as-is", "number")
    assert replace(seen, bias=True).all_kinds == ("number", "as-is", "number", "as-is")
    np.testing.assert_array_equal(seen.x, table().x)


def test_columns_of_many_words_are_sparse_by_kind_and_few_are_not() -> None:
    """65 words are many, 2 are few."""
    items = np.array([f"i{place % 65}" for place in range(ROWS)], dtype=object)
    sex = np.array(["f", "m"] * 40, dtype=object)
    data = per_user(columns(sex=sex, item=items), categorical_columns="sex,item")
    kinds = with_kinds(data).kinds
    assert kinds == ("number", "as-is", "number", "as-is", "as-is", *("sparse",) * 65)
