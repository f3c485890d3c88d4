"""The engine for linear models against the paper's functions, one user after the other: the same
data, cohorts and noise give the same w and θ, round by round."""

import itertools
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike
from scipy import sparse

from flwr_ppsgd import AdditiveLinear, FixedSize, Minibatches, Poisson, Release, Steps
from flwr_ppsgd.algorithm import Cohort, clip
from flwr_ppsgd.lab.engine import EngineSetting, reported_rounds, train
from flwr_ppsgd.lab.linear_engine import LinearEngine, bytes_for
from flwr_ppsgd.lab.population import FinitePopulation, FreshPopulation, Population
from flwr_ppsgd.lab.synthetic import Synthetic, SyntheticLearner
from flwr_ppsgd.models.additive_linear import Loss
from flwr_ppsgd.noise import RandomStream
from tests.support.by_hand import by_hand, close

SIZES = np.array([3, 25, 10, 11, 4, 17, 30, 10, 1, 12, 20, 9])  # m_i is 1, 3, 4, 9 or 10
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
USERS = len(SIZES)
FEATURES = 7  # some users have fewer rows than that, others more
CLASSES = 3
BATCH = 10
SEED = 3
ROUNDS = 10
SOURCE = np.random.default_rng(0)
X = SOURCE.normal(size=(OFFSETS[-1], FEATURES)) * (SOURCE.random((OFFSETS[-1], FEATURES)) < 0.6)
X[1] = X[0]  # a user whose rows are linearly dependent
Y = np.eye(CLASSES)[SOURCE.integers(CLASSES, size=OFFSETS[-1])]
COHORT = Poisson(USERS, 0.3)  # cohorts of 1 to 6 users
ZERO = np.zeros(FEATURES * CLASSES)


def table(loss: Loss = "squared", sparse_x: bool = False, **parts: Any) -> FinitePopulation:
    x = sparse.csr_array(X) if sparse_x else X
    return FinitePopulation(x, Y, OFFSETS, batch_size=BATCH, seed=5, loss=loss, **parts)


def learners(loss: Loss = "squared") -> list[AdditiveLinear]:
    found = []
    for user in range(USERS):
        own = slice(OFFSETS[user], OFFSETS[user + 1])
        batches = Minibatches(X[own], Y[own], BATCH, seed=5, user=user)
        found.append(AdditiveLinear(batches, FEATURES, CLASSES, loss, test=(X[own], Y[own])))
    return found


def grid_of(cohort: Cohort = COHORT, total_batch: int | None = None) -> list[EngineSetting]:
    """α from 0 to ∞, with and without noise, with everyone clipped, some, and nobody."""
    return [
        EngineSetting(Release(cohort, c, z, total_batch), Steps.from_ratio(0.2, a))
        for a, z, c in itertools.product((3.0, 0.0, 0.3, math.inf), (0.0, 1.0), (0.05, 0.4, 1e3))
    ]


def several(engine: LinearEngine, rounds: int) -> LinearEngine:
    for _ in range(rounds):
        engine.advance()
    return engine


@pytest.mark.parametrize("sparse_x", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("loss", "total"), [("squared", None), ("softmax", None), ("squared", 100)]
)
def test_every_setting_is_that_of_the_algorithm_round_by_round(
    loss: Loss, total: int | None, sparse_x: bool
) -> None:
    """Algorithms 2 and 3 with short and empty cohorts and unequal m_i; a whole grid at once."""
    settings = grid_of(total_batch=total)
    engine = LinearEngine(table(loss, sparse_x), settings, seed=SEED)
    hands = [
        by_hand(learners(loss), setting, ZERO, seed=SEED, rounds=ROUNDS) for setting in settings
    ]
    for _ in range(ROUNDS):
        engine.advance()
        for place, reference in enumerate(hands):
            w, thetas = next(reference)
            close(engine.w(place), w)
            ours = [engine.theta(place, user) for user in range(USERS)]
            close(np.array(ours), np.array(thetas))


