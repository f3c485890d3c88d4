"""Blocks of a sweep: many settings side by side on one engine, and the rows they give.

Blocks are decided once, from the memory there is, and kept with the results: a sweep that was
interrupted runs the blocks that are missing, and ends with the same rows.
"""

import hashlib
import itertools
import json
import logging
import math
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab import disk
from flwr_ppsgd.lab.baselines import LocalStepsEngine, fine_tune
from flwr_ppsgd.lab.engine import Engine, Report, Setting, train
from flwr_ppsgd.lab.evaluation import UserResult, delivery_order, overall, results_of
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.measures import badness, for_choosing, measure_of
from flwr_ppsgd.lab.population import Table
from flwr_ppsgd.lab.rows import (
    FEDAVG,
    FEDAVG_SOLVED,
    FINE_TUNED,
    SOLVED_BASELINES,
    Point,
    SweepRow,
)
from flwr_ppsgd.lab.run import train_in_process
from flwr_ppsgd.lab.sweep import Sweep, recipe_of
from flwr_ppsgd.lab.tasks import LinearTask, for_choosing_on
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.wire import Layout

log = logging.getLogger("flwr.ppsgd")

USER_DIGITS = 4  # of each user's measure in a row
DIGITS = 10  # of a measure over all users in a row
MEGABYTE = 1e6
EVERY_SECONDS = 20.0  # between two snapshots
SHARE = 20  # snapshots take at most one part in this number of the time
PREFIX = ".block-"
FORMAT = 3  # of engines' states: files of another format are not taken up
PROGRESS = "progress"  # the array that holds rows and first errors, as JSON
AT_THE_END = (FINE_TUNED, *SOLVED_BASELINES)  # methods that are measured once

Best: TypeAlias = tuple[str, float]  # a measure and its value
OnReport: TypeAlias = Callable[[int, Best | None], None]  # the round, and the best measure so far


@dataclass(frozen=True)
class BlockPlan:
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
        return (
            f"{sum(sizes)} settings in {len(sizes)} blocks of at most {max(sizes)}, {self.jobs} at "
            f"a time, about {self.bytes / MEGABYTE:.0f} MB each (limit "
            f"{self.limit / MEGABYTE:.0f} MB in all)"
        )


