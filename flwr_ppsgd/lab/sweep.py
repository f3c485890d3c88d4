"""A grid of settings over one data set: its settings, and the ε of each."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from flwr_ppsgd.algorithm import FixedSize
from flwr_ppsgd.lab.experiment import OWN_DATA, Experiment, experiment_keys, read_experiment
from flwr_ppsgd.lab.rows import GRID, PPSGD, GridPoint, Selection, SweepRow
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.settings import AUTO, METHODS, PAPER, check_known, override, with_keys

DEFAULT_SWEEP = "sweep"
OWN_DATA_SWEEP = "own-data-sweep"
MOST_SETTINGS = 100_000
SEEDS = [1, 2, 3]  # the default of a sweep of the recipe alone
CLIP_NORM = 1.0  # of the recipe, whose unit is the released size


@dataclass(frozen=True)
class Sweep:
    """An experiment in which some settings are lists.

    Args:
        base: the experiment with the first value of each list.
        grid: for each key of ``GRID``, its values.
        where: the file, which errors name.
        methods: "paper", "auto" or both. The base is the paper's if it is among them.
        recipes: of "auto", (z of its rounds, the ε it was planned for).
    """

    base: Experiment
    grid: dict[str, tuple[Any, ...]]
    where: str
    methods: tuple[str, ...] = (PAPER,)
    recipes: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        count = math.prod(len(values) for values in self.grid.values())
        if count > MOST_SETTINGS:
            raise ValueError(
                f"{self.where}: a grid of {count} settings is more than {MOST_SETTINGS}: shorten "
                "its lists"
            )
        training = self.base.training
        needs = {
            "insecure-seed": training.insecure_seed is not None,
            "noise-multiplier": training.automatic or training.noise_multiplier is not None,
            "evaluate-every": training.automatic or training.evaluate_every > 0,
        }
        for key, given in needs.items():
            if not given:
                raise ValueError(
                    f"{self.where}: {key!r} is missing: a sweep needs it, as in {key} = 1"
                )
        if training.max_epsilon is not None:
            raise ValueError(
                f"{self.where}: 'max-epsilon' has no meaning in a sweep, which shows every ε: "
                "leave it out"
            )

    @classmethod
    def load(cls, path: Path | None, overrides: Mapping[str, Any] | None = None) -> Self:
        """From a TOML file in which each key of ``GRID`` may be a list.

        Args:
            path: a file, or the name of a sweep of this package. None: one of the synthetic
                problem, or one for own data if ``overrides`` name any.
            overrides: flat keys and values.
        """
        changes = with_keys(overrides or {})
        default = OWN_DATA_SWEEP if "data" in changes else DEFAULT_SWEEP
        if default == OWN_DATA_SWEEP and _methods_of(changes, "--set") == (AUTO,):
            default = OWN_DATA
            changes = {"insecure-seed": SEEDS, **changes}
        flat, where = read_experiment(path, default)
        return cls.read(with_keys(override(flat, changes)), where)

    @classmethod
    def read(cls, flat: Mapping[str, Any], where: str) -> Self:
        """From flat keys; errors name ``where``."""
        methods = _methods_of(flat, where)
        flat = {**flat, "method": methods[0]}
        wanted = _as_list(flat.get("epsilon"))
        if methods == (AUTO,):
            if not wanted:
                raise ValueError(
                    "epsilon is missing: a sweep of 'auto' needs it, as in epsilon = [1, 2]"
                )
            flat["epsilon"] = wanted[0]
        elif wanted:
            flat["noise-multiplier"] = _multipliers_for(wanted, flat, where)
            del flat["epsilon"]
        lists = {}
        for key, values in flat.items():
            if isinstance(values, list):
                _check_list(key, values, where)
                lists[key] = tuple(values)
        base = Experiment.read(_first_values(flat), where=where)
        noises = lists.get("noise-multiplier", (base.training.noise_multiplier,))
        if base.problem.select_on == "validation" and PAPER in methods and 0.0 not in noises:
            lists["noise-multiplier"] = (*noises, 0.0)  # what the same would be without noise
        used = base.to_flat()
        for key, values in lists.items():
            for value in values:
                Experiment.read({**used, key: value}, where=where)
        grid = {key: lists.get(key, (used.get(key),)) for key in GRID}
        recipes = _recipes(base, grid["noise-multiplier"], wanted) if AUTO in methods else ()
        return cls(base, grid, where, methods, recipes)

    def points(self) -> list[GridPoint]:
        """All settings, each once. α = 0 has neither noise nor clip norm."""
        steps, alphas, noises, clips, seeds = (self.grid[key] for key in GRID)
        found: set[GridPoint] = set()
        for (z, target), seed in itertools.product(self.recipes, seeds):
            found.add(GridPoint(seed, math.inf, 0.0, z, CLIP_NORM, AUTO, target))
        ways = [(PPSGD, alpha) for alpha in alphas]
        ways += [(method, math.inf) for method in self.base.baseline_names()]
        if PAPER not in self.methods:
            ways = []
        for (method, alpha), step, noise, clip, seed in itertools.product(
            ways, steps, noises, clips, seeds
        ):
            if alpha:
                found.add(
                    GridPoint(seed, float(alpha), float(step), float(noise), float(clip), method)
                )
            else:
                found.add(GridPoint(seed, 0.0, float(step), None, None))
        return sorted(found)

    def trivial_rows(self) -> list[SweepRow]:
        """The rows of answers that use no features."""
        rows = []
        for method, measures in self.base.trivial().items():
            point = GridPoint(0, 0.0, 0.0, None, None, method)
            rows.append(SweepRow(point, self.base.training.rounds, measures))
        return rows

    def with_more_values(self, more: Mapping[str, Any]) -> "Sweep":
        """With further values in its lists.

        Args:
            more: flat keys and values; keys that are not of ``GRID`` are ignored.
        """
        grid = {}
        for key, values in self.grid.items():
            added = set(_as_list(more.get(key))) - set(values)
            grid[key] = tuple(sorted({*values, *added})) if added else values
        return replace(self, grid=grid)

    def selection(self) -> list[Selection]:
        """The ε of publishing the best of all settings of each noise level privately."""
        training = self.base.training
        settings = [point for point in self.points() if point.method == PPSGD]
        seeds = len(self.grid["insecure-seed"])
        found = []
        for noise in sorted({float(z) for z in self.grid["noise-multiplier"] if z}):
            count = sum(point.noise_multiplier == noise for point in settings) // seeds
            changed = replace(training, noise_multiplier=noise)
            ledger = Ledger(changed.delta).record(changed.release(), changed.rounds)
            if count:
                cost = ledger.selection_epsilon(count)
                found.append(Selection(noise, _honest_epsilon(ledger), count, cost))
        return found

    def to_flat(self) -> dict[str, Any]:
        """All flat keys; one with more than one value is a list."""
        lists: dict[str, Sequence[Any]] = {**self.grid, "method": self.methods}
        if self.base.training.automatic:
            lists["epsilon"] = [epsilon for _, epsilon in self.recipes]
        flat = self.base.to_flat()
        for key, values in lists.items():
            if len(values) > 1:
                flat[key] = list(values)
        return flat


def recipe_of(base: Experiment, point: GridPoint) -> Experiment:
    """The experiment of a setting of "auto": the base's data and δ, and nothing to tune.

    Args:
        base: of the sweep. If it is of the paper's method, its rounds, cohorts, steps and scaling
            are left out.
        point: gives ε and the seed.
    """
    flat = base.to_flat()
    if not base.training.automatic:
        flat = {key: flat[key] for key in (*base.problem.to_flat(), "population", "delta")}
        for key in ("scale", "bias", "target-shift"):
            del flat[key]
    elif base.training.rounds == replace(base.training, rounds=0).rounds:
        del flat["rounds"]  # they follow from ε, which differs here
    flat |= {"method": AUTO, "insecure-seed": point.seed, "epsilon": point.target_epsilon}
    return Experiment.read(flat, where="sweep")


def _recipes(
    base: Experiment, noises: Sequence[float], wanted: Sequence[float]
) -> tuple[tuple[float, float], ...]:
    """(z, ε) of the recipe for each ε of a grid.

    Args:
        base: of the sweep.
        noises: the noise levels of the paper's method.
        wanted: the ε of the first levels; those of the other levels are computed.
    """
    targets = [float(epsilon) for epsilon in wanted]
    if not base.training.automatic:
        epsilons = EpsilonCache(base)
        for z in noises[len(targets) :]:
            point = GridPoint(0, math.inf, 0.0, float(z), CLIP_NORM)
            spent, _ = epsilons.price(point, base.training.rounds)
            targets.append(spent)
    found = []
    for target in targets:
        planned = recipe_of(base, GridPoint(0, math.inf, 0.0, 0.0, CLIP_NORM, AUTO, target))
        found.append((planned.training.release().noise_multiplier, target))
    return tuple(found)


def _methods_of(flat: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The methods to compare, the paper's first."""
    named = _as_list(flat.get("method", PAPER))
    for name in named:
        if name not in METHODS:
            raise ValueError(f"{where}: method must be of {', '.join(METHODS)}, got {name!r}")
    if not named or len(set(named)) < len(named):
        raise ValueError(f"{where}: 'method' must hold each method once, got {named}")
    return tuple(name for name in METHODS if name in named)


