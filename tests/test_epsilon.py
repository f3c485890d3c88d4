"""ε with sampling is never below the exact one and hardly above, by oracles that share no code.

One and two rounds from the definition, by numerical integration; many rounds against dp-accounting
with every loss rounded down, which is a lower bound.
"""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm

from flwr_ppsgd import Ledger, Poisson, Release
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.epsilon import Relation

RELATIONS: list[Relation] = ["zero-out", "replace-one"]
NEIGHBOURS = {
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}


def densities(rate: float, z: float, relation: Relation, x: Vector) -> tuple[Vector, Vector]:
    """Of one coordinate of the sum, with a user's data and with the neighbour's."""

    def mixture(shift: float) -> Vector:
        drawn = norm.pdf(x, loc=shift, scale=z)
        mixed: Vector = (1 - rate) * norm.pdf(x, scale=z) + rate * drawn
        return mixed

    return mixture(1.0), mixture(0.0 if relation == "zero-out" else -1.0)


def exact_delta(rate: float, z: float, relation: Relation, rounds: int, epsilon: float) -> float:
    """∫ max(0, P − e^ε·Q) over the outputs of one or two rounds, the larger of both ways."""
    points = 400_001 if rounds == 1 else 3001
    x = np.linspace(-1 - 8 * z, 1 + 8 * z, points)
    ways = []
    for p, q in itertools.permutations(densities(rate, z, relation, x)):
        if rounds == 1:
            excess = np.trapezoid(np.maximum(0.0, p - math.exp(epsilon) * q), x)
        else:
            both = np.outer(p, p) - math.exp(epsilon) * np.outer(q, q)
            excess = np.trapezoid(np.trapezoid(np.maximum(0.0, both), x), x)
        ways.append(float(excess))
    return max(ways)


def stated(
    rate: float, z: float, rounds: int, delta: float, relation: Relation = "zero-out"
) -> float:
    return Ledger(delta).record(Release(Poisson(1000, rate), 1.0, z), rounds).epsilon(relation)


NOISES = {0.001: 0.4, 0.01: 1.0, 0.1: 0.5, 0.3: 3.0, 0.9: 4.0, 0.999: 1.0}  # z by rate
ONE_ROUND = [(1e-4, 1.0, 1e-5), *((rate, z, 1e-6) for rate, z in NOISES.items())]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("rate", "z", "delta"), ONE_ROUND)
def test_one_round_costs_what_the_definition_says(
    rate: float, z: float, delta: float, relation: Relation
) -> None:
    """The integral is good to 1e-6 of δ: points are 5e-5 standard deviations apart."""
    epsilon = stated(rate, z, 1, delta, relation)
    assert exact_delta(rate, z, relation, 1, epsilon) <= delta * (1 + 1e-6)
    if epsilon > 0:
        assert exact_delta(rate, z, relation, 1, epsilon * 0.998) > delta


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("rate", "z"), [(0.02, 0.6), (0.3, 1.0), (0.8, 3.0)])
def test_two_rounds_cost_what_the_definition_says(
    rate: float, z: float, relation: Relation
) -> None:
    """The integral is good to 1e-3 of δ: points are .006 standard deviations apart."""
    epsilon = stated(rate, z, 2, 1e-5, relation)
    assert exact_delta(rate, z, relation, 2, epsilon) <= 1e-5 * (1 + 1e-3)
    assert exact_delta(rate, z, relation, 2, epsilon * 0.996) > 1e-5


def lower_bound(
    releases: list[tuple[float, float, int]], delta: float, relation: Relation, interval: float
) -> float:
    """By dp-accounting, every loss rounded down to the next multiple of the interval."""
    total = privacy_loss_distribution.identity(interval, pessimistic_estimate=False)
    for rate, z, rounds in releases:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=z,
            pessimistic_estimate=False,
            value_discretization_interval=interval,
            sampling_prob=rate,
            use_connect_dots=False,
            neighboring_relation=NEIGHBOURS[relation],
        )
        total = total.compose(one.self_compose(rounds))
    return float(total.get_epsilon_for_delta(delta))


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    "releases",
    [
        [(0.2, 0.3, 5)],
        [(1 - 1e-9, 20.0, 60)],
        [(0.05, 2.0, 100), (1.0, 7.0, 1)],
        [(0.001, 0.6, 100), (0.1, 3.0, 50), (0.3, 20.0, 9)],
    ],
    ids=str,
)
def test_many_rounds_are_just_above_a_lower_bound(
    releases: list[tuple[float, float, int]], relation: Relation
) -> None:
    """Rounding down takes half an interval from each round on average, a whole one at most."""
    ledger = Ledger(1e-6)
    for rate, z, rounds in releases:
        ledger = ledger.record(Release(Poisson(1000, rate), 1.0, z), rounds)
    found = ledger.epsilon(relation)
    interval = max(5e-5, 1e-3 * found / ledger.rounds)
    least = lower_bound(releases, 1e-6, relation, interval)
    most = least + interval * ledger.rounds
    assert ledger.bound(relation).method == "PLD"
    assert least <= found <= most * 1.002


