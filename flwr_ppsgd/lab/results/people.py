"""Who gains by sharing: every user's personal model beside the one from own rows alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from flwr_ppsgd.lab.evaluation import OUTSIDE, SAME
from flwr_ppsgd.lab.measures import HIGHER_IS_BETTER, measure_of
from flwr_ppsgd.lab.results.plots import COLOURS, name_of_measure
from flwr_ppsgd.lab.rows import RunRow
from flwr_ppsgd.learner import LOCAL, SHARED
from flwr_ppsgd.statement import rounded_up

PICTURE = "users.png"
BETTER, WORSE, SAME_AS_ALONE = COLOURS[2], COLOURS[1], "0.75"


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
    void = math.isinf(last.epsilon)
    figure.suptitle(f"no guarantee; a deployment would cost {cost}" if void else cost)
    figure.supxlabel(OUTSIDE, fontsize=8, color="0.4")
    figure.savefig(directory / PICTURE, dpi=150)
    plt.close(figure)


def _draw_models(axes: Axes, main: str, measures: Mapping[str, float]) -> None:
    """A point each for the shared, the local and the personal model."""
    names = ["shared\nalone", "own rows\nalone", "personal"]
    values = [measures[SHARED + main], measures[LOCAL + main], measures[main]]
    colours = [COLOURS[1], COLOURS[4], COLOURS[0]]
    axes.scatter(range(3), values, color=colours, s=90, zorder=3)
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.3f}", (place, value), (0, 9), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(3), names)
    axes.set_xlim(-0.6, 2.6)
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    better = "higher" if main in HIGHER_IS_BETTER else "lower"
    axes.set_title(f"{name_of_measure(main)} ({better} is better)", fontsize=10)


def _draw_gains(axes: Axes, main: str, gains: "np.ndarray[Any, np.dtype[np.float64]]") -> None:
    """Each user with themselves: the personal model against the one from own rows alone."""
    ordered = np.sort(gains)
    colours = np.where(ordered > SAME, BETTER, np.where(ordered < -SAME, WORSE, SAME_AS_ALONE))
    axes.bar(np.arange(len(ordered)), ordered, width=1.0, color=colours.tolist())
    axes.axhline(0, color="0.3", lw=0.8)
    better = int((ordered > SAME).sum())
    worse = int((ordered < -SAME).sum())
    axes.set_title(
        f"gain over own rows alone, user by user: {better} better, {worse} worse, "
        f"{len(ordered) - better - worse} the same",
        fontsize=10,
    )
    axes.set_xlabel("users, sorted by gain")
    axes.set_ylabel(f"gain in {name_of_measure(main)}")
    axes.margins(x=0.01)
