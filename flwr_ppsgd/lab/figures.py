"""Learning curves and users of a run; the paper's Figure 1 and Figure 2 of a sweep.

Nothing here trains. The numbers of each figure of a sweep are written beside it as CSV.
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
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator
from numpy.typing import NDArray

from flwr_ppsgd.lab import disk
from flwr_ppsgd.lab.evaluation import OUTSIDE, SAME_MEASURE
from flwr_ppsgd.lab.measures import HIGHER_IS_BETTER, as_test_measure, measure_of, name_of_measure
from flwr_ppsgd.lab.outputs import (
    BEST,
    PICTURE,
    USERS_PICTURE,
    SavedRun,
    read_selection,
)
from flwr_ppsgd.lab.rows import (
    CAVEAT,
    FEDAVG,
    FEDAVG_SOLVED,
    FINE_TUNED,
    PPSGD,
    SOLVED,
    TRIVIAL,
    RunRow,
    Selection,
    SweepRow,
)
from flwr_ppsgd.lab.summary import (
    EPSILON,
    ERROR,
    GLOBAL,
    LOCAL,
    LOCAL_SOLVED,
    PERSONALIZED,
    ZERO_OUT,
    Summary,
    best_rows,
    last_rounds,
    levels_of,
    rows_at_level,
    summarise,
    with_ways,
)
from flwr_ppsgd.learner import LOCAL as LOCAL_PREFIX
from flwr_ppsgd.learner import SHARED as SHARED_PREFIX
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.statement import rounded_up

CurveStyle: TypeAlias = dict[str, Any]  # how a curve is drawn
DrawnFigure: TypeAlias = tuple[Figure, pd.DataFrame]  # a figure, and the numbers that it shows

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
LETTERS = 64  # in a line below or above a single panel
LETTERS_OF_A_PANEL = 60  # the same for small letters and several panels side by side
LETTERS_PER_INCH = 15  # of a footnote
CUT_OFF = 4.0  # times the median of what is shown at the end
CURVES = {  # of every way but an αQ, in the order of legends
    LOCAL: "local (α = 0)",
    PERSONALIZED: "personalized (best αQ between)",
    GLOBAL: "global (α = ∞)",
    FINE_TUNED: "global, then fine-tuned",
    SOLVED: "global, then solved",
    FEDAVG: "FedAvg, local steps",
    FEDAVG_SOLVED: "FedAvg, then solved",
    AUTO: "auto, nothing chosen",
}
CURVE_STYLES: dict[str, CurveStyle] = {
    PERSONALIZED: {"color": COLOURS[0], "ls": "-", "marker": "D"},
    GLOBAL: {"color": "black", "ls": "--", "marker": "s"},
    LOCAL: {"color": "black", "ls": "-", "marker": "o"},
    FINE_TUNED: {"color": "0.45", "ls": ":", "marker": "x"},
    SOLVED: {"color": "0.2", "ls": ":", "marker": "*"},
    FEDAVG: {"color": "0.45", "ls": "-.", "marker": "+"},
    FEDAVG_SOLVED: {"color": "0.2", "ls": "-.", "marker": "*"},
    AUTO: {"color": "#C00000", "ls": "-", "marker": "P"},
}
COLUMNS = ["curve", "level", "round", "epsilon", "value", "error", "seeds", "step", "clip-norm"]


# --- axes


class _PlainFormatter(LogFormatter):
    """0.1 in place of 1e-01, at the same ticks."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def log_scale(axes: Axes, *, x: bool = False) -> None:
    """A logarithmic ordinate, or abscissa, with 0.1 and 100 rather than powers of ten."""
    axis = axes.xaxis if x else axes.yaxis
    if x:
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis.set_major_formatter(_PlainFormatter(labelOnlyBase=False))
    axis.set_minor_formatter(_PlainFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def measure_axis(axes: Axes, measure: str) -> None:
    """A logarithmic ordinate for errors and risks, and a grid."""
    if as_test_measure(measure) not in HIGHER_IS_BETTER:
        log_scale(axes)
    axes.grid(alpha=0.3, which="both", lw=0.5)


def whole_rounds(axes: Axes) -> None:
    """Ticks at whole numbers along the bottom."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def epsilon_axis(
    axes: Axes, epsilons: Mapping[int, float], label: str, *, small: bool = False
) -> None:
    """ε along the top, evenly spaced back from the last round.

    Args:
        axes: where curves by round are drawn.
        epsilons: what each reported round costs.
        label: which ε is meant.
        small: in small letters, as for several panels side by side.
    """
    apart = max(1, math.ceil((len(epsilons) - 1) / MOST_TICKS))
    ticks = list(epsilons)[::-apart]
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [_epsilon_tick(epsilons[round_]) for round_ in ticks])
    width = LETTERS_OF_A_PANEL if small else LETTERS
    top.set_xlabel(textwrap.fill(label, width), fontsize=SMALL_LETTERS if small else None)


def _epsilon_tick(epsilon: float) -> str:
    """Two digits or whole, rounded up, in a few letters: seven of them stand side by side."""
    if math.isinf(epsilon):
        return "∞"
    if 99 < epsilon <= 99_999:
        return f"{math.ceil(epsilon)}"
    return rounded_up(epsilon, digits=2)


# --- one run


def draw_run(saved: SavedRun) -> None:
    """The pictures of a run: its users if each was measured, and its learning curve."""
    rows = [row for row in saved.rows if row.measures]
    if not rows:
        return
    label = "solved"
    if len(saved.people):
        draw_people(saved, rows[-1])
        if len(rows) < 2:
            return
    elif "alpha-q" in saved.config:
        label = f"αQ = {saved.config['alpha-q']:g}".replace("inf", "∞")
    title = f"Personalized-Private-SGD, {label}"
    measure = measure_of(rows[0].measures)
    learning_curves({label: rows}, measure, saved.directory / PICTURE, title, OUTSIDE)


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
    whole_rounds(axes)
    if len(curves) > 1:
        axes.legend()
    most = max(curves.values(), key=lambda rows: rows[-1].deployed_epsilon)
    guaranteed = math.isfinite(most[-1].epsilon)
    what = "ε spent so far" if guaranteed else "ε that a deployment would have spent"
    epsilons = {row.round: row.deployed_epsilon for row in most}
    epsilon_axis(axes, epsilons, f"{what} ({ZERO_OUT})")
    figure.supxlabel(footnote, fontsize=8, color="0.3", wrap=True)
    figure.savefig(path, dpi=DOTS)
    plt.close(figure)


def draw_people(saved: SavedRun, last: RunRow) -> None:
    """``users.png``: the three models over all users, and each user's gain, sorted.

    Args:
        saved: the run.
        last: its last row.
    """
    gains = saved.people["gain"].dropna()
    if gains.empty:
        return
    main = measure_of(last.measures)
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
    figure.savefig(saved.directory / USERS_PICTURE, dpi=150)
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


def _draw_gains(axes: Axes, main: str, gains: pd.Series) -> None:
    """Each user with themselves: the personal model against the one from own rows alone."""
    ordered = gains.sort_values()
    better = int((ordered > SAME_MEASURE).sum())
    worse = int((ordered < -SAME_MEASURE).sum())
    same = len(ordered) - better - worse
    colours = [COLOURS[1]] * worse + ["0.75"] * same + [COLOURS[2]] * better
    axes.bar(np.arange(len(ordered)), ordered, width=1.0, color=colours)
    axes.axhline(0, color="0.3", lw=0.8)
    axes.set_title(
        f"gain over own rows alone, user by user: {better} better, {worse} worse, {same} the same",
        fontsize=10,
    )
    axes.set_xlabel("users, sorted by gain")
    axes.set_ylabel(f"gain in {name_of_measure(main)}")
    axes.margins(x=0.01)


# --- a sweep


def draw_sweep(
    rows: Sequence[SweepRow], directory: Path, formats: Sequence[str] = ("png",)
) -> tuple[str, list[Path]]:
    """Draw all figures of a sweep; the table as text, and the files that were written.

    Args:
        rows: of the sweep.
        directory: where to write.
        formats: of pictures: png, pdf, svg.
    """
    found = summarise(rows)
    written = draw_figures(found, directory, formats)
    written.append(directory / BEST)
    _write_table(written[-1], found.table)
    costs = [cost_text(cost) for cost in read_selection(directory)]
    return "\n".join([found.text(), *costs]), written


def cost_text(cost: Selection) -> str:
    """The cost of choosing privately, in one sentence."""
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
        named = {"level": "noise-multiplier", "error": ERROR}
        _write_table(written[-1], numbers[COLUMNS].rename(columns=named))
    return written


def _write_table(path: Path, table: pd.DataFrame) -> None:
    """CSV under a comment that says what ε does not cover."""
    rows = table.to_csv(index=False, lineterminator="\n")
    disk.write_text(path, f"# {CAVEAT}\n{rows}")


def _curve_points(found: Summary, candidates: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The points of every curve in the order of the legend: the best setting of each way for each
    value of ``by``. ``curve`` is the label of the way."""
    points = best_rows(candidates, found.measure, ["way", *by]).sort_values(list(by))
    order = {way: float(place) for place, way in enumerate(CURVES)}
    between = points["alpha-q"] / (1 + points["alpha-q"])  # αQ stand where personalized would
    place = points["way"].map(order).fillna(order[PERSONALIZED] + between)
    points = points.assign(_place=place).sort_values("_place", kind="stable")
    return points.assign(curve=points["way"].map(lambda way: CURVES.get(way, way)))


def curve_styles(ways: Sequence[str]) -> dict[str, CurveStyle]:
    """The style of each way; every αQ has its own colour, dashes and marker."""
    between = [way for way in ways if way not in CURVE_STYLES]
    looks = dict(CURVE_STYLES)
    for place, way in enumerate(between):
        looks[way] = {
            "color": COLOURS[place % len(COLOURS)],
            "ls": STYLES[place % len(STYLES)],
            "marker": MARKERS[place % len(MARKERS)],
        }
    return {way: looks[way] for way in ways}


def figure_1(found: Summary) -> DrawnFigure | None:
    """A panel for each noise level, a curve for each αQ with its best step at each round.

    Bands are one standard error over seeds. None if the recipe was run alone: it is measured once.
    """
    stepped = found.every[found.every["method"] != AUTO]
    if stepped.empty:
        return None
    points = _curve_points(found, with_ways(stepped, each_alpha=True), ["level", "round"])
    looks = curve_styles(points["way"].unique().tolist())
    levels = levels_of(points) or [0.0]
    figure, panels = _make_panels(len(levels))
    numbers = []
    for panel, level in zip(panels.flat, levels, strict=False):
        here = rows_at_level(points, level).assign(level=level)
        numbers.append(here)
        for way, curve in here.groupby("way", sort=False):
            _draw_curve(panel, curve[curve["round"] > 0], looks[str(way)])
        title = f"noise multiplier z = {level:.4g}" if level else "without noise: no guarantee"
        panel.set(xlabel="round", title=title)
        whole_rounds(panel)
        if level:
            paper = here[here["method"] == PPSGD]
            spent = paper.groupby("round")["epsilon"].max().to_dict()
            what = f"ε that a deployment would have spent ({found.kind})"
            epsilon_axis(panel, spent, what, small=True)
        measure_axis(panel, found.measure)
    _limit_ordinate(panels[0, 0], found, points.groupby("way")["value"].last())
    for panel in panels[:, 0]:
        panel.set_ylabel(name_of_measure(found.measure))
    _add_legend_and_notes(figure, panels[0, 0], "Best step at each round", found)
    return figure, pd.concat(numbers)


def _limit_ordinate(axes: Axes, found: Summary, ends: pd.Series) -> None:
    """An ordinate that shows what converged: errors far above all ends are cut off."""
    if found.test_measure in HIGHER_IS_BETTER:
        return
    highest = CUT_OFF * float(np.median([*ends, *found.trivial.values()]))
    low, high = axes.get_ylim()
    if low < highest < high:
        axes.set_ylim(top=highest)


def _make_panels(count: int) -> tuple[Figure, NDArray[Any]]:
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


def _draw_curve(axes: Axes, curve: pd.DataFrame, look: CurveStyle) -> None:
    """Values against rounds, in a band of one standard error."""
    if curve.empty:
        return
    rounds = curve["round"]
    label = curve["curve"].iloc[0]
    marked = {"markevery": max(1, len(curve) // 8), **look}
    axes.plot(rounds, curve["value"], label=label, lw=1.8, ms=5, **marked)
    errors = curve["error"].fillna(0.0)
    if errors.any():
        low = curve["value"] - errors
        high = curve["value"] + errors
        axes.fill_between(rounds, low, high, color=look["color"], alpha=0.18, lw=0)


def figure_2(found: Summary) -> DrawnFigure | None:
    """The measure against ε at the end of training, with a standard error over seeds.

    A curve for each αQ with its best step, and in grey the best over αQ. None without any ε.
    """
    ends = last_rounds(found.every)
    noisy = found.table[found.table["noise-multiplier"] > 0]
    if noisy.empty or not (ends["method"] == PPSGD).any():
        return None
    figure, axes, numbers = _draw_against_epsilon(found, with_ways(ends, each_alpha=True))
    grey: CurveStyle = {"color": "0.55", "lw": 7, "ms": 13, "alpha": 0.55, "zorder": 0}
    axes.plot(noisy[EPSILON], noisy[found.test_measure], "o-", label="best over αQ", **grey)
    _limit_ordinate(axes, found, numbers["value"])
    _add_legend_and_notes(figure, axes, "At the end of training, best step of each", found)
    return figure, numbers


def figure_methods(found: Summary) -> DrawnFigure | None:
    """The measure against ε for every method, each with its best setting; None without any ε."""
    table = found.table
    if not (table["noise-multiplier"] > 0).any():
        return None
    figure, axes, numbers = _draw_against_epsilon(found, with_ways(last_rounds(found.every)))
    for height in table.loc[table["noise-multiplier"] == 0, found.test_measure]:
        axes.axhline(height, label="best without noise", color=COLOURS[0], ls=":", lw=1.8)
    if LOCAL_SOLVED in table:
        height = table[LOCAL_SOLVED].iloc[0]
        axes.axhline(height, label="own rows alone, solved", color=COLOURS[2], ls="--", lw=1.8)
    if TRIVIAL in table:
        low, high = axes.get_ylim()
        height = table[TRIVIAL].iloc[0]
        label = f"without features: {height:.3g}"
        axes.axhline(height, label=label, color="0.7", ls=(0, (1, 3)), lw=1.8)
        axes.set_ylim(low, high)  # it may lie far outside
    _add_legend_and_notes(
        figure, axes, "Every method at the end of training, best setting of each", found
    )
    return figure, numbers


def _draw_against_epsilon(found: Summary, ends: pd.DataFrame) -> tuple[Figure, Axes, pd.DataFrame]:
    """What each way reports at the end against ε, with error bars; and the numbers.

    Local learning, which costs nothing, is a horizontal line.
    """
    points = _curve_points(found, ends, ["level"])
    points = points.assign(value=points["reported"], error=points["reported_error"])
    has_cost = points["level"].isna() | (points["level"] > 0)
    points = points[has_cost]
    looks = curve_styles(points["way"].unique().tolist())
    figure, axes = plt.subplots(figsize=ONE_PANEL, layout="constrained")
    for way, curve in points.groupby("way", sort=False):
        style: CurveStyle = {"label": curve["curve"].iloc[0], "lw": 1.8, **looks[str(way)]}
        if way == LOCAL:
            axes.axhline(curve["value"].iloc[0], **{**style, "marker": ""})
            continue
        errors = curve["error"].fillna(0.0)
        bars = {"yerr": errors, "capsize": 3} if errors.any() else {}
        axes.errorbar(curve["epsilon"], curve["value"], ms=5, **bars, **style)
    label = f"ε that a deployment would cost ({found.kind})"
    axes.set(xlabel=textwrap.fill(label, LETTERS), ylabel=name_of_measure(found.test_measure))
    measure_axis(axes, found.measure)
    log_scale(axes, x=True)
    return figure, axes, points


def _add_legend_and_notes(figure: Figure, named: Axes, title: str, found: Summary) -> None:
    handles, labels = named.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    figure.suptitle(title, fontsize=11)
    letters = int(LETTERS_PER_INCH * figure.get_figwidth())
    lines = [CAVEAT, f"{found.count_text()} {found.chosen_on()}"]
    text = "\n".join(textwrap.fill(line, letters) for line in lines)
    figure.supxlabel(text, fontsize=8, color="0.3")
