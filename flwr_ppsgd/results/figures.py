"""The paper's Figure 1 and Figure 2, and the best setting for each ε, from the rows of a sweep. Nothing here trains."""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flwr_ppsgd.experiments.sweep import CAVEAT, Point, Row
from flwr_ppsgd.results.plots import COLOURS, MEASURE_NAMES, STYLES, ZERO_OUT, epsilon_axis, log_scale, plain_numbers
from flwr_ppsgd.simulation.baselines import BASELINES, FEDAVG, FINE_TUNED, PPSGD
from flwr_ppsgd.simulation.measures import HIGHER_IS_BETTER, badness, measure_of

Key: TypeAlias = tuple[float, float | None]  # (αQ, z); z is None at α = 0
Baselines: TypeAlias = dict[str, dict[float | None, list["Mean"]]]
PAPERS = "as the paper counts it for cohorts of a fixed size, not a guarantee"
BASELINE_STYLES: dict[str, dict[str, Any]] = {
    FINE_TUNED: {"color": "0.45", "ls": ":", "marker": "x"},
    FEDAVG: {"color": "0.45", "ls": "-.", "marker": "+"},
}
BASELINE_NAMES = {FINE_TUNED: "global, then fine-tuned", FEDAVG: "FedAvg, local steps"}


@dataclass(frozen=True)
class Mean:
    """A setting at one round: the mean of its measure over seeds.

    epsilon: the honest one, or where cohorts have a fixed size the one that the paper would print.
    error: the standard error of the value, None with one seed.
    """

    point: Point
    round: int
    epsilon: float
    value: float
    seeds: int
    error: float | None = None