def plan_blocks(sweep: Sweep, memory: int, jobs: int) -> BlockPlan:
    """As few blocks as memory allows and ``jobs`` workers need; each holds settings of one seed."""
    points = sweep.points()
    task = sweep.base.task
    single = task.bytes(1)
    if single > memory:
        raise ValueError(
            f"{sweep.where}: a single setting needs {single / MEGABYTE:.0f} MB, the limit is "
            f"{memory / MEGABYTE:.0f} MB: raise --memory, or use fewer users or features"
        )
    jobs = min(jobs, len(points), int(memory // single))
    most = task.most_settings
    while most > 1 and task.bytes(most) > memory / jobs:
        most = most * 7 // 8
    blocks = _blocks(points, most, jobs)
    largest = max(len(block) for block in blocks)
    return BlockPlan(blocks, jobs, task.bytes(largest), memory)


def _blocks(points: Sequence[Point], most: int, jobs: int) -> tuple[tuple[Point, ...], ...]:
    """Blocks of at most ``most`` settings of one seed and method, enough of them for all jobs.

    The recipe runs one setting at a time.
    """
    seeds = sorted({point.seed for point in points})
    methods = list(dict.fromkeys(point.method for point in points))
    wanted = math.ceil(jobs / len(seeds))
    blocks: list[tuple[Point, ...]] = []
    for seed, method in itertools.product(seeds, methods):
        own = [point for point in points if (point.seed, point.method) == (seed, method)]
        needed = len(own) if method == AUTO else math.ceil(len(own) / most)
        parts = max(needed, min(wanted, len(own)))
        blocks += [tuple(own[part::parts]) for part in range(parts)]
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
    on_report: OnReport,
    directory: Path | None = None,
) -> list[SweepRow]:
    """The rows of one block, without ε.

    Args:
        flat: the settings of the sweep's base.
        points: the block's settings, of one seed and method.
        on_report: is called with each round, and the best measure at the last report.
        directory: where the block is saved from time to time, and where one that was killed is
            taken up. None: nowhere.
    """
    base = Experiment.read(flat, where="sweep")
    rounds = base.training.rounds
    method = points[0].method
    if method == AUTO:
        row = _recipe_row(base, points[0])
        on_report(rounds, None)
        return [row]
    engine = _engine(base, points)
    snapshot = None if directory is None else Snapshot(directory, points)
    rows, first = snapshot.resume(engine) if snapshot else ([], {})
    best: Best | None = None

    def after_round(round_: int) -> None:
        if snapshot:
            snapshot.save_when_due(engine, rows, first)
        on_report(round_, best)

    at_the_end = method in AT_THE_END
    every = rounds if at_the_end else base.training.evaluate_every
    for report in train(engine, rounds, every, after_round, first):
        by_user = engine.by_user() if report.round == rounds and not at_the_end else {}
        for place, measures in sorted(report.measures.items()):
            diverged = place in report.diverged
            if at_the_end and diverged:
                rows.append(SweepRow(points[place], report.round, {}, diverged=True))
            elif not at_the_end:
                row = _rounded_row(points[place], report.round, measures, by_user.get(place))
                rows.append(replace(row, diverged=diverged))
        best = _best_of(report) or best
    if method == FINE_TUNED:
        rows += _fine_tuned_rows(base, engine, points)
    elif method in SOLVED_BASELINES:
        rows += _solved_rows(base, engine, points)
    return rows


def _engine(base: Experiment, points: Sequence[Point]) -> Engine:
    settings = [setting_of(base, point) for point in points]
    seed = points[0].seed
    if points[0].method not in (FEDAVG, FEDAVG_SOLVED):
        return base.task.engine(settings, seed)
    # baselines are refused for other tasks when settings are read
    population = cast(LinearTask, base.task).population()
    return LocalStepsEngine(
        population, settings, seed=seed, local_steps=base.local_steps, dtype=base.precision
    )


def _recipe_row(base: Experiment, point: Point) -> SweepRow:
    """The one row of the recipe, after its own number of rounds."""
    experiment = recipe_of(base, point)
    outcome = train_in_process(experiment)
    validation: list[UserResult] = []
    choosing = for_choosing_on(experiment.task)
    if choosing:
        w = Layout.of(outcome.w).flatten(outcome.w)
        order = delivery_order(experiment.training.task, outcome.beside)
        users = range(base.training.population)
        (validation,) = results_of(choosing.learner, [w], users, order)
    return _solved_row(point, experiment.training.rounds, outcome.people, validation)


def _fine_tuned_rows(base: Experiment, engine: Engine, points: Sequence[Point]) -> list[SweepRow]:
    """What users reach who fine-tune the final w of global learning on their own."""
    if not engine.places:
        return []
    table = cast(Table, cast(LinearTask, base.task).population())
    each = [engine.w(place).reshape(table.features, -1) for place in engine.places]
    w = np.stack(each, axis=1).astype(base.precision)  # d × settings × K
    steps = [float(step) for step in base.fine_tune_steps.split(",")]
    rows = []
    results = fine_tune(table, w, steps, base.fine_tune_passes)
    for place, (step, by_user, measures) in zip(engine.places, results, strict=True):
        row = _rounded_row(points[place], base.training.rounds, measures, by_user)
        rows.append(replace(row, personal_step=step))
    return rows


def _solved_rows(base: Experiment, engine: Engine, points: Sequence[Point]) -> list[SweepRow]:
    """What users reach who make the recipe's personal models around w, as if it had no noise."""
    ws = [engine.w(place) for place in engine.places]
    users = range(base.training.population)
    on_test = results_of(base.task.learner, ws, users, None)
    apart: list[list[UserResult]] = [[] for _ in ws]
    choosing = for_choosing_on(base.task)
    if choosing:
        apart = results_of(choosing.learner, ws, users, None)
    return [
        _solved_row(points[place], base.training.rounds, people, validation)
        for place, people, validation in zip(engine.places, on_test, apart, strict=True)
    ]


def _solved_row(
    point: Point, rounds: int, people: Sequence[UserResult], validation: Sequence[UserResult]
) -> SweepRow:
    """What personal models reach on test rows, and on validation rows if there are any."""
    measures = {**for_choosing(overall(validation)), **overall(people)}
    main = measure_of(people[0].measures)
    by_user = np.array([person.measures[main] for person in people])
    return _rounded_row(point, rounds, measures, by_user)


def _rounded_row(
    point: Point, round_: int, measures: Mapping[str, float], by_user: Vector | None
) -> SweepRow:
    """With the measures that are finite, and few digits; users are left out if one of them has
    none."""
    finite = {
        name: float(f"{value:.{DIGITS}g}")
        for name, value in measures.items()
        if math.isfinite(value)
    }
    users = None
    if by_user is not None and np.isfinite(by_user).all():
        users = tuple(float(f"{value:.{USER_DIGITS}g}") for value in by_user.tolist())
    return SweepRow(point, round_, finite, by_user=users)


def _best_of(report: Report) -> Best | None:
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


class Snapshot:
    """A block under way, on disk: its engine's state, the rows so far and the first errors.

    Args:
        directory: of the sweep.
        points: the block's settings, which decide the name of the file.
    """

    def __init__(self, directory: Path, points: Sequence[Point]) -> None:
        keys = [point.key() for point in points]
        digest = hashlib.sha256(json.dumps([FORMAT, keys]).encode()).hexdigest()
        self.path = directory / f"{PREFIX}{digest[:16]}.npz"
        self._due = time.monotonic() + EVERY_SECONDS

    def resume(self, engine: Engine) -> tuple[list[SweepRow], dict[int, float]]:
        """Bring the engine to where it was; the rows and first errors of then.

        Without a whole file the engine stays as it is, and there are none.
        """
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                state = dict(kept)
            written, first = json.loads(state.pop(PROGRESS).tobytes())
            rows = [SweepRow.from_json(flat) for flat in written]
        except FileNotFoundError:
            return [], {}
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            log.warning("%s cannot be read (%s): its block begins anew", self.path, error)
            return [], {}
        engine.restore(state)
        return rows, {int(place): error for place, error in first.items()}

    def save_when_due(
        self, engine: Engine, rows: Sequence[SweepRow], first: dict[int, float]
    ) -> None:
        """Write the file if it is time; it appears complete or not at all."""
        begun = time.monotonic()
        if begun < self._due:
            return
        progress = json.dumps([[row.to_json() for row in rows], first])
        arrays = {PROGRESS: np.frombuffer(progress.encode(), np.uint8), **engine.state()}
        try:
            with disk.replacing(self.path, sync=False) as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        except OSError as error:
            log.warning("%s cannot be written (%s): a kill would lose this block", self.path, error)
        ended = time.monotonic()
        self._due = ended + max(EVERY_SECONDS, SHARE * (ended - begun))

    def remove(self) -> None:
        """The block is finished."""
        self.path.unlink(missing_ok=True)


def clear_snapshots(directory: Path, keep: Iterable[Sequence[Point]]) -> None:
    """Remove what a kill has left behind, except for the blocks that will be taken up."""
    kept = {Snapshot(directory, points).path for points in keep}
    for path in directory.glob(f"{PREFIX}*"):
        if path not in kept:
            path.unlink(missing_ok=True)
