"""What the rows of a sweep say: means over seeds, the best settings, how users fare. Pure."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.lab.measures import badness, measure_of, on_test
from flwr_ppsgd.lab.rows import (
    BASELINES,
    CAVEAT,
    OWN_TRIVIAL,
    PPSGD,
    TRIVIAL,
    Edge,
    Point,
    SweepRow,
)
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.statement import rounded_up

Key: TypeAlias = tuple[float, float | None]  # (αQ, z); z is None at α = 0
Curves: TypeAlias = dict[Key, list["Mean"]]
Baselines: TypeAlias = dict[str, dict[float | None, list["Mean"]]]  # by method and noise level
SAME_EPSILON = 0.02  # by which part two ε may differ and count as one noise level

ZERO_OUT = "zero-out neighbours"
PAPERS = "as the paper counts it for cohorts of a fixed size, not a guarantee"
PERSONALIZED = "personalized"
LOCAL = "local"
GLOBAL = "global"
ERROR = "standard error"
LOCAL_SOLVED = "local-solved"  # own rows alone, solved as the recipe does
OWN_ROWS = "local_"  # before the name of a measure: of a model from own rows alone
PEEKED = "if chosen on test"
R_SQUARED = "R²"
TRIVIAL_WORDS = {
    TRIVIAL: "Without features, with everyone's mean or most frequent class",
    OWN_TRIVIAL: "Without features, with each user's own",
}
EPSILON = "deployed_epsilon"
COLUMNS = ("noise-multiplier", EPSILON, "alpha-q", "step", "clip-norm")


@dataclass(frozen=True)
class Mean:
    """A setting at one round: the mean of its measure over seeds.

    Args:
        point: the setting; its seed is 0.
        round: the number of rounds trained so far.
        epsilon: of a deployment; or for cohorts of a fixed size what the paper would print.
        value: the measure by which settings are compared.
        seeds: the number of seeds.
        error: the standard error of the value, None with one seed.
        tested: the same measure on test rows; None if they were not opened there.
        tested_error: its standard error, None with one seed.
    """

    point: Point
    round: int
    epsilon: float
    value: float
    seeds: int
    error: float | None = None
    tested: float | None = None
    tested_error: float | None = None

    @property
    def reported(self) -> float:
        """On test rows if they were opened."""
        return self.value if self.tested is None else self.tested

    @property
    def reported_error(self) -> float | None:
        """The standard error of what is reported."""
        return self.error if self.tested is None else self.tested_error


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
            tested = _values(group, on_test(measure))
            opened = len(tested) == len(values)
            mean = Mean(
                point=point,
                round=round_,
                epsilon=group[0].shown_epsilon(),
                value=statistics.fmean(values),
                seeds=len(values),
                error=_standard_error(values),
                tested=statistics.fmean(tested) if opened else None,
                tested_error=_standard_error(tested) if opened else None,
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
    """The curves of each baseline that was run, and of the recipe, by noise level."""
    found: Baselines = {}
    for method in BASELINES:
        curves = best_curves(every, measure, method)
        if curves:
            found[method] = {z: curve for (_, z), curve in curves.items()}
    recipes = recipes_of(every)
    if recipes:
        found[AUTO] = {z: [mean] for z, mean in recipes.items()}
    return found


def recipes_of(every: Sequence[Mean]) -> dict[float | None, Mean]:
    """The recipe at each noise level: that of the paper's method which costs the same ε.

    If there is none of the same ε, at its own.
    """
    ends = ending(every)
    levels = {
        mean.point.noise_multiplier: mean.epsilon
        for mean in ends
        if mean.point.method == PPSGD and mean.point.noise_multiplier is not None
    }
    found = {}
    for mean in ends:
        if mean.point.method == AUTO:
            same = [z for z, spent in levels.items() if _same(spent, mean.epsilon)]
            found[same[0] if same else mean.point.noise_multiplier] = mean
    return found


def _same(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= SAME_EPSILON * min(one, other)


def ending(every: Sequence[Mean]) -> list[Mean]:
    """The last round of each setting that got to the end; the recipe is measured once."""
    stepped = [mean for mean in every if mean.point.method != AUTO]
    last = max((mean.round for mean in stepped), default=0)
    return [mean for mean in every if mean.point.method == AUTO or mean.round == last]


def at_noise(ends: Mapping[Key, Sequence[Mean]], z: float) -> dict[float, Mean]:
    """By αQ, what there is at one noise level; local learning is there at every one."""
    return {a: curve[0] for (a, level), curve in ends.items() if level in (z, None)}


def ways_at(ends: Mapping[Key, Sequence[Mean]], z: float, measure: str) -> dict[str, Mean | None]:
    """Both ends and the best between them, at one noise level."""
    return _ways(at_noise(ends, z), measure)


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

    def gains(self, name: str) -> NDArray[np.float64]:
        """What each user gains against learning alone; a loss is negative."""
        sign = badness(self.measure, 1.0)
        return np.asarray(sign * (self.users[LOCAL] - self.users[name]))

    def words(self) -> str:
        """How many users personalization serves better than both ends."""
        better = self.share(np.less)
        not_worse = self.share(np.less_equal)
        where = f"At epsilon = {rounded_up(self.epsilon)}"
        if math.isinf(self.epsilon):
            where = "Without noise"
        return (
            f"{where} personalization is better than both local and global learning for "
            f"{better:.0%} of users, and at least as good for {not_worse:.0%}."
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
        others: both ends, the best of 0 < α < ∞, and the baselines; None if it was not run. On
            test rows if they were opened.
        peeked: the best measure on test rows of all settings, as if it had been chosen there.
        trivial: the better of both answers without features; None if it is not known.
    """

    noise_multiplier: float
    epsilon: float
    measure: str
    best: Mean
    others: dict[str, float | None]
    peeked: float | None = None
    trivial: float | None = None

    @property
    def optimism(self) -> float | None:
        """How much better the best setting looks if it is chosen on test rows."""
        if self.peeked is None or self.best.tested is None:
            return None
        return abs(self.peeked - self.best.tested)

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
        if point.method == AUTO:
            cells |= dict.fromkeys(COLUMNS[2:])
        cells[self.measure] = self.best.value
        tested = on_test(self.measure)
        if tested != self.measure:
            cells[tested] = self.best.tested
            cells[PEEKED] = self.peeked
        if self.best.reported_error is not None:
            cells[ERROR] = self.best.reported_error
        cells |= self.others
        if self.trivial is not None:
            cells[TRIVIAL] = self.trivial
            if tested == "rmse":
                cells[R_SQUARED] = 1 - (self.best.reported / self.trivial) ** 2
        return cells


