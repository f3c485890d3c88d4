"""Run an experiment: train, measure, and state the privacy."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from flwr_ppsgd import PPSGD, Ledger, Release, client_app
from flwr_ppsgd.arrays import Layout
from flwr_ppsgd.lab.engine import EngineSetting, has_diverged, train
from flwr_ppsgd.lab.evaluation import (
    UserResult,
    delivery_order,
    overall_measures,
    remember_measures,
    results_of,
)
from flwr_ppsgd.lab.experiment import EXHAUSTED, Experiment
from flwr_ppsgd.lab.problem import SYNTHETIC
from flwr_ppsgd.lab.rows import RunRow
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.server.account import ServerAccount
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.training import Training
from flwr_ppsgd.wire import BESIDE

MOST_NUMBERS = 1 << 28  # in the training rows of learners that are kept in memory
SEED_BITS = 31
# arguments of a strategy that do not apply to a cohort engine
NO_SERVER = {"enrolled": None, "checkpoint_dir": None, "budget_dir": None, "evaluate_every": 0}
SIMULATION = "simulation noise (the cohort engine sums in floating point)."

OnRound: TypeAlias = Callable[[int, Result, Ledger], None]  # the round, results and charges so far


@dataclass(frozen=True)
class RunOutcome:
    """The results of a run.

    Args:
        experiment: what was run.
        release: what every round released.
        ledger: everything that was charged.
        privacy_data: makes the privacy statement, as data.
        w: the trained parameters.
        rows: one for each evaluated round.
        stopped: the user has ended the run early.
        beside: what the recipe publishes beside w (``PPSGD.published``).
        people: each user's results with the final w, under the recipe.
    """

    experiment: Experiment
    release: Release
    ledger: Ledger
    privacy_data: Callable[[], dict[str, object]]
    w: ArrayRecord
    rows: list[RunRow]
    stopped: bool = False
    beside: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    people: list[UserResult] = field(default_factory=list)


def run(experiment: Experiment, on_round: OnRound | None = None) -> RunOutcome:
    """Train in this process, through messages: secret noise, and sums on the grid."""
    _refuse_validation_rows(experiment)
    return train_in_process(experiment, on_round)


def train_in_process(experiment: Experiment, on_round: OnRound | None = None) -> RunOutcome:
    """``run`` without the check that there are no validation rows."""
    task = experiment.task
    most = experiment.training.population
    if experiment.problem.data != SYNTHETIC:
        data = experiment.problem.per_user()
        rows = max(1.0, data.train_sizes.mean())
        most = int(MOST_NUMBERS / (rows * data.features))
    kept: dict[int, Learner] = {}  # of the first users

    def learner_of(user: int) -> Learner:
        if user in kept:
            return kept[user]
        learner = remember_measures(task.learner(user))
        if len(kept) < most:
            kept[user] = learner
        return learner

    def learner_for(context: Context) -> Learner:
        return learner_of(int(context.node_config["partition-id"]))

    grid = InProcessGrid(client_app(learner_for), experiment.training.population)
    return _train_on(grid, experiment, learner_of, on_round)


def run_on_grid(grid: Grid, experiment: Experiment) -> RunOutcome:
    """Train on any grid."""
    _refuse_validation_rows(experiment)
    return _train_on(grid, experiment, experiment.task.learner)


def _train_on(
    grid: Grid,
    experiment: Experiment,
    learner_of: Callable[[int], Learner],
    on_round: OnRound | None = None,
) -> RunOutcome:
    """Train and measure. Ctrl-C ends the run early; ε is then still that of the planned rounds."""
    if experiment.drop_exhausted:
        raise ValueError("drop-exhausted is simulation only: use --engine cohort, or leave it out")
    strategy = PPSGD.from_config(experiment.training.to_flat())
    latest = Result(arrays=experiment.task.initial_arrays())
    ledgers: dict[int, Ledger] = {}
    stopped = False

    def remember(round_: int, result: Result) -> None:
        nonlocal latest
        latest = result
        ledgers[round_] = strategy.ledger
        if on_round:
            on_round(round_, result, strategy.ledger)

    rounds = experiment.training.rounds
    try:
        strategy.start(grid, latest.arrays, num_rounds=rounds, on_round=remember)
    except KeyboardInterrupt:
        stopped = True
    rows = []
    for round_, metrics in latest.evaluate_metrics_clientapp.items():
        if round_ in ledgers:
            measures = {name: float(cast(float, value)) for name, value in metrics.items()}
            rows.append(_run_row(round_, ledgers[round_], measures))
    _check_finite(experiment, latest.arrays, rows)
    w = strategy.averaged(latest.arrays) if stopped else latest.arrays
    beside: dict[str, NDArray[Any]] = {}
    people: list[UserResult] = []
    if experiment.training.automatic:
        published = strategy.published(w)
        beside = {name: published[name] for name in BESIDE}
        strategy.note_evaluation()
        people = _results_of_recipe(experiment, w, beside, learner_of)
        last = _run_row(strategy.rounds_done, strategy.ledger, overall_measures(people))
        rows = [*(row for row in rows if row.round != last.round), last]
    return RunOutcome(
        experiment=experiment,
        release=strategy.release,
        ledger=strategy.ledger,
        privacy_data=strategy.privacy_data,
        w=w,
        rows=rows,
        stopped=stopped,
        beside=beside,
        people=people,
    )


def _results_of_recipe(
    experiment: Experiment,
    w: ArrayRecord,
    beside: Mapping[str, NDArray[Any]],
    learner_of: Callable[[int], Learner],
) -> list[UserResult]:
    """Each user's results with the last w of the recipe."""
    vector = Layout.of(w).flatten(w)
    order = delivery_order(experiment.training.task, beside)
    users = range(experiment.training.population)
    with threadpool_limits(1, "blas"):  # users' products are small
        (people,) = results_of(learner_of, [vector], users, order)
    return people


