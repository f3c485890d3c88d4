"""The paper's Figure 1 and Figure 2, and the best setting for each ε, from the rows of a sweep. Nothing here trains."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_ppsgd.plots import COLOURS, MEASURE_NAMES, STYLES, epsilon_axis, log_scale, plain_numbers
from flwr_ppsgd.simulation.sweep import CAVEAT, Point, Row, measure_of

Key: TypeAlias = tuple[float, float | None]  # (αQ, z); z is None at α = 0


@dataclass(frozen=True)
class Mean:
    """A setting at one round: the mean of its measure over seeds."""

    point: Point
    round: int
    epsilon: float
    value: float
    seeds: int


def means(rows: Iterable[Row], measure: str) -> list[Mean]:
    """Over seeds, of each setting and round that no seed has left for infinity before; the seed in ``point`` is 0."""
    found: dict[tuple[Point, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[replace(Point.of(row), seed=0), row["round"]].append(row)
    most = {point: max(len(group) for (other, _), group in found.items() if other == point) for point, _ in found}
    result = []
    for (point, round_), group in found.items():
        values = [row[measure] for row in group if measure in row and not row.get("diverged")]
        if len(values) == most[point]:
            result.append(Mean(point, round_, number(group[0]["epsilon"]), sum(values) / len(values), len(values)))
    return result


def number(value: float | str) -> float:
    """JSON has no infinity: rows hold the word."""
    return math.inf if value == "infinite" else float(value)


def best(candidates: Iterable[Mean], measure: str) -> Mean | None:
    """The one with the best measure; the first of equals."""
    ordered = sorted(candidates, key=lambda mean: mean.point)
    if not ordered:
        return None
    sign = -1 if measure == "accuracy" else 1
    return min(ordered, key=lambda mean: sign * mean.value)


def best_curves(every: Sequence[Mean], measure: str) -> dict[Key, list[Mean]]:
    """For each (αQ, z), step and clip norm chosen anew at each reported round."""
    groups: dict[Key, dict[int, list[Mean]]] = defaultdict(lambda: defaultdict(list))
    for mean in every:
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


def figure_1(curves: Mapping[Key, Sequence[Mean]], measure: str, path: Path) -> None:
    """A panel for each noise level, a curve for each αQ with its best step at each round; ε along the top."""
    levels = noises(curves) or [0.0]
    wide = 2 if len(levels) == 4 else min(3, len(levels))
    tall = math.ceil(len(levels) / wide)
    size = (7.2, 5.2) if wide == 1 else (4.6 * wide, 4.0 * tall + 0.8)
    figure, panels = plt.subplots(tall, wide, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for panel, z in zip(panels.flat, levels, strict=False):
        _panel(panel, {a: curves.get((a, z if a else None), ()) for a in alphas(curves)}, measure, z)
    for panel in panels.flat[len(levels) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel(MEASURE_NAMES.get(measure, measure))
    _finish(figure, panels.flat[0], path, "Best step at each round")


def _panel(panel: Axes, curves: Mapping[float, Sequence[Mean]], measure: str, z: float) -> None:
    for a, look in styles(sorted(curves)).items():
        shown = [mean for mean in curves[a] if mean.round > 0]
        rounds, values = [mean.round for mean in shown], [mean.value for mean in shown]
        every = max(1, len(shown) // 8)
        panel.plot(rounds, values, label=name_of(a), lw=1.8, ms=4.5, markevery=every, **look)
    panel.set(xlabel="round", title=f"noise multiplier z = {z:g}")
    priced = max(curves.values(), key=lambda means_: means_[-1].epsilon if means_ else -1.0)
    epsilon_axis(panel, [{"round": mean.round, "epsilon": mean.epsilon} for mean in priced])
    if measure != "accuracy":
        log_scale(panel)
    panel.grid(alpha=0.3, which="both", lw=0.5)


def figure_2(every: Sequence[Mean], measure: str, path: Path) -> bool:
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
            axes.plot([m.epsilon for m in points], [m.value for m in points], label=name_of(a), lw=1.5, ms=5, **look)
    front = [m for z in levels if (m := best([mean for (a, n), (mean,) in curves.items() if n in (z, None)], measure))]
    at = [next(curves[a, z][0].epsilon for a in alphas(curves) if (a, z) in curves) for z in levels]
    axes.plot(at, [m.value for m in front], "o-", color="0.55", lw=7, ms=13, alpha=0.55, zorder=0, label="best over αQ")
    axes.set(xlabel="ε at the end of training (zero-out neighbours)", ylabel=MEASURE_NAMES.get(measure, measure))
    axes.set_xscale("log")
    if measure != "accuracy":
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


COLUMNS = ("noise-multiplier", "epsilon", "alpha-q", "step", "clip-norm")


def best_table(every: Sequence[Mean], measure: str) -> list[dict[str, Any]]:
    """The best setting for each noise level at the end of training, local learning among them, and both ends."""
    curves = best_curves(ending(every), measure)
    table = []
    for z in noises(curves):
        here = {a: means_[0] for (a, n), means_ in curves.items() if n in (z, None)}
        chosen = best(here.values(), measure)
        assert chosen is not None
        point = chosen.point
        spent = max(mean.epsilon for mean in here.values())
        row = {"noise-multiplier": z, "epsilon": spent, "alpha-q": point.alpha_q, "step": point.step}
        ends = {name: here[a].value if a in here else None for name, a in (("local", 0.0), ("global", math.inf))}
        table.append({**row, "clip-norm": point.clip_norm, measure: chosen.value, **ends})
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
    figure_1(best_curves(every, measure), measure, written[0])
    write_csv(table, written[1])
    if figure_2(every, measure, directory / "figure-2.png"):
        written.append(directory / "figure-2.png")
    return printed(table), written