def best_table(every: Sequence[Mean], measure: str, trivial: float | None = None) -> list[Choice]:
    """The best setting for each noise level at the end of training.

    Args:
        every: each setting at each reported round.
        measure: by which settings are compared.
        trivial: what is reached without features; None if it is not known.
    """
    ends = best_curves(ending(every), measure)
    baselines = baselines_of(ending(every), measure)
    table = []
    for z in noises(ends) or sorted(
        level for level in baselines.get(AUTO, {}) if level is not None
    ):
        here = at_noise(ends, z)
        alone = baselines[AUTO][z] if AUTO in baselines and not here else ()
        candidates = [*here.values(), *alone]
        chosen = best(candidates, measure)
        assert chosen is not None
        others = _ways(here, measure)
        for method, own in baselines.items():
            if z in own:
                others[method] = own[z][0]
        choice = Choice(
            noise_multiplier=z,
            epsilon=max(mean.epsilon for mean in candidates),
            measure=measure,
            best=chosen,
            others={name: _value(mean) for name, mean in others.items()},
            peeked=_peeked(every, z, measure),
            trivial=trivial,
        )
        table.append(choice)
    return table


def _value(mean: Mean | None) -> float | None:
    return None if mean is None else mean.reported


def _peeked(every: Sequence[Mean], z: float, measure: str) -> float | None:
    """The best measure on test rows at one noise level; None if they were not set apart."""
    if on_test(measure) == measure:
        return None
    here = [
        mean.tested
        for mean in ending(every)
        if mean.point.method == PPSGD
        and mean.point.noise_multiplier in (z, None)
        and mean.tested is not None
    ]
    return min(here, key=lambda value: badness(measure, value), default=None)


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
    if on_test(table[0].measure) != table[0].measure:
        tested = on_test(table[0].measure)
        text = [
            "Best setting for each noise level at the end of training, chosen on validation rows. "
            f"{tested} and all columns after it are on test rows:"
        ]
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
        settings: the number of settings, seeds apart.
        diverged: the number of those that left for infinity.
        smallest_step: of all.
        edges: where the best setting lies at the end of a list.
        trivial: measures on test rows of answers without features, by method.
    """

    measure: str
    every: list[Mean]
    table: list[Choice]
    spread: list[Spread]
    kind: str
    settings: int = 0
    diverged: int = 0
    smallest_step: float = 0.0
    edges: tuple[Edge, ...] = ()
    trivial: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """The table, and what there is to say about ε, about users and about the grid."""
        lines = [self.count()]
        if self.every:
            lines.append(printed(self.table))
        lines += [
            self.chosen_on(),
            *self.edge_words(),
            *self.trivial_words(),
            *self.worse_words(),
        ]
        if self.kind == PAPERS:
            lines.append(f"Epsilon here is {PAPERS}: rows.jsonl has the honest one beside it.")
        lines += [own.words() for own in self.spread]
        return "\n".join(line for line in lines if line)

    def count(self) -> str:
        """How many settings there are, and how many of them diverged."""
        words = f"{self.settings:,} settings, {self.diverged:,} of them diverged"
        if self.every:
            return f"{words}."
        return (
            f"{words}: there is nothing to compare. The smallest step was {self.smallest_step:g}: "
            f"use smaller ones, as in --set step=[{self.smallest_step / 30:g}, "
            f"{self.smallest_step / 10:g}], or bring features to a scale of 1 (scale = 'auto', or "
            "see ppsgd look)."
        )

    def chosen_on(self) -> str:
        """On which rows settings were chosen, and how much that flatters them."""
        if not self.table:
            return ""
        if all(choice.best.point.method == AUTO for choice in self.table):
            return "Nothing was chosen among settings: the recipe has none."
        found = [choice.optimism for choice in self.table]
        known = [value for value in found if value is not None]
        if known:
            name = on_test(self.measure)
            return (
                f"Choosing on test rows instead would make {name} look better by "
                f"{statistics.fmean(known):.2g} on average, and by {max(known):.2g} at most."
            )
        if self.measure == "excess_risk":
            return ""
        return (
            "Settings were chosen on the rows that they are measured on: the numbers are "
            "optimistic. select-on = 'validation' shows by how much."
        )

    def edge_words(self) -> list[str]:
        """A line for each end of the grid at which a best setting lies."""
        return [
            f"The best {edge.key}, {edge.value:g}, is at the end of its list: ppsgd sweep --extend "
            f"adds {edge.beyond:.3g}."
            for edge in self.edges
        ]

    def worse_words(self) -> list[str]:
        """A line if settings do not beat an answer without features."""
        worse = []
        for choice in self.table:
            if choice.trivial is None:
                continue
            reached = badness(self.measure, choice.best.reported)
            if reached >= badness(self.measure, choice.trivial):
                worse.append(f"{choice.noise_multiplier:.4g}")
        if not worse:
            return []
        return [
            f"No setting beats the better answer without features at noise z = {', '.join(worse)}: "
            "look at scales and steps with ppsgd look, or allow a larger ε."
        ]

    def trivial_words(self) -> list[str]:
        """What answers without features reach."""
        return [f"{TRIVIAL_WORDS[name]}: {value:.4g}." for name, value in self.trivial.items()]


def summarise(rows: Sequence[SweepRow]) -> Summary:
    """What the rows of a sweep say; that every setting diverged is a result, too."""
    measured = [row for row in rows if row.measures and row.point.method not in TRIVIAL_WORDS]
    going_on = [row for row in measured if not row.diverged]
    measure = measure_of((going_on or measured)[0].measures)
    every = [mean for mean in means(rows, measure) if mean.point.method not in TRIVIAL_WORDS]
    papers = any(row.paper_epsilon is not None for row in rows)
    trivial = _trivial(rows, on_test(measure))
    best_trivial = min(trivial.values(), key=lambda value: badness(measure, value), default=None)
    table = best_table(every, measure, best_trivial) if every else []
    table = _with_local(table, rows)
    points = {_without_seed(row.point) for row in measured}
    lost = {_without_seed(row.point) for row in rows if row.diverged}
    return Summary(
        measure=measure,
        every=every,
        table=table,
        spread=spreads(rows, every, measure) if every else [],
        kind=PAPERS if papers else ZERO_OUT,
        settings=len(points | lost),
        diverged=len(lost),
        smallest_step=min((point.step for point in points | lost if point.step), default=0.0),
        edges=edges_of(table, points | lost),
        trivial=trivial,
    )


def _with_local(table: Sequence[Choice], rows: Iterable[SweepRow]) -> list[Choice]:
    """With what the recipe's users reach from own rows alone, if it was run."""
    recipe = [row for row in rows if row.point.method == AUTO]
    found = []
    for choice in table:
        values = _values(recipe, OWN_ROWS + on_test(choice.measure))
        alone = {LOCAL_SOLVED: statistics.fmean(values)} if values else {}
        found.append(replace(choice, others={**choice.others, **alone}))
    return found


