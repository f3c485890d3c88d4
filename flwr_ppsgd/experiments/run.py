"""An experiment: settings and data in; a trained w, rows of measures, a privacy statement out."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.client.message_api import client_app
from flwr_ppsgd.experiments.rows import RunRow
from flwr_ppsgd.experiments.settings import EXHAUSTED, Experiment
from flwr_ppsgd.experiments.tasks import learner_for
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.promise import Promise
from flwr_ppsgd.server.curator import Curator, headline_of
from flwr_ppsgd.server.message_api import PPSGD
from flwr_ppsgd.server.training import Training
from flwr_ppsgd.simulation.engine import Setting, left_for_infinity, train
from flwr_ppsgd.simulation.grid import InProcessGrid
from flwr_ppsgd.wire import Layout

log = logging.getLogger("flwr.ppsgd")

SIMULATION = "simulation noise (the cohort engine sums in floating point)."

Watch: TypeAlias = Callable[[int, Result, Ledger], None]  # round, what there is so far, charges


class Accounted(Protocol):
    """Whoever can say what a run released and what that guarantees."""

    @property
    def release(self) -> Release: ...
    @property
    def ledger(self) -> Ledger: ...
    def privacy_statement(self) -> str: ...
    def privacy_data(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Args:
        experiment: what was run.
        strategy: what it released, and what that guarantees.
        w: the trained parameters.
        rows: one for each evaluated round.
        stopped: the user has ended the run early.
    """

    experiment: Experiment
    strategy: Accounted
    w: ArrayRecord
    rows: list[RunRow]
    stopped: bool = False


def run(experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train in this process."""
    app = client_app(learner_for)
    grid = InProcessGrid(app, experiment.training.population, experiment.to_flat())
    return run_on(grid, experiment, on_round)


def run_on(grid: Grid, experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train on any grid. Ctrl-C ends the run early; ε is then still that of the planned rounds."""
    _check_alone(experiment)
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
    rows = _rows(latest, ledgers)
    _check_finite(experiment, latest.arrays, rows)
    w = strategy.averaged(latest.arrays) if stopped else latest.arrays
    return Outcome(experiment, strategy, w, rows, stopped)


def _check_alone(experiment: Experiment) -> None:
    """ValueError if rows are set apart for a choice that a single run does not make."""
    if experiment.problem.select_on != "test":
        raise ValueError(
            "select-on = 'validation' sets rows apart for choosing among settings, and a run has "
            "one setting: leave it out here and it trains on all training rows, or use ppsgd sweep"
        )


def _rows(result: Result, ledgers: Mapping[int, Ledger]) -> list[RunRow]:
    """What was measured after each round that is accounted for."""
    rows = []
    for round_, metrics in result.evaluate_metrics_clientapp.items():
        if round_ in ledgers:
            rows.append(_row(round_, ledgers[round_], _numbers(metrics)))
    return rows


def _row(round_: int, ledger: Ledger, measures: Mapping[str, float]) -> RunRow:
    head = headline_of(ledger)
    return RunRow(round_, head.epsilon, head.cost, measures)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _check_finite(experiment: Experiment, w: ArrayRecord, rows: list[RunRow]) -> None:
    """RuntimeError if w or what was measured has grown beyond all bounds."""
    finite = all(np.isfinite(array).all() for array in w.to_numpy_ndarrays())
    if not finite or (rows and left_for_infinity(rows[0].measures, rows[-1].measures)):
        raise _diverged(experiment)


def _diverged(experiment: Experiment) -> RuntimeError:
    step = experiment.training.step
    return RuntimeError(
        f"training diverged: parameters left for infinity; lower step (now {step:g})"
    )


def run_as_cohort(experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train on the cohort engine: the same w and θ, many times faster, with simulation noise."""
    _check_alone(experiment)
    training = experiment.training
    simulated = Simulated(experiment)
    rounds = simulated.curator.plan(training.rounds)
    setting = Setting(simulated.release, training.steps())
    conditions = replace(experiment.conditions(), rounds=rounds)
    engine = experiment.task.engine([setting], training.insecure_seed, conditions)
    latest = Result()
    rows: list[RunRow] = []
    stopped = False

    def show(round_: int) -> None:
        if on_round:
            on_round(round_, latest, simulated.ledger)

    def count(round_: int) -> None:
        simulated.charge(round_)
        show(round_)

    try:
        for report in train(engine, rounds, training.evaluate_every, count):
            if report.diverged:
                raise _diverged(experiment)
            measures = report.measures[0]
            latest.evaluate_metrics_clientapp[report.round] = MetricRecord({**measures})
            rows.append(_row(report.round, simulated.ledger, measures))
            show(report.round)
    except KeyboardInterrupt:
        stopped = True
    w = _like(experiment.task.initial_arrays(), engine.w(0))
    _check_finite(experiment, w, rows)
    return Outcome(experiment, simulated, w, rows, stopped)


def _like(arrays: ArrayRecord, w: Vector) -> ArrayRecord:
    return Layout.of(arrays).unflatten(w, like=arrays)


class Simulated:
    """What a run on the cohort engine would have released and cost; it guarantees nothing."""

    def __init__(self, experiment: Experiment) -> None:
        settings = experiment.training
        training = Training(
            release=settings.release(),
            steps=settings.steps(),
            delta=settings.delta,
            max_epsilon=settings.budget(),
            insecure_seed=settings.insecure_seed,
        )
        self.curator = Curator(training)
        self._terms = (EXHAUSTED,) if experiment.drop_exhausted else ()
        if settings.evaluate_every:
            self.curator.note_evaluation()

    @property
    def release(self) -> Release:
        return self.curator.training.release

    @property
    def ledger(self) -> Ledger:
        return self.curator.ledger

    def charge(self, round_: int) -> None:
        """Every round counts as one without a guarantee."""
        self.curator.simulate(round_)

    def privacy_statement(self) -> str:
        return self._promise().statement()

    def privacy_data(self) -> dict[str, object]:
        return self._promise().as_data()

    def _promise(self) -> Promise:
        return self.curator.promise(simulation=SIMULATION, terms=self._terms)
