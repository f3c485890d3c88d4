"""A training loss inside the guarantee."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, MetricRecord

from flwr_ppsgd import Order, Poisson, Release, Steps, client_app
from flwr_ppsgd.algorithm import PrivateMetrics
from flwr_ppsgd.noise import GridSum, RandomStream
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import GRADIENT, METRICS
from tests.support.toy import (
    SIZE,
    Floats,
    Toy,
    answer,
    flat,
    grid,
    opened,
    release,
    strategy,
    target,
    w0,
)

LOSS = PrivateMetrics({"loss": 4.0}, share=0.25)


@dataclass
class Measuring(Toy):
    def training_measures(self, w: Floats, theta: Floats, order: Order) -> dict[str, float]:  # noqa: ARG002
        return {"loss": 1.0 + float(self.num_examples), "secret": 7.0}


def measuring_learner(context: Context) -> Toy:
    partition = int(context.node_config["partition-id"])
    return Measuring(target(partition), num_examples=partition)


def measuring_grid(population: int = 5) -> InProcessGrid:
    return InProcessGrid(client_app(measuring_learner), population)


def test_the_mean_loss_is_released_with_its_standard_error() -> None:
    """Losses 1, 2, 3, 4, 5 with a bound of 4: the last is clipped to 4, the mean is 14/5."""
    result = strategy(metrics=LOSS).start(measuring_grid(), w0(), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["loss"] == pytest.approx(14 / 5, rel=1e-6)
    assert metrics["loss-standard-error"] == 0.0


def test_the_standard_error_is_that_of_the_noise() -> None:
    """b·z/(√ρ·D) = 4·2/(.5·5); 300 rounds of nothing but noise scatter by that much."""
    ppsgd, on, seen = strategy(release=release(z=2.0), metrics=LOSS, insecure_seed=1), grid(), []
    for round_ in range(1, 301):
        ppsgd.configure_train(round_, w0(), ConfigRecord(), on)
        _, metrics = ppsgd.aggregate_train(round_, [])
        assert metrics["loss-standard-error"] == pytest.approx(4 * 2 / (0.5 * 5))
        seen.append(float(str(metrics["loss"])))
    assert abs(np.var(seen) / 3.2**2 - 1) < 5 * math.sqrt(2 / 300)
    assert abs(np.mean(seen)) < 5 * 3.2 / math.sqrt(300)


def test_gradient_and_measures_are_clipped_apart_and_stay_within_c_together() -> None:
    """Both hostile: 10⁹ each. The sum's square is C², in exact integers; each part has its own
    share."""
    r = Release(Poisson(5, 1.0), clip_norm=2.0, noise_multiplier=0.0)
    total = GridSum(SIZE, r, PrivateMetrics({"loss": 1.0}, share=0.25))
    total.add(np.full(SIZE + 1, 1e9))
    multiples = [int(k) for k in total.multiples]
    assert sum(k * k for k in multiples) <= 2**64
    released = total.noisy(RandomStream.insecure(0))
    assert np.linalg.norm(released[:SIZE]) == pytest.approx(2.0 * math.sqrt(0.75), rel=1e-8)
    assert released[SIZE] == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_measure_that_is_not_finite_counts_as_zero_and_the_gradient_counts(bad: float) -> None:
    ppsgd, on = strategy(metrics=LOSS), grid()
    (message, *_) = opened(ppsgd, on)
    reply = answer(message, np.full(SIZE, 0.1))
    reply.content[METRICS] = MetricRecord({"loss": bad})
    arrays, metrics = ppsgd.aggregate_train(1, [reply])
    assert metrics["loss"] == 0.0
    np.testing.assert_allclose(flat(arrays), -0.1 / 5, rtol=1e-8)


def test_only_what_is_asked_for_leaves_the_node() -> None:
    on = measuring_grid()
    for reply in on.send_and_receive(opened(strategy(metrics=LOSS), on)):
        assert set(reply.content) == {GRADIENT, METRICS}
        assert set(reply.content.metric_records[METRICS]) == {"loss"}
    for reply in on.send_and_receive(opened(strategy(), on)):
        assert set(reply.content) == {GRADIENT}
    local = strategy(metrics=LOSS, steps=Steps.from_ratio(0.5, 0.0))
    for reply in on.send_and_receive(opened(local, on)):
        assert not reply.content


def test_it_costs_nothing_more_and_the_statement_says_what_it_takes() -> None:
    with_it, without = (strategy(release=release(z=3.0), metrics=m) for m in (LOSS, None))
    for ppsgd in (with_it, without):
        ppsgd.start(measuring_grid(), w0(), num_rounds=3)
    assert with_it.ledger == without.ledger
    assert "0.25 of the squared clip norm" in with_it.privacy_statement()
    assert "Training measures" not in without.privacy_statement()


def test_a_learner_without_measures_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """In the client's own log: the server gets a code only."""
    on = grid()
    (reply, *_) = on.send_and_receive(opened(strategy(metrics=LOSS), on))
    assert "learner-failed: ValueError" in str(reply.error.reason)
    assert "Target has no training_measures" in caplog.text


def test_several_measures_at_their_bounds_count_in_full_whatever_the_algorithm() -> None:
    """Two measures at their bounds; under Algorithm 2 the gradient's D is qM but a mean is over qN
    users."""
    two = PrivateMetrics({"loss": 4.0, "error": 1.0}, share=0.25)
    ppsgd = strategy(metrics=two, release=Release(Poisson(5, 1.0), 1.0, 0.0, total_batch=70))
    replies = []
    for message in opened(ppsgd, grid()):
        reply = answer(message, np.zeros(SIZE))
        reply.content[METRICS] = MetricRecord({"loss": 4.0, "error": 1.0})
        replies.append(reply)
    _, metrics = ppsgd.aggregate_train(1, replies)
    assert [metrics["loss"], metrics["error"]] == pytest.approx([4.0, 1.0], rel=1e-6)


NAMES = ("epsilon", "a,b", "loss-standard-error")
SHARES = (0.0, 1.0, -0.1, math.nan)
REFUSED: list[tuple[dict[str, float], float, str]] = [
    *(({name: 1.0}, 0.1, "cannot name a measure") for name in NAMES),
    *(({"loss": 1.0}, share, "share must be in") for share in SHARES),
    *((bounds, 0.1, "bound") for bounds in ({}, {"loss": 0.0}, {"loss": math.inf})),
]


@pytest.mark.parametrize(("bounds", "share", "words"), REFUSED)
def test_measures_that_cannot_be_bounded_are_refused(
    bounds: dict[str, float], share: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PrivateMetrics(bounds, share)
