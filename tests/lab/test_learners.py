"""One user of a table: what a model sees, the same rows as everywhere, measures by task."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from flwr_ppsgd import Order
from flwr_ppsgd.arrays import Layout
from flwr_ppsgd.lab.cnn import paper_cnn
from flwr_ppsgd.lab.learners import linear_learner, network_learner
from flwr_ppsgd.lab.per_user import PerUser
from flwr_ppsgd.learner import Minibatches
from tests.support.own_data import per_user

USERS, ROWS = 3, 8


@functools.cache
def table(task: str = "classification", kind: str = "dense") -> PerUser:
    """Three users with 8 rows of 4 features each, the last two for testing."""
    source = np.random.default_rng(0)
    n = USERS * ROWS
    dense = np.where(source.random((n, 4)) < 0.5, 0.0, source.normal(size=(n, 4)))
    y: dict[str, Any] = {
        "classification": np.arange(n) % 3,
        "regression": source.normal(size=n),
        "multi-label": sparse.csr_array((source.random((n, 3)) < 0.5) * 1.0),
    }
    x = sparse.csr_array(dense) if kind == "sparse" else dense
    user = np.repeat(np.arange(USERS), ROWS)
    test = np.tile(np.arange(ROWS) >= ROWS - 2, USERS)
    return per_user({"user": user, "x": x, "y": y[task], "test": test})


def order(visit: int) -> Order:
    return Order(visit, 0.1, 1.0, "mean", True, visit=visit)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_model_sees_features_and_a_bias(kind: str) -> None:
    data, rows = table(kind=kind), np.array([1, 20])
    seen = replace(data, bias=True)
    assert seen.features == 5
    expected = np.hstack([data.matrix(rows), np.ones((2, 1))])
    np.testing.assert_array_equal(seen.matrix(rows), expected)
    x, y, offsets = seen.part(test=True, shift=0.1, dtype=np.float32)
    assert sparse.issparse(x) == (kind == "sparse")
    np.testing.assert_array_equal(offsets, [0, 2, 4, 6])
    dense = x.toarray() if kind == "sparse" else x
    np.testing.assert_allclose(dense[2:4], seen.matrix(np.array([14, 15])), rtol=1e-6)
    np.testing.assert_allclose(y[0], np.eye(3)[0] - 0.1, rtol=1e-6)
    assert {x.dtype, y.dtype} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("task", ["classification", "multi-label", "regression"])
def test_gradients_are_those_of_the_same_minibatch_anywhere(task: str, kind: str) -> None:
    """Xᵀ(Xv − y)/m over the rows that ``Minibatches`` gives this user; targets minus .1 where
    there are classes."""
    data = table(task, kind)
    shift = 0.0 if task == "regression" else 0.1
    learner = linear_learner(data, 1, batch_size=4, seed=5, shift=shift)
    assert learner.num_examples == ROWS - 2
    own = data.rows(1, test=False)
    source = np.random.default_rng(1)
    w, theta = source.normal(size=(2, 4 * data.outputs))
    for visit in (1, 2, 3):
        rows = own[Minibatches(own, own, 4, seed=5, user=1).rows(visit)]
        x, y = data.matrix(rows), data.targets(rows) - shift
        expected = (x.T @ (x @ (w + theta).reshape(4, -1) - y) / 4).reshape(-1)
        g_w, g_theta = learner.gradients(w, theta, order(visit))
        np.testing.assert_allclose(g_w, expected)
        np.testing.assert_array_equal(g_w, g_theta)


MEASURES = {"classification": "accuracy", "multi-label": "precision_at_1", "regression": "rmse"}


@pytest.mark.parametrize("task", MEASURES)
def test_measures_by_task(task: str) -> None:
    """On the two test rows: share of right classes, share of documents whose first label is right,
    RMSE."""
    data = table(task)
    learner = linear_learner(data, 2, batch_size=4, seed=0)
    w = np.random.default_rng(2).normal(size=4 * data.outputs)
    rows = data.rows(2, test=True)
    scores, y = data.matrix(rows) @ w.reshape(4, -1), data.targets(rows)
    expected = np.mean([y[i, scores[i].argmax()] for i in range(2)])
    if task == "regression":
        expected = np.sqrt(np.mean((scores - y) ** 2))
    measures = learner.evaluate(w, learner.initial_theta())
    assert measures[MEASURES[task]] == pytest.approx(expected)
    assert measures["loss"] == pytest.approx(0.5 * ((scores - y) ** 2).sum() / 2)


def test_a_user_without_test_rows_measures_nothing() -> None:
    columns = {"user": np.array([0, 0]), "x": np.ones((2, 1)), "y": np.array([0, 1])}
    data = per_user({**columns, "test": np.array([0, 0])})
    assert linear_learner(data, 0, batch_size=1, seed=0).evaluate(np.ones(2), np.ones(2)) == {}


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("regression", {"loss": "softmax"}, "softmax is for classification and this is regression"),
        ("multi-label", {"loss": "softmax"}, "use loss='squared'"),
        ("classification", {"shift": 1.0}, "must be in \\[0, 1\\), got 1.0"),
        ("classification", {"loss": "softmax", "shift": 0.1}, "a shift of targets"),
        ("classification", {"user": 3}, "no user number 3: they go from 0 to 2"),
    ],
)
def test_what_does_not_fit_is_refused(task: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"table: .*{message}"):
        linear_learner(table(task), **{"user": 0, "batch_size": 2, "seed": 0, **changes})


def test_a_network_learns_from_a_table() -> None:
    """The CNN's gradients at class numbers are those at one-hot minus .1."""
    source = np.random.default_rng(3)
    images, y = source.integers(0, 256, (12, 784), dtype=np.uint8), np.arange(12) % 10
    test = np.arange(12) % 4 == 3
    data = per_user({"user": np.repeat([0, 1], 6), "x": images, "y": y, "test": test})
    model = paper_cnn(0, dtype=torch.float64)
    learner = network_learner(model, data, 1, batch_size=2, seed=0)
    arrays = model.initial_arrays()
    w, theta = Layout.of(arrays).flatten(arrays), learner.initial_theta()
    own = data.rows(1, test=False)
    rows = own[Minibatches(own, own, 2, seed=0, user=1).rows(1)]
    expected = model.gradients(w, theta, (data.matrix(rows), data.targets(rows, 0.1)), "mean")
    np.testing.assert_allclose(learner.gradients(w, theta, order(1))[0], expected[0])
    assert set(learner.evaluate(w, theta)) == {"loss", "accuracy"}


def test_only_renumbers_users() -> None:
    data = table()
    some = data.only([2, 0])
    assert some.users == ("2", "0")
    found, expected = some.rows(0, test=True), data.rows(2, test=True)
    np.testing.assert_array_equal(some.matrix(found), data.matrix(expected))
    found, expected = some.rows(1, test=False), data.rows(0, test=False)
    np.testing.assert_array_equal(some.targets(found), data.targets(expected))
