"""ε: recorded values, exact ones that are worked out here again, and no value below the truth."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, rdp
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from flwr_ppsgd import (
    FixedSize,
    Ledger,
    Poisson,
    Release,
    SecureSum,
    affordable_rounds,
    calibrate_noise,
)
from tests.contract.command import ppsgd
from tests.contract.targets import Floats

Relation = Literal["zero-out", "replace-one"]
RELATIONS: tuple[Relation, Relation] = ("zero-out", "replace-one")
NEAR = 1e-3  # relative, of a stated ε to a recorded one
EXACT = 3e-5  # relative, the error of the exact values of sampled rounds


def sampled(q: float, z: float) -> Release:
    return Release(Poisson(1000, q), clip_norm=1.0, noise_multiplier=z)


def spent(release: Release, rounds: int, delta: float) -> Ledger:
    return Ledger(delta=delta).record(release, times=rounds)


class Row(NamedTuple):
    """Settings, and their ε as stated by version 0.2.0 and as ``exact_epsilon`` finds it."""

    q: float
    z: float
    rounds: int
    delta: float
    stated: float  # zero-out, PLD
    exact: float
    replace_one: float  # PLD
    exact_replace_one: float
    by_rdp: float  # zero-out
    paper: float

    def ledger(self) -> Ledger:
        return spent(sampled(self.q, self.z), self.rounds, self.delta)


RECORDED = [
    Row(0.01, 1.0, 1000, 1e-4, 1.51325, 1.512695, 2.43254, 2.432106, 1.75506, 1.75506),
    Row(0.01, 1.0, 1, 1e-4, 0.0875823, 0.0875822, 0.0973515, 0.0973514, 0.696832, 0.696832),
    Row(0.01, 0.5, 100, 1e-5, 6.47677, 6.476040, 6.69883, 6.698211, 8.03412, 8.03073),
    Row(0.01, 5.0, 20000, 1e-5, 1.07585, 1.075377, 2.28849, 2.288219, 1.17489, 1.17489),
    Row(0.01, 0.8, 5000, 1e-6, 7.7105, 7.707664, 11.5917, 11.589268, 8.39814, 8.39605),
    Row(0.01, 0.3, 100, 1e-5, 26.8419, 26.835814, 27.4178, 27.415903, 32.0888, 32.0616),
    Row(0.1, 1.0, 100, 1e-5, 7.04885, 7.046603, 10.5184, 10.516380, 7.90385, 7.89926),
    Row(0.1, 10.0, 1000, 1e-5, 1.20949, 1.208946, 2.59345, 2.593137, 1.31974, 1.31974),
    Row(0.1, 30.0, 1000, 1e-4, 0.293418, 0.293282, 0.638342, 0.638263, 0.331791, 0.331791),
    Row(0.1, 3.0, 50, 1e-6, 1.12578, 1.125388, 2.11598, 2.115721, 1.22957, 1.22957),
    Row(0.3, 5.0, 200, 1e-5, 3.72501, 3.723332, 8.14255, 8.141473, 4.04021, 4.03994),
    Row(0.5, 10.0, 100, 1e-5, 2.01618, 2.015266, 4.3714, 4.370858, 2.19318, 2.19305),
    Row(0.5, 2.0, 10, 1e-6, 4.50875, 4.507175, 8.03658, 8.035412, 4.90644, 4.90625),
    Row(0.9, 20.0, 100, 1e-6, 2.01137, 2.010462, 4.33611, 4.335586, 2.16105, 2.16105),
    Row(0.002, 0.8, 2000, 1e-6, 1.08992, 1.089790, 1.28969, 1.289544, 1.87252, 1.87252),
]
recorded = pytest.mark.parametrize(
    "row", RECORDED, ids=lambda row: f"q={row.q} z={row.z} T={row.rounds}"
)


@recorded
def test_sampled_rounds_cost_what_was_recorded_and_never_less_than_the_truth(row: Row) -> None:
    ledger = row.ledger()
    assert row.exact * (1 - EXACT) <= ledger.epsilon() <= row.stated * (1 + NEAR)
    replace_one = ledger.epsilon("replace-one")
    assert row.exact_replace_one * (1 - EXACT) <= replace_one <= row.replace_one * (1 + NEAR)


@recorded
def test_rdp_and_the_papers_number_are_as_recorded(row: Row) -> None:
    ledger = row.ledger()
    assert ledger.epsilon(method="rdp") == pytest.approx(row.by_rdp, rel=NEAR)
    assert ledger.paper_epsilon() == pytest.approx(row.paper, rel=NEAR)


# The exact ε of sampled rounds, to EXACT: the distribution of the privacy loss of one round on a
# fine grid, rounded to the nearest point, and its T-fold convolution by a Fourier transform.

POINTS = 2**20


def exact_epsilon(row: Row, relation: Relation) -> float:
    spacing = math.ldexp(1.0, -15 if row.replace_one < 4 else -12)
    losses: Floats = spacing * np.arange(-POINTS // 2, POINTS // 2, dtype=np.float64)
    middles = losses[:-1] + spacing / 2
    found = []
    for below in loss_distributions(row, relation):
        mass = np.diff(np.concatenate([[0.0], below(middles), [1.0]]))
        one_round = np.fft.rfft(np.fft.ifftshift(mass))
        total = np.fft.fftshift(np.fft.irfft(one_round**row.rounds, POINTS))
        found.append(_epsilon_of(losses, total, row.delta))
    return max(found)


def loss_distributions(row: Row, relation: Relation) -> list[Callable[[Floats], Floats]]:
    """P[loss ≤ l] of one round, one way round and the other."""
    q, z = row.q, row.z

    def mixture(x: Floats) -> Floats:
        taking_part: Floats = (1 - q) * ndtr(x / z) + q * ndtr((x - 1) / z)
        return taking_part

    if relation == "replace-one":  # against a user at −1; the other way round is the mirror image
        return [lambda loss: mixture(_outcome_against_minus_one(loss, q, z))]
    return [
        lambda loss: mixture(_outcome_against_zero(loss, q, z)),
        lambda loss: 1 - ndtr(_outcome_against_zero(-loss, q, z) / z),
    ]


def _outcome_against_zero(loss: Floats, q: float, z: float) -> Floats:
    """x with 1 − q + q·e^((2x − 1)/2z²) = e^loss; −∞ if no x has so small a loss."""
    rest = np.exp(loss) - (1 - q)
    outcome = np.full(len(loss), -np.inf)
    reached = rest > 0
    outcome[reached] = z**2 * np.log(rest[reached] / q) + 0.5
    return outcome


def _outcome_against_minus_one(loss: Floats, q: float, z: float) -> Floats:
    """x = z²·log u with q·c·u² + (1 − q)(1 − e^loss)·u − e^loss·q·c = 0 and c = e^(−1/2z²)."""
    weight = q * math.exp(-0.5 / z**2)
    middle = (1 - q) * -np.expm1(loss)
    root = np.sqrt(middle**2 + 4 * weight**2 * np.exp(loss))
    larger = np.abs(middle) + root
    u = np.where(middle > 0, 2 * weight * np.exp(loss) / larger, larger / (2 * weight))
    outcome: Floats = z**2 * np.log(u)
    return outcome


def _epsilon_of(losses: Floats, mass: Floats, delta: float) -> float:
    def excess(epsilon: float) -> float:
        above = losses > epsilon
        return float(mass[above] @ -np.expm1(epsilon - losses[above])) - delta

    return float(brentq(excess, 0.0, 100.0, xtol=1e-9))


@pytest.mark.parametrize("place", [0, 9, 12])
@pytest.mark.parametrize("relation", RELATIONS)
def test_the_exact_values_in_the_table_are_exact(place: int, relation: Relation) -> None:
    row = RECORDED[place]
    expected = row.exact if relation == "zero-out" else row.exact_replace_one
    assert exact_epsilon(row, relation) == pytest.approx(expected, rel=1e-6)


# Without amplification T rounds at z are one Gaussian at z/√T, which has a closed form.


def gaussian_delta(epsilon: float, shift: float) -> float:
    """δ(ε) of a Gaussian whose mean moves by ``shift`` standard deviations (Balle and Wang 2018,
    Theorem 8)."""
    first = log_ndtr(shift / 2 - epsilon / shift)
    second = epsilon + log_ndtr(-shift / 2 - epsilon / shift)
    return math.exp(first) * -math.expm1(second - first)


UNAMPLIFIED = [
    (Poisson(1000, 1.0), 20.0, 50, 1e-4),
    (Poisson(1000, 1.0), 1.0, 1, 1e-5),
    (Poisson(1000, 1.0), 0.5, 3, 1e-5),
    (Poisson(1000, 1.0), 100.0, 10_000, 1e-8),
    (Poisson(1000, 1.0), 300.0, 20, 1e-3),
    (FixedSize(1000, 10), 20.0, 50, 1e-4),
    (FixedSize(1000, 10), 1.0, 10, 1e-6),
]


@pytest.mark.parametrize(("cohort", "z", "rounds", "delta"), UNAMPLIFIED)
@pytest.mark.parametrize("relation", RELATIONS)
def test_without_amplification_epsilon_is_that_of_one_gaussian(
    cohort: Poisson | FixedSize, z: float, rounds: int, delta: float, relation: Relation
) -> None:
    """For everyone in every round, and for ``FixedSize``: it is never below, and hardly above."""
    shift = (1 if relation == "zero-out" else 2) * math.sqrt(rounds) / z
    epsilon = spent(Release(cohort, 1.0, z), rounds, delta).epsilon(relation)
    assert gaussian_delta(epsilon, shift) <= delta * (1 + 1e-7)
    assert gaussian_delta(epsilon * (1 - NEAR), shift) > delta


def test_fixed_size_cohorts_get_the_papers_number_only_by_its_own_name() -> None:
    ledger = spent(Release(FixedSize(1000, 10), 1.0, 1.0), 10, 1e-4)
    assert ledger.epsilon() > 5 * ledger.paper_epsilon()
    poisson = spent(sampled(0.01, 1.0), 10, 1e-4)
    assert ledger.paper_epsilon() == pytest.approx(poisson.paper_epsilon(), rel=1e-12)


def test_replace_one_is_not_taken_for_half_of_it() -> None:
    """Under replace-one dp-accounting's RDP takes std/sensitivity as given, its PLD doubles."""
    one = spent(sampled(1.0, 1.0), 1, 1e-5)
    trap = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    assert trap.compose(GaussianDpEvent(1.0)).get_epsilon(1e-5) == pytest.approx(4.73, abs=0.01)
    assert one.epsilon("replace-one") == pytest.approx(10.00, abs=0.01)
    assert one.epsilon("replace-one", "rdp") > one.epsilon("replace-one")


