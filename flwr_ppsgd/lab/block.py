"""Blocks of a sweep: many settings side by side on one engine, and their rows.

Blocks are planned once, from the memory available, and saved with the results: a sweep that was
interrupted runs the blocks that are missing, and ends with the same rows.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import Layout
from flwr_ppsgd.lab.baselines import LocalStepsEngine, fine_tune
from flwr_ppsgd.lab.engine import Engine, EngineSetting, train
from flwr_ppsgd.lab.evaluation import UserResult, delivery_order, overall_measures, results_of
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.measures import as_validation_measures
from flwr_ppsgd.lab.population import FinitePopulation
from flwr_ppsgd.lab.rows import (
    FEDAVG,
    FEDAVG_SOLVED,
    FINE_TUNED,
    SOLVED_BASELINES,
    GridPoint,
    SweepRow,
)
from flwr_ppsgd.lab.run import train_in_process
from flwr_ppsgd.lab.sweep import Sweep, recipe_of
from flwr_ppsgd.lab.tasks import LinearTask
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.wire import Order

DIGITS = 10  # of a measure over all users in a row
MEGABYTE = 1e6

OnBlockRound: TypeAlias = Callable[[int], None]  # called with the number of rounds done


@dataclass(frozen=True)
class BlockPlan:
    """Which settings run side by side.

    Args:
        blocks: the settings of each block.
        jobs: the number of blocks that run at the same time.
        bytes: of memory, for the largest block.
        limit: of memory in bytes, for all blocks that run at the same time.
    """

    blocks: tuple[tuple[GridPoint, ...], ...]
    jobs: int
    bytes: int
    limit: int

    def __str__(self) -> str:
        sizes = [len(block) for block in self.blocks]
        return (
            f"{sum(sizes)} trainings in {len(sizes)} blocks of at most {max(sizes)}, {self.jobs} "
            f"at a time, about {self.bytes / MEGABYTE:.0f} MB each (limit "
            f"{self.limit / MEGABYTE:.0f} MB in all)"
        )


def plan_blocks(sweep: Sweep, memory: int, jobs: int) -> BlockPlan:
    """The smallest number of blocks that fit in memory and occupy ``jobs`` workers.

    A block holds settings of one seed and one method; the recipe runs one setting at a time.
    """
    points = sweep.points()
    task = sweep.base.task
    methods = list(dict.fromkeys(point.method for point in points))
    recipe_bytes = task.recipe_bytes() if AUTO in methods else 0
    single = recipe_bytes if methods == [AUTO] else max(task.bytes(1), recipe_bytes)
    if single > memory:
        raise ValueError(
            f"{sweep.where}: a single setting needs {single / MEGABYTE:.0f} MB, the limit is "
            f"{memory / MEGABYTE:.0f} MB: raise --memory, or use fewer users or features"
        )
    jobs = min(jobs, len(points), int(memory // single))
    most = task.most_settings
    while most > 1 and task.bytes(most) > memory / jobs:
        most -= 1
    seeds = sorted({point.seed for point in points})
    jobs_per_seed = math.ceil(jobs / len(seeds))
    blocks: list[tuple[GridPoint, ...]] = []
    side_by_side = 0  # settings of the largest block on an engine
    for seed, method in itertools.product(seeds, methods):
        own = [point for point in points if (point.seed, point.method) == (seed, method)]
        needed = len(own) if method == AUTO else math.ceil(len(own) / most)
        parts = max(needed, min(jobs_per_seed, len(own)))
        blocks += [tuple(own[part::parts]) for part in range(parts)]
        if method != AUTO:
            side_by_side = max(side_by_side, math.ceil(len(own) / parts))
    largest = recipe_bytes
    if side_by_side:
        largest = max(largest, task.bytes(side_by_side))
    return BlockPlan(tuple(blocks), jobs, largest, memory)


def run_block(
    flat: Mapping[str, Any], points: Sequence[GridPoint], on_round: OnBlockRound
) -> list[SweepRow]:
    """The rows of one block, without ε.

    Args:
        flat: the settings of the sweep's base.
        points: the block's settings, of one seed and method.
        on_round: called with the number of each round.
    """
    base = Experiment.read(flat, where="sweep")
    rounds = base.training.rounds
    method = points[0].method
    if method == AUTO:
        return [_recipe_row(base, points[0])]
    engine = _block_engine(base, points)
    at_the_end = method == FINE_TUNED or method in SOLVED_BASELINES
    every = rounds if at_the_end else base.training.evaluate_every
    rows = []
    for report in train(engine, rounds, every, on_round):
        for place, measures in sorted(report.measures.items()):
            row = _sweep_row(points[place], report.round, measures)
            rows.append(replace(row, diverged=place in report.diverged))
    if not at_the_end:
        return rows
    diverged = [row for row in rows if row.diverged]
    if not engine.places:
        return diverged
    measure = _fine_tuned_measures if method == FINE_TUNED else _solved_measures
    found = zip(engine.places, measure(base, engine), strict=True)
    return diverged + [_sweep_row(points[place], rounds, measures) for place, measures in found]


def _block_engine(base: Experiment, points: Sequence[GridPoint]) -> Engine:
    """The engine of a block's method for all of its settings."""
    settings = []
    for point in points:
        changes: dict[str, Any] = {"step": point.step, "alpha_q": point.alpha_q}
        if point.clip_norm is not None:
            changes["clip_norm"] = point.clip_norm
        if point.noise_multiplier is not None:
            changes["noise_multiplier"] = point.noise_multiplier
        changed = replace(base.training, **changes)
        settings.append(EngineSetting(changed.release(), changed.steps()))
    seed = points[0].seed
    if points[0].method not in (FEDAVG, FEDAVG_SOLVED):
        return base.task.engine(settings, seed)
    # baselines are refused for other tasks when settings are read
    population = cast(LinearTask, base.task).population()
    return LocalStepsEngine(population, settings, seed=seed, dtype=base.precision)


