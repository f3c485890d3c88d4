"""Blocks of a sweep: many settings side by side on one engine, and the rows they give.

Blocks are decided once, from the memory there is, and kept with the results: a sweep that was
interrupted runs the blocks that are missing, and ends with the same rows.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.engines.baselines import LocalStepsEngine, fine_tune
from flwr_ppsgd.lab.engines.batches import Population, Table
from flwr_ppsgd.lab.engines.engine import Engine, Report, Setting, train
from flwr_ppsgd.lab.engines.measures import badness, for_choosing, measure_of
from flwr_ppsgd.lab.experiments.people import order_for, overall, people_of_each
from flwr_ppsgd.lab.experiments.rows import (
    FEDAVG,
    FEDAVG_SOLVED,
    FINE_TUNED,
    SOLVED,
    Point,
    SweepRow,
)
from flwr_ppsgd.lab.experiments.run import Simulated, learner_engine, published_by
from flwr_ppsgd.lab.experiments.settings import Experiment
from flwr_ppsgd.lab.experiments.snapshot import Snapshot
from flwr_ppsgd.lab.experiments.sweep import Sweep, recipe_of
from flwr_ppsgd.lab.experiments.tasks import LinearTask, Task
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.wire import Order

USER_DIGITS = 4  # of each user's measure in a row
DIGITS = 10  # of a measure over all users in a row
MEGABYTE = 1e6
RowsOf: TypeAlias = Callable[[Experiment, Engine, Sequence[Point], Report], list[SweepRow]]
Best: TypeAlias = tuple[str, float]  # a measure and its value


@dataclass(frozen=True)
class Plan:
    """Which settings run side by side.

    Args:
        blocks: the settings of each block.
        jobs: the number of blocks that run at the same time.
        bytes: what the largest block takes.
        limit: what all blocks that run at the same time may take.
    """

    blocks: tuple[tuple[Point, ...], ...]
    jobs: int
    bytes: int
    limit: int

    def __str__(self) -> str:
        sizes = [len(block) for block in self.blocks]
        settings = sum(sizes)
        blocks = len(sizes)
        largest = max(sizes)
        each = self.bytes / MEGABYTE
        limit = self.limit / MEGABYTE
        return (
            f"{settings} settings in {blocks} blocks of at most {largest}, {self.jobs} at a time, "
            f"about {each:.0f} MB each (limit {limit:.0f} MB in all)"
        )


def plan(sweep: Sweep, memory: int, jobs: int) -> Plan:
    """As few blocks as memory allows and ``jobs`` workers need; each holds settings of one seed."""
    points = sweep.points()
    task = sweep.base.task
    conditions = sweep.base.conditions()
    single = task.bytes(1, conditions)
    if single > memory:
        raise ValueError(
            f"{sweep.where}: a single setting needs {single / MEGABYTE:.0f} MB, the limit is "
            f"{memory / MEGABYTE:.0f} MB: raise --memory, or use fewer users or features"
        )
    jobs = min(jobs, len(points), int(memory // single))
    most = task.most_settings(conditions)
    while most > 1 and task.bytes(most, conditions) > memory / jobs:
        most = most * 7 // 8
    blocks = _blocks(points, most, jobs)
    largest = max(len(block) for block in blocks)
    return Plan(blocks, jobs, task.bytes(largest, conditions), memory)


def _blocks(points: Sequence[Point], most: int, jobs: int) -> tuple[tuple[Point, ...], ...]:
    """Blocks of at most ``most`` settings of one seed and method, enough of them for all jobs.

    The recipe has an engine for one setting alone.
    """
    seeds = sorted({point.seed for point in points})
    methods = list(dict.fromkeys(point.method for point in points))
    wanted = math.ceil(jobs / len(seeds))
    blocks: list[tuple[Point, ...]] = []
    for seed, method in itertools.product(seeds, methods):
        of_seed = [point for point in points if point.seed == seed]
        own = [point for point in of_seed if point.method == method]
        needed = len(own) if method == AUTO else math.ceil(len(own) / most)
        parts = max(needed, min(wanted, len(own)))
        for part in range(parts):
            blocks.append(tuple(own[part::parts]))
    return tuple(blocks)


def setting_of(base: Experiment, point: Point) -> Setting:
    """The training that a setting of the grid stands for."""
    changes: dict[str, Any] = {"step": point.step, "alpha_q": point.alpha_q}
    if point.clip_norm is not None:
        changes["clip_norm"] = point.clip_norm
    if point.noise_multiplier is not None:
        changes["noise_multiplier"] = point.noise_multiplier
    changed = replace(base.training, **changes)
    return Setting(changed.release(), changed.steps())


def run_block(
    flat: Mapping[str, Any],
    points: Sequence[Point],
    on_report: Callable[[int, Best | None], None] | None = None,
    directory: Path | None = None,
) -> list[SweepRow]:
    """The rows of one block, without ε.

    Args:
        flat: the settings of the sweep's base.
        points: the block's settings, of one seed and method.
        on_report: hears each round, and the best measure at the last report.
        directory: where the block is saved from time to time, and where one that was killed is
            taken up. None: nowhere.
    """
    base = Experiment.read(flat, where="sweep")
    rounds = base.training.rounds
    if points[0].method == AUTO:
        return _run_recipe(base, points, on_report, directory)
    engine = _engine(base, points)
    snapshot = None if directory is None else Snapshot(directory, points)
    rows: list[SweepRow] = []
    first: dict[int, float] = {}
    best: Best | None = None
    if snapshot:
        rows, first = snapshot.resume(engine)

    def tell(round_: int) -> None:
        if snapshot:
            snapshot.save_when_due(engine, rows, first)
        if on_report:
            on_report(round_, best)

    ends = ROWS_AT_THE_END.get(points[0].method)
    every = rounds if ends else base.training.evaluate_every
    rows_of = ends or _measured
    for report in train(engine, rounds, every, tell, first):
        rows += rows_of(base, engine, points, report)
        best = best_of(report) or best
    return rows


def _run_recipe(
    base: Experiment,
    points: Sequence[Point],
    on_report: Callable[[int, Best | None], None] | None,
    directory: Path | None,
) -> list[SweepRow]:
    """The one row of the recipe, after its own number of rounds."""
    (point,) = points
    experiment = recipe_of(base, point)
    rounds = experiment.training.rounds
    engine = learner_engine(experiment, Simulated(experiment).curator.training)
    snapshot = None if directory is None else Snapshot(directory, points)
    if snapshot:
        snapshot.resume(engine)

    def tell(round_: int) -> None:
        if snapshot:
            snapshot.save_when_due(engine, [], {})
        if on_report:
            on_report(round_ * base.training.rounds // rounds, None)

    for _ in train(engine, rounds, 0, tell):
        pass
    order = order_for(experiment.task, published_by(engine.curator))
    ((measures, by_user),) = solved_measures(experiment.task, [engine.w(0)], order)
    return [SweepRow(point, rounds, measures, by_user=by_user)]


def solved_measures(
    task: Task, ws: Sequence[Vector], order: Order
) -> list[tuple[dict[str, float], tuple[float, ...] | None]]:
    """For each w, what its users' personal models reach over all rows, and for each user.

    Test rows, and validation rows by names of their own if there are any.

    Args:
        task: everyone's model and data.
        ws: trained parameters.
        order: what is published beside each of them.
    """
    users = range(len(task.user_names()))
    choosing = task.choosing()
    found = []
    apart = people_of_each(choosing, ws, users, order) if choosing else [[] for _ in ws]
    for people, validation in zip(people_of_each(task, ws, users, order), apart, strict=True):
        measures = {**for_choosing(overall(validation)), **overall(people)}
        main = measure_of(people[0].measures)
        by_user = np.array([person.measures[main] for person in people])
        found.append((_finite(measures), _users(by_user)))
    return found


def _engine(base: Experiment, points: Sequence[Point]) -> Engine:
    settings = [setting_of(base, point) for point in points]
    seed = points[0].seed
    if points[0].method not in (FEDAVG, FEDAVG_SOLVED):
        return base.task.engine(settings, seed, base.conditions())
    return LocalStepsEngine(
        _population(base),
        settings,
        seed=seed,
        local_steps=base.local_steps,
        dtype=base.precision,
    )


def _population(base: Experiment) -> Population:
    """Everyone's data. Baselines are refused for tasks that have none when settings are read."""
    return cast(LinearTask, base.task).population(base.conditions())