def test_rdp_refuses_replace_one_under_poisson_sampling_by_name() -> None:
    with pytest.raises(ValueError, match="method='pld'"):
        spent(sampled(0.01, 1.0), 10, 1e-4).epsilon("replace-one", "rdp")


def test_mixed_releases_cost_more_than_each_alone_and_less_than_the_sum() -> None:
    first = spent(sampled(0.01, 1.0), 100, 1e-5)
    second = spent(sampled(0.1, 10.0), 100, 1e-5)
    mixed = first.record(sampled(0.1, 10.0), times=100)
    assert max(first.epsilon(), second.epsilon()) < mixed.epsilon()
    assert mixed.epsilon() < first.epsilon() + second.epsilon()


def test_fixed_size_rounds_gain_nothing_from_poisson_rounds_beside_them() -> None:
    fixed = spent(Release(FixedSize(1000, 10), 1.0, 20.0), 100, 1e-4)
    assert fixed.record(sampled(0.01, 1.0)).epsilon() > fixed.epsilon() * (1 - NEAR)


@pytest.mark.parametrize("relation", RELATIONS)
def test_random_neighbours_of_a_secure_sum_are_paid_for_by_delta(relation: Relation) -> None:
    """1000 clients are too many to be neighbours of each other: T·η of δ goes to that."""
    failure = 4e-8
    everyone = sampled(1.0, 40.0)
    rules = SecureSum(honest=800, colluding=2, failure=failure)
    summed = Release(everyone.cohort, 1.0, 40.0, aggregation=rules)
    left = spent(everyone, 100, 1e-5 - 100 * failure).epsilon(relation)
    assert left > 1.01 * spent(everyone, 100, 1e-5).epsilon(relation)
    assert spent(summed, 100, 1e-5).epsilon(relation) == pytest.approx(left, rel=1e-12)
    assert spent(summed, 100, 99 * failure).epsilon(relation) == math.inf


