"""The cohort engine against the other ones: the same data, cohorts and noise give the same w and
θ, round by round."""

import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from numpy.typing import DTypeLike
from scipy import sparse

from flwr_ppsgd import (
    PPSGD,
    FixedSize,
    Order,
    Poisson,
    Release,
    Steps,
    client_app,
    client_step,
    clip,
)
from flwr_ppsgd.algorithm import Cohort, Vector
from flwr_ppsgd.client.personal import Personal
from flwr_ppsgd.lab.data.synthetic import Synthetic, SyntheticLearner
from flwr_ppsgd.lab.engines.batches import Fresh, Population, Table, by_feature
from flwr_ppsgd.lab.engines.engine import Setting, reported_rounds, train
from flwr_ppsgd.lab.engines.linear import CohortEngine, bytes_for
from flwr_ppsgd.lab.engines.networks import NetworkEngine
from flwr_ppsgd.lab.engines.thetas import (
    NUMBERS_IN_CACHE,
    Kind,
    cheapest,
    costs,
    subtract_product,
    thetas,
)
from flwr_ppsgd.lab.experiments.run import run, run_as_cohort
from flwr_ppsgd.lab.experiments.settings import Experiment
from flwr_ppsgd.learner import Learner, Minibatches
from flwr_ppsgd.models.linear import AdditiveLinear, Loss
from flwr_ppsgd.models.split import SplitModel
from flwr_ppsgd.noise import Coins
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.simulation import InProcessGrid
from tests.models.test_split import MODELS, images
from tests.support.kept import kept_by
from tests.support.steps import noisy_step
from tests.support.toy import flat

SIZES = np.array([3, 25, 10, 11, 4, 17, 30, 10, 1, 12, 20, 9])  # so that m_i is 1, 3, 4, 9 or 10
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
USERS = len(SIZES)
FEATURES = 7
CLASSES = 3
BATCH = 10
SEED = 3
ROUNDS = 10
SOURCE = np.random.default_rng(0)
X = SOURCE.normal(size=(OFFSETS[-1], FEATURES)) * (SOURCE.random((OFFSETS[-1], FEATURES)) < 0.6)
Y = np.eye(CLASSES)[SOURCE.integers(CLASSES, size=OFFSETS[-1])]
COHORT = Poisson(USERS, 0.3)  # cohorts of 1 to 6 users
KINDS: list[Kind] = ["direct", "span"]
EXACT = 1e-9  # relative


def table(loss: Loss = "squared", sparse_x: bool = False, test: bool = False) -> Table:
    x = sparse.csr_array(X) if sparse_x else X
    measured = (X, Y, OFFSETS) if test else None
    return Table(x, Y, OFFSETS, batch_size=BATCH, seed=5, loss=loss, test=measured)


def linear_learner(user: int, loss: Loss = "squared") -> AdditiveLinear:
    own = slice(OFFSETS[user], OFFSETS[user + 1])
    batches = Minibatches(X[own], Y[own], BATCH, seed=5, user=user)
    return AdditiveLinear(batches, FEATURES, CLASSES, loss, test=(X[own], Y[own]))


def grid_of(cohort: Cohort = COHORT, total_batch: int | None = None) -> list[Setting]:
    """α from 0 to ∞, with and without noise, with everyone clipped, some, and nobody."""
    return [
        Setting(Release(cohort, c, z, total_batch), Steps.from_ratio(0.2, a))
        for a, z, c in itertools.product((0.0, 0.3, 3.0, math.inf), (0.0, 1.0), (0.05, 0.4, 1e3))
    ]


def by_hand(
    learners: Sequence[Learner], setting: Setting, rounds: int
) -> Iterator[tuple[Vector, list[Vector]]]:
    """(w, every θ) after each round, by the core's own functions, one user after the other."""
    release = setting.release
    steps = setting.steps
    thetas = [learner.initial_theta() for learner in learners]
    w = np.zeros_like(thetas[0])
    visits = [0] * len(learners)
    for round_ in range(1, rounds + 1):
        sent = []
        uniforms = Coins.insecure(SEED, "cohort", round_).uniforms(len(learners))
        for user in release.cohort.members(uniforms).tolist():
            visits[user] += 1
            order = Order(
                round_,
                steps.personal,
                release.clip_norm,
                release.reduction,
                True,
                visit=visits[user],
            )
            g_w, g_theta = learners[user].gradients(w, thetas[user], order)
            message, thetas[user] = client_step(
                thetas[user], g_w, g_theta, release.clip_norm, steps.personal
            )
            sent.append(message)
        if steps.publishes:
            noise = release.noise_std * Coins.insecure(SEED, "noise", round_).normals(len(w))
            w = noisy_step(w, sent, release, steps.shared, noise)
        yield w, thetas


