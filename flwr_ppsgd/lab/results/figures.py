"""Learning curves of a run; the paper's Figure 1 and Figure 2 of a sweep. Nothing here trains."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flwr_ppsgd.lab.measures import HIGHER_IS_BETTER, badness, measure_of, on_test
from flwr_ppsgd.lab.outputs import (
    PICTURE,
    read_config,
    read_people,
    read_run,
    read_selection,
    write_best,
    write_figure_data,
)
from flwr_ppsgd.lab.results.people import draw_people
from flwr_ppsgd.lab.results.plots import (
    COLOURS,
    LETTERS,
    STYLES,
    epsilon_axis,
    measure_axis,
    name_of_measure,
    plain_numbers,
)
from flwr_ppsgd.lab.results.summary import (
    GLOBAL,
    LOCAL,
    PERSONALIZED,
    Mean,
    Spread,
    Summary,
    alphas,
    baselines_of,
    best_curves,
    columns_of,
    ending,
    noises,
    summarise,
    ways_at,
)
from flwr_ppsgd.lab.rows import (
    CAVEAT,
    FEDAVG,
    FEDAVG_SOLVED,
    FINE_TUNED,
    SOLVED,
    RunRow,
    Selection,
    SweepRow,
)
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.statement import rounded_up

Look: TypeAlias = dict[str, Any]  # how a curve is drawn

DOTS = 130  # of a picture per inch
PICTURE_FORMATS = ("png", "pdf", "svg")
ONE_PANEL = (7.2, 5.2)  # inches
MARKERS = "^vDPX<>"
MOST_PANELS = 6
OUTSIDE = "Measured on the users' own data: outside the guarantee."
BASELINE_STYLES: dict[str, Look] = {
    FINE_TUNED: {"color": "0.45", "ls": ":", "marker": "x"},
    SOLVED: {"color": "0.2", "ls": ":", "marker": "*"},
    FEDAVG: {"color": "0.45", "ls": "-.", "marker": "+"},
    FEDAVG_SOLVED: {"color": "0.2", "ls": "-.", "marker": "*"},
    AUTO: {"color": COLOURS[1], "ls": "-", "marker": "P"},
}
BASELINE_NAMES = {
    FINE_TUNED: "global, then fine-tuned",
    SOLVED: "global, then solved",
    FEDAVG: "FedAvg, local steps",
    FEDAVG_SOLVED: "FedAvg, then solved",
    AUTO: "auto, nothing chosen",
}
USER_STYLES: dict[str, Look] = {
    PERSONALIZED: {"color": COLOURS[0], "ls": "-", "lw": 3},
    GLOBAL: {"color": "black", "ls": "--", "lw": 1.2},
}
METHOD_STYLES: dict[str, Look] = {
    PERSONALIZED: {"color": COLOURS[0], "ls": "-", "marker": "D"},
    GLOBAL: {"color": "black", "ls": "--", "marker": "s"},
    LOCAL: {"color": "black", "ls": "-", "marker": "o"},
}
METHOD_NAMES = {
    PERSONALIZED: "personalized (best αQ between)",
    GLOBAL: "global (α = ∞)",
    LOCAL: "local (α = 0)",
}
CUT_OFF = 4.0  # times the median of what is shown at the end
LETTERS_PER_INCH = 15  # of a footnote


# --- one run


def draw_run(directory: Path) -> None:
    """``learning.png`` in the directory of a run, if anything was measured there."""
    rows = [row for row in read_run(directory).rows if row.measures]
    people = read_people(directory)
    if people is not None and rows:
        draw_people(directory, rows[-1], people)
    if not rows or (people is not None and len(rows) < 2):
        return
    ratio = read_config(directory).get("alpha-q")
    alpha = "solved"
    if not people and ratio is not None:
        alpha = f"αQ = {ratio:g}".replace("inf", "∞")
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


def draw_sweep(
    rows: Sequence[SweepRow], directory: Path, formats: Sequence[str] = ("png",)
) -> tuple[str, list[Path]]:
    """All there is to see of a sweep: the table in words, and the files that were written.

    Args:
        rows: of the sweep.
        directory: where to write.
        formats: of pictures: png, pdf, svg.
    """
    found = summarise(rows)
    written = draw_figures(found, directory, formats)
    cells = [choice.cells() for choice in found.table]
    written.append(write_best(directory, columns_of(found.table), cells))
    costs = [cost_words(cost) for cost in read_selection(directory)]
    return "\n".join([found.text(), *costs]), written


def cost_words(cost: Selection) -> str:
    """What choosing would cost, in a line."""
    return (
        f"At noise z = {cost.noise_multiplier:.4g}, choosing among {cost.settings} settings costs "
        f"ε = {rounded_up(cost.selected)} instead of {rounded_up(cost.epsilon)}, if a random "
        "number of them is tried, that many on average, and a private measure decides."
    )


def draw_figures(found: Summary, directory: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Figure 1; Figure 2 and all methods if there is any ε; how users fare if they were told apart.

    The numbers of each figure stand beside it as CSV. None if every setting diverged.
    """
    if not found.every:
        return []
    figures = [figure_1(found), figure_2(found), figure_methods(found), figure_users(found)]
    written: list[Path] = []
    for drawn in figures:
        if drawn is not None:
            written += drawn.save(directory, formats)
    return written