def _as_list(value: Any) -> list[Any]:
    """A list as it is, one value as a list of one, None as an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _first_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``flat`` with the first value of each list."""
    found = {}
    for key, value in flat.items():
        is_list = isinstance(value, list) and value
        found[key] = value[0] if is_list else value
    return found


def _multipliers_for(wanted: Sequence[float], flat: Mapping[str, Any], where: str) -> list[float]:
    """The noise multipliers that cost these ε."""
    noises = []
    for epsilon in wanted:
        if epsilon == math.inf:
            noises.append(0.0)
            continue
        experiment = Experiment.read({**_first_values(flat), "epsilon": epsilon}, where)
        noises.append(experiment.training.release().noise_multiplier)
    return noises


def _check_list(key: str, values: list[Any], where: str) -> None:
    check_known(key, experiment_keys(), where)
    if key not in GRID:
        names = ", ".join((*GRID, "method"))
        raise ValueError(f"{where}: {key!r} cannot be a list: only {names} can")
    if not values:
        raise ValueError(f"{where}: {key!r} is an empty list: give at least one value, or a number")
    different = {repr(value) for value in values}
    if len(different) < len(values):
        raise ValueError(f"{where}: {key!r} holds a value twice: {values}")


class EpsilonCache:
    """ε of each noise multiplier and number of rounds, computed once.

    It does not depend on step, α or clip norm. For the recipe it covers all of its releases.
    """

    def __init__(self, base: Experiment) -> None:
        self._base = base
        self._fixed = isinstance(base.training.cohort(), FixedSize)
        self._known: dict[tuple[Any, ...], tuple[float, float | None]] = {}

    def price(self, point: GridPoint, round_: int) -> tuple[float, float | None]:
        """ε under zero-out neighbours, 0 if nothing was released; and the paper's ε.

        The paper counts cohorts of a fixed size as if each user were drawn independently, which is
        not a guarantee. None for all other cohorts.
        """
        is_recipe = point.method == AUTO
        key = (is_recipe, point.noise_multiplier, point.target_epsilon, round_)
        if key not in self._known:
            ledger = self._ledger_after(point, round_)
            paper = ledger.paper_epsilon() if self._fixed and not is_recipe else None
            self._known[key] = (_honest_epsilon(ledger), paper)
        return self._known[key]

    def _ledger_after(self, point: GridPoint, round_: int) -> Ledger:
        """The ledger of a setting after a number of rounds."""
        training = self._base.training
        ledger = Ledger(training.delta)
        if point.noise_multiplier is None or not round_:
            return ledger
        if point.method != AUTO:
            changed = replace(training, noise_multiplier=point.noise_multiplier)
            return ledger.record(changed.release(), round_)
        planned = recipe_of(self._base, point).training.recipe()
        for release in planned.before.values():
            ledger = ledger.record(release)
        return ledger.record(planned.release, round_)

    def with_epsilon(self, rows: Iterable[SweepRow]) -> list[SweepRow]:
        """Each row with its ε, and for cohorts of a fixed size with the paper's."""
        priced = []
        for row in rows:
            honest, paper = self.price(row.point, row.round)
            priced.append(replace(row, deployed_epsilon=honest, paper_epsilon=paper))
        return priced


def _honest_epsilon(ledger: Ledger) -> float:
    """The smaller of two bounds; PLD may overflow at tiny z."""
    with np.errstate(all="ignore"):
        return min(ledger.epsilon(), ledger.quick_epsilon())