def close(ours: Vector, theirs: Vector, rel: float = EXACT) -> None:
    largest = max(float(np.abs(theirs).max()), 1e-12)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=rel * largest)


def check_all(
    engine: CohortEngine | NetworkEngine,
    place: int,
    w: Vector,
    thetas: list[Vector],
    rel: float = EXACT,
) -> None:
    """w, and everyone's θ."""
    close(engine.w(place), w, rel)
    ours = [engine.theta(place, user) for user in range(len(thetas))]
    close(np.array(ours), np.array(thetas), rel)


@pytest.mark.parametrize("sparse_x", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("loss", "total"), [("squared", None), ("softmax", None), ("squared", 100)]
)
def test_every_setting_is_that_of_the_algorithm_round_by_round(
    loss: Loss, total: int | None, kind: Kind, sparse_x: bool
) -> None:
    """Algorithms 2 and 3 with short and empty cohorts and unequal m_i; all settings of a grid at
    once."""
    settings = grid_of(total_batch=total)
    engine = CohortEngine(table(loss, sparse_x), settings, seed=SEED, kind=kind)
    references = [
        by_hand([linear_learner(i, loss) for i in range(USERS)], s, ROUNDS) for s in settings
    ]
    for _ in range(ROUNDS):
        engine.advance()
        for place, reference in enumerate(references):
            check_all(engine, place, *next(reference))


@pytest.mark.parametrize(
    "cohort", [FixedSize(USERS, 4), Poisson(USERS, 1.0)], ids=["fixed size", "everyone"]
)
def test_other_cohorts_too(cohort: Cohort) -> None:
    settings = grid_of(cohort)[6:12]
    engine = CohortEngine(table(), settings, seed=SEED)
    for _ in range(ROUNDS):
        engine.advance()
    for place, setting in enumerate(settings):
        *_, (w, thetas) = by_hand([linear_learner(i) for i in range(USERS)], setting, ROUNDS)
        close(engine.w(place), w)
        close(engine.theta(place, 1), thetas[1])


def test_fresh_samples_are_those_of_the_learners() -> None:
    """The synthetic problem, everyone in every round, in more than one part."""
    users = 300
    problem = Synthetic.draw(users, 8, seed=4)
    settings = [
        Setting(Release(Poisson(users, 1.0), 5.0, 1.0), Steps.from_ratio(0.3, a))
        for a in (0.3, 3.0)
    ] * 60
    engine = CohortEngine(Fresh(problem, 10), settings, seed=SEED)
    for _ in range(3):
        engine.advance()
    learners = [SyntheticLearner(problem, user, 10) for user in range(users)]
    *_, (w, thetas) = by_hand(learners, settings[1], 3)
    close(engine.w(1), w)
    close(engine.theta(1, 299), thetas[299])
    risk = np.mean([problem.excess_risk(user, w + thetas[user]) for user in range(users)])
    assert engine.measures()[1]["excess_risk"] == pytest.approx(risk, rel=1e-9)


class PlainSum:
    """The sum of a round with the noise grid off."""

    def __init__(self, size: int, release: Release) -> None:
        self._total = np.zeros(size)
        self._release = release

    def scales(self, gradient: Vector) -> list[float]:  # noqa: ARG002
        return []

    def put(self, gradient: Vector, scales: list[float]) -> None:  # noqa: ARG002
        self._total = self._total + clip(gradient, self._release.clip_norm)

    def noisy(self, coins: Coins) -> Vector:
        return self._total + self._release.noise_std * coins.normals(len(self._total))


def plain_sum(curator: Curator, size: int) -> PlainSum:
    """In place of ``Curator.open_sum``."""
    training = curator.training
    return PlainSum(size if training.steps.publishes else 0, training.release)


