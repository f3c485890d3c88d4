"""What is drawn for several rounds at once is what each round would have drawn by itself."""

import numpy as np
import pytest

from flwr_ppsgd import Poisson, Release, Steps
from flwr_ppsgd.lab.engines.ahead import MOST_ROUNDS, Ahead
from flwr_ppsgd.lab.engines.batches import Table
from flwr_ppsgd.lab.engines.engine import Setting
from flwr_ppsgd.lab.engines.linear import CohortEngine
from flwr_ppsgd.learner import minibatch_rows
from flwr_ppsgd.noise import coins_for

SIZES = np.array([3, 25, 10, 11, 4, 17, 30, 10, 1, 12, 20, 9])  # unequal, some below a minibatch
EQUAL = np.full(12, 20)
ROUNDS = 3 * MOST_ROUNDS + 1
SEED = 3


def table(sizes: np.ndarray) -> Table:
    source = np.random.default_rng(0)
    rows = int(sizes.sum())
    x = source.normal(size=(rows, 4))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Table(x, source.normal(size=(rows, 2)), offsets, batch_size=10, seed=5)


@pytest.mark.parametrize("sizes", [SIZES, EQUAL], ids=["unequal", "equal"])
@pytest.mark.parametrize("users_at_once", [1, 12], ids=["one round", "several rounds"])
def test_each_round_draws_its_own_users_rows_and_normals(
    sizes: np.ndarray, users_at_once: int
) -> None:
    """Users come twice or more in rounds that are drawn together, from one epoch and from two."""
    data = table(sizes)
    cohort = Poisson(len(sizes), 0.2)
    ahead = Ahead(data, cohort, SEED, np.dtype(np.float64))
    visits = np.zeros(len(sizes), dtype=np.intp)
    for round_ in range(1, ROUNDS + 1):
        found = ahead.round(round_, visits, users_at_once, noisy=True)
        uniforms = coins_for(SEED, "cohort", round_).uniforms(len(sizes))
        np.testing.assert_array_equal(found.users, cohort.members(uniforms))
        np.testing.assert_array_equal(found.normals, coins_for(SEED, "noise", round_).normals(8))
        visits[found.users] += 1
        np.testing.assert_array_equal(found.visits, visits[found.users])
        for batch in ahead.batches(found, users_at_once):
            assert batch.rows is not None
            members = zip(batch.users.tolist(), batch.rows, batch.counts.tolist(), strict=True)
            for place, (user, rows, count) in enumerate(members):
                own = minibatch_rows(5, user, int(visits[user]), int(sizes[user]), 10)
                np.testing.assert_array_equal(rows[:count], data.offsets[user] + own)
                np.testing.assert_array_equal(batch.dense()[place, :count], data.x[rows[:count]])
                assert not batch.dense()[place, count:].any()


@pytest.mark.parametrize("sizes", [SIZES, EQUAL], ids=["unequal", "equal"])
def test_an_engine_that_is_restored_in_between_draws_the_same(sizes: np.ndarray) -> None:
    settings = [Setting(Release(Poisson(12, 0.2), 1.0, 1.0), Steps(0.1, 0.1))]
    whole = CohortEngine(table(sizes), settings, seed=SEED, kind="span")
    first = CohortEngine(table(sizes), settings, seed=SEED, kind="span")
    second = CohortEngine(table(sizes), settings, seed=SEED, kind="span")
    for _ in range(5):
        first.advance()
    second.advance()  # has drawn other rounds ahead
    second.restore(first.state())
    for _ in range(ROUNDS):
        whole.advance()
    for _ in range(ROUNDS - 5):
        second.advance()
    np.testing.assert_allclose(second.w(0), whole.w(0), rtol=1e-9)
    for user in range(12):
        np.testing.assert_allclose(second.theta(0, user), whole.theta(0, user), rtol=1e-9)


def test_fewer_rounds_are_drawn_ahead_if_many_users_are_enrolled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 users and 8 coordinates: 3 rounds have 36 uniforms, and a fourth would be too many."""
    monkeypatch.setattr("flwr_ppsgd.lab.engines.ahead.MOST_NUMBERS", 40)
    ahead = Ahead(table(EQUAL), Poisson(12, 0.2), SEED, np.dtype(np.float64))
    ahead.round(1, np.zeros(12, dtype=np.intp), 1000, noisy=True)
    assert len(ahead._coming) == 3 - 1
