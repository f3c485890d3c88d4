"""What the rows of a sweep say: means over seeds, the best settings, how users fare. Pure."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.experiments.rows import BASELINES, CAVEAT, PPSGD, Point, SweepRow
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.simulation.measures import badness, measure_of

Key: TypeAlias = tuple[float, float | None]  # (αQ, z); z is None at α = 0
Curves: TypeAlias = dict[Key, list["Mean"]]
Baselines: TypeAlias = dict[str, dict[float | None, list["Mean"]]]  # by method and noise level

ZERO_OUT = "zero-out neighbours"
PAPERS = "as the paper counts it for cohorts of a fixed size, not a guarantee"
PERSONALIZED = "personalized"
LOCAL = "local"
GLOBAL = "global"
ERROR = "standard error"
EPSILON = "deployed_epsilon"
COLUMNS = ("noise-multiplier", EPSILON, "alpha-q", "step", "clip-norm")


@dataclass(frozen=True)
class Mean:
    """A setting at one round: the mean of its measure over seeds.

    Args:
        point: the setting; its seed is 0.
        round: the number of rounds trained so far.
        epsilon: of a deployment; or for cohorts of a fixed size what the paper would print.
        value: the measure.
        seeds: the number of seeds.
        error: the standard error of the value, None with one seed.
    """

    point: Point
    round: int
    epsilon: float
    value: float
    seeds: int
    error: float | None = None


def means(rows: Iterable[SweepRow], measure: str) -> list[Mean]:
    """Over seeds, of each setting and round that no seed has left for infinity before."""
    groups: dict[tuple[Point, int], list[SweepRow]] = defaultdict(list)
    for row in rows:
        groups[_without_seed(row.point), row.round].append(row)
    seeds: dict[Point, int] = defaultdict(int)
    for (point, _), group in groups.items():
        seeds[point] = max(seeds[point], len(group))
    found = []
    for (point, round_), group in groups.items():
        values = _values(group, measure)
        if len(values) == seeds[point]:
            mean = Mean(
                point=point,
                round=round_,
                epsilon=group[0].shown_epsilon(),
                value=statistics.fmean(values),
                seeds=len(values),
                error=_standard_error(values),
            )
            found.append(mean)
    return found


def _values(group: Iterable[SweepRow], measure: str) -> list[float]:
    """The measure of each row that has not diverged."""
    going_on = [row.measures for row in group if not row.diverged]
    return [measures[measure] for measures in going_on if measure in measures]


def _without_seed(point: Point) -> Point:
    return replace(point, seed=0)


def _standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None with one value."""
    if len(values) == 1:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def best(candidates: Iterable[Mean], measure: str) -> Mean | None:
    """The one with the best measure; the first of equals."""
    ordered = sorted(candidates, key=lambda mean: mean.point)
    if not ordered:
        return None
    return min(ordered, key=lambda mean: badness(measure, mean.value))


def best_curves(every: Sequence[Mean], measure: str, method: str = PPSGD) -> Curves:
    """For each (αQ, z), step and clip norm chosen anew at each reported round."""
    groups: dict[Key, dict[int, list[Mean]]] = defaultdict(lambda: defaultdict(list))
    for mean in every:
        point = mean.point
        if point.method == method:
            by_round = groups[point.alpha_q, point.noise_multiplier]
            by_round[mean.round].append(mean)
    curves: Curves = {}
    for key, by_round in groups.items():
        curves[key] = []
        for round_ in sorted(by_round):
            chosen = best(by_round[round_], measure)
            assert chosen is not None
            curves[key].append(chosen)
    return curves


def noises(curves: Mapping[Key, object]) -> list[float]:
    """The noise levels, in order."""
    return sorted({z for _, z in curves if z is not None})


def alphas(curves: Mapping[Key, object]) -> list[float]:
    """The αQ, in order."""
    return sorted({a for a, _ in curves})


def baselines_of(every: Sequence[Mean], measure: str) -> Baselines:
    """The curves of each baseline that was run, by noise level."""
    found: Baselines = {}
    for method in BASELINES:
        curves = best_curves(every, measure, method)
        if curves:
            found[method] = {z: curve for (_, z), curve in curves.items()}
    return found


def ending(every: Sequence[Mean]) -> list[Mean]:
    """The last round of each setting that got to the end."""
    last = max(mean.round for mean in every)
    return [mean for mean in every if mean.round == last]


def at_noise(ends: Mapping[Key, Sequence[Mean]], z: float) -> dict[float, Mean]:
    """By αQ, what there is at one noise level; local learning is there at every one."""
    return {a: curve[0] for (a, level), curve in ends.items() if level in (z, None)}


def _ways(here: Mapping[float, Mean], measure: str) -> dict[str, Mean | None]:
    """Both ends, and the best of 0 < α < ∞; None if it was not run."""
    between = [mean for a, mean in here.items() if 0 < a < math.inf]
    return {
        LOCAL: here.get(0.0),
        GLOBAL: here.get(math.inf),
        PERSONALIZED: best(between, measure),
    }


@dataclass(frozen=True)
class Spread:
    """Each user's measure at one noise level, mean over seeds.

    Args:
        noise_multiplier: the noise level.
        epsilon: of the best of 0 < α < ∞.
        measure: what is measured.
        users: of local learning, global learning and the best of 0 < α < ∞.
    """

    noise_multiplier: float
    epsilon: float
    measure: str
    users: dict[str, NDArray[np.float64]]

    def share(self, compare: Callable[[Any, Any], Any]) -> float:
        """The share of users whose personalized error compares so with both other errors."""
        sign = badness(self.measure, 1.0)
        errors = {name: sign * values for name, values in self.users.items()}
        better_end = np.minimum(errors[LOCAL], errors[GLOBAL])
        holds = compare(errors[PERSONALIZED], better_end)
        return float(np.mean(holds))

    def words(self) -> str:
        """How many users personalization serves better than both ends."""
        better = self.share(np.less)
        not_worse = self.share(np.less_equal)
        return (
            f"At epsilon = {rounded_up(self.epsilon)} personalization is better than both local "
            f"and global learning for {better:.0%} of users, and at least as good for "
            f"{not_worse:.0%}."
        )