def through_flower(
    learner_for: Callable[[int], Learner],
    setting: Setting,
    w0: Vector,
    average: bool,
    rounds: int = ROUNDS,
) -> Iterator[tuple[Vector, list[Vector]]]:
    """(w, every θ) after each round on InProcessGrid; the average iterates if wanted."""

    def learner_of(context: Context) -> Learner:
        return learner_for(int(context.node_config["partition-id"]))

    ppsgd = PPSGD(
        release=setting.release,
        steps=setting.steps,
        delta=1e-4,
        insecure_seed=SEED,
        average=average,
        min_online=0.0,
    )
    grid = InProcessGrid(client_app(learner_of), setting.release.cohort.population)
    after: list[tuple[Vector, list[Vector]]] = []

    def watch(round_: int, result: Any) -> None:
        personal = [
            kept_by(grid.context(node))
            or Personal(learner_of(grid.context(node)).initial_theta(), run=1)
            for node in grid.get_node_ids()
        ]
        thetas = [p.average(round_) if average else p.theta for p in personal]
        after.append((flat(ppsgd.averaged(result.arrays)), thetas))

    ppsgd.start(grid, ArrayRecord([w0]), num_rounds=rounds, on_round=watch)
    assert any(kept_by(grid.context(node)) for node in grid.get_node_ids())
    yield from after[1:]