# The edges.


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("rounds", [1, 100, 30_000, 10**6])
def test_no_epsilon_is_below_the_truth_at_a_small_delta(relation: Relation, rounds: int) -> None:
    """As q → 1 the exact value is that of one Gaussian, here of total σ = 2.

    The round-off inside PLD understated it, by 4 % at 30,000 rounds and δ = 1e-14.
    """
    shift = 0.5 if relation == "zero-out" else 1.0
    nearly = sampled(1 - 1e-12, 2 * math.sqrt(rounds))
    for delta in (1e-6, 1e-9, 1e-12, 1e-14, 1e-15):
        epsilon = spent(nearly, rounds, delta).epsilon(relation)
        assert gaussian_delta(epsilon, shift) <= delta * (1 + 1e-6), delta
        assert gaussian_delta(epsilon / 1.05, shift) > delta, delta


def test_a_tiny_noise_is_priced_and_from_above() -> None:
    """z = .01: somebody takes part ten times in 1000 rounds, and each time costs ε ≈ 5,000."""
    for relation in RELATIONS:
        assert 10 * 5000 < spent(sampled(0.01, 0.01), 1000, 1e-4).epsilon(relation) < math.inf


def test_no_noise_is_infinitely_dear() -> None:
    bare = spent(sampled(0.1, 0.0), 1, 1e-4)
    assert bare.epsilon() == bare.epsilon("replace-one") == math.inf
    assert bare.epsilon(method="rdp") == bare.paper_epsilon() == math.inf


