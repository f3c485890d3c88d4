"""From users' measures to those of all users, with numbers a reader can redo."""

import numpy as np
import pytest

from flwr_ppsgd.lab.measures import badness, measure_of, over_users


def test_the_mean_is_weighted_and_the_spread_is_not() -> None:
    """20 users with accuracies 0, .05, … .95: the worst two have 0 and .05."""
    accuracy = np.arange(20)[:, None] / 20
    weights = np.where(np.arange(20) == 19, 81.0, 1.0)
    found = over_users({"loss": 1 - accuracy, "accuracy": accuracy}, weights)
    assert found["accuracy"][0] == pytest.approx((accuracy[:19].sum() + 81 * 0.95) / 100)
    assert found["loss"][0] == pytest.approx(1 - found["accuracy"][0])
    assert found["accuracy_mean_user"][0] == pytest.approx(0.475)
    assert found["accuracy_worst_tenth"][0] == pytest.approx(0.025)


def test_of_an_error_the_largest_is_the_worst() -> None:
    """Fewer than ten users: the worst tenth is one of them. Each setting is a column of its own."""
    found = over_users({"rmse": np.array([[3.0, 1.0], [1.0, 5.0], [2.0, 2.0]])}, np.ones(3))
    assert found["rmse_worst_tenth"].tolist() == [3.0, 5.0]


def test_own_rows_alone_spread_too_if_they_were_measured() -> None:
    """The worst of the local models is another user's than the worst personal one."""
    values = {"loss": [1.0, 2.0], "local_loss": [5.0, 3.0]}
    by_user = {name: np.array(each) for name, each in values.items()}
    found = over_users(by_user, np.array([3.0, 1.0]))
    expected = {"loss": 1.25, "loss_mean_user": 1.5, "loss_worst_tenth": 2.0}
    expected |= {"local_loss": 4.5, "local_loss_mean_user": 4.0, "local_loss_worst_tenth": 5.0}
    assert found == expected


def test_nobody_measured_is_no_measure() -> None:
    assert over_users({}, np.zeros(0)) == {}


def test_which_measure_counts_and_which_way() -> None:
    assert measure_of({"loss": 0, "precision_at_1": 0}) == "precision_at_1"
    assert measure_of({"loss": 0, "rmse": 0}) == "rmse"
    assert badness("accuracy", 0.9) < badness("accuracy", 0.8)
    assert badness("rmse", 0.8) < badness("rmse", 0.9)