def spreads(rows: Iterable[SweepRow], every: Sequence[Mean], measure: str) -> list[Spread]:
    """For each noise level at which users were told apart and all three ways were run."""
    ends = best_curves(ending(every), measure)
    lists = _by_user(rows)
    found = []
    for z in noises(ends):
        ways = _ways(at_noise(ends, z), measure)
        users = {}
        for name, mean in ways.items():
            if mean is not None and mean.point in lists:
                users[name] = lists[mean.point]
        between = ways[PERSONALIZED]
        if between is not None and len(users) == len(ways):
            found.append(Spread(z, between.epsilon, measure, users))
    return found


def _by_user(rows: Iterable[SweepRow]) -> dict[Point, NDArray[np.float64]]:
    """Each user's measure at the end of training, mean over seeds."""
    found: dict[Point, list[tuple[float, ...]]] = defaultdict(list)
    for row in rows:
        if row.by_user is not None:
            found[_without_seed(row.point)].append(row.by_user)
    averaged = {}
    for point, lists in found.items():
        lengths = {len(own) for own in lists}
        if len(lengths) == 1:
            averaged[point] = np.mean(lists, axis=0)
    return averaged


@dataclass(frozen=True)
class Choice:
    """The best setting at one noise level at the end of training, and what it is compared with.

    Args:
        noise_multiplier: the noise level.
        epsilon: what the settings that publish anything cost there.
        measure: what is measured.
        best: the best setting, local learning among them.
        others: both ends, the best of 0 < α < ∞, and the baselines; None if it was not run.
    """

    noise_multiplier: float
    epsilon: float
    measure: str
    best: Mean
    others: dict[str, float | None]

    def cells(self) -> dict[str, float | None]:
        """The row of a table, by the names of its columns. The standard error is over seeds."""
        point = self.best.point
        given = (
            self.noise_multiplier,
            self.epsilon,
            point.alpha_q,
            point.step,
            point.clip_norm,
        )
        cells: dict[str, float | None] = dict(zip(COLUMNS, given, strict=True))
        cells[self.measure] = self.best.value
        if self.best.error is not None:
            cells[ERROR] = self.best.error
        return {**cells, **self.others}


def best_table(every: Sequence[Mean], measure: str) -> list[Choice]:
    """The best setting for each noise level at the end of training."""
    ends = best_curves(ending(every), measure)
    baselines = baselines_of(ending(every), measure)
    table = []
    for z in noises(ends):
        here = at_noise(ends, z)
        chosen = best(here.values(), measure)
        assert chosen is not None
        others = _ways(here, measure)
        for method, own in baselines.items():
            if z in own:
                others[method] = own[z][0]
        choice = Choice(
            noise_multiplier=z,
            epsilon=max(mean.epsilon for mean in here.values()),
            measure=measure,
            best=chosen,
            others={name: _value(mean) for name, mean in others.items()},
        )
        table.append(choice)
    return table


def _value(mean: Mean | None) -> float | None:
    return None if mean is None else mean.value


def columns_of(table: Sequence[Choice]) -> list[str]:
    """The names of a table's columns; an empty one has those of the settings alone."""
    return list(table[0].cells()) if table else list(COLUMNS)


def printed(table: Sequence[Choice]) -> str:
    """The table as text, the best for each ε, and what ε does not cover."""
    if not table:
        return CAVEAT
    header = columns_of(table)
    lines = [header]
    for choice in table:
        cells = choice.cells()
        lines.append([_cell(name, cells[name]) for name in header])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = ["Best setting for each noise level, at the end of training:"]
    for line in lines:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(padded))
    return "\n".join([*text, CAVEAT])


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return rounded_up(value) if name == EPSILON else f"{value:.4g}"


@dataclass(frozen=True)
class Summary:
    """Everything there is to say about a sweep.

    Args:
        measure: by which settings are compared.
        every: each setting at each reported round.
        table: the best setting for each noise level.
        spread: how users fare at each noise level.
        kind: which ε is meant.
    """

    measure: str
    every: list[Mean]
    table: list[Choice]
    spread: list[Spread]
    kind: str

    def text(self) -> str:
        """The table, and what there is to say about ε and about users."""
        lines = [printed(self.table)]
        if self.kind == PAPERS:
            lines.append(f"Epsilon here is {PAPERS}: rows.jsonl has the honest one beside it.")
        lines += [own.words() for own in self.spread]
        return "\n".join(lines)


def summarise(rows: Sequence[SweepRow], where: str) -> Summary:
    """What the rows of a sweep say; ValueError, naming ``where``, if all settings diverged."""
    measured = [row for row in rows if row.measures]
    going_on = [row for row in measured if not row.diverged]
    measure = measure_of((going_on or measured)[0].measures)
    every = means(rows, measure)
    if not every:
        raise ValueError(f"{where}: every setting diverged at once: use smaller steps")
    papers = any(row.paper_epsilon is not None for row in rows)
    return Summary(
        measure=measure,
        every=every,
        table=best_table(every, measure),
        spread=spreads(rows, every, measure),
        kind=PAPERS if papers else ZERO_OUT,
    )
