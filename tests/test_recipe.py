"""The recipe's numbers: by hand, against recorded problems, with noise and with users missing."""

import math

import numpy as np
import pytest

from flwr_ppsgd import Ledger, SecureSum
from flwr_ppsgd.recipe import (
    SCALAR_BOUND,
    ColumnShares,
    Task,
    column_shares,
    noise_alone,
    published_variance,
    recipe,
    rounds_for,
    scalar_pair,
    scalar_value,
    server_gain,
    shares,
)
from tests.support.recipe_golden import NAMES, close, needs_golden, recorded, task_of


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_the_budget_is_the_recorded_one(name: str) -> None:
    golden = recorded(name)
    sigma = noise_alone(golden["epsilon"], golden["delta"])
    close(sigma, golden["sigma1"])
    rounds = rounds_for(golden["users"], sigma)
    assert rounds == golden["T"]
    budget = shares(task_of(golden), bool(golden["sparse"].any()), rounds)
    recorded_shares = [key for key in golden if key.startswith("share_")]
    assert [f"share_{release}" for release in budget] == recorded_shares
    for release, share in budget.items():
        close(share, golden[f"share_{release}"])
        first = f"{release}0" if release == "mean" else release
        close(sigma / math.sqrt(share), golden[f"{first}_z"])


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_scalars_are_the_recorded_ones(name: str) -> None:
    golden = recorded(name)
    values = {"unit": "u", "size": "C", "count": "k"}
    released = [release for release in values if f"{release}_noisy_sum" in golden]
    assert released
    for release in released:
        noisy_sum = golden[f"{release}_noisy_sum"]
        found = scalar_value(noisy_sum, golden["users"], golden[f"{release}_z"])
        close(found, golden[values[release]])
        close(SCALAR_BOUND, golden[f"{release}_bound"])


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_the_server_adds_what_was_recorded(name: str) -> None:
    golden = recorded(name)
    columns = None
    if golden["sparse"].any():
        sparse = np.zeros(len(golden["round0_w"]), dtype=np.bool_)
        sparse[: len(golden["sparse"])] = golden["sparse"]
        noisy_sum = golden["columns_noisy_sum"]
        columns = column_shares(
            noisy_sum, golden["k"], golden["users"], golden["columns_z"], sparse
        )
        close(columns.shares, golden["f"])
        np.testing.assert_array_equal(columns.known, golden["f_known"])
    w = np.zeros_like(golden["round0_w"])
    gains = []
    sigma = 0.0
    for t in range(golden["T"]):
        mean = golden["C"] * golden[f"mean{t}_noisy_sum"] / golden["users"]
        sigma = golden["C"] * golden[f"mean{t}_z"] / golden["users"]
        close(mean, golden[f"round{t}_m"])
        gains.append(server_gain(mean, sigma, columns))
        close(gains[-1], golden[f"round{t}_g"])
        w = w + gains[-1][:, None] * mean
        close(w, golden[f"round{t}_w"])
    variance = np.zeros(1)
    for gain in gains:
        variance = published_variance(variance, gain, sigma)
    close(variance, golden["nu"])


def test_the_noise_of_one_release_is_that_of_the_gaussian_mechanism() -> None:
    """Φ(1/2σ − εσ) − e^ε·Φ(−1/2σ − εσ) = δ."""

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    sigma = noise_alone(1.0, 1e-4)
    reached = below(0.5 / sigma - sigma) - math.e * below(-0.5 / sigma - sigma)
    assert reached == pytest.approx(1e-4, rel=1e-6)
    assert noise_alone(math.inf, 1e-4) == 0


@pytest.mark.parametrize(
    ("population", "sigma", "rounds"),
    [(100, 4.0, 2), (1200, 3.0, 4), (580, 1.0, 6), (10**6, 3.0, 8), (10, 0.0, 8)],
)
def test_rounds_grow_with_the_population_from_2_to_8(
    population: int, sigma: float, rounds: int
) -> None:
    assert rounds_for(population, sigma) == rounds


