"""Secure sums through Flower's messages: the same w as the plain sum, and nothing else leaves."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message

from flwr_ppsgd import (
    PPSGD,
    AdditiveLinear,
    Minibatches,
    Order,
    PrivateMetrics,
    SecureSum,
    client_app,
)
from flwr_ppsgd.server.store import Store
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import ORDER
from tests.support.toy import Floats, Toy, flat, release, strategy, target, toy_learner, w0

RULES = SecureSum(honest=6, colluding=1)
CLIENTS = 9
INNER = client_app(toy_learner)


def partition_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def secure(rules: SecureSum = RULES, z: float = 0.0, **changes: object) -> PPSGD:
    summed = replace(release(CLIENTS, z=z), aggregation=rules)
    return strategy(release=summed, **changes)


def plain(**changes: object) -> PPSGD:
    return strategy(**{"release": release(CLIENTS), **changes})


class Measured(Toy):
    def training_measures(self, w: Floats, theta: Floats, order: Order) -> dict[str, float]:  # noqa: ARG002
        return {"loss": float(np.sum((w + theta - self.target) ** 2))}


def measured_learner(context: Context) -> Measured:
    return Measured(target(partition_of(context)))


def test_private_measures_are_summed_along() -> None:
    metrics = PrivateMetrics({"loss": 20.0}, share=0.2)
    results = []
    for make in (secure, plain):
        grid = InProcessGrid(client_app(measured_learner), CLIENTS)
        of = make(metrics=metrics)
        result = of.start(grid=grid, initial_arrays=w0(), num_rounds=2)
        results.append((flat(result.arrays).tobytes(), result.train_metrics_clientapp[2]))
    (w_secure, secure_measures), (w_plain, plain_measures) = results
    assert w_secure == w_plain
    assert secure_measures["loss"] == plain_measures["loss"]
    assert secure_measures["loss"] != 0


def solving_learner(context: Context) -> AdditiveLinear:
    user = partition_of(context)
    source = np.random.default_rng([3, user])
    x = source.normal(size=(12, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * source.normal(size=12)
    return AdditiveLinear(Minibatches(x, y, 4, seed=0, user=user), 3)


def automatic(epsilon: float, rules: SecureSum | None) -> PPSGD:
    of = PPSGD.auto(
        population=60, epsilon=epsilon, delta=1e-3, task="regression", aggregation=rules
    )
    grid = InProcessGrid(client_app(solving_learner), 60)
    result = of.start(grid=grid, initial_arrays=ArrayRecord([np.zeros((3, 1))]))
    assert all("ppsgd-model" in grid.context(node).state for node in grid.get_node_ids())
    of.w = flat(result.arrays)  # type: ignore[attr-defined]
    return of


def test_without_noise_auto_gives_the_w_of_the_plain_sums() -> None:
    rules = SecureSum(honest=42, colluding=2)
    by_secure_sums, by_plain_sums = (automatic(math.inf, each) for each in (rules, None))
    found = by_secure_sums.w  # type: ignore[attr-defined]
    expected = by_plain_sums.w  # type: ignore[attr-defined]
    assert np.linalg.norm(expected) > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)  # their grids differ


def test_auto_takes_secure_sums_and_keeps_its_budget() -> None:
    rules = SecureSum(honest=42, colluding=2)
    of = automatic(8.0, rules)
    assert of.rounds_done == 2
    assert of.ledger.rounds == 3
    assert all(each.aggregation == rules for each, _ in of.ledger.releases)
    assert 7.9 < of.ledger.epsilon() <= 8.0


def test_what_measures_are_told_is_the_noise_really_added() -> None:
    """√(9/6) times z, in the standard error of a measure."""
    metrics = PrivateMetrics({"loss": 20.0}, share=0.2)
    grid = InProcessGrid(client_app(measured_learner), CLIENTS)
    of = secure(z=2.0, metrics=metrics)
    result = of.start(grid=grid, initial_arrays=w0(), num_rounds=1)
    told = result.train_metrics_clientapp[1]["loss-standard-error"]
    expected = 20.0 * 2.0 * np.sqrt(9 / 6) / np.sqrt(0.2) / 9
    assert told == pytest.approx(expected)


def test_the_operator_sees_how_many_are_in_the_sum(tmp_path: Path) -> None:
    """Gone before keys, before the masked vector, and after it: then it is in the sum."""
    gone = {(2, 0): 1, (3, 1): 3, (4, 2): 4}  # by round and user, from which exchange on

    def dropping(message: Message, context: Context) -> Message:
        order = Order.from_flat(message.content[ORDER])
        if order.stage >= gone.get((order.round, partition_of(context)), math.inf):
            raise RuntimeError("gone")
        return INNER(message, context)

    of = secure(checkpoint_dir=tmp_path, rules=SecureSum(6, 0))
    of.start(InProcessGrid(dropping, CLIENTS), w0(), num_rounds=4)  # type: ignore[arg-type]
    facts = [fact for _, fact in Store.read(tmp_path).facts() if "used" in fact]
    assert [entry["used"] for entry in facts] == [9, 8, 8, 9]
    failed = {"client error": 1}
    assert [entry["zeros"] for entry in facts] == [{}, failed, failed, failed]
