"""A grid of settings over one data set: which there are, how they go into blocks, and what one block gives.

A block is many settings side by side on the cohort engine. Blocks are decided once, from the memory there is, and kept
with the results: a sweep that was interrupted runs the blocks that are missing, and ends with the same rows.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.settings import field_of, override
from flwr_ppsgd.simulation.cohort import CohortEngine, Report, Setting, bytes_for, train
from flwr_ppsgd.simulation.experiment import Experiment, population_of, read_toml
from flwr_ppsgd.statement import json_number

GRID = ("step", "alpha-q", "noise-multiplier", "clip-norm", "insecure-seed")
MOST_SETTINGS = 100_000
MOST_COLUMNS = 4096  # side by side; more gain nothing and would be lost together when interrupted
DIGITS = 10  # of a measure in a row
CAVEAT = "ε is per setting, as if it alone had been run; choosing among settings is not covered. Simulation noise."

Row: TypeAlias = dict[str, Any]
Best: TypeAlias = tuple[str, float]  # a measure and its value


@dataclass(frozen=True, order=True)
class Point:
    """One setting of a grid. At α = 0 nothing is released: there is no noise and nothing to clip."""

    seed: int
    alpha_q: float
    step: float
    noise_multiplier: float | None
    clip_norm: float | None

    def key(self) -> Row:
        """What names the setting in a row; JSON has no infinity."""
        values = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        return {name: json_number(value) if isinstance(value, float) else value for name, value in values.items()}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The setting that a row is about."""
        values: dict[str, Any] = {name: row[name.replace("_", "-")] for name in cls.__dataclass_fields__}
        infinite = {name: math.inf for name, value in values.items() if value == "infinite"}
        return cls(**{**values, **infinite})


@dataclass(frozen=True)
class Sweep:
    """An experiment in which some settings are lists. base: the first setting of all."""

    base: Experiment
    grid: dict[str, tuple[Any, ...]]
    where: str

    @classmethod
    def load(cls, path: Path | None, overrides: Mapping[str, Any] | None = None) -> Self:
        """From a TOML file in which any of step, alpha-q, noise-multiplier, clip-norm, insecure-seed may be a list."""
        flat, where = read_toml(path, "sweep.toml")
        flat = {key.replace("_", "-"): value for key, value in override(flat, overrides or {}).items()}
        for key, values in flat.items():
            if isinstance(values, list):
                _check_list(key, values, where)
        grid = {key: tuple(flat[key]) for key in GRID if isinstance(flat.get(key), list)}
        base = Experiment.read({**flat, **{key: values[0] for key, values in grid.items()}}, where=where)
        for key, values in grid.items():
            for value in values:
                Experiment.read({**base.to_flat(), key: value}, where=where)
        return cls(base, {key: grid.get(key, (base.to_flat().get(key),)) for key in GRID}, where)._checked()

    def _checked(self) -> Self:
        count = math.prod(len(values) for values in self.grid.values())
        if count > MOST_SETTINGS:
            raise ValueError(
                f"{self.where}: a grid of {count} settings is more than {MOST_SETTINGS}: shorten its lists"
            )
        needs = {
            "insecure-seed": self.base.insecure_seed is not None,
            "noise-multiplier": self.base.noise_multiplier is not None,
            "evaluate-every": self.base.evaluate_every > 0,
        }
        for key, given in needs.items():
            if not given:
                raise ValueError(f"{self.where}: {key!r} is missing: a sweep needs it, as in {key} = 1")
        if self.base.max_epsilon is not None:
            raise ValueError(
                f"{self.where}: 'max-epsilon' has no meaning in a sweep, which shows every ε: leave it out"
            )
        return self

    def points(self) -> list[Point]:
        """All settings, each once: α = 0 does not depend on noise or clip norm."""
        steps, alphas, noises, clips, seeds = (self.grid[key] for key in GRID)
        every = {
            Point(seed, float(a), float(step), float(z) if a else None, float(c) if a else None)
            for step, a, z, c, seed in itertools.product(steps, alphas, noises, clips, seeds)
        }
        return sorted(every)

    def to_flat(self) -> dict[str, Any]:
        """All settings, resolved; lists where the grid has more than one value."""
        lists = {key: list(values) for key, values in self.grid.items() if len(values) > 1}
        return {**self.base.to_flat(), **lists}


def _check_list(key: str, values: list[Any], where: str) -> None:
    field_of(key, Experiment, where)
    if key not in GRID:
        raise ValueError(f"{where}: {key!r} cannot be a list: only {', '.join(GRID)} can")
    if not values:
        raise ValueError(f"{where}: {key!r} is an empty list: give at least one value, or a number")
    if len(set(map(repr, values))) < len(values):
        raise ValueError(f"{where}: {key!r} holds a value twice: {values}")


@dataclass(frozen=True)
class Plan:
    """Which settings run side by side, and how many blocks at a time. bytes: that the largest block takes."""

    blocks: tuple[tuple[Point, ...], ...]
    jobs: int
    bytes: int
    limit: int

    def __str__(self) -> str:
        count, largest = sum(map(len, self.blocks)), max(map(len, self.blocks))
        return (
            f"{count} settings in {len(self.blocks)} blocks of at most {largest}, {self.jobs} at a time, about "
            f"{self.bytes / 1e6:.0f} MB each (limit {self.limit / 1e6:.0f} MB in all)"
        )