def _refuse_validation_rows(experiment: Experiment) -> None:
    """ValueError with validation rows: a single run chooses nothing by them."""
    if experiment.problem.select_on != "test":
        raise ValueError(
            "select-on = 'validation' sets rows apart for choosing among settings, and a run has "
            "one setting: leave it out here and it trains on all training rows, or use ppsgd sweep"
        )


def _run_row(round_: int, ledger: Ledger, measures: Mapping[str, float]) -> RunRow:
    cost = ledger.epsilon()
    guaranteed = np.inf if ledger.insecure_rounds else cost
    return RunRow(round_, float(guaranteed), cost, measures)


def _check_finite(experiment: Experiment, w: ArrayRecord, rows: list[RunRow]) -> None:
    """RuntimeError if w is not finite or the measures have diverged."""
    finite = all(np.isfinite(array).all() for array in w.to_numpy_ndarrays())
    if not finite or (rows and has_diverged(rows[0].measures, rows[-1].measures)):
        step = experiment.training.step
        remedy = "see what ppsgd look says" if step is None else f"lower step (now {step:g})"
        raise RuntimeError(f"training diverged: parameters are no longer finite; {remedy}")


def run_as_cohort(experiment: Experiment, on_round: OnRound | None = None) -> RunOutcome:
    """A simulation without any guarantee.

    The paper's method runs on a cohort engine, which gives the same w and θ many times faster; the
    recipe runs as in ``run``, with an insecure seed.
    """
    training = experiment.training
    if training.automatic:
        if experiment.drop_exhausted:
            raise ValueError("drop-exhausted is for method = 'paper': leave it out here")
        if training.insecure_seed is None:  # with the seed anybody can take the noise away again
            seeded = replace(training, insecure_seed=secrets.randbits(SEED_BITS))
            experiment = replace(experiment, training=seeded)
        return run(experiment, on_round)
    _refuse_validation_rows(experiment)
    account = ServerAccount(Training.of(**{**training.arguments(), **NO_SERVER}))
    release = account.training.release
    rounds = account.plan(training.rounds, 0)  # as many as the budget allows
    if training.evaluate_every:
        account.note_evaluation()
    engine = experiment.task.engine(
        [EngineSetting(release, account.training.steps)], training.insecure_seed
    )
    latest = Result()
    rows: list[RunRow] = []
    stopped = False

    def charge(round_: int) -> None:
        account.count_simulated(round_)
        if on_round:
            on_round(round_, latest, account.ledger)

    initial = experiment.task.initial_arrays()
    try:
        with threadpool_limits(1, "blas"):
            for report in train(engine, rounds, training.evaluate_every, charge):
                measures = report.measures[0]
                latest.evaluate_metrics_clientapp[report.round] = MetricRecord({**measures})
                rows.append(_run_row(report.round, account.ledger, measures))
                if report.diverged:
                    break
                if on_round:
                    on_round(report.round, latest, account.ledger)
    except KeyboardInterrupt:
        stopped = True
    w = Layout.of(initial).unflatten(engine.w(0), like=initial)
    _check_finite(experiment, w, rows)
    terms = (EXHAUSTED,) if experiment.drop_exhausted else ()
    return RunOutcome(
        experiment=experiment,
        release=release,
        ledger=account.ledger,
        privacy_data=lambda: account.promise(simulation=SIMULATION, terms=terms).as_data(),
        w=w,
        rows=rows,
        stopped=stopped,
    )