@pytest.mark.parametrize("grid_off", [True, False], ids=["noise grid off", "noise grid on"])
@pytest.mark.parametrize("average", [False, True], ids=["last iterate", "average iterate"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_in_process_grid_gives_the_same_round_by_round(
    kind: Kind, average: bool, grid_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the grid on, each sum is off by its clip margin (1e-9·C per user) and its spacing, over
    10 rounds."""
    if grid_off:
        monkeypatch.setattr(Curator, "open_sum", plain_sum)
    settings = [setting for setting in grid_of() if setting.release.noise_multiplier == 1.0]
    engine = CohortEngine(table(), settings, seed=SEED, average=average, kind=kind)
    w0 = np.zeros(FEATURES * CLASSES)
    flower = [list(through_flower(linear_learner, setting, w0, average)) for setting in settings]
    for round_ in range(ROUNDS):
        engine.advance()
        for place, setting in enumerate(settings):
            w, thetas = flower[place][round_]
            grid_error = 1e-6 if setting.release.clip_norm < 1e3 else 1e-4
            rel = EXACT if grid_off else grid_error
            check_all(engine, place, w, thetas, rel)


@pytest.mark.parametrize("average", [False, True], ids=["last iterate", "average iterate"])
@pytest.mark.parametrize("name", MODELS)
def test_networks_by_vmap_are_those_of_the_in_process_grid(
    name: str, average: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Curator, "open_sum", plain_sum)
    model = MODELS[name]()
    sizes = [3, 9, 5, 5, 12]
    x, y = images(sum(sizes))
    starts = np.cumsum([0, *sizes])
    own = [slice(starts[i], starts[i + 1]) for i in range(5)]
    batches = [Minibatches(x[own[i]], y[own[i]], 5, seed=2, user=i) for i in range(5)]
    tests = [(x[rows], y[rows]) for rows in own]
    settings = [
        Setting(Release(Poisson(5, 0.5), c, 0.5), Steps.from_ratio(0.1, a))
        for c in (0.1, 1e3)
        for a in (0.0, 0.5)
    ]
    engine = NetworkEngine(model, batches, settings, seed=SEED, average=average, tests=tests)
    w0 = model.initial_w()
    flower = [
        list(through_flower(lambda i: model.learner(batches[i]), setting, w0, average, rounds=4))
        for setting in settings
    ]
    for round_ in range(4):
        engine.advance()
        for place in range(len(settings)):
            check_all(engine, place, *flower[place][round_])
    check_network_measures(engine, model, tests, sizes)


def check_network_measures(
    engine: NetworkEngine, model: SplitModel, tests: Any, sizes: list[int]
) -> None:
    """Weighted by the number of examples; a dropped setting is gone."""
    losses = [model.evaluate(engine.w(1), engine.theta(1, i), tests[i])["loss"] for i in range(5)]
    assert engine.measures()[1]["loss"] == pytest.approx(np.average(losses, weights=sizes))
    engine.drop({0, 2})
    assert engine.places == [1, 3]
    assert set(engine.measures()) == {1, 3}


def test_measures_are_the_means_over_users_that_the_strategy_reports() -> None:
    engine = CohortEngine(table("softmax", test=True), grid_of(), seed=SEED)
    for _ in range(5):
        engine.advance()
    for place in (0, 8, 23):
        users = [
            linear_learner(i, "softmax").evaluate(engine.w(place), engine.theta(place, i))
            for i in range(USERS)
        ]
        for name in users[0]:
            expected = np.average([user[name] for user in users], weights=SIZES)
            assert engine.measures()[place][name] == pytest.approx(expected)


def test_the_ends_of_alpha_freeze_one_block() -> None:
    settings = grid_of()
    engine = CohortEngine(table(), settings, seed=SEED)
    for _ in range(5):
        engine.advance()
    for place, setting in enumerate(settings):
        moved = [
            bool(np.any(engine.w(place))),
            any(np.any(engine.theta(place, i)) for i in range(USERS)),
        ]
        assert moved == [setting.steps.shared > 0, setting.steps.personal > 0]


def test_an_empty_cohort_still_releases_noise() -> None:
    """w = −s_w·z·C/D·Σ_t n_t if nobody ever takes part."""
    release = Release(Poisson(USERS, 1e-12), 2.0, 0.5)
    engine = CohortEngine(table(), [Setting(release, Steps(0.1, 0.1))], seed=SEED)
    engine.advance()
    engine.advance()
    normals = sum(Coins.insecure(SEED, "noise", t).normals(FEATURES * CLASSES) for t in (1, 2))
    close(engine.w(0), -0.1 * 0.5 * 2.0 / release.denominator * np.asarray(normals))


def test_a_norm_that_cancels_in_the_gram_block_is_taken_from_the_product() -> None:
    """Two nearly equal rows with opposite residuals: ⟨RRᵀ, XXᵀ⟩ = 4·(1 − 1 + 10⁻⁸/4…) keeps 8
    digits of 16."""
    x = np.array([[1.0, 0.0], [1.0, 1e-4]])
    y = np.array([[-1.0], [1.0]])
    cancelling = Table(x, y, [0, 2], batch_size=2, seed=1)
    setting = Setting(Release(Poisson(1, 1.0), 1e-6, 0.0), Steps(1.0, 0.0))
    engine = CohortEngine(cancelling, [setting], seed=SEED)
    engine.advance()
    close(engine.w(0), clip(np.array([0.0, 5e-5]), 1e-6), 1e-13)


@pytest.mark.parametrize("sparse_x", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_close(kind: Kind, sparse_x: bool) -> None:
    data = table("softmax", sparse_x)
    engines = [
        CohortEngine(data, grid_of(), seed=SEED, dtype=d, kind=kind)
        for d in (np.float64, np.float32)
    ]
    for engine in engines:
        for _ in range(ROUNDS):
            engine.advance()
    for place in range(len(grid_of())):
        close(engines[1].w(place), engines[0].w(place), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_shows_in_the_next_scores_of_the_same_batch(kind: Kind) -> None:
    data = table()
    everyone = np.arange(USERS)
    batch = data.batch(everyone, np.full(USERS, 3), np.dtype(np.float64))
    kept = thetas(kind, data, columns=2, dtype=np.dtype(np.float64), average=False)
    np.testing.assert_array_equal(kept.scores(batch), 0.0)
    residual = SOURCE.normal(size=(*batch.y.shape[:2], 2))
    kept.step(batch, residual)
    for user, (x, count) in enumerate(zip(batch.dense(), batch.counts, strict=True)):
        moved = -(x[:count].T @ residual[user, :count])
        np.testing.assert_allclose(
            kept.scores(batch)[user, :count], x[:count] @ moved, rtol=EXACT, atol=1e-12
        )


@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_users_with_equally_many_rows_are_those_of_the_algorithm(loss: Loss) -> None:
    """Their own scores are one product over the cohort; sizes that are no multiple of m, too."""
    rows = 13
    users = 6
    data = Table(
        X[: users * rows],
        Y[: users * rows],
        np.arange(users + 1) * rows,
        batch_size=BATCH,
        seed=5,
        loss=loss,
    )
    learners = []
    for user in range(users):
        own = slice(user * rows, (user + 1) * rows)
        batches = Minibatches(X[own], Y[own], BATCH, seed=5, user=user)
        learners.append(AdditiveLinear(batches, FEATURES, CLASSES, loss))
    setting = Setting(Release(Poisson(users, 0.5), 0.4, 1.0), Steps.from_ratio(0.2, 1.0))
    engine = CohortEngine(data, [setting], seed=SEED, kind="span")
    for w, everyone in by_hand(learners, setting, ROUNDS):
        engine.advance()
        check_all(engine, 0, w, everyone)


@pytest.mark.parametrize("features", [8, 1 + NUMBERS_IN_CACHE // 4])
@pytest.mark.parametrize("sparse_x", [False, True])
def test_a_product_is_subtracted_in_place(features: int, sparse_x: bool) -> None:
    """From small arrays, and from such as are too large for a second pass."""
    x = SOURCE.normal(size=(5, features))
    residual = SOURCE.normal(size=(5, 4))
    target = SOURCE.normal(size=(features, 4))
    expected = target - x.T @ residual
    given = by_feature(sparse.csr_array(x)) if sparse_x else x
    subtract_product(target, given, residual)
    np.testing.assert_allclose(target, expected, rtol=EXACT, atol=1e-12)


def wide(sizes: Sequence[int], features: int = 50) -> Table:
    rows = sum(sizes)
    return Table(
        np.ones((rows, features)), np.ones((rows, 1)), np.cumsum([0, *sizes]), batch_size=10, seed=1
    )


def test_the_representation_is_chosen_by_cost() -> None:
    """Own rows if they are few, θ itself if they are many or fresh; Gram matrices must pay for
    themselves."""
    fresh = Fresh(Synthetic.draw(4, 50, 1), 10)
    assert cheapest(fresh, columns=100, visits=100) == "direct"
    assert cheapest(wide([20] * 4), columns=100, visits=1000) == "span"
    assert cheapest(wide([500] * 4), columns=100, visits=1000) == "direct"
    assert cheapest(wide([20] * 4, features=784), columns=1, visits=4) == "direct"
    assert set(costs(fresh, 1, 1.0)) == {"direct"}
    with pytest.raises(ValueError, match="finitely many"):
        CohortEngine(
            fresh,
            [Setting(Release(Poisson(4, 1.0), 1.0, 1.0), Steps(1.0, 1.0))],
            seed=1,
            kind="span",
        )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "population", [wide([20] * 40, 500), Fresh(Synthetic.draw(200, 100, 1), 10)]
)
def test_memory_is_foreseen(population: Population, dtype: DTypeLike) -> None:
    """What is planned is enough, and not wastefully much. NumPy's allocations are traced."""
    users = len(population)
    settings = [Setting(Release(Poisson(users, 1.0), 1.0, 1.0), Steps(1.0, 1.0))] * 40
    tracemalloc.start()
    engine = CohortEngine(population, settings, seed=1, rounds=20, dtype=dtype)
    engine.advance()
    engine.measures()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = bytes_for(population, 40, rounds=20, rate=1.0, average=False, dtype=dtype)
    assert planned / 3 < population.bytes + peak < planned * 1.1


def test_a_diverging_setting_is_reported_once_and_the_others_go_on() -> None:
    """Warnings are errors here: overflow is silent."""
    settings = [
        Setting(Release(COHORT, 0.4, 1.0), Steps.from_ratio(step, 1.0))
        for step in (0.1, 1e9, 0.2, 1e12)
    ]
    reports = list(train(CohortEngine(table(test=True), settings, seed=SEED), 20, 5))
    assert [report.round for report in reports] == reported_rounds(20, 5) == [0, 5, 10, 15, 20]
    assert reports[1].diverged == {1, 3}
    assert [set(report.measures) for report in reports] == [{0, 1, 2, 3}] * 2 + [{0, 2}] * 3
    alone = list(train(CohortEngine(table(test=True), [settings[2]], seed=SEED), 20, 5))
    assert reports[-1].measures[2]["loss"] == pytest.approx(alone[-1].measures[0]["loss"], rel=1e-9)


@pytest.mark.parametrize("average", [False, True])
def test_dropping_keeps_every_other_setting(average: bool) -> None:
    engine = CohortEngine(table(), grid_of(), seed=SEED, average=average)
    whole = CohortEngine(table(), grid_of(), seed=SEED, average=average)
    for round_ in range(ROUNDS):
        if round_ == 7:
            engine.drop({0, 3, 7, 12, 23})
        engine.advance()
        whole.advance()
    for place in engine.places:
        close(engine.w(place), whole.w(place))
        close(engine.theta(place, 1), whole.theta(place, 1))


def test_settings_of_other_cohorts_are_refused() -> None:
    one, other = (
        Setting(Release(Poisson(USERS, rate), 1.0, 1.0), Steps(1.0, 1.0)) for rate in (0.3, 0.5)
    )
    with pytest.raises(ValueError, match="share the cohort"):
        CohortEngine(table(), [one, other], seed=1)
    with pytest.raises(ValueError, match=f"population=9 users but the data hold {USERS}"):
        CohortEngine(
            table(), [Setting(Release(Poisson(9, 0.3), 1.0, 1.0), Steps(1.0, 1.0))], seed=1
        )


def test_a_user_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Table(X, Y, [0, 3, 3, len(Y)], batch_size=1, seed=1)


def small(**changes: Any) -> Experiment:
    flat_settings = {
        "population": 9,
        "features": 8,
        "rounds": 5,
        "evaluate-every": 2,
        "insecure-seed": 1,
    }
    return Experiment.load(overrides={**flat_settings, **changes})


def test_a_run_as_cohort_is_the_run_of_the_other_engine() -> None:
    """Up to the noise grid: ε and the ledger are the same."""
    ours = run_as_cohort(small())
    theirs = run(small())
    assert [row.round for row in ours.rows] == [0, 2, 4, 5]
    for row, other in zip(ours.rows, theirs.rows, strict=True):
        assert row.deployed_epsilon == other.deployed_epsilon
        risk = other.measures["excess_risk"]
        assert row.measures["excess_risk"] == pytest.approx(risk, rel=1e-6)
    close(flat(ours.w), flat(theirs.w), 1e-6)
    assert ours.strategy.ledger == theirs.strategy.ledger


@pytest.mark.parametrize(
    "changes", [{}, {"insecure-seed": 1}, {"alpha-q": 0.0}, {"noise-multiplier": 0.0}]
)
def test_a_run_as_cohort_claims_no_guarantee(changes: dict[str, Any]) -> None:
    """It sums in floating point: with or without a seed, its noise is for simulation."""
    flat_settings = {
        key: value for key, value in small(**changes).to_flat().items() if key != "insecure-seed"
    }
    outcome = run_as_cohort(Experiment.read({**flat_settings, **changes}, where="here"))
    data = outcome.strategy.privacy_data()
    assert data["guarantee"] == "none"
    assert str(data["noise"]).startswith("simulation noise")
    assert str(data["statement"]).startswith("NO GUARANTEE: simulation noise")
    assert data["rounds_trained"] == 5


def test_a_run_as_cohort_that_diverges_says_so() -> None:
    with pytest.raises(RuntimeError, match="training diverged"):
        run_as_cohort(small(**{"step": 1e30, "alpha-q": 1.0}))


def test_a_budget_ends_a_run_as_cohort() -> None:
    outcome = run_as_cohort(small(**{"max-epsilon": 0.6}))
    assert 0 < outcome.strategy.ledger.rounds < 5
    assert outcome.strategy.ledger.epsilon() <= 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_validation_and_test_rows_of_one_number_are_not_mixed_up(kind: Kind) -> None:
    """Both parts have as many rows for each user: each is measured on its own."""
    setting = Setting(Release(COHORT, 1.0, 0.0), Steps(0.1, 0.1))
    other = (X[::-1].copy(), Y, OFFSETS)

    def measured(**parts: Any) -> dict[str, float]:
        rows = Table(X, Y, OFFSETS, batch_size=BATCH, seed=5, **parts)
        engine = CohortEngine(rows, [setting], seed=SEED, kind=kind)
        for _ in range(ROUNDS):
            engine.advance()
        return engine.measures(final=True)[0]

    both = measured(validation=other, test=(X, Y, OFFSETS))
    assert both["loss"] == pytest.approx(measured(test=(X, Y, OFFSETS))["loss"], rel=EXACT)
    assert both["validation_loss"] == pytest.approx(measured(test=other)["loss"], rel=EXACT)