def plan(sweep: Sweep, memory: int, jobs: int) -> Plan:
    """As few blocks as memory allows and ``jobs`` workers need; each holds settings of one seed."""
    points, base = sweep.points(), sweep.base
    seeds = sorted({point.seed for point in points})
    jobs = min(jobs, len(points))
    need = functools.partial(bytes_for, population_of(base), rounds=base.rounds, average=base.average)
    if need(1, rate=base.cohort().rate) > memory:
        raise ValueError(
            f"{sweep.where}: a single setting needs {need(1, rate=base.cohort().rate) / 1e6:.0f} MB, the limit is "
            f"{memory / 1e6:.0f} MB: raise --memory, or use fewer users or features"
        )
    jobs = min(jobs, int(memory // need(1, rate=base.cohort().rate)))
    most = MOST_COLUMNS // population_of(base).outputs or 1
    while most > 1 and need(most, rate=base.cohort().rate) > memory / jobs:
        most = most * 7 // 8
    blocks = []
    for seed in seeds:
        own = [point for point in points if point.seed == seed]
        parts = max(math.ceil(len(own) / most), min(math.ceil(jobs / len(seeds)), len(own)))
        blocks += [tuple(own[part::parts]) for part in range(parts)]
    largest = max(map(len, blocks))
    return Plan(tuple(blocks), jobs, need(largest, rate=base.cohort().rate), memory)


def setting_of(base: Experiment, point: Point) -> Setting:
    changed = replace(
        base,
        step=point.step,
        alpha_q=point.alpha_q,
        clip_norm=base.clip_norm if point.clip_norm is None else point.clip_norm,
        noise_multiplier=base.noise_multiplier if point.noise_multiplier is None else point.noise_multiplier,
    )
    return Setting(changed.release(), changed.steps())


def run_block(
    flat: Mapping[str, Any], points: Sequence[Point], on_report: Callable[[int, Best | None], None] | None = None
) -> list[Row]:
    """The rows of one block, without ε. ``on_report`` hears the round and the best measure at its last report."""
    base = Experiment.read(flat, where="sweep")
    settings = [setting_of(base, point) for point in points]
    engine = CohortEngine(
        population_of(base), settings, seed=points[0].seed, rounds=base.rounds, average=base.average,
        dtype=base.precision,
    )  # fmt: skip
    keys, rows = [point.key() for point in points], []
    best: Best | None = None

    def tell(round_: int) -> None:
        if on_report:
            on_report(round_, best)

    for report in train(engine, base.rounds, base.evaluate_every, tell):
        rows += [{**keys[place], **row} for place, row in _rows_of(report)]
        best = best_of(report)
    return rows


def _rows_of(report: Report) -> list[tuple[int, Row]]:
    rows = []
    for place, measures in sorted(report.measures.items()):
        finite = {name: float(f"{v:.{DIGITS}g}") for name, v in measures.items() if math.isfinite(v)}
        gone = {"diverged": True} if place in report.diverged else {}
        rows.append((place, {"round": report.round, **finite, **gone}))
    return rows


def measure_of(row: Mapping[str, Any]) -> str:
    """The measure by which settings are compared."""
    return next(name for name in ("accuracy", "excess_risk", "loss") if name in row)


def best_of(report: Report) -> Best | None:
    """The best measure among the settings of a report that still go on."""
    rows = [row for place, row in report.measures.items() if place not in report.diverged and row]
    return best_among([(measure_of(row), row[measure_of(row)]) for row in rows])


def best_among(found: Sequence[Best]) -> Best | None:
    """The highest accuracy, or the lowest risk or loss."""
    if not found:
        return None
    return max(found) if found[0][0] == "accuracy" else min(found)


class Epsilons:
    """ε after so many rounds, for each noise multiplier once: it does not depend on step, α or clip norm."""

    def __init__(self, base: Experiment) -> None:
        self._base = base
        self._known: dict[tuple[float, int], float] = {}

    def __call__(self, point: Point, round_: int) -> float:
        """Under zero-out neighbours; 0 where nothing was released."""
        if point.noise_multiplier is None or not round_:
            return 0.0
        key = (point.noise_multiplier, round_)
        if key not in self._known:
            release = replace(self._base, noise_multiplier=point.noise_multiplier).release()
            ledger = Ledger(self._base.delta).record(release, round_)
            with np.errstate(all="ignore"):  # at tiny z, where both are vast bounds, PLD can overflow
                self._known[key] = min(ledger.epsilon(), ledger.quick_epsilon())
        return self._known[key]


def with_epsilon(rows: Sequence[Row], epsilons: Epsilons) -> list[Row]:
    return [{**row, "epsilon": json_number(epsilons(Point.of(row), row["round"]))} for row in rows]


def is_last(row: Mapping[str, Any], rounds: int) -> bool:
    """Whether a row is the last one of its setting."""
    return row["round"] == rounds or bool(row.get("diverged"))
