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

from flwr_ppsgd.algorithm import FixedSize, Vector
from flwr_ppsgd.experiments.run import OWN_DATA_SWEEP, Experiment, engine_of, population_of, read_toml
from flwr_ppsgd.experiments.snapshot import Snapshot
from flwr_ppsgd.experiments.tasks import network_bytes
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.promise import json_number
from flwr_ppsgd.settings import field_of, override
from flwr_ppsgd.simulation.baselines import FEDAVG, FINE_TUNED, PPSGD, LocalStepsEngine, fine_tune
from flwr_ppsgd.simulation.batches import Table
from flwr_ppsgd.simulation.linear import Engine, Report, Setting, bytes_for, train
from flwr_ppsgd.simulation.measures import badness, measure_of

GRID = ("step", "alpha-q", "noise-multiplier", "clip-norm", "insecure-seed")
MOST_SETTINGS = 100_000
MOST_COLUMNS = 4096  # side by side; more gain nothing and would be lost together when interrupted
MOST_NETWORKS = 16
USER_DIGITS = 4
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
    method: str = PPSGD  # or a baseline

    def key(self) -> Row:
        """What names the setting in a row; JSON has no infinity."""
        values = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        return {name: json_number(value) if isinstance(value, float) else value for name, value in values.items()}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The setting that a row is about."""
        values: dict[str, Any] = {
            name: row[name.replace("_", "-")] for name in cls.__dataclass_fields__ if name != "method"
        }
        values["method"] = row.get("method", PPSGD)
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
        flat, where = read_toml(path, OWN_DATA_SWEEP if "data" in (overrides or {}) else "sweep.toml")
        flat = {key.replace("_", "-"): value for key, value in override(flat, overrides or {}).items()}
        flat = _with_noise(flat, where) if "epsilon" in flat else flat
        for key, values in flat.items():
            if isinstance(values, list):
                _check_list(key, values, where)
        grid = {key: tuple(flat[key]) for key in GRID if isinstance(flat.get(key), list)}
        if FINE_TUNED in str(flat.get("baselines", "")) and "step" in flat:
            flat.setdefault("fine-tune-steps", ", ".join(map(str, grid.get("step", (flat["step"],)))))
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
        baselines = {
            Point(seed, math.inf, float(step), float(z), float(c), method)
            for method in self.base.methods()
            for step, z, c, seed in itertools.product(steps, noises, clips, seeds)
        }
        return sorted(every | baselines)

    def to_flat(self) -> dict[str, Any]:
        """All settings, resolved; lists where the grid has more than one value."""
        lists = {key: list(values) for key, values in self.grid.items() if len(values) > 1}
        return {**self.base.to_flat(), **lists}


def _with_noise(flat: dict[str, Any], where: str) -> dict[str, Any]:
    """``epsilon``, a number or a list, as the noise multipliers that cost it."""
    wanted = flat["epsilon"] if isinstance(flat["epsilon"], list) else [flat["epsilon"]]
    rest = {key: value for key, value in flat.items() if key != "epsilon"}
    first = {key: value[0] if isinstance(value, list) and value else value for key, value in rest.items()}
    calibrated = [Experiment.read({**first, "epsilon": epsilon}, where).release() for epsilon in wanted]
    return {**rest, "noise-multiplier": [release.noise_multiplier for release in calibrated]}


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
    need = functools.partial(_bytes, base)
    if need(1) > memory:
        raise ValueError(
            f"{sweep.where}: a single setting needs {need(1) / 1e6:.0f} MB, the limit is "
            f"{memory / 1e6:.0f} MB: raise --memory, or use fewer users or features"
        )
    jobs = min(jobs, int(memory // need(1)))
    most = MOST_NETWORKS if base.model == "cnn" else MOST_COLUMNS // population_of(base).outputs or 1
    while most > 1 and need(most) > memory / jobs:
        most = most * 7 // 8
    blocks = []
    for seed, method in itertools.product(seeds, (PPSGD, *base.methods())):
        own = [point for point in points if (point.seed, point.method) == (seed, method)]
        parts = max(math.ceil(len(own) / most), min(math.ceil(jobs / len(seeds)), len(own)))
        blocks += [tuple(own[part::parts]) for part in range(parts)]
    largest = max(map(len, blocks))
    return Plan(tuple(blocks), jobs, need(largest), memory)


def _bytes(base: Experiment, settings: int) -> int:
    """About how much memory so many settings side by side take, with the data."""
    if base.model == "cnn":
        return network_bytes(base.problem(), settings)
    return bytes_for(population_of(base), settings, rounds=base.rounds, rate=base.cohort().rate, average=base.average)


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
    flat: Mapping[str, Any],
    points: Sequence[Point],
    on_report: Callable[[int, Best | None], None] | None = None,
    directory: Path | None = None,
) -> list[Row]:
    """The rows of one block, without ε. ``on_report`` hears the round and the best measure at its last report.

    directory: where the block is saved from time to time, and where one that was killed is taken up.
    """
    base = Experiment.read(flat, where="sweep")
    settings, method = [setting_of(base, point) for point in points], points[0].method
    engine = _engine(base, settings, points[0])
    keys = keys_of(points)
    snapshot = None if directory is None else Snapshot(directory, keys)
    rows, first = snapshot.resume(engine) if snapshot else ([], {})
    best: Best | None = None

    def tell(round_: int) -> None:
        if snapshot:
            snapshot.save_when_due(engine, rows, first)
        if on_report:
            on_report(round_, best)

    every = base.rounds if method == FINE_TUNED else base.evaluate_every
    for report in train(engine, base.rounds, every, tell, first):
        found = _tuned(base, engine, report) if method == FINE_TUNED else _measured(base, engine, report)
        rows += [{**keys[place], "round": report.round, **row} for place, row in found]
        best = best_of(report) or best
    return rows


def keys_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [point.key() for point in points]


def _engine(base: Experiment, settings: Sequence[Setting], point: Point) -> Engine:
    if point.method != FEDAVG:
        return engine_of(base, settings, point.seed, base.rounds)
    return LocalStepsEngine(
        population_of(base), settings, seed=point.seed, local_steps=base.local_steps, dtype=base.precision
    )


def _measured(base: Experiment, engine: Engine, report: Report) -> list[tuple[int, Row]]:
    """What a report says of each setting; at the end of each user, too."""
    by_user = engine.by_user() if report.round == base.rounds else {}
    rows = []
    for place, measures in sorted(report.measures.items()):
        gone = {"diverged": True} if place in report.diverged else {}
        rows.append((place, {**_finite(measures), **gone, **_users(by_user.get(place))}))
    return rows


def _tuned(base: Experiment, engine: Engine, report: Report) -> list[tuple[int, Row]]:
    """At the end of global learning, what each user makes of w alone; before that, who has diverged."""
    gone = [(place, {"diverged": True}) for place in sorted(report.diverged)]
    if report.round < base.rounds or not engine.places:
        return gone
    table = population_of(base)
    assert isinstance(table, Table)
    w = np.stack([engine.w(place).reshape(table.features, -1) for place in engine.places], axis=1)
    steps = [float(step) for step in base.fine_tune_steps.split(",")]
    tuned = fine_tune(table, w.astype(base.precision), steps, base.fine_tune_passes)
    rows: list[tuple[int, Row]] = [
        (place, {**_finite(measures), "personal-step": step, **_users(by_user)})
        for place, (step, by_user, measures) in zip(engine.places, tuned, strict=True)
    ]
    return gone + rows


def _finite(measures: Mapping[str, float]) -> Row:
    return {name: float(f"{v:.{DIGITS}g}") for name, v in measures.items() if math.isfinite(v)}


def _users(values: Vector | None) -> Row:
    """Each user's measure, with few digits; nothing where a step too large has left for infinity."""
    if values is None or not np.isfinite(values).all():
        return {}
    return {"by_user": [float(f"{value:.{USER_DIGITS}g}") for value in values.tolist()]}


