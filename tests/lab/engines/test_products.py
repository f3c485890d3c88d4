"""Products of users' own rows: whose they are, in which order, and that they are made once."""

from typing import Any

import numpy as np
import pytest
from scipy import sparse

from flwr_ppsgd import Poisson, Release, Steps
from flwr_ppsgd.lab.engines import products
from flwr_ppsgd.lab.engines.batches import Table
from flwr_ppsgd.lab.engines.engine import Setting
from flwr_ppsgd.lab.engines.linear import CohortEngine
from flwr_ppsgd.lab.engines.thetas import Kind, thetas
from flwr_ppsgd.learner import shuffled

SIZES = np.array([3, 25, 10, 11, 17, 30])  # some below a minibatch
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
USERS = len(SIZES)
SEED = 5
DOUBLE = np.dtype(np.float64)
SOURCE = np.random.default_rng(0)
X = SOURCE.normal(size=(OFFSETS[-1], 40)) * (SOURCE.random((OFFSETS[-1], 40)) < 0.3)
Y = np.eye(3)[SOURCE.integers(3, size=len(X))]
# user 2 has no test rows
TEST = (X[::2], Y[::2], np.array([0, 2, 14, 14, 20, 28, 48]))


def table(sparse_x: bool = True) -> Table:
    x, y, offsets = TEST
    test = (sparse.csr_array(x), y, offsets) if sparse_x else TEST
    own = sparse.csr_array(X) if sparse_x else X
    return Table(own, Y, OFFSETS, batch_size=10, seed=SEED, test=test)


def engine(data: Table, kind: Kind = "span", *, average: bool = False) -> CohortEngine:
    release = Release(Poisson(USERS, 0.4), 0.5, 1.0)
    settings = [Setting(release, Steps.from_ratio(0.3, a)) for a in (0.0, 0.3, 3.0, np.inf)]
    return CohortEngine(data, settings, seed=2, rounds=9, kind=kind, average=average)


@pytest.mark.parametrize("user", range(USERS))
def test_sparse_rows_are_in_the_order_of_the_first_epoch(user: int) -> None:
    found = table().products(DOUBLE)
    order = OFFSETS[user] + shuffled(SEED, user, 0, int(SIZES[user]))
    np.testing.assert_array_equal(found.order(user), order)
    positions = found.positions(np.array([user]), order[None])
    np.testing.assert_array_equal(positions, [np.arange(OFFSETS[user], OFFSETS[user + 1])])
    np.testing.assert_allclose(found.gram(user), X[order] @ X[order].T, atol=1e-12)


@pytest.mark.parametrize("user", range(USERS))
def test_dense_rows_are_in_the_order_of_the_table(user: int) -> None:
    found = table(sparse_x=False).products(DOUBLE)
    own = np.arange(OFFSETS[user], OFFSETS[user + 1])
    np.testing.assert_array_equal(found.order(user), own)
    np.testing.assert_array_equal(found.gram(user), X[own] @ X[own].T)


def test_products_with_measured_rows_have_the_same_order() -> None:
    data = table()
    found = data.products(DOUBLE)
    assert data.test is not None
    x, _, offsets = TEST
    for user in data.test.measured.tolist():
        own = x[offsets[user] : offsets[user + 1]]
        cross = -(own @ X[found.order(user)].T)
        np.testing.assert_allclose(found.cross(user, data.test), cross, atol=1e-12)


def test_engines_on_one_table_work_products_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also blocks of a sweep, which have a table in common."""
    data = table()
    first = engine(data)
    for _ in range(9):
        first.advance()
    measured = first.measures()

    def again(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(products, "_product", again)
    second = engine(data)
    for _ in range(9):
        second.advance()
    assert second.measures() == measured


def test_products_in_another_precision_are_others() -> None:
    data = table()
    assert data.products(np.dtype(np.float32)).gram(1).dtype == np.float32
    assert data.products(DOUBLE).gram(1).dtype == np.float64


def test_rows_that_were_never_drawn_are_left_out() -> None:
    """In the first pass, scores are products with the rows drawn so far: a NaN elsewhere is not
    read."""
    data = table()
    kept = thetas("span", data, columns=2, dtype=DOUBLE, average=False)
    users = np.array([1, 5])
    grams = [data.products(DOUBLE).gram(user) for user in users.tolist()]
    whole = [gram.copy() for gram in grams]
    for drawn in (0, 10, 20):
        batch = data.batch(users, np.full(2, drawn // 10 + 1), DOUBLE)
        for gram in grams:
            gram[:, drawn:] = np.nan
        assert np.isfinite(kept.scores(batch)).all()
        for gram, values in zip(grams, whole, strict=True):
            gram[...] = values
        kept.step(batch, np.ones((2, 10, 2)))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("sparse_x", [False, True])
def test_measures_in_the_first_pass_are_those_of_theta_itself(
    sparse_x: bool, average: bool
) -> None:
    own = engine(table(sparse_x), average=average)
    direct = engine(table(sparse_x), "direct", average=average)
    for _ in range(9):
        own.advance()
        direct.advance()
        theirs = direct.measures()
        for place, row in own.measures().items():
            assert row == pytest.approx(theirs[place], rel=1e-9)


@pytest.mark.parametrize("average", [False, True])
def test_a_restored_engine_knows_which_rows_were_drawn(average: bool) -> None:
    """Two rounds are less than a pass."""
    first = engine(table(), average=average)
    for _ in range(2):
        first.advance()
    second = engine(table(), average=average)
    second.restore(first.state())
    assert second.measures() == first.measures()
    first.advance()
    second.advance()
    np.testing.assert_array_equal(second.w(1), first.w(1))