@pytest.mark.parametrize(
    "cohort", [FixedSize(USERS, 4), Poisson(USERS, 1.0)], ids=["fixed size", "everyone"]
)
def test_other_cohorts_too(cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    """In more than one part: gradients are all taken at the same w."""
    monkeypatch.setattr("flwr_ppsgd.lab.linear_engine.SAMPLES_AT_ONCE", 2 * BATCH)
    settings = grid_of(cohort)[:6]
    engine = several(LinearEngine(table(), settings, seed=SEED), ROUNDS)
    for place, setting in enumerate(settings):
        *_, (w, thetas) = by_hand(learners(), setting, ZERO, seed=SEED, rounds=ROUNDS)
        close(engine.w(place), w)
        close(engine.theta(place, 1), thetas[1])


def test_average_iterates_weigh_each_theta_by_the_rounds_it_stood() -> None:
    """z̄ = (1/n) Σ_{t<n} (w_t, θ_t), which begins at 0."""
    setting = grid_of()[4]
    engine = several(LinearEngine(table(), [setting], seed=SEED, average=True), ROUNDS)
    after = list(by_hand(learners(), setting, ZERO, seed=SEED, rounds=ROUNDS))
    close(engine.w(0), np.sum([w for w, _ in after[:-1]], axis=0) / ROUNDS)
    for user in range(USERS):
        stood = np.sum([thetas[user] for _, thetas in after[:-1]], axis=0) / ROUNDS
        np.testing.assert_allclose(engine.theta(0, user), stood, atol=1e-9)


def test_fresh_samples_are_those_of_the_learners() -> None:
    """The synthetic problem, everyone in every round, in more than one part."""
    users = 300
    problem = Synthetic.draw(users, 8, seed=4)
    settings = [
        EngineSetting(Release(Poisson(users, 1.0), 5.0, 1.0), Steps.from_ratio(0.3, a))
        for a in (0.3, 3.0)
    ]
    engine = several(LinearEngine(FreshPopulation(problem, 10), settings, seed=SEED), 3)
    everyone = [SyntheticLearner(problem, user, 10) for user in range(users)]
    *_, (w, thetas) = by_hand(everyone, settings[1], np.zeros(8), seed=SEED, rounds=3)
    close(engine.w(1), w)
    close(engine.theta(1, 299), thetas[299])
    risk = np.mean([problem.excess_risk(user, w + thetas[user]) for user in range(users)])
    assert engine.measures()[1]["excess_risk"] == pytest.approx(risk, rel=1e-9)


def test_measures_are_the_means_over_users_that_the_strategy_reports() -> None:
    engine = LinearEngine(table("softmax", test=(X, Y, OFFSETS)), grid_of(), seed=SEED)
    several(engine, 5)
    for place in (0, 8, 23):
        users = [
            learner.evaluate(engine.w(place), engine.theta(place, user))
            for user, learner in enumerate(learners("softmax"))
        ]
        for name in users[0]:
            expected = np.average([user[name] for user in users], weights=SIZES)
            assert engine.measures()[place][name] == pytest.approx(expected)
        accuracies = [user["accuracy"] for user in users]
        found, _ = engine.measure_users("test")
        np.testing.assert_allclose(found["accuracy"][:, place], accuracies)


def test_validation_and_test_rows_are_not_mixed_up() -> None:
    """Both parts have as many rows for each user: each is measured on its own."""
    setting = EngineSetting(Release(COHORT, 1.0, 0.0), Steps(0.1, 0.1))
    other = (X[::-1].copy(), Y, OFFSETS)

    def measured(**parts: Any) -> dict[str, float]:
        engine = several(LinearEngine(table(**parts), [setting], seed=SEED), ROUNDS)
        return engine.measures(final=True)[0]

    both = measured(validation=other, test=(X, Y, OFFSETS))
    assert both["loss"] == pytest.approx(measured(test=(X, Y, OFFSETS))["loss"])
    assert both["validation_loss"] == pytest.approx(measured(test=other)["loss"])


def test_an_empty_cohort_still_releases_noise() -> None:
    """w = −s_w·z·C/D·Σ_t n_t if nobody ever takes part."""
    release = Release(Poisson(USERS, 1e-12), 2.0, 0.5)
    engine = LinearEngine(table(), [EngineSetting(release, Steps(0.1, 0.1))], seed=SEED)
    several(engine, 2)
    normals = sum(
        RandomStream.insecure(SEED, "noise", t).normals(FEATURES * CLASSES) for t in (1, 2)
    )
    close(engine.w(0), -0.1 * 0.5 * 2.0 / release.denominator * np.asarray(normals))


def test_a_gradient_of_rows_that_nearly_cancel_is_clipped_at_its_true_length() -> None:
    """Two nearly equal rows with opposite residuals."""
    x = np.array([[1.0, 0.0], [1.0, 1e-4]])
    y = np.array([[-1.0], [1.0]])
    cancelling = FinitePopulation(x, y, [0, 2], batch_size=2, seed=1)
    setting = EngineSetting(Release(Poisson(1, 1.0), 1e-6, 0.0), Steps(1.0, 0.0))
    engine = several(LinearEngine(cancelling, [setting], seed=SEED), 1)
    close(engine.w(0), clip(np.array([0.0, 5e-5]), 1e-6), 1e-13)


@pytest.mark.parametrize("sparse_x", [False, True])
def test_float32_is_close(sparse_x: bool) -> None:
    data = table("softmax", sparse_x)
    wide = several(LinearEngine(data, grid_of(), seed=SEED), ROUNDS)
    narrow = several(LinearEngine(data, grid_of(), seed=SEED, dtype=np.float32), ROUNDS)
    for place in range(len(grid_of())):
        close(narrow.w(place), wide.w(place), 1e-4)


def wide_table(sizes: Sequence[int], features: int) -> FinitePopulation:
    rows = sum(sizes)
    x = SOURCE.normal(size=(rows, features))
    return FinitePopulation(x, np.ones((rows, 1)), np.cumsum([0, *sizes]), batch_size=10, seed=1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "population", [wide_table([20] * 40, 500), FreshPopulation(Synthetic.draw(200, 100, 1), 10)]
)
def test_memory_is_foreseen(population: Population, dtype: DTypeLike) -> None:
    """What is planned is enough, and not wastefully much. NumPy's allocations are traced."""
    settings = [
        EngineSetting(Release(Poisson(len(population), 1.0), 1.0, 1.0), Steps(1.0, 1.0))
    ] * 40
    tracemalloc.start()
    engine = LinearEngine(population, settings, seed=1, dtype=dtype)
    engine.advance()
    engine.measures()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = bytes_for(population, 40, average=False, dtype=dtype)
    assert planned / 3 < population.bytes + peak < planned * 1.1


def test_a_diverging_setting_is_reported_once_and_the_others_go_on() -> None:
    """Warnings are errors here: overflow is silent."""
    settings = [
        EngineSetting(Release(COHORT, 0.4, 1.0), Steps.from_ratio(step, 1.0))
        for step in (0.1, 1e9, 0.2, 1e12)
    ]
    measured = table(test=(X, Y, OFFSETS))
    reports = list(train(LinearEngine(measured, settings, seed=SEED), 20, 5))
    assert [report.round for report in reports] == reported_rounds(20, 5) == [0, 5, 10, 15, 20]
    assert reports[1].diverged == {1, 3}
    assert [set(report.measures) for report in reports] == [{0, 1, 2, 3}] * 2 + [{0, 2}] * 3
    alone = list(train(LinearEngine(measured, [settings[2]], seed=SEED), 20, 5))
    assert reports[-1].measures[2]["loss"] == pytest.approx(alone[-1].measures[0]["loss"], rel=1e-9)


def test_what_cannot_be_trained_side_by_side_is_refused() -> None:
    one, other, fewer = (
        EngineSetting(Release(Poisson(users, rate), 1.0, 1.0), Steps(1.0, 1.0))
        for users, rate in ((USERS, 0.3), (USERS, 0.5), (9, 0.3))
    )
    with pytest.raises(ValueError, match="share the cohort"):
        LinearEngine(table(), [one, other], seed=1)
    with pytest.raises(ValueError, match=f"population=9 users but the data hold {USERS}"):
        LinearEngine(table(), [fewer], seed=1)
    with pytest.raises(ValueError, match="at least one row"):
        FinitePopulation(X, Y, [0, 3, 3, len(Y)], batch_size=1, seed=1)
