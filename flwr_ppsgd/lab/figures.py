"""Learning curves and users of a run; the paper's Figure 1 and Figure 2 of a sweep.

Nothing here trains. The numbers of each figure of a sweep stand beside it as CSV.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator
from numpy.typing import NDArray

from flwr_ppsgd.lab import summary
from flwr_ppsgd.lab.evaluation import OUTSIDE, SAME
from flwr_ppsgd.lab.measures import HIGHER_IS_BETTER, measure_of, name_of_measure, on_test
from flwr_ppsgd.lab.outputs import (
    BEST,
    PICTURE,
    USERS_PICTURE,
    read_config,
    read_people,
    read_run,
    read_selection,
    write_table,
)
from flwr_ppsgd.lab.rows import (
    BASELINES,
    CAVEAT,
    FEDAVG,
    FEDAVG_SOLVED,
    FINE_TUNED,
    SOLVED,
    TRIVIAL,
    RunRow,
    Selection,
    SweepRow,
)
from flwr_ppsgd.lab.summary import (
    EPSILON,
    GLOBAL,
    LOCAL,
    LOCAL_SOLVED,
    PERSONALIZED,
    ZERO_OUT,
    Summary,
)
from flwr_ppsgd.learner import LOCAL as LOCAL_PREFIX
from flwr_ppsgd.learner import SHARED as SHARED_PREFIX
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.statement import rounded_up

Look: TypeAlias = dict[str, Any]  # how a curve is drawn
Curves: TypeAlias = dict[str, tuple[pd.DataFrame, Look]]  # points and look, by label
Drawn: TypeAlias = tuple[Figure, pd.DataFrame]  # a figure, and the numbers that it shows

# Okabe and Ito, then Tol: safe for colour blindness
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#882255", "#999933", "#332288", "#44AA99"),
)
STYLES = ("-", "--", "-.", ":")
MARKERS = "^vDPX<>"
PICTURE_FORMATS = ("png", "pdf", "svg")
DOTS = 130  # of a picture per inch
ONE_PANEL = (7.2, 5.2)  # inches
MOST_TICKS = 6
SMALL_LETTERS = 8
LETTERS = 64  # in a line below or above a panel that stands alone
LETTERS_OF_A_PANEL = 60  # the same for small letters and several panels side by side
LETTERS_PER_INCH = 15  # of a footnote
CUT_OFF = 4.0  # times the median of what is shown at the end
METHODS: dict[str, tuple[str, Look]] = {  # name and look of everything that is not an αQ
    FINE_TUNED: ("global, then fine-tuned", {"color": "0.45", "ls": ":", "marker": "x"}),
    SOLVED: ("global, then solved", {"color": "0.2", "ls": ":", "marker": "*"}),
    FEDAVG: ("FedAvg, local steps", {"color": "0.45", "ls": "-.", "marker": "+"}),
    FEDAVG_SOLVED: ("FedAvg, then solved", {"color": "0.2", "ls": "-.", "marker": "*"}),
    AUTO: ("auto, nothing chosen", {"color": "#C00000", "ls": "-", "marker": "P"}),
}
WAYS: dict[str, tuple[str, Look]] = {
    PERSONALIZED: (
        "personalized (best αQ between)",
        {"color": COLOURS[0], "ls": "-", "marker": "D"},
    ),
    GLOBAL: ("global (α = ∞)", {"color": "black", "ls": "--", "marker": "s"}),
    LOCAL: ("local (α = 0)", {"color": "black", "ls": "-", "marker": "o"}),
}
NUMBERS = ["level", "round", "epsilon", "value", "error", "seeds", "step", "clip-norm"]


# --- axes


class _PlainFormatter(LogFormatter):
    """0.1 for 1e-01, at the same ticks."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def log_scale(axes: Axes) -> None:
    """A logarithmic ordinate with plain numbers."""
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    """0.1 and 100, not powers of ten, along a logarithmic axis."""
    axis.set_major_formatter(_PlainFormatter(labelOnlyBase=False))
    axis.set_minor_formatter(_PlainFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def measure_axis(axes: Axes, measure: str) -> None:
    """A logarithmic ordinate for errors and risks, and a grid."""
    if on_test(measure) not in HIGHER_IS_BETTER:
        log_scale(axes)
    axes.grid(alpha=0.3, which="both", lw=0.5)


def whole_rounds(axes: Axes) -> None:
    """Ticks at whole numbers along the bottom."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def epsilon_axis(
    axes: Axes,
    rounds: Sequence[int],
    epsilons: Sequence[float],
    kind: str = ZERO_OUT,
    *,
    guaranteed: bool = False,
    small: bool = False,
) -> None:
    """Whole rounds along the bottom, ε along the top, evenly spaced back from the last round.

    Args:
        axes: where curves by round are drawn.
        rounds: the reported rounds.
        epsilons: what each of them costs.
        kind: which ε is meant.
        guaranteed: whether it is a guarantee, rather than what a deployment would cost.
        small: several panels stand side by side.
    """
    whole_rounds(axes)
    top = axes.secondary_xaxis("top")
    apart = max(1, math.ceil((len(rounds) - 1) / MOST_TICKS))
    labels = [_short_epsilon(epsilon) for epsilon in epsilons]
    top.set_xticks(rounds[::-apart], labels[::-apart])
    size = None if kind == ZERO_OUT and not small else SMALL_LETTERS
    what = "ε spent so far" if guaranteed else "ε that a deployment would have spent"
    width = LETTERS_OF_A_PANEL if small else LETTERS
    top.set_xlabel(textwrap.fill(f"{what} ({kind})", width), fontsize=size)


def _short_epsilon(epsilon: float) -> str:
    """Two digits or whole, rounded up, in a few letters: seven of them stand side by side."""
    if math.isinf(epsilon):
        return "∞"
    if 99 < epsilon <= 99_999:
        return f"{math.ceil(epsilon)}"
    return rounded_up(epsilon, digits=2)


# --- one run


def draw_run(directory: Path) -> None:
    """The pictures of a run: its users if they were told apart, and its learning curve."""
    rows = [row for row in read_run(directory).rows if row.measures]
    if not rows:
        return
    people = read_people(directory)
    label = "solved"
    if people:
        draw_people(directory, rows[-1], people)
        if len(rows) < 2:
            return
    else:
        ratio = read_config(directory).get("alpha-q")
        if ratio is not None:
            label = f"αQ = {ratio:g}".replace("inf", "∞")
    title = f"Personalized-Private-SGD, {label}"
    measure = measure_of(rows[0].measures)
    learning_curves({label: rows}, measure, directory / PICTURE, title, OUTSIDE)


def learning_curves(
    curves: Mapping[str, Sequence[RunRow]], measure: str, path: Path, title: str, footnote: str
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
    most = max(curves.values(), key=lambda rows: rows[-1].deployed_epsilon)
    rounds = [row.round for row in most]
    epsilons = [row.deployed_epsilon for row in most]
    epsilon_axis(axes, rounds, epsilons, guaranteed=math.isfinite(most[-1].epsilon))
    figure.supxlabel(footnote, fontsize=8, color="0.3", wrap=True)
    figure.savefig(path, dpi=DOTS)
    plt.close(figure)


def draw_people(directory: Path, last: RunRow, columns: Mapping[str, Sequence[Any]]) -> None:
    """``users.png``: the three models over all users, and each user's gain, sorted.

    Args:
        directory: of the run.
        last: the last row of the run.
        columns: of the users' file.
    """
    main = measure_of(last.measures)
    gains = np.array([gain for gain in columns["gain"] if gain is not None])
    if not len(gains):
        return
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 4.6), width_ratios=(1, 2), layout="constrained"
    )
    _draw_models(left, main, last.measures)
    _draw_gains(right, main, gains)
    cost = f"ε = {rounded_up(last.deployed_epsilon)} after {last.round} rounds"
    if math.isinf(last.epsilon):
        cost = f"no guarantee; a deployment would cost {cost}"
    figure.suptitle(cost)
    figure.supxlabel(OUTSIDE, fontsize=8, color="0.4")
    figure.savefig(directory / USERS_PICTURE, dpi=150)
    plt.close(figure)


def _draw_models(axes: Axes, main: str, measures: Mapping[str, float]) -> None:
    """A point each for the shared, the local and the personal model."""
    values = [measures[SHARED_PREFIX + main], measures[LOCAL_PREFIX + main], measures[main]]
    axes.scatter(range(3), values, color=[COLOURS[1], COLOURS[4], COLOURS[0]], s=90, zorder=3)
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.3f}", (place, value), (0, 9), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(3), ["shared\nalone", "own rows\nalone", "personal"])
    axes.set_xlim(-0.6, 2.6)
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    better = "higher" if main in HIGHER_IS_BETTER else "lower"
    axes.set_title(f"{name_of_measure(main)} ({better} is better)", fontsize=10)


def _draw_gains(axes: Axes, main: str, gains: NDArray[np.float64]) -> None:
    """Each user with themselves: the personal model against the one from own rows alone."""
    ordered = np.sort(gains)
    better = int((ordered > SAME).sum())
    worse = int((ordered < -SAME).sum())
    colours = ["0.75"] * len(ordered)
    colours[:worse] = [COLOURS[1]] * worse
    colours[len(ordered) - better :] = [COLOURS[2]] * better
    axes.bar(np.arange(len(ordered)), ordered, width=1.0, color=colours)
    axes.axhline(0, color="0.3", lw=0.8)
    axes.set_title(
        f"gain over own rows alone, user by user: {better} better, {worse} worse, "
        f"{len(ordered) - better - worse} the same",
        fontsize=10,
    )
    axes.set_xlabel("users, sorted by gain")
    axes.set_ylabel(f"gain in {name_of_measure(main)}")
    axes.margins(x=0.01)


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
    found = summary.summarise(rows)
    written = draw_figures(found, directory, formats)
    best_settings = directory / BEST
    write_table(best_settings, found.table)
    written.append(best_settings)
    costs = [cost_text(cost) for cost in read_selection(directory)]
    return "\n".join([found.text(), *costs]), written


def cost_text(cost: Selection) -> str:
    """What choosing would cost, in a line."""
    return (
        f"At noise z = {cost.noise_multiplier:.4g}, choosing among {cost.settings} settings costs "
        f"ε = {rounded_up(cost.selected)} instead of {rounded_up(cost.epsilon)}, if a random "
        "number of them is tried, that many on average, and a private measure decides."
    )


def draw_figures(found: Summary, directory: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Figure 1; Figure 2 and all methods if there is any ε; nothing if every setting diverged."""
    if found.every.empty:
        return []
    figures = {
        "methods": figure_methods(found),
        "figure-1": figure_1(found),
        "figure-2": figure_2(found),
    }
    written = []
    for name, drawn in figures.items():
        if drawn is None:
            continue
        figure, numbers = drawn
        for kind in formats:
            written.append(directory / f"{name}.{kind}")
            figure.savefig(written[-1], dpi=DOTS)
        plt.close(figure)
        written.append(directory / f"{name}.csv")
        write_table(written[-1], numbers)
    return written


def styles(values: Sequence[float]) -> dict[float, Look]:
    """Local and global in black, the αQ between them in colours and dashes that differ."""
    drawn: dict[float, Look] = {0.0: WAYS[LOCAL][1], math.inf: WAYS[GLOBAL][1]}
    between = [a for a in values if 0 < a < math.inf]
    for place, a in enumerate(between):
        drawn[a] = {
            "color": COLOURS[place % len(COLOURS)],
            "ls": STYLES[place % len(STYLES)],
            "marker": MARKERS[place % len(MARKERS)],
        }
    return {a: drawn[a] for a in values}


def _csv_rows(curve: pd.DataFrame, label: str) -> pd.DataFrame:
    """The points of a curve, as rows of a figure's CSV."""
    named = {"level": "noise-multiplier", "error": summary.ERROR}
    chosen = curve[NUMBERS].rename(columns=named)
    chosen.insert(0, "curve", label)
    return chosen


def _alpha_curves(every: pd.DataFrame, measure: str) -> Curves:
    """A curve for each αQ of the paper's method, with its best step."""
    curves = summary.best_curves(every, measure)
    looks = styles(sorted(curves))
    named = {0.0: WAYS[LOCAL][0], math.inf: WAYS[GLOBAL][0]}
    return {named.get(a, f"αQ = {a:g}"): (curves[a], look) for a, look in looks.items()}


def figure_1(found: Summary) -> Drawn | None:
    """A panel for each noise level, a curve for each αQ with its best step at each round.

    Bands are one standard error over seeds. None if the recipe was run alone: it is measured once.
    """
    curves = _alpha_curves(found.every, found.measure)
    if not curves:
        return None
    stepped = pd.concat([curve for curve, _ in curves.values()])
    for method in BASELINES:
        label, look = METHODS[method]
        for curve in summary.best_curves(found.every, found.measure, method).values():
            curves[label] = (curve, look)
    levels = summary.levels_of(stepped) or [0.0]
    figure, panels = _panels(len(levels))
    numbers = []
    for panel, level in zip(panels.flat, levels, strict=False):
        for label, (curve, look) in curves.items():
            here = summary.at_level(curve, level)
            _draw_curve(panel, here, label, look)
            numbers.append(_csv_rows(here.assign(level=level), label))
        title = f"noise multiplier z = {level:.4g}" if level else "without noise: no guarantee"
        panel.set(xlabel="round", title=title)
        whole_rounds(panel)
        if level:
            spent = summary.at_level(stepped, level).groupby("round")["epsilon"].max()
            epsilon_axis(panel, spent.index.tolist(), spent.tolist(), found.kind, small=True)
        measure_axis(panel, found.measure)
    ends = [float(curve["value"].iloc[-1]) for curve, _ in curves.values()]
    _limit_ordinate(panels.flat[0], found, ends)
    for panel in panels[:, 0]:
        panel.set_ylabel(name_of_measure(found.measure))
    _finish(figure, panels.flat[0], "Best step at each round", found)
    return figure, pd.concat(numbers)


def _limit_ordinate(axes: Axes, found: Summary, ends: Sequence[float]) -> None:
    """An ordinate that shows what converged: errors far above all ends are cut off."""
    if on_test(found.measure) in HIGHER_IS_BETTER or not ends:
        return
    highest = CUT_OFF * float(np.median([*ends, *found.trivial.values()]))
    if axes.get_ylim()[1] > highest > axes.get_ylim()[0]:
        axes.set_ylim(top=highest)


def _panels(count: int) -> tuple[Figure, NDArray[Any]]:
    """A figure with ``count`` panels, at most three of them side by side; the rest is hidden."""
    wide = 2 if count == 4 else min(3, count)
    tall = math.ceil(count / wide)
    size = ONE_PANEL if wide == 1 else (4.6 * wide, 4.0 * tall + 0.8)
    figure, panels = plt.subplots(
        tall, wide, figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for panel in panels.flat[count:]:
        panel.set_visible(False)
    return figure, panels


def _draw_curve(axes: Axes, curve: pd.DataFrame, label: str, look: Look) -> None:
    """Values against rounds, after the first one, in a band of one standard error."""
    later = curve[curve["round"] > 0]
    marked = {"markevery": max(1, len(later) // 8), **look}
    axes.plot(later["round"], later["value"], label=label, lw=1.8, ms=5, **marked)
    errors = later["error"].fillna(0.0)
    if errors.any():
        low = later["value"] - errors
        high = later["value"] + errors
        axes.fill_between(later["round"], low, high, color=look["color"], alpha=0.18, lw=0)


def figure_2(found: Summary) -> Drawn | None:
    """The measure against ε at the end of training, with a standard error over seeds.

    A curve for each αQ with its best step, and in grey the best over αQ. None without any ε.
    """
    curves = _alpha_curves(summary.last_rounds(found.every), found.measure)
    noisy = found.table[found.table["noise-multiplier"] > 0]
    if not curves or noisy.empty:
        return None
    figure, axes, numbers = _draw_against_epsilon(found, curves)
    reached = noisy[on_test(found.measure)]
    grey: Look = {"color": "0.55", "lw": 7, "ms": 13, "alpha": 0.55, "zorder": 0}
    axes.plot(noisy[EPSILON], reached, "o-", label="best over αQ", **grey)
    _limit_ordinate(axes, found, found.table[on_test(found.measure)].tolist())
    _finish(figure, axes, "At the end of training, best step of each", found)
    return figure, numbers


def figure_methods(found: Summary) -> Drawn | None:
    """The measure against ε for every method, each with its best setting; None without any ε."""
    ends = summary.last_rounds(found.every)
    levels = [level for level in found.table["noise-multiplier"] if level > 0]
    if not levels:
        return None
    ways = [summary.ways_at(ends, level, found.measure) for level in levels]
    curves: Curves = {}
    for way, (label, look) in WAYS.items():
        points = pd.concat([own[way] for own in ways])
        if not points.empty:
            curves[label] = (points.drop_duplicates(), look)
    figure, axes, numbers = _draw_against_epsilon(found, curves)
    for height in found.table.loc[found.table["noise-multiplier"] == 0, on_test(found.measure)]:
        axes.axhline(height, label="best without noise", color=COLOURS[0], ls=":", lw=1.8)
    if LOCAL_SOLVED in found.table:
        height = found.table[LOCAL_SOLVED].iloc[0]
        axes.axhline(height, label="own rows alone, solved", color=COLOURS[2], ls="--", lw=1.8)
    if TRIVIAL in found.table:
        low, high = axes.get_ylim()
        height = found.table[TRIVIAL].iloc[0]
        label = f"without features: {height:.3g}"
        axes.axhline(height, label=label, color="0.7", ls=(0, (1, 3)), lw=1.8)
        axes.set_ylim(low, high)  # it may lie far outside
    _finish(figure, axes, "Every method at the end of training, best setting of each", found)
    return figure, numbers


def _draw_against_epsilon(found: Summary, curves: Curves) -> tuple[Figure, Axes, pd.DataFrame]:
    """What is reported at the end against ε, with error bars; and the numbers.

    The best of each baseline and the recipe stand beside the curves. Local learning, which costs
    nothing, is a level.
    """
    ends = summary.last_rounds(found.every)
    every = dict(curves)
    for method, (label, look) in METHODS.items():
        own = ends[ends["method"] == method]
        if not own.empty:
            every[label] = (summary.best(own, found.measure, ["level"]), look)
    figure, axes = plt.subplots(figsize=ONE_PANEL, layout="constrained")
    numbers = []
    for label, (curve, look) in every.items():
        points = curve.assign(value=curve["reported"], error=curve["reported_error"])
        if points["level"].isna().all():
            points = points.head(1)
            height = float(points["value"].iloc[0])
            axes.axhline(height, label=label, lw=1.8, **{**look, "marker": ""})
        else:
            points = points[points["level"] > 0]
            errors = points["error"].fillna(0.0)
            bars = {"yerr": errors, "capsize": 3} if errors.any() else {}
            axes.errorbar(
                points["epsilon"], points["value"], label=label, lw=1.8, ms=5, **bars, **look
            )
        numbers.append(_csv_rows(points, label))
    measure = on_test(found.measure)
    label = f"ε that a deployment would cost ({found.kind})"
    axes.set(xlabel=textwrap.fill(label, LETTERS), ylabel=name_of_measure(measure))
    axes.set_xscale("log")
    measure_axis(axes, measure)
    plain_numbers(axes.xaxis)
    return figure, axes, pd.concat(numbers)


def _finish(figure: Figure, named: Axes, title: str, found: Summary) -> None:
    handles, labels = named.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    figure.suptitle(title, fontsize=11)
    letters = int(LETTERS_PER_INCH * figure.get_figwidth())
    lines = [CAVEAT, f"{found.count_text()} {found.chosen_on()}"]
    text = "\n".join(textwrap.fill(line, letters) for line in lines)
    figure.supxlabel(text, fontsize=8, color="0.3")