def test_nothing_released_costs_nothing() -> None:
    assert Ledger(delta=1e-4).epsilon() == Ledger(delta=1e-4).paper_epsilon() == 0.0
    assert Ledger(delta=1e-4).rounds == 0


def test_a_run_without_noise_says_infinite_in_valid_json(tmp_path: Path) -> None:
    few = ["--set", "population=4", "--set", "features=6", "--rounds", 2]
    ended = ppsgd("run", *few, "--set", "noise-multiplier=0", "--out", tmp_path / "out")
    assert ended.status == 0, ended.err
    for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    written = (tmp_path / "out" / "privacy.json").read_text()
    assert json.loads(written, parse_constant=pytest.fail)["guarantee"] == "none"


# Calibration and affordable rounds.

CALIBRATED = [
    (Poisson(1000, 0.01), 1.0, 1e-5, 1000, 1.41499, 2.36468),
    (Poisson(1000, 0.1), 2.0, 1e-5, 200, 3.00551, 5.63401),
    (Poisson(100, 0.5), 4.0, 1e-3, 10, 1.50473, 2.55536),
    (Poisson(1000, 1.0), 2.0, 1e-5, 50, 14.0984, 28.1968),
    (FixedSize(1000, 10), 2.0, 1e-5, 50, 14.0984, 28.1968),
]


@pytest.mark.parametrize(
    ("cohort", "epsilon", "delta", "rounds", "zero_out", "replace_one"), CALIBRATED
)
def test_calibrated_noise_is_as_recorded_and_meets_the_target(
    *,
    cohort: Poisson | FixedSize,
    epsilon: float,
    delta: float,
    rounds: int,
    zero_out: float,
    replace_one: float,
) -> None:
    for relation, expected in zip(RELATIONS, (zero_out, replace_one), strict=True):
        z = calibrate_noise(
            epsilon=epsilon, delta=delta, cohort=cohort, rounds=rounds, relation=relation
        )
        assert z == pytest.approx(expected, rel=NEAR)
        assert spent(Release(cohort, 1.0, z), rounds, delta).epsilon(relation) <= epsilon


