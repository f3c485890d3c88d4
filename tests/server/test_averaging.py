"""The average iterate, for which the paper's theorems hold."""

import numpy as np
import pytest

from flwr_ppsgd import PPSGD, Steps
from flwr_ppsgd.client.theta import Theta, ThetaStamp
from tests.support.kept import kept_by
from tests.support.toy import SIZE, Floats, flat, grid, release, strategy, target, w0


def by_hand(rounds: int) -> tuple[Floats, Floats]:
    """(Σ_{t<n} w_t / n, Σ_{t<n} θ_{i,t} / n) of five toy users who all take part in every round."""
    targets = np.array([target(user) for user in range(5)])
    w, sum_w = np.zeros(SIZE), np.zeros(SIZE)
    thetas, sum_theta = np.zeros((5, SIZE)), np.zeros((5, SIZE))
    for _ in range(rounds):
        sum_w, sum_theta = sum_w + w, sum_theta + thetas
        gradients = w + thetas - targets
        thetas = thetas - 0.1 * gradients
        w = w - 0.2 * gradients.mean(axis=0)
    return sum_w / rounds, sum_theta / rounds


def averaging(**changes: object) -> PPSGD:
    settings = {"release": release(clip_norm=100.0), "steps": Steps(0.2, 0.1), **changes}
    return strategy(average=True, **settings)


def test_the_result_is_the_average_of_w_and_evaluation_uses_both_averages() -> None:
    ppsgd, on = averaging(evaluate_every=6), grid()
    result = ppsgd.start(on, w0(), num_rounds=6)
    w, thetas = by_hand(6)
    np.testing.assert_allclose(flat(result.arrays), w, atol=1e-7)
    expected = np.mean([np.sum((w + thetas[i] - target(i)) ** 2) for i in range(5)])
    assert result.evaluate_metrics_clientapp[6]["distance"] == pytest.approx(expected, rel=1e-6)


def test_each_theta_is_weighted_by_the_rounds_it_stood() -> None:
    """θ = 0 stands for rounds 0–2, 5 for rounds 3–6, 9 from round 7 on: average of the first 10 is
    (4·5 + 3·9)/10."""
    personal = Theta(np.zeros(1), ThetaStamp()).after_step(np.array([5.0]), 3, average=True)
    personal = personal.after_step(np.array([9.0]), 7, average=True)
    np.testing.assert_allclose(personal.average(10), [(3 * 0 + 4 * 5 + 3 * 9) / 10])


def test_absent_users_average_by_rounds_and_not_by_visits() -> None:
    drawn = release(rate=0.4, clip_norm=100.0)
    ppsgd = averaging(release=drawn, insecure_seed=8, evaluate_every=1)
    on, history = grid(), []

    def watch(_: int, __: object) -> None:
        kept = kept_by(on.context(on.get_node_ids()[0]))
        history.append(np.zeros(SIZE) if kept is None else kept.theta)

    ppsgd.start(on, w0(), num_rounds=12, on_round=watch)
    kept = kept_by(on.context(on.get_node_ids()[0]))
    assert kept is not None
    assert 0 < kept.stamp.visit < 12
    np.testing.assert_allclose(kept.average(12), np.mean(history[:12], axis=0), atol=1e-12)


def test_without_it_the_last_iterate_is_the_result_and_nothing_more_is_kept() -> None:
    on = grid()
    result = strategy().start(on, w0(), num_rounds=3)
    kept = kept_by(on.context(on.get_node_ids()[0]))
    assert kept is not None
    assert kept.stood is None
    assert np.any(flat(result.arrays))
