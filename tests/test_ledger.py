"""Calibration, budgets and further bounds; what ε is stands in contract/test_epsilon.py."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, pld, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_ppsgd import (
    FixedSize,
    Ledger,
    Poisson,
    Release,
    SecureSum,
    affordable_rounds,
    calibrate_noise,
)
from flwr_ppsgd import epsilon as accounting
from flwr_ppsgd.epsilon import Relation
from tests.contract.test_epsilon import gaussian_delta, spent

DELTA = 1e-4
POISSON = Release(Poisson(1000, 0.01), clip_norm=10.0, noise_multiplier=1.0)
EVERYONE = Release(Poisson(1000, 1.0), clip_norm=10.0, noise_multiplier=20.0)
FIXED = Release(FixedSize(1000, 10), clip_norm=10.0, noise_multiplier=20.0)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("rounds", [1, 30, 10_000])
def test_the_best_order_is_chosen_as_dp_accounting_does(delta: float, rounds: int) -> None:
    theirs = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    theirs.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), rounds)
    found = spent(POISSON, rounds, delta).epsilon(method="rdp")
    assert found == pytest.approx(theirs.get_epsilon(delta), rel=1e-12, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.001, 1.0), st.floats(0.5, 50.0), st.integers(1, 5000))
def test_epsilon_grows_with_rounds_and_rate_and_falls_with_noise(
    q: float, z: float, rounds: int
) -> None:
    def quick(q: float, z: float, rounds: int) -> float:
        return spent(Release(Poisson(100, q), 1.0, z), rounds, DELTA).quick_epsilon()

    assert quick(q, z, rounds) <= quick(q, z, rounds + 1)
    assert quick(q, z * 1.1, rounds) <= quick(q, z, rounds) * (1 + 1e-9)
    assert quick(q / 2, z, rounds) <= quick(q, z, rounds) * (1 + 1e-9)


@pytest.mark.parametrize("release", [POISSON, EVERYONE, FIXED])
def test_the_quick_bound_is_never_below_the_stated_epsilon(release: Release) -> None:
    for rounds in (1, 10, 1000):
        ledger = spent(release, rounds, DELTA)
        assert ledger.quick_epsilon() >= ledger.epsilon() * (1 - 1e-9)


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.002])
def test_calibration_asks_the_accountant_a_few_times(
    monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """PLD is what takes the time."""
    asked: list[float] = []
    epsilon_of = PrivacyLossDistribution.get_epsilon_for_delta

    def counted(distribution: PrivacyLossDistribution, delta: float) -> float:
        asked.append(delta)
        return float(epsilon_of(distribution, delta))

    monkeypatch.setattr(PrivacyLossDistribution, "get_epsilon_for_delta", counted)
    cohort = Poisson(1000, rate)
    z = calibrate_noise(epsilon=1.23, delta=1e-5, cohort=cohort, rounds=500)
    assert 0 < len(asked) <= 6
    asked.clear()
    affordable_rounds(max_epsilon=1.7, delta=1e-5, release=Release(cohort, 1.0, 5 * z))
    assert 0 < len(asked) <= 10


def test_rare_rounds_are_calibrated_and_counted_as_dp_accounting_would() -> None:
    """q = 1e-3, T = 10⁴, ε = 1: z within the tolerance, by their accountant at a finer spacing."""

    def theirs(z: float) -> float:
        accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 5e-5)
        accountant.compose(PoissonSampledDpEvent(1e-3, GaussianDpEvent(z)), 10**4)
        return float(accountant.get_epsilon(1e-6))

    cohort = Poisson(10**6, 1e-3)
    z = calibrate_noise(epsilon=1.0, delta=1e-6, cohort=cohort, rounds=10**4)
    assert theirs(z) <= 1.0 < theirs(z * 0.998)
    rounds = affordable_rounds(max_epsilon=1.0, delta=1e-6, release=Release(cohort, 1.0, z))
    assert 10**4 <= rounds < 1.001 * 10**4


def test_unknown_relations_and_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="zero-out, replace-one"):
        spent(POISSON, 1, DELTA).epsilon("add-remove")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pld, rdp"):
        spent(POISSON, 1, DELTA).epsilon(method="magic")  # type: ignore[arg-type]


def test_extremes_are_answered_or_refused_at_once() -> None:
    """A δ below PLD's tails, an ε of zero at any noise, a z too small to tell from none, a million
    rounds and more."""
    assert 0 < spent(POISSON, 100, 1e-16).epsilon() < math.inf
    assert calibrate_noise(epsilon=1.0, delta=1e-3, cohort=Poisson(1000, 1e-4), rounds=5) < 0.01
    with pytest.raises(ValueError, match="at least 1e-06, or 0"):
        Release(Poisson(10, 0.5), 1.0, 1e-160)
    rare = Release(Poisson(1000, 1e-3), 1.0, 5.0)
    assert affordable_rounds(max_epsilon=2.0, delta=1e-5, release=rare, at_most=2 * 10**6) > 10**6
    assert affordable_rounds(max_epsilon=2.0, delta=1e-5, release=rare, at_most=50) == 50
    with pytest.raises(ValueError, match="whole number"):
        calibrate_noise(epsilon=1.0, delta=1e-5, cohort=Poisson(10, 0.5), rounds=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="never repaired"):
        Ledger.from_json("[" * 100_000)


def test_pricing_leaves_the_root_logger_alone() -> None:
    """absl would put a handler there that prints every package's DEBUG lines."""
    code = (
        "import logging; from flwr_ppsgd import Ledger, Poisson, Release;"
        "Ledger(1e-5).record(Release(Poisson(10, 0.5), 1.0, 10.0), 9).epsilon(method='rdp');"
        "print(logging.root.handlers)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("delta", [1e-10, 1e-12, 1e-15])
def test_below_the_reach_of_pld_the_bound_has_another_name(delta: float) -> None:
    """q = .01, z = 1, 1000 rounds: PLD needs δ of 2e-11 or more."""
    ledger = spent(POISSON, 1000, delta)
    for relation, other in (("zero-out", "RDP"), ("replace-one", "twice the RDP bound")):
        bound = ledger.bound(relation)  # type: ignore[arg-type]
        assert bound.method.startswith("PLD" if delta == 1e-10 else other)
        assert bound.epsilon < 15


def test_the_exact_epsilon_is_from_above_where_its_terms_cancel() -> None:
    """μ = 1e-3, δ = 1e-15: both terms are near .5 and leave few digits. By 60-digit arithmetic the
    ε at this δ is 0.00742…; a bisection in floats stopped below it."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 60
    mu = mpmath.mpf("1e-3")
    found = mpmath.mpf(accounting.gaussian(1e3, 1e-15))
    reached = mpmath.ncdf(mu / 2 - found / mu) - mpmath.exp(found) * mpmath.ncdf(
        -mu / 2 - found / mu
    )
    assert reached <= mpmath.mpf("1e-15")


def test_releases_of_equal_price_are_counted_together() -> None:
    """A thousand alternating clip norms cost what a thousand equal rounds cost."""
    ledger = Ledger(1e-4)
    for _ in range(500):
        for clip_norm in (1.0, 2.0):
            ledger = ledger.record(Release(Poisson(1000, 0.01), clip_norm, 1.0))
    assert len(ledger.releases) == 1000
    assert ledger.epsilon() == spent(POISSON, 1000, DELTA).epsilon()


def test_an_accountant_that_gives_other_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halved noise, as dp-accounting's RDP wants it from the caller for replace-one neighbours."""
    accounting.check_accountant.cache_clear()
    accounting.check_accountant()
    accounting.check_accountant.cache_clear()
    monkeypatch.setattr(accounting, "sensitivity", lambda _: 1.0)
    with pytest.raises(RuntimeError, match="no guarantee can be printed"):
        accounting.check_accountant()
    accounting.check_accountant.cache_clear()


def test_choosing_among_settings_costs_more_than_one_training() -> None:
    """Publishing the best of k trainings costs more the larger k is, and far less than all k."""
    release = Release(Poisson(1000, 0.1), clip_norm=1.0, noise_multiplier=3.0)
    one = Ledger(1e-5).record(release, 200)
    costs = [one.selection_epsilon(k) for k in (1, 10, 100)]
    assert one.epsilon(method="rdp") <= costs[0] + 1e-9
    assert costs == sorted(costs)
    assert costs[1] < Ledger(1e-5).record(release, 2000).epsilon()
    noiseless = Ledger(1e-5).record(replace(release, noise_multiplier=0.0))
    assert noiseless.selection_epsilon(2) == math.inf
    with pytest.raises(ValueError, match="trials must be at least 1"):
        one.selection_epsilon(0.5)


def test_the_price_of_the_best_of_several_is_that_of_papernot_and_steinke() -> None:
    """Theorem 6 for a Poisson number: ε'(λ) = ε(λ) + μ·δ^ + log(μ)/(λ−1), with (ε^, δ^)-DP for
    ε^ = log(1 + 1/(λ−1)). The Gaussian mechanism has ε(λ) = λ/2z²; δ^ is exact here, which can only
    be smaller. The price must not be below the best over λ of that."""
    z, mean, delta = 8.0, 5.0, 1e-5
    release = Release(Poisson(1000, 1.0), clip_norm=1.0, noise_multiplier=z)
    costs = []
    for order in range(2, 400):
        first = math.log1p(1 / (order - 1))
        exact = gaussian_delta(first, 1 / z)
        cost = order / (2 * z**2) + mean * exact + math.log(mean) / (order - 1)
        costs.append(cost + math.log(1 / delta) / (order - 1))
    found = Ledger(delta).record(release).selection_epsilon(mean)
    assert Ledger(delta).record(release).epsilon() < found < 1.1 * min(costs)


def test_all_others_pooling_leave_one_share_of_the_noise() -> None:
    """z/√h in secure sums, everything in plain ones."""
    rules = SecureSum(honest=28, colluding=1)
    secure = Release(Poisson(30, 1.0), 1.0, 9.0, aggregation=rules)
    share = Release(Poisson(30, 1.0), 1.0, 9.0 / math.sqrt(28))
    for relation in get_args(Relation):
        found = spent(secure, 4, DELTA).pooled_epsilon(relation)
        assert found == pytest.approx(spent(share, 4, DELTA).epsilon(relation), rel=1e-9)
    assert spent(POISSON, 10, DELTA).pooled_epsilon() == spent(POISSON, 10, DELTA).epsilon()
    assert Ledger(1e-5).pooled_epsilon() == 0


def test_cut_tails_are_paid_from_delta_or_epsilon_is_infinite() -> None:
    """δ′ + (1 + e^ε)·cut ≤ δ, and nothing changes if the cut is negligible."""
    ledger = Ledger(1e-5).record(EVERYONE, 100)
    assert ledger.bound_with_cut(1e-40) == ledger.bound()
    cut = 1e-7
    found = ledger.bound_with_cut(cut)
    left = 1e-5 - (1 + math.exp(found.epsilon)) * cut
    assert replace(ledger, delta=left).epsilon() <= found.epsilon < 1.05 * ledger.epsilon()
    assert ledger.bound_with_cut(1e-5).epsilon == math.inf
    noiseless = Ledger(1e-5).record(replace(EVERYONE, noise_multiplier=0.0))
    assert noiseless.bound_with_cut(1e-40).epsilon == math.inf