def _recipe_row(base: Experiment, point: GridPoint) -> SweepRow:
    """The only row of the recipe, after its last round."""
    experiment = recipe_of(base, point)
    outcome = train_in_process(experiment)
    w = Layout.of(outcome.w).flatten(outcome.w)
    order = delivery_order(experiment.training.task, outcome.beside)
    (validation,) = _validation_results(experiment, [w], order)
    measures = {
        **as_validation_measures(overall_measures(validation)),
        **overall_measures(outcome.people),
    }
    return _sweep_row(point, experiment.training.rounds, measures)


def _fine_tuned_measures(base: Experiment, engine: Engine) -> list[dict[str, float]]:
    """The measures after users fine-tune the final w of global learning."""
    table = cast(FinitePopulation, cast(LinearTask, base.task).population())
    each = [engine.w(place).reshape(table.features, -1) for place in engine.places]
    w = np.stack(each, axis=1).astype(base.precision)  # d × settings × K
    return fine_tune(table, w, [float(step) for step in base.fine_tune_steps.split(",")])


def _solved_measures(base: Experiment, engine: Engine) -> list[dict[str, float]]:
    """The measures of the recipe's personal models around w, as if w had no noise."""
    ws = [engine.w(place) for place in engine.places]
    on_test = results_of(base.task.learner, ws, range(base.training.population), None)
    on_validation = _validation_results(base, ws, None)
    return [
        {**as_validation_measures(overall_measures(validation)), **overall_measures(people)}
        for people, validation in zip(on_test, on_validation, strict=True)
    ]


def _validation_results(
    experiment: Experiment, ws: Sequence[Vector], order: Order | None
) -> list[list[UserResult]]:
    """Each user's results with each w on validation rows; empty lists without such rows."""
    if experiment.problem.select_on != "validation":
        return [[] for _ in ws]
    learner_of = functools.partial(experiment.task.learner, on_validation=True)
    return results_of(learner_of, ws, range(experiment.training.population), order)


def _sweep_row(point: GridPoint, round_: int, measures: Mapping[str, float]) -> SweepRow:
    """A row with the finite measures, rounded to ``DIGITS``."""
    finite = {}
    for name, value in measures.items():
        if math.isfinite(value):
            finite[name] = float(f"{value:.{DIGITS}g}")
    return SweepRow(point, round_, finite)