def _measured(
    base: Experiment, engine: Engine, points: Sequence[Point], report: Report
) -> list[SweepRow]:
    """What a report says of each setting; at the end of each user, too."""
    by_user = engine.by_user() if report.round == base.training.rounds else {}
    rows = []
    for place, measures in sorted(report.measures.items()):
        row = SweepRow(
            points[place],
            report.round,
            _finite(measures),
            diverged=place in report.diverged,
            by_user=_users(by_user.get(place)),
        )
        rows.append(row)
    return rows


def _tuned(
    base: Experiment, engine: Engine, points: Sequence[Point], report: Report
) -> list[SweepRow]:
    """At the end of global learning, what each user makes of w alone; before that, who diverged."""
    rows = _diverged(points, report)
    if report.round < base.training.rounds or not engine.places:
        return rows
    table = _population(base)
    assert isinstance(table, Table)
    each = [engine.w(place).reshape(table.features, -1) for place in engine.places]
    w = np.stack(each, axis=1).astype(base.precision)  # d × settings × K
    steps = [float(step) for step in base.fine_tune_steps.split(",")]
    tuned = fine_tune(table, w, steps, base.fine_tune_passes)
    for place, (step, by_user, measures) in zip(engine.places, tuned, strict=True):
        row = SweepRow(
            points[place],
            report.round,
            _finite(measures),
            personal_step=step,
            by_user=_users(by_user),
        )
        rows.append(row)
    return rows