@dataclass(frozen=True)
class Drawn:
    """A figure and the numbers it shows.

    Args:
        name: of the files.
        figure: the picture.
        rows: its numbers.
    """

    name: str
    figure: Figure
    rows: list[dict[str, object]]

    def save(self, directory: Path, formats: Sequence[str]) -> list[Path]:
        """Pictures in all formats, and the numbers."""
        written = []
        for kind in formats:
            path = directory / f"{self.name}.{kind}"
            self.figure.savefig(path, dpi=DOTS)
            written.append(path)
        plt.close(self.figure)
        numbers = directory / f"{self.name}.csv"
        write_figure_data(numbers, self.rows)
        return [*written, numbers]


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


def _numbers(mean: Mean, label: str, z: float | None, value: float) -> dict[str, object]:
    """A point of a curve, as a row of numbers."""
    point = mean.point
    return {
        "curve": label,
        "noise-multiplier": z,
        "round": mean.round,
        "epsilon": mean.epsilon,
        "value": value,
        "standard error": mean.error if value == mean.value else mean.reported_error,
        "seeds": mean.seeds,
        "step": point.step,
        "clip-norm": point.clip_norm,
    }


def figure_1(found: Summary) -> Drawn | None:
    """A panel for each noise level, a curve for each αQ with its best step at each round.

    Bands are one standard error over seeds. None if the recipe was run alone: it is measured once.
    """
    curves = best_curves(found.every, found.measure)
    if not curves:
        return None
    baselines = baselines_of(found.every, found.measure)
    levels = noises(curves) or [0.0]
    figure, panels = _panels(len(levels), wide=2 if len(levels) == 4 else 3)
    rows: list[dict[str, object]] = []
    for panel, z in zip(panels.flat, levels, strict=False):
        here = {a: curves.get((a, z if a else None), []) for a in alphas(curves)}
        _noise_panel(panel, here, found.measure, z, found.kind)
        labelled = {name_of(a): curve for a, curve in here.items()}
        for method, own in baselines.items():
            if method == AUTO:  # a single point, after rounds of its own
                continue
            name = BASELINE_NAMES[method]
            labelled[name] = own.get(z, [])
            _curve(panel, labelled[name], name, BASELINE_STYLES[method])
        for label, curve in labelled.items():
            rows += [_numbers(mean, label, z, mean.value) for mean in curve]
    _limit(panels.flat[0], found, [curve[-1].value for curve in curves.values() if curve])
    for panel in panels[:, 0]:
        panel.set_ylabel(name_of_measure(found.measure))
    _finish(figure, panels.flat[0], "Best step at each round", found)
    return Drawn("figure-1", figure, rows)


def _limit(axes: Axes, found: Summary, ends: Sequence[float]) -> None:
    """An ordinate that shows what converged: errors far above all ends are cut off."""
    if on_test(found.measure) in HIGHER_IS_BETTER or not ends:
        return
    highest = CUT_OFF * float(np.median([*ends, *found.trivial.values()]))
    if axes.get_ylim()[1] > highest > axes.get_ylim()[0]:
        axes.set_ylim(top=highest)


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
    title = f"noise multiplier z = {z:.4g}" if z else "without noise: no guarantee"
    panel.set(xlabel="round", title=title)
    dearest = max(curves.values(), key=_last_epsilon)
    rounds = [mean.round for mean in dearest]
    epsilons = [mean.epsilon for mean in dearest]
    if z:
        epsilon_axis(panel, rounds, epsilons, kind, small=True)
    measure_axis(panel, measure)