SPARSE = {"size": 0.05, "count": 0.05, "columns": 0.1}
SHARES: list[tuple[Task, bool, dict[str, float]]] = [
    ("regression", False, {"unit": 0.05}),
    ("classification", False, {"size": 0.05}),
    ("regression", True, {"unit": 0.05, **SPARSE}),
    ("classification", True, SPARSE),
]


@pytest.mark.parametrize(("task", "sparse", "before"), SHARES)
def test_shares_add_up_to_the_budget(task: Task, sparse: bool, before: dict[str, float]) -> None:
    budget = shares(task, sparse, 5)
    mean = budget.pop("mean")
    assert budget == before
    assert list(budget) == list(before)
    assert 5 * mean + sum(before.values()) == pytest.approx(1)


OCTAVES = {1.0: 0.0, 4.0: 0.25, 0.5: -0.125, 2.0**20: 1.0, 2.0**-20: -1.0}  # in eighths
PAIRS = [(value, [eighths, 0.5]) for value, eighths in OCTAVES.items()]
PAIRS += [(value, [0.0, 0.0]) for value in (0.0, -3.0, math.nan, math.inf)]


@pytest.mark.parametrize(("value", "pair"), PAIRS)
def test_a_scalar_travels_as_octaves_and_an_answer(value: float, pair: list[float]) -> None:
    found = scalar_pair(value)
    assert found.tolist() == pair
    assert np.linalg.norm(found) <= SCALAR_BOUND