def _solved(
    base: Experiment, engine: Engine, points: Sequence[Point], report: Report
) -> list[SweepRow]:
    """At the end of training, what users reach who make the recipe's personal models around w, as
    if it had no noise; before that, who diverged."""
    rows = _diverged(points, report)
    if report.round < base.training.rounds or not engine.places:
        return rows
    ws = [engine.w(place) for place in engine.places]
    found = solved_measures(base.task, ws, order_for(base.task, {}))
    for place, (measures, by_user) in zip(engine.places, found, strict=True):
        rows.append(SweepRow(points[place], report.round, measures, by_user=by_user))
    return rows


def _diverged(points: Sequence[Point], report: Report) -> list[SweepRow]:
    return [
        SweepRow(points[place], report.round, {}, diverged=True)
        for place in sorted(report.diverged)
    ]


# methods that are measured once, after the last round
ROWS_AT_THE_END: dict[str, RowsOf] = {
    FINE_TUNED: _tuned,
    SOLVED: _solved,
    FEDAVG_SOLVED: _solved,
}


def _finite(measures: Mapping[str, float]) -> dict[str, float]:
    """The finite ones, with as many digits as a row has."""
    finite = {name: value for name, value in measures.items() if math.isfinite(value)}
    return {name: _rounded(value, DIGITS) for name, value in finite.items()}


def _users(values: Vector | None) -> tuple[float, ...] | None:
    """Each user's measure, with few digits; None if a step too large has left for infinity."""
    if values is None or not np.isfinite(values).all():
        return None
    return tuple(_rounded(value, USER_DIGITS) for value in values.tolist())


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def best_of(report: Report) -> Best | None:
    """The best measure among the settings of a report that still go on."""
    found = []
    for place, measures in report.measures.items():
        if measures and place not in report.diverged:
            name = measure_of(measures)
            found.append((name, measures[name]))
    return best_among(found)


def best_among(found: Sequence[Best]) -> Best | None:
    """The highest accuracy or precision, or the lowest error, risk or loss."""
    return min(found, key=lambda measured: badness(*measured), default=None)
