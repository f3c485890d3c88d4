"""Which αQ was best on real data: the measure at the end of sweeps against αQ, for each ε.

    python simulations/pictures/alphas.py OUT.png "TITLE=DIR[,DIR…]" …

A panel for each title; several sweeps of the same data are taken together.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that this runs as a file, too

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_ppsgd.lab.figures import COLOURS, STYLES
from flwr_ppsgd.lab.measures import measure_of, name_of_measure
from flwr_ppsgd.lab.outputs import read_rows
from flwr_ppsgd.lab.rows import PPSGD, SweepRow
from flwr_ppsgd.lab.summary import best_rows, frame_of, levels_of, means_over_seeds, rows_at_level


def final(directories: Iterable[Path]) -> tuple[str, pd.DataFrame]:
    """The measure, and for each αQ and noise level the best setting at the end."""
    rows: dict[str, SweepRow] = {}
    for directory in directories:
        rows.update({repr(row): row for row in read_rows(directory)})  # each row once
    last = max(row.round for row in rows.values())
    ended = [_rounded(row) for row in rows.values() if row.round == last and not row.diverged]
    measure = measure_of(ended[0].measures)
    every = means_over_seeds(frame_of(ended), measure)
    every = every[every["method"] == PPSGD]
    return measure, best_rows(every, measure, ["alpha-q", "level"])


def _rounded(row: SweepRow) -> SweepRow:
    """Noise that was calibrated for the same ε differs in the last digits from sweep to sweep."""
    z = row.point.noise_multiplier
    if z is None:
        return row
    return replace(row, point=replace(row.point, noise_multiplier=float(f"{z:.3g}")))


def panel(axes: Axes, title: str, directories: Iterable[Path]) -> None:
    """A curve for each ε."""
    measure, every = final(directories)
    values = sorted(every["alpha-q"].unique())
    for place, level in enumerate(levels_of(every)):
        here = rows_at_level(every, level).sort_values("alpha-q")
        spent = here["epsilon"].max()
        axes.errorbar(
            [values.index(a) for a in here["alpha-q"]],
            here["value"],
            here["error"].fillna(0.0),
            marker="o",
            ms=4,
            capsize=2,
            color=COLOURS[place % len(COLOURS)],
            ls=STYLES[place % len(STYLES)],
            label="no noise" if math.isinf(spent) else f"ε = {spent:.2g}",
        )
    axes.set_xticks(range(len(values)), ["∞" if math.isinf(a) else f"{a:g}" for a in values])
    axes.set(xlabel="αQ   (0 is local, ∞ is global learning)", ylabel=name_of_measure(measure))
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3, lw=0.5)
    axes.legend(fontsize=8)


def main(out: str, *panels: str) -> None:
    figure = Figure(figsize=(4.8 * len(panels), 3.8), layout="constrained")
    row, *_ = figure.subplots(1, len(panels), squeeze=False)
    for axes, text in zip(row, panels, strict=True):
        title, _, directories = text.rpartition("=")
        panel(axes, title, [Path(directory) for directory in directories.split(",")])
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