def sum_of_pairs(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(sum(scalar_pair(value) for value in values), dtype=np.float64)


def test_a_third_of_the_users_missing_does_not_pull_a_scalar() -> None:
    """Without noise it is the geometric mean of those who answer: √(4·16) = 8."""
    answers = [4.0, 16.0] * 10
    missing = [math.nan] * 10
    assert scalar_value(sum_of_pairs(answers), 20, 0.0) == pytest.approx(8)
    assert scalar_value(sum_of_pairs(answers + missing), 30, 0.0) == pytest.approx(8)
    # with noise, many users: what is left is the prior's pull
    z = 10.0
    many = 200 * (answers + missing)
    found = scalar_value(sum_of_pairs(many), len(many), z)
    assert found == pytest.approx(8, rel=1e-3)


def test_at_most_three_quarters_count_as_missing() -> None:
    """One of ten answers 16: v = ½, and B is 10/4: the value is 2^(8·½/2.5)."""
    found = scalar_value(sum_of_pairs([16.0] + [math.nan] * 9), 10, 0.0)
    assert found == pytest.approx(2 ** (8 * 0.5 / 2.5))


def test_a_scalar_with_noise_by_hand() -> None:
    """N = 10, z = 2, sums (2, 4): every line of the rule."""
    noise = math.sqrt(1.25) * 2
    belief = 0.09 / (0.09 + (2 * noise / 10) ** 2)
    answers = 10 * (1 - (1 - 2 * 4 / 10) * belief)
    q = 2 / answers
    sigma = noise / answers * math.sqrt(1 + (2 * belief * q) ** 2)
    prior = (3 / 8) ** 2
    expected = 2 ** (8 * q * prior / (prior + sigma**2))
    assert scalar_value(np.array([2.0, 4.0]), 10, 2.0) == pytest.approx(expected, rel=1e-12)


def test_with_few_users_a_scalar_is_its_prior() -> None:
    """The pull to 1 is p/(p + σ²): 3 octaves against the noise, √1.25·z/N in eighths."""
    noisy_sum = sum_of_pairs([256.0] * 10)
    assert scalar_value(noisy_sum, 10, 1e4) == pytest.approx(1, abs=1e-3)
    assert 1 < scalar_value(noisy_sum, 10, 3.0) < 256


def test_shares_of_columns_by_hand() -> None:
    """k = 2, N = 10, z = ½: σ_f = .1, so the floor is .2; k·sums/N = .1, .6, 1.4."""
    sparse = np.array([True, False, True, True])
    found = column_shares(np.array([0.5, 3.0, 7.0]), 2.0, 10, 0.5, sparse)
    np.testing.assert_allclose(found.shares, [0.2, 1.0, 0.6, 1.0])
    np.testing.assert_array_equal(found.known, [False, True, True, True])
    failed = column_shares(np.zeros(3), 2.0, 10, 0.5, sparse)
    np.testing.assert_allclose(failed.shares, [0.2, 1.0, 0.2, 0.2])
    np.testing.assert_array_equal(failed.known, ~sparse)
    quiet = column_shares(np.array([0.0, 0.1, 7.0]), 1.0, 10, 0.0, sparse)
    np.testing.assert_allclose(quiet.shares, [0.1, 1.0, 0.1, 0.7])
    np.testing.assert_array_equal(quiet.known, [False, True, False, True])


def test_the_gain_of_a_column_by_hand() -> None:
    """(9 − 1)/1 and (1 − 1)/¼ have the mean τ² = 4: g = 1/(1 + ¼) and ½/(¼ + ¼)."""
    mean = np.array([[3.0], [1.0], [100.0]])
    known = np.array([True, True, False])
    columns = ColumnShares(np.array([1.0, 0.5, 0.5]), known)
    np.testing.assert_allclose(server_gain(mean, 1.0, columns), [0.8, 1.0, 1.0])
    np.testing.assert_array_equal(server_gain(mean, 1.0, None), [1.0])
    stronger = np.array([[1.0], [math.sqrt(2)], [100.0]])  # τ² = (0 + 1/¼)/2
    two_outputs = np.array([[3.0, 1.0], [1.0, 1.0], [9.0, 9.0]])  # τ² = (8 + 0 + 0 + 0)/4
    for other in (stronger, two_outputs):
        gain = server_gain(other, 1.0, columns)
        np.testing.assert_allclose(gain, [1 / 1.5, 0.5 / 0.75, 0.5 / 0.75])


def test_nothing_is_added_where_there_is_only_noise() -> None:
    mean = np.array([[0.5], [0.5]])
    shares_ = np.array([1.0, 0.5])
    known = ColumnShares(shares_, np.array([True, True]))
    unknown = ColumnShares(shares_, np.array([False, False]))
    np.testing.assert_array_equal(server_gain(mean, 1.0, known), [0.0, 0.0])
    np.testing.assert_array_equal(server_gain(100 * mean, 1.0, unknown), [0.0, 0.0])


def test_the_published_variance_is_that_of_the_noisiest_round() -> None:
    gains = [np.array([0.5, 2.0]), np.array([1.0, 0.0])]
    first = published_variance(np.zeros(1), gains[0], 3.0)
    np.testing.assert_allclose(first, [2.25, 36.0])
    np.testing.assert_allclose(published_variance(first, gains[1], 3.0), [9.0, 36.0])


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_body_takes_four_rounds_and_a_size(task: Task) -> None:
    made = recipe(population=10, epsilon=1.0, delta=1e-3, task=task, body=True)
    assert made.rounds == 4
    assert list(made.before) == ["size"]
    assert recipe(population=10, epsilon=1.0, delta=1e-3, task=task).rounds == 2


def test_delta_pays_for_random_neighbours_of_secure_sums() -> None:
    rules = SecureSum(honest=700, colluding=100, failure=1e-7)
    found = recipe(population=1000, epsilon=2.0, delta=1e-5, task="regression", aggregation=rules)
    assert found.release.failure > 0
    ledger = Ledger(1e-5).record(found.release, found.rounds)
    for release in found.before.values():
        ledger = ledger.record(release)
    assert 1.9 < ledger.epsilon() <= 2.0