def _trivial(rows: Iterable[SweepRow], measure: str) -> dict[str, float]:
    """On test rows, by method."""
    found = {}
    for row in rows:
        if row.point.method in TRIVIAL_WORDS and measure in row.measures:
            found[row.point.method] = row.measures[measure]
    return found


def edges_of(table: Sequence[Choice], points: Iterable[Point]) -> tuple[Edge, ...]:
    """Where the best settings lie at the ends of the lists of a grid.

    0 and ∞ are the natural ends of αQ, and at α = 0 there is no clip norm.
    """
    own = [point for point in points if point.method == PPSGD]
    lists = {
        "step": sorted({point.step for point in own}),
        "alpha-q": sorted({point.alpha_q for point in own if 0 < point.alpha_q < math.inf}),
        "clip-norm": sorted({point.clip_norm for point in own if point.clip_norm is not None}),
    }
    found: dict[tuple[str, float], Edge] = {}
    for choice in table:
        point = choice.best.point
        here = {"step": point.step, "alpha-q": point.alpha_q, "clip-norm": point.clip_norm}
        for key, values in lists.items():
            edge = _edge(key, here[key], values)
            if edge is not None:
                found[key, edge.value] = edge
    return tuple(found.values())


def _edge(key: str, value: float | None, values: Sequence[float]) -> Edge | None:
    """The edge that a value is at; None if it lies within, or there is but one."""
    if value is None or len(values) < 2:
        return None
    if value == values[0]:
        return Edge(key, value, float(f"{value**2 / values[1]:.3g}"))
    if value == values[-1]:
        return Edge(key, value, float(f"{value**2 / values[-2]:.3g}"))
    return None
