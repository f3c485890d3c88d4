"""Learning curves of a run; the paper's Figure 1 and Figure 2 of a sweep. Nothing here trains."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flwr_ppsgd.experiments.outputs import (
    PICTURE,
    read_config,
    read_people,
    read_run,
    write_best,
)
from flwr_ppsgd.experiments.rows import CAVEAT, FEDAVG, FINE_TUNED, RunRow, SweepRow
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.results.people import draw_people
from flwr_ppsgd.results.plots import (
    COLOURS,
    STYLES,
    epsilon_axis,
    measure_axis,
    name_of_measure,
    plain_numbers,
)
from flwr_ppsgd.results.summary import (
    GLOBAL,
    LOCAL,
    PERSONALIZED,
    ZERO_OUT,
    Baselines,
    Curves,
    Mean,
    Spread,
    Summary,
    alphas,
    at_noise,
    baselines_of,
    best,
    best_curves,
    columns_of,
    ending,
    noises,
    summarise,
)
from flwr_ppsgd.simulation.measures import badness, measure_of

Look: TypeAlias = dict[str, Any]  # how a curve is drawn

DOTS = 130  # of a picture per inch
ONE_PANEL = (7.2, 5.2)  # inches
MARKERS = "^vDPX<>"
MOST_PANELS = 6
OUTSIDE = "Measured on the users' own data: outside the guarantee."
BASELINE_STYLES: dict[str, Look] = {
    FINE_TUNED: {"color": "0.45", "ls": ":", "marker": "x"},
    FEDAVG: {"color": "0.45", "ls": "-.", "marker": "+"},
}
BASELINE_NAMES = {FINE_TUNED: "global, then fine-tuned", FEDAVG: "FedAvg, local steps"}
USER_STYLES: dict[str, Look] = {
    PERSONALIZED: {"color": COLOURS[0], "ls": "-", "lw": 4.5},
    LOCAL: {"color": "black", "ls": "-", "lw": 1.2},
    GLOBAL: {"color": "black", "ls": "--", "lw": 1.2},
}
LETTERS_PER_INCH = 15  # of a footnote


# --- one run


def draw_run(directory: Path) -> None:
    """``learning.png`` in the directory of a run, if anything was measured there."""
    rows = read_run(directory).rows
    people = read_people(directory)
    if people is not None:
        draw_people(directory, rows[-1], people)
    if not rows or (people is not None and len(rows) < 2):
        return
    config = read_config(directory)
    alpha = "solved" if people else f"αQ = {config['alpha-q']:g}".replace("inf", "∞")
    learning_curves(
        {alpha: rows},
        measure_of(rows[0].measures),
        directory / PICTURE,
        title=f"Personalized-Private-SGD, {alpha}",
        footnote=OUTSIDE,
    )


def learning_curves(
    curves: Mapping[str, Sequence[RunRow]],
    measure: str,
    path: Path,
    title: str,
    footnote: str,
) -> None:
    """A measure against rounds, with the ε of the most expensive curve on a second axis.

    Args:
        curves: the rows of each curve, by its label.
        measure: what to draw.
        path: the picture.
        title: above it.
        footnote: below it.
    """
    figure, axes = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    for index, (label, rows) in enumerate(curves.items()):
        axes.plot(
            [row.round for row in rows],
            [row.measures[measure] for row in rows],
            linestyle=STYLES[index % len(STYLES)],
            marker="o" if len(rows) < 3 else "",  # a single point has no line
            color=COLOURS[index % len(COLOURS)],
            label=label,
            lw=2,
        )
    axes.set(xlabel="round", ylabel=name_of_measure(measure), title=title)
    measure_axis(axes, measure)
    if len(curves) > 1:
        axes.legend()
    dearest = max(curves.values(), key=lambda rows: rows[-1].deployed_epsilon)
    epsilon_axis(
        axes,
        [row.round for row in dearest],
        [row.deployed_epsilon for row in dearest],
        guaranteed=math.isfinite(dearest[-1].epsilon),
    )
    figure.supxlabel(footnote, fontsize=8, color="0.3", wrap=True)
    figure.savefig(path, dpi=DOTS)
    plt.close(figure)


# --- a sweep


def draw_sweep(rows: Sequence[SweepRow], directory: Path) -> tuple[str, list[Path]]:
    """All there is to see of a sweep: the table in words, and the files that were written."""
    found = summarise(rows, str(directory))
    first, *others = draw_figures(found, directory)
    cells = [choice.cells() for choice in found.table]
    table = write_best(directory, columns_of(found.table), cells)
    return found.text(), [first, table, *others]


def draw_figures(found: Summary, directory: Path) -> list[Path]:
    """Figure 1; Figure 2 if there is any ε; and how users fare if they were told apart."""
    measure = found.measure
    written = [directory / "figure-1.png"]
    figure_1(
        best_curves(found.every, measure),
        baselines_of(found.every, measure),
        measure,
        written[0],
        found.kind,
    )
    if figure_2(found.every, measure, directory / "figure-2.png", found.kind):
        written.append(directory / "figure-2.png")
    if found.spread:
        written.append(directory / "users.png")
        figure_users(found.spread, measure, written[-1])
    return written


def name_of(a: float) -> str:
    """α in words."""
    if a == 0:
        return "local (α = 0)"
    if math.isinf(a):
        return "global (α = ∞)"
    return f"αQ = {a:g}"


def styles(values: Sequence[float]) -> dict[float, Look]:
    """Local and global in black, the αQ between them in colours and dashes that differ."""
    drawn: dict[float, Look] = {
        0.0: {"color": "black", "ls": "-", "marker": "o"},
        math.inf: {"color": "black", "ls": "--", "marker": "s"},
    }
    between = [a for a in values if 0 < a < math.inf]
    for place, a in enumerate(between):
        drawn[a] = {
            "color": COLOURS[place % len(COLOURS)],
            "ls": STYLES[place % len(STYLES)],
            "marker": MARKERS[place % len(MARKERS)],
        }
    return {a: drawn[a] for a in values}


def figure_1(
    curves: Curves, baselines: Baselines, measure: str, path: Path, kind: str = ZERO_OUT
) -> None:
    """A panel for each noise level, a curve for each αQ with its best step at each round.

    Args:
        curves: for each (αQ, z), its best setting at each round.
        baselines: the same for each baseline.
        measure: what to draw.
        path: the picture.
        kind: which ε stands along the top.
    """
    levels = noises(curves) or [0.0]
    figure, panels = _panels(len(levels), wide=2 if len(levels) == 4 else 3)
    for panel, z in zip(panels.flat, levels, strict=False):
        here = {a: curves.get((a, z if a else None), []) for a in alphas(curves)}
        _noise_panel(panel, here, measure, z, kind)
        for method, own in baselines.items():
            look = BASELINE_STYLES[method]
            _curve(panel, own.get(z, ()), BASELINE_NAMES[method], look)
    for panel in panels[:, 0]:
        panel.set_ylabel(name_of_measure(measure))
    _finish(figure, panels.flat[0], path, "Best step at each round")


def _panels(count: int, wide: int = 3) -> tuple[Figure, NDArray[Any]]:
    """A figure with ``count`` panels, at most ``wide`` of them side by side; the rest is hidden."""
    wide = min(wide, count)
    tall = math.ceil(count / wide)
    size = ONE_PANEL if wide == 1 else (4.6 * wide, 4.0 * tall + 0.8)
    figure, panels = plt.subplots(
        tall, wide, figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for panel in panels.flat[count:]:
        panel.set_visible(False)
    return figure, panels


def _noise_panel(
    panel: Axes, curves: Mapping[float, Sequence[Mean]], measure: str, z: float, kind: str
) -> None:
    for a, look in styles(sorted(curves)).items():
        _curve(panel, curves[a], name_of(a), look)
    panel.set(xlabel="round", title=f"noise multiplier z = {z:.4g}")
    dearest = max(curves.values(), key=_last_epsilon)
    rounds = [mean.round for mean in dearest]
    epsilons = [mean.epsilon for mean in dearest]
    epsilon_axis(panel, rounds, epsilons, kind)
    measure_axis(panel, measure)


def _last_epsilon(curve: Sequence[Mean]) -> float:
    return curve[-1].epsilon if curve else -1.0


def _curve(axes: Axes, curve: Sequence[Mean], label: str, look: Look) -> None:
    """Values against rounds, after the first one."""
    later = [mean for mean in curve if mean.round > 0]
    _line(axes, [mean.round for mean in later], later, label, look)


def _line(axes: Axes, x: Sequence[float], curve: Sequence[Mean], label: str, look: Look) -> None:
    values = [mean.value for mean in curve]
    marked = {"markevery": max(1, len(curve) // 8), **look}
    axes.plot(x, values, label=label, lw=1.8, ms=5, **marked)


def figure_2(every: Sequence[Mean], measure: str, path: Path, kind: str = ZERO_OUT) -> bool:
    """The measure against ε at the end of training; whether there was any ε.

    A curve for each αQ with its best step, and in grey the best over αQ.

    Args:
        every: each setting at each reported round.
        measure: what to draw.
        path: the picture.
        kind: which ε is meant.
    """
    ends = best_curves(ending(every), measure)
    levels = [z for z in noises(ends) if z > 0]
    if not levels:
        return False
    figure, axes = plt.subplots(figsize=ONE_PANEL, layout="constrained")
    for a, look in styles(alphas(ends)).items():
        if a == 0:
            height = ends[0.0, None][0].value
            axes.axhline(height, label=name_of(0), lw=1.8, **{**look, "marker": ""})
        else:
            points = [ends[a, z][0] for z in levels if (a, z) in ends]
            _against_epsilon(axes, points, name_of(a), {**look, "markevery": 1})
    for method, own in baselines_of(ending(every), measure).items():
        points = [own[z][0] for z in levels if z in own]
        _against_epsilon(axes, points, BASELINE_NAMES[method], BASELINE_STYLES[method])
    _front(axes, ends, levels, measure)
    axes.set(xlabel=f"ε that a deployment would cost ({kind})", ylabel=name_of_measure(measure))
    axes.set_xscale("log")
    measure_axis(axes, measure)
    plain_numbers(axes.xaxis)
    _finish(figure, axes, path, "At the end of training, best step of each")
    return True


def _against_epsilon(axes: Axes, points: Sequence[Mean], label: str, look: Look) -> None:
    _line(axes, [mean.epsilon for mean in points], points, label, look)


def _front(axes: Axes, ends: Curves, levels: Sequence[float], measure: str) -> None:
    """The best over αQ at each noise level, below all other curves."""
    epsilons = []
    values = []
    for z in levels:
        leading = best(at_noise(ends, z).values(), measure)
        charged = [ends[a, z][0].epsilon for a in alphas(ends) if (a, z) in ends]
        if leading is not None:
            epsilons.append(charged[0])
            values.append(leading.value)
    axes.plot(
        epsilons,
        values,
        "o-",
        color="0.55",
        lw=7,
        ms=13,
        alpha=0.55,
        zorder=0,
        label="best over αQ",
    )


def figure_users(spread: Sequence[Spread], measure: str, path: Path) -> None:
    """How users fare: each way's users in order, from the worst off to the best off."""
    places = {round(k * (len(spread) - 1) / (MOST_PANELS - 1)) for k in range(MOST_PANELS)}
    shown = [spread[place] for place in sorted(places)]
    figure, panels = _panels(len(shown))
    for panel, own in zip(panels.flat, shown, strict=False):
        _user_panel(panel, own, measure)
    name, _, _ = name_of_measure(measure).partition(" (")
    for panel in panels[:, 0]:
        panel.set_ylabel(f"{name} of a user")
    title = "Users from the worst off to the best off, at the end of training"
    _finish(figure, panels.flat[0], path, title)


def _user_panel(panel: Axes, own: Spread, measure: str) -> None:
    sign = badness(measure, 1.0)
    for name, look in USER_STYLES.items():
        errors = np.sort(sign * own.users[name])
        values = sign * errors[::-1]
        panel.plot(np.linspace(0, 100, len(values)), values, label=name, **look)
    better = own.share(np.less)
    panel.set(
        xlabel="% of users",
        title=f"ε = {rounded_up(own.epsilon)}: better than both for {better:.0%}",
    )
    panel.grid(alpha=0.3, lw=0.5)


def _finish(figure: Figure, named: Axes, path: Path, title: str) -> None:
    handles, labels = named.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.suptitle(title, fontsize=11)
    letters = int(LETTERS_PER_INCH * figure.get_figwidth())
    figure.supxlabel(textwrap.fill(CAVEAT, letters), fontsize=8, color="0.3")
    figure.savefig(path, dpi=DOTS)
    plt.close(figure)