def means(rows: Iterable[Row], measure: str) -> list[Mean]:
    """Over seeds, of each setting and round that no seed has left for infinity before; the seed in ``point`` is 0."""
    found: dict[tuple[Point, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[replace(Point.of(row), seed=0), row["round"]].append(row)
    most: dict[Point, int] = defaultdict(int)
    for (point, _), group in found.items():
        most[point] = max(most[point], len(group))
    result = []
    for (point, round_), group in found.items():
        values = [row[measure] for row in group if measure in row and not row.get("diverged")]
        if len(values) == most[point]:
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            spent = number(group[0]["paper_epsilon" if "paper_epsilon" in group[0] else "epsilon"])
            result.append(Mean(point, round_, spent, statistics.fmean(values), len(values), error))
    return result


def number(value: float | str) -> float:
    """JSON has no infinity: rows hold the word."""
    return math.inf if value == "infinite" else float(value)


def best(candidates: Iterable[Mean], measure: str) -> Mean | None:
    """The one with the best measure; the first of equals."""
    ordered = sorted(candidates, key=lambda mean: mean.point)
    if not ordered:
        return None
    return min(ordered, key=lambda mean: badness(measure, mean.value))


def best_curves(every: Sequence[Mean], measure: str, method: str = PPSGD) -> dict[Key, list[Mean]]:
    """For each (αQ, z), step and clip norm chosen anew at each reported round."""
    groups: dict[Key, dict[int, list[Mean]]] = defaultdict(lambda: defaultdict(list))
    for mean in every:
        if mean.point.method == method:
            groups[mean.point.alpha_q, mean.point.noise_multiplier][mean.round].append(mean)
    curves = {}
    for key, by_round in groups.items():
        chosen = [best(by_round[round_], measure) for round_ in sorted(by_round)]
        curves[key] = [mean for mean in chosen if mean is not None]
    return curves


def noises(curves: Mapping[Key, object]) -> list[float]:
    return sorted({z for _, z in curves if z is not None})


def alphas(curves: Mapping[Key, object]) -> list[float]:
    return sorted({a for a, _ in curves})


def baselines_of(every: Sequence[Mean], measure: str) -> Baselines:
    """The curves of each baseline that was run, by noise level."""
    found = {method: best_curves(every, measure, method) for method in BASELINES}
    return {method: {z: curve for (_, z), curve in curves.items()} for method, curves in found.items() if curves}


def name_of(a: float) -> str:
    if a == 0:
        return "local (α = 0)"
    return "global (α = ∞)" if math.isinf(a) else f"αQ = {a:g}"


def styles(values: Sequence[float]) -> dict[float, dict[str, Any]]:
    """Local and global in black, the αQ between them in colours and dashes that differ; safe for colour blindness."""
    between = [a for a in values if 0 < a < math.inf]
    drawn: dict[float, dict[str, Any]] = {
        0.0: {"color": "black", "ls": "-", "marker": "o"},
        math.inf: {"color": "black", "ls": "--", "marker": "s"},
    }
    for place, a in enumerate(between):
        marker = "^vDPX<>"[place % 7]
        drawn[a] = {"color": COLOURS[place % len(COLOURS)], "ls": STYLES[place % len(STYLES)], "marker": marker}
    return {a: drawn[a] for a in values}


def figure_1(
    curves: Mapping[Key, Sequence[Mean]], baselines: Baselines, measure: str, path: Path, kind: str = ZERO_OUT
) -> None:
    """A panel for each noise level, a curve for each αQ with its best step at each round; ε along the top."""
    levels = noises(curves) or [0.0]
    wide = 2 if len(levels) == 4 else min(3, len(levels))
    tall = math.ceil(len(levels) / wide)
    size = (7.2, 5.2) if wide == 1 else (4.6 * wide, 4.0 * tall + 0.8)
    figure, panels = plt.subplots(tall, wide, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for panel, z in zip(panels.flat, levels, strict=False):
        _panel(panel, {a: curves.get((a, z if a else None), ()) for a in alphas(curves)}, measure, z, kind)
        for method, own in baselines.items():
            later = [mean for mean in own.get(z, ()) if mean.round > 0]
            _line(panel, [mean.round for mean in later], later, BASELINE_NAMES[method], BASELINE_STYLES[method])
    for panel in panels.flat[len(levels) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel(MEASURE_NAMES.get(measure, measure))
    _finish(figure, panels.flat[0], path, "Best step at each round")


def _panel(panel: Axes, curves: Mapping[float, Sequence[Mean]], measure: str, z: float, kind: str) -> None:
    for a, look in styles(sorted(curves)).items():
        shown = [mean for mean in curves[a] if mean.round > 0]
        _line(panel, [mean.round for mean in shown], shown, name_of(a), look)
    panel.set(xlabel="round", title=f"noise multiplier z = {z:.4g}")
    priced = max(curves.values(), key=lambda means_: means_[-1].epsilon if means_ else -1.0)
    epsilon_axis(panel, [{"round": mean.round, "epsilon": mean.epsilon} for mean in priced], kind)
    if measure not in HIGHER_IS_BETTER:
        log_scale(panel)
    panel.grid(alpha=0.3, which="both", lw=0.5)


def _line(axes: Axes, x: Sequence[float], means_: Sequence[Mean], label: str, look: Mapping[str, Any]) -> None:
    look = {"markevery": max(1, len(means_) // 8), **look}
    axes.plot(x, [mean.value for mean in means_], label=label, lw=1.8, ms=5, **look)


def figure_2(every: Sequence[Mean], measure: str, path: Path, kind: str = ZERO_OUT) -> bool:
    """The measure against ε at the end of training: each αQ, and in bold the best of all; whether there was any ε."""
    ends = ending(every)
    curves = best_curves(ends, measure)
    levels = [z for z in noises(curves) if z > 0]
    if not levels:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 5.2), layout="constrained")
    for a, look in styles(alphas(curves)).items():
        if a == 0:
            axes.axhline(curves[0.0, None][0].value, label=name_of(0), lw=1.8, **{**look, "marker": ""})
        else:
            points = [curves[a, z][0] for z in levels if (a, z) in curves]
            _line(axes, [mean.epsilon for mean in points], points, name_of(a), {**look, "markevery": 1})
    for method, own in baselines_of(ends, measure).items():
        points = [own[z][0] for z in levels if z in own]
        _line(axes, [mean.epsilon for mean in points], points, BASELINE_NAMES[method], BASELINE_STYLES[method])
    front = [m for z in levels if (m := best([mean for (a, n), (mean,) in curves.items() if n in (z, None)], measure))]
    at = [next(curves[a, z][0].epsilon for a in alphas(curves) if (a, z) in curves) for z in levels]
    axes.plot(at, [m.value for m in front], "o-", color="0.55", lw=7, ms=13, alpha=0.55, zorder=0, label="best over αQ")
    axes.set(xlabel=f"ε at the end of training ({kind})", ylabel=MEASURE_NAMES.get(measure, measure))
    axes.set_xscale("log")
    if measure not in HIGHER_IS_BETTER:
        log_scale(axes)
    axes.grid(alpha=0.3, which="both", lw=0.5)
    plain_numbers(axes.xaxis)
    _finish(figure, axes, path, "At the end of training, best step of each")
    return True


def ending(every: Sequence[Mean]) -> list[Mean]:
    """The last round of each setting that got to the end."""
    last = max(mean.round for mean in every)
    return [mean for mean in every if mean.round == last]


def _finish(figure: Figure, named: Axes, path: Path, title: str) -> None:
    handles, labels = named.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(CAVEAT, fontsize=8, color="0.3")
    figure.savefig(path, dpi=130)
    plt.close(figure)


@dataclass(frozen=True)
class Spread:
    """Each user's measure at one noise level, mean over seeds: local, global, and the best of 0 < α < ∞."""

    noise_multiplier: float
    epsilon: float
    measure: str
    users: dict[str, NDArray[np.float64]]

    def share(self, compare: Callable[[Any, Any], Any]) -> float:
        """Of users for whom personalization compares so with local and with global learning both."""
        own, local, common = (
            badness(self.measure, 1.0) * self.users[name] for name in ("personalized", "local", "global")
        )
        return float(np.mean(compare(own, np.minimum(local, common))))

    def words(self) -> str:
        better, not_worse = self.share(np.less), self.share(np.less_equal)
        return (
            f"At epsilon = {self.epsilon:.3g} personalization is better than both local and global learning for "
            f"{better:.0%} of users, and at least as good for {not_worse:.0%}."
        )


def spreads(rows: Sequence[Row], every: Sequence[Mean], measure: str) -> list[Spread]:
    """For each noise level at which users were told apart and all three ways were run."""
    curves, lists = best_curves(ending(every), measure), _by_user(rows)
    found = []
    for z in noises(curves):
        between = best([m for (a, n), (m,) in curves.items() if n == z and 0 < a < math.inf], measure)
        chosen = {"local": curves.get((0.0, None)), "global": curves.get((math.inf, z))}
        means_ = {"personalized": between, **{name: curve[0] if curve else None for name, curve in chosen.items()}}
        users = {name: lists[mean.point] for name, mean in means_.items() if mean and mean.point in lists}
        if between and len(users) == len(means_):
            found.append(Spread(z, between.epsilon, measure, users))
    return found


def _by_user(rows: Sequence[Row]) -> dict[Point, NDArray[np.float64]]:
    """Each user's measure at the end of training, mean over seeds."""
    found: dict[Point, list[list[float]]] = defaultdict(list)
    for row in rows:
        if "by_user" in row:
            found[replace(Point.of(row), seed=0)].append(row["by_user"])
    return {point: np.mean(lists, axis=0) for point, lists in found.items() if len({len(own) for own in lists}) == 1}


def figure_users(spread: Sequence[Spread], measure: str, path: Path) -> None:
    """How users fare: each way's users in order, from the worst off to the best off."""
    shown = [spread[i] for i in sorted({round(k * (len(spread) - 1) / 5) for k in range(6)})]
    wide = min(3, len(shown))
    tall = math.ceil(len(shown) / wide)
    size = (7.2, 5.2) if wide == 1 else (4.6 * wide, 4.0 * tall + 0.8)
    figure, panels = plt.subplots(tall, wide, figsize=size, layout="constrained", squeeze=False, sharey=True)
    looks = {"personalized": (COLOURS[0], "-", 4.5), "local": ("black", "-", 1.2), "global": ("black", "--", 1.2)}
    for panel, own in zip(panels.flat, shown, strict=False):
        for name, (colour, style, width) in looks.items():
            values = np.sort(badness(measure, 1.0) * own.users[name])[::-1] * badness(measure, 1.0)
            panel.plot(np.linspace(0, 100, len(values)), values, style, color=colour, lw=width, label=name)
        panel.set(xlabel="% of users", title=f"ε = {own.epsilon:.3g}: better than both for {own.share(np.less):.0%}")
        panel.grid(alpha=0.3, lw=0.5)
    for panel in panels.flat[len(shown) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel(f"{MEASURE_NAMES.get(measure, measure).split(' (')[0]} of a user")
    _finish(figure, panels.flat[0], path, "Users from the worst off to the best off, at the end of training")


ERROR = "standard error"
COLUMNS = ("noise-multiplier", "epsilon", "alpha-q", "step", "clip-norm")


def best_table(every: Sequence[Mean], measure: str) -> list[dict[str, Any]]:
    """The best setting for each noise level at the end of training, local learning among them; and beside it both
    ends, the best of 0 < α < ∞ and the baselines. The standard error is over seeds."""
    curves, baselines = best_curves(ending(every), measure), baselines_of(ending(every), measure)
    table: list[dict[str, Any]] = []
    for z in noises(curves):
        here = {a: means_[0] for (a, n), means_ in curves.items() if n in (z, None)}
        chosen = best(here.values(), measure)
        assert chosen is not None
        point = chosen.point
        spent = max(mean.epsilon for mean in here.values())
        row = {"noise-multiplier": z, "epsilon": spent, "alpha-q": point.alpha_q, "step": point.step}
        error = {} if chosen.error is None else {ERROR: chosen.error}
        between = best([mean for a, mean in here.items() if 0 < a < math.inf], measure)
        others = {"local": here.get(0.0), "global": here.get(math.inf), "personalized": between}
        others |= {method: own[z][0] for method, own in baselines.items() if z in own}
        values = {name: mean.value if mean else None for name, mean in others.items()}
        table.append({**row, "clip-norm": point.clip_norm, measure: chosen.value, **error, **values})
    return table


def printed(table: Sequence[Mapping[str, Any]]) -> str:
    """The table as text, the best for each ε, and what ε does not cover."""
    if not table:
        return CAVEAT
    header = list(table[0])
    cells = [[_cell(row[name]) for name in header] for row in table]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *cells]]
    return "\n".join(["Best setting for each noise level, at the end of training:", *lines, CAVEAT])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def write_csv(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {CAVEAT}\n")
        writer = csv.DictWriter(file, list(table[0]) if table else list(COLUMNS))
        writer.writeheader()
        writer.writerows(table)


def draw_sweep(rows: Sequence[Row], directory: Path) -> tuple[str, list[Path]]:
    """Everything there is to see of a sweep: the table in words, and the files that were written."""
    measure = measure_of(next((row for row in rows if not row.get("diverged")), rows[0]))
    every = means(rows, measure)
    if not every:
        raise ValueError(f"{directory}: every setting diverged at once: use smaller steps")
    table = best_table(every, measure)
    written = [directory / "figure-1.png", directory / "best.csv"]
    kind = PAPERS if any("paper_epsilon" in row for row in rows) else ZERO_OUT
    figure_1(best_curves(every, measure), baselines_of(every, measure), measure, written[0], kind)
    write_csv(table, written[1])
    if figure_2(every, measure, directory / "figure-2.png", kind):
        written.append(directory / "figure-2.png")
    text, spread = printed(table), spreads(rows, every, measure)
    if kind == PAPERS:
        text += f"\nEpsilon here is {PAPERS}: rows.jsonl has the honest one beside it."
    if spread:
        written.append(directory / "users.png")
        figure_users(spread, measure, written[-1])
        text += "\n" + "\n".join(own.words() for own in spread)
    return text, written