@pytest.mark.parametrize(("rate", "z"), [(1e-5, 0.5), (1e-4, 0.5)])
def test_a_rare_release_is_priced_on_a_grid_of_bounded_size(rate: float, z: float) -> None:
    """To a hundredth, where RDP would say about 2 and the exact ε is .004."""
    delta = rate / 10
    epsilon = stated(rate, z, 1, delta)
    assert exact_delta(rate, z, "zero-out", 1, epsilon) <= delta * (1 + 1e-6)
    assert exact_delta(rate, z, "zero-out", 1, epsilon * 0.99) > delta


def test_where_no_grid_is_fine_enough_the_smaller_bound_is_stated() -> None:
    """10⁹ rounds at q = 1e-4, z = 50: the losses of a round are smaller than the grid's spacing."""
    ledger = Ledger(1e-4).record(Release(Poisson(10**7, 1e-4), 1.0, 50.0), 10**9)
    assert ledger.bound().method == "RDP"
    assert ledger.epsilon() == ledger.epsilon(method="rdp")


@pytest.mark.parametrize("rounds", [10**6, 10**8])
def test_very_many_rounds_approach_one_gaussian(rounds: int) -> None:
    """By the central limit theorem. All at once they would take a machine's whole memory."""
    z = 0.005 * math.sqrt(rounds)
    mu = 0.01 * math.sqrt(rounds * math.expm1(1 / z**2))
    as_gaussian = Ledger(1e-5).record(Release(Poisson(9, 1.0), 1.0, 1 / mu)).epsilon()
    assert stated(0.01, z, rounds, 1e-5) == pytest.approx(as_gaussian, rel=0.01)


@pytest.mark.parametrize("rounds", [8003, 12_013, 39_999])
def test_rounds_that_are_composed_in_steps_are_all_counted(rounds: int) -> None:
    """In pieces of at most 4000, whose noise differs in the last digits, there are no steps."""
    ledger = Ledger(1e-5)
    pieces = [4000] * (rounds // 4000) + [rounds % 4000]
    for number, piece in enumerate(pieces):
        release = Release(Poisson(1000, 0.01), 1.0, 20.0 * (1 + number * 1e-12))
        ledger = ledger.record(release, piece)
    assert len(ledger.releases) == len(pieces)
    in_pieces = ledger.epsilon()
    assert in_pieces * (1 - 2e-5) < stated(0.01, 20.0, rounds, 1e-5) < in_pieces * (1 + 2e-4)


def test_round_off_does_not_swamp_ten_million_rare_rounds() -> None:
    """On too fine a grid the probabilities of one round add up to 1 + 1e-6, of all to e^7.

    The variance of a loss is q²·2(e − 1/e) at z = 1 if a user's data are exchanged.
    """
    mu = 1e-6 * math.sqrt(10**7 * 2 * (math.e - 1 / math.e))
    as_gaussian = Ledger(1e-4).record(Release(Poisson(9, 1.0), 1.0, 1 / mu)).epsilon()
    found = stated(1e-6, 1.0, 10**7, 1e-4, "replace-one")
    assert as_gaussian < found < 2 * as_gaussian


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("z", "rounds"), [(0.1, 50), (0.03, 10), (0.001, 10)])
def test_vast_epsilons_are_finite_and_grow_with_rounds(
    z: float, rounds: int, relation: Relation
) -> None:
    """Beyond e^700 a privacy loss is no longer a ratio of floats."""
    fewer = stated(0.3, z, rounds, 1e-5, relation)
    more = stated(0.3, z, 2 * rounds, 1e-5, relation)
    without = stated(1.0, z, rounds, 1e-5, relation)
    assert 600 < fewer < more < math.inf
    assert fewer <= without
