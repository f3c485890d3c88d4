"""What a secure sum costs: no amplification, and δ pays for random neighbours."""

import json
from dataclasses import replace

import pytest

from flwr_ppsgd import (
    FixedSize,
    Ledger,
    Poisson,
    Release,
    SecureSum,
    affordable_rounds,
    calibrate_noise,
)
from flwr_ppsgd.ledger import release_from_dict, release_to_dict
from flwr_ppsgd.server.budget import Allowance

FEW = SecureSum(honest=25, colluding=3)
MANY = SecureSum(honest=800, colluding=50, failure=1e-9)
SAMPLED = Release(Poisson(40, 0.5), 1.0, 4.0)
SECURE = replace(SAMPLED, aggregation=FEW)
GRAPH = Release(Poisson(1000, 1.0), 1.0, 4.0, aggregation=MANY)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_a_secure_sum_is_priced_as_if_everyone_took_part(relation: str) -> None:
    everyone = Ledger(1e-5).record(Release(Poisson(40, 1.0), 1.0, 4.0), 30)
    secure = Ledger(1e-5).record(SECURE, 30)
    sampled = Ledger(1e-5).record(SAMPLED, 30)
    assert secure.epsilon(relation) == everyone.epsilon(relation)  # type: ignore[arg-type]
    assert secure.epsilon(relation) > 1.3 * sampled.epsilon(relation)  # type: ignore[arg-type]
    assert secure.bound().method == "exact"
    assert secure.quick_epsilon() == secure.epsilon()


def test_delta_pays_for_random_neighbours_in_every_round() -> None:
    """ε is that of δ − T·η: 1e-5 − 1000·1e-9 = 9e-6."""
    plain = replace(GRAPH, aggregation=None)
    paid = Ledger(1e-5).record(GRAPH, 1000)
    assert paid.failure == pytest.approx(1e-6)
    expected = Ledger(1e-5 - paid.failure).record(plain, 1000)
    for relation in ("zero-out", "replace-one"):
        assert paid.epsilon(relation) == expected.epsilon(relation)
    assert paid.epsilon(method="rdp") == expected.epsilon(method="rdp")
    assert paid.epsilon() > Ledger(1e-5).record(plain, 1000).epsilon()


def test_nothing_is_guaranteed_if_neighbours_take_the_whole_delta() -> None:
    assert Ledger(1e-6).record(GRAPH, 1000).epsilon() == float("inf")
    assert affordable_rounds(max_epsilon=1e6, delta=1e-7, release=GRAPH) < 100
    with pytest.raises(ValueError, match="what random neighbours take of it in 1000 rounds"):
        calibrate_noise(epsilon=1.0, delta=1e-6, cohort=GRAPH.cohort, rounds=1000, aggregation=MANY)


def test_complete_graphs_take_nothing_of_delta() -> None:
    assert SECURE.failure == 0
    assert Release(FixedSize(1000, 200), 1.0, 1.0, aggregation=FEW).failure == 0
    assert Release(FixedSize(1000, 201), 1.0, 1.0, aggregation=FEW).failure == FEW.failure


def test_noise_is_calibrated_for_the_secure_sum() -> None:
    for cohort, rules in ((SAMPLED.cohort, FEW), (GRAPH.cohort, MANY)):
        z = calibrate_noise(epsilon=2.0, delta=1e-5, cohort=cohort, rounds=50, aggregation=rules)
        release = Release(cohort, 1.0, z, aggregation=rules)
        epsilon = Ledger(1e-5).record(release, 50).epsilon()
        assert 2.0 * (1 - 1e-3) < epsilon <= 2.0
    without = calibrate_noise(epsilon=2.0, delta=1e-5, cohort=SAMPLED.cohort, rounds=50)
    assert z > without


@pytest.mark.parametrize("release", [SECURE, GRAPH, SAMPLED])
def test_the_aggregation_is_in_the_ledgers_json(release: Release) -> None:
    ledger = Ledger(1e-5).record(release, 3)
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert release_from_dict(json.loads(json.dumps(release_to_dict(release)))) == release


def test_a_budget_prices_a_secure_sum_without_amplification() -> None:
    allowance = Allowance.of(2.0, 1e-5, "gaussian")
    with pytest.raises(ValueError, match="no price for sampled users"):
        allowance.cost(SAMPLED)
    assert allowance.cost(SECURE) == pytest.approx(1 / 16)
    rdp = Allowance.of(2.0, 1e-5, "rdp")
    assert rdp.cost(SECURE) == rdp.cost(Release(Poisson(40, 1.0), 1.0, 4.0))
    assert rdp.cost(SECURE) > rdp.cost(SAMPLED)
