"""An experiment: settings and data in; a trained w, rows of measures, a privacy statement out."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.client.message_api import client_app
from flwr_ppsgd.lab.engines.engine import Engine, Setting, left_for_infinity, train
from flwr_ppsgd.lab.engines.learners import Found, LearnerEngine
from flwr_ppsgd.lab.engines.measures import measure_of
from flwr_ppsgd.lab.experiments.people import Person, order_for, overall, people_of
from flwr_ppsgd.lab.experiments.rows import RunRow
from flwr_ppsgd.lab.experiments.settings import EXHAUSTED, Experiment
from flwr_ppsgd.lab.experiments.tasks import learner_for
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.promise import Promise
from flwr_ppsgd.server.curator import Curator, headline_of
from flwr_ppsgd.server.message_api import PPSGD
from flwr_ppsgd.server.training import Training
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import BESIDE, SIZE, UNIT, VARIANCE, Layout

log = logging.getLogger("flwr.ppsgd")

MOST_LEARNERS = 4096  # that are kept in memory
# arguments of a strategy that a simulation on the cohort engine has no use for
SERVER_ONLY = ("enrolled", "checkpoint_dir", "budget_dir", "evaluate_every")
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
    def note_evaluation(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Args:
        experiment: what was run.
        strategy: what it released, and what that guarantees.
        w: the trained parameters.
        rows: one for each evaluated round.
        stopped: the user has ended the run early.
        beside: what the recipe publishes beside w, as of ``PPSGD.published``.
        people: how each user fares with the final w, under the recipe.
    """

    experiment: Experiment
    strategy: Accounted
    w: ArrayRecord
    rows: list[RunRow]
    stopped: bool = False
    beside: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    people: list[Person] = field(default_factory=list)


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
    last = _row(strategy.rounds_done, strategy.ledger, {})
    beside = _beside(strategy.published(w)) if experiment.training.automatic else {}
    return _with_people(Outcome(experiment, strategy, w, rows, stopped, beside), last)


def _beside(published: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: published[name] for name in BESIDE}


def _with_people(outcome: Outcome, last: RunRow) -> Outcome:
    """With how each user fares, and the last row about it, under the recipe."""
    experiment = outcome.experiment
    if not experiment.training.automatic:
        return outcome
    outcome.strategy.note_evaluation()
    w = Layout.of(outcome.w).flatten(outcome.w)
    users = range(experiment.training.population)
    order = order_for(experiment.task, outcome.beside)
    people = people_of(experiment.task, w, users, order)
    earlier = [row for row in outcome.rows if row.round != last.round]
    rows = [*earlier, replace(last, measures=overall(people))]
    return replace(outcome, rows=rows, people=people)


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
    remedy = "see what ppsgd look says" if step is None else f"lower step (now {step:g})"
    return RuntimeError(f"training diverged: parameters left for infinity; {remedy}")


def run_as_cohort(experiment: Experiment, on_round: Watch | None = None) -> Outcome:
    """Train on the cohort engine: the same w and θ, many times faster, with simulation noise."""
    _check_alone(experiment)
    training = experiment.training
    simulated = Simulated(experiment)
    rounds = simulated.curator.plan(training.rounds)
    engine = _engine(experiment, simulated, rounds)
    latest = Result()
    rows: list[RunRow] = []
    stopped = False

    def show(round_: int) -> None:
        if on_round:
            on_round(round_, latest, simulated.ledger)

    def count(round_: int) -> None:
        simulated.charge(round_, engine)
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
    last = _row(engine.round, simulated.ledger, {})
    beside = published_by(engine.curator) if isinstance(engine, LearnerEngine) else {}
    return _with_people(Outcome(experiment, simulated, w, rows, stopped, beside), last)


def _engine(experiment: Experiment, simulated: "Simulated", rounds: int) -> Engine:
    """Settings side by side where there is an engine for them, else learners one by one."""
    settings = experiment.training
    training = simulated.curator.training
    if training.recipe is None:
        setting = Setting(training.release, training.steps)
        conditions = replace(experiment.conditions(), rounds=rounds)
        return experiment.task.engine([setting], settings.insecure_seed, conditions)
    if experiment.drop_exhausted:
        raise ValueError("drop-exhausted is for method = 'paper': leave it out here")
    return learner_engine(experiment, training)


def learner_engine(experiment: Experiment, training: Training) -> LearnerEngine:
    """Everyone's learners, for the recipe."""
    task = experiment.task
    arrays = task.initial_arrays()
    users = range(experiment.training.population)
    learner_of = functools.lru_cache(maxsize=MOST_LEARNERS)(task.learner)

    def measure(w: Vector, curator: Curator) -> Found:
        people = people_of(task, w, users, order_for(task, published_by(curator)))
        found = overall(people)
        if not found:
            return Found({}, np.zeros(0))
        main = measure_of(found)
        return Found(found, np.array([person.measures[main] for person in people]))

    layout = Layout.of(arrays)
    w = layout.flatten(arrays).reshape(layout.columns, -1)
    return LearnerEngine(training, learner_of, w, measure)


def published_by(curator: Curator) -> dict[str, NDArray[Any]]:
    """What the recipe publishes beside w: its noise ν, the unit, the size."""
    values = curator.values
    return {VARIANCE: curator.variance, UNIT: np.array(values.unit), SIZE: np.array(values.size)}


def _like(arrays: ArrayRecord, w: Vector) -> ArrayRecord:
    return Layout.of(arrays).unflatten(w, like=arrays)


class Simulated:
    """What a run on the cohort engine would have released and cost; it guarantees nothing."""

    def __init__(self, experiment: Experiment) -> None:
        settings = experiment.training
        arguments = settings.arguments()
        for server_only in SERVER_ONLY:
            arguments.pop(server_only)
        self.curator = Curator(Training(**arguments))
        self._terms = (EXHAUSTED,) if experiment.drop_exhausted else ()
        if settings.evaluate_every:
            self.note_evaluation()

    def note_evaluation(self) -> None:
        """From now on the statement says that users' own data were measured."""
        self.curator.note_evaluation()

    @property
    def release(self) -> Release:
        return self.curator.training.release

    @property
    def ledger(self) -> Ledger:
        return self.curator.ledger

    def charge(self, round_: int, engine: Engine) -> None:
        """Every round counts as one without a guarantee, and so does what comes before it."""
        if isinstance(engine, LearnerEngine):
            self.curator.simulate_sums(engine.curator.sums)
        self.curator.simulate(round_)

    def privacy_statement(self) -> str:
        return self._promise().statement()

    def privacy_data(self) -> dict[str, object]:
        return self._promise().as_data()

    def _promise(self) -> Promise:
        return self.curator.promise(simulation=SIMULATION, terms=self._terms)