def test_calibration_by_rdp_is_as_recorded() -> None:
    z = calibrate_noise(
        epsilon=1.0, delta=1e-5, cohort=Poisson(1000, 0.01), rounds=1000, method="rdp"
    )
    assert z == pytest.approx(1.513, rel=NEAR)


@pytest.mark.parametrize(
    "release",
    [
        sampled(0.01, 1.0),
        sampled(0.1, 10.0),
        sampled(1.0, 20.0),
        sampled(1e-4, 0.7327),
        Release(FixedSize(9, 2), 1.0, 9.0),
    ],
)
@pytest.mark.parametrize("relation", RELATIONS)
def test_one_more_than_the_affordable_rounds_is_too_many(
    release: Release, relation: Relation
) -> None:
    rounds = affordable_rounds(max_epsilon=1.7, delta=1e-4, release=release, relation=relation)
    assert rounds > 0
    assert spent(release, rounds, 1e-4).epsilon(relation) <= 1.7
    assert spent(release, rounds + 1, 1e-4).epsilon(relation) > 1.7


def test_a_budget_below_one_round_affords_none() -> None:
    release = Release(Poisson(10, 1.0), clip_norm=1.0, noise_multiplier=0.1)
    assert affordable_rounds(max_epsilon=0.5, delta=1e-4, release=release) == 0


# The ledger.

MIXED = (
    spent(sampled(0.01, 1.0), 100, 1e-4)
    .record(Release(FixedSize(50, 5), clip_norm=2.0, noise_multiplier=3.0), times=7)
    .record(Release(Poisson(50, 0.5), 2.0, 3.0, total_batch=70), insecure=True)
)


def test_a_ledger_survives_json() -> None:
    text = MIXED.to_json()
    json.loads(text, parse_constant=pytest.fail)
    again = Ledger.from_json(text)
    assert again == MIXED
    assert (again.rounds, again.insecure_rounds) == (108, 1)
    assert again.epsilon() == MIXED.epsilon()


GOOD = spent(sampled(0.01, 1.0), 7, 1e-4).to_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "nonsense",
        GOOD[:-10],
        GOOD.replace("ledger 1", "ledger 9"),
        GOOD.replace('"times": 7', '"times": -7'),
        GOOD.replace('"times": 7', '"times": 0'),
        GOOD.replace('"times": 7', '"times": "7"'),
        GOOD.replace('"rate": 0.01', '"rate": 7.0'),
        GOOD.replace("Poisson", "Bernoulli"),
        GOOD.replace('"delta": 0.0001', '"delta": 2'),
        GOOD.replace('"insecure_rounds": 0', '"insecure_rounds": 8'),
        GOOD.replace('"clip_norm"', '"clop_norm"'),
    ],
)
def test_a_damaged_ledger_is_refused_in_one_line(text: str) -> None:
    assert text != GOOD
    with pytest.raises(ValueError, match="never repaired") as error:
        Ledger.from_json(text)
    assert "\n" not in str(error.value)


def test_recording_leaves_a_ledger_as_it_was() -> None:
    before = spent(sampled(0.01, 1.0), 3, 1e-4)
    longer = before.record(sampled(0.01, 1.0), times=2)
    assert (before.rounds, longer.rounds) == (3, 5)


def test_equal_rounds_cost_the_same_however_they_were_recorded() -> None:
    one_by_one = Ledger(delta=1e-4)
    for _ in range(20):
        one_by_one = one_by_one.record(sampled(0.01, 1.0))
    assert one_by_one == spent(sampled(0.01, 1.0), 20, 1e-4)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_outside_the_unit_interval_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        Ledger(delta=delta)


def test_a_charge_is_never_taken_back() -> None:
    with pytest.raises(ValueError, match="times"):
        spent(sampled(0.01, 1.0), 3, 1e-4).record(sampled(0.01, 1.0), times=-1)