def _last_epsilon(curve: Sequence[Mean]) -> float:
    return curve[-1].epsilon if curve else -1.0


def _curve(axes: Axes, curve: Sequence[Mean], label: str, look: Look) -> None:
    """Values against rounds, after the first one, in a band of one standard error."""
    later = [mean for mean in curve if mean.round > 0]
    rounds = [mean.round for mean in later]
    values = np.array([mean.value for mean in later])
    marked = {"markevery": max(1, len(later) // 8), **look}
    axes.plot(rounds, values, label=label, lw=1.8, ms=5, **marked)
    errors = np.array([mean.error or 0.0 for mean in later])
    if errors.any():
        low = values - errors
        high = values + errors
        axes.fill_between(rounds, low, high, color=look["color"], alpha=0.18, lw=0)


def figure_2(found: Summary) -> Drawn | None:
    """The measure against ε at the end of training, with a standard error over seeds.

    A curve for each αQ with its best step, and in grey the best over αQ. None without any ε.
    """
    ends = best_curves(ending(found.every), found.measure)
    levels = [z for z in noises(ends) if z > 0]
    if not levels:
        return None
    figure, axes = plt.subplots(figsize=ONE_PANEL, layout="constrained")
    rows: list[dict[str, object]] = []
    for a, look in styles(alphas(ends)).items():
        if a == 0:
            mean = ends[0.0, None][0]
            _level(axes, mean.reported, name_of(0), {**look, "marker": ""})
            rows.append(_numbers(mean, name_of(0), None, mean.reported))
        else:
            points = [ends[a, z][0] for z in levels if (a, z) in ends]
            rows += _against_epsilon(axes, points, name_of(a), look)
    for method, own in baselines_of(ending(found.every), found.measure).items():
        points = [own[z][0] for z in levels if z in own]
        rows += _against_epsilon(axes, points, BASELINE_NAMES[method], BASELINE_STYLES[method])
    _front(axes, found, levels)
    _epsilon_axes(axes, found)
    _limit(axes, found, [choice.best.reported for choice in found.table])
    _finish(figure, axes, "At the end of training, best step of each", found)
    return Drawn("figure-2", figure, rows)


def _epsilon_axes(axes: Axes, found: Summary) -> None:
    measure = on_test(found.measure)
    label = f"ε that a deployment would cost ({found.kind})"
    axes.set(xlabel=textwrap.fill(label, LETTERS), ylabel=name_of_measure(measure))
    axes.set_xscale("log")
    measure_axis(axes, measure)
    plain_numbers(axes.xaxis)


def _level(axes: Axes, height: float, label: str, look: Look) -> None:
    """A line at one height: it does not depend on ε."""
    axes.axhline(height, label=label, lw=1.8, **look)


def _against_epsilon(
    axes: Axes, points: Sequence[Mean], label: str, look: Look
) -> list[dict[str, object]]:
    """What is reported at the end against ε, with error bars; the numbers."""
    values = [mean.reported for mean in points]
    errors = [mean.reported_error or 0.0 for mean in points]
    axes.errorbar(
        [mean.epsilon for mean in points],
        values,
        yerr=errors if any(errors) else None,
        label=label,
        lw=1.8,
        ms=5,
        capsize=3,
        **look,
    )
    return [_numbers(mean, label, mean.point.noise_multiplier, mean.reported) for mean in points]


def _front(axes: Axes, found: Summary, levels: Sequence[float]) -> None:
    """The best over αQ at each noise level, below all other curves."""
    chosen = [choice for choice in found.table if choice.noise_multiplier in levels]
    axes.plot(
        [choice.epsilon for choice in chosen],
        [choice.best.reported for choice in chosen],
        "o-",
        color="0.55",
        lw=7,
        ms=13,
        alpha=0.55,
        zorder=0,
        label="best over αQ",
    )


def figure_methods(found: Summary) -> Drawn | None:
    """The measure against ε for every method, each with its best setting; None without any ε."""
    ends = best_curves(ending(found.every), found.measure)
    levels = [choice.noise_multiplier for choice in found.table if choice.noise_multiplier > 0]
    if not levels:
        return None
    figure, axes = plt.subplots(figsize=ONE_PANEL, layout="constrained")
    rows: list[dict[str, object]] = []
    for way, look in METHOD_STYLES.items():
        ways = [ways_at(ends, z, found.measure)[way] for z in levels]
        points = [mean for mean in ways if mean is not None]
        if points and way == LOCAL:
            _level(axes, points[0].reported, METHOD_NAMES[way], {**look, "marker": ""})
            rows.append(_numbers(points[0], METHOD_NAMES[way], None, points[0].reported))
        elif points:
            rows += _against_epsilon(axes, points, METHOD_NAMES[way], look)
    for method, own in baselines_of(ending(found.every), found.measure).items():
        points = [own[z][0] for z in levels if z in own]
        rows += _against_epsilon(axes, points, BASELINE_NAMES[method], BASELINE_STYLES[method])
    _levels_without_epsilon(axes, found)
    _epsilon_axes(axes, found)
    _finish(figure, axes, "Every method at the end of training, best setting of each", found)
    return Drawn("methods", figure, rows)


def _levels_without_epsilon(axes: Axes, found: Summary) -> None:
    """The best without noise, and the best without features."""
    for choice in found.table:
        if choice.noise_multiplier == 0:
            look = {"color": COLOURS[0], "ls": ":"}
            _level(axes, choice.best.reported, "best without noise", look)
    if found.trivial:
        low, high = axes.get_ylim()
        height = min(found.trivial.values(), key=lambda value: badness(found.measure, value))
        label = f"without features: {height:.3g}"
        _level(axes, height, label, {"color": "0.7", "ls": (0, (1, 3))})
        axes.set_ylim(low, high)  # it may lie far outside


def figure_users(found: Summary) -> Drawn | None:
    """What each user gains against learning alone, in order; None if users were not told apart."""
    spread = found.spread
    if not spread:
        return None
    places = {round(k * (len(spread) - 1) / (MOST_PANELS - 1)) for k in range(MOST_PANELS)}
    shown = [spread[place] for place in sorted(places)]
    figure, panels = _panels(len(shown))
    for panel, own in zip(panels.flat, shown, strict=False):
        _user_panel(panel, own)
    name, _, _ = name_of_measure(on_test(found.measure)).partition(" (")
    for panel in panels[:, 0]:
        panel.set_ylabel(f"gain in {name} against local learning")
    title = "Each user against themselves alone, in the order of the gain, at the end of training"
    _finish(figure, panels.flat[0], title, found)
    return Drawn("users", figure, [row for own in spread for row in _user_rows(own)])


def _user_rows(own: Spread) -> list[dict[str, object]]:
    """Each user's measures, in the order of users in the data."""
    rows: list[dict[str, object]] = []
    for user in range(len(own.users[LOCAL])):
        values = {name: float(found[user]) for name, found in own.users.items()}
        rows.append({"epsilon": own.epsilon, "user": user, **values})
    return rows


def _user_panel(panel: Axes, own: Spread) -> None:
    users = np.linspace(0, 100, len(own.users[LOCAL]))
    for name, look in USER_STYLES.items():
        gains = np.sort(own.gains(name))
        panel.plot(users, gains, label=name, **look)
    gains = own.gains(PERSONALIZED)
    panel.axhline(0, color="black", lw=0.8)
    panel.fill_between(users, 0, np.sort(gains), color=COLOURS[0], alpha=0.15, lw=0)
    gained = float(np.mean(gains > 0))
    lost = float(np.mean(gains < 0))
    panel.set(
        xlabel="% of users",
        title=f"{_spent(own.epsilon)}: {gained:.0%} gain, {lost:.0%} lose",
    )
    panel.grid(alpha=0.3, lw=0.5)


def _spent(epsilon: float) -> str:
    return "without noise" if math.isinf(epsilon) else f"ε = {rounded_up(epsilon)}"


def _finish(figure: Figure, named: Axes, title: str, found: Summary) -> None:
    handles, labels = named.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    figure.suptitle(title, fontsize=11)
    letters = int(LETTERS_PER_INCH * figure.get_figwidth())
    lines = [CAVEAT, f"{found.count()} {found.chosen_on()}"]
    text = "\n".join(textwrap.fill(line, letters) for line in lines)
    figure.supxlabel(text, fontsize=8, color="0.3")