def best_of(report: Report) -> Best | None:
    """The best measure among the settings of a report that still go on."""
    rows = [row for place, row in report.measures.items() if place not in report.diverged and row]
    return best_among([(measure_of(row), row[measure_of(row)]) for row in rows])


def best_among(found: Sequence[Best]) -> Best | None:
    """The highest accuracy or precision, or the lowest error, risk or loss."""
    return min(found, key=lambda measured: badness(*measured), default=None)


class Epsilons:
    """ε after so many rounds, for each noise multiplier once: it does not depend on step, α or clip norm."""

    def __init__(self, base: Experiment) -> None:
        self._base = base
        self._known: dict[tuple[float, int], float] = {}
        self._papers: dict[tuple[float, int], float] = {}

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

    def paper(self, point: Point, round_: int) -> Row:
        """What the paper would print for cohorts of a fixed size, as if they were drawn by coins: not a guarantee."""
        if not isinstance(self._base.cohort(), FixedSize):
            return {}
        if point.noise_multiplier is None or not round_:
            return {"paper_epsilon": 0.0}
        key = (point.noise_multiplier, round_)
        if key not in self._papers:
            release = replace(self._base, noise_multiplier=point.noise_multiplier).release()
            self._papers[key] = Ledger(self._base.delta).record(release, round_).paper_epsilon()
        return {"paper_epsilon": json_number(self._papers[key])}


def with_epsilon(rows: Sequence[Row], epsilons: Epsilons) -> list[Row]:
    """Each row with its ε, and with the paper's where that is another."""
    points = [(row, Point.of(row), row["round"]) for row in rows]
    return [
        {**row, "epsilon": json_number(epsilons(point, round_)), **epsilons.paper(point, round_)}
        for row, point, round_ in points
    ]


def is_last(row: Mapping[str, Any], rounds: int) -> bool:
    """Whether a row is the last one of its setting."""
    return row["round"] == rounds or bool(row.get("diverged"))
